"""Invariants 1 to 5: managers that are killed under load lose nothing that they confirmed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from crash_rounds import crash, crash_rig
from redis_servers import Standalone

pytestmark = pytest.mark.e2e


def test_a_killed_manager_over_rocksdb_loses_nothing(tmp_path: Path) -> None:
    with crash_rig(tmp_path, "", seed=1) as rig:
        asyncio.run(crash(rig, kills=4, audit_every=4))
    assert rig.report.wrong == []
    assert rig.report.confirmed > 0


@pytest.mark.parametrize("managers", [1, 2])
def test_a_killed_manager_over_redis_loses_nothing(tmp_path: Path, redis_standalone: Standalone, managers: int) -> None:
    uri = redis_standalone.uri(f"crash-{managers}")
    with crash_rig(tmp_path, uri, seed=2, managers=managers) as rig:
        asyncio.run(crash(rig, kills=3, audit_every=3))
    assert rig.report.wrong == []
    assert rig.report.confirmed > 0
