"""The base install is what an engine process needs; the server says what it is missing."""

from __future__ import annotations

import subprocess
import sys

SERVER_ONLY = ("typer", "structlog", "uvicorn", "uvloop", "httptools", "rich", "msgspec", "redis", "rocksdict")
ENGINE_ONLY = ("torch", "transformers", "triton")


def run(code: str) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({SERVER_ONLY + ENGINE_ONLY!r}))\n"
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)


def test_the_command_without_the_server_extra_says_what_to_install() -> None:
    done = run("import kvcm.cli")
    assert done.returncode == 1
    assert "pip install 'kvcm[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_messages_and_model_need_nothing_of_the_server() -> None:
    done = run(
        "import kvcm.model.uri, kvcm.model.errors, connectors.client\n"
        "from kvcm.protocol import meta_service_pb2_grpc, admin_service_pb2_grpc"
    )
    assert done.returncode == 0, done.stderr


def test_bytes_are_moved_and_checked_with_nothing_else() -> None:
    done = run(
        "from connectors.transfer import TransferEngine, checksum_of\n"
        "TransferEngine({}, checksums=True).close()\n"
        "assert checksum_of([memoryview(b'ab')]) == checksum_of([memoryview(b'a'), memoryview(b'b')])"
    )
    assert done.returncode == 0, done.stderr
