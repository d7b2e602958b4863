"""Event reports: reporters that send every block as an event of its own, as those of the original do.

A reporter is a source (the type of an event report storage) on a host. Several of a host are on their own: liveness,
generation, what they hold. Their blocks are in the same table as those of our own reports, and in the same column where
it is the same host, so that a prefix may lie in memory of several kinds.

Invariant E1: a reporter's blocks are those that were added since its generation began, or are in the snapshot that
began it, and were not taken back since.
Invariant E2: they count only while it is available: its storage is configured, and its last heartbeat not too old.
Invariant E3: a reporter that was unregistered (host down, or silent for too long) is back with `register` alone. Until
then a tombstone keeps late events of the host out.

Every change takes effect within one step of the event loop. So the original's gate, which makes changes wait while a
snapshot is written, has nothing to do here, and SNAPSHOT_IN_PROGRESS and SNAPSHOT_REQUIRED never occur: no snapshot can
commit after a later registration, and none is ever half written. Nothing is stored either: after a restart no reporter
is known, so nothing stale can be answered, and the original's "soft" state does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, NodeNotRegisteredError, SnapshotRateLimitedError
from kvcm.model.locations import SpecUri
from kvcm.model.storages import StorageType
from kvcm.residency.block_holders import BlockHolders, Medium, Unit
from kvcm.residency.block_table import Keys

__all__ = [
    "MOST_MEDIA",
    "BlockChange",
    "EventCounts",
    "EventReports",
    "EventTimes",
    "HostColumns",
    "is_medium",
    "medium_of",
]

MOST_MEDIA: Final = 16
"""Kinds of memory of one reporter: each is a free text, and takes a bit in the sets of holders for each part."""

_BYTES_OF_URI: Final = 200  # of an entry of a dict, its key, and the object of a text
_MEDIA: Final = {
    **dict.fromkeys(("gpu", "hbm"), Medium.GPU),
    **dict.fromkeys(("mem", "cpu", "dram", "host", "memory", ""), Medium.HOST),
    **dict.fromkeys(("disk", "ssd", "nvme"), Medium.DISK),
}


def medium_of(text: str) -> Medium:
    """Return what a kind of memory costs like; one that is not known costs like the host's memory."""
    return _MEDIA.get(text.lower(), Medium.HOST)


def is_medium(text: str, medium: Medium) -> bool:
    """Return whether a text names a kind of memory; none that is not known does."""
    return bool(text) and _MEDIA.get(text.lower()) is medium


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Times of an event report storage.

    Attributes:
        heartbeat_timeout_seconds: a reporter without a heartbeat for so long is unavailable.
        cleanup_grace_seconds: after so long more it is unregistered.
        snapshot_interval_seconds: least time from one snapshot to the next.
    """

    heartbeat_timeout_seconds: float = 30.0
    cleanup_grace_seconds: float = 300.0
    snapshot_interval_seconds: float = 30.0


class BlockChange(NamedTuple):
    """Changes of one part of blocks in one kind of memory, in the order in which they happened.

    Attributes:
        medium: the kind of memory, as the reporter calls it.
        part: of the blocks.
        keys: mixed keys. Changes with the same blocks are best given the same array: they take effect at once.
        uris: of each block where the part lies, None for nowhere any more.
    """

    medium: str
    part: str
    keys: Keys
    uris: Sequence[str | None]


@dataclass(slots=True)
class EventCounts:
    """Counters since the start.

    Attributes:
        added: parts of blocks that were added.
        removed: parts of blocks that were removed.
        snapshots: that took effect.
        expired: times that a reporter became unavailable.
        unregistered: reporters that were.
    """

    added: int = 0
    removed: int = 0
    snapshots: int = 0
    expired: int = 0
    unregistered: int = 0


class HostColumns:
    """The column of each host. All reporters of a host share it, whatever they report.

    Attributes:
        by_host: the columns, for callers with a thousand hosts at once.
    """

    def __init__(self) -> None:
        self.by_host = self._columns = dict[str, int]()
        self._users: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._columns)

    def acquire(self, host: str) -> int:
        """Return the column of a host for one reporter more."""
        column = self._columns.get(host)
        if column is None:
            column = self._columns[host] = self._free.pop() if self._free else len(self._columns)
        self._users[host] = self._users.get(host, 0) + 1
        return column

    def release(self, host: str) -> None:
        """One reporter less has the column."""
        self._users[host] -= 1
        if not self._users[host]:
            del self._users[host]
            self._free.append(self._columns.pop(host))

    def find(self, host: str) -> int:
        """Return the column of a host, -1 for none."""
        return self._columns.get(host, -1)

    def items(self) -> Iterable[tuple[str, int]]:
        """Return hosts with their columns."""
        return self._columns.items()


class _Uris:
    """Where the blocks of a unit lie. Those of engines are mostly the same for all blocks of a kind of memory."""

    __slots__ = ("default", "memory_bytes", "others")

    def __init__(self, default: str) -> None:
        self.default = default
        self.others: dict[int, str] = {}  # by mixed key: clients choose the others
        self.memory_bytes = 0

    def of(self, key: int) -> str:
        return self.others.get(key, self.default)

    def set(self, key: int, uri: str | None) -> None:
        """Set the uri of a block; None for a block that is gone."""
        before = self.others.pop(key, None)
        if before is not None:
            self.memory_bytes -= len(before) + _BYTES_OF_URI
        if uri is not None and uri != self.default:
            self.others[key] = uri
            self.memory_bytes += len(uri) + _BYTES_OF_URI


class _Holding(NamedTuple):
    unit: Unit
    uris: _Uris


_Name = tuple[str, str]  # medium and part
_Holdings = dict[_Name, _Holding]


@dataclass(slots=True, eq=False)
class _Reporter:
    """One source on one host.

    Attributes:
        last_heartbeat: when it was last known to be alive.
        generation: that its blocks belong to; empty before the first.
        last_snapshot: when the last one took effect; None before the first.
        times: of its storage, as last seen.
        life: number of its registration; 0 where it did not register.
    """

    source: StorageType
    host: str
    column: int
    last_heartbeat: float
    times: EventTimes
    is_visible: bool = True
    life: int = 0
    generation: str = ""
    last_snapshot: float | None = None
    holdings: _Holdings = field(default_factory=dict)

    @property
    def uri_bytes(self) -> int:
        return sum(holding.uris.memory_bytes for holding in self.holdings.values())


_Identity = tuple[StorageType, str]


class EventReports:
    """The event reporters of an instance.

    Args:
        blocks: of all reporters of the instance.
        columns: of hosts.
        clock: time source.
        new_generation: makes a random text of 32 hex digits.
        times_of: returns the times of a source's storage, None where the instance's group has none that is enabled.
        most_reporters: that may be known.
        counts: are counted up.
    """

    def __init__(
        self,
        blocks: BlockHolders,
        columns: HostColumns,
        clock: Clock,
        *,
        new_generation: Callable[[], str],
        times_of: Callable[[StorageType], EventTimes | None],
        most_reporters: int,
        counts: EventCounts,
    ) -> None:
        self._blocks = blocks
        self._columns = columns
        self._clock = clock
        self._new_generation = new_generation
        self.times_of = times_of
        self._most_reporters = most_reporters
        self._counts = counts
        self._reporters: dict[_Identity, _Reporter] = {}
        self._of_host: dict[str, list[_Reporter]] = {}
        self._tombstones: dict[_Identity, int] = {}  # with the number of the life that they ended
        self._next_life = count(1)
        self.memory_bytes = 0

    def __len__(self) -> int:
        return len(self._reporters)

    # The known state of reporters.

    @property
    def hosts(self) -> set[str]:
        """Hosts with a reporter that is available."""
        return {reporter.host for reporter in self._reporters.values() if reporter.is_visible}

    def has_reporter_of(self, host: str) -> bool:
        """Return whether a reporter of a host is known, available or not."""
        return host in self._of_host

    def hosts_of(self, *sources: StorageType) -> list[str]:
        """Return the hosts with an available reporter of one of some sources, in order."""
        found = {each.host for each in self._reporters.values() if each.is_visible and each.source in sources}
        return sorted(found)

    def is_complete(self, host: str) -> bool | None:
        """Return whether everything is known that a host's reporters hold; None for a host without one that is
        available."""
        found = [each for each in self._of_host.get(host, ()) if each.is_visible]
        return all(each.last_snapshot is not None for each in found) if found else None

    def is_tombstoned(self, source: StorageType, host: str) -> bool:
        """Return whether a reporter was unregistered and has not registered since."""
        self._settle(self._reporters.get((source, host)))
        return (source, host) in self._tombstones

    def life(self, source: StorageType, host: str) -> int:
        """Return a number that is another one after each registration of a reporter, and after its end."""
        reporter = self._reporters.get((source, host))
        return reporter.life if reporter is not None else self._tombstones.get((source, host), 0)

    def generation(self, source: StorageType, host: str) -> str:
        """Return the generation that a reporter's blocks belong to, empty for none."""
        reporter = self._reporters.get((source, host))
        return reporter.generation if reporter is not None else ""

    def media(self, source: StorageType, host: str) -> set[str]:
        """Return the kinds of memory that a reporter holds something in."""
        reporter = self._reporters.get((source, host))
        return {medium for medium, _ in reporter.holdings} if reporter is not None else set()

    def units(self, media: frozenset[str], sources: Iterable[StorageType] | None = None) -> Iterator[Unit]:
        """Yield the units of available reporters.

        Args:
            media: kinds of memory, compared exactly; none for all.
            sources: of the reporters; None for all.
        """
        wanted = None if sources is None else frozenset(sources)
        for reporter in self._reporters.values():
            if reporter.is_visible and (wanted is None or reporter.source in wanted):
                for (medium, _), holding in reporter.holdings.items():
                    if not media or medium in media:
                        yield holding.unit

    # Events.

    def register(self, source: StorageType, host: str) -> None:
        """Begin the life of a reporter, or refresh it; what it holds stays.

        Raises:
            CapacityError: there are too many reporters.
        """
        self._settle(self._reporters.get((source, host)))
        self._tombstones.pop((source, host), None)
        self.heartbeat(source, host)
        self._reporters[source, host].life = next(self._next_life)

    def heartbeat(self, source: StorageType, host: str) -> None:
        """A reporter is alive; one that was unavailable is back with all that it holds.

        Raises:
            NodeNotRegisteredError: it was unregistered.
            CapacityError: there are too many reporters.
        """
        reporter = self._open(source, host)
        reporter.last_heartbeat = self._clock.now()
        self._show(reporter)

    def host_down(self, source: StorageType, host: str) -> None:
        """Unregister a reporter; one that is not known gets a tombstone all the same, for events that are late."""
        reporter = self._reporters.get((source, host))
        if reporter is not None:
            self._unregister(reporter)
        else:
            self._bury(source, host)

    def change(self, source: StorageType, host: str, changes: Sequence[BlockChange]) -> None:
        """Let changes take effect. The last of a block wins.

        Raises:
            NodeNotRegisteredError: the reporter was unregistered.
            CapacityError: there are too many reporters.
        """
        reporter = self._open(source, host)
        if not reporter.generation:
            reporter.generation = self._new_generation()
        self.memory_bytes -= reporter.uri_bytes
        for group in _with_same_blocks(changes):
            self._change(reporter, group)
        for name in [name for name, holding in reporter.holdings.items() if not holding.unit.blocks]:
            self._blocks.retire([reporter.holdings.pop(name).unit])  # or media that are gone would pile up
        self.memory_bytes += reporter.uri_bytes

    def snapshot(self, source: StorageType, host: str, changes: Sequence[BlockChange]) -> None:
        """Replace all that a reporter holds, and begin a generation.

        Raises:
            NodeNotRegisteredError: the reporter was unregistered.
            SnapshotRateLimitedError: its last snapshot was a moment ago.
            CapacityError: there are too many reporters.
        """
        reporter, now = self._open(source, host), self._clock.now()
        interval = reporter.times.snapshot_interval_seconds
        if reporter.last_snapshot is not None and now - reporter.last_snapshot < interval:
            wait_ms = math.ceil((reporter.last_snapshot + interval - now) * 1000)
            raise SnapshotRateLimitedError(
                f"the last snapshot of {host!r} was {now - reporter.last_snapshot:.1f} s ago, must be {interval:g} s: "
                f"send it again in {wait_ms} ms",
                wait_ms,
            )
        self._drop(reporter)
        reporter.generation = ""
        self.change(source, host, changes)
        reporter.last_snapshot = now
        self._counts.snapshots += 1

    def expire(self) -> None:
        """Hide reporters that are not available, show those that are again, and unregister those silent for long."""
        for reporter in list(self._reporters.values()):
            self._settle(reporter)

    def _open(self, source: StorageType, host: str) -> _Reporter:
        self._settle(self._reporters.get((source, host)))
        reporter = self._reporters.get((source, host))
        if reporter is not None:
            return reporter
        if (source, host) in self._tombstones:
            raise NodeNotRegisteredError(
                f"the reporter of {host!r} was unregistered: send EVENT_NODE_REGISTER, then the event again"
            )
        if len(self._reporters) >= self._most_reporters:
            raise CapacityError(f"there are {len(self._reporters)} event reporters, the most that are allowed")
        times = self.times_of(source)
        assert times is not None, "who has no event report storage cannot report"
        reporter = _Reporter(source, host, self._columns.acquire(host), self._clock.now(), times)
        self._reporters[source, host] = reporter
        self._of_host.setdefault(host, []).append(reporter)
        return reporter

    # Liveness.

    def _settle(self, reporter: _Reporter | None) -> None:
        """Let time take its effect on a reporter: it is judged at each event, too, since rounds come late."""
        if reporter is None:
            return
        times = self.times_of(reporter.source)
        reporter.times = times if times is not None else reporter.times
        idle = self._clock.now() - reporter.last_heartbeat
        if idle > reporter.times.heartbeat_timeout_seconds + reporter.times.cleanup_grace_seconds:
            self._unregister(reporter)
        elif times is None or idle > reporter.times.heartbeat_timeout_seconds:
            self._hide(reporter)
        else:
            self._show(reporter)

    def _hide(self, reporter: _Reporter) -> None:
        if reporter.is_visible:
            reporter.is_visible = False
            self._counts.expired += 1
            self._blocks.set_visible([each.unit for each in reporter.holdings.values()], is_visible=False)

    def _show(self, reporter: _Reporter) -> None:
        if not reporter.is_visible:
            reporter.is_visible = True
            self._blocks.set_visible([each.unit for each in reporter.holdings.values()], is_visible=True)

    def _unregister(self, reporter: _Reporter) -> None:
        self._drop(reporter)
        del self._reporters[reporter.source, reporter.host]
        self._of_host[reporter.host].remove(reporter)
        if not self._of_host[reporter.host]:
            del self._of_host[reporter.host]
        self._columns.release(reporter.host)
        self._counts.unregistered += 1
        self._bury(reporter.source, reporter.host)

    def _bury(self, source: StorageType, host: str) -> None:
        # The latest are kept: an event is late by seconds, and whatever names hosts could name any number of them.
        self._tombstones.pop((source, host), None)
        self._tombstones[source, host] = next(self._next_life)
        if len(self._tombstones) > self._most_reporters:
            del self._tombstones[next(iter(self._tombstones))]

    # Blocks.

    def _drop(self, reporter: _Reporter) -> None:
        self.memory_bytes -= reporter.uri_bytes
        self._blocks.retire([each.unit for each in reporter.holdings.values()])
        reporter.holdings = {}

    def _change(self, reporter: _Reporter, changes: Sequence[BlockChange]) -> None:
        """Let changes of the same blocks take effect that all add them, or all remove them, or are alone."""
        keys, uris = changes[0].keys, changes[0].uris
        if None not in uris:
            holdings = [self._holding(reporter, each) for each in changes]
            self._blocks.add([holding.unit for holding in holdings], keys)
            for holding, each in zip(holdings, changes, strict=True):
                _set_uris(holding.uris, keys, each.uris)
            self._counts.added += len(keys) * len(changes)
            return
        for each in changes:
            self._change_both_ways(reporter, each)

    def _change_both_ways(self, reporter: _Reporter, change: BlockChange) -> None:
        last = _last_of_each(change.keys)
        keys, uris = change.keys[last], [change.uris[place] for place in last.tolist()]
        is_added = np.array([uri is not None for uri in uris], np.bool_)
        if is_added.any():
            holding = self._holding(reporter, change)
            self._blocks.add([holding.unit], keys[is_added])
        elif (found := reporter.holdings.get((change.medium, change.part))) is not None:
            holding = found
        else:
            return  # nothing of it is held
        if not is_added.all():
            self._blocks.remove([holding.unit], keys[~is_added])
        _set_uris(holding.uris, keys, uris)
        added = int(np.count_nonzero(is_added))
        self._counts.added += added
        self._counts.removed += len(keys) - added

    def _holding(self, reporter: _Reporter, change: BlockChange) -> _Holding:
        name = change.medium, change.part
        holding = reporter.holdings.get(name)
        if holding is None:
            first = next(uri for uri in change.uris if uri is not None)
            medium = medium_of(change.medium)
            unit = self._blocks.open_unit(reporter.column, medium, change.part, is_visible=reporter.is_visible)
            holding = reporter.holdings[name] = _Holding(unit, _Uris(first))
        return holding

    # Where blocks lie.

    def locations(self, source: StorageType, host: str, keys: Keys, wanted: Sequence[str]) -> list[tuple[SpecUri, ...]]:
        """Return the parts of each block that an available reporter holds, each where it is fastest.

        Args:
            source: of the reporter.
            host: of the reporter.
            keys: mixed keys of the blocks.
            wanted: the one part of each block that is wanted; none for all parts of all blocks.
        """
        reporter = self._reporters.get((source, host))
        if reporter is None or not reporter.is_visible:
            return [()] * len(keys)
        fastest_first = sorted(reporter.holdings.items(), key=lambda item: (item[1].unit.medium, item[0]))
        held = self._blocks.held_units(keys, [holding.unit for _, holding in fastest_first])
        parts = [part for (_, part), _ in fastest_first]
        uris = [holding.uris for _, holding in fastest_first]
        found = []
        for position, (key, places) in enumerate(zip(keys.tolist(), held, strict=True)):
            specs: dict[str, str] = {}
            for place in places:
                if not wanted or parts[place] == wanted[position]:
                    specs.setdefault(parts[place], uris[place].of(key))
            found.append(tuple(SpecUri(name, _with_generation(uri, reporter)) for name, uri in specs.items()))
        return found


def _with_same_blocks(changes: Sequence[BlockChange]) -> Iterator[list[BlockChange]]:
    """Yield neighbours that add the same blocks together: one operation on the table adds them to several units."""
    group: list[BlockChange] = []
    for change in changes:
        if group and (change.keys is not group[0].keys or None in change.uris or None in group[0].uris):
            yield group
            group = []
        group.append(change)
    if group:
        yield group


def _set_uris(uris: _Uris, keys: Keys, given: Sequence[str | None]) -> None:
    if not uris.others and given.count(uris.default) + given.count(None) == len(given):
        return  # usual: those of engines name the memory, not the block
    for key, uri in zip(keys.tolist(), given, strict=True):
        uris.set(key, uri)


def _last_of_each(keys: Keys) -> NDArray[np.int64]:
    """Return the place of the last entry of each key, in order."""
    _, first_from_behind = np.unique(keys[::-1], return_index=True)
    places: NDArray[np.int64] = np.sort(len(keys) - 1 - first_from_behind)
    return places


def _with_generation(uri: str, reporter: _Reporter) -> str:
    address, separator, fragment = uri.partition("#")
    return f"{address}{'&' if '?' in address else '?'}s_version={reporter.generation}{separator}{fragment}"
