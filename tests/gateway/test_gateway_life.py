"""The start and the end of a gateway: drain, signals, the command, and what it says where it cannot run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from gateway_rig import CHAT, FakeEngine, engines, eventually
from ports import free_port

from kvcm.gateway.app import GatewayApp
from kvcm.gateway.gateway import Gateway
from kvcm.gateway.settings import EngineAddress, GatewaySettings

EVENTS = [b"data: 1\n\n", b"data: 2\n\n"]


class Life:
    """A gateway that ends when a test says so."""

    def __init__(self, engine: FakeEngine, drain_timeout_ms: int) -> None:
        self.gateway = Gateway(
            GatewaySettings(
                engines=(EngineAddress(engine.url),),
                policy="round_robin",
                port=0,
                drain_timeout_ms=drain_timeout_ms,
                probe_interval_ms=3_600_000,
            )
        )
        self._end = asyncio.Event()
        self.app: GatewayApp | None = None
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        async with self.gateway.running() as self.app:
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await eventually(lambda: self.app is not None and self.app.is_draining)


@asynccontextmanager
async def living(
    engine: FakeEngine, drain_timeout_ms: int = 60_000
) -> AsyncIterator[tuple[Life, aiohttp.ClientSession]]:
    life = Life(engine, drain_timeout_ms)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{life.gateway.port}") as client:
        await eventually(lambda: life.app is not None)
        yield life, client
        await life.end()
        async with asyncio.timeout(60):
            await life.task


async def test_a_drain_finishes_streams_and_takes_nothing_new() -> None:
    last = asyncio.Event()
    async with engines(1) as (engine,), living(engine) as (life, client):
        engine.answer = engine.stream(EVENTS, wait=last)
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            async with client.get("/readyz") as ready:  # opens a connection that stays
                assert ready.status == 200
            await life.end()
            async with client.post("/v1/chat/completions", json=CHAT) as refused:
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
                assert refused.headers["connection"] == "close"
                assert (await refused.json())["error"]["code"] == "draining"
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get("/readyz")
            assert not life.task.done()
            last.set()
            assert await response.content.read() == EVENTS[1]
        assert len(engine.seen) == 1


async def test_a_drain_waits_for_a_body_that_is_still_arriving() -> None:
    more = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        text = json.dumps(CHAT).encode()
        yield text[:10]
        await more.wait()
        yield text[10:]

    headers = {"content-type": "application/json"}
    async with engines(1) as (engine,), living(engine) as (life, client):
        sending = asyncio.create_task(client.post("/v1/chat/completions", data=body(), headers=headers))
        await eventually(lambda: life.app is not None and life.app.active_requests == 1)
        await life.end()
        assert not life.task.done()
        more.set()
        async with await sending as response:
            assert response.status == 200
        assert len(engine.seen) == 1


async def test_what_is_left_when_the_drain_is_over_is_cut_off() -> None:
    async with engines(1) as (engine,), living(engine, drain_timeout_ms=20) as (life, client):
        engine.answer = engine.stream(EVENTS, wait=asyncio.Event())
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            await life.end()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        await eventually(lambda: engine.cancelled == 1)


@asynccontextmanager
async def process(log: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as stderr:
        command = ("-m", "kvcm", "gateway", *arguments)
        started = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=stderr, stdout=stderr)
        try:
            yield started
        finally:
            if started.returncode is None:
                started.kill()
                await started.wait()


async def _serves(client: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with client.get("/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_serves_until_a_signal_and_ends_with_0(number: signal.Signals, tmp_path: Path) -> None:
    last, port = asyncio.Event(), free_port()
    async with engines(1) as (engine,):
        engine.answer = engine.stream(EVENTS, wait=last)
        options = ("--engine", engine.url, "--policy", "consistent_hash", "--port", str(port))
        async with process(tmp_path / "log", *options) as started:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                await _serves(client)
                async with client.post("/v1/chat/completions", json=CHAT) as response:
                    await response.content.readexactly(len(EVENTS[0]))
                    started.send_signal(number)
                    await eventually(lambda: "draining" in (tmp_path / "log").read_text())
                    last.set()
                    assert await response.content.read() == EVENTS[1]
            async with asyncio.timeout(60):
                assert await started.wait() == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert '"outcome": "ok"' in log


def _refused(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvcm", "gateway", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("kvcm: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_bad_options_and_files_end_the_command_with_a_sentence(tmp_path: Path) -> None:
    engine = ("--engine", "http://127.0.0.1:1", "--policy", "round_robin")
    assert "engines is ['x'], must be URL or URL=INSTANCE_ID" in _refused("--engine", "x")
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o644)
    refused = _refused(*engine, "--api-key-file", str(tmp_path / "key"))
    assert "others can read the secret in it" in refused
    assert "nowhere" in _refused(*engine, "--ca-file", str(tmp_path / "nowhere"))
    (tmp_path / "gateway.toml").write_text("prot = 1\n")
    assert "prot is no setting; the nearest one is port" in _refused("-c", str(tmp_path / "gateway.toml"))


def test_the_command_without_its_extra_names_it() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; from kvcm.cli import main; main()"
    arguments = ["gateway", "--engine", "http://127.0.0.1:1", "--policy", "round_robin"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "aiohttp is not installed; the gateway needs: pip install 'kvcm[server,gateway]'" in done.stderr
