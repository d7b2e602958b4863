"""Invariant 1, and what engines see: a storage that goes away costs its hits while it is away, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_figures import AWAY, STAYS
from outage_run import OutageReport, run_outage
from outage_storages import OUTAGES, impossible

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", OUTAGES)
def test_a_storage_that_goes_away_costs_its_hits_and_nothing_else(tmp_path: Path, name: str) -> None:
    reason = impossible(name)
    if reason:
        pytest.skip(reason)
    report = run_outage(tmp_path, name, seconds=1.0, engines=2)
    assert report.wrong == []
    _assert_undisturbed(report)
    _assert_the_other_storage_serves(report)
    _assert_it_comes_back(report)


def _assert_undisturbed(report: OutageReport) -> None:
    """No engine fails, waits too long, or gets other bytes or tokens."""
    for phase, seen in report.engines.items():
        assert (phase, seen.failed_requests, seen.errors, seen.wrong) == (phase, [], [], [])
        assert seen.overrun_seconds < 10.0, phase
    for phase, generated in report.tokens.items():
        assert (phase, generated.errors, generated.wrong) == (phase, [], [])
    assert report.tokens["down"].generations > 0
    assert report.tokens["before"].loaded_tokens > 0


def _assert_the_other_storage_serves(report: OutageReport) -> None:
    for phase, seen in report.engines.items():
        assert (phase, seen.hit.get(STAYS, 0)) == (phase, seen.asked.get(STAYS, 0))
    down = report.engines["down"]
    assert down.asked[STAYS] > 0
    assert down.asked[AWAY] > 0
    assert AWAY not in down.served
    assert down.accepted == {STAYS: down.offered}
    assert down.offered > 0


def _assert_it_comes_back(report: OutageReport) -> None:
    before, audit = report.engines["before"], report.engines["audit"]
    assert before.hit[AWAY] == before.asked[AWAY] > 0
    assert audit.hit[AWAY] == audit.asked[AWAY] > 0
    assert audit.served[AWAY] > 0
    assert audit.hit == audit.asked
    lost = sum(seen.lost_parts for seen in report.engines.values())
    assert (lost == 0) == report.keeps_bytes
