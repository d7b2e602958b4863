"""Settings that are allowed and dangerous, and those that are not even that."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcm.config import Settings
from kvcm.doctor.findings import Level
from kvcm.doctor.settings import combinations, read_settings, redis_settings

SAFE = {"data_dir": "/var/lib/kvcm"}


def _levels(settings: Settings) -> dict[Level, list[str]]:
    found = list(combinations(settings))
    return {level: [each.found for each in found if each.level is level] for level in Level}


def test_a_data_directory_on_loopback_is_nothing_to_speak_of() -> None:
    assert list(combinations(Settings(**SAFE))) == []


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({"data_dir": ""}, Level.WARN, "metadata is kept in memory only"),
        ({"registry_storage_uri": "memory://"}, Level.WARN, "metadata is kept in memory only"),
        ({"data_dir": "/tmp/kvcm"}, Level.WARN, "does not outlive a reboot"),
        ({"fsync": "never"}, Level.WARN, "kvcm.store.fsync is never"),
        ({"enable_debug_service": True}, Level.WARN, "lets callers make requests fail"),
        ({"host": "10.0.0.1", "insecure": True}, Level.FAIL, "everybody who reaches 10.0.0.1 may do everything"),
        ({"registry_storage_uri": "redis://10.0.0.9/?cluster_name=c"}, Level.WARN, "has no password for 10.0.0.9:6379"),
        ({"registry_storage_uri": "redis://10.0.0.9/?cluster_name=c"}, Level.WARN, "in the clear"),
    ],
)
def test_what_is_dangerous_is_said(changes: dict[str, object], level: Level, found: str) -> None:
    texts = _levels(Settings(**{**SAFE, **changes}))[level]  # type: ignore[arg-type] # of many types
    assert any(found in text for text in texts), texts


def test_a_store_on_this_host_or_with_password_and_encryption_is_fine() -> None:
    for uri in ("redis://127.0.0.1/?cluster_name=c", "rediss://u:p@10.0.0.9/?cluster_name=c"):
        assert list(combinations(Settings(registry_storage_uri=uri))) == []


def test_a_store_that_is_none_is_no_store() -> None:
    assert redis_settings(Settings(registry_storage_uri="redis://host/")) is None
    assert redis_settings(Settings()) is None


def test_settings_are_read_as_serve_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("kvcm.service.http_port=7000\nkvcm.logger.loglevel=4\nkvcm.service.io_thread_num=3\n")
    settings, found = read_settings(file, ["kvcm.service.http_port=7001"], {})
    assert settings is not None
    assert settings.http_port == 7001
    assert [each.level for each in found] == [Level.OK, Level.WARN, Level.WARN]
    assert "did you mean 'kvcm.logger.log_level'?" in found[1].found
    assert "kvcm.service.io_thread_num is set and has no effect" in found[2].found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("kvcm.store.fsnyc=always", "unknown setting 'kvcm.store.fsnyc', did you mean 'kvcm.store.fsync'?"),
        ("kvcm.service.http_port=many", "kvcm.service.http_port is 'many', must be a whole number"),
        ("what is this", "is not key=value"),
        ("kvcm.service.host=10.0.0.1", "nobody is authenticated"),
    ],
)
def test_settings_that_serve_refuses_are_a_failure(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text(text)
    settings, (finding,) = read_settings(file, [], {})
    assert (settings, finding.level) == (None, Level.FAIL)
    assert found in finding.found


def test_a_file_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    settings, (finding,) = read_settings(tmp_path / "nowhere", [], {})
    assert (settings, finding.level, "cannot be read" in finding.found) == (None, Level.FAIL, True)
