"""Settings of a running manager read anew, by SIGHUP and by ReloadConfig: differences, all or nothing, secrets."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from probe_clients import ask
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

FEW_KEYS = "kvcm.limits.max_keys_per_request"
START = f"{FEW_KEYS}=9\nkvcm.logger.slow_request_ms=2000\n"


class Reloadable:
    """A manager with a config file."""

    def __init__(self, process: ManagerProcess, api: Api, file: Path) -> None:
        self.process = process
        self.api = api
        self.file = file
        self.instance = Site(api).instance("default")

    def reload(self) -> list[tuple[str, str, str, bool]]:
        changes = self.api.ok("ConfigService.ReloadConfig").changes
        return [(change.key, change.old_value, change.new_value, change.needs_restart) for change in changes]

    def takes_keys(self, count: int) -> bool:
        query = {"instance_id": self.instance, "block_keys": range(count), "query_type": "QT_PREFIX_MATCH"}
        status = self.api.call("GetCacheLocation", **query).header.status
        assert (status.code == 1) is ("at most" not in status.message), status
        return status.code == 1


@pytest.fixture
def reloadable(tmp_path: Path) -> Iterator[Reloadable]:
    file = tmp_path / "kvcm.conf"
    file.write_text(START)
    with manager(tmp_path, "-c", str(file)) as process, process.api() as api:
        yield Reloadable(process, api, file)


def test_hot_settings_are_in_force_at_once_and_others_need_a_restart(reloadable: Reloadable) -> None:
    assert (reloadable.takes_keys(9), reloadable.takes_keys(10)) == (True, False)
    reloadable.file.write_text(f"{FEW_KEYS}=20\nkvcm.logger.slow_request_ms=2000\nkvcm.leader_elector.lease_ms=7000\n")
    lease = ("kvcm.leader_elector.lease_ms", "10000", "7000", True)
    assert reloadable.reload() == [lease, (FEW_KEYS, "9", "20", False)]
    assert (reloadable.takes_keys(20), reloadable.takes_keys(21)) == (True, False)
    assert reloadable.reload() == [lease], "what is in force is no difference any more"
    reloadable.file.write_text(START)
    assert reloadable.reload() == [(FEW_KEYS, "20", "9", False)]


@pytest.mark.parametrize("bad", ["kvcm.limits.max_tokens_per_request=0", "kvcm.limits.unknown=1", "no pair"])
def test_settings_that_cannot_be_used_change_nothing(reloadable: Reloadable, bad: str) -> None:
    reloadable.file.write_text(f"{FEW_KEYS}=20\n{bad}\n")
    code, message = reloadable.api.refused("ConfigService.ReloadConfig")
    assert (code, message.startswith("nothing is changed: ")) == ("INVALID_ARGUMENT", True)
    assert bad.partition("=")[0] in message
    assert not reloadable.takes_keys(10)
    assert reloadable.process.events("reload_refused")


def test_a_file_that_is_gone_changes_nothing(reloadable: Reloadable) -> None:
    reloadable.file.unlink()
    code, message = reloadable.api.refused("ConfigService.ReloadConfig")
    assert (code, str(reloadable.file) in message) == ("INVALID_ARGUMENT", True)
    assert not reloadable.takes_keys(10)


def _reloads(process: ManagerProcess) -> list[dict[str, Any]]:
    return process.events("reloaded")


def test_a_signal_does_the_same_and_the_log_has_the_difference(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    secret = "redis://ada:s3cret@127.0.0.1:1/?cluster_name=x"
    file.write_text(f"{FEW_KEYS}=9\n")
    with manager(tmp_path, "-c", str(file)) as process, process.api("grpc") as api:
        file.write_text(f"{FEW_KEYS}=20\nkvcm.distributed_lock.uri={secret}\n")
        process.signal(signal.SIGHUP)
        (event,) = eventually(lambda: _reloads(process))
        lock = "kvcm.distributed_lock.uri: '' -> 'redis://ada:***@127.0.0.1:1/?cluster_name=x', restart needed"
        assert event["changes"] == [lock, f"{FEW_KEYS}: '9' -> '20'"]
        assert "s3cret" not in process.log_text()
        assert Reloadable(process, api, file).takes_keys(20)
        file.write_text("broken")
        process.signal(signal.SIGHUP)
        eventually(lambda: process.events("reload_refused"))
        assert Reloadable(process, api, file).takes_keys(20)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_what_the_command_line_says_stays(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("")
    with manager(tmp_path, "-c", str(file), f"{FEW_KEYS}=9") as process, process.api("grpc") as api:
        file.write_text(f"{FEW_KEYS}=20\n")
        assert Reloadable(process, api, file).reload() == []


def test_the_level_and_the_form_of_logs_are_hot_and_update_logger_stays(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("")
    with manager(tmp_path, "-c", str(file)) as process, process.api("grpc") as api:
        reloadable = Reloadable(process, api, file)
        api.ok("AdminService.UpdateLogger", log_level="ERROR")
        reloadable.reload()
        assert not _reloads(process), "below the level that was set at runtime"
        file.write_text("kvcm.logger.log_level=DEBUG\nkvcm.logger.format=console\n")
        reloadable.reload()

        def told() -> list[str]:
            return [line for line in process.log_text().splitlines() if "reloaded" in line]

        eventually(told)
        assert not told()[-1].startswith("{")


def test_the_access_log_is_hot(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("")
    with manager(tmp_path, "-c", str(file)) as process, process.api("grpc") as api:
        reloadable = Reloadable(process, api, file)
        file.write_text("kvcm.logger.access_log_sample=1\n")
        reloadable.reload()
        api.ok("GetClusterInfo", trace_id="logged")
        eventually(lambda: process.events("request"))
        file.write_text("kvcm.logger.access_log_sample=0\nkvcm.logger.slow_request_ms=0\n")
        reloadable.reload()
        api.ok("GetClusterInfo", trace_id="dropped")
        assert "dropped" not in process.log_text()


def _probes(process: ManagerProcess) -> int:
    text = ask(process.address.admin_http, "/metrics").body.decode()
    found = re.search(r'^kvcm_backend_probe_seconds_count\{[^}]*"nfs_01"[^}]*\} ([0-9.]+)$', text, re.MULTILINE)
    assert found, text
    return round(float(found[1]))


def test_the_pace_of_probes_is_hot_except_from_and_to_none(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("kvcm.storage.probe_interval_ms=3600000\n")
    with manager(tmp_path, "-c", str(file)) as process, process.api("grpc") as api:
        reloadable = Reloadable(process, api, file)
        eventually(lambda: _probes(process) == 1)
        file.write_text("kvcm.storage.probe_interval_ms=100\n")
        assert reloadable.reload() == [("kvcm.storage.probe_interval_ms", "3600000", "100", False)]
        eventually(lambda: _probes(process) >= 3)
        file.write_text("kvcm.storage.probe_interval_ms=0\n")
        assert reloadable.reload() == [("kvcm.storage.probe_interval_ms", "100", "0", True)]
        probes = _probes(process)
        eventually(lambda: _probes(process) > probes)


def test_times_of_the_drain_are_hot(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("kvcm.service.drain_delay_ms=3600000\n")
    with manager(tmp_path, "-c", str(file)) as process, process.api("grpc") as api:
        file.write_text("kvcm.service.drain_delay_ms=1\n")
        assert Reloadable(process, api, file).reload() == [("kvcm.service.drain_delay_ms", "3600000", "1", False)]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
