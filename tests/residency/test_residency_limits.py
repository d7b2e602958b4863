"""Residency within its limits: no report fails for memory or for another key scheme, and nothing that is dropped is
taken for known."""

from __future__ import annotations

import numpy as np
import pytest
from fake_clock import FakeClock

from kvcm.model.errors import CapacityError
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.key_schemes import SGLANG_SHA256, KeyScheme
from kvcm.residency.block_holders import ALL_PARTS, Medium
from kvcm.residency.block_table import Keys
from kvcm.residency.residency import (
    Change,
    Engine,
    InstanceResidency,
    Report,
    ReporterState,
    ReportResult,
    Residency,
    ResidencyLimits,
    SnapshotPart,
)

NONE = np.zeros(0, np.int64)
WHOLE = SnapshotPart(first=True, last=True)
A, B = Engine("a:1"), Engine("b:1")
INSTANCE = Instance("", "group", "instance", 16, (LocationSpecInfo("kv", 10),), ModelDeployment())
SIZE = 8000


def keys_of(seed: int) -> Keys:
    """Return keys of one report."""
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, SIZE, np.int64)


class Rig:
    """Two engines that report."""

    def __init__(self, **limits: int) -> None:
        self.clock = FakeClock()
        self.residency = Residency(self.clock, lambda _id: INSTANCE, ResidencyLimits(**limits))
        self.sequences = {A: 0, B: 0}

    @property
    def instance(self) -> InstanceResidency:
        """Return the instance."""
        return self.residency.open(INSTANCE)

    def send(
        self, engine: Engine, added: Keys = NONE, removed: Keys = NONE, snapshot: SnapshotPart | None = None
    ) -> ReportResult:
        """Send a report, a second after the one before."""
        self.sequences[engine] += 1
        change = Change(Medium.GPU, ALL_PARTS, cleared=False, removed=removed, added=added)
        result = self.instance.report(Report(engine, "run", self.sequences[engine], [change], snapshot=snapshot))
        self.tick()
        return result

    def tick(self) -> None:
        """Let the background do its work."""
        self.residency.expire()
        while self.residency.maintain():
            pass

    def held(self, engine: Engine, keys: Keys) -> int:
        """Return how many of some blocks an engine holds, from the first on."""
        return int(self.instance.prefixes(keys, [engine]).gpu[0])


def test_without_memory_blocks_are_dropped_and_their_reporters_known_in_part() -> None:
    rig = Rig(most_bytes=600_000)
    first, second, third = keys_of(1), keys_of(2), keys_of(3)
    assert not rig.send(A, first, snapshot=WHOLE).snapshot_required
    assert not rig.send(B, second, snapshot=WHOLE).snapshot_required
    while not (result := rig.send(A, third)).snapshot_required:
        third = keys_of(int(third[0]) & 0xFFFF)
    assert rig.residency.counts.dropped == SIZE
    assert rig.held(A, third) == 0
    assert not rig.instance.is_complete(A)
    assert (rig.held(A, first), rig.held(B, second)) == (SIZE, SIZE), "what was known before stays known"
    assert rig.residency.memory_bytes < 4 * 600_000

    # A snapshot does not help as long as there is no memory; it is no error, and the old blocks stay.
    assert rig.send(A, third, snapshot=WHOLE).snapshot_required
    assert rig.held(A, first) == SIZE
    assert result.resident_blocks == rig.send(A).resident_blocks

    # Removals count whatever memory there is, and make some.
    rig.send(B, removed=second)
    for number in range(4, 40):
        rig.send(A, removed=keys_of(number))
    rig.send(A, removed=np.concatenate([first, third])[:SIZE])
    assert (rig.held(A, first), rig.held(B, second)) == (0, 0)


def test_dropped_memory_is_used_again() -> None:
    rig = Rig(most_bytes=1_000_000)
    for number in range(60):  # each snapshot replaces the one before
        assert not rig.send(A, keys_of(number), snapshot=WHOLE).snapshot_required, number
    assert rig.residency.counts.dropped == 0
    assert rig.residency.memory_bytes <= 1_000_000
    assert rig.held(A, keys_of(59)) == SIZE
    assert rig.held(A, keys_of(58)) == 0


def test_there_are_at_most_so_many_reporters() -> None:
    rig = Rig(most_reporters=1)
    rig.send(A, keys_of(1))
    with pytest.raises(CapacityError, match="has 1 reporters, the most that are allowed"):
        rig.send(B, keys_of(2))
    rig.send(A, keys_of(3))
    assert [status.engine for status in rig.instance.reporters()] == [A]


PLAIN, OTHER = KeyScheme(SGLANG_SHA256, b"", 0, 16), KeyScheme(SGLANG_SHA256, b"", 0, 32)
MASKED = KeyScheme(SGLANG_SHA256, b"", 7, 16)
C = Engine("c:1")
COMPLETE, PARTIAL, QUIET = ReporterState.COMPLETE, ReporterState.PARTIAL, ReporterState.QUIET


class Schemes:
    """Engines that name key schemes."""

    def __init__(self) -> None:
        self.rig = Rig(timeout_seconds=30)
        self.instance = self.rig.instance

    def name(self, engine: Engine, scheme: KeyScheme | None, sequence: int = 1, *, stopped: bool = False) -> bool:
        """Report, and return whether a snapshot is wanted."""
        snapshot = None if stopped else WHOLE
        report = Report(engine, "run", sequence, snapshot=snapshot, stopped=stopped, key_scheme=scheme)
        return self.instance.report(report).snapshot_required

    @property
    def states(self) -> dict[Engine, ReporterState]:
        """Return the states of the reporters."""
        return {each.engine: each.state for each in self.instance.reporters()}


def test_a_key_scheme_stays_as_long_as_an_engine_has_it() -> None:
    schemes = Schemes()
    instance = schemes.instance
    for engine, scheme in ((A, PLAIN), (B, OTHER), (C, None)):
        assert not schemes.name(engine, scheme), "a snapshot would not help"
        assert instance.key_scheme == PLAIN
    assert schemes.states == {A: COMPLETE, B: PARTIAL, C: COMPLETE}
    assert [instance.is_complete(engine) for engine in (A, B, C)] == [True, False, True]
    schemes.name(A, None, 2, stopped=True)
    assert instance.key_scheme == OTHER
    assert schemes.states == {B: COMPLETE, C: COMPLETE}
    schemes.name(B, PLAIN, 2)  # it says another one itself
    assert (instance.key_scheme, schemes.states) == (PLAIN, {B: COMPLETE, C: COMPLETE})


def test_a_key_scheme_of_quiet_engines_gives_way_and_does_not_come_back() -> None:
    schemes = Schemes()
    schemes.name(A, PLAIN)
    schemes.rig.clock.time += 20
    schemes.name(B, OTHER)
    schemes.rig.clock.time += 20
    schemes.instance.expire()
    assert (schemes.instance.key_scheme, schemes.states) == (OTHER, {A: QUIET, B: COMPLETE})
    schemes.name(A, None, 2)
    assert (schemes.instance.key_scheme, schemes.states) == (OTHER, {A: PARTIAL, B: COMPLETE})


def test_a_key_scheme_with_a_mask_goes_before_those_without() -> None:
    schemes = Schemes()
    schemes.name(A, PLAIN)
    schemes.name(B, MASKED)
    assert (schemes.instance.key_scheme, schemes.states) == (MASKED, {A: PARTIAL, B: COMPLETE})
    schemes.name(C, PLAIN)
    assert schemes.instance.key_scheme == MASKED
    schemes.name(B, None, 2, stopped=True)
    assert (schemes.instance.key_scheme, schemes.states) == (PLAIN, {A: COMPLETE, C: COMPLETE})
