"""What a manager kept of recent accesses, as the rehearsal of other settings needs it.

Blocks are dense numbers from 0 on, over all instances. Unlike a trace it knows what became of each access, when write
sessions began and ended, and which blocks were there before anything was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvcm.model.keys import BlockMask
from kvcm.optimizer.errors import TraceError

__all__ = ["Access", "Coverage", "Finish", "Lookup", "Recording", "Start", "read_recording"]

_PREFIX_MODES = {"prefix_match", "prefix_match_with_mamba"}


class Lookup(NamedTuple):
    """An engine asked where blocks are.

    Attributes:
        at: seconds.
        instance: index into `Recording.instance_names`.
        blocks: that it asked for, without those that it left out.
        found: how many of them it found.
        is_prefix: whether it stopped at the first that was not there.
    """

    at: float
    instance: int
    blocks: Sequence[int]
    found: int
    is_prefix: bool


class Start(NamedTuple):
    """A write session began.

    Attributes:
        session: its number, by which its end is known.
        blocks: that it named, whether they had to be written or not.
        refused: how many did not fit.
    """

    at: float
    instance: int
    session: int
    blocks: Sequence[int]
    refused: int


class Finish(NamedTuple):
    """A write session ended.

    Attributes:
        failed: blocks that were not written after all.
    """

    at: float
    instance: int
    session: int
    failed: frozenset[int]


Access = Lookup | Start | Finish


class Coverage(NamedTuple):
    """The seconds without a gap, from and to, and the events that were dropped before."""

    since: float
    until: float
    dropped_accesses: int
    dropped_keys: int

    @property
    def seconds(self) -> float:
        """Return how long that is."""
        return max(0.0, self.until - self.since)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Accesses in the order in which they happened.

    Attributes:
        coverage: what they cover.
        instance_names: of all instances that have accesses.
        accesses: of all of them.
        owners: the instance of each block.
        parents: the block before each, -1 for the first of a chain.
        depths: how many blocks are before each.
        warm: blocks that were there before the first access, in the order in which they were asked for, the tail of a
            chain before its head.
    """

    coverage: Coverage
    instance_names: tuple[str, ...]
    accesses: Sequence[Access]
    owners: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    warm: Sequence[int]

    @property
    def lookups(self) -> int:
        """Return how many of the accesses are lookups."""
        return sum(isinstance(access, Lookup) for access in self.accesses)


class _Line(msgspec.Struct):
    type: str
    source: str = ""
    trigger_time_us: int = 0
    keys: list[int] = []
    block_mask: int | list[bool] = 0
    query_type: str = ""
    hit_keys: int = 0
    write_session_id: str = ""
    refused_keys: int = 0
    success_block: int | list[bool] = 0
    from_us: int = 0
    until_us: int = 0
    most_keys: int = 0
    dropped_events: int = 0
    dropped_keys: int = 0


def read_recording(lines: Iterable[bytes]) -> Recording:
    """Return the accesses of `GET /v1/events/recent`; events of other types are passed over.

    Raises:
        TraceError: a line is no event, the first is not of type `recent`, or the manager keeps no accesses.
    """
    decode = msgspec.json.Decoder(_Line).decode
    building: _RecordingBuilder | None = None
    for number, text in enumerate(filter(bytes.strip, lines), start=1):
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number} of the recent accesses is no event: {error}") from None
        if building is None:
            building = _RecordingBuilder(_coverage(line))
        elif line.type in _LINE_HANDLERS:
            _LINE_HANDLERS[line.type](building, line)
    if building is None:
        raise TraceError("nothing came of the recent accesses, not even the line that says what there is")
    return building.build()


def _coverage(line: _Line) -> Coverage:
    if line.type != "recent":
        raise TraceError(f"the first line of the recent accesses is of type {line.type!r}, must be 'recent'")
    if not line.most_keys:
        raise TraceError(
            "the manager keeps no recent accesses: set kvcm.optimizer.recent_keys, for example to 4194304 (32 MiB), "
            "and come back when it has served for a while"
        )
    return Coverage(line.from_us / 1e6, line.until_us / 1e6, line.dropped_events, line.dropped_keys)


@dataclass(slots=True)
class _RecordingBuilder:
    coverage: Coverage
    instances: dict[str, int] = field(default_factory=dict)
    numbers: list[dict[int, int]] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    warm: dict[int, None] = field(default_factory=dict)
    sessions: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    count: int = 0

    def lookup(self, line: _Line) -> None:
        instance = self._instance(line.source)
        blocks, first_seen = self._blocks(instance, line.keys)
        asked = [blocks[place] for place in _mask(line.block_mask).unmasked(len(blocks))]
        is_prefix = line.query_type in _PREFIX_MODES
        if is_prefix:
            self._add_warm_blocks(asked[: line.hit_keys], first_seen)
        self.accesses.append(Lookup(line.trigger_time_us / 1e6, instance, asked, line.hit_keys, is_prefix))

    def start(self, line: _Line) -> None:
        instance = self._instance(line.source)
        blocks, first_seen = self._blocks(instance, line.keys)
        written = [blocks[place] for place in _mask(line.block_mask).unmasked(len(blocks))]
        if not line.refused_keys:  # else masked blocks may have been refused
            there = set(blocks).difference(written)
            self._add_warm_blocks([block for block in blocks if block in there], first_seen)
        at = line.trigger_time_us / 1e6
        self.accesses.append(Start(at, instance, self.count, list(dict.fromkeys(blocks)), line.refused_keys))
        if line.write_session_id:
            self.sessions[line.write_session_id] = (self.count, written)
        else:  # it did not fit at all: with more capacity it would have been written
            self.accesses.append(Finish(at, instance, self.count, frozenset()))
        self.count += 1

    def finish(self, line: _Line) -> None:
        known = self.sessions.pop(line.write_session_id, None)
        if known is None:  # it began before anything was kept
            return
        session, written = known
        failed = frozenset(written[place] for place in _failed(line.success_block, len(written)))
        self.accesses.append(Finish(line.trigger_time_us / 1e6, self._instance(line.source), session, failed))

    def _add_warm_blocks(self, blocks: Sequence[int], first_seen: int) -> None:
        """Record the blocks of a chain that were there and were not named before."""
        self.warm.update(dict.fromkeys(block for block in reversed(blocks) if block >= first_seen))

    def _instance(self, name: str) -> int:
        if name not in self.instances:
            self.instances[name] = len(self.instances)
            self.numbers.append({})
        return self.instances[name]

    def _blocks(self, instance: int, keys: Sequence[int]) -> tuple[list[int], int]:
        """Return the numbers of blocks, and the first number that is new."""
        numbers, first_seen = self.numbers[instance], len(self.parents)
        before, blocks = -1, []
        for key in keys:
            block = numbers.setdefault(key, len(self.parents))
            if block == len(self.parents):
                self.parents.append(before)
                self.owners.append(instance)
            elif self.parents[block] < 0 and before >= 0 and before < block:
                self.parents[block] = before  # it was named without its parent so far
            blocks.append(block)
            before = block
        return blocks, first_seen

    def build(self) -> Recording:
        depths = [0] * len(self.parents)
        for block, parent in enumerate(self.parents):
            if parent >= 0:  # and smaller: numbers are given in the order of chains
                depths[block] = depths[parent] + 1
        return Recording(
            coverage=self.coverage,
            instance_names=tuple(self.instances),
            accesses=sorted(self.accesses, key=lambda access: access.at),
            owners=self.owners,
            parents=self.parents,
            depths=depths,
            warm=list(self.warm),
        )


_LINE_HANDLERS: dict[str, Callable[[_RecordingBuilder, _Line], None]] = {
    "GetCacheLocation": _RecordingBuilder.lookup,
    "StartWriteCache": _RecordingBuilder.start,
    "FinishWriteCache": _RecordingBuilder.finish,
}


def _mask(given: int | list[bool]) -> BlockMask:
    return BlockMask(offset=given) if isinstance(given, int) else BlockMask(flags=given)


def _failed(success: int | list[bool], count: int) -> Iterable[int]:
    if isinstance(success, int):
        return range(max(0, success), count)
    return [place for place in range(count) if place >= len(success) or not success[place]]
