"""The rows that other programs read, as JSON and CSV: what each policy counts at each capacity, or is estimated to.

Or what each policy of the gateway gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvcm.optimizer.pooling import PoolingRow
from kvcm.optimizer.results import Replay
from kvcm.optimizer.study import Estimate
from kvcm.optimizer.writers import write_atomic

__all__ = ["Row", "rows_of", "write_json"]

Row = dict[str, str | int | float]


def rows_of(traces: Sequence[tuple[str, Iterable[Replay | Estimate | PoolingRow]]]) -> list[Row]:
    """Return a row for each replay, estimate or policy of the gateway; of several traces, each says of which it is.

    Args:
        traces: their names and their counts or estimates.
    """
    if len(traces) == 1:
        return [each.row() for each in traces[0][1]]
    return [{"trace": name, **each.row()} for name, counted in traces for each in counted]


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a list.

    Raises:
        OSError: the file cannot be written.
    """
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_atomic(path, f"[{lines}]\n")
