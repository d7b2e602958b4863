"""Draining and removing storages as operators do it: over the wire, and with `kvcm storage drain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_transport_drivers import eventually
from test_transport_process import manager
from test_transport_sites import Site

from kvcm.cache.drains import TAKE_BACK_SECONDS

BLOCK = 64
KEYS = [1, 2, 3]
TAKES_SECONDS = TAKE_BACK_SECONDS + 10


def _drain(site: Site, name: str) -> dict[str, Any] | None:
    drains = {each.storage_unique_name: each for each in site.api.ok("StorageService.ListDrain").drains}
    found = drains.get(name)
    if found is None:
        return None
    return {"state": found.state, "left": found.left_bytes, "removal": found.is_removal, "reason": found.reason}


def _storage(site: Site, root: Path) -> str:
    return site.storage(nfs={"root_path": str(root), "key_count_per_file": 1})


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and ".kvcm-probe" not in path.name]


def _write(site: Site, instance: str, keys: list[int]) -> list[str]:
    """Write blocks with their bytes; return the addresses."""
    uris = [uris["kv"] for uris in site.write(instance, keys)]
    for uri in uris:
        path = Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(BLOCK))
    return uris


def _status(site: Site, name: str) -> Any:
    (status,) = [s for s in site.api.ok("AdminService.ListStorage").storage_status if s.storage_unique_name == name]
    return status


def _gauge(site: Site, name: str) -> float:
    for series in site.api.ok("AdminService.GetMetrics").metrics:
        labels = {tag.tag_key: tag.tag_value for tag in series.metric_tags}
        if series.metric_name == "kvcm_storage_draining" and labels.get("storage") == name:
            return series.metric_value.float_value
    raise AssertionError(name)


def test_a_drained_storage_takes_no_writes_and_is_emptied(site: Site, tmp_path: Path) -> None:
    first, second = _storage(site, tmp_path / "first"), _storage(site, tmp_path / "second")
    instance = site.instance(site.group(first, second))
    _write(site, instance, KEYS)
    assert (_status(site, first).is_draining, _gauge(site, first)) == (False, 0.0)
    site.api.ok("StorageService.DrainStorage", storage_unique_name=first)
    assert (_status(site, first).is_draining, _gauge(site, first)) == (True, 1.0)
    (uri,) = _write(site, instance, [4])
    assert uri.startswith(f"file://{second}/")
    eventually(lambda: _drain(site, first) == {"state": 2, "left": 0, "removal": False, "reason": ""})
    assert site.hits(instance, [4]) == [4]
    assert (_files(tmp_path / "first"), len(_files(tmp_path / "second"))) == ([], 1)
    site.api.ok("StorageService.CancelDrain", storage_unique_name=first)
    assert _drain(site, first) is None
    (uri,) = _write(site, instance, [5])
    assert uri.startswith(f"file://{first}/")


def test_a_write_that_finds_only_drained_storages_is_told_so(site: Site) -> None:
    storage = site.storage()
    instance = site.instance(site.group(storage))
    site.api.ok("StorageService.DrainStorage", storage_unique_name=storage)
    code, message = site.api.refused("StartWriteCache", instance_id=instance, block_keys=[1])
    assert (code, "being drained" in message, storage in message) == ("SERVICE_NOT_READY", True, True)


def test_what_holds_a_drain_up_is_said(site: Site) -> None:
    storage = site.storage()
    instance = site.instance(site.group(storage, pin_budget_bytes=1 << 20))
    site.write(instance, KEYS)
    fields = {"block_keys": KEYS[:2], "owner": "o", "ttl_seconds": 600}
    pin = site.api.ok("PinService.PinPrefix", instance_id=instance, **fields)
    started = site.start(instance, [9])
    site.api.ok("StorageService.DrainStorage", storage_unique_name=storage)
    reason = "2 locations are pinned (kvcm pin list); 1 locations are being written"
    eventually(lambda: _drain(site, storage) == {"state": 1, "left": 3 * BLOCK, "removal": False, "reason": reason})
    site.finish(instance, started)
    site.api.ok("PinService.UnpinPrefix", instance_id=instance, pin_id=pin.pin_id)
    eventually(lambda: (_drain(site, storage) or {})["state"] == 2)


@pytest.mark.timeout(120)
def test_what_lay_on_a_removed_storage_is_forgotten_and_its_bytes_stay(site: Site, tmp_path: Path) -> None:
    storage = _storage(site, tmp_path / "root")
    group = site.group(storage, site.storage(), capacity=3 * BLOCK)
    instance = site.instance(group)
    _write(site, instance, KEYS)
    site.api.ok("AdminService.RemoveStorage", storage_unique_name=storage)
    found = _drain(site, storage)
    assert found is not None
    assert (found["left"], found["removal"]) == (3 * BLOCK, True)
    other = {"global_unique_name": storage, "dummy": {"root_path": "d", "key_count_per_file": 1}}
    code, message = site.api.refused("AdminService.AddStorage", storage=other)
    assert (code, "being forgotten" in message) == ("SERVICE_NOT_READY", True)
    eventually(lambda: _drain(site, storage) is None, TAKES_SECONDS)
    assert len(_files(tmp_path / "root")) == 3
    assert len(site.write(instance, KEYS)) == 3  # there is room again
    site.api.ok("AdminService.AddStorage", storage=other)


def test_a_drain_and_what_was_removed_outlive_a_restart(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        drained, removed = site.storage(), site.storage()
        instance = site.instance(site.group(removed))
        site.write(instance, KEYS)
        site.api.ok("StorageService.DrainStorage", storage_unique_name=drained)
        site.api.ok("AdminService.RemoveStorage", storage_unique_name=removed)
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        assert _status(site, drained).is_draining
        assert [each.storage_unique_name for each in api.ok("StorageService.ListDrain").drains] == [drained, removed]
