"""Processes of a game: each on a host, killed, stopped, frozen and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from game_network import Network

__all__ = ["GameProcess", "waited_for"]

_END_SECONDS = 60.0


def waited_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds within a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class GameProcess:
    """A program on a host. Nothing can be done to one that is not there: that raises ProcessLookupError.

    Args:
        network: of the game.
        host: name of the host, and of the process.
        command: its command line.
        folder: its working directory, with its log.
        environment: variables beside those of the game.
    """

    def __init__(
        self,
        network: Network,
        host: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.host = host
        self.folder = folder
        self.log = folder / "log"
        self._command = network.on(host, command)
        own = {key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")}
        self._environment = {**own, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the process, None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        assert not self.is_running, f"{self.host} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """End it at once."""
        process = self._running()
        process.kill()
        process.wait(_END_SECONDS)

    def stop(self, seconds: float = _END_SECONDS) -> int:
        """End it the polite way and return its exit code; one that does not end in time is killed, and the code -9."""
        process = self._running()
        process.terminate()
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)
            return -int(signal.SIGKILL)

    def freeze(self) -> None:
        """Let it stand still; its connections stay open and silent."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, which must be there: one that ended by itself must not be taken for one that we ended."""
        process = self._process
        if process is None or process.poll() is not None:
            raise ProcessLookupError(f"{self.host} is not there, it ended with {self.exit_code}")
        return process
