"""What a manager's answers mean to the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcm.doctor.findings import Level
from kvcm.doctor.manager import above_marks, check_storage, readiness, status_of
from kvcm.model.storages import DummyStorageSpec, MooncakeStorageSpec, NfsStorageSpec, StorageConfig, ThreeFSStorageSpec
from kvcm.service.usage_values import GroupUsage, StorageStatus, Usage, UsageReport
from kvcm.storage.health import HealthState

NOT_READY = "[+]started ok\n[-]metadata-store failed: no answer within 1 s\nreadyz check failed\n"


def test_readiness_is_told_with_its_reasons() -> None:
    (ready,) = readiness("u", 200, "ok")
    assert ready.level is Level.OK
    (reason,) = readiness("u", 503, NOT_READY)
    assert (reason.level, reason.found) == (Level.FAIL, "u is not ready: metadata-store failed: no answer within 1 s")
    (silent,) = readiness("u", 503, "not ready")
    assert (silent.level, "does not say why" in silent.found) == (Level.FAIL, True)
    (stranger,) = readiness("u", 404, "")
    assert (stranger.level, "is it the admin port" in stranger.advice) == (Level.FAIL, True)


@pytest.mark.parametrize(
    ("status", "level"),
    [
        (StorageStatus("s", True, HealthState.SH_UP), Level.OK),
        (StorageStatus("s", True, HealthState.SH_UP, is_draining=True), Level.WARN),
        (StorageStatus("s", False, HealthState.SH_UP), Level.WARN),
        (StorageStatus("s", True, HealthState.SH_DEGRADED, "slow"), Level.WARN),
        (StorageStatus("s", True, HealthState.SH_DOWN, "gone"), Level.FAIL),
    ],
)
def test_the_health_of_a_storage(status: StorageStatus, level: Level) -> None:
    assert status_of(status).level is level


def _group(used: int, deleting: int = 0) -> UsageReport:
    usage = Usage(used, deleting, 100, 80, 70)
    return UsageReport((GroupUsage("g", usage, (), (), (), 0, 0, 0),), (), ())


def test_a_group_above_its_mark_is_told_unless_it_is_full_which_is_told_elsewhere() -> None:
    assert [each.level for each in above_marks(_group(81))] == [Level.WARN]
    assert above_marks(_group(81, deleting=1)) == []
    assert above_marks(_group(100)) == []


def test_roots_are_looked_at_from_this_host(tmp_path: Path) -> None:
    nfs = StorageConfig("s", NfsStorageSpec(f"{tmp_path}/"))
    assert [each.level for each in check_storage(nfs)] != [Level.FAIL]
    mount = StorageConfig("s", ThreeFSStorageSpec("c", str(tmp_path), "none"))
    assert [each.level for each in check_storage(mount)] == [Level.FAIL]
    assert list(check_storage(StorageConfig("s", DummyStorageSpec()))) == []


def test_a_mooncake_master_that_nobody_reaches_is_a_failure() -> None:
    spec = MooncakeStorageSpec("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "", "127.0.0.1:1")
    found = list(check_storage(StorageConfig("s", spec)))
    assert found
    assert {each.level for each in found} <= {Level.FAIL}
    assert any("127.0.0.1:1 cannot be reached" in each.found for each in found)
