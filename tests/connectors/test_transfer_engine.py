"""The engine: storages do not wait for each other, callers not beyond their deadlines, and everything is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import cast

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from thoroughness import examples
from transfer_parts import DEADLINE, SCHEME, WAIT, Background, HeldStorage, Meter, failures, item
from waiting import until

from kvcm.connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.breaker import BreakerState, CallAdmission, StorageBreaker
from kvcm.connectors.transfer.lanes import ByteBudget, StorageLane, StorageTransfer, TransferAdmission, TransferCall
from kvcm.connectors.transfer.mover import Direction
from kvcm.connectors.transfer.statistics import BUCKETS_SECONDS
from kvcm.connectors.transfer.worker_pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from kvcm.model.errors import InvalidArgumentError

CANCELLED, PENDING, ERROR, UNAVAILABLE = Failure.CANCELLED, Failure.PENDING, Failure.ERROR, Failure.UNAVAILABLE


@dataclass
class Rig:
    """An engine over storages that can be held."""

    engine: TransferEngine
    storages: dict[str, HeldStorage]

    @property
    def storage(self) -> HeldStorage:
        return self.storages["s"]

    def held(self, call: Callable[[], list[TransferResult]], begins: int = 1) -> Background:
        """Start a call and return when so many of its accesses have begun."""
        before = len(self.storage.begun)
        background = Background(call)
        until(lambda: len(self.storage.begun) >= before + begins)
        return background

    def hung(self, items: Sequence[TransferItem], begins: int = 1) -> list[TransferResult]:
        """Return what a load ends with whose caller leaves when so many of its accesses have begun."""
        token = CancelToken()
        call = self.held(lambda: self.engine.load(items, 3600.0, token), begins)
        token.cancel()
        return call.results()

    def waiting(self, call: Callable[[], list[TransferResult]]) -> Background:
        """Start a call and return when its bytes wait."""
        before = self.engine.statistics().storages["s"].waiting_bytes
        background = Background(call)
        until(lambda: self.engine.statistics().storages["s"].waiting_bytes > before)
        return background


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(
        *names: str, threads: int = 2, budget_bytes: int = 1 << 20, clock: Callable[[], float] = time.monotonic
    ) -> Rig:
        storages = {name: HeldStorage() for name in names or ("s",)}
        movers = {(SCHEME, name): storage for name, storage in storages.items()}
        rigs.append(Rig(TransferEngine(movers, threads, budget_bytes=budget_bytes, clock=clock), storages))
        return rigs[-1]

    yield make
    for rig in rigs:
        for storage in rig.storages.values():
            storage.let_go()
        rig.engine.close()


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


def test_a_storage_that_hangs_does_not_delay_another(make: Callable[..., Rig]) -> None:
    rig = make("s", "t")
    rig.storage.hold("/0")
    items = [item("/0"), item("/1", storage="t"), item("/2", storage="t")]
    token = CancelToken()
    hung = rig.held(lambda: rig.engine.load(items, DEADLINE, token))
    other = rig.storages["t"]
    until(lambda: len(other.begun) == 2 and rig.engine.statistics().storages["t"].in_flight_bytes == 0)
    assert failures(rig.engine.load([item("/3", storage="t")], DEADLINE)) == [None]
    token.cancel()
    assert failures(hung.results()) == [PENDING, None, None]


def test_nothing_is_begun_after_the_deadline(rig: Rig) -> None:
    assert failures(rig.engine.load([item("/0"), item("/1")], -1.0)) == [CANCELLED] * 2
    assert failures(rig.engine.load([item("/0")], 0.0)) == [CANCELLED]
    assert rig.storage.begun == []


def test_callers_of_a_hung_storage_come_back_and_what_did_not_begin_never_does(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(threads=2, clock=clock.now)
    rig.storage.hold(*(f"/{index}" for index in range(6)))
    results = rig.hung([item(f"/{index}") for index in range(6)], begins=2)
    assert sorted(failures(results)) == [CANCELLED] * 4 + [PENDING] * 2
    begun = list(rig.storage.begun)
    statistics = rig.engine.statistics().storages["s"]
    assert (len(begun), statistics.waiting_bytes, statistics.hung_accesses) == (2, 0, 2)
    assert statistics.in_flight_bytes == 2 * 8  # what has begun, and nothing else
    clock.time += 1.0  # all threads hang: later calls do not even wait for their deadline
    results = rig.engine.load([item("/7")], 3600.0)
    assert failures(results) == [UNAVAILABLE]
    assert rig.storage.begun == begun
    rig.storage.let_go()
    until(lambda: rig.engine.statistics().storages["s"].hung_accesses == 0)
    assert rig.engine.statistics().storages["s"].in_flight_bytes == 0
    assert failures(rig.engine.load([item("/7")], DEADLINE)) == [None]
    assert rig.storage.begun == [*begun, "load /7"]


def test_cancelled_calls_do_not_count_against_the_storage(make: Callable[..., Rig]) -> None:
    rig = make(threads=1)
    for _ in range(10):
        rig.storage.hold("/0")
        assert failures(rig.hung([item("/0")])) == [PENDING]
        rig.storage.let_go()
        until(lambda: rig.engine.statistics().storages["s"].hung_accesses == 0)
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [None]


def test_bytes_of_pending_items_stay_counted_until_the_storage_has_ended(make: Callable[..., Rig]) -> None:
    rig = make(threads=2, budget_bytes=100, clock=FakeClock().now)
    rig.storage.hold("/0")
    assert failures(rig.hung([item("/0", 80)])) == [PENDING]
    assert failures(rig.engine.load([item("/1", 20)], DEADLINE)) == [None]
    [result] = rig.engine.save([item("/2", 21)], 0.1)
    assert (result.failure, "pressure" in result.reason) == (CANCELLED, True)
    [result] = rig.engine.load([item("/2", 21)], 0.1)
    assert (result.failure, "pressure" in result.reason) == (CANCELLED, True)
    rig.storage.let_go()
    until(lambda: rig.engine.statistics().storages["s"].in_flight_bytes == 0)
    assert failures(rig.engine.save([item("/2", 21)], DEADLINE)) == [None]
    assert rig.engine.statistics().storages["s"].saves.count(CANCELLED).items == 1


@pytest.mark.parametrize("budget_bytes", [8, 1 << 20])
def test_saves_give_way_to_loads(make: Callable[..., Rig], budget_bytes: int) -> None:
    rig = make(threads=1, budget_bytes=budget_bytes)
    rig.storage.hold("/0")
    first = rig.held(lambda: rig.engine.save([item("/0")], DEADLINE))
    save = rig.waiting(lambda: rig.engine.save([item("/1")], DEADLINE))
    load = rig.waiting(lambda: rig.engine.load([item("/2")], DEADLINE))
    rig.storage.let_go()
    assert failures(first.results() + save.results() + load.results()) == [None] * 3
    assert rig.storage.begun == ["save /0", "load /2", "save /1"]


def test_a_call_can_be_cancelled_from_another_thread(make: Callable[..., Rig]) -> None:
    rig = make(threads=1)
    token = CancelToken()
    rig.storage.hold("/0")
    items = [item("/0"), item("/1"), item("/2")]
    call = rig.held(lambda: rig.engine.load(items, 3600.0, token))
    assert not call.is_done
    token.cancel()
    results = call.results()
    assert failures(results) == [PENDING, CANCELLED, CANCELLED]
    assert "cancelled" in results[0].reason
    assert "cancelled" in results[1].reason
    assert failures(rig.engine.load(items[1:], 3600.0, token)) == [CANCELLED] * 2  # a token stays cancelled
    rig.storage.let_go()
    assert failures(rig.engine.load(items[1:], DEADLINE, CancelToken())) == [None] * 2
    assert rig.storage.begun == ["load /0", "load /1", "load /2"]


def test_late_results_change_nothing_that_was_returned(make: Callable[..., Rig]) -> None:
    rig = make(threads=1)
    rig.storage.hold("/0")
    results = rig.engine.load([item("/0"), item("/1")], 0.1)
    while results[0].failure is CANCELLED:  # a busy machine has begun nothing by then
        results = rig.engine.load([item("/0"), item("/1")], 0.1)
    before = list(results)
    rig.storage.let_go()
    until(lambda: rig.engine.statistics().storages["s"].hung_accesses == 0)
    assert results == before
    assert failures(results) == [PENDING, CANCELLED]


def test_a_failing_storage_is_left_alone_and_tried_again(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make("s", "t", clock=clock.now)
    rig.storage.always = ERROR
    for _ in range(3):
        assert failures(rig.engine.load([item("/0")], DEADLINE)) == [ERROR]
    begun = len(rig.storage.begun)
    results = rig.engine.load([item("/0"), item("/0", storage="t")], DEADLINE)
    assert failures(results) == [UNAVAILABLE, None]
    assert "storage s failed" in results[0].reason
    assert rig.engine.statistics().storages["s"].loads.breaker is BreakerState.OPEN
    assert failures(rig.engine.save([item("/0")], DEADLINE)) == [ERROR]  # each direction finds out for itself
    clock.time += 1.0
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [ERROR]  # the trial
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [UNAVAILABLE]
    assert len(rig.storage.begun) == begun + 2
    rig.storage.always = None
    clock.time += 2.0
    assert failures(rig.engine.load([item("/0")] * 3, DEADLINE)) == [None] * 3
    assert rig.engine.statistics().storages["s"].loads.breaker is BreakerState.CLOSED


@pytest.mark.parametrize("failure", [Failure.LOST, Failure.REFUSED, Failure.CANCELLED, Failure.BUSY])
def test_failures_that_are_not_the_storages_do_not_open_the_breaker(rig: Rig, failure: Failure) -> None:
    rig.storage.always = failure
    for _ in range(10):
        assert failures(rig.engine.load([item("/0")], DEADLINE)) == [failure]


def test_a_storage_that_answers_for_some_items_is_not_left_alone(rig: Rig) -> None:
    rig.storage.fails["/0"] = ERROR
    for _ in range(10):
        assert failures(rig.engine.load([item("/0"), item("/1")], DEADLINE)) == [ERROR, None]


def test_a_cancelled_trial_leaves_the_turn_to_the_next_call(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(threads=1, clock=clock.now)
    rig.storage.always = ERROR
    for _ in range(3):
        rig.engine.load([item("/0")], DEADLINE)
    rig.storage.always = None
    clock.time += 1.0
    assert failures(rig.engine.load([item("/0")], -1.0)) == [CANCELLED]
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [None]


def test_counters_add_up(make: Callable[..., Rig]) -> None:
    rig = make("s", "t")
    rig.storage.fails |= {"/1": Failure.LOST, "/2": ERROR}
    rig.engine.load([item(f"/{index}", 10) for index in range(4)], DEADLINE)
    rig.engine.save([item("/0", 10), item("/2", 10), item("/0", 7, storage="t")], DEADLINE)
    rig.engine.save([item("/9", 10)], -1.0)
    rig.engine.load([item("/0", storage="unknown"), item("/0", scheme="other")], DEADLINE)
    statistics = rig.engine.statistics()
    assert statistics.misaddressed_items == 2
    loads, saves = statistics.storages["s"].loads, statistics.storages["s"].saves
    assert {outcome: (count.items, count.bytes) for outcome, count in loads.outcomes.items()} == {
        "ok": (2, 20),
        "lost": (1, 10),
        "error": (1, 10),
    }
    assert {outcome: count.items for outcome, count in saves.outcomes.items()} == {"ok": 1, "error": 1, "cancelled": 1}
    assert statistics.storages["t"].saves.count().bytes == 7
    assert (loads.accesses, sum(loads.buckets), len(loads.buckets)) == (4, 4, len(BUCKETS_SECONDS) + 1)
    assert loads.seconds >= 0.0
    assert statistics.storages["s"].in_flight_bytes == statistics.storages["s"].waiting_bytes == 0


def test_unknown_storages_are_refused_without_an_access(rig: Rig) -> None:
    [result] = rig.engine.load([item("/0", storage="unknown")], DEADLINE)
    assert (result.failure, "held://unknown" in result.reason) == (Failure.REFUSED, True)
    assert rig.engine.load([], DEADLINE) == []


class Careless:
    """A mover that returns an invalid answer or raises an exception."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return cast("list[TransferResult]", self._answer)

    save = load

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("a defect"), "ValueError('a defect')"),
        (SystemExit(1), "SystemExit(1)"),
        ([], "0 results for 1 items"),
        (None, "TypeError"),
    ],
)
def test_a_defect_of_a_mover_is_a_failed_item_and_the_thread_lives(answer: object, reason: str) -> None:
    engine = TransferEngine({(SCHEME, "s"): Careless(answer)}, threads=1)
    for move in (engine.load, engine.save):
        [result] = move([item("/0")], DEADLINE)
        assert (result.failure, reason in result.reason) == (ERROR, True)
    assert engine.statistics().storages["s"].in_flight_bytes == 0
    engine.close()


def test_a_closed_engine_moves_nothing(make: Callable[..., Rig]) -> None:
    rig = make(threads=1)
    rig.storage.hold("/0")
    call = rig.held(lambda: rig.engine.load([item("/0"), item("/1")], DEADLINE))
    waiting = rig.waiting(lambda: rig.engine.save([item("/2")], DEADLINE))
    closing = threading.Thread(target=rig.engine.close, daemon=True)
    closing.start()
    assert failures(waiting.results()) == [CANCELLED]
    rig.storage.let_go()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert failures(call.results()) == [None, CANCELLED]  # what moved ended first
    assert rig.engine.statistics().storages["s"].in_flight_bytes == 0
    assert failures(rig.engine.load([item("/3")], DEADLINE)) == [CANCELLED]
    assert rig.storage.begun == ["load /0"]


@given(
    budget_bytes=st.integers(1, 120),
    threads=st.integers(1, 3),
    calls=st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60)), max_size=25)),
        min_size=1,
        max_size=5,
    ),
)
@settings(max_examples=examples(40), deadline=None)
def test_whatever_is_asked_at_once_moves_within_the_budget(
    budget_bytes: int, threads: int, calls: list[tuple[bool, list[tuple[str, int]]]]
) -> None:
    """Several callers, two storages: all items move, results are right, and the budget holds at every begin."""
    storages = {name: HeldStorage() for name in "ab"}
    storages["b"].meter = storages["a"].meter
    movers = {(SCHEME, name): storage for name, storage in storages.items()}
    engine = TransferEngine(movers, threads, budget_bytes=budget_bytes)
    try:
        running = []
        for is_load, parts in calls:
            items = [item(f"/{index}", size, storage) for index, (storage, size) in enumerate(parts)]
            move = engine.load if is_load else engine.save
            running.append((items, Background(lambda move=move, items=items: move(items, DEADLINE))))
        for items, call in running:
            assert failures(call.results()) == [None] * len(items)
            assert all(bytes(part.buffers[0]) == bytes([index]) * part.uri.size for index, part in enumerate(items))
    finally:
        engine.close()
    assert all(len(sizes) == 1 or sum(sizes) <= budget_bytes for sizes in storages["a"].meter.most)
    assert engine.statistics().storages["a"].in_flight_bytes == 0


# ---- A storage under pressure: what stands first in its queue, or hangs, holds up nothing that could go ----


@pytest.fixture
def storage() -> Iterator[HeldStorage]:
    storage = HeldStorage()
    yield storage
    storage.let_go()


@pytest.mark.parametrize("behind", list(Direction))
def test_what_waits_behind_a_load_begins_when_the_load_is_taken_back(storage: HeldStorage, behind: Direction) -> None:
    gate = TransferAdmission(ByteBudget(50, ["s"]))
    lane = StorageLane("s", storage, 2, gate, time.monotonic)

    def begin(direction: Direction, path: str, size: int) -> StorageTransfer:
        visit = lane.create_visit(TransferCall(direction, 1, time.monotonic() + DEADLINE), [item(path, size)], [0])
        lane.submit(visit)
        return visit

    storage.hold("/1")
    with gate.lock:
        begin(Direction.LOAD, "/1", 30)
    until(lambda: storage.begun == ["load /1"])
    with gate.lock:
        too_large = begin(Direction.LOAD, "/2", 40)
        fits = begin(behind, "/3", 8)
    until(lambda: too_large.batches[0].is_held_back)
    with gate.lock:  # the other thread sleeps now: it has let go of the lock
        assert len(lane.cancel(too_large, "the call was cancelled")) == 1
    fits.transfer.wait(WAIT)
    with gate.lock:
        lane.close()
    assert storage.begun == ["load /1", f"{behind} /3"]
    storage.let_go()
    lane.join(time.monotonic() + WAIT)


@pytest.mark.parametrize("budget_bytes", [50, 59])
def test_a_storage_whose_share_hangs_fails_what_does_not_fit(make: Callable[..., Rig], budget_bytes: int) -> None:
    """One access that hangs, fewer than threads: calls that cannot begin beside it come back at once."""
    clock = FakeClock()
    rig = make(budget_bytes=budget_bytes, clock=clock.now)
    engine, storage = rig.engine, rig.storage
    storage.hold("/0")
    assert failures(rig.hung([item("/0", 50)])) == [Failure.PENDING]
    clock.time += 1.0
    for move in (engine.load, engine.save):
        assert failures(move([item("/1", 10)], 5.0)) == [Failure.UNAVAILABLE]
    fitting = budget_bytes - 50
    if fitting:
        assert failures(engine.load([item("/1", fitting)], DEADLINE)) == [None]
    storage.let_go()
    until(lambda: engine.statistics().storages["s"].hung_accesses == 0)
    assert failures(engine.load([item("/1", 10)], DEADLINE)) == [None]


# ---- The breaker against a simple model, and its numbers ----

FAILURES_TO_OPEN, FIRST_PAUSE, LONGEST_PAUSE = 3, 1.0, 60.0


class BreakerMachine(RuleBasedStateMachine):
    """Calls come, go on for a while and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = StorageBreaker(FAILURES_TO_OPEN, FIRST_PAUSE, LONGEST_PAUSE)
        self.now = 0.0
        self.under_way: list[CallAdmission] = []
        # The model: failures in a row, or how long it is open and the next pause.
        self.failures = 0
        self.open_until: float | None = None
        self.pause = FIRST_PAUSE

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call_comes(self) -> None:
        passage = self.breaker.admit(self.now)
        if self.open_until is None:
            assert passage is CallAdmission.ORDINARY
        elif CallAdmission.TRIAL in self.under_way or self.now < self.open_until:
            assert passage is None
        else:
            assert passage is CallAdmission.TRIAL
        if passage is not None:
            self.under_way.append(passage)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), succeeded=st.sampled_from([True, False, None]))
    def call_ends(self, data: st.DataObject, succeeded: bool | None) -> None:
        passage = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.breaker.record_result(passage, succeeded, self.now)
        if passage is CallAdmission.TRIAL:
            if succeeded:
                self.open_until, self.failures = None, 0
            elif succeeded is False:
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
                self.open_until = self.now + self.pause
        elif self.open_until is None and succeeded is not None:
            self.failures = 0 if succeeded else self.failures + 1
            if self.failures == FAILURES_TO_OPEN:
                self.open_until, self.pause = self.now + FIRST_PAUSE, FIRST_PAUSE

    @rule()
    def sign_of_life(self) -> None:
        self.breaker.end_pause(self.now)
        if self.open_until is not None:
            self.open_until = min(self.open_until, self.now)

    @invariant()
    def shows_its_state(self) -> None:
        if self.open_until is None:
            assert self.breaker.state is BreakerState.CLOSED
        elif CallAdmission.TRIAL in self.under_way:
            assert self.breaker.state is BreakerState.HALF_OPEN
        else:
            assert self.breaker.state is BreakerState.OPEN


BreakerMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestBreaker = BreakerMachine.TestCase


def test_pauses_double_up_to_a_minute_and_start_again_after_a_success() -> None:
    breaker, now = StorageBreaker(), 0.0
    for _ in range(3):
        breaker.record_result(CallAdmission.ORDINARY, False, now)
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert breaker.admit(now + pause - 0.001) is None
        now += pause
        assert breaker.admit(now) is CallAdmission.TRIAL
        assert breaker.admit(now + 1000.0) is None
        breaker.record_result(CallAdmission.TRIAL, False, now)
    assert breaker.admit(now + 60.0) is CallAdmission.TRIAL
    breaker.record_result(CallAdmission.TRIAL, True, now)
    assert breaker.admit(now) is CallAdmission.ORDINARY
    for _ in range(3):
        breaker.record_result(CallAdmission.ORDINARY, False, now)
    assert breaker.admit(now + 0.999) is None
    assert breaker.admit(now + 1.0) is CallAdmission.TRIAL


# ---- Bytes in flight: never more than the limit, and never one storage at the cost of all others ----

STORAGES = ["a", "b", "c"]
pieces = st.tuples(st.sampled_from(STORAGES), st.sampled_from(list(Direction)), st.integers(1, 150))


@given(limit=st.integers(1, 100), wanted=st.lists(pieces, max_size=60), data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_the_budget_is_never_exceeded(
    limit: int, wanted: list[tuple[str, Direction, int]], data: st.DataObject
) -> None:
    """A rejected piece gets in once bytes are free; only one larger than the budget goes beyond it, alone."""
    gate = TransferAdmission(ByteBudget(limit, STORAGES))
    condition = threading.Condition(gate.lock)
    inside: list[tuple[str, int]] = []
    while wanted or inside:
        with gate.lock:
            for piece in list(wanted):
                if gate.try_acquire(*piece, condition):
                    wanted.remove(piece)
                    inside.append((piece[0], piece[2]))
                    total = sum(size for _, size in inside)
                    assert total == gate.budget.total_bytes
                    assert total <= limit or len(inside) == 1
                    held = [size for storage, size in inside if storage == piece[0]]
                    assert sum(held) <= max(1, limit // len(STORAGES)) or len(held) == 1
            assert inside, "something always gets in when nothing is in flight"
            gate.release(*inside.pop(data.draw(st.integers(0, len(inside) - 1))))
    assert gate.budget.total_bytes == 0


def test_no_save_begins_while_a_load_waits_for_space() -> None:
    gate = TransferAdmission(ByteBudget(100, ["a", "b"]))
    condition = threading.Condition(gate.lock)
    with gate.lock:
        assert gate.try_acquire("a", Direction.LOAD, 60, condition)
        assert not gate.try_acquire("b", Direction.LOAD, 50, condition)
        assert not gate.try_acquire("b", Direction.SAVE, 10, condition)
        gate.release("a", 60)
        assert not gate.try_acquire("a", Direction.SAVE, 10, condition)
        assert gate.try_acquire("b", Direction.LOAD, 50, condition)
        assert gate.try_acquire("a", Direction.SAVE, 10, condition)


class Bell(threading.Condition):
    """Counts how often it was rung."""

    rung = 0

    def notify_all(self) -> None:
        self.rung += 1
        super().notify_all()


def test_a_load_that_waits_for_its_own_share_holds_up_no_save() -> None:
    gate = TransferAdmission(ByteBudget(100, ["a", "b"]))
    condition = threading.Condition(gate.lock)
    with gate.lock:
        assert gate.try_acquire("a", Direction.LOAD, 50, condition)
        assert gate.try_acquire("b", Direction.LOAD, 50, condition)
        assert not gate.try_acquire("a", Direction.LOAD, 40, condition)
        gate.release("b", 50)
        assert gate.try_acquire("b", Direction.SAVE, 8, condition)


def test_saves_are_woken_when_a_load_that_space_would_help_gives_way_to_one_that_it_would_not() -> None:
    gate = TransferAdmission(ByteBudget(99, ["a", "b", "c"]))
    condition, bell = threading.Condition(gate.lock), Bell(gate.lock)
    with gate.lock:
        assert gate.try_acquire("b", Direction.LOAD, 70, condition)
        assert gate.try_acquire("a", Direction.LOAD, 20, condition)
        assert not gate.try_acquire("a", Direction.LOAD, 12, condition)
        assert not gate.try_acquire("c", Direction.SAVE, 5, bell)
        assert not gate.try_acquire("a", Direction.LOAD, 20, condition)
        assert bell.rung == 1
        assert gate.try_acquire("c", Direction.SAVE, 5, bell)


def test_a_storage_that_keeps_its_share_leaves_the_rest_to_the_others() -> None:
    gate = TransferAdmission(ByteBudget(100, ["hung", "well"]))
    condition = threading.Condition(gate.lock)
    with gate.lock:
        assert gate.try_acquire("hung", Direction.LOAD, 50, condition)
        assert not gate.try_acquire("hung", Direction.LOAD, 10, condition)
        for _ in range(10):
            assert gate.try_acquire("well", Direction.LOAD, 50, condition)
            gate.release("well", 50)
            assert gate.try_acquire("well", Direction.SAVE, 50, condition)
            gate.release("well", 50)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_budget_of_nothing_is_refused(limit: int) -> None:
    with pytest.raises(InvalidArgumentError, match="limit_bytes"):
        ByteBudget(limit, ["a"])


# ---- The pool of transfer threads: bounded, loads first, never in the way of the process's end ----


def test_loads_overtake_saves_and_equals_keep_their_order() -> None:
    pool = WorkerPool(1, "test")
    started, gate, order = threading.Event(), threading.Event(), list[str]()

    def block() -> None:
        started.set()
        gate.wait(WAIT)

    futures = [pool.submit(PRIORITY_SAVE, block)]
    assert started.wait(WAIT)
    for name, priority in (("save1", PRIORITY_SAVE), ("save2", PRIORITY_SAVE), ("load", PRIORITY_LOAD)):
        futures.append(pool.submit(priority, lambda name=name: order.append(name)))
    gate.set()
    assert not wait(futures, WAIT).not_done
    assert order == ["load", "save1", "save2"]
    pool.close()


def test_at_most_so_many_tasks_run_at_once() -> None:
    pool, meter = WorkerPool(3, "test"), Meter()
    barrier = threading.Barrier(3, timeout=WAIT)  # passes only when all three threads work at the same time

    def task() -> None:
        with meter.counting([1]):
            barrier.wait()

    futures = [pool.submit(PRIORITY_LOAD, task) for _ in range(9)]
    assert not wait(futures, WAIT).not_done
    assert all(future.exception() is None for future in futures)
    assert max(map(len, meter.most)) == 3
    pool.close()


def test_a_failing_task_is_logged_and_does_not_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool(1, "test")

    def fail() -> None:
        raise ValueError("no")

    first, second = pool.submit(PRIORITY_LOAD, fail), pool.submit(PRIORITY_LOAD, lambda: None)
    with pytest.raises(ValueError, match="no"):
        first.result(WAIT)
    assert second.result(WAIT) is None
    pool.close()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "a task of thread test-0 failed")
    assert "ValueError: no" in caplog.text


def test_close_cancels_what_waits_and_does_not_wait_for_what_hangs() -> None:
    pool = WorkerPool(1, "test")
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(WAIT)

    hanging = pool.submit(PRIORITY_LOAD, hang)
    assert started.wait(WAIT)
    waiting = pool.submit(PRIORITY_LOAD, lambda: None)
    pool.close(timeout_seconds=0.01)
    assert not hanging.done()
    late = pool.submit(PRIORITY_LOAD, lambda: None)
    gate.set()
    assert not wait([hanging, waiting, late], WAIT).not_done
    assert waiting.cancelled()
    assert late.cancelled()
