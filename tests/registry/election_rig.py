"""Managers that compete for one lease in memory; the way to it can be slow, cut off or lose answers."""

import asyncio
from collections.abc import Callable

from fake_clock import FakeClock

from kvcm.model.nodes import Endpoint
from kvcm.registry.leadership import Leadership
from kvcm.store.store import Lease, LeaseState, Revision, Table

ENDPOINT = Endpoint("node-1", "host-1", 1, 2, 3, 4)
LEASE_SECONDS = 10.0
MARGIN_SECONDS = 1.0


class UnreliableLease:
    """The way of one manager to a lease.

    Attributes:
        outage: raised instead of every call.
        lost_answer: raised after every call.
        on_answer: called once the store has executed a call.
        gate: calls wait for it before they reach the store.
        asked: set when a call begins.
        revision: as of `Lease`: a constant one, where it is thought to be notified of changes and is not.
        calls: how many there were.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.outage: Exception | None = None
        self.lost_answer: Exception | None = None
        self.on_answer: Callable[[], None] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.revision: Revision | None = None
        self.calls = 0

    async def acquire(self, node_id: str, seconds: float) -> LeaseState:
        await self._begin()
        state = await self._lease.acquire(node_id, seconds)
        self._end()
        return state

    async def get(self) -> LeaseState:
        await self._begin()
        state = await self._lease.get()
        self._end()
        return state

    async def release(self, node_id: str) -> None:
        await self._begin()
        await self._lease.release(node_id)
        self._end()

    async def _begin(self) -> None:
        self.asked.set()
        self.calls += 1
        await self.gate.wait()
        if self.outage is not None:
            raise self.outage

    def _end(self) -> None:
        self.on_answer()
        if self.lost_answer is not None:
            raise self.lost_answer


def elector(node_id: str, clock: FakeClock, lease: Lease, nodes: Table) -> Leadership:
    return Leadership(node_id, clock, LEASE_SECONDS, lease, nodes, MARGIN_SECONDS)


def endpoint_of(node_id: str) -> Endpoint:
    return Endpoint(node_id, f"{node_id}.example", 1, 2, 3, 4)
