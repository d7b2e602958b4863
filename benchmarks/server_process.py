"""Servers that benchmarks run as processes of their own, on free ports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))

import grpc.aio
from ports import free_port

__all__ = ["META", "Server", "free_port", "process"]

META = "/kv_cache_manager.proto.meta.MetaService/"


class Server(NamedTuple):
    """A running server process and a channel to it."""

    pid: int
    channel: grpc.aio.Channel

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process; it is gone after the block."""
    running = subprocess.Popen([sys.executable, *arguments], text=True, **options)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)
