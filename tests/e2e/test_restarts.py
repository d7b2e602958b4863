"""Managers that are stopped under load finish their requests, and the next one goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis_servers import Standalone
from restart_rounds import restart_under_load, stop_twice, stop_while_loading

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_over_rocksdb_only_rejected_requests_fail(tmp_path: Path) -> None:
    report = asyncio.run(restart_under_load(tmp_path, rounds=2))
    assert report.wrong == []
    assert (report.stops, report.long_requests) == (2, 2)
    assert min(report.turned_away, report.refused, report.confirmed_blocks) > 0


def test_with_two_managers_clients_of_the_other_notice_nothing(tmp_path: Path, redis_standalone: Standalone) -> None:
    report = asyncio.run(
        restart_under_load(tmp_path, redis_standalone.uri("restarts", timeout_ms=20_000), managers=2, rounds=2)
    )
    assert report.wrong == []
    assert report.stops == 2
    assert min(report.turned_away, report.refused, report.confirmed_blocks) > 0


def test_a_manager_that_is_stopped_while_it_loads_harms_nothing(tmp_path: Path) -> None:
    report = asyncio.run(stop_while_loading(tmp_path, blocks=50_000, stops=3, seed=1))
    assert report.wrong == []
    assert report.confirmed_blocks >= 50_000


def test_a_second_signal_ends_it_and_harms_nothing(tmp_path: Path) -> None:
    report = asyncio.run(stop_twice(tmp_path, stops=1))
    assert report.wrong == []
    assert (report.stops, report.confirmed_blocks) == (1, 32)
