"""Documents of `/v1/history`, `/v1/usage` and `/v1/alerts` as tests need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["alert", "group_usage", "history", "usage"]

MIB = 1 << 20


def history(series: Mapping[tuple[str, ...], Sequence[float | None]], interval_seconds: int = 10) -> dict[str, Any]:
    """Return a history with series by name and values of labels."""
    found = [_series(*names, values=[*values]) for names, values in series.items()]
    return {"interval_seconds": interval_seconds, "until_ms": 1_000_000, "series": found}


def _series(name: str, *labels: str, values: list[float | None]) -> dict[str, Any]:
    numbered = {str(number): label for number, label in enumerate(labels)}
    return {"name": name, "labels": numbered, "unit": "", "values": values}


def usage(used: int, capacity: int, high: int = -1, low: int = -1, deleting: int = 0) -> dict[str, int]:
    """Return one limit, in MiB."""
    amounts = {"used_bytes": used, "capacity_bytes": capacity, "high_mark_bytes": high, "low_mark_bytes": low}
    shown = {name: value * MIB if value > 0 else value for name, value in amounts.items()}
    return {**shown, "deleting_bytes": deleting * MIB}


def group_usage(name: str, total: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """Return what a group uses."""
    parts: dict[str, Any] = {"types": [], "storages": [], "instances": []}
    amounts = {"pinned_bytes": 0, "pin_budget_bytes": 0, "refused_writes": 0}
    return {"name": name, "total": total, **parts, **amounts, **more}


def alert(severity: str, kind: str, name: str) -> dict[str, Any]:
    """Return something that is wrong."""
    subject = {"kind": kind, "name": name}
    texts = {"summary": f"{name} is wrong.", "reason": f"Because of {severity}.", "advice": "Do something."}
    return {"name": "KvcmGroupFull", "severity": severity, "subject": subject, **texts, "since_ms": 1}
