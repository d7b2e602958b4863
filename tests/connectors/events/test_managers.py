"""Which managers get reports: after any history of managers and addresses each has one stream, and all blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from engine_model import BLOCK_TOKENS, VLLM, ModelManager, stored
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.connectors.addresses import AnnouncedManager
from kvcm.connectors.events.blocks import HeldBlocks, MappingSettings
from kvcm.connectors.events.decoding import decode_batch
from kvcm.connectors.events.managers import ManagerSet
from kvcm.connectors.events.reporter import Reporter, ReporterIdentity, ReporterSettings

GIVEN = ("first:1", "alias:1", "service:1")  # two names of the first manager, and a Service of all
LONGEST_SECONDS = 900.0
"""After which every pause is over, and everything that is named no more is forgotten."""


def direct(number: int) -> str:
    return f"m{number}:1"


@dataclass
class Machine:
    """A manager, and where its own address leads.

    Attributes:
        number: its own.
        model: what it knows of the engine.
        is_up: it answers.
        leads_to: number of the manager that its own address leads to: of another one through a wrong setting; None for
            nowhere, as behind NAT.
    """

    number: int
    model: ModelManager = field(default_factory=ModelManager)
    is_up: bool = True
    leads_to: int | None = None


class World:
    """Three managers, their addresses, and one rank's reports to those that a `ManagerSet` names."""

    def __init__(self, count: int = 3, follows: bool = True) -> None:
        self.clock = FakeClock()
        self.ids = map("node-{}".format, itertools.count())
        self.machines = [Machine(number, leads_to=number) for number in range(count)]
        for machine in self.machines:
            machine.model.node_id = next(self.ids)
        self.service_leads_to = 0
        self.are_lists_frozen = False
        self.managers = ManagerSet(GIVEN, self.clock.now, follows=follows)
        self.blocks = HeldBlocks(MappingSettings("vllm", VLLM, {}), self.on_changes)
        self.outlets: dict[str, tuple[Reporter, int]] = {}
        self.streams = map(str, itertools.count())
        self.probes: list[str] = []
        self.found: dict[str, str] = {}  # by probes
        self.update_lists()
        self.sync()

    def machine_at(self, address: str) -> Machine | None:
        """Return the manager that an address leads to, None for none that answers."""
        if address == "service:1":
            number: int | None = self.service_leads_to
        elif address in GIVEN:
            number = 0
        else:
            number = self.machines[int(address[1:].partition(":")[0])].leads_to
        return self.machines[number] if number is not None and self.machines[number].is_up else None

    def update_lists(self) -> None:
        """Have every manager know which ones serve, unless the store is away."""
        serving = [each for each in self.machines if each.is_up]
        named = [(each.model.node_id, *direct(each.number).split(":")) for each in serving]
        for machine in self.machines:
            if not self.are_lists_frozen:
                machine.model.named = [(a, b, int(c)) for a, b, c in named] if len(serving) > 1 else ()

    def on_changes(self, changes: object) -> None:
        for reporter, _ in self.outlets.values():
            reporter.on_changes(changes)  # type: ignore[arg-type]

    def sync(self) -> None:
        """Report where the set says, as `RankSubscriber.follow_managers` does."""
        streams = self.managers.streams()
        for address in [each for each in self.outlets if each not in streams]:
            del self.outlets[address]
        for address, epoch in streams.items():
            if address not in self.outlets:
                assert address in GIVEN or self.found[address]  # M3: a probe found a manager there
                identity = ReporterIdentity("instance", "engine:1", 0, VLLM)
                made = Reporter(identity, self.blocks, ReporterSettings(), lambda: next(self.streams), self.clock.now)
                self.outlets[address] = made, epoch
            elif self.outlets[address][1] != epoch:
                self.outlets[address][0].reset()
                self.outlets[address] = self.outlets[address][0], epoch

    def exchange(self, address: str) -> bool:
        """Send the next report to an address, if there is one."""
        if address not in self.outlets:
            return False
        reporter, _ = self.outlets[address]
        request = reporter.next_report()
        if request is None:
            return False
        machine = self.machine_at(address)
        if machine is None:
            reporter.on_failure(request, "away")
            self.managers.on_failure(address)
            return False
        answer = machine.model.report(request)
        reporter.on_answer(request, answer)
        self.managers.on_answer(address, answer.node_id, AnnouncedManager.parse_all(answer.managers))
        self.sync()
        return True

    def probe(self) -> bool:
        address = self.managers.next_probe()
        if address is None:
            return False
        self.probes.append(address)
        machine = self.machine_at(address)
        self.found[address] = "" if machine is None else machine.model.node_id
        self.managers.on_probe(address, self.found[address])
        self.sync()
        return True

    def go_on(self, seconds: float) -> None:
        """Let time pass, with all reports and probes that are due."""
        for _ in range(int(seconds / 2)):
            self.clock.time += 2.0
            while self.probe():
                pass
            self.sync()
            for address in list(self.outlets):
                while self.exchange(address):
                    pass

    def restart(self, number: int, *, as_another: bool) -> None:
        machine = self.machines[number]
        machine.is_up = True
        machine.model.restart()
        if as_another:
            machine.model.node_id = next(self.ids)

    def step(self, action: tuple[str, int, int]) -> None:
        name, a, b = action
        number = a % len(self.machines)
        machine = self.machines[number]
        addresses = [*GIVEN, *map(direct, range(len(self.machines)))]
        steps: dict[str, Callable[[], object]] = {
            "goes": lambda: setattr(machine, "is_up", False),
            "comes": lambda: setattr(machine, "is_up", True),
            "restarts": lambda: self.restart(number, as_another=False),
            "restarts as another": lambda: self.restart(number, as_another=True),
            "service moves": lambda: setattr(self, "service_leads_to", number),
            "address leads": lambda: setattr(machine, "leads_to", [number, None, b % len(self.machines)][b % 3]),
            "store away": lambda: setattr(self, "are_lists_frozen", b % 2 == 0),
            "blocks": lambda: self.store(a, b % 4 + 1),
            "report": lambda: self.exchange(addresses[(a + b) % len(addresses)]),
            "probe": self.probe,
            "time": lambda: self.go_on(2.0 * (b % 8)),
        }
        steps[name]()
        self.update_lists()

    def store(self, number: int, blocks: int) -> None:
        event = stored(VLLM, [number + 1] * BLOCK_TOKENS * blocks)
        self.blocks.apply(decode_batch(msgspec.msgpack.encode([0.0, [event], 0])).events)

    def users_of(self, machine: Machine) -> list[str]:
        return [address for address in self.outlets if self.machine_at(address) is machine]

    def wanted(self, follows: bool) -> list[Machine] | None:
        """Return the managers that must get reports: those at given addresses, and those that these name and that are
        where they say. None where no given address answers: then those that were found before may go on."""
        given = [machine for address in GIVEN if (machine := self.machine_at(address)) is not None]
        direct_ones = [each for each in self.machines if follows and each.is_up and each.leads_to == each.number]
        return [machine for machine in self.machines if machine in given or machine in direct_ones] if given else None


_ACTIONS = st.tuples(
    st.sampled_from(
        ["report"] * 6
        + ["time"] * 6
        + ["blocks"] * 4
        + ["probe", "goes", "goes", "comes", "comes", "restarts", "restarts as another"]
        + ["service moves", "service moves", "address leads", "store away"]
    ),
    st.integers(0, 40),
    st.integers(0, 40),
)


@settings(max_examples=examples(1000))
@given(count=st.integers(1, 3), follows=st.booleans(), actions=st.lists(_ACTIONS, min_size=5, max_size=50))
def test_in_the_end_every_manager_has_one_stream_and_all_blocks(
    count: int, follows: bool, actions: list[tuple[str, int, int]]
) -> None:
    world = World(count, follows)
    for action in actions:
        world.step(action)
    world.are_lists_frozen = False
    world.update_lists()
    world.go_on(LONGEST_SECONDS)
    settled = dict(world.managers.streams())
    held = set(world.blocks.pairs())
    wanted = world.wanted(follows)
    for machine in world.machines:
        users = world.users_of(machine)
        assert len(users) <= 1, (machine.number, users)
        assert wanted is None or len(users) == (machine in wanted), (machine.number, users)
        if users:
            assert machine.model.pairs() == held
            assert world.outlets[users[0]][0].is_settled
    nowhere = {address for address in world.outlets if world.machine_at(address) is None}
    assert nowhere <= {*GIVEN, *(direct(machine.number) for machine in world.machines if machine.is_up)}
    world.go_on(LONGEST_SECONDS / 3)
    assert world.managers.streams() == settled  # nothing goes back and forth


def test_named_managers_get_reports_and_two_names_of_one_get_them_once() -> None:
    world = World()
    world.store(1, 3)
    world.go_on(30)
    assert [len(world.users_of(machine)) for machine in world.machines] == [1, 1, 1]
    assert world.managers.states() == {"used": 3, "spare": 3, "unreached": 0}
    begun = {machine.number: {each.stream for each in machine.model.requests} for machine in world.machines}
    world.go_on(300)
    assert begun == {machine.number: {each.stream for each in machine.model.requests} for machine in world.machines}


def test_a_manager_that_is_named_no_more_is_forgotten_and_one_that_only_answers_slowly_is_not() -> None:
    world = World()
    world.go_on(30)
    world.machines[2].is_up = False
    world.go_on(20)  # it is still named, until its vitals end
    assert direct(2) in world.outlets
    world.update_lists()
    assert world.managers.is_expected(direct(2))
    world.go_on(40)
    assert not world.managers.is_expected(direct(2))
    world.go_on(40)
    assert direct(2) not in world.outlets
    assert world.managers.states()["used"] == 2


def test_managers_that_cannot_reach_the_store_are_not_forgotten() -> None:
    world = World()
    world.go_on(30)
    for machine in world.machines:
        machine.model.named = ()  # each sees itself alone
    world.go_on(300)
    assert [len(world.users_of(machine)) for machine in world.machines] == [1, 1, 1]


def test_an_address_that_leads_to_another_manager_gets_no_report() -> None:
    world = World()
    world.machines[1].leads_to, world.machines[2].leads_to = 2, None
    world.go_on(600)
    assert set(world.outlets) <= set(GIVEN)
    assert not world.machines[1].model.requests
    assert not world.machines[2].model.requests
    assert world.managers.states()["unreached"] == 2


def test_probes_of_an_address_that_leads_nowhere_become_rare() -> None:
    world = World()
    world.machines[1].leads_to = None
    for _ in range(20):
        world.go_on(30)
    assert 4 <= world.probes.count(direct(1)) <= 8


def test_a_second_name_takes_over_when_the_first_fails() -> None:
    managers, clock = _set_of("a:1", "b:1")
    managers.on_answer("a:1", "x")
    managers.on_answer("b:1", "x")
    assert managers.streams() == {"a:1": 1}  # begins again: the streams of b:1 had ended its own
    managers.on_failure("a:1")
    clock.time += 2.0
    assert managers.next_probe() is None  # for a moment
    managers.on_answer("a:1")
    clock.time += 10.0
    assert managers.next_probe() is None  # it was one failure
    managers.on_failure("a:1")
    clock.time += 6.0
    assert managers.next_probe() == "b:1"
    managers.on_probe("b:1", "x")
    assert managers.streams() == {"b:1": 1}


def test_answers_of_addresses_that_are_forgotten_change_nothing() -> None:
    managers, clock = _set_of("a:1")
    managers.on_answer("a:1", "x", [AnnouncedManager("x", "a:1"), AnnouncedManager("y", "y:1")])
    assert managers.next_probe() == "y:1"
    clock.time += 61.0
    assert managers.streams() == {"a:1": 0}
    managers.on_probe("y:1", "y")
    managers.on_answer("y:1", "y")
    managers.on_failure("y:1")
    assert managers.streams() == {"a:1": 0}
    assert not managers.is_expected("y:1")


def test_an_address_that_two_managers_claim_is_probed_seldom() -> None:
    managers, clock = _set_of("a:1")
    claims = [AnnouncedManager("y", "localhost:1"), AnnouncedManager("z", "localhost:1")]
    probes = 0
    for _ in range(100):
        clock.time += 10.0
        managers.on_answer("a:1", "x", claims)
        if managers.next_probe() is not None:
            probes += 1
            managers.on_probe("localhost:1", "x")
    assert probes < 10
    assert managers.streams() == {"a:1": 0}


def test_a_list_without_end_is_cut() -> None:
    managers, _ = _set_of("a:1")
    managers.on_answer("a:1", "x", [AnnouncedManager(f"n{number}", f"n{number}:1") for number in range(1000)])
    assert sum(managers.states().values()) == 64


def test_only_what_changes_something_is_signalled() -> None:
    signals: list[None] = []
    managers = ManagerSet(("a:1", "b:1"), FakeClock().now, on_change=lambda: signals.append(None))

    def count() -> int:
        found = len(signals)
        signals.clear()
        return found

    named = [AnnouncedManager("x", "a:1"), AnnouncedManager("y", "b:1")]
    managers.on_answer("a:1", "x", named)
    assert count() == 1
    for _ in range(3):
        managers.on_answer("a:1", "x", named)
        managers.on_answer("a:1")
    assert count() == 0
    managers.on_failure("a:1")
    managers.on_failure("a:1")
    assert count() == 1
    managers.on_answer("a:1")
    assert count() == 1
    managers.on_answer("a:1", "x", [*named, AnnouncedManager("z", "c:1")])
    assert count() == 1


def _set_of(*given: str) -> tuple[ManagerSet, FakeClock]:
    clock = FakeClock()
    assert math.isfinite(clock.now())
    return ManagerSet(given, clock.now), clock
