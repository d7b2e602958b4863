"""Invariants 1, 3 and 5 on every kind of storage: a reader gets the written bytes, however the writer ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from writer_kill_kinds import KINDS, impossible, kill_writers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_KILLS = 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_or_stopped_writer_never_has_other_bytes_served(tmp_path: Path, kind: str) -> None:
    reason = impossible(kind)
    if reason:
        pytest.skip(reason)
    report = kill_writers(kind, tmp_path, _KILLS, stops=1, seed=2)
    assert report.wrong == []
    assert (report.kills, report.comebacks) == (_KILLS, 1)
    assert report.inside > 0, "no writer was killed inside a session"
    assert report.served_blocks > 0
