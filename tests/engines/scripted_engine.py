"""No engine: says and does what the tests of `engine_process` need, through the same loop as the engines' scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from engine_loop import serve


class ScriptedEngine:
    """Answers like an engine that computes nothing."""

    def __init__(self, model: str, fails: str = "") -> None:
        print("starting with", model, flush=True)
        if fails:
            raise ValueError(fails)
        self._children: list[subprocess.Popen[bytes]] = []
        self.started = {"version": "1"}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Print a lot, as engines do, and count on from the last token."""
        print('{"value": "not an answer"}\n' * 1000, file=sys.stderr)
        return [{"tokens": [prompt[-1] + step for step in range(1, max_tokens + 1)]} for prompt in prompts]

    def long(self, length: int) -> str:
        """Return more than a pipe holds."""
        return "x" * length

    def wait(self, pause_seconds: float) -> None:
        """Answer late."""
        time.sleep(pause_seconds)

    def crash(self) -> None:
        """End as a bug in native code would."""
        os.kill(os.getpid(), signal.SIGSEGV)

    def start_child(self) -> int:
        """Start a process that outlives this one; returns its id."""
        self._children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return self._children[-1].pid

    def close(self) -> None:
        """Say so."""
        print("closed", flush=True)


if __name__ == "__main__":
    serve(ScriptedEngine)
