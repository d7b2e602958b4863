"""Files of JSON lines that processes of a game append to, and that are read also when their writer was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Lines", "read_lines"]


class Lines:
    """Appends values to a file, each as one line by one call of the system: a killed process leaves no half of one.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, value: dict[str, Any]) -> None:
        """Append a value."""
        os.write(self._descriptor, json.dumps(value).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the values of a file; a last line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
