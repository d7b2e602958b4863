"""`kvcm doctor` as operators run it: with a manager, without one, and with faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_runner import port_options
from ports import free_port
from redis_servers import Standalone
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site, unique

pytestmark = pytest.mark.e2e


def _doctor(directory: Path, *arguments: str, ports: Sequence[str] = ()) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the findings; the ports of a manager that may run here are free ones by default."""
    options = port_options(*(ports or (f":{free_port()}" for _ in range(4))))
    done = run_kvcm(directory, "doctor", *arguments, *options, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)["findings"]


def _texts(findings: list[dict[str, Any]]) -> str:
    return " ".join(each["found"] for each in findings)


def _failures(findings: list[dict[str, Any]]) -> list[str]:
    return [each["found"] for each in findings if each["level"] == "fail"]


def _is_in_time(findings: list[dict[str, Any]]) -> bool:
    """Whether the manager answered at every port in time: a busy one may not, and the doctor asks again."""
    return _texts(findings).count("held by a manager") == 4


def test_a_manager_that_is_well_has_nothing_that_fails(tmp_path: Path) -> None:
    with manager(tmp_path) as process:
        ports = list(process.address)
        examine = partial(_doctor, tmp_path, "--data-dir", str(process.data_dir), ports=ports)
        code, findings = next(found for found in iter(examine, None) if _is_in_time(found[1]))
        shown = run_kvcm(tmp_path, "doctor", "--data-dir", str(process.data_dir), *port_options(*ports))
    assert (code, _failures(findings)) == (0, [])
    for part in (
        "is in use by process", "kvcm.service.rpc_port", "held by a manager", "is ready", "this one leads",
        "storage nfs_01 is up", "agrees with this host",
    ):  # fmt: skip
        assert part in _texts(findings)
    assert (shown.returncode, "is ready" in shown.stdout, "what to do" in shown.stdout) == (0, True, True)


def test_nothing_runs_yet_is_no_failure(tmp_path: Path) -> None:
    code, findings = _doctor(tmp_path, "--data-dir", str(tmp_path / "data"))
    assert (code, _failures(findings)) == (0, [])
    for part in ("does not exist yet", "is free on", "none runs at"):
        assert part in _texts(findings)
    assert not (tmp_path / "data").exists()


def test_a_manager_that_is_asked_for_has_to_run(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, findings = _doctor(tmp_path, "--manager", url)
    assert code == 1
    assert any(f"no manager answers at {url}" in text for text in _failures(findings))


def test_of_a_manager_elsewhere_only_its_answers_are_checked(server: ManagerProcess, tmp_path: Path) -> None:
    nfs = {"root_path": f"{tmp_path / 'of_its_host'}/"}
    with server.api() as api:
        api.ok("AdminService.AddStorage", storage={"global_unique_name": unique("far"), "nfs": nfs})
    url = f"http://{server.address.admin_http}"
    done = run_kvcm(tmp_path, "doctor", "--manager", url, "--json")
    findings = json.loads(done.stdout)["findings"]
    assert {each["check"] for each in findings} == {"settings", "manager", "clocks", "capacity", "storages"}
    assert not any("memory only" in each["found"] for each in findings)


def test_settings_that_serve_refuses_are_reported_and_the_rest_checked(server: ManagerProcess, tmp_path: Path) -> None:
    config = tmp_path / "kvcm.conf"
    config.write_text("kvcm.store.fsnyc=always\n")
    url = f"http://{server.address.admin_http}"
    code, findings = _doctor(tmp_path, "-c", str(config), "--manager", url)
    assert code == 1
    assert "did you mean 'kvcm.store.fsync'?" in _failures(findings)[0]
    assert any("is ready" in each["found"] for each in findings)


def test_full_groups_and_disabled_storages_are_reported(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        storage = site.storage()
        group = site.group(storage, capacity=2 * 64)
        site.write(site.instance(group), [1, 2])
        off = site.storage()
        api.ok("AdminService.DisableStorage", storage_unique_name=off)
        gone = unique("stored")
        root = tmp_path / "gone"
        site.api.ok("AdminService.AddStorage", storage={"global_unique_name": gone, "nfs": {"root_path": f"{root}/"}})
        url = f"http://{process.address.admin_http}"
        _, findings = _doctor(tmp_path, "--manager", url)
    levels = {each["found"]: each["level"] for each in findings}
    assert [levels[text] for text in levels if text.startswith(f"group {group} is full")] == ["fail"]
    assert levels[f"storage {off} is disabled: its blocks count as missing"] == "warn"
    assert all(each["advice"] for each in findings if each["level"] != "ok")


def test_a_shared_store_is_looked_at(redis_standalone: Standalone, tmp_path: Path) -> None:
    uri = f"kvcm.registry_storage.uri={redis_standalone.uri('doctor')}"
    _, findings = _doctor(tmp_path, "-e", uri)
    checks = {each["check"] for each in findings}
    assert checks >= {"settings", "ports", "shared store", "clocks", "manager"}


def test_a_startup_document_that_is_none_is_reported(tmp_path: Path) -> None:
    document = tmp_path / "startup.json"
    document.write_text('{"storage_config": 3}')
    _, findings = _doctor(tmp_path, "-e", f"kvcm.startup_config={document}")
    assert any(str(document) in each for each in _failures(findings))
