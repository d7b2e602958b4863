"""Looks up prefixes of prompts and loads them into the cache, up to a block from whose end the model can continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from kvcm.connectors.layout.tensors import StagingBuffers, iovec
from kvcm.connectors.results import Location, MatchMode, MatchResult, Outcome
from kvcm.connectors.reuse.registration import ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.mover import moved
from kvcm.connectors.transfer.worker_pool import PRIORITY_SAVE, WorkerPool
from kvcm.connectors.transformers.cache import BlockMemory, CallCache, Row
from kvcm.connectors.transformers.model_kv import STATE, ModelParts, PartOfBlock, empty_state
from kvcm.connectors.transformers.settings import ReuseSettings
from kvcm.model.errors import ErrorCode
from kvcm.model.keys import BlockKey

__all__ = ["LoadedPrefix", "PrefixLoad", "PrefixLookup", "RowPrefix"]


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """What became of a load.

    Attributes:
        blocks: leading blocks that can be gone on from: everything that is needed for it is there.
        state: at the end of the last of them, as stored bytes; None when the model has none.
        bytes_loaded: bytes read, also of parts that cannot be used.
        lost: parts whose bytes are gone although their storage is there.
        corrupt: parts whose bytes are not those that were saved.
        refused: the engine does not know a storage or refuses an address.
        is_tainted: memory behind the leading blocks may still change and must not be used again.
        reason: why not all blocks were loaded, "" when they were.
    """

    blocks: int = 0
    state: torch.Tensor | None = None
    bytes_loaded: int = 0
    lost: tuple[PartOfBlock, ...] = ()
    corrupt: tuple[PartOfBlock, ...] = ()
    refused: bool = False
    is_tainted: bool = False
    reason: str = ""


class PrefixLoad:
    """Loads one prefix. What fails makes the prefix shorter, and then perhaps other parts are needed.

    Args:
        engine: moves the bytes.
        staging: per name of a part, for layers whose memory cannot be given to a storage.
        parts: of a block.
        memory: of the row.
        locations: of the blocks, in order; None where nothing is known.
        present_blocks: leading blocks whose KV is in memory already.
        checksums: whether parts must have the checksums of their locations.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        engine: TransferEngine,
        staging: Mapping[str, StagingBuffers],
        parts: ModelParts,
        memory: BlockMemory,
        locations: Sequence[Location | None],
        *,
        present_blocks: int = 0,
        checksums: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._staging = staging
        self._parts = parts
        self._memory = memory
        self._locations = locations
        self._checksums = checksums
        self._clock = clock
        self._results: dict[PartOfBlock, TransferResult] = {
            (part.name, block): moved(0) for part in parts.kv for block in range(present_blocks)
        }
        self._state: torch.Tensor | None = None

    def run(self, deadline_seconds: float) -> LoadedPrefix:
        """Load the parts that the longest prefix needs, and return the result."""
        deadline = self._clock() + deadline_seconds
        while True:
            blocks = self._parts.usable_blocks(self._may_be_used, len(self._locations))
            missing = [part for part in self._parts.needed(blocks) if part not in self._results]
            if not missing:
                break
            for name in dict.fromkeys(name for name, _ in missing):
                self._load(name, [block for part, block in missing if part == name], deadline)
        return self._summary(blocks)

    def _may_be_used(self, name: str, block: int) -> bool:
        location, result = self._locations[block], self._results.get((name, block))
        return location is not None and name in location.uris and (result is None or result.ok)

    def _load(self, name: str, blocks: Sequence[int], deadline: float) -> None:
        """Load a part of some blocks, until one fails."""
        if name == STATE:
            self._load_state(blocks[0], deadline)
            return
        staging, done = self._staging[name], 0
        while done < len(blocks):
            hosts = staging.host_blocks(self._memory.pieces(name, block) for block in blocks[done:])
            batch = blocks[done : done + len(hosts)]
            items = [self._item(name, block, host.buffers) for block, host in zip(batch, hosts, strict=True)]
            results = self._move(name, batch, items, deadline)
            for host, result in zip(hosts, results, strict=True):
                if result.ok:
                    host.scatter()
            if any(result.failure is Failure.PENDING for result in results):
                staging.discard()
            if not all(result.ok for result in results):
                return
            done += len(hosts)

    def _load_state(self, block: int, deadline: float) -> None:
        assert self._parts.state is not None
        memory = empty_state(self._parts.state)
        item = self._item(STATE, block, iovec([memory]))
        (result,) = self._move(STATE, [block], [item], deadline)
        self._state = memory if result.ok else None

    def _item(self, name: str, block: int, buffers: Sequence[memoryview]) -> TransferItem:
        location = self._locations[block]
        assert location is not None  # `_may_be_used` has seen it
        checksum = location.checksums.get(name, 0) if self._checksums else 0
        return TransferItem(location.uris[name], buffers, checksum=checksum)

    def _move(
        self, name: str, blocks: Sequence[int], items: Sequence[TransferItem], deadline: float
    ) -> list[TransferResult]:
        results = self._engine.load(items, deadline - self._clock())
        self._results.update({(name, block): result for block, result in zip(blocks, results, strict=True)})
        return results

    def _summary(self, blocks: int) -> LoadedPrefix:
        failed = {part: result for part, result in self._results.items() if not result.ok}
        by_block = sorted(failed, key=lambda part: part[1])
        kinds = {result.failure for result in failed.values()}
        is_tainted = any(result.failure is Failure.PENDING for (name, _), result in failed.items() if name != STATE)
        return LoadedPrefix(
            blocks=blocks,
            state=self._state if blocks else None,
            bytes_loaded=sum(result.moved_bytes for result in self._results.values()),
            lost=tuple(part for part in by_block if failed[part].failure is Failure.LOST),
            corrupt=tuple(part for part in by_block if failed[part].failure is Failure.CORRUPT),
            refused=Failure.REFUSED in kinds,
            is_tainted=is_tainted,
            reason=_reason(by_block[0], failed[by_block[0]]) if failed else "",
        )


def _reason(part: PartOfBlock, result: TransferResult) -> str:
    name, block = part
    return f"block {block}: {f'{name}: ' if name == STATE else ''}{result.reason}"


# ---- lookup and load of the longest prefix of each row ----
#
# With full attention in some layer a prefix match is used: the parts of its blocks show from which block the model can
# continue, and whether a longer prefix is stored. When all layers have a sliding window, the blocks before the last
# ones are not needed, and may be evicted: then the right-most run that fills the window is matched.

# The manager refuses longer read leases.
_MAX_LEASE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RowPrefix:
    """The result of a row's lookup and load, before the prefill.

    Attributes:
        keys: of the prompt's full blocks.
        local_blocks: whose KV was in memory already.
        locations: of its first blocks; None for misses.
        matched_blocks: from whose end the model can continue.
        known_blocks: leading blocks that are stored.
        loaded: parts that were loaded.
        lease_id: keeps the locations readable.
        reason: why there is no answer, "" when the manager answered.
    """

    keys: Sequence[BlockKey]
    local_blocks: int = 0
    locations: Sequence[Location | None] = ()
    matched_blocks: int = 0
    known_blocks: int = 0
    loaded: LoadedPrefix = field(default_factory=LoadedPrefix)
    lease_id: str = ""
    reason: str = ""

    @property
    def blocks(self) -> int:
        """Leading blocks that need not be computed."""
        return max(self.local_blocks, self.loaded.blocks)

    @property
    def stored_blocks(self) -> int:
        """Those of them that the manager knows."""
        return min(self.blocks, self.matched_blocks)

    @property
    def tainted_blocks(self) -> tuple[int, int]:
        """First block and end of those that a storage may still write to."""
        return (self.blocks, self.matched_blocks) if self.loaded.is_tainted else (0, 0)


class PrefixLookup:
    """Looks prompts up and loads their prefixes.

    Args:
        link: to the manager.
        parts: of a block.
        settings: deadlines.
        background: reports to the manager run there: the first token does not wait for them.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        link: ManagerLink,
        parts: ModelParts,
        settings: ReuseSettings,
        background: WorkerPool,
        statistics: ReuseStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._parts = parts
        self._settings = settings
        self._background = background
        self._statistics = statistics
        self._clock = clock
        # The thread that saves has staging buffers of its own.
        self._staging = {part.name: StagingBuffers(part.layout, settings.staging_blocks) for part in parts.kv}

    def run(
        self, batch: CallCache, keys: Sequence[Sequence[BlockKey]], local: Sequence[int]
    ) -> tuple[list[RowPrefix], TransferEngine | None]:
        """Load the longest known prefixes, of each row all but the last token at most.

        Args:
            batch: where to load to.
            keys: of the full blocks of each row.
            local: leading blocks of each row that are in the batch already.

        Returns:
            The result of each row, and the transfer engine to publish with: None when no manager was there, since none
            will accept writes. One that is late does.
        """
        rows = batch.rows
        engine = self._link.engine(self._settings.call_seconds)
        if engine is None:
            reason = f"not registered: {self._link.registration.message}"
            return [RowPrefix(*row, reason=reason) for row in zip(keys, local, strict=True)], None
        # A lease begins in the manager, the load when all answers are here. Nothing is begun after the first lease: the
        # slots of blocks that were deleted since then hold zeros.
        lease_seconds = self._settings.load_seconds + len(rows) * self._settings.call_seconds
        lease_seconds = min(lease_seconds, _MAX_LEASE_SECONDS)
        lease_ends = self._clock() + lease_seconds
        found, publisher = self._match_all(rows, keys, engine, int(lease_seconds * 1000))
        deadline = min(self._clock() + self._settings.load_seconds, lease_ends)
        found = [replace(prefix, local_blocks=blocks) for prefix, blocks in zip(found, local, strict=True)]
        found = [
            self._load(row, prefix, engine, batch, deadline - self._clock())
            for row, prefix in zip(rows, found, strict=True)
        ]
        return found, publisher

    def _match_all(
        self, rows: Sequence[Row], keys: Sequence[Sequence[BlockKey]], engine: TransferEngine, lease_ms: int
    ) -> tuple[list[RowPrefix], TransferEngine | None]:
        found: list[RowPrefix] = []
        publisher: TransferEngine | None = engine
        for row, row_keys in zip(rows, keys, strict=True):
            usable = row_keys[: (len(row.tokens) - 1) // self._parts.block_tokens]
            failed = next((prefix.reason for prefix in found if prefix.reason), "")
            if failed or not usable:  # one deadline is enough to lose
                found.append(RowPrefix(row_keys, reason=failed))
                continue
            match = self._match(usable, lease_ms)
            if match.outcome is Outcome.OK:
                found.append(self._row_prefix(row_keys, match))
                continue
            found.append(RowPrefix(row_keys, reason=match.reason))
            publisher = self._engine_after_failed_match(match, engine)
        self._statistics.add(
            lookups=sum(not prefix.reason for prefix in found),
            lookups_failed=sum(bool(prefix.reason) for prefix in found),
            lookup_blocks=sum(map(len, keys)),
            hit_blocks=sum(prefix.matched_blocks for prefix in found),
        )
        return found, publisher

    def _match(self, keys: Sequence[BlockKey], lease_ms: int) -> MatchResult:
        match = partial(self._link.client.match, read_lease_ms=lease_ms, timeout_seconds=self._settings.call_seconds)
        reach = self._parts.reach_blocks
        if reach is None or len(keys) < reach:
            return match(keys)
        run = match(keys, MatchMode.SLIDING_WINDOW, window=reach)
        if run.outcome is not Outcome.OK or any(run.locations) or reach == 1:
            return run
        return match(keys[: reach - 1])  # fewer blocks than the window, but from the first one on

    def _row_prefix(self, keys: Sequence[BlockKey], match: MatchResult) -> RowPrefix:
        locations = match.locations
        has = partial(_has, locations)
        matched = self._parts.usable_blocks(has, len(locations))
        known = self._parts.without_state.usable_blocks(has, len(locations))
        return RowPrefix(
            keys,
            local_blocks=0,
            locations=locations,
            matched_blocks=matched,
            known_blocks=known,
            lease_id=match.lease_id,
        )

    def _engine_after_failed_match(self, match: MatchResult, engine: TransferEngine) -> TransferEngine | None:
        if match.outcome is Outcome.TIMEOUT:
            return engine
        if match.code != ErrorCode.INSTANCE_NOT_EXIST:
            return None
        self._link.invalidate()  # the manager lost its state: register again, and this prompt can be the first
        return self._link.engine(self._settings.call_seconds)

    def _load(self, row: Row, prefix: RowPrefix, engine: TransferEngine, batch: CallCache, seconds: float) -> RowPrefix:
        loaded = LoadedPrefix()
        if prefix.matched_blocks:
            load = PrefixLoad(
                engine,
                staging=self._staging,
                parts=self._parts,
                memory=batch.memory(row),
                locations=prefix.locations,
                present_blocks=prefix.local_blocks,
                checksums=self._settings.checksums,
                clock=self._clock,
            )
            loaded = load.run(seconds)
        self._report_missing(prefix, loaded)
        return replace(prefix, loaded=loaded, reason=prefix.reason or loaded.reason)

    def _report_missing(self, prefix: RowPrefix, loaded: LoadedPrefix) -> None:
        """Report missing and corrupt parts to the manager, and count them."""
        client = self._link.client
        if prefix.lease_id:
            self._background.submit(PRIORITY_SAVE, partial(_call_quietly, client.release_lease, prefix.lease_id))
        if loaded.lost or loaded.corrupt:
            # Otherwise the manager would promise these blocks forever. They are computed now and published again.
            lost = [(prefix.keys[block], _location(prefix, block).uris[name]) for name, block in loaded.lost]
            corrupt = [
                (prefix.keys[block], _location(prefix, block).uris[name], _location(prefix, block).checksums[name])
                for name, block in loaded.corrupt
            ]
            self._background.submit(PRIORITY_SAVE, partial(_call_quietly, client.report_missing, lost, corrupt=corrupt))
        if loaded.refused:
            self._link.invalidate()  # perhaps a storage was added since
        self._statistics.add(
            loaded_blocks=loaded.blocks,
            loaded_bytes=loaded.bytes_loaded,
            lost_parts=len(loaded.lost),
            corrupt_parts=len(loaded.corrupt),
        )


def _has(locations: Sequence[Location | None], name: str, block: int) -> bool:
    location = locations[block]
    return location is not None and name in location.uris


def _location(prefix: RowPrefix, block: int) -> Location:
    location = prefix.locations[block]
    assert location is not None  # parts of it were loaded
    return location


def _call_quietly(method: Callable[..., object], *arguments: object, **options: object) -> None:
    method(*arguments, **options)
