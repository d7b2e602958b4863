"""Residency of an instance's blocks: the reporters, the order of their reports, and the known state of each.

Invariant R1: a block counts for an engine only if the engine's reporter said that it is there, and has not said since
that it is gone. Where reports are missing, everything that the reporter said before is dropped: unknown, never stale.
Invariant R2: a reporter is complete only when it has sent a snapshot since the last time that something was dropped.
Invariant R3: the reports of one stream take effect in the order of their numbers, each once.

Invariant R4: the key scheme of an instance is that of an available reporter, as long as one named any: of the first
one, where those with a mask go before those without, since our connector's keys in storages have it, too. So it changes
only when its last reporter is gone, or to one with a mask. A reporter with another scheme counts as known in part: no
prompt finds its blocks.

Nothing here fails a report for being behind: a manager that restarted, or has no room, answers that it wants a
snapshot, or that the reporter is known in part.
"""

from __future__ import annotations

import logging
import secrets
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError
from kvcm.model.instances import Instance
from kvcm.model.key_schemes import KeyScheme
from kvcm.model.storages import StorageType
from kvcm.residency.block_holders import ALL_PARTS, BlockHolders, Medium, Prefixes, Unit
from kvcm.residency.block_table import Keys
from kvcm.residency.event_reports import EventCounts, EventReports, EventTimes, HostColumns, is_medium
from kvcm.residency.tier_walk import TierWalk
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.metrics import Reading

__all__ = [
    "Change",
    "Engine",
    "InstanceResidency",
    "Report",
    "ReportResult",
    "ReporterState",
    "ReporterStatus",
    "Residency",
    "ResidencyCounts",
    "ResidencyLimits",
    "SnapshotPart",
]

_log = logging.getLogger(__name__)
_OTHER_SCHEME: Final = "engine %s makes other block keys than the reporters of instance %r: no prompt finds its blocks"
_ENDED_FACTOR: Final = 2  # ended streams that are known, for each reporter that there may be
_FORGET_FACTOR: Final = 10  # timeouts after which a quiet reporter is forgotten with all that it reported


class Engine(NamedTuple):
    """One data-parallel rank of an engine.

    Attributes:
        address: host:port, as routers call it.
        rank: its number.
    """

    address: str
    rank: int = 0

    @property
    def host(self) -> str:
        """The name that reporters of events call it."""
        return f"{self.address}@{self.rank}" if self.rank else self.address


class Change(NamedTuple):
    """Changes of one medium; cleared, then removed, then added.

    Attributes:
        medium: the memory.
        part: of the blocks; ALL_PARTS for whole ones.
        cleared: whether everything in the medium is gone.
        removed: mixed keys of blocks that are gone.
        added: mixed keys of blocks that are there.
    """

    medium: Medium
    part: str
    cleared: bool
    removed: Keys
    added: Keys


class SnapshotPart(NamedTuple):
    """A part of a snapshot.

    Attributes:
        first: whether it begins one.
        last: whether it ends one.
    """

    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What a reporter says at one time.

    Attributes:
        engine: whose memory it is about.
        stream: names the reporter's run.
        sequence: number of the report in the stream, from 1.
        changes: in the order in which they happened.
        snapshot: the part of a snapshot that `changes` are; None for none.
        stopped: whether the engine stops.
        key_scheme: how the engine makes block keys; None where that is not said.
    """

    engine: Engine
    stream: str
    sequence: int
    changes: Sequence[Change] = ()
    snapshot: SnapshotPart | None = None
    stopped: bool = False
    key_scheme: KeyScheme | None = None


class ReportResult(NamedTuple):
    """The answer to a report.

    Attributes:
        applied_sequence: the highest number that took effect.
        snapshot_required: whether not everything is known that the reporter holds.
        resident_blocks: pairs of a block and a medium that it holds.
    """

    applied_sequence: int
    snapshot_required: bool
    resident_blocks: int


class ReporterState(IntEnum):
    """How much is known of a reporter."""

    COMPLETE = 1
    PARTIAL = 2
    QUIET = 3


@dataclass(frozen=True, slots=True)
class ReporterStatus:
    """A reporter, for people.

    Attributes:
        engine: whose memory it reports.
        state: how much is known of it.
        sequence: number of its last report.
        quiet_seconds: since its last report.
        blocks: that it holds, by medium.
        gaps: found in its reports.
    """

    engine: Engine
    state: ReporterState
    sequence: int
    quiet_seconds: float
    blocks: Mapping[Medium, int]
    gaps: int


@dataclass(frozen=True, slots=True)
class ResidencyLimits:
    """Limits of what reporters may fill.

    Attributes:
        timeout_seconds: after which a reporter that says nothing counts as quiet.
        most_bytes: of all instances; beyond it, added blocks are dropped and their reporters known in part.
        most_reporters: of an instance.
    """

    timeout_seconds: float = 30.0
    most_bytes: int = 1 << 30
    most_reporters: int = 4096


@dataclass(slots=True)
class ResidencyCounts:
    """Counters since the start.

    Attributes:
        reports: that took effect.
        added: block keys in them that were added.
        removed: block keys in them that were removed.
        cleared: media that were cleared.
        snapshots: that ended.
        gaps: in the numbers of reports.
        repeated: reports that had been seen.
        expired: times that a reporter became quiet.
        dropped: added block keys for which there was no room.
    """

    reports: int = 0
    added: int = 0
    removed: int = 0
    cleared: int = 0
    snapshots: int = 0
    gaps: int = 0
    repeated: int = 0
    expired: int = 0
    dropped: int = 0


_Holdings = dict[tuple[Medium, str], Unit]


@dataclass(slots=True, eq=False)
class _Reporter:
    """The known state of one engine's rank.

    Attributes:
        visible: what it holds.
        building: what an unfinished snapshot says that it holds; None without one.
        key_scheme: how it makes block keys; None where it did not say.
    """

    engine: Engine
    column: int
    stream: str
    sequence: int
    last_report: float
    visible: _Holdings = field(default_factory=dict)
    building: _Holdings | None = None
    is_complete: bool = False
    is_quiet: bool = False
    gaps: int = 0
    key_scheme: KeyScheme | None = None

    @property
    def resident_blocks(self) -> int:
        return sum(unit.blocks for unit in self.visible.values())

    def units(self) -> list[Unit]:
        return [*self.visible.values(), *(self.building or {}).values()]


class InstanceResidency:
    """The reporters of an instance and their blocks.

    Args:
        instance: whose blocks they are.
        clock: time source.
        limits: of reporters.
        counts: are counted up.
        may_add: whether blocks can be added.
        events: makes the event reporters of this instance.

    Attributes:
        instance: whose blocks they are.
        key_scheme: how its engines make block keys, see invariant R4; None where no reporter said it.
        holders: the table of blocks and their holders.
        columns: of the hosts of all reporters.
        events: the event reporters.
        may_add: whether blocks can be added.
    """

    def __init__(
        self,
        instance: Instance,
        clock: Clock,
        *,
        limits: ResidencyLimits,
        counts: ResidencyCounts,
        may_add: Callable[[InstanceResidency], bool],
        events: Callable[[BlockHolders, HostColumns], EventReports],
    ) -> None:
        self.instance = instance
        self.key_scheme: KeyScheme | None = None
        linear = instance.linear_spec_names
        full = [name for name in instance.spec_names if name not in linear]
        self.holders = self._blocks = BlockHolders(full, [name for name in instance.spec_names if name in linear])
        self.columns = HostColumns()
        self.events = events(self._blocks, self.columns)
        self._clock = clock
        self._limits = limits
        self._counts = counts
        self._may_add = may_add
        self._ended: dict[tuple[Engine, str], float] = {}  # streams, and when they ended
        self._reporters: dict[Engine, _Reporter] = {}
        self._ranks: dict[str, list[Engine]] = {}  # of the reporters, by address

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 1 where neither the instance nor a reporter says how many they are."""
        if self.instance.block_size > 0:
            return self.instance.block_size
        return self.key_scheme.block_tokens if self.key_scheme is not None else 1

    @property
    def has_own_reporters(self) -> bool:
        """Whether an engine reports in our own way, and not by events."""
        return bool(self._reporters)

    @property
    def memory_bytes(self) -> int:
        """Memory of the blocks and their holders."""
        return self._blocks.memory_bytes + self.events.memory_bytes

    @property
    def blocks(self) -> int:
        """Blocks that any reporter holds."""
        return self._blocks.blocks

    def engines(self, addresses: Iterable[str] = ()) -> list[Engine]:
        """Return engines in order, with all ranks that report; of an address where none does rank 0, as of one that
        sends events alone.

        Args:
            addresses: of the engines; none for all that report, also by events alone.
        """
        if not addresses:
            more = self.events.hosts - {engine.host for engine in self._reporters}
            return sorted([*self._reporters, *map(Engine, more)])
        found: list[Engine] = []
        for address in sorted(set(addresses)):
            found += self._ranks.get(address) or [Engine(address)]
        return found

    def has_reporter_of(self, address: str) -> bool:
        """Return whether a rank of an engine reports."""
        return address in self._ranks or self.events.has_reporter_of(address)

    def is_complete(self, engine: Engine) -> bool:
        """Return whether everything that an engine holds is known."""
        reporter = self._reporters.get(engine)
        of_events = self.events.is_complete(engine.host) if len(self.events) else None
        if reporter is None:
            return bool(of_events)
        return self._state(reporter) is ReporterState.COMPLETE and of_events is not False

    def state_of(self, engine: Engine) -> ReporterState | None:
        """Return how much is known of an engine, None where none of its reporters is available."""
        reporter = self._reporters.get(engine)
        if reporter is not None:
            return self._state(reporter)
        of_events = self.events.is_complete(engine.host) if len(self.events) else None
        return None if of_events is None else ReporterState.COMPLETE if of_events else ReporterState.PARTIAL

    def states(self) -> Iterator[ReporterState]:
        """Yield the state of every reporter."""
        return map(self._state, self._reporters.values())

    def reporters(self) -> Iterator[ReporterStatus]:
        """Yield the reporters, ordered by engine."""
        now = self._clock.now()
        for engine in sorted(self._reporters):
            reporter = self._reporters[engine]
            blocks: dict[Medium, int] = {}
            for (medium, _), unit in reporter.visible.items():
                blocks[medium] = blocks.get(medium, 0) + unit.blocks
            yield ReporterStatus(
                engine,
                self._state(reporter),
                sequence=reporter.sequence,
                quiet_seconds=max(0.0, now - reporter.last_report),
                blocks=blocks,
                gaps=reporter.gaps,
            )

    def prefixes(self, keys: Keys, engines: Sequence[Engine], stored: NDArray[np.bool_] | None = None) -> Prefixes:
        """Return what engines hold of a prompt; nothing for those that do not report.

        Args:
            keys: mixed keys of its blocks in order.
            engines: the candidates.
            stored: which of the blocks lie in a storage; None for none.
        """
        return self._blocks.prefixes(keys, self._columns_of(engines), stored)

    def extend_walk(self, walk: TierWalk, keys: Keys, engines: Sequence[Engine], stored: NDArray[np.bool_]) -> None:
        """Count the next blocks of a prompt; nothing for engines that do not report.

        Args:
            walk: through the tiers of the engines.
            keys: mixed keys of the blocks in order, as many as a window has.
            engines: the ranks of the walk.
            stored: which of the blocks lie in a storage.
        """
        walk.extend(self._blocks.tier_runs(keys, self._columns_of(engines), stored))

    def held_run(self, keys: Keys) -> int:
        """Return how many blocks from the first on are held by some engine each, not always the same."""
        return self._blocks.held_run(keys)

    def _columns_of(self, engines: Sequence[Engine]) -> NDArray[np.int64]:
        find = self.columns.by_host.get
        found = [find(f"{address}@{rank}" if rank else address, -1) for address, rank in engines]  # each one's `host`
        return np.array(found, np.int64)

    def may_add(self) -> bool:
        """Return whether there is memory for more blocks."""
        return self._may_add(self)

    def units(self, media: frozenset[str]) -> Iterator[Unit]:
        """Yield the units of reporters that are available.

        Args:
            media: kinds of memory, as reporters of events call them; of our own reports, a text counts that means the
                same. None for all.
        """
        wanted = {medium for medium in Medium if not media or any(is_medium(text, medium) for text in media)}
        for reporter in self._reporters.values():
            if not reporter.is_quiet:
                for (medium, _), unit in reporter.visible.items():
                    if medium in wanted:
                        yield unit
        yield from self.events.units(media)

    # Reports.

    def report(self, report: Report) -> ReportResult:
        """Let a report take effect.

        Raises:
            CapacityError: there are too many reporters.
        """
        if self._is_late(report):
            self._counts.repeated += 1
            return ReportResult(report.sequence, False, 0)
        reporter = self._reporter_of(report)
        if report.sequence <= reporter.sequence:
            self._counts.repeated += 1
            return _result(reporter)
        if report.sequence > reporter.sequence + 1:
            reporter.gaps += 1
            self._counts.gaps += 1
            self._drop(reporter)
        reporter.sequence = report.sequence
        self._counts.reports += 1
        if report.key_scheme not in {None, reporter.key_scheme}:
            reporter.key_scheme = report.key_scheme
            self._choose_scheme()
            if reporter.key_scheme != self.key_scheme:
                _log.warning(_OTHER_SCHEME, report.engine.host, self.instance.instance_id)
        if report.stopped:
            self._end(report.engine, report.stream)
            self._remove(reporter)
            self._choose_scheme()
            return ReportResult(report.sequence, False, 0)
        if report.snapshot is not None and report.snapshot.first:
            self._blocks.retire((reporter.building or {}).values())
            reporter.building = {}
        for change in report.changes:
            self._apply(reporter, change)
        if report.snapshot is not None and report.snapshot.last and reporter.building is not None:
            self._commit(reporter)
        return _result(reporter)

    def _is_late(self, report: Report) -> bool:
        """Return whether a report is of a stream that ended: it was under way, or of a second reporter of the engine.

        The stream that began last counts, as long as it lives; then another may take its place.
        """
        ended_at = self._ended.get((report.engine, report.stream))
        if ended_at is None:
            return False
        reporter = self._reporters.get(report.engine)
        if reporter is not None:
            return not reporter.is_quiet
        return self._clock.now() - ended_at <= self._limits.timeout_seconds

    def _end(self, engine: Engine, stream: str) -> None:
        self._ended.pop((engine, stream), None)
        self._ended[engine, stream] = self._clock.now()
        if len(self._ended) > _ENDED_FACTOR * self._limits.most_reporters:
            del self._ended[next(iter(self._ended))]

    def _reporter_of(self, report: Report) -> _Reporter:
        """Return the reporter of a report's stream; another stream of the engine ends here (R1)."""
        now = self._clock.now()
        reporter = self._reporters.get(report.engine)
        if reporter is None:
            if len(self._reporters) >= self._limits.most_reporters:
                raise CapacityError(
                    f"instance {self.instance.instance_id!r} has {len(self._reporters)} reporters, the most that are "
                    "allowed"
                )
            self._ended.pop((report.engine, report.stream), None)
            column = self.columns.acquire(report.engine.host)
            reporter = _Reporter(report.engine, column, report.stream, report.sequence - 1, now)
            self._reporters[report.engine] = reporter
            insort(self._ranks.setdefault(report.engine.address, []), report.engine)
        elif reporter.stream != report.stream:
            self._end(report.engine, reporter.stream)
            self._drop(reporter)
            self._ended.pop((report.engine, report.stream), None)
            reporter.stream, reporter.sequence = report.stream, report.sequence - 1
        reporter.last_report = now
        if reporter.is_quiet:
            reporter.is_quiet = False
            self._blocks.set_visible(reporter.visible.values(), is_visible=True)
            self._choose_scheme()
        return reporter

    def _apply(self, reporter: _Reporter, change: Change) -> None:
        of_snapshot = reporter.building
        if change.cleared:
            self._counts.cleared += 1
            for holdings in (reporter.visible, of_snapshot or {}):
                names = [name for name in holdings if name[0] == change.medium and change.part in {ALL_PARTS, name[1]}]
                self._blocks.retire([holdings.pop(name) for name in names])
        if len(change.removed):
            self._counts.removed += len(change.removed)
            name = change.medium, change.part
            units = [holdings[name] for holdings in (reporter.visible, of_snapshot or {}) if name in holdings]
            if units:
                self._blocks.remove(units, change.removed)
        if len(change.added):
            self._add(reporter, change)

    def _add(self, reporter: _Reporter, change: Change) -> None:
        if not self.may_add():
            self._counts.dropped += len(change.added)
            reporter.is_complete = False
            # A snapshot that is not complete is none.
            self._blocks.retire((reporter.building or {}).values())
            reporter.building = None
            return
        self._counts.added += len(change.added)
        # A part of a snapshot is true at once; blocks from before it stay until its end.
        units = [self._unit(reporter, reporter.visible, change)]
        if reporter.building is not None:
            units.append(self._unit(reporter, reporter.building, change, is_visible=False))
        self._blocks.add(units, change.added)

    def _unit(self, reporter: _Reporter, holdings: _Holdings, change: Change, *, is_visible: bool = True) -> Unit:
        name = change.medium, change.part
        unit = holdings.get(name)
        if unit is None:
            unit = holdings[name] = self._blocks.open_unit(reporter.column, *name, is_visible=is_visible)
        return unit

    def _commit(self, reporter: _Reporter) -> None:
        """Replace what a reporter holds by its snapshot."""
        assert reporter.building is not None
        self._blocks.retire(reporter.visible.values())
        reporter.visible, reporter.building = reporter.building, None
        self._blocks.set_visible(reporter.visible.values(), is_visible=True)
        reporter.is_complete = True
        self._counts.snapshots += 1

    def _drop(self, reporter: _Reporter) -> None:
        """Drop everything that a reporter said (R1)."""
        self._blocks.retire(reporter.units())
        reporter.visible, reporter.building = {}, None
        reporter.is_complete = False

    def _remove(self, reporter: _Reporter) -> None:
        self._drop(reporter)
        del self._reporters[reporter.engine]
        ranks = self._ranks[reporter.engine.address]
        ranks.remove(reporter.engine)
        if not ranks:
            del self._ranks[reporter.engine.address]
        self.columns.release(reporter.engine.host)

    def _choose_scheme(self) -> None:
        """Keep the key scheme, or choose another one (R4)."""
        named = [each.key_scheme for each in self._reporters.values() if each.key_scheme and not each.is_quiet]
        masked = [scheme for scheme in named if scheme.mask]
        found = masked or named
        if found and self.key_scheme not in found:
            self.key_scheme = found[0]

    def _state(self, reporter: _Reporter) -> ReporterState:
        if reporter.is_quiet:
            return ReporterState.QUIET
        has_scheme = reporter.key_scheme in {None, self.key_scheme}
        return ReporterState.COMPLETE if reporter.is_complete and has_scheme else ReporterState.PARTIAL

    def expire(self) -> None:
        """Hide reporters that say nothing any more, and forget those that have not for long."""
        now, timeout = self._clock.now(), self._limits.timeout_seconds
        for reporter in list(self._reporters.values()):
            quiet_seconds = now - reporter.last_report
            if quiet_seconds > timeout * _FORGET_FACTOR:
                self._remove(reporter)
            elif quiet_seconds > timeout and not reporter.is_quiet:
                reporter.is_quiet = True
                self._counts.expired += 1
                self._blocks.set_visible(reporter.visible.values(), is_visible=False)
        self._choose_scheme()
        self.events.expire()

    def maintain(self) -> bool:
        """Do a millisecond of work in the background; return whether there is more."""
        return self._blocks.maintain()


def _result(reporter: _Reporter) -> ReportResult:
    return ReportResult(reporter.sequence, not reporter.is_complete, reporter.resident_blocks)


class Residency:
    """The residency of all instances.

    Args:
        clock: time source.
        find_instance: returns a registered instance by its id, None where there is none.
        limits: of reporters.
        event_times: returns the times of an event report storage of an instance's group, None where it has none of that
            type that is enabled.
        new_generation: makes a random text of 32 hex digits.

    Attributes:
        limits: of reporters.
        counts: since the start.
        event_counts: of event reports since the start.
    """

    def __init__(
        self,
        clock: Clock,
        find_instance: Callable[[str], Instance | None],
        limits: ResidencyLimits | None = None,
        *,
        event_times: Callable[[Instance, StorageType], EventTimes | None] = lambda _instance, _source: None,
        new_generation: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._clock = clock
        self._event_times = event_times
        self._new_generation = new_generation
        self._find_instance = find_instance
        self.limits = limits if limits is not None else ResidencyLimits()
        self.counts = ResidencyCounts()
        self.event_counts = EventCounts()
        self._instances: dict[str, InstanceResidency] = {}
        self._known_bytes = 0  # a second ago

    def open(self, instance: Instance) -> InstanceResidency:
        """Return the residency of a registered instance."""
        found = self._instances.get(instance.instance_id)
        if found is None or found.instance != instance:  # it was removed, and registered in another way
            found = self._instances[instance.instance_id] = self._new(instance)
        return found

    def _new(self, instance: Instance) -> InstanceResidency:
        return InstanceResidency(
            instance,
            self._clock,
            limits=self.limits,
            counts=self.counts,
            may_add=self._may_add,
            events=partial(self._events_of, instance),
        )

    def _events_of(self, instance: Instance, blocks: BlockHolders, columns: HostColumns) -> EventReports:
        return EventReports(
            blocks,
            columns,
            self._clock,
            new_generation=self._new_generation,
            times_of=partial(self._event_times, instance),
            most_reporters=self.limits.most_reporters,
            counts=self.event_counts,
        )

    def view(self, instance: Instance) -> InstanceResidency:
        """Return the residency of a registered instance, for reading: one that nothing was reported of is not kept."""
        found = self._instances.get(instance.instance_id)
        return found if found is not None and found.instance == instance else self._new(instance)

    def instances(self) -> list[InstanceResidency]:
        """Return the instances that something was reported of."""
        return list(self._instances.values())

    @property
    def memory_bytes(self) -> int:
        """Memory of all instances."""
        return sum(each.memory_bytes for each in self._instances.values())

    def _may_add(self, instance: InstanceResidency) -> bool:
        """Return whether there is memory for more blocks. None of the instances can take the share of another."""
        # Not summed up for each report: there may be thousands of instances. Within a second, some megabytes come.
        most = self.limits.most_bytes
        return self._known_bytes < most or instance.memory_bytes * len(self._instances) < most

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics."""
        counts, states = self.counts, Counter[ReporterState]()
        for each in self._instances.values():
            states.update(each.states())
        yield Reading(catalog.RESIDENCY_REPORTS, counts.reports, ("applied",))
        yield Reading(catalog.RESIDENCY_REPORTS, counts.repeated, ("repeated",))
        for change in ("added", "removed", "dropped"):
            yield Reading(catalog.RESIDENCY_CHANGES, getattr(counts, change), (change,))
        yield Reading(catalog.RESIDENCY_CLEARED, counts.cleared)
        yield Reading(catalog.RESIDENCY_SNAPSHOTS, counts.snapshots)
        yield Reading(catalog.RESIDENCY_GAPS, counts.gaps)
        yield Reading(catalog.RESIDENCY_EXPIRED, counts.expired)
        for state in ReporterState:
            yield Reading(catalog.RESIDENCY_REPORTERS, states[state], (state.name.lower(),))
        yield Reading(catalog.RESIDENCY_BLOCKS, sum(each.blocks for each in self._instances.values()))
        yield Reading(catalog.RESIDENCY_MEMORY, self.memory_bytes)
        yield Reading(catalog.RESIDENCY_MAX_MEMORY, self.limits.most_bytes)

    def expire(self) -> None:
        """Hide and forget quiet reporters, forget instances that are not registered any more, and see how much memory
        the others take; to be called each second."""
        for instance_id, each in list(self._instances.items()):
            if self._find_instance(instance_id) != each.instance:
                del self._instances[instance_id]
            else:
                each.expire()
        self._known_bytes = self.memory_bytes

    def maintain(self) -> bool:
        """Do a millisecond of work in the background, for one instance; return whether there is more."""
        return any(each.maintain() for each in self._instances.values())
