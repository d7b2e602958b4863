"""Invariants 1 to 4 with three managers on one store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from contended import ContendedReport, Handover, contend, contended_rig, hand_over, visibility
from redis_servers import Cluster, Standalone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_OPERATIONS = 5_000


@pytest.mark.parametrize("store", ["redis_standalone", "redis_cluster"])
def test_managers_on_one_store_agree(tmp_path: Path, store: str, request: pytest.FixtureRequest) -> None:
    server: Standalone | Cluster = request.getfixturevalue(store)

    async def run() -> tuple[ContendedReport, tuple[list[float], list[float]], Handover]:
        return await contend(rig, _OPERATIONS), await visibility(rig, 5), await hand_over(rig)

    with contended_rig(tmp_path, server.uri("contended"), seed=3) as rig:
        report, (written, removed), handover = asyncio.run(run())
    assert report.wrong == []
    assert report.operations >= _OPERATIONS
    assert report.reads.entries > 0
    assert max(*written, *removed, *report.reads.removed_but_read, *report.reads.written_but_missed) < 8.5
    assert handover.failed == []
    assert handover.wrong == []
    assert max(handover.deletion_seconds, handover.expiry_seconds) < 20.0  # lease 2 s, and a busy machine
