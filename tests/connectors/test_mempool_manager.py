"""A memory pool between a real manager and engines of its node, and of others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from manager_process import ManagerProcess
from pool_parts import CAPACITY, MIB, NODE, content
from waiting import until

from kvcm.connectors.client import AsyncManagerClient, ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.pool_reports import PoolReports
from kvcm.connectors.results import Location, MatchMode, PoolReport, WriteGrant
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem
from kvcm.connectors.transfer.pool_segment import segment_path
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

SPEC = "tp0"
BLOCK_BYTES = 40_000
SECONDS = 30.0


@pytest.fixture
def pool(manager: ManagerProcess) -> str:
    """Add a pool of this node and a group that uses only it; both have the same name, which is returned."""
    name = f"pool-{uuid4().hex[:8]}"
    manager.add_pool(name, NODE, CAPACITY)
    return name


@pytest.fixture
def new_client(manager: ManagerProcess, instance_id: str) -> Iterator[Callable[[str], ManagerClient]]:
    def new(node_id: str) -> ManagerClient:
        client = ManagerClient(manager.address, instance_id, ClientSettings(SECONDS, node_id=node_id))
        return clients.enter_context(client)

    with ExitStack() as clients:
        yield new


@pytest.fixture
def client(new_client: Callable[[str], ManagerClient]) -> ManagerClient:
    return new_client(NODE)


@pytest.fixture
def engine(client: ManagerClient, pool: str, node: None) -> Iterator[TransferEngine]:
    """Register, map the pool and report it."""
    registration = client.register_instance(pool, 4, [LocationSpecInfo(SPEC, BLOCK_BYTES)], ModelDeployment("m", "f"))
    assert registration.ok, registration.message
    engine = TransferEngine.for_storages(registration.storages)
    reports = PoolReports(client)
    due = reports.due_pools(engine.pools())
    assert [pool.node_id for pool in due] == [NODE]
    reports.report(due, SECONDS)
    assert reports.due_pools(engine.pools()) == []  # the manager accepted the report
    yield engine
    engine.close()


def granted(client: ManagerClient, keys: list[int]) -> WriteGrant:
    """Ask for addresses until the manager has looked at the storage."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        grant = client.start_write(keys)
        if grant is not None:
            return grant
    raise AssertionError("the manager gives no addresses")


def publish(client: ManagerClient, engine: TransferEngine, keys: list[int]) -> WriteGrant:
    grant = granted(client, keys)
    items = [
        TransferItem(location.uris[SPEC], [memoryview(content(key, 0, BLOCK_BYTES))])
        for key, location in zip(keys, grant.locations, strict=True)
    ]
    results = engine.save(items, SECONDS)
    assert all(result.ok for result in results), results
    assert client.finish_write(grant.session_id, [True] * len(keys))
    return grant


def load(engine: TransferEngine, location: Location | None) -> tuple[bytes, Failure | None]:
    assert location is not None
    item = TransferItem(location.uris[SPEC], [memoryview(bytearray(BLOCK_BYTES))])
    (result,) = engine.load([item], SECONDS)
    return bytes(item.buffers[0]), result.failure


def test_blocks_of_a_pool_are_found_and_read_on_its_node_only(
    client: ManagerClient, engine: TransferEngine, new_client: Callable[[str], ManagerClient]
) -> None:
    keys = list(range(1, 21))
    publish(client, engine, keys)
    found = client.match(keys)
    assert [load(engine, location) for location in found.locations] == [
        (content(key, 0, BLOCK_BYTES), None) for key in keys
    ]
    assert client.match_length(keys) == len(keys)
    grant = client.start_write(keys)
    assert grant is not None
    assert all(grant.mask)
    for elsewhere in ("", "node-b"):
        other = new_client(elsewhere)
        assert other.match(keys).locations == ()
        assert other.match(keys, MatchMode.BATCH).locations == (None,) * len(keys)
        assert other.match_length(keys) == 0


def test_lost_memory_loses_blocks(
    client: ManagerClient, engine: TransferEngine, pool: str, pool_directory: Path
) -> None:
    keys = list(range(1, 9))
    publish(client, engine, keys)
    before = client.match(keys).locations
    segment_path(pool_directory, "", pool).unlink()
    assert load(engine, before[0])[1] is Failure.LOST
    others = list(range(101, 105))
    publish(client, engine, others)  # makes the memory again
    (attached,) = engine.pools()
    report = client.report_pool(pool, NODE, attached.generation, attached.capacity_bytes)
    assert report == PoolReport(is_new_generation=True)
    until(lambda: not client.match_length(keys), "no block of the lost memory is promised")
    publish(client, engine, keys)
    assert load(engine, client.match(keys).locations[0]) == (content(1, 0, BLOCK_BYTES), None)


def test_an_agent_reports_the_manager_and_engines_use_its_memory(
    manager: ManagerProcess,
    client: ManagerClient,
    pool: str,
    node: None,
    pool_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import sys; from kvcm.connectors.pool_agent import main; sys.exit(main())"
    place = ["--node-id", NODE, "--directory", str(pool_directory), "--interval", "0.2"]
    what = ["--storage", pool, "--capacity", str(CAPACITY), "--manager", manager.address]
    agent = subprocess.Popen([sys.executable, "-c", program, *what, *place], stderr=subprocess.DEVNULL)
    monkeypatch.setenv("KVCM_POOL_CREATE", "0")
    try:
        registration = client.register_instance(
            pool, 4, [LocationSpecInfo(SPEC, BLOCK_BYTES)], ModelDeployment("m", "f")
        )
        engine = TransferEngine.for_storages(registration.storages)
        publish(client, engine, [1, 2, 3])
        # A report holds for three intervals, which is less than some pauses of a busy agent.
        expected = [(content(key, 0, BLOCK_BYTES), None) for key in (1, 2, 3)]
        until(lambda: [load(engine, each) for each in client.match([1, 2, 3]).locations] == expected)
        engine.close()
    finally:
        agent.terminate()
        assert agent.wait(SECONDS) == 0
    # No agent reports the pool any more, so it takes no writes, and its blocks count as missing.
    until(lambda: not client.match_length([1, 2, 3]), "blocks of a pool without reports are missing")


async def test_coroutines_report_and_ask_the_same(manager: ManagerProcess, engine: TransferEngine, pool: str) -> None:
    (attached,) = engine.pools()
    async with AsyncManagerClient(manager.address, "any", ClientSettings(SECONDS, node_id=NODE)) as client:
        report = await client.report_pool(pool, NODE, attached.generation, attached.capacity_bytes)
    assert report == PoolReport(is_new_generation=False)


def test_reports_of_another_storage_are_refused(client: ManagerClient, engine: TransferEngine, pool: str) -> None:
    assert client.report_pool("nowhere", NODE, 1, CAPACITY) is None
    assert client.report_pool(pool, "node-b", 1, CAPACITY) is None
    assert client.report_pool(pool, NODE, 1, MIB) is None
    (attached,) = engine.pools()
    assert client.report_pool(pool, NODE, attached.generation, CAPACITY, valid_ms=60_000) == PoolReport(
        is_new_generation=False
    )
    reports = PoolReports(client)
    due = reports.due_pools(engine.pools())
    client.close()
    reports.report(due, 1.0)
    assert reports.due_pools(engine.pools()) == due  # no manager accepted it, so it is due again


def test_a_node_that_cannot_be_named_is_refused(manager: ManagerProcess) -> None:
    with pytest.raises(InvalidArgumentError, match="node_id 'a/b' is not 1 to 128"):
        ManagerClient(manager.address, "instance", ClientSettings(node_id="a/b"))
