"""Sorted sets by due time, one per part of a table or of an index.

A manager that acts when something is due looks many times a second, and mostly nothing is. So it remembers when the
earliest is due, and asks again when a part changed or that time has come.

A part that changes all the time must not notify every manager each time. So it has a flag: every change of the part
sets it, a manager clears it before it reads the part, and only a flag that comes or goes is notified of. As long as
nothing was notified since this manager cleared it, nothing changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import merge
from itertools import islice

from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.tracking import Revisions
from kvcm.store.store import Revision

__all__ = ["DueSets"]


class DueSets:
    """The due members of some parts.

    Args:
        client: of the servers.
        keys: of the sorted sets.
        followed: what changes with the parts, their flags, too: the changes of keys, and the owner of those.
        flags: keys of the parts' flags, empty for parts of which every change is notified.
    """

    def __init__(
        self,
        client: RedisClient,
        keys: Sequence[bytes],
        followed: Sequence[tuple[Revisions, bytes]],
        flags: Sequence[bytes] = (),
    ) -> None:
        self._client = client
        self._keys = keys
        self._followed = followed
        self._flags = flags
        self._cleared: Revision | None = None  # with which every change is notified of
        self._known: tuple[Revision | None, float] = None, 0.0  # the earliest due time of a revision

    @property
    def revision(self) -> Revision | None:
        """Another one after every change; None where only the store knows."""
        revision = self._notified
        return revision if revision == self._cleared or not self._flags else None

    @property
    def _notified(self) -> Revision | None:
        revisions = [changes.of(owner) for changes, owner in self._followed]
        known = [number for each in revisions if each is not None for number in each]
        return None if None in revisions else tuple(known)

    @property
    def earliest(self) -> float:
        """Unix seconds before which nothing is due, as far as this manager was notified of changes; 0 where only the
        store knows."""
        revision, earliest = self._known
        return earliest if revision is not None and revision == self.revision else 0.0

    async def expect_changes(self) -> Revision | None:
        """Have the changes from now on notified of, and return the revision of the next read."""
        revision = self._notified
        if self._flags and revision is not None and revision != self._cleared:
            await self._client.execute([(b"DEL", flag) for flag in self._flags])
            self._cleared = revision
        return revision

    async def until(self, now: float, most: int) -> list[bytes]:
        """Return the members that are due at unix time `now`, the earliest first, at most so many."""
        revision = await self.expect_changes()
        firsts = await self._client.execute([(b"ZRANGE", key, 0, 0, b"WITHSCORES") for key in self._keys])
        earliest = {key: float(first[1]) for key, first in zip(self._keys, firsts, strict=True) if first}
        self._known = revision, min(earliest.values(), default=math.inf)
        limit = (b"LIMIT", 0, most, b"WITHSCORES")
        parts = await self._client.execute(
            [(b"ZRANGEBYSCORE", key, b"-inf", repr(float(now)), *limit) for key, at in earliest.items() if at <= now]
        )
        due = merge(*(zip(map(float, part[1::2]), part[::2], strict=True) for part in parts))
        return [member for _, member in islice(due, most)]
