"""The base install suffices for an engine process; the server names missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER_ONLY = (
    "typer",
    "structlog",
    "uvicorn",
    "uvloop",
    "httptools",
    "rich",
    "msgspec",
    "redis",
    "rocksdict",
    "fastapi",
)
ENGINE_ONLY = ("torch", "transformers", "triton")
MANAGER_ONLY = (
    "numpy",
    "redis",
    "rocksdict",
    "grpc",
    "structlog",
    "uvicorn",
    "fastapi",
    "kvcm.app",
    "kvcm.service.calls",
)
TRACING_ONLY = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.trace", "opentelemetry.context")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return run_without(SERVER_ONLY + ENGINE_ONLY, code)


def run_without(modules: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)


def test_the_command_without_the_server_extra_names_the_extra() -> None:
    done = run("import kvcm.cli")
    assert done.returncode == 1
    assert "pip install 'kvcm[server]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "index --help", "group usage", "storage list", "key list", "snapshot save"]
)
def test_commands_that_only_ask_a_manager_import_nothing_of_it(arguments: str) -> None:
    """They would take twice as long to start."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"""
import sys
from kvcm.cli import app
try:
    app({arguments.split()!r})
finally:
    found = [name for name in {MANAGER_ONLY!r} if name in sys.modules]
    print("imported:", *found)
""",
        ],
        env={**os.environ, "KVCM_MANAGER": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 2}, done.stderr  # no manager answers
    assert done.stdout.splitlines()[-1] == "imported:"


def test_messages_and_model_need_nothing_of_the_server() -> None:
    done = run(
        "import kvcm.model.uri, kvcm.model.errors, kvcm.connectors.client\n"
        "from kvcm.protocol import meta_service_pb2_grpc, admin_service_pb2_grpc"
    )
    assert done.returncode == 0, done.stderr


def test_bytes_are_moved_and_checked_with_nothing_else() -> None:
    done = run(
        "from kvcm.connectors.transfer import TransferEngine, checksum_of\n"
        "TransferEngine({}, checksums=True).close()\n"
        "assert checksum_of([memoryview(b'ab')]) == checksum_of([memoryview(b'a'), memoryview(b'b')])"
    )
    assert done.returncode == 0, done.stderr


def test_without_the_tracing_extra_the_server_serves_and_names_the_extra(tmp_path: Path) -> None:
    serve = (
        "import asyncio\n"
        "from kvcm.app import Manager\n"
        "from kvcm.config import ConfigError, Settings\n"
        "ports = dict(rpc_port=0, http_port=0, admin_rpc_port=0, admin_http_port=0)\n"
        "async def live(**settings):\n"
        f"    async with Manager(Settings(**ports, **settings, data_dir={str(tmp_path)!r})).running():\n"
        "        print('said: serves')\n"
        "asyncio.run(live())\n"
        "try:\n"
        "    asyncio.run(live(otlp_endpoint='http://127.0.0.1:1'))\n"
        "except ConfigError as error:\n"
        "    print('said:', error)\n"
    )
    done = run_without(TRACING_ONLY, serve)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("said: ")]
    assert said[0] == "said: serves"
    assert len(said) == 2
    assert "kvcm.tracing.otlp_endpoint" in said[1]
    assert "pip install 'kvcm[tracing]'" in said[1]
