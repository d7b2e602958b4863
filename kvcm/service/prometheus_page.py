"""`GET /metrics`: everything that is counted, for Prometheus and what reads its formats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import Metric as Family

from kvcm.service.call_metrics import CallMetrics
from kvcm.service.http_pages import Page, PageRequest
from kvcm.service.prometheus_counts import Counts
from kvcm.service.prometheus_state import ManagerState, StateMetrics
from kvcm.service.prometheus_text import FamilyTable, written
from kvcm.telemetry.metrics_values import Reading

__all__ = ["MetricsPage"]

_SLICE_READINGS: Final = 32

Source = Callable[[], Iterable[Reading]]


class MetricsPage:
    """Answers scrapes, one at a time: another one in between waits for its turn.

    Args:
        calls: of what is counted of calls.
        counts: what is counted beside calls.
        state: what there is to look at.
        others: what else there is to read.
    """

    def __init__(self, calls: CallMetrics, counts: Counts, state: ManagerState, others: Sequence[Source] = ()) -> None:
        self._state = StateMetrics(state, counts.groups)
        self._registry, self._counts = state.registry, counts
        self._sources: tuple[Source, ...] = (calls.readings, *others, counts.readings, self._state.readings)
        self._turn = asyncio.Lock()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    async def __call__(self, request: PageRequest) -> Page:
        """Answer a scrape."""
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        async with self._turn:
            for group in self._registry.groups.all():
                self._counts.cache.declare(group.name)
            await self._state.look()
            body, content_type = await written(await self._families(), accept)
        return Page(200, body, ((b"content-type", content_type.encode("latin-1")),))

    async def _families(self) -> Iterator[Family]:
        table = FamilyTable()
        for source in self._sources:
            for number, reading in enumerate(source()):
                table.add(reading)
                if number % _SLICE_READINGS == 0:
                    await asyncio.sleep(0)
        # Of the system, which is asked through files.
        return chain(table.taken(), await asyncio.to_thread(lambda: list(self._process.collect())))
