"""The lease in Redis: a key that expires, and a counter that fences off earlier holders.

The server's clock alone decides when it ends. A server that loses its last second (a failover, `appendfsync everysec`)
can forget a lease, so two managers may lead for a moment; the duties are compare-and-set like everything else.
"""

from __future__ import annotations

from kvcm.store.redis.client import RedisClient, Script, ScriptCall
from kvcm.store.store import LeaseState

__all__ = ["RedisLease"]

_HOLD = Script(
    """
local holder = redis.call('GET', KEYS[1])
if not holder then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return {ARGV[1], redis.call('INCR', KEYS[2])}
end
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return {holder, tonumber(redis.call('GET', KEYS[2]) or 0)}
""",
    allow_oom=True,  # duties need a leader, and it is they that make room
)
_RELEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 0
""")
_LOOK = Script("""
return {redis.call('GET', KEYS[1]) or '', tonumber(redis.call('GET', KEYS[2]) or 0)}
""")


class RedisLease:
    """One lease.

    Args:
        client: of the servers.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._keys = (f"{client.prefix}:l{{leader}}".encode(), f"{client.prefix}:f{{leader}}".encode())

    async def hold(self, node_id: str, seconds: float) -> LeaseState:
        args = (node_id.encode(), max(1, int(seconds * 1000)))
        ((holder, token),) = await self._client.run([ScriptCall(_HOLD, self._keys, args)])
        return LeaseState(holder.decode(), token)

    async def look(self) -> LeaseState:
        ((holder, token),) = await self._client.run([ScriptCall(_LOOK, self._keys)])
        return LeaseState(holder.decode(), token)

    async def release(self, node_id: str) -> None:
        await self._client.run([ScriptCall(_RELEASE, self._keys, (node_id.encode(),))])
