"""Settings: their sources, the startup document, and reading them again."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from probe_clients import ask
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm.config import ConfigError, Settings, load_settings

KEY = "kvcm.service.rpc_port"


class Loader:
    """Loads settings from a file in a directory and collects the warnings."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "kvcm.conf"
        self.warnings: list[str] = []

    def __call__(
        self, file: str | bytes = "", *overrides: str, environment: Mapping[str, str] | None = None
    ) -> Settings:
        self._path.write_bytes(file.encode() if isinstance(file, str) else file)
        return load_settings(self._path, overrides, environment or {}, self.warnings.append)

    def refusal(self, file: str | bytes = "", *overrides: str, environment: Mapping[str, str] | None = None) -> str:
        """Return the message of the refusal."""
        with pytest.raises(ConfigError) as caught:
            self(file, *overrides, environment=environment)
        return str(caught.value)


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def test_precedence_is_default_then_file_then_option_then_environment(load: Loader) -> None:
    assert load().rpc_port == 6381
    assert load(f"{KEY}=1").rpc_port == 1
    assert load(f"{KEY}=1", f"{KEY}=2").rpc_port == 2
    assert load(f"{KEY}=1", f"{KEY}=2", environment={KEY: "3"}).rpc_port == 3
    assert load.warnings == []


def test_an_empty_environment_variable_does_not_count(load: Loader) -> None:
    assert load(f"{KEY}=1", environment={KEY: ""}).rpc_port == 1


def test_of_repeated_options_the_first_wins_and_of_lines_the_last(load: Loader) -> None:
    assert load("", f"{KEY}=1", f"{KEY}=2").rpc_port == 1
    assert load(f"{KEY}=1\n{KEY}=2").rpc_port == 2


def test_comments_blank_lines_and_white_space_in_a_file_do_not_matter(load: Loader) -> None:
    text = f"# a comment\n\n  \t{KEY} \t=  7   # why\r\nkvcm.leader_elector.node_id = a b \n#{KEY}=8\n"
    settings = load(text)
    assert (settings.rpc_port, settings.node_id) == (7, "a b")


def test_a_value_may_hold_an_equals_sign(load: Loader) -> None:
    assert load("kvcm.leader_elector.node_id=a=b").node_id == "a=b"


@pytest.mark.parametrize("where", ["file", "option"])
def test_an_unknown_key_of_the_original_warns_with_the_nearest_and_is_ignored(load: Loader, where: str) -> None:
    text = "kvcm.service.rpc_prt=1"
    settings = load(text) if where == "file" else load("", text)
    assert settings == Settings()
    (warning,) = load.warnings
    assert ("'kvcm.service.rpc_prt'" in warning, f"'{KEY}'" in warning) == (True, True)


@pytest.mark.parametrize("key", ["kvcm.limits.max_body_byte", "kvcm.auth.moed", "kvcm.storage.roots"])
@pytest.mark.parametrize("where", ["file", "option"])
def test_an_unknown_key_of_our_own_is_an_error_with_the_nearest(load: Loader, key: str, where: str) -> None:
    message = load.refusal(f"{key}=1") if where == "file" else load.refusal("", f"{key}=1")
    assert repr(key) in message
    assert "did you mean 'kvcm." in message


@pytest.mark.parametrize("key", ["kvcm.service.insecur", "kvcm.service.hots", "kvcm.service.require_leder"])
def test_an_unknown_key_of_the_service_is_at_least_warned_of(load: Loader, key: str) -> None:
    load(f"{key}=1")
    assert key in load.warnings[0]


@pytest.mark.parametrize("text", ["nonsense", "=1", "kvcm.service.rpc_port"])
def test_a_line_or_option_without_key_and_value_is_an_error_that_names_the_place(load: Loader, text: str) -> None:
    assert "kvcm.conf:2" in load.refusal(f"\n{text}")
    assert "-e" in load.refusal("", text)


BAD = {
    "kvcm.service.rpc_port": ["x", "", "1.5", "65536", "-1", "--5", "²", "0x10", "1_000", " "],
    "kvcm.leader_elector.lease_ms": ["0", "-1"],
    "kvcm.service.require_leader": ["yes", "TRUE", ""],
    "kvcm.service.insecure": ["1"],
    "kvcm.auth.mode": ["require", "on", ""],
    "kvcm.logger.log_level": ["loud", "1", "9"],
    "kvcm.service.host": ["nowhere.example"],
    "kvcm.storage.allowed_roots": ["relative/path"],
    "kvcm.service.advertised_host": ["a b", "host:6381", "[host]:1", "unix:/run/x", "-a", "h" * 254],
    "kvcm.service.advertised_rpc_port": ["65536", "-1"],
    "kvcm.storage.allowed_hosts": ["10.0.0.1/8", "host:0", "a b", "http://host"],
    "kvcm.limits.max_body_bytes": ["0", "many"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_an_error_that_names_key_value_and_what_is_allowed(load: Loader, key: str, value: str) -> None:
    message = load.refusal("", f"{key}={value}")
    assert [text for text in (key, repr(value.strip()), "must be") if text not in message] == []
    assert "invalid literal" not in message


@pytest.mark.parametrize(
    ("value", "name"),
    [("0", "INFO"), ("2", "ERROR"), ("3", "WARN"), ("4", "INFO"), ("5", "DEBUG"), ("debug", "DEBUG"), ("Warn", "WARN")],
)
def test_the_log_level_is_a_number_of_the_original_or_a_name(load: Loader, value: str, name: str) -> None:
    assert load(f"kvcm.logger.log_level={value}").log_level_name == name


def test_kvcm_log_level_in_the_environment_overrides_the_log_level(load: Loader) -> None:
    level = "kvcm.logger.log_level=error"
    assert load(level, environment={"KVCM_LOG_LEVEL": "DEBUG"}).log_level_name == "DEBUG"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_consent(load: Loader, host: str) -> None:
    assert load(f"kvcm.service.host={host}").is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_another_host_needs_the_consent_of_insecure_decision_11(load: Loader, host: str) -> None:
    assert "--insecure" in load.refusal(f"kvcm.service.host={host}")
    assert not load(f"kvcm.service.host={host}\nkvcm.service.insecure=true").is_loopback


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvcm.registry_storage.uri", "mysql://user:hunter2@h:1/?cluster_name=c"),
        ("kvcm.distributed_lock.uri", "etcd://user:hunter2@h:1/"),
        ("kvcm.distributed_lock.uri", "local:///lock?password=hunter2"),
    ],
)
def test_an_unknown_store_is_refused_without_its_password_in_the_error(load: Loader, key: str, value: str) -> None:
    message = load.refusal(f"{key}={value}")
    assert (key in message, "redis" in message, "hunter2" in message) == (True, True, False)


@pytest.mark.parametrize(
    "uri",
    [
        "redis://user:hunter2@h:1/?cluster_name=c",
        "rediss+cluster://:hunter2@a:1,b:2/?cluster_name=c&timeout_ms=5",
        "redis+sentinel://u:hunter2@a:1,b:2/name/3?cluster_name=c&sentinel_user=s&sentinel_password=hunter2",
    ],
)
def test_settings_are_shown_without_passwords(load: Loader, uri: str) -> None:
    shown = load(f"kvcm.registry_storage.uri={uri}").described()["kvcm.registry_storage.uri"]
    assert ("***" in shown, "hunter2" in shown, "cluster_name=c" in shown) == (True, False, True)


def test_managers_that_share_a_store_share_its_lease(load: Loader) -> None:
    """Each would lead, and run the background duties beside the others."""
    shared = "kvcm.registry_storage.uri=redis://h:1/?cluster_name=c"
    assert "kvcm.distributed_lock.uri" in load.refusal(shared, "kvcm.distributed_lock.uri=memory://")
    assert load(shared).distributed_lock_uri == ""


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, load: Loader) -> None:
    with pytest.raises(ConfigError, match=r"missing\.conf"):
        load_settings(tmp_path / "missing.conf", (), {}, load.warnings.append)
    assert "kvcm.conf" in load.refusal(b"\xff\xfe")


def test_allowed_roots_are_absolute_paths_separated_by_commas(load: Loader) -> None:
    assert load("kvcm.storage.allowed_roots=/a, /b/c").allowed_roots == (Path("/a"), Path("/b/c"))
    assert load().allowed_roots is None


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "[fd00::1]", "manager-1.kvcm.svc", ""])
def test_the_advertised_host_is_a_name_or_an_ip_address(load: Loader, host: str) -> None:
    assert load(f"kvcm.service.advertised_host={host}").advertised_host == host.strip("[]")


def test_allowed_hosts_are_hosts_and_networks_separated_by_commas(load: Loader) -> None:
    hosts = load("kvcm.storage.allowed_hosts=master:50051, 10.0.0.0/8").allowed_hosts
    assert hosts is not None
    assert [str(rule) for rule in hosts] == ["master:50051", "10.0.0.0/8"]
    assert load().allowed_hosts is None
    assert load("kvcm.storage.allowed_hosts=").allowed_hosts == ()


def test_settings_that_only_the_original_uses_are_named_as_without_effect(load: Loader) -> None:
    assert load().without_effect() == []
    assert load("kvcm.service.io_thread_num=4").without_effect() == ["kvcm.service.io_thread_num"]


def test_the_uri_of_the_store_may_lie_in_a_file(load: Loader, tmp_path: Path) -> None:
    file = tmp_path / "uri"
    file.write_text("redis://kvcm:secret@store:6379/?cluster_name=prod\n")
    settings = load(f"kvcm.registry_storage.uri_file={file}")
    assert settings.registry_storage_uri == "redis://kvcm:secret@store:6379/?cluster_name=prod"
    assert "secret" not in str(settings.described())


@pytest.mark.parametrize("content", ["", "\n", "redis://a\nredis://b", b"\xff", None])
def test_a_file_without_one_uri_is_refused_unshown(load: Loader, tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "uri"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    message = load.refusal(f"kvcm.registry_storage.uri_file={file}")
    assert (message.startswith("kvcm.registry_storage.uri_file"), str(file) in message) == (True, True)
    assert "redis" not in message


def test_the_uri_of_the_store_is_given_once(load: Loader, tmp_path: Path) -> None:
    assert "give one of them" in load.refusal(
        f"kvcm.registry_storage.uri_file={tmp_path / 'uri'}", "kvcm.registry_storage.uri=memory://"
    )


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


@contextlib.contextmanager
def reloading(directory: Path, text: str, *options: str) -> Iterator[Reloadable]:
    """A manager whose config file holds this text."""
    file = directory / "kvcm.conf"
    file.write_text(text)
    patient = ("kvcm.limits.max_queue_ms=60000", "kvcm.storage.probe_timeout_ms=60000")
    with manager(directory, "-c", str(file), *patient, *options) as process, process.api() as api:
        yield Reloadable(process, api, file)


@pytest.fixture
def reloadable(tmp_path: Path) -> Iterator[Reloadable]:
    with reloading(tmp_path, START) as made:
        yield made


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


def _reloads(process: ManagerProcess) -> list[dict[str, Any]]:
    return process.events("reloaded")


def test_a_signal_does_the_same_and_the_log_has_the_difference(tmp_path: Path) -> None:
    secret = "redis://ada:s3cret@127.0.0.1:1/?cluster_name=x"
    with reloading(tmp_path, f"{FEW_KEYS}=9\n") as reloadable:
        process = reloadable.process
        reloadable.file.write_text(f"{FEW_KEYS}=20\nkvcm.distributed_lock.uri={secret}\n")
        process.signal(signal.SIGHUP)
        (event,) = eventually(lambda: _reloads(process))
        lock = "kvcm.distributed_lock.uri: '' -> 'redis://ada:***@127.0.0.1:1/?cluster_name=x', restart needed"
        assert event["changes"] == [lock, f"{FEW_KEYS}: '9' -> '20'"]
        assert "s3cret" not in process.log_text()
        assert reloadable.takes_keys(20)
        reloadable.file.write_text("broken")
        process.signal(signal.SIGHUP)
        eventually(lambda: process.events("reload_refused"))
        assert reloadable.takes_keys(20)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_settings_from_the_command_line_stay(tmp_path: Path) -> None:
    with reloading(tmp_path, "", f"{FEW_KEYS}=9") as reloadable:
        reloadable.file.write_text(f"{FEW_KEYS}=20\n")
        assert reloadable.reload() == []


def test_the_level_and_the_form_of_logs_are_hot_and_update_logger_stays(tmp_path: Path) -> None:
    with reloading(tmp_path, "") as reloadable:
        reloadable.api.ok("AdminService.UpdateLogger", log_level="ERROR")
        reloadable.reload()
        assert not _reloads(reloadable.process), "below the level that was set at runtime"
        reloadable.file.write_text("kvcm.logger.log_level=DEBUG\nkvcm.logger.format=console\n")
        reloadable.reload()

        def logged() -> list[str]:
            return [line for line in reloadable.process.log_text().splitlines() if "reloaded" in line]

        eventually(logged)
        assert not logged()[-1].startswith("{")


def _probes(process: ManagerProcess) -> int:
    text = ask(process.address.admin_http, "/metrics").body.decode()
    found = re.search(r'^kvcm_backend_probe_seconds_count\{[^}]*"nfs_01"[^}]*\} ([0-9.]+)$', text, re.MULTILINE)
    assert found, text
    return round(float(found[1]))


def test_the_pace_of_probes_is_hot_except_from_and_to_none(tmp_path: Path) -> None:
    with reloading(tmp_path, "kvcm.storage.probe_interval_ms=3600000\n") as reloadable:
        process, file = reloadable.process, reloadable.file
        eventually(lambda: _probes(process) == 1)
        file.write_text("kvcm.storage.probe_interval_ms=100\n")
        assert reloadable.reload() == [("kvcm.storage.probe_interval_ms", "3600000", "100", False)]
        eventually(lambda: _probes(process) >= 3)
        file.write_text("kvcm.storage.probe_interval_ms=0\n")
        assert reloadable.reload() == [("kvcm.storage.probe_interval_ms", "100", "0", True)]
        probes = _probes(process)
        eventually(lambda: _probes(process) > probes)
