"""When a manager is told of memory pools: once, again when it may have forgotten, by a thread that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from manager_process import ManagerProcess
from pool_parts import CAPACITY, NODE
from waiting import until

from connectors.client import ManagerClient
from connectors.pool_reports import PoolReports, PoolTeller
from connectors.transfer import TransferEngine
from connectors.transfer.mempool import AttachedPool
from connectors.transfer.pool_making import segment_path
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec

SECONDS = 30.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool(manager: ManagerProcess, pool_directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a pool of this node, which is returned."""
    monkeypatch.setenv("KVCM_NODE_ID", NODE)
    monkeypatch.setenv("KVCM_POOL_DIRECTORY", str(pool_directory))
    monkeypatch.delenv("KVCM_CLUSTER_ID", raising=False)
    name = f"pool-{uuid4().hex[:8]}"
    manager.add_pool(name, NODE, CAPACITY)
    return name


@pytest.fixture
def client(manager: ManagerProcess, instance_id: str) -> Iterator[ManagerClient]:
    with ManagerClient(manager.address, instance_id) as client:
        yield client


@pytest.fixture
def teller(client: ManagerClient, pool_directory: Path) -> Iterator[PoolTeller]:
    """Closed before the directory is removed, in which its thread may just be making a pool."""
    teller = PoolTeller(PoolReports(client), SECONDS)
    yield teller
    teller.close()


def engine_of(pool: str) -> TransferEngine:
    spec = TairMemPoolStorageSpec(node_id=NODE, capacity_bytes=CAPACITY)
    return TransferEngine.for_storages([StorageConfig(pool, spec)])


def told(client: ManagerClient) -> int:
    """How many reports a manager has taken."""
    counters = client.counters().get("report_pool")
    return 0 if counters is None else counters.ok


def test_a_pool_is_told_of_again_every_minute_since_a_manager_may_forget(client: ManagerClient, pool: str) -> None:
    clock, engine = Clock(), engine_of(pool)
    reports, pools = PoolReports(client, clock), engine.pools()
    assert len(pools) == 1
    reports.tell(reports.due(pools), SECONDS)
    for clock.now, due in ((59.9, []), (60.0, pools), (60.1, []), (119.9, []), (120.0, pools)):
        assert reports.due(pools) == due
    reports.forget()
    assert reports.due(pools) == pools
    engine.close()


def test_whatever_goes_wrong_what_nobody_took_is_due_again(client: ManagerClient, pool: str) -> None:
    engine = engine_of(pool)
    (good,) = engine.pools()
    bad = AttachedPool(pool, NODE, 0, CAPACITY)
    reports = PoolReports(client)
    with pytest.raises(InvalidArgumentError, match="generation is 0"):
        reports.tell(reports.due([good, bad, AttachedPool("other", NODE, 1, CAPACITY)]), SECONDS)
    assert reports.due([good]) == []
    assert reports.due([bad, AttachedPool("other", NODE, 1, CAPACITY)])
    engine.close()


def test_the_engine_of_another_registration_is_told_of_anew(
    client: ManagerClient, teller: PoolTeller, pool: str
) -> None:
    """The manager that registers an instance anew has lost its state, and what it was told of pools with it."""
    before, after = engine_of(pool), engine_of(pool)
    teller.look_after(before)
    until(lambda: told(client) == 1)
    for _ in range(3):
        teller.look_after(before)
    teller.look_after(after)
    until(lambda: told(client) == 2)
    before.close()
    after.close()


def test_a_pool_that_comes_later_is_told_of_by_whoever_uses_the_engine(
    client: ManagerClient, teller: PoolTeller, pool: str, pool_directory: Path
) -> None:
    path = segment_path(pool_directory, "", pool)
    path.write_bytes(b"something else")
    path.chmod(0o600)
    engine = engine_of(pool)
    teller.look_after(engine)
    assert told(client) == 0
    path.unlink()

    def is_told() -> bool:
        teller.look_after(engine)
        return told(client) == 1

    until(is_told)
    engine.close()


def test_an_engine_without_pools_needs_no_thread(client: ManagerClient, teller: PoolTeller) -> None:
    engine = TransferEngine({})
    teller.look_after(engine)
    assert not engine.has_pools
    assert teller._last is None
    engine.close()
