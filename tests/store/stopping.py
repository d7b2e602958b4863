"""Stopping a process as it stands."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from waiting import until

__all__ = ["stop_process"]


def stop_process(pid: int) -> None:
    """Stop every thread of a process; its connections stay open and silent until it gets SIGCONT.

    The kernel hands the signal to one thread, which stops the others once it runs: on a busy machine they answer
    until then.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _stands_still(pid), f"every thread of process {pid} is stopped")


def _stands_still(pid: int) -> bool:
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread that ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
