"""Invariants 1, 3 and 5 where bytes are not in files: a reader gets the written bytes, however the writer ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from writer_kill_kinds import impossible, kill_writers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.mark.parametrize("kind", ["mooncake", "memory pool"])
def test_a_killed_or_stopped_writer_never_has_other_bytes_served(tmp_path: Path, kind: str) -> None:
    reason = impossible(kind)
    if reason:
        pytest.skip(reason)
    report = kill_writers(kind, tmp_path, kills=6, stops=1, seed=2)
    assert report.wrong == []
    assert (report.kills, report.comebacks) == (6, 1)
    assert report.served_blocks > 0
