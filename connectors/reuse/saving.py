"""Saves blocks from begin to end in the thread that calls: leave to write, bytes, publication."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connectors.results import WriteGrant
from connectors.reuse.sessions import WriteSessions
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import CancelToken, TransferEngine, TransferItem, TransferResult
from kvcm.model.keys import BlockKey

__all__ = ["SavedBlocks", "save_blocks"]

MemoryOf = Callable[[int, str], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """What became of a save.

    Attributes:
        stored: one flag per key: the block is stored, now or before, or another writer is at it. All false when the
            manager gave no leave, or did not confirm the publication.
        saved: blocks that were saved now.
        saved_bytes: of them.
        reason: why not all blocks are stored, "" when they are.
    """

    stored: tuple[bool, ...]
    saved: int = 0
    saved_bytes: int = 0
    reason: str = ""


def save_blocks(
    sessions: WriteSessions,
    engine: TransferEngine,
    keys: Sequence[BlockKey],
    parent: BlockKey | None,
    memory_of: MemoryOf,
    deadline_seconds: float,
    *,
    part_groups: Sequence[str] = (),
    cancel: CancelToken | None = None,
    statistics: ReuseStatistics | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SavedBlocks:
    """Save the blocks that the manager does not have, and publish them. The session ends on every path.

    Args:
        sessions: where the write session is begun and ended.
        engine: moves the bytes.
        keys: consecutive block keys.
        parent: key before the first one, None when they begin a chain.
        memory_of: returns the memory of a part of a block, by the block's position in `keys` and the part's name; it
            must stay as it is until the call returns.
        deadline_seconds: for the bytes; what is late is not published.
        part_groups: none, or per key the name of the group of parts to write.
        cancel: ends the call as its deadline does.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """
    statistics = statistics or ReuseStatistics()
    begun = clock()
    grant = sessions.begin(keys, parent, part_groups)
    if grant is None:
        statistics.add(dropped_save_blocks=len(keys))
        return SavedBlocks((False,) * len(keys), reason="no leave to write")
    statistics.add(known_blocks=sum(grant.mask))
    if not grant.locations:
        return SavedBlocks((True,) * len(keys))
    written: list[bool] = []
    checksums: list[Mapping[str, int]] = []
    try:
        written, checksums, reason = _write(engine, grant, memory_of, deadline_seconds, cancel)
    finally:
        is_published = _end(sessions, grant, written, checksums, statistics)
    statistics.observe("save_seconds", clock() - begun)
    return _saved(grant, written, is_published, reason, statistics)


def _write(
    engine: TransferEngine,
    grant: WriteGrant,
    memory_of: MemoryOf,
    deadline_seconds: float,
    cancel: CancelToken | None,
) -> tuple[list[bool], list[Mapping[str, int]], str]:
    """Return per location whether it was written and its checksums, and the first reason for one that was not."""
    wanted = [index for index, is_masked in enumerate(grant.mask) if not is_masked]
    places = [
        (number, name, TransferItem(uri, memory_of(index, name)))
        for number, (index, location) in enumerate(zip(wanted, grant.locations, strict=True))
        for name, uri in location.uris.items()
    ]
    results = engine.save([item for _, _, item in places], deadline_seconds, cancel)
    outcomes: list[dict[str, TransferResult]] = [{} for _ in grant.locations]
    for (number, name, _), result in zip(places, results, strict=True):
        outcomes[number][name] = result
    written = [all(result.ok for result in parts.values()) for parts in outcomes]
    checksums = [{name: result.checksum for name, result in parts.items() if result.checksum} for parts in outcomes]
    return written, list(checksums), next((result.reason for result in results if not result.ok), "")


def _end(
    sessions: WriteSessions,
    grant: WriteGrant,
    written: Sequence[bool],
    checksums: Sequence[Mapping[str, int]],
    statistics: ReuseStatistics,
) -> bool:
    if not any(written):
        sessions.abort(grant.session_id)
        statistics.add(sessions_aborted=1)
        return False
    is_published = sessions.finish(grant.session_id, written, checksums)
    statistics.add(sessions_finished=int(is_published), sessions_aborted=int(not is_published))
    return is_published


def _saved(
    grant: WriteGrant, written: Sequence[bool], is_published: bool, reason: str, statistics: ReuseStatistics
) -> SavedBlocks:
    if not is_published and not reason:
        reason = "the write session was not confirmed"
    flags = iter(written)
    stored = [is_masked or (next(flags) and is_published) for is_masked in grant.mask]
    if grant.refusal:  # of what is masked behind the last block to write, something does not fit
        end = len(grant.mask) - grant.mask[::-1].index(False)
        stored[end:] = [False] * (len(stored) - end)
    sizes = [sum(uri.size for uri in location.uris.values()) for location in grant.locations]
    saved = sum(written) if is_published else 0
    saved_bytes = sum(size for size, is_written in zip(sizes, written, strict=True) if is_written) if saved else 0
    statistics.add(saved_blocks=saved, saved_bytes=saved_bytes, failed_save_blocks=len(written) - saved)
    return SavedBlocks(tuple(stored), saved, saved_bytes, reason or grant.refusal)
