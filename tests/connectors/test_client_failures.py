"""Without a manager: misses within the deadline, never an exception."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from connectors.client import AsyncManagerClient, ManagerClient
from connectors.exchanges import ClientSettings
from connectors.policy import RetrySettings
from connectors.results import MatchMode, Outcome, RegistrationState
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

# Generous, because other work may hold the processor; the deadlines under test are much shorter.
SLACK_SECONDS = 3.0
PATIENT = ClientSettings(timeout_seconds=0.5, retry=RetrySettings(breaker_failures=1000))
MODEL = ModelDeployment(model_name="m", dtype="float32")
SPECS = [LocationSpecInfo("tp0", 64)]

CALLS: dict[str, Callable[[ManagerClient], object]] = {
    "register_instance": lambda c: c.register_instance("default", 16, SPECS, MODEL).state is RegistrationState.OK,
    "match": lambda c: c.match([1, 2]).locations,
    "match_batch": lambda c: any(c.match([1, 2], MatchMode.BATCH).locations),
    "match_length": lambda c: c.match_length([1, 2]),
    "start_write": lambda c: c.start_write([1, 2]),
    "finish_write": lambda c: c.finish_write("session", [True]),
    "abort_write": lambda c: c.abort_write("session"),
    "renew_write": lambda c: c.renew_write("session", 30),
    "release_lease": lambda c: c.release_lease("lease"),
    "remove": lambda c: c.remove([1]),
    "pin_prefix": lambda c: c.pin_prefix([1, 2], "me", 60),
    "unpin": lambda c: c.unpin("pin"),
    "list_pins": lambda c: c.list_pins(),
    "report_missing": lambda c: c.report_missing([(1, "file://s/p?size=1")]),
    "cluster_info": lambda c: c.cluster_info(),
}


def elapsed(started: float) -> float:
    return time.monotonic() - started


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_refused_connection_is_a_miss(call: Callable[[ManagerClient], object], closed_port: int) -> None:
    with ManagerClient(f"127.0.0.1:{closed_port}", "i", PATIENT) as client:
        started = time.monotonic()
        assert not call(client)
        assert elapsed(started) < 0.5 + SLACK_SECONDS
        assert all(counters.ok == 0 for counters in client.counters().values())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_silent_manager_costs_the_deadline(call: Callable[[ManagerClient], object], black_hole: int) -> None:
    with ManagerClient(f"127.0.0.1:{black_hole}", "i", PATIENT) as client:
        started = time.monotonic()
        assert not call(client)
        assert 0.4 < elapsed(started) < 0.5 + SLACK_SECONDS
        (counters,) = client.counters().values()
        assert (counters.ok, counters.miss_on_error, counters.timeout) == (0, 0, 1)


def test_results_say_what_happened(closed_port: int, black_hole: int) -> None:
    with ManagerClient(f"127.0.0.1:{closed_port}", "i", PATIENT) as client:
        match = client.match([1, 2, 3], MatchMode.BATCH)
        assert (match.outcome, match.locations) == (Outcome.MISS_ON_ERROR, (None, None, None))
        assert "UNAVAILABLE" in match.reason
        registration = client.register_instance("default", 16, SPECS, MODEL)
        assert registration.state is RegistrationState.UNREACHABLE
        assert "UNAVAILABLE" in registration.message
        assert client.counters()["match"].retries > 0
    with ManagerClient(f"127.0.0.1:{black_hole}", "i", PATIENT) as client:
        assert client.match([1], timeout_seconds=0.1).outcome is Outcome.TIMEOUT


def test_a_dead_manager_is_soon_not_asked_any_more(black_hole: int) -> None:
    settings = ClientSettings(timeout_seconds=0.1, retry=RetrySettings(breaker_failures=2, breaker_seconds=600))
    with ManagerClient(f"127.0.0.1:{black_hole}", "i", settings) as client:
        for _ in range(50):
            client.match([1])
        counters = client.counters()["match"]
        assert (counters.timeout, counters.miss_on_error) == (2, 48)


def test_the_log_names_the_reason_once(closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with ManagerClient(f"127.0.0.1:{closed_port}", "i", PATIENT) as client, caplog.at_level(logging.WARNING):
        for _ in range(3):
            client.match([1])
    assert len(caplog.records) == 1
    assert "match failed, treated as a miss" in caplog.text
    assert "UNAVAILABLE" in caplog.text


async def test_the_async_client_behaves_alike(closed_port: int, black_hole: int) -> None:
    async with AsyncManagerClient([f"127.0.0.1:{black_hole}", f"127.0.0.1:{closed_port}"], "i", PATIENT) as client:
        started = time.monotonic()
        results = await asyncio.gather(
            client.match([1]), client.start_write([1]), client.match_length([1]), client.cluster_info()
        )
        assert elapsed(started) < 0.5 + SLACK_SECONDS
        assert results[0].locations == ()
        assert results[1:] == [None, 0, None]
        assert not await client.finish_write("s", [True])
        assert (await client.register_instance("default", 16, SPECS, MODEL)).state is RegistrationState.UNREACHABLE
        for call in (
            client.abort_write("s"),
            client.renew_write("s", 1),
            client.release_lease("l"),
            client.remove([1]),
            client.pin_prefix([1], "me", 60),
            client.unpin("p"),
            client.list_pins(),
            client.report_missing([(1, "file://s/p?size=1")]),
        ):
            assert not await call
        assert all(counters.ok == 0 for counters in client.counters().values())


async def test_closed_clients_miss(closed_port: int) -> None:
    client = ManagerClient(f"127.0.0.1:{closed_port}", "i")
    client.close()
    assert client.match([1]).outcome is Outcome.MISS_ON_ERROR
    async_client = AsyncManagerClient(f"127.0.0.1:{closed_port}", "i")
    await async_client.close()
    assert (await async_client.match([1])).outcome is Outcome.MISS_ON_ERROR


@pytest.mark.parametrize(
    "addresses", ["", "localhost", "localhost:", ":1", "localhost:x", "h:0", "h:65536", [], ["h:1", ""]]
)
def test_addresses_are_checked(addresses: str | list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be host:port"):
        ManagerClient(addresses, "i")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.match([1, 1 << 63]), r"keys\[1\]"),
        (lambda c: c.match([1], mask=2), "mask is 2"),
        (lambda c: c.match([1], mask=[True, False]), "mask has 2 flags"),
        (lambda c: c.match([1], window=3), "window is 3"),
        (lambda c: c.match([1], MatchMode.SLIDING_WINDOW), "window is 0"),
        (lambda c: c.match([1], read_lease_ms=-1), "read_lease_ms is -1"),
        (lambda c: c.start_write([1, 2], spec_groups=["g"]), "spec_groups has 1"),
        (lambda c: c.start_write([1], parent_block_key=-(1 << 63) - 1), "parent_block_key"),
        (lambda c: c.start_write([1], session_seconds=1 << 31), "session_seconds"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[ManagerClient], object], message: str, closed_port: int) -> None:
    with ManagerClient(f"127.0.0.1:{closed_port}", "i") as client, pytest.raises(InvalidArgumentError, match=message):
        call(client)


def test_an_instance_id_is_needed() -> None:
    with pytest.raises(InvalidArgumentError, match="instance_id is empty"):
        ManagerClient("localhost:1", "")
