"""Messages of the servers, which keep what managers know of the store coherent.

One connection per master asks for `CLIENT TRACKING ON BCAST`, redirected to itself and subscribed to the channel of
invalidations: those then are ordinary messages that arrive by themselves. It is subscribed to a channel of notices,
too, which scripts publish: in a cluster every master passes on those of the others, so that a notice comes once per
master. Rejected: tracking on the connections that read, since there an invalidation waits for the next command; RESP3
pushes, which redis-py hands out only through attributes of its parser.

1. `on_keys` is called for every change of a key below the prefixes while `is_live`, by whomever it was made, and
   `on_notice` for every notice.
2. `on_reset` is called whenever changes may have been missed: a server forgot everything, a connection was lost, the
   masters are others. Coming back it is called before `is_live` turns true.
3. A network that is cut off is noticed: every connection answers a ping twice a second.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import structlog
from redis.asyncio.connection import Connection
from redis.exceptions import RedisError, ResponseError

from kvcm.model.errors import StorageIOError
from kvcm.model.tasks import end_tasks
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import Address
from kvcm.store.store import Revision

__all__ = ["Invalidations", "Revisions", "owner_of"]

_CHANNEL = b"__redis__:invalidate"
_PING_SECONDS = 0.5
_PONG_SECONDS = 0.5
_AGAIN_SECONDS = 0.1


# What a manager read stays true until an invalidation arrives. So it asks nothing twice of what did not change: empty
# queues, sums, marks of other managers. A message is in flight for milliseconds, and a connection that is cut off is
# noticed within about a second: what must not be older than that is read from the store (rejected: to poll a counter
# per part, which in a cluster is one command each).

_MOST_OWNERS = 1 << 17  # instances that are gone stay counted until a reset


class Revisions:
    """Counts the changes of keys by table and instance, as the invalidations report them.

    What was read is current as long as the revision is the one from before the read.

    Attributes:
        is_live: whether every change is reported; never without invalidations.
    """

    def __init__(self) -> None:
        self._changes: Counter[bytes] = Counter()  # by owner
        self._resets = 0
        self.is_live: Callable[[], bool] = lambda: False

    def of(self, owner: bytes) -> Revision | None:
        """Return the revision of the keys of an owner, as of `owner_of`; None while changes may be missed."""
        return (self._resets, self._changes[owner]) if self.is_live() else None

    def record(self, names: Iterable[bytes]) -> None:
        """Count changes of these keys."""
        shards = {name.partition(b"}")[0] for name in names}  # many blocks of few
        self._changes.update({owner_of(shard) for shard in shards})
        if len(self._changes) > _MOST_OWNERS:
            self.reset()

    def reset(self) -> None:
        """Count a change of every key: some may have been missed."""
        self._changes.clear()
        self._resets += 1


def owner_of(name: bytes) -> bytes:
    """Return what the names of all keys of one kind begin with that one table or instance has, in whatever part."""
    kind, brace, tag = name.partition(b"{")
    return kind + brace + tag.partition(b"}")[0].partition(b".")[0]


class Invalidations:
    """Follows the changes of keys on all masters.

    Args:
        client: of the servers.
        prefixes: what the keys of interest begin with; none is the beginning of another. Without any, only notices
            arrive.
        on_keys: receives changed keys; must not raise.
        on_reset: called when any key may have changed; must not raise.
        channel: of the notices; without one there are none.
        on_notice: receives notices; must not raise.
    """

    def __init__(
        self,
        client: RedisClient,
        prefixes: Sequence[bytes],
        on_keys: Callable[[Sequence[bytes]], None],
        on_reset: Callable[[], None],
        *,
        channel: bytes = b"",
        on_notice: Callable[[bytes], None] = lambda _notice: None,
    ) -> None:
        self._client = client
        self._prefixes = prefixes
        self._on_keys = on_keys
        self._on_reset = on_reset
        self._channel = channel
        self._on_notice = on_notice
        self._is_live = False

    @property
    def is_live(self) -> bool:
        """Whether every change since the last reset was received, or is in flight."""
        return self._is_live

    async def run(self) -> None:
        """Follow for ever, until cancelled."""
        while True:
            reason = await self._track()
            structlog.get_logger("kvcm").warning("redis_invalidations_interrupted", reason=reason)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def run_while(self, condition: Callable[[], bool], seconds: float) -> None:
        """Follow while a condition holds, which is asked so often; for ever, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if not condition():
                continue
            following = asyncio.create_task(self.run())
            try:
                while condition() and not following.done():
                    await asyncio.wait([following], timeout=seconds)
            finally:
                await end_tasks([following])
            if not following.cancelled():
                following.result()  # it ends by an error only

    async def _track(self) -> str:
        """Follow all masters until something happens to one of them, and return what."""
        followers: list[_MasterConnection] = []
        try:
            masters = await self._client.masters()
            for address in masters:
                followers.append(_MasterConnection(address, await self._client.connect(address), self._on_message))
                await followers[-1].subscribe(self._prefixes, self._channel)
            self._on_reset()
            self._is_live = True
            duties = [duty for follower in followers for duty in (follower.listen(), follower.ping())]
            return await self._first_end([*duties, self._watch(masters)])
        except StorageIOError as error:
            return str(error)
        finally:
            self._lose()
            for follower in followers:
                await follower.close()

    async def _first_end(self, duties: Sequence[Coroutine[Any, Any, str]]) -> str:
        tasks = [asyncio.create_task(duty) for duty in duties]
        for task in tasks:
            task.add_done_callback(lambda _: self._lose())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            await end_tasks(tasks)

    async def _watch(self, masters: list[Address]) -> str:
        while True:
            await asyncio.sleep(_PING_SECONDS)
            try:
                now = await self._client.masters()
            except StorageIOError:
                continue  # no change is known, and the connections to the masters report their own loss
            if now != masters:
                return f"the masters are {', '.join(map(str, now))} now"

    def _on_message(self, channel: bytes, content: Any) -> None:
        if channel == self._channel:
            self._on_notice(content)
        elif content is None:
            self._on_reset()
        else:
            self._on_keys(content)

    def _lose(self) -> None:
        if self._is_live:
            self._is_live = False
            self._on_reset()


class _MasterConnection:
    """The connection to one master."""

    def __init__(self, address: Address, connection: Connection, message: Callable[[bytes, Any], None]) -> None:
        self._address = address
        self._connection = connection
        self._on_message = message
        self._ponged = asyncio.Event()

    async def subscribe(self, prefixes: Sequence[bytes], channel: bytes) -> None:
        """Ask for invalidations and notices."""
        try:
            async with asyncio.timeout(_PONG_SECONDS):
                client_id = await self._call(b"CLIENT", b"ID")
                of = [word for prefix in prefixes for word in (b"PREFIX", prefix)]
                if of:
                    await self._call(b"CLIENT", b"TRACKING", b"ON", b"BCAST", *of, b"REDIRECT", client_id)
                    await self._call(b"SUBSCRIBE", _CHANNEL)
                if channel:
                    await self._call(b"SUBSCRIBE", channel)
        except ResponseError as error:
            needed = " and ".join(f"&{each.decode()}" for each in (_CHANNEL, channel) if each)
            raise StorageIOError(
                f"redis {self._address} does not notify of changes: {error}; its user needs the channels {needed}"
            ) from error
        except (OSError, RedisError) as error:
            raise StorageIOError(f"redis {self._address}: {str(error) or 'no answer'}; try again") from error

    async def listen(self) -> str:
        """Hand on invalidations until the connection is lost."""
        try:
            while True:
                answer = await self._connection.read_response(timeout=math.inf)
                if answer[0] == b"message":
                    self._on_message(answer[1], answer[2])
                elif answer[0] == b"pong":
                    self._ponged.set()
        except (OSError, RedisError) as error:
            return f"{self._address}: {error}"

    async def ping(self) -> str:
        """Ask for a sign of life until there is none."""
        try:
            while True:
                self._ponged.clear()
                async with asyncio.timeout(_PONG_SECONDS):
                    await self._connection.send_command(b"PING", check_health=False)
                    await self._ponged.wait()
                await asyncio.sleep(_PING_SECONDS)
        except TimeoutError:
            return f"{self._address}: no sign of life for {_PONG_SECONDS:g} s"
        except (OSError, RedisError) as error:
            return f"{self._address}: {error}"

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.disconnect(nowait=True)

    async def _call(self, *command: bytes | int) -> Any:
        await self._connection.send_command(*command, check_health=False)
        return await self._connection.read_response()
