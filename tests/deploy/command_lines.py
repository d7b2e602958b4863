"""Command lines of the gateway and of the subscriber, as deployments have them, run as processes."""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from composed import ROOT
from ports import free_port
from waiting import until

__all__ = ["GATEWAY", "SUBSCRIBER", "check_gateway", "check_subscriber"]

GATEWAY = [sys.executable, "-m", "kvcm"]
SUBSCRIBER = [sys.executable, "-c", "import sys; from kvcm.connectors.events.subscriber import main; sys.exit(main())"]


def check_gateway(words: Sequence[str], files: Mapping[str, Path], log: Path) -> None:
    """Run a gateway until it lives, and end it.

    Args:
        words: of its command line, from `gateway` on.
        files: what is mounted: directories of this host by where the command line expects them.
        log: file for what it writes.
    """
    port = free_port()
    _check([*GATEWAY, *_moved(words, files), "--port", str(port)], port, log)


def check_subscriber(words: Sequence[str], files: Mapping[str, Path], log: Path) -> None:
    """Run a subscriber until it lives, and end it. Arguments are those of `check_gateway`."""
    port = free_port()
    _check([*SUBSCRIBER, *_moved(words, files), f"--listen=127.0.0.1:{port}"], port, log)


def _moved(words: Sequence[str], files: Mapping[str, Path]) -> list[str]:
    moved = list(words)
    for place, directory in files.items():
        moved = [word.replace(f"{place}/", f"{directory}/") for word in moved]
    return moved


def _check(command: Sequence[str], port: int, log: Path) -> None:
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, stdout=written, stderr=written
        )
    try:
        until(lambda: process.poll() is not None or _lives(port), f"{command[-4:]} lives", 60)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _lives(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
