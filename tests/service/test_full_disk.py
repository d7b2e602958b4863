"""A manager whose KV and metadata lie on one disk, which is full: alive, killed, and started again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from ports import free_port
from redis_servers import RedisServer
from small_disk import fill, free_bytes, small_disk
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager

from kvcm.model.uri import LocationUri

pytestmark = pytest.mark.ci  # processes that wait

MIB = 1 << 20
DISK = 64 * MIB
BLOCK = MIB // 4
RESERVE = DISK // 8


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK) as mounted:
        yield mounted


@contextlib.contextmanager
def started(tmp_path: Path, disk: Path, *settings: str) -> Iterator[tuple[ManagerProcess, Api]]:
    """Run a manager whose data directory is on the disk; what it logs is elsewhere."""
    options = ("kvcm.storage.probe_interval_ms=100", *settings)
    with manager(tmp_path / "host", "--data-dir", str(disk / "data"), *options) as process, process.api() as api:
        yield process, api


def register(api: Api, *more_storages: str, block_bytes: int = BLOCK) -> None:
    """Register the instance; its blocks are deleted as soon as they are evicted."""
    group = api.ok("AdminService.GetInstanceGroup", name="default").instance_group
    version = group.version
    group.version += 1
    group.cache_config.reclaim_strategy.delay_before_delete_ms = 0
    group.quota.capacity = 1 << 40
    del group.quota.quota_config[:]
    group.storage_candidates.extend(more_storages)
    api.ok("AdminService.UpdateInstanceGroup", instance_group=group, current_version=version)
    api.ok("RegisterInstance", **instance("i", block_bytes))


def instance(name: str, block_bytes: int = BLOCK) -> dict[str, Any]:
    return {
        "instance_group": "default",
        "instance_id": name,
        "block_size": 16,
        "location_spec_infos": [{"name": "kv", "size": block_bytes}],
        "model_deployment": {"model_name": "m", "dtype": "bf16"},
    }


def save(api: Api, keys: Sequence[int]) -> str:
    """Write blocks as an engine does; return why not, "" where all were written."""
    answer = api.call("StartWriteCache", instance_id="i", block_keys=keys)
    if answer.header.status.code != 1:
        return str(answer.header.status.message)
    written = [write(spec.uri) for location in answer.locations for spec in location.location_specs]
    api.ok(
        "FinishWriteCache",
        instance_id="i",
        write_session_id=answer.write_session_id,
        success_blocks={"bool_masks": {"values": written}},
    )
    return "" if all(written) else "the engine found no space"


def write(uri: str) -> bool:
    """Write a part into its file, which may hold others."""
    place = LocationUri.parse(uri)
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        with path.open("r+b", buffering=0) as file:
            file.seek(place.offset)
            return file.write(bytes(place.size)) == place.size
    except OSError:
        return False


def readable(api: Api, key: int) -> bool:
    answer = api.ok("GetCacheLocation", instance_id="i", query_type="QT_BATCH_GET", block_keys=[key])
    return any(spec.uri for location in answer.locations for spec in location.location_specs)


def kv_bytes(disk: Path) -> int:
    """Return what KV takes up: slots that are deleted are holes, and a note beside the file names them."""
    taken = 0
    for each in disk.rglob("kv/*"):
        if not each.name.endswith(".deleted"):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                taken += each.stat().st_blocks * 512
    return taken


def test_engines_never_fill_the_disk_of_the_metadata(tmp_path: Path, disk: Path) -> None:
    """Their writes are refused before; eviction makes room for them."""
    with started(tmp_path, disk) as (_, api):
        register(api)
        for number in range(400):  # one and a half times the disk
            reason = save(api, [number])
            assert not reason or "are reserved for metadata (kvcm.store.reserve_bytes)" in reason
            assert free_bytes(disk) >= RESERVE - BLOCK
        eventually(lambda: not save(api, [10_000]))
        assert readable(api, 10_000)
        assert kv_bytes(disk) > 100 * BLOCK


def test_many_open_writes_do_not_touch_the_reserve_together(tmp_path: Path, disk: Path) -> None:
    with started(tmp_path, disk) as (_, api):
        register(api)
        answers = [
            api.call("StartWriteCache", instance_id="i", block_keys=range(16 * number, 16 * number + 16))
            for number in range(20)
        ]
        uris = [spec.uri for answer in answers for location in answer.locations for spec in location.location_specs]
        assert 150 * BLOCK < len(uris) * BLOCK <= DISK - RESERVE
        assert all(map(write, uris))
        assert free_bytes(disk) >= RESERVE - BLOCK


def test_blocks_go_to_a_storage_on_another_disk(tmp_path: Path, disk: Path) -> None:
    with started(tmp_path, disk) as (_, api):
        storage = {"global_unique_name": "other", "nfs": {"root_path": str(tmp_path / "other")}}
        api.ok("AdminService.AddStorage", storage=storage)
        register(api, "other")
        assert not save(api, range(8))
        assert not (tmp_path / "other").exists() or not kv_bytes(tmp_path / "other")
        fill(disk)
        assert not save(api, range(8, 16))
        assert kv_bytes(tmp_path / "other") == 8 * BLOCK


def test_engines_leave_the_metadata_inodes_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK, most_files=500) as disk, started(tmp_path, disk) as (process, api):
        register(api, block_bytes=4096)
        reasons = {save(api, [number]) for number in range(500)}
        assert any("more files can be made on the disk of the metadata" in reason for reason in reasons)
        assert "the engine found no space" not in reasons
        eventually(lambda: not save(api, [1000]), seconds=50)  # before a step that follows three futile ones
        assert process.process.poll() is None


@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_manager_on_a_full_disk_reads_deletes_restarts_and_resumes(tmp_path: Path, disk: Path, fsync: str) -> None:
    """It used to end, and could not start again: it needs room before it may delete, and only it deletes."""
    with started(tmp_path, disk, f"kvcm.store.fsync={fsync}") as (process, api):
        register(api)
        for number in range(0, 120, 8):
            assert not save(api, range(number, number + 8))
        others = fill(disk)
        refusal = api.refused("StartWriteCache", instance_id="i", block_keys=[1000])
        assert "reserved for metadata" in refusal.message
        assert str(disk) in refusal.message
        assert readable(api, 0)
        eventually(lambda: kv_bytes(disk) < 110 * BLOCK, 60)  # evictions and deletions go on
        fill(disk)
        process.kill()
    with started(tmp_path, disk, f"kvcm.store.fsync={fsync}") as (process, api):
        kept = [key for key in range(120) if readable(api, key)]
        assert len(kept) > 20
        api.ok("RemoveCache", instance_id="i", block_keys=kept[-8:])
        eventually(lambda: kv_bytes(disk) <= (len(kept) - 8) * BLOCK)
        others.unlink()
        eventually(lambda: not save(api, [1000]), 60)
        assert readable(api, 1000)
        eventually(lambda: len(list((disk / "data" / "metadata" / "reserve").iterdir())) >= 8)


def test_what_was_acknowledged_on_a_disk_that_fills_is_there_after_a_kill(tmp_path: Path, disk: Path) -> None:
    """Others take every byte that anything gives up, until changes are refused; then space comes back."""
    with started(tmp_path, disk) as (process, api):
        register(api)
        for number in range(0, 40, 8):
            assert not save(api, range(number, number + 8))
        acknowledged, number = [], 0
        others = fill(disk)
        while not process.events("metadata_disk_full"):
            fill(disk)
            if api.call("RegisterInstance", **instance(f"i{number}")).header.status.code == 1:
                acknowledged.append(f"i{number}")
            number += 1
        refusal = api.refused("RegisterInstance", **instance("refused"))
        assert "is full and its reserve is used up: free space on it" in refusal.message
        assert process.process.poll() is None
        kept = [key for key in range(40) if readable(api, key)]
        others.unlink()
        eventually(lambda: api.call("RegisterInstance", **instance("later")).header.status.code == 1)
        process.kill()
    with started(tmp_path, disk) as (process, api):
        for name in ("i", *acknowledged, "later"):
            api.ok("GetInstanceInfo", instance_id=name)
        assert set(kept) - {key for key in range(40) if readable(api, key)} == set()


def test_a_manager_on_a_full_redis_reads_deletes_and_restarts(tmp_path: Path) -> None:
    port = free_port()
    server = RedisServer(tmp_path / "redis", ["--port", str(port), "--save", ""], port)
    admin = redis.Redis(port=port)
    uri = f"kvcm.registry_storage.uri=redis://127.0.0.1:{port}?cluster_name=c"
    disk = tmp_path / "disk"
    try:
        with started(tmp_path, disk, uri, "kvcm.leader_elector.lease_ms=2000") as (process, api):
            register(api)
            for number in range(0, 40, 8):
                assert not save(api, range(number, number + 8))
            admin.config_set("maxmemory", admin.info()["used_memory"] // 2)
            assert "the memory of the server is full" in save(api, [1000])
            process.kill()
        with started(tmp_path, disk, uri, "kvcm.leader_elector.lease_ms=2000") as (process, api):
            assert readable(api, 0)
            before = kv_bytes(disk)
            api.ok("RemoveCache", instance_id="i", block_keys=list(range(32, 40)))
            eventually(lambda: kv_bytes(disk) < before, 60)
            assert "the memory of the server is full" in save(api, [1000])
            admin.config_set("maxmemory", 0)
            eventually(
                lambda: not save(api, [1000]), seconds=100
            )  # steps of eviction that do not help much become rare
    finally:
        admin.close()
        server.process.kill()
        server.process.wait()
