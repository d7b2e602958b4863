"""`kvcm scorer` as a process: start, service, end, and what it says where it cannot run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ports import free_port
from scorer_rig import GPU, report
from test_transport_sites import Site

from kvcm.model.key_schemes import SGLANG_SHA256
from kvcm.protocol import kv_indexer_pb2, kv_indexer_pb2_grpc


@contextlib.asynccontextmanager
async def process(log: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as stderr:
        command = ("-m", "kvcm", "scorer", *arguments)
        started = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=stderr, stdout=stderr)
        try:
            yield started
        finally:
            if started.returncode is None:
                started.kill()
                await started.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_serves_until_a_signal_and_ends_with_0(
    number: signal.Signals, tmp_path: Path, place: Site, address: str
) -> None:
    instance, port, pages = place.instance(), free_port(), free_port()
    scheme = {"algorithm": SGLANG_SHA256, "mask": 5, "block_tokens": 4}
    place.api.ok("ResidencyService.ReportResidency", **report(instance, "a:1", {GPU: [1 ^ 5]}, key_scheme=scheme))
    options = ("--manager", address, "--kv-indexer", f"{port}={instance}", "--metrics", str(pages))
    async with process(tmp_path / "log", *options, "--score-timeout-ms", "30000") as started:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = kv_indexer_pb2_grpc.KVIndexerStub(channel)
            request = kv_indexer_pb2.MatchExternalKvPrefixRequest(hashes=[1])
            answer = await stub.MatchExternalKvPrefix(request, timeout=60, wait_for_ready=True)
            assert [each.worker_address for each in answer.matches] == ["http://a:1"]
        page = await asyncio.to_thread(_page, f"http://127.0.0.1:{pages}/metrics")
        assert 'kvcm_scorer_requests_total{code="OK",service="kv_indexer.v1.KVIndexer"} 1.0' in page
        started.send_signal(number)
        async with asyncio.timeout(60):
            assert await started.wait() == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert {json.loads(line)["event"] for line in log.splitlines()} >= {"serving", "serving_metrics", "stopped"}


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _refused(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvcm", "scorer", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done.stderr
    assert lines[0].startswith("kvcm: ")
    return lines[0]


def test_what_the_command_cannot_run_with_ends_it_with_a_sentence(tmp_path: Path) -> None:
    index = ("--manager", "127.0.0.1:1", "--kv-indexer", "0=i")
    assert "--kv-indexer is ['x'], must be LISTEN=INSTANCE_ID" in _refused("--manager", "m:1", "--kv-indexer", "x")
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o644)
    assert "others can read the secret in it" in _refused(*index, "--api-key-file", str(tmp_path / "key"))
    assert "nowhere" in _refused(*index, "--ca-file", str(tmp_path / "nowhere"))
    pods = ("--pod-scores", "0", "--model", "m=i", "--tokenizer", f"m={tmp_path}")
    assert f"--tokenizer m={tmp_path} is no tokenizer" in _refused(*index, *pods)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be bound" in _refused("--manager", "m:1", "--kv-indexer", f"{port}=i")
        assert f"--metrics 127.0.0.1:{port} cannot be bound" in _refused(*index, "--metrics", str(port))


def test_the_command_without_its_extra_names_it() -> None:
    code = "import sys; sys.modules['tokenizers'] = None; from kvcm.cli import main; main()"
    pods = ["--pod-scores", "0", "--model", "m=i", "--tokenizer", "m=/nowhere"]
    arguments = ["scorer", "--manager", "m:1", *pods]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tokenizers is not installed; the scorer needs: pip install 'kvcm[server,scorer]'" in done.stderr
