"""What the first page says at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvcm.console import formats
from kvcm.console.charts import Values
from kvcm.console.views.groups import GroupCard
from kvcm.console.views.history import SMALL_VALUES, History

__all__ = ["Headline", "Tile", "headline", "tiles"]

Document = Mapping[str, Any]

_MOST_NAMED: Final = 3
_TROUBLE: Final = {
    "full": "is full",
    "refuses writes": "refuses writes",
    "no quota": "has no quota",
    "no storage": "can use no storage",
}


class Headline(NamedTuple):
    """How it is going, in one sentence; kind is good, warn or bad."""

    text: str
    kind: str


class Tile(NamedTuple):
    """One number, and how it went."""

    name: str
    value: str
    values: Values


def headline(groups: Sequence[GroupCard], alerts: Sequence[Document]) -> Headline:
    """Return what somebody who has one second should read."""
    full = [f"{group.name} {_TROUBLE.get(group.state, 'is in trouble')}" for group in groups if group.is_in_trouble]
    others = [alert for alert in alerts if alert["severity"] != "info" and alert["subject"]["kind"] != "group"]
    urgent = any(alert["severity"] == "page" for alert in others)
    said = []
    if full:
        more = [f"{len(full) - _MOST_NAMED} more groups are in trouble"] if len(full) > _MOST_NAMED else []
        said.append(f"Group {formats.listed([*full[:_MOST_NAMED], *more])}")
    if others:
        said.append(f"{len(others)} other {'thing needs' if len(others) == 1 else 'things need'} attention")
    if not said:
        near = sum(group.kind == "warn" for group in groups)
        if near:
            return Headline(
                f"{near} {'group is' if near == 1 else 'groups are'} short of room; nothing is refused.", "warn"
            )
        return Headline("Nothing is wrong.", "good")
    return Headline("; ".join(said) + ".", "bad" if full or urgent else "warn")


def tiles(history: History) -> list[Tile]:
    """Return what goes on in the whole deployment now."""
    requests = history.total("requests_per_second")
    refused = history.total("refused_writes_per_second")
    return [
        Tile("Requests", formats.rate(_last(requests)), requests[-SMALL_VALUES:]),
        Tile("Hit rate", formats.percent(history.latest("hit_ratio")), history.lately("hit_ratio")),
        Tile("Look-up, half within", *_latency(history, "match_p50_seconds")),
        Tile("Look-up, 99 % within", *_latency(history, "match_p99_seconds")),
        Tile("Refused writes", formats.rate(_last(refused)), refused[-SMALL_VALUES:]),
        Tile("Errors", formats.rate(history.latest("errors_per_second")), history.lately("errors_per_second")),
    ]


def _latency(history: History, name: str) -> tuple[str, Values]:
    return formats.duration(history.latest(name)), history.lately(name)


def _last(values: Values) -> float | None:
    return next((value for value in reversed(values[-3:]) if value is not None), None)
