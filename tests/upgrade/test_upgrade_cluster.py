"""A cluster whose managers are replaced one at a time, the leader last, while engines work: no call fails, and nothing
that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from json_api import JsonApi
from manager_site import GroupPlan, Manager, Site, running
from previous_release import Release
from redis_servers import Standalone
from restart_load import Client, Load, Way
from store_audit import verified

from kvcm.connectors.client import AsyncManagerClient
from kvcm.connectors.exchanges import ClientSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_THOROUGH = os.environ.get("KVCM_TESTS") == "thorough"
_MANAGERS = 3 if _THOROUGH else 2
_ROUNDS = 3  # of every client, between two replacements
_PATIENCE_SECONDS = 60.0
_RECONNECT_SECONDS = 2.5  # for which a client may leave a manager alone that was away (connectors/client.py), at most
_CAPACITY_BYTES = 1 << 40
_BLOCKS = 16


class Roamer:
    """An engine that knows all managers and calls any one that serves: none of its calls fails.

    Args:
        addresses: of the managers.
        instance: registered.
    """

    def __init__(self, addresses: list[str], instance: str) -> None:
        self._client = AsyncManagerClient(addresses, instance, ClientSettings(timeout_seconds=20.0))
        self.rounds = 0
        self.is_over = False
        self.wrong: list[str] = []

    async def run(self) -> None:
        """Write and read until it is over."""
        while not self.is_over:
            keys = range(self.rounds << 20, (self.rounds << 20) + _BLOCKS)
            grant = await self._client.start_write(keys)
            is_done = grant is not None and await self._client.finish_write(grant.session_id, [True] * _BLOCKS)
            found = await self._client.match_length(keys)
            if not is_done or found != _BLOCKS:
                self.wrong.append(
                    f"round {self.rounds}: granted {grant is not None}, finished {is_done}, found {found}"
                )
            self.rounds += 1
            await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Everything that it wrote is there."""
        for number in range(self.rounds):
            keys = range(number << 20, (number << 20) + _BLOCKS)
            found = await self._client.match_length(keys)
            if found != _BLOCKS:
                self.wrong.append(f"{found} of {_BLOCKS} blocks of round {number} are left")
        await self._client.close()


class Cluster:
    """Managers, and the clients that work on them."""

    def __init__(self, managers: list[Manager]) -> None:
        self.managers, self.load = managers, Load(long_blocks=1024)
        ways = [
            Way(transport, int(manager.settings[f"kvcm.service.{port}"]), number)
            for number, manager in enumerate(managers)
            for transport, port in (("grpc", "rpc_port"), ("http", "http_port"))
        ]
        self.clients = [Client(self.load, way, f"client{number}") for number, way in enumerate(ways)]
        addresses = [f"127.0.0.1:{manager.settings['kvcm.service.rpc_port']}" for manager in managers]
        self.roamers = [Roamer(addresses[at:] + addresses[:at], f"roamer{at}") for at in range(len(addresses))]

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Let clients work inside the block; then they look for everything they wrote."""
        names = [client.instance for client in self.clients] + [f"roamer{at}" for at in range(len(self.roamers))]
        wire = self.managers[0].connect()
        await Site(GroupPlan("upgrade", tuple(names), _CAPACITY_BYTES)).set_up(wire)
        await wire.close()
        for manager in self.managers:
            api = JsonApi(manager)
            for name in names:  # within a second, all managers know a registration with one
                await self.until(lambda a=api, n=name: _knows(a, n), f"{name} is known")
        tasks = [asyncio.create_task(each.run()) for each in (*self.clients, *self.roamers)]
        try:
            yield
        finally:
            self.load.is_over = True
            for roamer in self.roamers:
                roamer.is_over = True
            await asyncio.gather(*tasks)
        for client in self.clients:
            again = Client(self.load, client.way, client.instance)
            for keys in client.confirmed:
                await again.check(keys)
            await again.close()
        for roamer in self.roamers:
            await roamer.check()

    @property
    def wrong(self) -> list[str]:
        """Violations that the clients saw."""
        return [*self.load.wrong, *(text for roamer in self.roamers for text in roamer.wrong)]

    async def get_on(self) -> None:
        """Return when all clients have worked for a while with the managers as they are, and may use any of them."""
        workers = [*self.clients, *self.roamers]
        goals = [worker.rounds + _ROUNDS for worker in workers]
        since = time.monotonic()

        def have_got_on() -> bool:
            are_there = all(worker.rounds >= goal for worker, goal in zip(workers, goals, strict=True))
            return are_there and time.monotonic() >= since + _RECONNECT_SECONDS

        await self.until(lambda: bool(self.wrong) or have_got_on(), "clients get on")
        assert self.wrong == []

    async def become(self, code: Path | None) -> None:
        """Replace the managers one at a time by those of a release, the leader last."""
        leader = await self.leader()
        for manager in sorted(self.managers, key=lambda each: each is leader):
            if manager is leader:
                await asyncio.to_thread(JsonApi(manager).admin, "LeaderDemote")
            assert await asyncio.to_thread(manager.stop) == 0
            manager.code = code
            await asyncio.to_thread(manager.start)
            await self.get_on()
            await self.leader()

    async def leader(self) -> Manager:
        """Return the leader, as soon as there is one."""
        found: list[Manager] = []

        def is_one_leading() -> bool:
            reported = ((each, JsonApi(each).admin("GetManagerClusterInfo")) for each in self.managers)
            found[:] = [each for each, answer in reported if answer["self_node_id"] == answer.get("leader_node_id")]
            return len(found) == 1

        await self.until(is_one_leading, "one manager leads")
        return found[0]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return when something is so."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline, f"not within {_PATIENCE_SECONDS} s: {what}"
            await asyncio.sleep(0.02)


def _knows(api: JsonApi, instance: str) -> bool:
    return bool(api.data("GetInstanceInfo", instance_id=instance))


def test_managers_are_replaced_under_load(tmp_path: Path, previous: Release, redis_standalone: Standalone) -> None:
    uri = redis_standalone.uri(f"upgrade-{secrets.token_hex(8)}", timeout_ms=20_000)
    managers = [Manager(tmp_path / f"m{at}", {"kvcm.registry_storage.uri": uri}) for at in range(_MANAGERS)]
    for manager in managers:
        manager.code = previous.code
    with running(*managers):
        cluster = asyncio.run(_upgraded(managers, previous))
        assert cluster.wrong == []
        assert verified(managers[0].store_options) == []
        assert [manager.stop() for manager in managers] == [0] * _MANAGERS
    assert [manager.failures() for manager in managers] == [[]] * _MANAGERS
    assert sum(len(client.confirmed) for client in cluster.clients) > 2 * _ROUNDS * len(cluster.clients)


async def _upgraded(managers: list[Manager], previous: Release) -> Cluster:
    cluster = Cluster(managers)
    async with cluster.working():
        await cluster.get_on()
        await cluster.become(None)
        if _THOROUGH:
            await cluster.become(previous.code)  # back, under load as well
            await cluster.become(None)
    return cluster
