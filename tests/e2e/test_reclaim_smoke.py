"""Invariants 1, 3, 4 and 5 while reclaiming is killed, stopped, shared and handed over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from crash_rounds import crash
from reclaim_handover import take_over
from reclaim_rounds import eviction_rig
from redis_servers import Standalone
from shared_directory import share_directory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("store", ["rocksdb, always synced", "rocksdb, synced every second", "redis"])
def test_a_manager_killed_while_it_evicts_leaves_nothing_behind(
    tmp_path: Path, redis_standalone: Standalone, store: str
) -> None:
    uri = redis_standalone.uri("reclaim-kills") if store == "redis" else ""
    fsync = "everysec" if store.endswith("second") else "always"
    with eviction_rig(tmp_path, uri, seed=5, fsync=fsync) as rig:
        asyncio.run(crash(rig, kills=3, audit_every=3))
    assert rig.report.wrong == []
    assert rig.report.checked_blocks > 0


def test_two_deployments_share_a_directory(tmp_path: Path) -> None:
    report = asyncio.run(share_directory(tmp_path, 3.0, seed=7))
    assert report.wrong == []
    assert report.checked_blocks > 0
    assert (report.own_orphans, report.other_orphans, report.dead_orphans) == (48, 0, 12)


def test_another_manager_ends_the_eviction_of_a_killed_leader(tmp_path: Path, redis_standalone: Standalone) -> None:
    (report,) = asyncio.run(take_over(tmp_path, redis_standalone.uri("reclaim-handover"), 1, seed=8))
    assert report.wrong == []
    assert report.left_blocks > 0
    assert report.seconds < 30.0
