"""Ports that tests give to servers: never two of them the same, in no worker of a parallel run."""

from __future__ import annotations

import itertools
import socket

import pytest
from ports import BUS_OFFSET, free_port, ports_of

WORKERS = [f"gw{number}" for number in range(40)]


def with_buses(ports: range) -> set[int]:
    return {*ports, *(port + BUS_OFFSET for port in ports)}


def test_no_two_workers_share_a_port_or_that_of_a_bus() -> None:
    for one, two in itertools.combinations(WORKERS, 2):
        assert not with_buses(ports_of(one)) & with_buses(ports_of(two))


def test_a_port_is_given_once_whether_or_not_it_is_bound_yet() -> None:
    given = [free_port(offset) for _ in range(100) for offset in (0, BUS_OFFSET)]
    assert len(set(given)) == len(given)


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    port, bus, free = free_port(), free_port(BUS_OFFSET), free_port(BUS_OFFSET)
    monkeypatch.setattr("ports._next_ports", itertools.cycle([port, bus, free]))
    with socket.socket() as taken, socket.socket() as taken_bus:
        taken.bind(("127.0.0.1", port))
        taken_bus.bind(("127.0.0.1", bus + BUS_OFFSET))
        assert free_port(BUS_OFFSET) == free
