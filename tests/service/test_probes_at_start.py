"""Probes are answered while a starting manager reads every block for its order of eviction."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from ports import free_port
from test_transport_process import manager
from test_transport_sites import Site

from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.reclaim import live_order
from kvcm.reclaim.reclaimer import Reclaimer

_BLOCKS = 500


async def _ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    try:
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_livez_answers_while_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        site.write(site.instance("default"), list(range(1, _BLOCKS + 1)))
        process.process.terminate()
        assert process.wait() == 0
    monkeypatch.setattr(live_order, "_STEP_ROWS", 1)
    http_port = free_port()
    begin, answers = Reclaimer.begin, list[bytes]()

    async def watched(reclaimer: Reclaimer) -> None:
        beginning = asyncio.create_task(begin(reclaimer))
        while not beginning.done():
            answers.append(await _ask(http_port))
        await beginning

    monkeypatch.setattr(Reclaimer, "begin", watched)
    settings = Settings(
        rpc_port=0, http_port=http_port, admin_rpc_port=0, admin_http_port=0, data_dir=str(tmp_path / "data")
    )
    async with Manager(settings).running():
        pass
    assert len(answers) > 1  # the last one may have come after the end
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}
