"""Some histories of damage: no wrong block, no silent loss, and what can be read comes back.

More of them: benchmarks/damage.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from damage_accounts import accounts_of, log_claims, metric_claims
from damage_histories import RocksHistory
from damaged_files import small_disk
from damaged_redis import RedisHistory

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

_NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_damaged_data_directory_costs_no_wrong_block_and_no_silent_loss(tmp_path: Path, seed: int) -> None:
    report = RocksHistory(tmp_path, seed).run()
    assert report.violations == [], report.steps
    assert report.acknowledged > 0


@pytest.mark.parametrize("damage", ["old dump, managers stopped", "emptied", "foreign", "evicting"])
def test_a_redis_that_lies_costs_no_wrong_block_and_no_silent_loss(tmp_path: Path, damage: str) -> None:
    report = RedisHistory(tmp_path, 5, damage).run()
    assert report.violations == [], report.steps
    assert report.acknowledged > 0


@_NEEDS_ROOT
def test_a_full_disk_of_metadata_and_blocks_shuts_no_manager_for_ever(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        report = RocksHistory(tmp_path, 7, disk).run()
    assert report.violations == [], report.steps


# The judge itself.


def test_a_loss_is_accounted_for_by_a_number_or_by_store_and_time() -> None:
    counted = '{"event": "blocks_lost", "level": "error", "blocks": 2}'
    windowed = '{"event": "store_lost_changes", "level": "error", "from": 1795771600.5, "until": 1795771660.0}'
    nowhere = '{"event": "lost", "level": "error", "from": 1795771600.5, "until": 1795771660.0}'
    silent = '{"event": "serving", "level": "info", "path": "/tmp/damaged", "blocks": 7}'
    for line, missing, expected in (
        (counted, [1.0, 2.0], True),
        (counted, [1.0, 2.0, 3.0], False),
        (windowed, [1795771610.0, 1795771620.0, 1795771661.0], True),
        (windowed, [1795771500.0, 1795771620.0, 1795771661.0], False),
        (nowhere, [1795771610.0], False),
        (silent, [1.0], False),
    ):
        account = accounts_of(list(log_claims([line])))["log"]
        assert account.accounts_for(missing) is expected, line


def test_evictions_and_old_counts_are_no_account_of_a_loss() -> None:
    before = {"kvcm_store_blocks_lost_total": 3.0, 'kvcm_evicted_keys_total{group="a"}': 0.0}
    now = {"kvcm_store_blocks_lost_total": 5.0, 'kvcm_evicted_keys_total{group="a"}': 9.0}
    assert accounts_of(list(metric_claims(before, now)))["metric"].count == 2
