"""How the blocks of a session follow its decision: the second step of its end (endings.py).

What is still writing for this very session becomes serving or deleting. A removed block is never revived. Doing this
twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import cast

from kvcm.cache.checksums import checked
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import PAGE_KEYS
from kvcm.cache.write_values import FinishedWrite, WriteSession
from kvcm.index.backends.alike import Alike
from kvcm.index.backends.backend import Change
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.telemetry.stages import staged

__all__ = ["changed", "settle"]

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_record = cast("Callable[[type[BlockRecord], tuple[object, ...]], BlockRecord]", tuple.__new__)
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)

_Told = Mapping[int, Mapping[str, int]]
"""Checksums by name of the part, by key."""


@staged("store")
async def settle(
    cache: InstanceCache, session: WriteSession, now: float, note: Callable[[Sequence[Change]], None]
) -> FinishedWrite:
    """Let the blocks of a session follow its decision.

    Args:
        cache: the instance.
        session: with its decision.
        now: unix time.
        note: told of changes as they are stored; not of blocks that serve from then on.
    """
    assert session.decision is not None
    ends = _Ends(session, now)
    served = 0
    most = min(cache.page_keys, max(1, PAGE_KEYS // max(1, len(session.checksums.names))))
    # The tail first: an order of eviction that goes by time then finds the tail of a chain before its head.
    for end in range(len(session.keys), 0, -most):
        begin = max(0, end - most)
        ends.told = session.checksums.by_key(session.keys, begin, end)
        keys = session.keys[begin:end][::-1]
        succeeded = list(compress(keys, session.decision[begin:end][::-1]))
        ends.succeeded = set(succeeded)
        if succeeded and cache.index.serve(succeeded, ends.of_alike):
            served += len(succeeded)
            keys = tuple([key for key in keys if key not in ends.succeeded])
        if keys:
            changes = await cache.index.read_modify_write(keys, ends.of_one)
            served += sum([key in ends.succeeded and _serves(record, session) for key, _, record, _ in changes])
            note(changes)
        if len(session.keys) > most:
            await asyncio.sleep(0)
    wanted = sum(session.decision)
    return FinishedWrite(served, len(session.keys) - wanted, wanted - served)


class _Ends:
    """How the locations of one session end, for the blocks of a page.

    Attributes:
        told: checksums of blocks that have some.
        succeeded: blocks that are to serve.
    """

    def __init__(self, session: WriteSession, now: float) -> None:
        self._session = session
        self._now = now
        self.told: _Told = {}
        self.succeeded: set[int] = set()

    def of_alike(self, blocks: Alike) -> Alike | None:
        """Return the blocks as they serve; None where they are not the session's."""
        keys, location, chunks = blocks
        if location.session_id != self._session.id:
            return None
        if self.told:
            pairs = zip(keys, chunks, strict=True)
            chunks = [checked(chunk, location.spec_names, self.told.get(key, {})) for key, chunk in pairs]
        return Alike(keys, self._serving(location, location.chunk), chunks)

    def of_one(self, key: int, old: BlockRecord | None) -> BlockRecord | None:
        """Return what becomes of any record."""
        to_serving = key in self.succeeded
        if to_serving and old is not None and len(old[2]) == 1:  # nearly every block
            location = old[2][0]
            if location[8] == self._session.id and location[3] is LocationStatus.WRITING:
                return _new_record(BlockRecord, (old[0], old[1], (self._served(key, location),)))
        return changed(old, lambda location: self._of_location(key, location, to_serving=to_serving))

    def _of_location(self, key: int, location: Location, *, to_serving: bool) -> Location:
        if location.session_id != self._session.id or location.status is LocationStatus.SERVING:
            return location
        if to_serving and location.status is LocationStatus.WRITING:
            return self._served(key, location)
        if location.status is LocationStatus.DELETING and location.deadline <= self._now:
            return location  # settled before, or about to go
        # Nobody was ever given it to read: its bytes can go at once. Its writer may come back nevertheless, so it keeps
        # the session's id to the end: by that it is told from what served (`Location.has_served`).
        return location._replace(status=LocationStatus.DELETING, deadline=self._now)

    def _served(self, key: int, location: Location) -> Location:
        told = self.told.get(key)
        return self._serving(location, checked(location[5], location[4], told) if told else location[5])

    def _serving(self, location: Location, chunk: bytes) -> Location:
        ends = (*location[6:8], "", self._session.keep_until, self._session.priority, location[11])
        # `_replace` would take five times as long.
        return _new_location(Location, (*location[:3], LocationStatus.SERVING, location[4], chunk, *ends))


def changed(old: BlockRecord | None, change: Callable[[Location], Location]) -> BlockRecord | None:
    """Return a record whose locations were changed, the same object where none was."""
    if old is None:
        return None
    locations = tuple([change(location) for location in old[2]])
    return old if locations == old[2] else _new_record(BlockRecord, (old[0], old[1], locations))


def _serves(record: BlockRecord | None, session: WriteSession) -> bool:
    """Whether the session's location serves now; it may have since a first finish that was cut off."""
    for location in record[2] if record is not None else ():
        if location[0] == session.location_id and location[3] is LocationStatus.SERVING:
            return True
    return False
