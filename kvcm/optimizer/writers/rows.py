"""Rows of figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvcm.optimizer.writers.output import write_whole

__all__ = ["write_csv"]


def write_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows below a line of their names, which are those of the first.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
