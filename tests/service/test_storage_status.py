"""How storages are, as administrators see it: ListStorage, `kvcm storage list`, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site, unique

from kvcm.protocol import admin_service_pb2 as pb

_PROBED_OFTEN = ("kvcm.storage.probe_interval_ms=50", "kvcm.storage.probe_timeout_ms=2000")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with manager(tmp_path_factory.mktemp("manager"), *_PROBED_OFTEN) as running:
        yield running


@pytest.fixture
def api(process: ManagerProcess) -> Iterator[Api]:
    with process.api() as connected:
        yield connected


def _status(api: Api, name: str) -> Any:
    (found,) = [s for s in api.ok("AdminService.ListStorage").storage_status if s.storage_unique_name == name]
    return found


def _health(api: Api, name: str) -> str:
    return pb.StorageHealth.Name(_status(api, name).health)


def _storage(api: Api, root: Path) -> str:
    return Site(api).storage(nfs={"root_path": str(root), "key_count_per_file": 1})


def _series(api: Api, metric: str, storage: str) -> list[float]:
    found = [m for m in api.ok("AdminService.GetMetrics").metrics if m.metric_name == metric]
    tagged = [
        m for m in found if {"storage": storage, "type": "file"} == {t.tag_key: t.tag_value for t in m.metric_tags}
    ]
    return [m.metric_value.float_value or float(m.metric_value.int_value) for m in tagged]


def test_every_storage_has_a_status_and_its_config_is_as_it_was_given(api: Api, tmp_path: Path) -> None:
    name = _storage(api, tmp_path)
    answer = api.ok("AdminService.ListStorage")
    assert [s.global_unique_name for s in answer.storage] == [s.storage_unique_name for s in answer.storage_status]
    eventually(lambda: _status(api, name).since_ms)
    status = _status(api, name)
    assert (status.is_enabled, pb.StorageHealth.Name(status.health), status.reason) == (True, "SH_UP", "")
    assert 0 < status.medium_free_bytes <= status.medium_bytes
    assert 0 < status.probe_seconds < 2


def test_what_is_wrong_is_told_to_administrators_and_counted(api: Api, tmp_path: Path) -> None:
    root, aside = tmp_path / "root", tmp_path / "aside"
    name = _storage(api, root)
    assert _series(api, "kvcm_storage_health", name) == [1.0]
    root.rename(aside)
    eventually(lambda: _health(api, name) == "SH_DOWN")
    assert _status(api, name).reason
    assert _status(api, name).failed_probes >= 3
    assert _series(api, "kvcm_storage_health", name) == [0.0]
    assert _series(api, "kvcm_storage_probe_failures_total", name)[0] >= 3
    aside.rename(root)
    eventually(lambda: _health(api, name) == "SH_UP")
    assert _status(api, name).reason == ""
    assert _series(api, "kvcm_storage_health", name) == [1.0]
    assert 0 < _series(api, "kvcm_storage_probe_seconds", name)[0] < 2


def test_a_disabled_storage_is_shown_as_such_and_as_it_is(api: Api, tmp_path: Path) -> None:
    name = _storage(api, tmp_path)
    api.ok("AdminService.DisableStorage", storage_unique_name=name)
    assert (_status(api, name).is_enabled, _health(api, name)) == (False, "SH_UP")


def test_storages_are_listed_for_people_and_for_scripts(process: ManagerProcess, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = run_kvcm(tmp_path, "storage", "list", "--manager", f"http://{process.address.admin_http}", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    with process.api() as api:
        site, root, aside = Site(api), tmp_path / "root", tmp_path / "aside"
        name, well = unique("nfs"), _storage(api, tmp_path / "well")
        nfs = {"root_path": str(root), "key_count_per_file": 1}
        storage = {"global_unique_name": name, "nfs": nfs, "capacity_bytes": 1 << 20}
        api.ok("AdminService.AddStorage", storage=storage)
        site.write(site.instance(site.group(name)), range(16))
        root.rename(aside)
        eventually(lambda: _health(api, name) == "SH_DOWN")
    listed = {each["name"]: each for each in json.loads(run("--json"))["storages"]}
    assert listed[well]["health"] == "SH_UP"
    found = listed[name]
    assert (found["type"], found["health"], found["is_enabled"]) == ("file", "SH_DOWN", True)
    assert (found["used_bytes"], found["capacity_bytes"]) == (16 * 64, 1 << 20)
    assert found["reason"]
    shown = run()
    (line,) = [line for line in shown.splitlines() if line.startswith(f"{name} ")]
    for text in ("file", "down", "1.0 KiB", "1.0 MiB"):
        assert text in line
    assert f"storage {name} is down: " in shown
