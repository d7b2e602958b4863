"""Asks the manager for the longest known prefix of each row, and loads it.

A model with full attention in some layer asks for the prefix and sees from the parts of its blocks how far it can go
on: the same answer also tells where a longer prefix is known than could be gone on from. When all layers have a sliding
window, the blocks before the last ones are not needed, and may be gone: then the right-most run that fills the window
is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from connectors.keys import KeyChain
from connectors.layout.staging import Staging
from connectors.results import Location, MatchMode, MatchResult, Outcome
from connectors.reuse.link import ManagerLink
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import TransferEngine
from connectors.transfer.pool import PRIORITY_SAVE, WorkerPool
from connectors.transformers.batch import CallCache, Row
from connectors.transformers.loader import LoadedPrefix, PrefixLoad
from connectors.transformers.parts import ModelParts
from connectors.transformers.settings import ReuseSettings
from kvcm.model.errors import ErrorCode
from kvcm.model.keys import BlockKey

__all__ = ["FoundPrefix", "PrefixLookup"]

# The manager refuses longer read leases.
_MAX_LEASE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """What is known of a row when the prefill begins.

    Attributes:
        keys: of the prompt's full blocks.
        local_blocks: whose KV was in memory already.
        locations: of its first blocks; None where nothing is known.
        matched_blocks: that could be gone on from.
        known_blocks: whose KV is known from the first one on.
        loaded: what was loaded of them.
        lease_id: keeps the locations readable.
        reason: why nothing is known, "" when the manager answered.
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
    """Looks prompts up and loads what is known of them.

    Args:
        link: to the manager.
        chain: computes keys.
        parts: of a block.
        settings: deadlines.
        background: where the manager is told what was found out: the first token does not wait for it.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        link: ManagerLink,
        chain: KeyChain,
        parts: ModelParts,
        settings: ReuseSettings,
        background: WorkerPool,
        statistics: ReuseStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._chain = chain
        self._parts = parts
        self._settings = settings
        self._background = background
        self._statistics = statistics
        self._clock = clock
        # The thread that saves has staging buffers of its own.
        self._staging = {part.name: Staging(part.layout, settings.staging_blocks) for part in parts.kv}

    def run(
        self, batch: CallCache, keys: Sequence[Sequence[BlockKey]], local: Sequence[int]
    ) -> tuple[list[FoundPrefix], TransferEngine | None]:
        """Load the longest known prefixes, of each row all but the last token at most.

        Args:
            batch: where to load to.
            keys: of the full blocks of each row.
            local: leading blocks of each row that are in the batch already.

        Returns:
            What became of each row, and what its blocks may be published with: None when the manager cannot tell what
            is there, since it will hardly take more.
        """
        rows = batch.rows
        engine = self._link.engine(self._settings.call_seconds)
        if engine is None:
            reason = f"not registered: {self._link.registration.message}"
            return [FoundPrefix(*row, reason=reason) for row in zip(keys, local, strict=True)], None
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
    ) -> tuple[list[FoundPrefix], TransferEngine | None]:
        found: list[FoundPrefix] = []
        publisher: TransferEngine | None = engine
        for row, row_keys in zip(rows, keys, strict=True):
            usable = row_keys[: (len(row.tokens) - 1) // self._chain.block_tokens]
            failed = next((prefix.reason for prefix in found if prefix.reason), "")
            if failed or not usable:  # one deadline is enough to lose
                found.append(FoundPrefix(row_keys, reason=failed))
                continue
            match = self._match(usable, lease_ms)
            if match.outcome is Outcome.OK:
                found.append(self._found(row_keys, match))
                continue
            found.append(FoundPrefix(row_keys, reason=match.reason))
            publisher = self._after_failed_match(match)
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

    def _found(self, keys: Sequence[BlockKey], match: MatchResult) -> FoundPrefix:
        locations = match.locations
        has = partial(_has, locations)
        matched = self._parts.usable_blocks(has, len(locations))
        known = self._parts.without_state.usable_blocks(has, len(locations))
        return FoundPrefix(keys, 0, locations, matched, known, lease_id=match.lease_id)

    def _after_failed_match(self, match: MatchResult) -> TransferEngine | None:
        if match.code != ErrorCode.INSTANCE_NOT_EXIST:
            return None
        self._link.forget()  # the manager lost its state: begin anew, and this prompt can be the first
        return self._link.engine(self._settings.call_seconds)

    def _load(
        self, row: Row, prefix: FoundPrefix, engine: TransferEngine, batch: CallCache, seconds: float
    ) -> FoundPrefix:
        loaded = LoadedPrefix()
        if prefix.matched_blocks:
            load = PrefixLoad(
                engine,
                self._staging,
                self._parts,
                batch.memory(row),
                prefix.locations,
                present_blocks=prefix.local_blocks,
                checksums=self._settings.checksums,
                clock=self._clock,
            )
            loaded = load.run(seconds)
        self._tell(prefix, loaded)
        return replace(prefix, loaded=loaded, reason=prefix.reason or loaded.reason)

    def _tell(self, prefix: FoundPrefix, loaded: LoadedPrefix) -> None:
        """Tell the manager what was found out, and count it."""
        client = self._link.client
        if prefix.lease_id:
            self._background.submit(PRIORITY_SAVE, partial(_call, client.release_lease, prefix.lease_id))
        if loaded.lost or loaded.corrupt:
            # Otherwise the manager would promise these blocks forever. They are computed now and published again.
            lost = [(prefix.keys[block], _location(prefix, block).uris[name]) for name, block in loaded.lost]
            corrupt = [
                (prefix.keys[block], _location(prefix, block).uris[name], _location(prefix, block).checksums[name])
                for name, block in loaded.corrupt
            ]
            self._background.submit(PRIORITY_SAVE, partial(_call, client.report_missing, lost, corrupt=corrupt))
        if loaded.refused:
            self._link.forget()  # perhaps a storage was added since
        self._statistics.add(
            loaded_blocks=loaded.blocks,
            loaded_bytes=loaded.bytes_loaded,
            lost_parts=len(loaded.lost),
            corrupt_parts=len(loaded.corrupt),
        )


def _has(locations: Sequence[Location | None], name: str, block: int) -> bool:
    location = locations[block]
    return location is not None and name in location.uris


def _location(prefix: FoundPrefix, block: int) -> Location:
    location = prefix.locations[block]
    assert location is not None  # parts of it were loaded
    return location


def _call(method: Callable[..., object], *arguments: object, **options: object) -> None:
    method(*arguments, **options)
