"""Invariants 1 and 3: a reader gets the bytes that were written, however the writer ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from manager_site import GroupPlan, Site, managers_on
from writer_kills import KillReport, WriterRig

KILLS = int(os.environ.get("KVCM_WRITER_KILLS", "20"))
"""Of both kinds together; ten times as many are the full figure."""

_KEYS_PER_FILE = {"single": 1, "packed": 8}
_WRITER_SECONDS = 5  # at most, with everything that is checked
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120 + KILLS * _WRITER_SECONDS)]


def test_a_killed_or_stopped_writer_never_has_other_bytes_served(tmp_path: Path) -> None:
    plans = [
        GroupPlan(name, (), 1 << 33, tmp_path / name, delay_ms=0, keys_per_file=count)
        for name, count in _KEYS_PER_FILE.items()
    ]
    with managers_on(tmp_path) as (manager,):
        asyncio.run(Site(*plans).set_up_at(manager))
        rigs = [WriterRig(manager.address(), plan.name, tmp_path, seed) for seed, plan in enumerate(plans)]
        try:
            _kill(rigs)
        finally:
            for rig in rigs:
                rig.close()
    for rig in rigs:
        _assert_sound(rig.report)
    assert manager.failures() == []


def _kill(rigs: list[WriterRig]) -> None:
    for _ in range(max(1, KILLS // len(rigs))):
        for rig in rigs:
            rig.kill_a_writer()
    for _ in range(max(1, KILLS // 20)):
        for rig in rigs:
            rig.stop_a_writer()


def _assert_sound(report: KillReport) -> None:
    assert report.wrong == []
    assert report.inside > 0, "no writer was killed inside a session"
    assert report.served_blocks > 0
