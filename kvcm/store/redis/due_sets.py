"""Sorted sets by due time, one per part of a table or of an index.

A manager that acts on what is due looks many times a second, and mostly nothing is. So it remembers when the earliest
is due, and asks again when a part changed or that time has come.
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
    """What is due in some parts.

    Args:
        client: of the servers.
        keys: of the sorted sets.
        revisions: of keys that change with them.
        owner: of those keys, as of `owner_of`.
    """

    def __init__(self, client: RedisClient, keys: Sequence[bytes], revisions: Revisions, owner: bytes) -> None:
        self._client = client
        self._keys = keys
        self._revisions = revisions
        self._owner = owner
        self._known: tuple[Revision | None, float] = None, 0.0  # the earliest due time of a revision

    @property
    def revision(self) -> Revision | None:
        """As of `Revisions.of`."""
        return self._revisions.of(self._owner)

    @property
    def earliest(self) -> float:
        """Unix seconds before which nothing is due, as far as this manager was notified of changes; 0 where only the
        store knows."""
        revision, earliest = self._known
        return earliest if revision is not None and revision == self.revision else 0.0

    async def until(self, now: float, most: int) -> list[bytes]:
        """Return the members that are due at unix time `now`, the earliest first, at most so many."""
        revision = self.revision
        firsts = await self._client.execute([(b"ZRANGE", key, 0, 0, b"WITHSCORES") for key in self._keys])
        earliest = {key: float(first[1]) for key, first in zip(self._keys, firsts, strict=True) if first}
        self._known = revision, min(earliest.values(), default=math.inf)
        limit = (b"LIMIT", 0, most, b"WITHSCORES")
        parts = await self._client.execute(
            [(b"ZRANGEBYSCORE", key, b"-inf", repr(float(now)), *limit) for key, at in earliest.items() if at <= now]
        )
        due = merge(*(zip(map(float, part[1::2]), part[::2], strict=True) for part in parts))
        return [member for _, member in islice(due, most)]
