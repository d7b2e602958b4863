"""Counters and gauges by (name, tags), as GetMetrics lists them (wire.md 10.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["ApiMetrics", "Series", "Tags"]

Tags = tuple[tuple[str, str], ...]

# More instances than this share one series, so that a client cannot grow the table without bound.
_MAX_INSTANCES = 1000
_OVERFLOW = "other"


class Series(NamedTuple):
    """One value: counters are int, gauges float."""

    name: str
    tags: Tags
    value: int | float


class ApiMetrics:
    """Calls, errors, last duration and last outcome per api, and per instance where the api has one."""

    def __init__(self) -> None:
        self._series: dict[Tags, _ApiSeries] = {}
        self._instances: set[str] = set()

    def declare(self, api_name: str) -> None:
        """Make the series of an api exist before its first call."""
        self._series.setdefault((("api_name", api_name),), _ApiSeries())

    def record(self, api_name: str, labels: Mapping[str, str], code: int, ok: bool, duration_us: float) -> None:
        """Count one call.

        Args:
            api_name: name of the rpc.
            labels: `instance_group` and `instance_id` where the call named a registered instance, else empty.
            code: outcome code of the wire.
            ok: whether it succeeded.
            duration_us: microseconds from request to answer.
        """
        tags: Tags = (("api_name", api_name), *self._bounded(labels).items())
        series = self._series.get(tags)
        if series is None:
            series = self._series[tags] = _ApiSeries()
        series.queries += 1
        series.errors += not ok
        series.last_us = duration_us
        series.last_code = code

    def _bounded(self, labels: Mapping[str, str]) -> Mapping[str, str]:
        instance_id = labels.get("instance_id")
        if instance_id is None or instance_id in self._instances:
            return labels
        if len(self._instances) >= _MAX_INSTANCES:
            return dict.fromkeys(labels, _OVERFLOW)
        self._instances.add(instance_id)
        return labels

    def series(self) -> Iterator[Series]:
        """Yield every series."""
        for tags, api in self._series.items():
            yield Series("service.query_counter", tags, api.queries)
            yield Series("service.error_counter", tags, api.errors)
            yield Series("service.query_rt_us", tags, float(api.last_us))
            yield Series("service.error_code", tags, float(api.last_code))


class _ApiSeries:
    __slots__ = ("errors", "last_code", "last_us", "queries")

    def __init__(self) -> None:
        self.queries = 0
        self.errors = 0
        self.last_us = 0.0
        self.last_code = 0
