"""The engine: storages do not wait for each other, callers not beyond their deadlines, and everything is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_parts import DEADLINE, SCHEME, WAIT, Background, HeldStorage, failures, item
from waiting import until

from connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from connectors.transfer.breaker import BreakerState
from connectors.transfer.statistics import BUCKETS_SECONDS

CANCELLED, PENDING, ERROR, UNAVAILABLE = Failure.CANCELLED, Failure.PENDING, Failure.ERROR, Failure.UNAVAILABLE


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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


def test_results_stand_in_the_order_of_the_items(make: Callable[..., Rig]) -> None:
    rig = make("s", "t")
    items = [item(f"/{index}", storage="st"[index % 2]) for index in range(200)]
    assert failures(rig.engine.load(items, DEADLINE)) == [None] * 200
    assert [bytes(part.buffers[0]) for part in items] == [bytes([index]) * 8 for index in range(200)]


def test_a_storage_that_hangs_does_not_delay_another(make: Callable[..., Rig]) -> None:
    rig = make("s", "t")
    rig.storage.hold("/0")
    items = [item("/0"), item("/1", storage="t"), item("/2", storage="t")]
    hung = rig.held(lambda: rig.engine.load(items, 0.3))
    assert failures(rig.engine.load([item("/3", storage="t")], DEADLINE)) == [None]
    assert failures(hung.results()) == [PENDING, None, None]


def test_one_item_that_hangs_does_not_delay_those_beside_it(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.storage.hold("/5")
    results = rig.engine.load([item(f"/{index}") for index in range(100)], 1.0)
    assert failures(results) == [PENDING if index == 5 else None for index in range(100)]


def test_nothing_is_begun_after_the_deadline(make: Callable[..., Rig]) -> None:
    rig = make()
    assert failures(rig.engine.load([item("/0"), item("/1")], -1.0)) == [CANCELLED] * 2
    assert failures(rig.engine.load([item("/0")], 0.0)) == [CANCELLED]
    assert rig.storage.begun == []


def test_callers_of_a_hung_storage_come_back_and_what_did_not_begin_never_does(make: Callable[..., Rig]) -> None:
    clock = Clock()
    rig = make(threads=2, clock=clock)
    rig.storage.hold(*(f"/{index}" for index in range(6)))
    results = rig.engine.load([item(f"/{index}") for index in range(6)], 0.2)
    assert sorted(failures(results)) == [CANCELLED] * 4 + [PENDING] * 2
    begun = list(rig.storage.begun)
    statistics = rig.engine.statistics().storages["s"]
    assert (len(begun), statistics.waiting_bytes, statistics.hung_accesses) == (2, 0, 2)
    assert statistics.in_flight_bytes == 2 * 8  # what has begun, and nothing else
    clock.now += 1.0  # all threads hang: later calls do not even wait for their deadline
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
        token = CancelToken()
        call = rig.held(lambda token=token: rig.engine.load([item("/0")], 3600.0, token))
        token.cancel()
        assert failures(call.results()) == [PENDING]
        rig.storage.let_go()
        until(lambda: rig.engine.statistics().storages["s"].hung_accesses == 0)
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [None]


def test_bytes_of_pending_items_stay_counted_until_the_storage_has_ended(make: Callable[..., Rig]) -> None:
    rig = make(threads=2, budget_bytes=100, clock=Clock())
    rig.storage.hold("/0")
    assert failures(rig.engine.load([item("/0", 80)], 0.1)) == [PENDING]
    assert failures(rig.engine.load([item("/1", 20)], DEADLINE)) == [None]
    [result] = rig.engine.save([item("/2", 21)], 0.1)
    assert (result.failure, "pressure" in result.reason) == (CANCELLED, True)
    [result] = rig.engine.load([item("/2", 21)], 0.1)
    assert (result.failure, "pressure" in result.reason) == (CANCELLED, True)
    rig.storage.let_go()
    until(lambda: rig.engine.statistics().storages["s"].in_flight_bytes == 0)
    assert failures(rig.engine.save([item("/2", 21)], DEADLINE)) == [None]
    assert rig.engine.statistics().storages["s"].saves.count(CANCELLED).items == 1


def test_an_item_larger_than_the_budget_moves_alone(make: Callable[..., Rig]) -> None:
    rig = make(budget_bytes=10)
    items = [item(f"/{index}", size) for index, size in enumerate([3, 50, 3, 50, 3])]
    assert failures(rig.engine.load(items, DEADLINE)) == [None] * 5
    assert all(len(sizes) == 1 or sum(sizes) <= 10 for sizes in rig.storage.meter.most)


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
    before = list(results)
    rig.storage.let_go()
    until(lambda: rig.engine.statistics().storages["s"].hung_accesses == 0)
    assert results == before
    assert failures(results) == [PENDING, CANCELLED]


def test_a_failing_storage_is_left_alone_and_tried_again(make: Callable[..., Rig]) -> None:
    clock = Clock()
    rig = make("s", "t", clock=clock)
    rig.storage.always = ERROR
    for _ in range(3):
        assert failures(rig.engine.load([item("/0")], DEADLINE)) == [ERROR]
    begun = len(rig.storage.begun)
    results = rig.engine.load([item("/0"), item("/0", storage="t")], DEADLINE)
    assert failures(results) == [UNAVAILABLE, None]
    assert "storage s failed" in results[0].reason
    assert rig.engine.statistics().storages["s"].loads.breaker is BreakerState.OPEN
    assert failures(rig.engine.save([item("/0")], DEADLINE)) == [ERROR]  # each direction finds out for itself
    clock.now += 1.0
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [ERROR]  # the trial
    assert failures(rig.engine.load([item("/0")], DEADLINE)) == [UNAVAILABLE]
    assert len(rig.storage.begun) == begun + 2
    rig.storage.always = None
    clock.now += 2.0
    assert failures(rig.engine.load([item("/0")] * 3, DEADLINE)) == [None] * 3
    assert rig.engine.statistics().storages["s"].loads.breaker is BreakerState.CLOSED


@pytest.mark.parametrize("failure", [Failure.LOST, Failure.REFUSED, Failure.CANCELLED, Failure.BUSY])
def test_what_is_not_the_storages_fault_opens_nothing(make: Callable[..., Rig], failure: Failure) -> None:
    rig = make()
    rig.storage.always = failure
    for _ in range(10):
        assert failures(rig.engine.load([item("/0")], DEADLINE)) == [failure]


def test_a_storage_that_answers_for_some_items_is_not_left_alone(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.storage.fails["/0"] = ERROR
    for _ in range(10):
        assert failures(rig.engine.load([item("/0"), item("/1")], DEADLINE)) == [ERROR, None]


def test_a_cancelled_trial_leaves_the_turn_to_the_next_call(make: Callable[..., Rig]) -> None:
    clock = Clock()
    rig = make(threads=1, clock=clock)
    rig.storage.always = ERROR
    for _ in range(3):
        rig.engine.load([item("/0")], DEADLINE)
    rig.storage.always = None
    clock.now += 1.0
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


def test_unknown_storages_are_refused_without_an_access(make: Callable[..., Rig]) -> None:
    rig = make()
    [result] = rig.engine.load([item("/0", storage="unknown")], DEADLINE)
    assert (result.failure, "held://unknown" in result.reason) == (Failure.REFUSED, True)
    assert rig.engine.load([], DEADLINE) == []


class Careless:
    """A mover that answers with what is no answer, or is ended by an exception."""

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
        [result] = move([item("/0")], 5.0)
        assert (result.failure, reason in result.reason) == (ERROR, True)
    assert engine.statistics().storages["s"].in_flight_bytes == 0
    engine.close()


def test_a_closed_engine_moves_nothing_and_close_does_not_wait_for_callers(make: Callable[..., Rig]) -> None:
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
@settings(max_examples=40, deadline=None)
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
