"""Progress of loading, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

__all__ = ["LoadProgress", "shown_progress"]

LoadProgress = Callable[[int, int], None]
"""Receives the number of loaded rows, and the estimated total."""


@contextmanager
def shown_progress(title: str) -> Iterator[LoadProgress]:
    """Show a bar on stderr inside the block if that is a terminal, else nothing."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, estimated: progress.update(task, completed=done, total=max(done, estimated))
