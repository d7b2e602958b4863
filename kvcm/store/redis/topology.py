"""Which server is responsible for which keys: one server, the master that sentinels name, or the nodes of a cluster.

What is known is used until it is doubted: a lost connection, a redirection or the answer of a replica doubts it, and
the next call asks anew, through whoever of several servers answers first, so that one that hangs holds up nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any, Protocol, TypeVar

from redis.exceptions import ResponseError

from kvcm.model.errors import StorageIOError
from kvcm.model.tasks import end_tasks
from kvcm.store.redis.node import Node
from kvcm.store.redis.uri import Address, RedisSettings

__all__ = ["Topology", "topology_of"]

_SLOT_COUNT = 16384
_MOST_ASKED = 4
_PATIENCE_SECONDS = 0.1

_Answer = TypeVar("_Answer")


class Topology(Protocol):
    """Which server is responsible for which keys."""

    async def node_of(self, slot: int) -> Node:
        """Return the master of a slot.

        Raises:
            StorageIOError: nobody who would know can be asked, or there is none.
        """

    async def masters(self) -> list[Node]:
        """Ask anew and return all masters, in a fixed order.

        Raises:
            StorageIOError: nobody who would know can be asked.
        """

    def at(self, address: Address) -> Node:
        """Return the server at an address that a redirection names."""

    async def doubt(self) -> None:
        """Ask anew before the next call."""

    async def close(self) -> None:
        """Close all connections."""


def topology_of(settings: RedisSettings, random: Random) -> Topology:
    """Return the topology that a uri describes.

    Args:
        settings: what the uri says.
        random: chooses whom of many to ask.
    """
    if settings.kind == "cluster":
        return ClusterTopology(settings, random)
    if settings.kind == "sentinel":
        return SentinelTopology(settings, random)
    return SingleTopology(settings)


class SingleTopology:
    """One server."""

    def __init__(self, settings: RedisSettings) -> None:
        self._node = Node(settings, settings.addresses[0])

    async def node_of(self, slot: int) -> Node:
        return self._node

    async def masters(self) -> list[Node]:
        return [self._node]

    def at(self, address: Address) -> Node:
        raise StorageIOError(f"redis {self._node.address} is a node of a cluster; use redis+cluster://")

    async def doubt(self) -> None:
        # The name may lead to another server by now, so only the connections are doubtful.
        await self._node.forget_connections()

    async def close(self) -> None:
        await self._node.close()


class SentinelTopology:
    """The master that sentinels name."""

    def __init__(self, settings: RedisSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        at_sentinels = dataclasses.replace(
            settings, user=settings.sentinel_user, password=settings.sentinel_password, database=0
        )
        self._sentinels = [Node(at_sentinels, address) for address in settings.addresses]
        self._master: Node | None = None
        self._epoch = 0
        self._doubted = False
        self._asking = asyncio.Lock()

    async def node_of(self, slot: int) -> Node:
        if self._master is not None and not self._doubted:
            return self._master
        async with self._asking:
            return await self._find() if self._master is None or self._doubted else self._master

    async def masters(self) -> list[Node]:
        async with self._asking:
            return [await self._find()]

    def at(self, address: Address) -> Node:
        raise StorageIOError(f"redis {address} is a node of a cluster; use redis+cluster://")

    async def doubt(self) -> None:
        self._doubted = True
        if self._master is not None:
            await self._master.forget_connections()  # whether it is still the master is asked of new connections

    async def close(self) -> None:
        for node in [*self._sentinels, *([self._master] if self._master else [])]:
            await node.close()

    async def _find(self) -> Node:
        asked = self._random.sample(self._sentinels, len(self._sentinels))
        try:
            self._epoch, address = await _first(asked, self._according_to, f"sentinels of {self._settings.service!r}")
        except StorageIOError:
            self._epoch = 0  # sentinels that were set up anew count from the start again
            raise
        before, self._doubted = self._master, False
        if before is not None and before.address == address:
            return before
        master = self._master = Node(self._settings, address, must_be_master=True)
        if before is not None:
            await before.close()
        return master

    async def _according_to(self, sentinel: Node) -> tuple[int, Address]:
        service = self._settings.service
        master, state = await sentinel.ask(
            [(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service), (b"SENTINEL", b"MASTER", service)]
        )
        if not isinstance(master, list) or not isinstance(state, list):
            raise StorageIOError(f"sentinel {sentinel.address} knows no master {service!r}")
        epoch = int(dict(zip(state[::2], state[1::2], strict=True))[b"config-epoch"])
        if epoch < self._epoch:
            raise StorageIOError(f"sentinel {sentinel.address} has not heard of the last failover of {service!r} yet")
        return epoch, Address(master[0].decode(), int(master[1]))


class ClusterTopology:
    """The nodes of a cluster by slot."""

    def __init__(self, settings: RedisSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * _SLOT_COUNT
        self._doubted = True
        self._asking = asyncio.Lock()

    async def node_of(self, slot: int) -> Node:
        if self._doubted:
            async with self._asking:
                if self._doubted:
                    await self._find()
        node = self._slots[slot]
        if node is None:
            self._doubted = True
            raise StorageIOError(f"no node of the redis cluster serves slot {slot} now; try again")
        return node

    async def masters(self) -> list[Node]:
        async with self._asking:
            await self._find()
        by_address = {node.address: node for node in self._slots if node is not None}
        return [by_address[address] for address in sorted(by_address)]

    def at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(self._settings, address)
        return node

    async def doubt(self) -> None:
        self._doubted = True

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()

    async def _find(self) -> None:
        masters = list({node.address: node for node in self._slots if node is not None}.values())
        known = self._random.sample(masters, min(len(masters), _MOST_ASKED))
        seeds = self._random.sample(self._settings.addresses, min(len(self._settings.addresses), _MOST_ASKED))
        asked = list({node.address: node for node in [*known, *map(self.at, seeds)]}.values())
        ranges = await _first(asked, _slots_according_to, "nodes of the redis cluster")
        slots: list[Node | None] = [None] * _SLOT_COUNT
        for first, last, address in ranges:
            slots[first : last + 1] = [self.at(address)] * (last + 1 - first)
        self._slots, self._doubted = slots, False
        await self._leave({address for _, _, address in ranges} | set(self._settings.addresses))

    async def _leave(self, staying: set[Address]) -> None:
        for address in self._nodes.keys() - staying:
            await self._nodes.pop(address).close()


async def _slots_according_to(node: Node) -> list[tuple[int, int, Address]]:
    (answer,) = await node.ask([(b"CLUSTER", b"SLOTS")])
    if isinstance(answer, ResponseError):
        raise StorageIOError(f"redis {node.address} is no node of a cluster: {answer}")
    # A node that does not know its own name says nothing, or "?".
    return [
        (first, last, Address(_host(master[0]) or node.address.host, master[1]))
        for first, last, master, *_replicas in answer
    ]


def _host(name: bytes | None) -> str:
    return "" if name in (None, b"", b"?") else (name or b"").decode()


async def _first(nodes: Iterable[Node], ask: Callable[[Node], Coroutine[Any, Any, _Answer]], whom: str) -> _Answer:
    """Ask one, and while there is no answer one more after each `_PATIENCE_SECONDS`; return the first answer."""
    waiting, running, errors = list(nodes), set[asyncio.Task[_Answer]](), list[str]()
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(ask(waiting.pop(0))))
            patience = _PATIENCE_SECONDS if waiting else None
            done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, StorageIOError):
                    raise error
                errors.append(str(error))
    finally:
        await end_tasks(running)
    raise StorageIOError(f"none of the {whom} answers: {'; '.join(errors)}")
