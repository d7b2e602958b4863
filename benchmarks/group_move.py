"""Claim: a group's blocks move to another Redis while engines write and read; no call fails, nothing acknowledged is
lost, and writes wait for as long as the last copy takes.

Two managers share a registry on one Redis and have a second one for blocks. Engines of one instance write chains and
look them up at both managers all the time; the group moves there and back. Then it moves while the leading manager is
killed in the middle, again and again, and started again: engines reach the other one meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
from report import Row, arguments, is_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from manager_process import ManagerProcess, start_manager
from ports import free_port
from redis_servers import Standalone, standalone

from kvcm.connectors.client import AsyncManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import RegistrationState
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.protocol import admin_service_pb2, admin_service_pb2_grpc
from kvcm.protocol.kvcm.v1 import group_service_pb2, group_service_pb2_grpc

INSTANCE, GROUP, STORE, REGISTRY = "model", "default", "second", "registry"
ENGINES = 8
BLOCKS = 64  # per write
PAUSE_SECONDS = 0.4  # of an engine between its requests, at most
CALL_SECONDS = 15.0
MOVE_SECONDS = 240.0
SETTINGS = ClientSettings(timeout_seconds=CALL_SECONDS)


@dataclass
class Seen:
    """What engines saw.

    Attributes:
        acknowledged: chains whose finish was answered.
        write_ms: how long each write took, start and finish, and when it began.
        failures: calls that failed, and why.
        lookups: calls that were answered as they had to be.
        masked: starts whose blocks another start of the same client has, which was not answered.
    """

    acknowledged: list[list[int]] = field(default_factory=list)
    write_ms: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lookups: int = 0
    masked: int = 0

    def longest_ms(self, begin: float, end: float) -> float:
        """Return the longest write of those that began in a window."""
        return max((took for at, took in self.write_ms if begin <= at <= end), default=0.0)


class Site:
    """Two managers over two servers."""

    def __init__(self, directory: Path, registry: Standalone, blocks: Standalone) -> None:
        self._settings = [
            f"kvcm.registry_storage.uri={registry.uri('move')}",
            f"kvcm.store.block_stores={STORE}={blocks.uri('move-blocks')}",
            "kvcm.leader_elector.lease_ms=2000",
        ]
        self._directory = directory
        self._ports = [{name: free_port() for name in _PORTS} for _ in range(2)]
        self.managers = [self._started(number) for number in range(2)]

    def _started(self, number: int) -> ManagerProcess:
        return start_manager(self._directory / f"manager{number}", self._ports[number], self._settings)

    def kill_leader(self) -> None:
        """Kill the leading manager, and start it again."""
        number = self.leader()
        self.managers[number].kill()
        self.managers[number] = self._started(number)

    def leader(self) -> int:
        """Return the number of the manager that leads."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for number in range(2):
                with contextlib.suppress(grpc.RpcError):
                    if self._leads(number):
                        return number
            time.sleep(0.02)
        raise AssertionError("no manager leads")

    def _leads(self, number: int) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self._ports[number]['admin_rpc_port']}") as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            answer = stub.GetManagerClusterInfo(admin_service_pb2.GetManagerClusterInfoRequest(), timeout=10)
        return bool(answer.self_node_id == answer.leader_node_id)

    @contextlib.contextmanager
    def groups(self, number: int = 0) -> Iterator[group_service_pb2_grpc.GroupServiceStub]:
        """Yield the calls of groups at a manager."""
        with grpc.insecure_channel(f"127.0.0.1:{self._ports[number]['admin_rpc_port']}") as channel:
            yield group_service_pb2_grpc.GroupServiceStub(channel)  # type: ignore[no-untyped-call]

    def assign(self, store: str, number: int = 0) -> None:
        """Have the group's blocks kept in a store."""
        with self.groups(number) as groups:
            request = group_service_pb2.MoveInstanceGroupRequest(name=GROUP, store=store)
            status = groups.MoveInstanceGroup(request, timeout=10).header.status
        assert status.code == admin_service_pb2.OK, status.message

    def moves(self, number: int = 0) -> list[str]:
        """Return the instances that are on their way, and what is known of them."""
        with self.groups(number) as groups:
            answer = groups.ListGroupStore(group_service_pb2.ListGroupStoreRequest(), timeout=10)
        return [str(move) for group in answer.groups for move in group.moves]

    def stop(self) -> None:
        """Stop both."""
        for manager in self.managers:
            manager.stop()


_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[tuple[Site, Standalone, Standalone]]:
    """Run the servers and managers."""
    with standalone(directory / "registry") as registry, standalone(directory / "blocks") as blocks:
        site = Site(directory, registry, blocks)
        try:
            yield site, registry, blocks
        finally:
            site.stop()


@contextlib.asynccontextmanager
async def engines(site: Site, seen: Seen, seed: int) -> AsyncIterator[None]:
    """Let engines work until the end of the block, half of them at each manager first."""
    ends = asyncio.Event()
    addresses = [manager.address for manager in site.managers]
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncManagerClient(addresses[:: (-1) ** number], INSTANCE, SETTINGS))
            for number in range(ENGINES)
        ]
        model = ModelDeployment("m", "bf16")
        for client in clients:
            registered = await client.register_instance(GROUP, 16, [LocationSpecInfo("tp0", 1024)], model)
            assert registered.state is RegistrationState.OK, registered
        working = [
            asyncio.create_task(_work(client, seen, Random(seed * 1000 + number), ends))
            for number, client in enumerate(clients)
        ]
        try:
            yield
        finally:
            ends.set()
            await asyncio.gather(*working)


async def _work(client: AsyncManagerClient, seen: Seen, random: Random, ends: asyncio.Event) -> None:
    while not ends.is_set():
        keys = [random.getrandbits(63) for _ in range(BLOCKS)]
        begin = time.monotonic()
        grant = await client.start_write(keys)
        if grant is None:
            seen.failures.append("start")
        elif not await client.finish_write(grant.session_id, [True] * len(grant.locations)):
            seen.failures.append("finish")
        elif all(grant.mask):
            seen.masked += 1  # the start that a killed manager did not answer has the blocks
        else:
            seen.acknowledged.append(keys)
            seen.write_ms.append((begin, 1000 * (time.monotonic() - begin)))
        await asyncio.sleep(PAUSE_SECONDS * random.random())
        if seen.acknowledged:
            await _check(client, random.choice(seen.acknowledged), seen)


async def _check(client: AsyncManagerClient, keys: Sequence[int], seen: Seen) -> None:
    found = await client.match(keys)
    if found.reason:
        seen.failures.append(f"match: {found.reason}")
    elif len(found.locations) < len(keys):
        # The manager may learn of a move within a second only (design.md decision 7).
        await asyncio.sleep(1.0)
        again = await client.match(keys)
        if len(again.locations) < len(keys):
            seen.failures.append(f"match: {len(again.locations)} of {len(keys)} blocks {again.reason}")
    else:
        seen.lookups += 1


async def fill(site: Site, seen: Seen, blocks: int) -> None:
    """Write so many blocks as fast as it goes."""
    async with AsyncManagerClient(site.managers[0].address, INSTANCE, SETTINGS) as client:
        random = Random(1)
        for _ in range(blocks // 1024):
            keys = [random.getrandbits(63) for _ in range(1024)]
            grant = await client.start_write(keys)
            assert grant is not None
            assert await client.finish_write(grant.session_id, [True] * len(grant.locations))
            seen.acknowledged.append(keys)


async def moved(site: Site, store: str, number: int = 0) -> tuple[float, float]:
    """Move the group, and return when it began and ended."""
    begin = time.monotonic()
    await asyncio.to_thread(site.assign, store, number)
    while time.monotonic() < begin + MOVE_SECONDS:
        with contextlib.suppress(grpc.RpcError):
            if not await asyncio.to_thread(site.moves, number):
                return begin, time.monotonic()
        await asyncio.sleep(0.05)
    raise AssertionError(f"not moved within {MOVE_SECONDS:g} s: {site.moves(number)}")


def blocks_in(servers: Standalone) -> int:
    """Return how many blocks a server has."""
    with servers.server.admin() as admin:
        return sum(int(admin.hlen(name)) for name in admin.scan_iter("*:x{*", 1000))


async def lost(site: Site, seen: Seen) -> int:
    """Return how many acknowledged blocks are not found."""
    async with AsyncManagerClient(site.managers[1].address, INSTANCE, SETTINGS) as client:
        count = 0
        for keys in seen.acknowledged:
            found = await client.match(keys)
            assert not found.reason, found.reason
            count += len(keys) - len(found.locations)
        return count


async def plain_rows(site: Site, servers: Sequence[Standalone], blocks: int) -> list[Row]:
    """Move there and back under load."""
    seen = Seen()
    async with engines(site, seen, 1):
        await fill(site, seen, blocks)
        quiet_from = time.monotonic()
        await asyncio.sleep(3)
        quiet_until = time.monotonic()
        there = await moved(site, STORE)
        await asyncio.sleep(1)
        back = await moved(site, REGISTRY)
        await asyncio.sleep(1)
        there_again = await moved(site, STORE)
    case = f"{blocks:,} blocks and {ENGINES} engines, there, back and there"
    total = sum(len(keys) for keys in seen.acknowledged)
    normal = statistics.median([took for at, took in seen.write_ms if quiet_from <= at <= quiet_until])
    longest = max(seen.longest_ms(*window) for window in (there, back, there_again))
    seconds = statistics.median([end - begin for begin, end in (there, back, there_again)])
    left, here = [await asyncio.to_thread(blocks_in, each) for each in servers]
    return [
        Row(case, "seconds of a move", seconds, "s"),
        Row(case, "write of 64 blocks, median without a move", normal, "ms"),
        Row(case, "longest write while it moves", longest, "ms", target="<= 2000", ok=longest <= 2000),
        Row(case, "writes", len(seen.write_ms), ""),
        Row(case, "lookups of what was acknowledged", seen.lookups, ""),
        _none(case, "calls that failed", len(seen.failures)),
        _none(case, "acknowledged blocks that are lost", await lost(site, seen)),
        _none(case, "blocks left in the store before", left),
        Row(case, "blocks in the store after", here, "", target=f"= {total}", ok=here == total),
    ]


async def killed_rows(site: Site, servers: Sequence[Standalone], kills: int) -> list[Row]:
    """Move to and fro while the leader is killed in the middle."""
    seen, random, store, ended = Seen(), Random(5), STORE, 0
    async with engines(site, seen, 2):
        for _ in range(kills):
            moving = asyncio.create_task(_moved_by_any(site, store))
            await asyncio.sleep(random.random() * 1.5)
            await asyncio.to_thread(site.kill_leader)
            await moving
            ended += 1
            store = REGISTRY if store == STORE else STORE
        await asyncio.sleep(1)
    case = f"the leader is killed {kills} times while the group moves"
    await asyncio.sleep(15)  # what managers did not report before they were killed is recounted
    return [
        Row(case, "moves that ended", ended, "", target=f"= {kills}", ok=ended == kills),
        Row(case, "writes", len(seen.write_ms), ""),
        Row(case, "lookups of what was acknowledged", seen.lookups, ""),
        Row(case, "starts repeated after a kill", seen.masked, ""),
        Row(case, "longest write", seen.longest_ms(0, time.monotonic()), "ms"),
        _none(case, "calls that failed at both managers", len(seen.failures)),
        _none(case, "acknowledged blocks that are lost", await lost(site, seen)),
        _none(case, "faults that `index verify` finds", await asyncio.to_thread(faults, site)),
    ]


async def _moved_by_any(site: Site, store: str) -> None:
    for number in (0, 1):
        with contextlib.suppress(grpc.RpcError, AssertionError):
            await asyncio.to_thread(site.assign, store, number)
            break
    deadline = time.monotonic() + MOVE_SECONDS
    while time.monotonic() < deadline:
        for number in (0, 1):
            with contextlib.suppress(grpc.RpcError):
                if not await asyncio.to_thread(site.moves, number):
                    return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not moved within {MOVE_SECONDS:g} s")


def faults(site: Site) -> int:
    """Return the exit code of `kvcm index verify` over all stores, with the managers stopped."""
    site.stop()
    command = [sys.executable, "-m", "kvcm", "index", "verify"]
    for setting in site._settings:
        command += ["-e", setting]
    return subprocess.run(command, check=False, stdout=sys.stderr).returncode


def _none(case: str, metric: str, count: int) -> Row:
    return Row(case, metric, count, "", target="= 0", ok=count == 0)


def main() -> int:
    """Run the cases."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--blocks", type=int, default=0, help="before the move (default: 500,000; quick: 10,240)")
    parser.add_argument("--kills", type=int, default=0, help="kills of the leader (default: 20; quick: 2)")
    options = parser.parse_args()
    blocks = options.blocks or (10_240 if options.quick else 500_000)
    kills = options.kills or (2 if options.quick else 20)
    rows: list[Row] = []
    for run in (plain_rows, killed_rows):
        with tempfile.TemporaryDirectory(prefix="kvcm-move-") as directory:
            with opened(Path(directory)) as (site, *servers):
                of = blocks if run is plain_rows else kills
                rows += asyncio.run(run(site, servers, of))
    is_met = publish("A group moves to another Redis", rows, options.json)
    return 0 if is_met or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
