"""Where calls of a client go: given addresses and announced managers, with a clock that only the test moves."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from test_retry_policy import OK, TIMEOUT, UNAVAILABLE, ManualClock, answer, carry_out, shed, status

from kvcm.connectors.addresses import Addresses, AnnouncedManager
from kvcm.connectors.calls import Policy, RetrySettings, Send
from kvcm.connectors.results import Outcome
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as meta

SERVICE = "kvcm:6381"
A, B, C = (AnnouncedManager(name, f"10.0.0.{number}:6381") for number, name in enumerate("abc", start=1))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def addresses(clock: ManualClock) -> Addresses:
    """Those of a client that was given one service in front of all managers."""
    return Addresses([SERVICE], clock)


def endpoints(*managers: AnnouncedManager) -> list[meta.MetaNodeEndpoint]:
    return [endpoint(each.node_id, *each.address.rsplit(":", 1)) for each in managers]


def endpoint(node_id: str, host: str, port: Any = 6381) -> meta.MetaNodeEndpoint:
    return meta.MetaNodeEndpoint(node_id=node_id, host=host, meta_rpc_port=int(port))


def confirm(addresses: Addresses, *named: AnnouncedManager, node_id: str = "") -> None:
    """Answer the probe that is due as the probed manager does, which names these managers."""
    probed = addresses.next_probe()
    assert probed is not None
    response = meta.GetClusterInfoResponse(
        self_node_id=node_id or probed.node_id, preferred_managers=endpoints(*(named or (probed,)))
    )
    addresses.on_probe(probed, response)


def assigned(addresses: Addresses, *managers: AnnouncedManager) -> Addresses:
    """Announce managers; the first one answers the probe."""
    addresses.announce(endpoints(*managers))
    confirm(addresses, *managers)
    return addresses


def test_an_announced_manager_gets_calls_after_it_answered_a_probe(addresses: Addresses) -> None:
    addresses.announce(endpoints(A, B))
    assert addresses.order == (SERVICE,)
    assert addresses.next_probe() == A
    assert addresses.next_probe() is None  # one at a time
    addresses.on_probe(A, meta.GetClusterInfoResponse(self_node_id="a"))  # of a release that announces nothing
    assert (addresses.order, addresses.next_probe()) == ((A.address, SERVICE), None)


def test_an_announced_address_among_the_given_ones_moves_to_the_front(clock: ManualClock) -> None:
    given = Addresses([A.address, B.address, C.address], clock)
    assert assigned(given, B, A, C).order == (B.address, A.address, C.address)
    assert given.in_use() == {A.address, B.address, C.address}


def test_a_probe_without_an_answer_costs_no_call_anything_and_is_repeated_ever_later(
    addresses: Addresses, clock: ManualClock
) -> None:
    addresses.announce(endpoints(A))
    probes = []
    for second in range(100):
        clock.seconds = float(second)
        if (manager := addresses.next_probe()) is not None:
            addresses.on_probe(manager, None)
            probes.append(second)
        assert addresses.order == (SERVICE,)
    assert probes == [0, 5, 15, 35, 75]


@pytest.mark.parametrize("node_id", ["b", "of another deployment"])
def test_another_node_at_the_address_gets_no_calls(addresses: Addresses, node_id: str) -> None:
    addresses.announce(endpoints(A))
    confirm(addresses, node_id=node_id)
    assert (addresses.order, addresses.next_probe()) == ((SERVICE,), None)


def test_managers_that_disagree_do_not_send_a_client_back_and_forth(addresses: Addresses, clock: ManualClock) -> None:
    assigned(addresses, A)
    probes = 0
    for second in range(100):
        clock.seconds = float(second)
        addresses.announce(endpoints(B))  # so says a
        if (manager := addresses.next_probe()) is not None:
            named = meta.GetClusterInfoResponse(self_node_id="b", preferred_managers=endpoints(A, B))  # so says b
            addresses.on_probe(manager, named)
            probes += 1
        assert addresses.order[0] == A.address
    assert probes == 5


def test_a_manager_that_drains_gets_no_calls_though_all_others_failed(addresses: Addresses) -> None:
    assigned(addresses, A, B, C)
    addresses.on_failure(A.address)
    confirm(addresses, C)  # b, which leaves: c is said to be better
    confirm(addresses, A, B)  # c, which leaves too: it names those that failed, and not itself
    assert (addresses.order, addresses.assigned) == ((SERVICE,), None)


def test_a_hint_moves_the_calls_and_keeps_the_other_managers_in_reserve(addresses: Addresses) -> None:
    assigned(addresses, A, B)
    addresses.announce(endpoints(C))
    confirm(addresses, C, A, B)
    assert addresses.order == (C.address, SERVICE)
    addresses.on_failure(C.address)
    assert addresses.next_probe() == A


def test_the_next_manager_takes_over_from_one_that_failed_though_it_still_names_that_one(
    addresses: Addresses, clock: ManualClock
) -> None:
    assigned(addresses, A, B)
    policy = Policy(addresses, RetrySettings(), clock, lambda _, high: high)
    replies = {A.address: UNAVAILABLE, SERVICE: OK, B.address: OK}
    assert carry_out(policy, clock, lambda send: replies[send.address]).outcome is Outcome.OK
    assert clock.steps == [Send(A.address, 1.0), Send(SERVICE, 1.0)]  # the failed attempt took no time
    confirm(addresses, A, B)
    assert addresses.order == (B.address, SERVICE)
    addresses.announce(endpoints(A))  # b has not noticed yet
    assert (addresses.order, addresses.next_probe()) == ((B.address, SERVICE), None)
    clock.seconds = 5.0
    confirm(addresses, A, B)
    assert addresses.order == (A.address, SERVICE)


def test_a_silent_manager_takes_as_long_as_a_given_address_did(clock: ManualClock, addresses: Addresses) -> None:
    policy = Policy(assigned(addresses, A), RetrySettings(), clock, lambda _, high: high)
    assert carry_out(policy, clock, lambda _: TIMEOUT).outcome is Outcome.TIMEOUT
    assert clock.steps == [Send(A.address, 1.0)]
    carry_out(policy, clock, lambda _: OK)
    assert clock.steps == [Send(SERVICE, 1.0)]


@pytest.mark.parametrize(
    ("reply", "stays"),
    [
        (shed(0.1), True),
        (status(grpc.StatusCode.RESOURCE_EXHAUSTED), True),
        (answer(ErrorCode.INVALID_ARGUMENT), True),
        (answer(ErrorCode.SERVER_NOT_LEADER), False),
        (answer(ErrorCode.SERVICE_NOT_READY), False),
        (status(grpc.StatusCode.CANCELLED), False),
    ],
)
def test_a_manager_that_sheds_a_request_stays_assigned(
    clock: ManualClock, addresses: Addresses, reply: Any, stays: bool
) -> None:
    policy = Policy(assigned(addresses, A), RetrySettings(), clock, lambda _, high: high)
    carry_out(policy, clock, lambda send: reply if send.address == A.address else OK)
    assert (addresses.order[0] == A.address) is stays


def test_a_client_that_follows_no_assignment_keeps_its_addresses(clock: ManualClock) -> None:
    given = Addresses([SERVICE], clock, follows=False)
    given.announce(endpoints(A))
    assert (given.next_probe(), given.order) == (None, (SERVICE,))


@pytest.mark.parametrize(
    "malformed",
    [
        endpoint("", "10.0.0.1"),
        endpoint("a", ""),
        endpoint("a", "10.0.0.1", 0),
        endpoint("a", "10.0.0.1", 65536),
        endpoint("a", "unix:/run/docker.sock"),
        endpoint("a", "dns://8.8.8.8/kvcm"),
        endpoint("a", "kvcm, evil"),
        endpoint("a", "h" * 254),
    ],
)
def test_a_malformed_address_is_left_out(addresses: Addresses, malformed: meta.MetaNodeEndpoint) -> None:
    addresses.announce([malformed])
    assert addresses.next_probe() is None
    addresses.announce([malformed, endpoint("b", "fd00::2")])
    assert addresses.next_probe() == AnnouncedManager("b", "[fd00::2]:6381")


def test_few_announced_managers_are_kept(addresses: Addresses) -> None:
    for number in range(100):
        addresses.announce([endpoint(f"n{number}", f"h{number}")])
    assert len(addresses.in_use()) == 17


@pytest.mark.parametrize(
    ("given", "announced", "name"),
    [
        ("kvcm.cache.svc:6381", "10.0.0.1:6381", "kvcm.cache.svc"),
        ("kvcm.cache.svc:6381", "[fd00::1]:6381", "kvcm.cache.svc"),
        ("kvcm.cache.svc:6381", "manager-1:6381", ""),
        ("kvcm.cache.svc:6381", "kvcm.cache.svc:6381", ""),
        ("10.0.0.9:6381", "10.0.0.1:6381", ""),
    ],
)
def test_the_certificate_of_an_announced_pod_has_the_name_that_was_given(given: str, announced: str, name: str) -> None:
    assert Addresses([given]).verified_name(announced) == name
