"""What every benchmark prints and writes: rows of (case, metric, value, unit, baseline, ratio, target, ok)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "arguments", "commit", "is_sound", "left_out", "publish"]


_TIMES = {"s", "ms", "us"}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, beside what it is compared with in the same run.

    Attributes:
        case: of the measurement.
        metric: name of the figure.
        value: the figure.
        unit: its unit.
        baseline: the same metric of the other side, None when there is none.
        ratio: baseline / value for speed-ups, value / baseline for costs; the target says which.
        target: what the ratio has to be, "" when the row only reports.
        ok: whether it is, None when the row only reports.
    """

    case: str
    metric: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool | None = None


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few repetitions, figures mean little")
    return parser


def left_out(case: str, reason: str, is_quick: bool) -> Row:
    """Return the row of a case that this machine cannot have: only a smoke run may go without it.

    Args:
        case: that was not measured.
        reason: why.
        is_quick: whether it is a smoke run.
    """
    print(f"left out: {case}: {reason}", file=sys.stderr)
    return Row(case, f"left out: {reason}", 1, "", target="" if is_quick else "= 0", ok=None if is_quick else False)


def publish(title: str, rows: Sequence[Row], target_file: Path | None, device: dict[str, Any] | None = None) -> bool:
    """Print the rows as a table and write them as JSON; return whether every target is met.

    Args:
        title: of the table.
        rows: the figures.
        target_file: file for the JSON, None for none.
        device: measured beside the processor of this machine.
    """
    table = Table(title=title)
    for column in ("case", "metric", "value", "unit", "baseline", "ratio", "target", "ok"):
        table.add_column(column, justify="right" if column in {"value", "baseline", "ratio"} else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in asdict(row).values()))
    Console(width=140).print(table)
    if target_file is not None:
        machine = _machine() | ({"device": device} if device else {})
        document = {"rows": [asdict(row) for row in rows], "machine": machine, "commit": commit()}
        target_file.parent.mkdir(parents=True, exist_ok=True)
        target_file.write_text(json.dumps(document, indent=1) + "\n")
    return all(row.ok is not False for row in rows)


def is_sound(rows: Sequence[Row]) -> bool:
    """Return whether every target is met but those of time, which a smoke run on a busy machine may miss."""
    return all(row.ok is not False for row in rows if row.unit not in _TIMES)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _machine() -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "python": sys.version.split()[0], "system": platform.platform()}


def commit() -> str:
    """Return the commit that is measured; where a copy of the tree has no history, what KVCM_COMMIT says."""
    if "KVCM_COMMIT" in os.environ or shutil.which("git") is None:
        return os.environ.get("KVCM_COMMIT", "unknown")
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
