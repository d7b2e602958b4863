"""The health of engines: ejection, backoff, trial, and what probes and requests say."""

from __future__ import annotations

import asyncio

import pytest
from fake_clock import FakeClock
from gateway_rig import engines, eventually, gateway, metric

from kvcm.gateway.engines import Engine, EngineState, HealthRules
from kvcm.gateway.settings import EngineAddress

RULES = HealthRules(eject_after=3, eject_seconds=10, max_eject_seconds=30)


def healthy(clock: FakeClock, random: float = 0.5) -> Engine:
    engine = Engine(EngineAddress("http://a:1"), RULES, clock, lambda: random, lambda: None)
    engine.record_probe(is_healthy=True)
    return engine


def test_an_engine_begins_with_its_first_good_probe() -> None:
    engine = Engine(EngineAddress("http://a:1"), RULES, FakeClock(), lambda: 0.5, lambda: None)
    for _ in range(5):
        engine.record_probe(is_healthy=False)
    assert (engine.state, engine.is_usable) == (EngineState.STARTING, False)
    engine.record_probe(is_healthy=True)
    assert engine.state is EngineState.HEALTHY


def test_failures_in_a_row_eject_and_others_do_not() -> None:
    engine = healthy(FakeClock())
    engine.record_failure("x")
    engine.record_failure("x")
    engine.record_success()
    engine.record_failure("x")
    engine.record_failure("x")
    assert engine.state is EngineState.HEALTHY
    engine.record_failure("x")
    assert engine.state is EngineState.EJECTED


def test_good_probes_do_not_hide_bad_answers() -> None:
    engine = healthy(FakeClock())
    for _ in range(3):
        engine.record_probe(is_healthy=True)
        engine.record_failure("x")
    assert engine.state is EngineState.EJECTED


def test_good_answers_do_not_hide_bad_probes() -> None:
    engine = healthy(FakeClock())
    for _ in range(3):
        engine.record_success()
        engine.record_probe(is_healthy=False)
    assert engine.state is EngineState.EJECTED


@pytest.mark.parametrize("random", [0.0, 0.5, 0.99])
def test_an_ejection_doubles_up_to_a_limit_and_is_spread(random: float) -> None:
    clock = FakeClock()
    engine = healthy(clock, random)
    for _ in range(3):
        engine.record_probe(is_healthy=False)
    for seconds in (10, 20, 30, 30):
        assert engine.ejected_until == pytest.approx(clock.time + seconds * (0.5 + random))
        clock.time = engine.ejected_until - 0.001
        engine.record_probe(is_healthy=True)
        assert engine.state is EngineState.EJECTED
        clock.time = engine.ejected_until
        engine.record_probe(is_healthy=False)


def test_a_trial_is_one_request_at_a_time_and_decides() -> None:
    clock = FakeClock()
    engine = healthy(clock)
    old = engine.begin(0, None)
    for failing in (False, True):
        for _ in range(3):
            engine.record_failure("x")
        assert not engine.takes_more(9)
        clock.time = engine.ejected_until
        engine.record_probe(is_healthy=True)
        assert engine.state is EngineState.TRIAL
        assert engine.takes_more(9)
        trial = engine.begin(0, None)
        assert not engine.takes_more(9)
        trial.end()
        assert engine.takes_more(9), "a client that left decides nothing"
        engine.begin(0, None)
        if failing:
            engine.record_failure("x")
            assert engine.state is EngineState.EJECTED
        else:
            engine.record_success()
            assert engine.state is EngineState.HEALTHY
            assert engine.takes_more(9)
    old.end()


def test_answers_to_requests_from_before_do_not_end_an_ejection() -> None:
    engine = healthy(FakeClock())
    for _ in range(3):
        engine.record_failure("x")
    engine.record_success()
    assert engine.state is EngineState.EJECTED


def test_tokens_are_in_flight_until_the_first_byte_or_their_time() -> None:
    clock = FakeClock()
    engine = healthy(clock)
    streamed, whole = engine.begin(100, None), engine.begin(10, 5.0)
    assert (engine.in_flight, engine.tokens_in_flight) == (2, 110)
    streamed.begin_answer()
    assert (engine.in_flight, engine.tokens_in_flight) == (2, 10)
    clock.time += 5
    assert (engine.in_flight, engine.tokens_in_flight) == (2, 0)
    for flight in (streamed, whole, whole):
        flight.end()
    assert engine.in_flight == 0


async def test_a_failing_engine_is_ejected_and_comes_back_by_a_trial() -> None:
    async with engines(2) as (one, other), gateway([one, other], eject_after=2, max_attempts=2) as rig:
        one.answer = one.status(503)
        for _ in range(3):
            assert (await rig.post()).engine == "b"
        assert rig.state(one) == "ejected"
        sent = len(one.seen)
        for _ in range(3):
            await rig.post()
        assert len(one.seen) == sent, "none goes there while it is ejected"
        await rig.gateway.probe_all()
        assert rig.state(one) == "ejected"
        rig.clock.time += 60
        await rig.gateway.probe_all()
        assert rig.state(one) == "trial"
        one.answer = one.plain
        assert {(await rig.post()).engine for _ in range(4)} == {"a", "b"}
        assert rig.state(one) == "healthy"
        assert metric(rig, "kvcm_gateway_engine_state", engine=one.address, state="healthy") == 1


async def test_an_engine_that_is_restarted_comes_back() -> None:
    async with engines(2) as (one, other), gateway([one, other], eject_after=1) as rig:
        port = one.port
        await one.stop()
        await rig.gateway.probe_all()
        assert rig.state(one) == "ejected"
        await one.start(port)
        rig.clock.time += 60
        await rig.gateway.probe_all()
        assert {(await rig.post()).engine for _ in range(4)} == {"a", "b"}


async def test_without_a_healthy_engine_requests_are_503() -> None:
    async with engines(1) as (engine,):
        engine.is_healthy = False
        async with gateway([engine]) as rig:
            answered = await rig.post()
            assert (answered.status, answered.headers["retry-after"]) == (503, "1")
            assert answered.error["code"] == "no_healthy_engine"
            assert answered.error["type"] == "server_error"
            assert (await rig.get("/livez")).status == 200
            assert (await rig.get("/readyz")).status == 503
            engine.is_healthy = True
            await rig.gateway.probe_all()
            assert (await rig.get("/readyz")).status == 200
            assert (await rig.post()).status == 200


async def test_waiting_requests_learn_that_no_engine_is_left() -> None:
    async with engines(1) as (engine,), gateway([engine], eject_after=1, max_in_flight_per_engine=1) as rig:
        release = asyncio.Event()
        engine.answer = engine.hang(release)
        first = asyncio.create_task(rig.post())
        await eventually(lambda: engine.seen)
        second = asyncio.create_task(rig.post())
        await eventually(lambda: metric(rig, "kvcm_gateway_queued") == 1)
        engine.is_healthy = False
        await rig.gateway.probe_all()
        assert (await second).error["code"] == "no_healthy_engine"
        release.set()
        assert (await first).status == 200
