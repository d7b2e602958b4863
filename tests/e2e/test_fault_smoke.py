"""Invariant 9 while the store fails: an answer in time, and everything is well afterwards by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fault_cases import FAULTS, run_fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["killed and restarted after 2 s (AOF)", "CLIENT PAUSE 3000 ALL"])
def test_a_failing_store_fails_requests_in_time_and_nothing_else(tmp_path: Path, name: str) -> None:
    report = asyncio.run(run_fault(tmp_path, FAULTS[name], seed=4))
    assert report.wrong == []
    assert report.lost == []
    assert report.longest_seconds <= 13.0
    assert report.recovery_seconds <= 13.0
    assert any(outcome.endswith(":IO_ERROR") for outcome in report.requests)
