"""Any history of reports, restarts, gaps, snapshots and silence leaves what plain dicts would hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_clock import FakeClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from thoroughness import examples

from kvcm.model.instances import Instance, LocationSpecInfo, LocationSpecKind, ModelDeployment
from kvcm.model.keys import mixed_array
from kvcm.residency.block_holders import ALL_PARTS, Medium
from kvcm.residency.residency import (
    Change,
    Engine,
    Report,
    ReporterState,
    Residency,
    ResidencyLimits,
    SnapshotPart,
)

TIMEOUT = 30.0
KEYS = [0, -1, 1, 2**63 - 1, -(2**63), *range(100, 125)]
ENGINES = [Engine("a:1"), Engine("a:1", 1), Engine("b:1"), Engine("c:1")]
FULL = ("f0", "f1")
PARTS = (ALL_PARTS, *FULL, "m0")
INSTANCE = Instance(
    "",
    "group",
    "instance",
    16,
    (
        LocationSpecInfo("f0", 10),
        LocationSpecInfo("f1", 10),
        LocationSpecInfo("m0", 10, LocationSpecKind.LSK_LINEAR_ATTENTION),
    ),
    ModelDeployment(),
)

key_lists = st.lists(st.sampled_from(KEYS), max_size=12)
changes = st.builds(
    lambda *values: values,
    st.sampled_from(Medium),
    st.sampled_from((ALL_PARTS, ALL_PARTS, *PARTS)),
    st.sampled_from((False, False, False, True)),
    key_lists,
    key_lists,
)
AnyChange = tuple[Medium, str, bool, list[int], list[int]]
Held = dict[tuple[Medium, str], set[int]]


@dataclass
class Model:
    """The known state of one engine's rank."""

    stream: str
    sequence: int
    last_report: float
    visible: Held = field(default_factory=dict)
    building: Held | None = None
    is_complete: bool = False

    def drop(self) -> None:
        self.visible, self.building, self.is_complete = {}, None, False

    def apply(self, change: AnyChange) -> None:
        medium, part, cleared, removed, added = change
        for held in [self.visible] + ([] if self.building is None else [self.building]):
            if cleared:
                for name in [name for name in held if name[0] is medium and part in (ALL_PARTS, name[1])]:
                    del held[name]
            held.setdefault((medium, part), set()).difference_update(removed)
            held[medium, part].update(added)

    def has(self, key: int, media: tuple[Medium, ...]) -> bool:
        def in_media(part: str) -> bool:
            return any(key in self.visible.get((medium, part), ()) for medium in media)

        return in_media(ALL_PARTS) or all(in_media(part) for part in FULL)


class Histories(RuleBasedStateMachine):
    """Reports in every order that a network and restarts make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.models: dict[Engine, Model] = {}
        self.next: dict[Engine, tuple[str, int]] = dict.fromkeys(ENGINES, ("s0", 1))
        self.registered: Instance | None = INSTANCE
        self.ended: set[tuple[Engine, str]] = set()
        self.start()

    def start(self) -> None:
        self.residency = Residency(self.clock, lambda _id: self.registered, ResidencyLimits(timeout_seconds=TIMEOUT))

    def send(self, engine: Engine, sequence: int, changes: list[AnyChange], **more: Any) -> None:
        stream = self.next[engine][0]
        self.next[engine] = stream, max(sequence + 1, self.next[engine][1])
        sent = [
            Change(medium, part, cleared, _mixed(removed), _mixed(added))
            for medium, part, cleared, removed, added in changes
        ]
        report = Report(engine, stream, sequence, sent, **more)
        result = self.residency.open(INSTANCE).report(report)
        self.expect(report, changes)
        model = self.models.get(engine)
        if model is not None:
            assert result.applied_sequence == model.sequence  # R3
            assert result.snapshot_required is not model.is_complete  # R2

    def expect(self, report: Report, changes: list[AnyChange]) -> None:
        now = self.clock.now()
        model = self.models.get(report.engine)
        if model is None:
            model = self.models[report.engine] = Model(report.stream, report.sequence - 1, now)
        if model.stream != report.stream:
            self.ended.add((report.engine, model.stream))
            model.drop()
            model.stream, model.sequence = report.stream, report.sequence - 1
        model.last_report = now
        if report.sequence <= model.sequence:
            return
        if report.sequence > model.sequence + 1:
            model.drop()
        model.sequence = report.sequence
        if report.stopped:
            del self.models[report.engine]
            return
        if report.snapshot is not None and report.snapshot.first:
            model.building = {}
        for change in changes:
            model.apply(change)
        if report.snapshot is not None and report.snapshot.last and model.building is not None:
            model.visible, model.building, model.is_complete = model.building, None, True

    @rule(engine=st.sampled_from(ENGINES), changes=st.lists(changes, max_size=3))
    def report(self, engine: Engine, changes: list[AnyChange]) -> None:
        self.send(engine, self.next[engine][1], changes)

    @rule(
        engine=st.sampled_from(ENGINES),
        changes=st.lists(changes, max_size=2),
        part=st.builds(SnapshotPart, st.booleans(), st.booleans()),
    )
    def snapshot(self, engine: Engine, changes: list[AnyChange], part: SnapshotPart) -> None:
        self.send(engine, self.next[engine][1], changes, snapshot=part)

    @rule(engine=st.sampled_from(ENGINES), changes=st.lists(changes, max_size=2))
    def repeat(self, engine: Engine, changes: list[AnyChange]) -> None:
        """A report that was seen; the reporter got no answer."""
        self.send(engine, max(1, self.next[engine][1] - 1), changes)

    @rule(engine=st.sampled_from(ENGINES), changes=st.lists(changes, max_size=2))
    def gap(self, engine: Engine, changes: list[AnyChange]) -> None:
        self.send(engine, self.next[engine][1] + 2, changes)

    @rule(engine=st.sampled_from(ENGINES), changes=st.lists(changes, max_size=2), number=st.integers(1, 9))
    def late(self, engine: Engine, changes: list[AnyChange], number: int) -> None:
        """A report of a stream that ended was under way, or a second reporter of the engine sends it (R1)."""
        model = self.counted(engine)
        streams = [stream for of, stream in self.ended if of == engine]
        if model is None or not streams:
            return
        sent = [Change(*each[:3], removed=_mixed(each[3]), added=_mixed(each[4])) for each in changes]
        result = self.residency.open(INSTANCE).report(Report(engine, min(streams), number, sent))
        assert result == (number, False, 0)

    @rule(engine=st.sampled_from(ENGINES))
    def restart_engine(self, engine: Engine) -> None:
        self.next[engine] = f"s{int(self.next[engine][0][1:]) + 1}", 1

    @rule(engine=st.sampled_from(ENGINES))
    def stop_engine(self, engine: Engine) -> None:
        self.send(engine, self.next[engine][1], [], stopped=True)
        self.restart_engine(engine)

    @rule()
    def restart_manager(self) -> None:
        self.models.clear()
        self.ended.clear()
        self.start()

    @rule(seconds=st.sampled_from((1.0, TIMEOUT / 2, TIMEOUT + 1, TIMEOUT * 11)))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.residency.expire()
        for engine, model in list(self.models.items()):
            if self.clock.now() - model.last_report > TIMEOUT * 10:
                del self.models[engine]

    @precondition(lambda self: self.models)
    @rule()
    def register_again(self) -> None:
        self.registered = None
        self.residency.expire()
        self.registered = INSTANCE
        self.models.clear()
        self.ended.clear()

    @rule(steps=st.integers(1, 40))
    def maintain(self, steps: int) -> None:
        for _ in range(steps):
            self.residency.maintain()

    @rule(prompt=st.permutations(KEYS) | st.lists(st.sampled_from(KEYS)), stored=st.sets(st.sampled_from(KEYS)))
    def prefixes(self, prompt: list[int], stored: set[int]) -> None:
        """R1: a block counts if a report said so, and none has taken it back or may have."""
        found = self.residency.open(INSTANCE).prefixes(
            _mixed(prompt), ENGINES, np.array([key in stored for key in prompt], np.bool_)
        )
        media = (Medium.GPU,), (Medium.GPU, Medium.HOST), tuple(Medium)
        for place, engine in enumerate(ENGINES):
            model = self.counted(engine)
            for lengths, of in zip(found, media, strict=False):
                assert lengths[place] == _prefix(prompt, lambda key, of=of, m=model: m is not None and m.has(key, of))
            assert found.joint[place] == _prefix(
                prompt, lambda key, m=model: key in stored or (m is not None and m.has(key, tuple(Medium)))
            )

    @rule(prompt=st.lists(st.sampled_from(KEYS), min_size=1))
    def held_run(self, prompt: list[int]) -> None:
        counted = [model for engine in ENGINES if (model := self.counted(engine)) is not None]
        expected = _prefix(prompt, lambda key: any(model.has(key, tuple(Medium)) for model in counted))
        assert self.residency.open(INSTANCE).held_run(_mixed(prompt)) == expected

    def counted(self, engine: Engine) -> Model | None:
        model = self.models.get(engine)
        return model if model is not None and not self.is_quiet(model) else None

    def is_quiet(self, model: Model) -> bool:
        return self.clock.now() - model.last_report > TIMEOUT

    @invariant()
    def reporters_are_those_of_the_model(self) -> None:
        statuses = list(self.residency.open(INSTANCE).reporters())
        assert [status.engine for status in statuses] == sorted(self.models)
        for status in statuses:
            model = self.models[status.engine]
            assert (status.state is ReporterState.QUIET) is self.is_quiet(model)
            assert (status.state is ReporterState.COMPLETE) is (model.is_complete and not self.is_quiet(model))
            for medium in Medium:
                blocks = sum(len(keys) for name, keys in model.visible.items() if name[0] is medium)
                assert status.blocks.get(medium, 0) == blocks

    def teardown(self) -> None:
        """Dropped memory is given back in the end."""
        self.clock.time += TIMEOUT * 11
        residency = self.residency.open(INSTANCE)
        self.residency.expire()
        while self.residency.maintain():
            pass
        assert residency.blocks == 0


def _mixed(keys: list[int]) -> Any:
    return mixed_array(np.array(keys, np.int64))


def _prefix(prompt: list[int], has: Any) -> int:
    return next((place for place, key in enumerate(prompt) if not has(key)), len(prompt))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(500), stateful_step_count=40, deadline=None)
