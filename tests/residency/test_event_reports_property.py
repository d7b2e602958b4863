"""Any history of events leaves what plain dicts would hold: liveness, generations, tombstones, parts, and uris."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import pytest
from fake_clock import FakeClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from thoroughness import examples

from kvcm.model.errors import CapacityError, NodeNotRegisteredError, SnapshotRateLimitedError
from kvcm.model.instances import Instance, LocationSpecInfo, LocationSpecKind, ModelDeployment
from kvcm.model.keys import mixed_array
from kvcm.model.storages import StorageType
from kvcm.residency.block_holders import ALL_PARTS, Medium
from kvcm.residency.event_reports import BlockChange, EventTimes, medium_of
from kvcm.residency.host_matches import HostQuery, joint_matches, longest_held, matches
from kvcm.residency.residency import Change, Engine, Report, Residency, ResidencyLimits

TIMES = EventTimes(heartbeat_timeout_seconds=30, cleanup_grace_seconds=100, snapshot_interval_seconds=20)
MOST_REPORTERS = 5
KEYS = [0, -1, 1, 2**63 - 1, -(2**63), *range(100, 107)]
HOSTS = ["a:1", "a:1@1", "b:1", "c:1"]
SOURCES = [StorageType.ST_EVENT_REPORT_L1P5, StorageType.ST_EVENT_REPORT_L2]
FULL, LINEAR = ("f0", "f1"), ("m0",)
PARTS = (*FULL, *LINEAR)
MEDIA = ("hbm", "mem", "MEM", "strange", "nvme", "")
URIS = ("a://x", "a://y?z=1", "a://z#w")
INSTANCE = Instance(
    "",
    "group",
    "instance",
    16,
    tuple(
        LocationSpecInfo(name, 10, _kind)
        for name, _kind in [
            ("f0", LocationSpecKind.LSK_FULL_ATTENTION),
            ("m0", LocationSpecKind.LSK_LINEAR_ATTENTION),
            ("f1", LocationSpecKind.LSK_FULL_ATTENTION),
        ]
    ),
    ModelDeployment(),
)

Identity = tuple[StorageType, str]
reporters = st.tuples(st.sampled_from(SOURCES), st.sampled_from(HOSTS))
uris = st.sampled_from((URIS[0], *URIS))
entries = st.lists(st.tuples(st.sampled_from(KEYS), uris | st.none()), min_size=1, max_size=12)
additions = st.lists(st.tuples(st.sampled_from(KEYS), uris), min_size=1, max_size=12)
units = st.tuples(st.sampled_from(MEDIA), st.sampled_from(PARTS))
Entries = list[tuple[int, str | None]]


@dataclass
class Model:
    """The known state of one reporter."""

    last_heartbeat: float
    generation: str = ""
    last_snapshot: float | None = None
    held: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)

    def apply(self, changes: dict[tuple[str, str], Entries]) -> None:
        for unit, entries in changes.items():
            held = self.held.setdefault(unit, {})
            for key, uri in entries:
                if uri is None:
                    held.pop(key, None)
                else:
                    held[key] = uri

    def has(self, key: int, part: str, media: frozenset[str]) -> bool:
        return any(key in held for (m, p), held in self.held.items() if p == part and (not media or m in media))


class Histories(RuleBasedStateMachine):
    """Events in any order, with time going by and a storage that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.models: dict[Identity, Model] = {}
        self.tombstones: dict[Identity, None] = {}
        self.is_configured = True
        self.own: set[int] = set()  # of a:1, by a report of ours
        self.sequence = count(1)
        generations = map("{:032x}".format, count())
        self.generations = map("{:032x}".format, count())
        self.residency = Residency(
            self.clock,
            lambda _id: INSTANCE,
            ResidencyLimits(timeout_seconds=1e9, most_reporters=MOST_REPORTERS),
            event_times=lambda _instance, _source: TIMES if self.is_configured else None,
            new_generation=lambda: next(generations),
        )
        self.instance = self.residency.open(INSTANCE)
        self.events = self.instance.events

    # The model of liveness.

    def settle(self, reporter: Identity) -> None:
        model = self.models.get(reporter)
        if model is not None and self.clock.now() - model.last_heartbeat > 130:
            del self.models[reporter]
            self.bury(reporter)

    def bury(self, reporter: Identity) -> None:
        self.tombstones.pop(reporter, None)
        self.tombstones[reporter] = None
        if len(self.tombstones) > MOST_REPORTERS:
            del self.tombstones[next(iter(self.tombstones))]

    def is_available(self, model: Model) -> bool:
        return self.is_configured and self.clock.now() - model.last_heartbeat <= 30

    def do(self, reporter: Identity, act: Callable[[], None]) -> Model | None:
        """Let an event that needs a reporter happen; return the model's, None where it was refused."""
        if not self.is_configured:
            return None  # the calls refuse it
        self.settle(reporter)
        if reporter in self.tombstones:
            with pytest.raises(NodeNotRegisteredError):
                act()
            return None
        if reporter not in self.models and len(self.models) >= MOST_REPORTERS:
            with pytest.raises(CapacityError):
                act()
            return None
        act()
        return self.models.setdefault(reporter, Model(self.clock.now()))

    # Events.

    @rule(reporter=reporters)
    def register(self, reporter: Identity) -> None:
        if not self.is_configured:
            return
        self.settle(reporter)
        self.tombstones.pop(reporter, None)
        model = self.do(reporter, lambda: self.events.register(*reporter))
        if model is not None:
            model.last_heartbeat = self.clock.now()

    @rule(reporter=reporters)
    def heartbeat(self, reporter: Identity) -> None:
        model = self.do(reporter, lambda: self.events.heartbeat(*reporter))
        if model is not None:
            model.last_heartbeat = self.clock.now()

    @rule(reporter=reporters)
    def host_down(self, reporter: Identity) -> None:
        self.events.host_down(*reporter)
        self.models.pop(reporter, None)
        self.bury(reporter)

    @rule(reporter=reporters, changes=st.dictionaries(units, entries, min_size=1, max_size=3))
    def change(self, reporter: Identity, changes: dict[tuple[str, str], Entries]) -> None:
        model = self.do(reporter, lambda: self.events.change(*reporter, _changes(changes)))
        if model is not None:
            model.generation = model.generation or next(self.generations)
            model.apply(changes)

    @rule(reporter=reporters, medium=st.sampled_from(MEDIA), added=additions)
    def add_whole_blocks(self, reporter: Identity, medium: str, added: Entries) -> None:
        changes = {(medium, part): added for part in FULL}
        self._add_same_blocks(reporter, changes)

    def _add_same_blocks(self, reporter: Identity, changes: dict[tuple[str, str], Entries]) -> None:
        keys = _mixed([key for key, _ in next(iter(changes.values()))])
        sent = [BlockChange(*unit, keys, [uri for _, uri in entries]) for unit, entries in changes.items()]
        model = self.do(reporter, lambda: self.events.change(*reporter, sent))
        if model is not None:
            model.generation = model.generation or next(self.generations)
            model.apply(changes)

    @rule(reporter=reporters, changes=st.dictionaries(units, additions, max_size=3))
    def snapshot(self, reporter: Identity, changes: dict[tuple[str, str], Entries]) -> None:
        self.settle(reporter)
        known, now = self.models.get(reporter), self.clock.now()
        if self.is_configured and known is not None and known.last_snapshot is not None:
            wait = known.last_snapshot + 20 - now
            if wait > 0:
                with pytest.raises(SnapshotRateLimitedError) as refused:
                    self.events.snapshot(*reporter, _changes(changes))
                assert refused.value.retry_after_ms == pytest.approx(wait * 1000, abs=1)
                return
        model = self.do(reporter, lambda: self.events.snapshot(*reporter, _changes(changes)))
        if model is not None:
            model.generation, model.last_snapshot, model.held = next(self.generations), now, {}
            model.apply(changes)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8))
    def report_of_ours(self, keys: list[int]) -> None:
        """Another reporter of a host that shares its column."""
        change = Change(Medium.GPU, ALL_PARTS, True, _mixed([]), _mixed(keys))
        self.instance.report(Report(Engine("a:1"), "s", next(self.sequence), [change]))
        self.own = set(keys)

    @rule(seconds=st.sampled_from((1.0, 15.0, 31.0, 131.0)))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.round()

    @rule()
    def configure(self) -> None:
        self.is_configured = not self.is_configured
        self.round()

    def round(self) -> None:
        self.residency.expire()
        for reporter in list(self.models):
            self.settle(reporter)

    @rule(steps=st.integers(1, 40))
    def maintain(self, steps: int) -> None:
        for _ in range(steps):
            self.residency.maintain()

    # Answers.

    def counted(self, host: str, key: int, part: str, media: frozenset[str], source: StorageType | None = None) -> bool:
        found = (model for (s, h), model in self.models.items() if h == host and source in {None, s})
        own = source is None and host == "a:1" and key in self.own and (not media or "hbm" in media)
        return own or any(self.is_available(model) and model.has(key, part, media) for model in found)

    @rule(
        prompt=st.permutations(KEYS),
        media=st.frozensets(st.sampled_from(MEDIA), max_size=2),
        needs_linear=st.booleans(),
        stored=st.sets(st.tuples(st.sampled_from(KEYS), st.sampled_from(PARTS))),
        uses_stored=st.booleans(),
    )
    def host_states(
        self,
        prompt: list[int],
        media: frozenset[str],
        needs_linear: bool,
        stored: set[tuple[int, str]],
        uses_stored: bool,
    ) -> None:
        holders, columns = self.instance.holders, self.instance.columns
        own = holders.mask_of(self.instance.units(media)) if media else holders.every_unit()
        query = HostQuery(_mixed(prompt), own, needs_linear, holders.full_parts)
        found = matches(holders, columns, query)

        def prefix(has: Callable[[int, str], bool]) -> int:
            best = 0
            for place, key in enumerate(prompt):
                if not all(has(key, part) for part in FULL):
                    break
                best = place + 1 if not needs_linear or has(key, "m0") else best
            return best

        expected = {
            host: prefix(lambda key, part, host=host: self.counted(host, key, part, media))
            for host in HOSTS
            if any(self.counted(host, prompt[0], part, media) for part in PARTS)
        }
        assert [tuple(each) for each in found] == sorted(expected.items(), key=lambda item: (-item[1], item[0]))
        level = SOURCES[1]
        peers = self.events.hosts_of(level)
        flags = np.array([[(key, part) in stored for part in (*FULL, *LINEAR)] for key in prompt], np.bool_)
        joint = joint_matches(
            holders,
            columns,
            query,
            hosts=[host for host, _ in found],
            peers=(peers, holders.mask_of(self.events.units(media, [level]))),
            stored=flags.__getitem__ if uses_stored else None,
        )
        for (host, _), answer in zip(found, joint, strict=True):

            def has(key: int, part: str, peer: str = "", host: str = host) -> bool:
                if peer and self.counted(peer, key, part, media, level):
                    return True
                return (uses_stored and (key, part) in stored) or self.counted(host, key, part, media)

            lengths = {peer: prefix(partial(has, peer=peer)) for peer in ("", *peers)}
            assert answer.blocks == max(lengths.values())
            peer = next(peer for peer, length in lengths.items() if length == answer.blocks)
            needed = [(key, part) for key in prompt[: answer.blocks] for part in FULL]
            if needs_linear and answer.blocks:
                needed.append((prompt[answer.blocks - 1], "m0"))
            assert answer.fetched == len({key for key, part in needed if not has(key, part)})
            assert (answer.fetched > 0) == (peer != "")

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=12),
        source=st.sampled_from(SOURCES),
        ends_at_gap=st.booleans(),
        data=st.data(),
    )
    def locations(self, keys: list[int], source: StorageType, ends_at_gap: bool, data: st.DataObject) -> None:
        names = data.draw(st.just([]) | st.lists(st.sampled_from(PARTS), min_size=len(keys), max_size=len(keys)))
        holders, hosts = self.instance.holders, self.events.hosts_of(source)
        peer = longest_held(
            holders,
            self.instance.columns,
            _mixed(keys),
            units=holders.mask_of(self.events.units(frozenset(), [source])),
            hosts=hosts,
            part_of=np.array([holders.row_of_part(name) for name in names], np.int64) if names else None,
            ends_at_gap=ends_at_gap,
        )

        def held(host: str) -> list[bool]:
            wanted = [[name] for name in names] or [list(PARTS)] * len(keys)
            return [
                any(self.counted(host, key, part, frozenset(), source) for part in parts)
                for key, parts in zip(keys, wanted, strict=True)
            ]

        def score(host: str) -> int:
            flags = held(host)
            return flags.index(False) if ends_at_gap and False in flags else sum(flags)

        assert hosts == sorted(
            host for host in HOSTS if (model := self.models.get((source, host))) and self.is_available(model)
        )
        best = max(map(score, hosts), default=0)
        assert peer == (next(host for host in hosts if score(host) == best) if best else None)
        if peer is None:
            return
        model = self.models[source, peer]
        found = self.events.locations(source, peer, _mixed(keys), names)
        for key, specs, wanted in zip(keys, found, names or [None] * len(keys), strict=True):
            expected = {
                part: min(
                    (medium_of(m), m, held[key]) for (m, p), held in model.held.items() if p == part and key in held
                )[2]
                for part in ([wanted] if wanted else PARTS)
                if model.has(key, part, frozenset())
            }
            assert {spec.name: spec.uri for spec in specs} == {
                part: _versioned(uri, model.generation) for part, uri in expected.items()
            }

    @invariant()
    def reporters_are_those_of_the_model(self) -> None:
        assert len(self.events) == len(self.models)
        for source in SOURCES:
            for host in HOSTS:
                model = self.models.get((source, host))
                assert self.events.generation(source, host) == (model.generation if model else "")
                assert self.events.is_tombstoned(source, host) is ((source, host) in self.tombstones)
        assert self.events.memory_bytes >= 0
        if not any(len(set(held.values())) > 1 for model in self.models.values() for held in model.held.values()):
            exceptions = sum(len(held) for model in self.models.values() for held in model.held.values())
            assert self.events.memory_bytes <= exceptions * 250

    def teardown(self) -> None:
        """Dropped memory is given back in the end."""
        for reporter in list(self.models):
            self.events.host_down(*reporter)
        self.instance.report(Report(Engine("a:1"), "s", next(self.sequence), stopped=True))
        while self.residency.maintain():
            pass
        assert (self.instance.blocks, len(self.instance.columns), self.events.memory_bytes) == (0, 0, 0)


def _mixed(keys: list[int]) -> np.ndarray:
    return mixed_array(np.array(keys, np.int64))


def _changes(changes: dict[tuple[str, str], Entries]) -> list[BlockChange]:
    return [
        BlockChange(medium, part, _mixed([key for key, _ in entries]), [uri for _, uri in entries])
        for (medium, part), entries in changes.items()
    ]


def _versioned(uri: str, generation: str) -> str:
    version = f"s_version={generation}"
    return {URIS[0]: f"a://x?{version}", URIS[1]: f"a://y?z=1&{version}", URIS[2]: f"a://z?{version}#w"}[uri]


TestEventHistories = Histories.TestCase
TestEventHistories.settings = settings(max_examples=examples(1000), stateful_step_count=40, deadline=None)
