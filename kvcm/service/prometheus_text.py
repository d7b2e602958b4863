"""Readings as text: Prometheus' own format or OpenMetrics, whichever the scraper asks for.

Written in slices, with room for requests between them: a thousand groups make tens of thousands of lines. Rejected: a
thread, which takes the interpreter from the event loop for 5 ms at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from kvcm.telemetry.metrics_catalog import METRICS, Kind, Metric
from kvcm.telemetry.metrics_values import Distribution, Reading

__all__ = ["FamilyTable", "written"]

_SLICE_SAMPLES: Final = 64  # a millisecond
_END: Final = b"# EOF\n"


class FamilyTable:
    """Families of prometheus-client, filled from readings; every metric is there, with or without series."""

    def __init__(self) -> None:
        self._families: dict[Metric, Any] = {metric: _family(metric) for metric in METRICS}

    def add(self, reading: Reading) -> None:
        """Add a series."""
        family, value = self._families[reading.metric], reading.value
        if isinstance(value, Distribution):
            buckets = list(zip(_shown(tuple(value.bounds)), value.counts, strict=True))
            family.add_metric(reading.labels, buckets, value.total)
        else:
            family.add_metric(reading.labels, value)

    def taken(self) -> Iterator[Family]:
        """Yield the families in the order of the catalogue, and let go of each: freeing all at once takes long."""
        for metric in list(self._families):
            yield self._families.pop(metric)


@cache
def _shown(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the label of each bucket; there are few kinds of histograms."""
    return (*map(floatToGoString, bounds), "+Inf")


def _family(metric: Metric) -> Family:
    arguments = (metric.name, metric.about)
    if metric.kind is Kind.COUNTER:
        return CounterMetricFamily(*arguments, labels=metric.labels)
    if metric.kind is Kind.GAUGE:
        return GaugeMetricFamily(*arguments, labels=metric.labels)
    return HistogramMetricFamily(*arguments, labels=metric.labels)


async def written(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Return the text of families and its content type.

    Args:
        families: what to write.
        accept: header of the request, "" for none.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is none
        encode, content_type = choose_encoder("")
    parts: list[bytes] = []
    is_open = False
    for family in families:
        for piece, is_first in _pieces(family):
            text: bytes = encode(_Only(piece))
            is_open = text.endswith(_END)
            parts.append(_body(text.removesuffix(_END), is_first=is_first))
            await asyncio.sleep(0)
    if is_open:
        parts.append(_END)
    return b"".join(parts), content_type


def _pieces(family: Family) -> Iterator[tuple[Family, bool]]:
    samples = family.samples
    for begin in range(0, max(1, len(samples)), _SLICE_SAMPLES):
        piece = Family(family.name, family.documentation, family.type, family.unit)
        piece.samples = samples[begin : begin + _SLICE_SAMPLES]
        yield piece, begin == 0


def _body(text: bytes, *, is_first: bool) -> bytes:
    """Leave out the lines of a family's name and type, but for its first piece."""
    while not is_first and text.startswith(b"# "):
        text = text.partition(b"\n")[2]
    return text


class _Only:
    """Stands for a registry of one family."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family
