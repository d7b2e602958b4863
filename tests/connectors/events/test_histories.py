"""Any history of an engine, its connection and its managers: in the end all agree, and nothing is stale."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from engine_model import SGLANG, VLLM, ModelEngine, ModelManager
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.connectors.events.blocks import HeldBlocks, MappingSettings
from kvcm.connectors.events.reporter import Reporter, ReporterIdentity, ReporterSettings
from kvcm.connectors.events.stream import EventStream, StreamSettings
from kvcm.model.key_schemes import KeyScheme

_SMALL = ReporterSettings(batch_keys=3, snapshot_keys=2, most_pending=6)


class Link:
    """A connection to a manager that can be down."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.manager = ModelManager()
        self.is_up = True

    def exchange(self, loses_answer: bool = False) -> bool:
        """Send the next report, if there is one."""
        request = self.reporter.next_report()
        if request is None:
            return False
        if not self.is_up:
            self.reporter.on_failure(request, "away")
            return False
        answer = self.manager.report(request)
        if loses_answer:
            self.reporter.on_failure(request, "the answer is lost")
        else:
            self.reporter.on_answer(request, answer)
        return True


class World:
    """An engine, its connection, one subscriber's rank, and two managers."""

    def __init__(self, scheme: KeyScheme, kept: int, has_replay: bool) -> None:
        self.clock = FakeClock()
        self.engine = ModelEngine(scheme, kept)
        self.wire: deque[tuple[int, bytes]] = deque()
        self.replies: deque[tuple[int, bytes] | None] = deque()
        streams = map(str, itertools.count())
        name = "vllm" if scheme.is_vllm else "sglang"
        self.blocks = HeldBlocks(MappingSettings(name, scheme, {}), self.on_changes)
        identity = ReporterIdentity("instance", "engine:1", 0, scheme)
        self.links: list[Link] = []
        self.links = [
            Link(Reporter(identity, self.blocks, _SMALL, lambda: next(streams), self.clock.now)) for _ in range(2)
        ]
        self.stream = EventStream(StreamSettings(has_replay), self.blocks.apply, self.on_lost, self.clock.now)
        self.is_connected = True
        self.stream.on_connected()
        self.was_gone = False

    def on_changes(self, changes: object) -> None:
        for link in self.links:
            link.reporter.on_changes(changes)  # type: ignore[arg-type]

    def on_lost(self) -> None:
        self.blocks.clear()
        for link in self.links:
            link.reporter.reset()

    def published(self, message: tuple[int, bytes] | None, is_lost: bool) -> None:
        if message is not None and self.is_connected and not is_lost:
            self.wire.append(message)

    def deliver(self, count: int) -> None:
        """Read what came, as `EngineSource.step` does."""
        for _ in range(min(count, len(self.wire))):
            self.stream.on_message(*self.wire.popleft())
            self.ask()
        for _ in range(min(count, len(self.replies))):
            reply = self.replies.popleft()
            if reply is None:
                self.stream.on_replay_end()
            else:
                self.stream.on_replayed(*reply)
            self.ask()

    def ask(self) -> None:
        self.stream.tick()
        if self.stream.is_engine_gone != self.was_gone:
            self.was_gone = self.stream.is_engine_gone
            for link in self.links:
                link.reporter.stop() if self.was_gone else link.reporter.reset()
        first = self.stream.take_replay()
        if first is not None:
            self.replies.clear()
            if self.is_connected:
                self.replies.extend([*self.engine.replay(first), None])

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.wire.clear()
            self.replies.clear()
            self.stream.on_disconnected()
            self.ask()

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.stream.on_connected()
            self.ask()

    def settle(self) -> None:
        """Bring everything up, and let it come to rest."""
        self.connect()
        for link in self.links:
            link.is_up = True
        self.published(self.engine.publish(), is_lost=False)  # shows the subscriber what it has missed
        for _ in range(400):
            self.deliver(1)
            self.ask()
            moved = [link.exchange() for link in self.links]
            self.clock.time += 0.5
            if not self.wire and not self.replies and not any(moved) and not self.stream.is_waiting:
                break
        while any(link.exchange() for link in self.links):
            self.clock.time += 2.0
        for link in self.links:
            for _ in range(20):
                self.clock.time += 31.0  # past every pause
                link.exchange()

    def step(self, action: tuple[str, int, int]) -> None:
        name, a, b = action
        is_lost = b % 5 == 0 and a % 3 == 0
        steps: dict[str, Callable[[], object]] = {
            "store": lambda: self.published(
                self.engine.store(a % 8, b % 4 + 1, "CPU" if a % 5 == 0 else "GPU"), is_lost
            ),
            "remove": lambda: self.published(self.engine.remove(a), is_lost),
            "clear": lambda: self.published(self.engine.clear(), is_lost),
            "engine restarts": lambda: (self.disconnect(), self.engine.restart()),
            "disconnect": self.disconnect,
            "connect": self.connect,
            "manager restarts": self.links[a % 2].manager.restart,
            "manager away": lambda: setattr(self.links[a % 2], "is_up", b % 2 == 0),
            "deliver": lambda: self.deliver(a % 6),
            "report": lambda: self.links[a % 2].exchange(loses_answer=b % 7 == 0),
        }
        steps[name]()
        self.ask()
        self.clock.time += (b % 4) * 0.4


_ACTIONS = st.tuples(
    st.sampled_from(
        ["store"] * 9
        + ["remove"] * 6
        + ["deliver"] * 9
        + ["report"] * 9
        + ["clear", "engine restarts", "disconnect", "connect", "connect"]
        + ["manager restarts", "manager restarts", "manager away"]
    ),
    st.integers(0, 40),
    st.integers(0, 40),
)


@settings(max_examples=examples(1500))
@given(
    scheme=st.sampled_from([VLLM, SGLANG]),
    kept=st.integers(1, 12),
    has_replay=st.booleans(),
    actions=st.lists(_ACTIONS, min_size=20, max_size=80),
)
def test_in_the_end_nothing_is_stale_and_with_a_replay_nothing_is_missing(
    scheme: KeyScheme, kept: int, has_replay: bool, actions: list[tuple[str, int, int]]
) -> None:
    world = World(scheme, kept, has_replay)
    for action in actions:
        world.step(action)
    world.settle()
    truth = world.engine.pairs()
    held = set(world.blocks.pairs())
    assert held <= truth
    if world.stream.is_complete:
        assert held == truth
    if has_replay and not world.stream.counters.replay_timeouts and world.engine.messages[0][0] == 0:
        assert world.stream.is_complete  # the engine replayed everything in time
    for link in world.links:
        assert link.reporter.is_settled
        assert link.manager.pairs() == held
        assert link.reporter.resident_blocks == len(held)
