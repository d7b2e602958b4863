"""The open write sessions of all managers, for people: whose they are, what they hold, and how long they may."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.pages import PAGE_KEYS, pages
from kvcm.cache.write_values import WriteSession
from kvcm.model.locations import BlockRecord
from kvcm.store.store import Table

__all__ = ["OpenSession", "OpenSessions"]

_SHORT = 8
_READ_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session; field names are those of the wire.

    Attributes:
        short_id: the first characters of its id: the whole id is the right to finish it.
        bytes: that its blocks take when each is written with all of its specs.
        begun_at_ms: 0 where that is not known.
        starter: name of the principal that began it, "" while nobody is asked who he is.
        is_overdue: nobody ended it though its deadline is over.
        is_ending: it was finished and is being carried out.
    """

    short_id: str
    instance_id: str
    instance_group: str
    blocks: int
    bytes: int
    begun_at_ms: int
    deadline_ms: int
    starter: str
    is_overdue: bool
    is_ending: bool


class OpenSessions:
    """Reads the stored sessions.

    Args:
        table: where they are stored.
        caches: what is kept for every instance.
        now: unix seconds.
    """

    def __init__(self, table: Table, caches: OpenCaches, now: Callable[[], float]) -> None:
        self._table = table
        self._caches = caches
        self._now = now

    async def look(self, wants: Callable[[InstanceCache], bool] = lambda _cache: True) -> list[OpenSession]:
        """Return the sessions that have blocks to write, ordered by deadline.

        Args:
            wants: of which instances.

        Raises:
            StorageIOError: the store cannot be asked, or a session cannot be read.
        """
        found: dict[int, list[WriteSession]] = defaultdict(list)
        documents = list((await self._table.all()).items())
        for page in pages(documents, _READ_AT_ONCE):
            for name, document in page:
                session = WriteSession.decoded(name, document)
                if session.keys:  # others only wait for their end
                    found[session.uid].append(session)
            await asyncio.sleep(0)
        told: list[OpenSession] = []
        for uid, sessions in found.items():
            cache = self._caches.by_uid(uid)
            if cache is not None and wants(cache):
                told += await self._told(cache, sessions)
        return sorted(told, key=lambda each: (each.deadline_ms, each.short_id))

    async def _told(self, cache: InstanceCache, sessions: Sequence[WriteSession]) -> list[OpenSession]:
        told: list[OpenSession] = []
        for page in pages(sessions, PAGE_KEYS):
            records = await cache.index.get([session.keys[0] for session in page])
            told += [
                replace(self._plain(cache, session), begun_at_ms=_begun_at_ms(session, record))
                for session, record in zip(page, records, strict=True)
            ]
            await asyncio.sleep(0)
        return told

    def _plain(self, cache: InstanceCache, session: WriteSession) -> OpenSession:
        is_ending = session.decision is not None
        return OpenSession(
            session.id[:_SHORT],
            cache.instance.instance_id,
            cache.instance.instance_group_name,
            len(session.keys),
            len(session.keys) * cache.instance.block_bytes,
            0,
            int(session.deadline * 1000),
            session.starter,
            not is_ending and session.deadline <= self._now(),
            is_ending,
        )


def _begun_at_ms(session: WriteSession, first: BlockRecord | None) -> int:
    """Return when a session began: its first block says so."""
    locations = first.locations if first is not None else ()
    return next((int(each.written_at * 1000) for each in locations if each.id == session.location_id), 0)
