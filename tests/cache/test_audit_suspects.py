"""Verification of stores where much looks wrong: nothing is left unlooked at, and nothing is asked again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from struct import pack

import pytest
from audit_rig import IndexRig, chain, opened
from redis_servers import Standalone

from kvcm.cache import audit_blocks
from kvcm.cache.audit_documents import DocumentAudit
from kvcm.cache.audit_report import AuditReport, Repair
from kvcm.index.shards import shard_of
from kvcm.store.store import Table

NOW = 1_000_000.0  # what the clock of the rig says


@pytest.fixture
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A sound deployment on Redis."""
    async with opened("redis_standalone", request) as made:
        await made.configure(instances=("i",))
        await made.put("i", chain(200))
        yield made


def _pending(rig: IndexRig, key: int) -> bytes:
    """The name of the pending set of the shard of a block."""
    assert rig.metadata.client is not None
    placement = rig.registry.instances.placement("i")
    return f"{rig.metadata.client.prefix}:p{{{placement.uid}.{shard_of(key, placement.shard_count)}}}".encode()


async def test_due_times_are_asked_for_once_per_table_and_not_per_suspect(shared: IndexRig) -> None:
    sessions = shared.metadata.store.table("sessions", 16)
    for number in range(40):
        assert await sessions.replace(f"odd{number}", None, b"\xc1", NOW + 9)
    asked: list[str] = []
    report = AuditReport()
    documents = DocumentAudit(lambda: (), Repair(), report)
    await documents.look_at_sessions(_Counted(sessions, asked))
    asked.clear()
    await documents.judge()
    assert len(report.findings) == 40
    assert asked == ["due", "due"]


class _Counted:
    """A table that writes down when its due times are asked for."""

    def __init__(self, table: Table, asked: list[str]) -> None:
        self._table = table
        self._asked = asked
        self.get, self.all = table.get, table.all
        self.replace, self.version = table.replace, table.version

    async def due(self, now: float, most: int) -> list[str]:
        self._asked.append("due")
        return await self._table.due(now, most)


async def test_more_suspects_than_are_remembered_are_judged_as_they_come(
    shared: IndexRig, redis_standalone: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_blocks, "_MOST_SUSPECTS", 100)
    with redis_standalone.server.admin() as client:
        for key in range(1, 181):
            client.zadd(_pending(shared, key), {pack(">q", key): 5.0})
    found = await shared.verified()
    assert (len(found.findings), found.more) == (180, 0)
    assert shared.pauses > 1
    assert len((await shared.verified(repair=True)).findings) == 180
    assert (await shared.verified()).is_clean


def test_what_could_not_be_checked_is_not_clean() -> None:
    assert AuditReport().is_clean
    assert not AuditReport(unsettled=["usage"]).is_clean
