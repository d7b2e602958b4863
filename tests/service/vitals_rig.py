"""Vitals of managers that nobody runs."""

from __future__ import annotations

from collections.abc import Mapping

from kvcm.model.nodes import METHODS, Endpoint, GroupTotals, Vitals

__all__ = ["BOUNDS", "vitals"]

BOUNDS = (0.001, 0.01)


def vitals(
    node_id: str = "m1",
    started_at: float = 0.0,
    at: float = 10.0,
    requests: int = 0,
    errors: int = 0,
    match_counts: tuple[int, ...] = (0, 0, 0),
    groups: Mapping[str, GroupTotals] | None = None,
    used_bytes: Mapping[str, Mapping[str, int]] | None = None,
    version: str = "1",
) -> Vitals:
    """Return vitals whose counters are these, of each method alike; who knows what is used, leads."""
    return Vitals(
        Endpoint(node_id, "h", 1, 2, 3, 4),
        version,
        started_at,
        at,
        "serving",
        used_bytes is not None,
        dict.fromkeys(METHODS, requests),
        dict.fromkeys(METHODS, errors),
        BOUNDS,
        match_counts,
        groups or {},
        used_bytes=used_bytes or {},
    )
