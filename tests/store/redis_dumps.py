"""Copies of what one deployment has on a Redis, to take its store back in time, or to put another's in its place."""

from __future__ import annotations

from collections.abc import Mapping

import redis

Dump = Mapping[bytes, bytes]
"""Serialized values by key."""


def dumped(admin: redis.Redis, name: str) -> Dump:
    """Return all that the deployment of that name has."""
    keys = list(admin.scan_iter(f"{name}:*", count=1000))
    values = {key: admin.dump(key) for key in keys}
    return {key: value for key, value in values.items() if value is not None}


def contents(admin: redis.Redis, name: str) -> Mapping[bytes, object]:
    """Return the values of all that a deployment has, which a dump orders by chance. What the managers that run hold
    of themselves is left out."""
    read = {
        b"string": admin.get,
        b"hash": admin.hgetall,
        b"zset": lambda key: admin.zrange(key, 0, -1, withscores=True),
    }
    keys = [key for key in admin.scan_iter(f"{name}:*", count=1000) if not _is_of_managers(key, name)]
    return {key: read[admin.type(key)](key) for key in sorted(keys)}


def _is_of_managers(key: bytes, name: str) -> bool:
    """Whether leases, nodes or vitals of managers lie there."""
    begins = (
        f"{name}:l",
        f"{name}:f",
        *(f"{name}:{kind}{{{table}." for kind in "tdv" for table in ("nodes", "vitals")),
    )
    return key.decode(errors="replace").startswith(begins)


def put_in_place(admin: redis.Redis, name: str, dump: Dump, made_by: str = "") -> None:
    """Replace all that a deployment has by a dump, which may be of another one (`made_by`), at once for all readers.
    Leases and nodes of managers stay as they are: those that run hold them."""
    begin = (made_by or name).encode()
    with admin.pipeline(transaction=True) as pipe:
        for key in list(admin.scan_iter(f"{name}:*", count=1000)):
            if not _is_of_managers(key, name):
                pipe.delete(key)
        for key, value in dump.items():
            own = name.encode() + key.removeprefix(begin)
            if not _is_of_managers(own, name):
                pipe.restore(own, 0, value, replace=True)
        pipe.execute()
