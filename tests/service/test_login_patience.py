"""Who tries many passwords has to wait, from however many addresses of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvcm.model.principals import STRANGER, Errand, errand
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.registry.registry import Registry
from kvcm.service.access_api import AccessApi
from kvcm.service.networks import network_of
from kvcm.service.turned_away import RateLimitedError, UnauthenticatedError
from kvcm.storage.directory import StorageDirectory


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("%5B2001:db8:1:2::1%5D", "2001:db8:1:2::/64"),  # as gRPC has it
        ("[2001:db8:1:3::1]", "2001:db8:1:3::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_of_ipv6_a_network_stands_for_whoever_has_an_address_in_it(peer: str, network: str) -> None:
    assert network_of(peer) == network


async def _outcomes(api: AccessApi, peers: Iterable[str]) -> list[type[Exception]]:
    outcomes: list[type[Exception]] = []
    for peer in peers:
        before = errand.set(Errand(STRANGER, "Login", peer))
        with pytest.raises((UnauthenticatedError, RateLimitedError)) as refused:
            await api.log_in(pb.LoginRequest(user_name="u", password="wrong"))
        outcomes.append(refused.type)
        errand.reset(before)
    return outcomes


async def test_the_addresses_of_an_ipv6_network_share_their_tries() -> None:
    api = AccessApi(Registry(StorageDirectory("cluster", [])), is_required=True, clock=lambda: 0.0)
    peers = [*(f"2001:db8::{number:x}" for number in range(1, 12)), "2001:db8:0:1::1", "10.0.0.7"]
    assert await _outcomes(api, peers) == [*[UnauthenticatedError] * 10, RateLimitedError, *[UnauthenticatedError] * 2]
