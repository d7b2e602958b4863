"""Data of the whole deployment that several pages show: history, charts, usage, alerts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from kvcm.console import formats
from kvcm.console.charts import Line, Values
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Visit

__all__ = [
    "SMALL_VALUES",
    "Chart",
    "History",
    "alerts_of",
    "charts_of_all",
    "charts_of_group",
    "group_usages",
    "history_of",
]

_MIN_VALUES: Final = 60
SMALL_VALUES: Final = 90
"""Of a small line: a quarter of an hour."""
_MAX_AGE_VALUES: Final = 3  # intervals after which the latest value is too old
_MAX_GROUPS: Final = 5
_METHODS: Final = {"match": "look up", "start": "begin write", "finish": "end write", "other": "other"}


class Chart(NamedTuple):
    """Lines over time.

    Attributes:
        title: their subject, with the unit.
        lines: with their names.
        shown: formats a value.
        base: 1024 for bytes.
    """

    title: str
    lines: Sequence[Line]
    shown: Callable[[float], str]
    base: int = 1000


class History:
    """A document of `/v1/history`.

    Args:
        document: as answered.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.interval_seconds: int = document["interval_seconds"]
        self.until_ms: int = document["until_ms"]
        series = {(each["name"], *each["labels"].values()): each["values"] for each in document["series"]}
        begin = _first_known(series.values())
        self._series: Mapping[tuple[str, ...], Values] = {name: values[begin:] for name, values in series.items()}

    def tail(self, name: str, *labels: str) -> Values:
        """Return the last values of a series, for a small line."""
        return self.values(name, *labels)[-SMALL_VALUES:]

    def values(self, name: str, *labels: str) -> Values:
        """Return the values of a series by its name and the values of its labels; none if it is unknown."""
        return self._series.get((name, *labels), ())

    def latest(self, name: str, *labels: str) -> float | None:
        """Return the latest known value, if it is not too old."""
        known = [value for value in self.values(name, *labels)[-_MAX_AGE_VALUES:] if value is not None]
        return known[-1] if known else None

    def mean(self, name: str, *labels: str, seconds: float = 300.0) -> float | None:
        """Return the mean of the known values of the last seconds."""
        most = max(1, round(seconds / self.interval_seconds))
        known = [value for value in self.values(name, *labels)[-most:] if value is not None]
        return sum(known) / len(known) if known else None

    def amount(self, name: str, *labels: str, seconds: float = 300.0) -> float:
        """Return the sum of a rate over the last seconds, from its known values."""
        most = max(1, round(seconds / self.interval_seconds))
        known = [value for value in self.values(name, *labels)[-most:] if value is not None]
        return sum(known) * self.interval_seconds

    def total(self, name: str) -> Values:
        """Return the sum over all series of a name."""
        found = [values for (other, *_), values in self._series.items() if other == name]
        return [_sum(column) for column in zip(*found, strict=True)]

    def labels(self, name: str) -> Iterator[tuple[str, ...]]:
        """Yield the values of the labels of all series of a name."""
        return (tuple(labels) for other, *labels in self._series if other == name)


def _first_known(series: Collection[Values]) -> int:
    """Return the index of the first values to show: a manager that has just started knows few."""
    count = max((len(values) for values in series), default=0)
    known = (place for place in range(count) if any(values[place] is not None for values in series))
    return max(0, min(next(known, 0), count - _MIN_VALUES))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _busiest(history: History) -> list[str]:
    """Return the names of the groups with the most lookups."""

    def keys(name: str) -> float:
        return sum(history.mean("lookup_keys_per_second", name, result) or 0.0 for result in ("hit", "miss"))

    found = sorted(
        (labels[0] for labels in history.labels("hit_ratio") if labels), key=lambda name: (-keys(name), name)
    )
    return [name for name in found if keys(name)][:_MAX_GROUPS]


def charts_of_all(history: History) -> list[Chart]:
    """Return the charts of the whole deployment."""
    requests = [(shown, history.values("requests_per_second", name)) for name, shown in _METHODS.items()]
    ratios = [("all groups", history.values("hit_ratio"))]
    ratios += [(name, history.values("hit_ratio", name)) for name in _busiest(history)]
    latency = [(f"p{share}", history.values(f"match_p{share}_seconds")) for share in (50, 99)]
    return [
        Chart("Requests of engines per second", requests, formats.rate),
        Chart("Hit rate: keys found of those asked for", ratios, formats.percent),
        Chart("Time of look-ups", latency, formats.duration),
        Chart("Evicted per second", [("bytes", history.total("evicted_bytes_per_second"))], _bytes_rate, 1024),
        Chart(
            "Trouble per second",
            [
                ("refused writes", history.total("refused_writes_per_second")),
                ("errors", history.values("errors_per_second")),
            ],
            formats.rate,
        ),
    ]


def charts_of_group(history: History, group: str) -> list[Chart]:
    """Return the charts of one group."""
    used = [(f"used on {tier}", history.values("used_bytes", group, tier)) for tier in _tiers(history, group)]
    keys = [
        (shown, history.values("lookup_keys_per_second", group, result))
        for result, shown in (("hit", "found"), ("miss", "not found"))
    ]
    return [
        Chart("Used and allowed", [*used, ("quota", history.values("quota_bytes", group))], formats.size, 1024),
        Chart(
            "Hit rate: keys found of those asked for", [(group, history.values("hit_ratio", group))], formats.percent
        ),
        Chart("Keys asked for per second", keys, formats.rate),
        Chart("Evicted per second", [("bytes", history.values("evicted_bytes_per_second", group))], _bytes_rate, 1024),
        Chart(
            "Refused writes per second", [("writes", history.values("refused_writes_per_second", group))], formats.rate
        ),
    ]


def _tiers(history: History, group: str) -> list[str]:
    return sorted(labels[1] for labels in history.labels("used_bytes") if labels[0] == group)


def _bytes_rate(value: float) -> str:
    return f"{formats.size(value)}/s"


# Usage, alerts and history of all groups, or of those that the visitor may see.

_NO_GROUP: Final = (400, 404)


def _visible_groups(visit: Visit) -> Sequence[str] | None:
    """Return the groups that the visitor may see, None for all."""
    principal = visit.visitor.principal
    return None if principal.has_all_groups else sorted(principal.groups)


async def group_usages(visit: Visit) -> list[Any]:
    """Return the usage of groups, as of `/v1/usage`.

    Raises:
        RefusedError: the visitor lacks the permission.
    """
    names = _visible_groups(visit)
    if names is None:
        found: list[Any] = (await visit.get("/v1/usage"))["groups"]
        return found
    return [group for report in await _of_each(visit, "/v1/usage", names) for group in report["groups"]]


async def alerts_of(visit: Visit, group: str = "") -> list[Any]:
    """Return the alerts, the worst first: of one group, or of all that the visitor may see.

    Raises:
        RefusedError: the visitor lacks the permission.
    """
    names = [group] if group else _visible_groups(visit)
    if names is None:
        found: list[Any] = (await visit.get("/v1/alerts"))["items"]
        return found
    answers = await _of_each(visit, "/v1/alerts", names)
    alerts = {json.dumps([alert["name"], alert["subject"]]): alert for answer in answers for alert in answer["items"]}
    return [*alerts.values()]


async def _of_each(visit: Visit, path: str, groups: Sequence[str]) -> list[Any]:
    """Return the answers of a resource for each group that exists: keys may name groups that are gone."""

    async def of(name: str) -> list[Any]:
        try:
            return [await visit.get(f"{path}?" + urlencode({"group": name}))]
        except RefusedError as error:
            if error.status in _NO_GROUP:
                return []
            raise

    return [found for each in await asyncio.gather(*map(of, groups)) for found in each]


async def history_of(visit: Visit, seconds: int = 3600, group: str = "") -> History:
    """Return the history of the last seconds.

    Raises:
        RefusedError: the visitor lacks the permission.
    """
    asked = {"seconds": seconds, **({"group": group} if group else {})}
    return History(await visit.get("/v1/history?" + urlencode(asked)))
