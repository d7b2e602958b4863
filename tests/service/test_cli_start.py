"""The `kvcm` command as a process: options, refusals to start, what a start leaves behind (decision 11)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from test_transport_drivers import eventually
from test_transport_process import manager, run_kvcm
from test_transport_sites import Site, group_spec

from kvcm import __version__


def _refusal(directory: Path, *arguments: str, **environment: str) -> str:
    """The one line that a start which fails says, besides its log."""
    done = run_kvcm(directory, "serve", "--data-dir", str(directory / "data"), *arguments, **environment)
    assert done.returncode == 1, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvcm: ")
    return lines[0]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_exits_with_0(tmp_path: Path, option: str) -> None:
    done = run_kvcm(tmp_path, option)
    assert (done.returncode, "serve" in done.stdout, done.stderr) == (0, True, "")
    done = run_kvcm(tmp_path, "serve", option)
    assert (done.returncode, "--insecure" in done.stdout, done.stderr) == (0, True, "")


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_version_exits_with_0(tmp_path: Path, option: str) -> None:
    done = run_kvcm(tmp_path, option)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"kvcm {__version__}", "")


def test_an_unknown_option_or_command_is_an_error(tmp_path: Path) -> None:
    for arguments in (("serve", "--nope"), ("nope",)):
        assert run_kvcm(tmp_path, *arguments).returncode == 2


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("name", ["rpc_port", "http_port", "admin_rpc_port", "admin_http_port"])
def test_a_port_in_use_ends_the_start_with_1_and_one_clear_line(tmp_path: Path, taken: str, name: str) -> None:
    ports = {"rpc_port": "0", "http_port": "0", "admin_rpc_port": str(free_port()), "admin_http_port": "0", name: taken}
    line = _refusal(tmp_path, *(part for key, port in ports.items() for part in ("-e", f"kvcm.service.{key}={port}")))
    assert (f"127.0.0.1:{taken}" in line, "cannot be bound" in line) == (True, True)


def test_a_host_that_is_not_loopback_is_refused_without_insecure(tmp_path: Path) -> None:
    assert "--insecure" in _refusal(tmp_path, "-e", "kvcm.service.host=0.0.0.0")


def test_a_bad_setting_of_any_source_is_one_line(tmp_path: Path) -> None:
    assert "kvcm.service.rpc_port" in _refusal(tmp_path, "-e", "kvcm.service.rpc_port=x")
    (tmp_path / "kvcm.conf").write_text("kvcm.service.http_port=-1\n")
    assert "kvcm.service.http_port" in _refusal(tmp_path, "-c", "kvcm.conf")
    assert "kvcm.service.host" in _refusal(tmp_path, **{"kvcm.service.host": "nowhere.example"})


def test_a_data_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    assert str(tmp_path / "data") in _refusal(tmp_path)


# ── Startup document ─────────────────────────────────────────────────────────────────────────────────────────────────


def _document(**changes: Any) -> dict[str, Any]:
    group = group_spec("g", "s")
    quota = {"capacity": 1000, "quota_config": [{"storage_type": "dummy", "capacity": 500}]}
    cache = {
        "reclaim_strategy": {"reclaim_policy": 1, "delay_before_delete_ms": 5, "unknown": 1},
        "cache_prefer_strategy": 2,
        "meta_indexer_config": {"max_key_count": 64},
    }
    storage = {"type": "dummy", "global_unique_name": "s", "storage_spec": {"root_path": "r"}}
    whole = {**group, "quota": quota, "cache_config": cache}
    return {"storage_config": storage, "instance_group": whole, **changes}


def _document_file(directory: Path, document: object) -> str:
    path = directory / "startup.json"
    path.write_text(json.dumps(document))
    return f"kvcm.startup_config={path}"


def test_the_startup_document_gives_the_first_storage_and_group(tmp_path: Path) -> None:
    with manager(tmp_path, _document_file(tmp_path, _document())) as process, process.api() as api:
        (storage,) = api.ok("AdminService.ListStorage").storage
        assert (storage.global_unique_name, storage.dummy.root_path) == ("s", "r")
        (group,) = api.ok("GroupService.ListInstanceGroup").instance_groups
        assert (group.name, list(group.storage_candidates), group.quota.capacity) == ("g", ["s"], 1000)
        indexer = group.cache_config.meta_indexer_config
        assert (indexer.max_key_count, indexer.mutex_shard_num, indexer.batch_key_size) == (64, 16, 16)
        site = Site(api)
        assert len(site.write(site.instance("g"), [1])) == 1


def test_a_malformed_startup_document_ends_the_start_and_names_the_key(tmp_path: Path) -> None:
    document = _document_file(tmp_path, _document(instance_group={"name": 7}))
    assert "instance_group.name" in _refusal(tmp_path, "-e", document)
    document = _document_file(tmp_path, _document(instance_group={}))
    assert "InstanceGroup: {name" in _refusal(tmp_path, "-e", document)


# ── A start ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_come_from_file_option_and_environment_in_that_order(tmp_path: Path) -> None:
    (tmp_path / "kvcm.conf").write_text(
        "kvcm.leader_elector.node_id=file\nkvcm.cluster_id=file\nkvcm.limits.max_keys_per_request=9 # few\n"
        "kvcm.service.rpc_prot=1\n"
    )
    options = ("-c", str(tmp_path / "kvcm.conf"), "kvcm.leader_elector.node_id=option", "kvcm.cluster_id=option")
    with manager(tmp_path, *options, **{"kvcm.leader_elector.node_id": "environment"}) as process, process.api() as api:
        assert api.ok("GetClusterInfo").self_node_id == "environment"
        site = Site(api)
        instance = site.instance()
        (uris,) = site.write(instance, [1])
        assert "/option/" in uris["kv"]
        code, message = api.refused("StartWriteCache", instance_id=instance, block_keys=range(10))
        assert (code, "9" in message) == ("INVALID_ARGUMENT", True)
        (warning,) = [event["reason"] for event in process.events("settings") if event["level"] == "warning"]
        assert ("kvcm.service.rpc_prot" in warning, "kvcm.service.rpc_port" in warning) == (True, True)


def test_the_cluster_id_survives_a_restart_in_the_data_directory(tmp_path: Path) -> None:
    found: list[str] = []
    for _ in range(2):
        with manager(tmp_path) as process, process.api() as api:
            site = Site(api)
            (uris,) = site.write(site.instance("default"), [1])
            found.append(uris["kv"].removeprefix(f"file://nfs_01{process.data_dir}/nfs/").partition("/")[0])
    assert found[0] == found[1] != ""


@pytest.mark.parametrize("host", [(), ("kvcm.service.host=0.0.0.0",)])
def test_with_insecure_every_address_is_served_unless_one_is_named(tmp_path: Path, host: tuple[str, ...]) -> None:
    with manager(tmp_path, "--insecure", *host) as process:
        port = int(process.address.admin_rpc.rpartition(":")[2])
        with socket.create_connection(("127.0.0.2", port), timeout=5):
            pass


def test_without_insecure_other_addresses_are_not_served(tmp_path: Path) -> None:
    with manager(tmp_path) as process:
        for address in process.address:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])), timeout=5)


def test_a_daemon_prints_its_process_id_and_lets_go_of_the_output(tmp_path: Path) -> None:
    ports = ("rpc_port=0", "http_port=0", "admin_http_port=0", f"admin_rpc_port={free_port()}")
    options = [part for port in ports for part in ("-e", f"kvcm.service.{port}")]
    command = [sys.executable, "-m", "kvcm", "serve", "-d", "--data-dir", str(tmp_path / "data"), *options]
    log = tmp_path / "log"
    with log.open("wb") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        try:
            assert starter.wait(30) == 0
            eventually(lambda: '"serving"' in log.read_text())
            # `pid=$(kvcm serve -d)` waits for the end of the output, not only for the starter.
            os.set_blocking(starter.stdout.fileno(), False)
            rest = starter.stdout.read()
        finally:
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: '"stopped"' in log.read_text())
    assert rest == b"", "the daemon holds the output of its starter"
