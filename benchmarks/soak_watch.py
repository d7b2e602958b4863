"""Polls the manager of the soak once a second: a scrape as Prometheus makes it, and the memory of the process."""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from kvcm.telemetry import metrics as catalog

__all__ = ["Scrape", "Series", "Watch", "growth_per_second", "lag_quantile", "rss_bytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_TIMEOUT_SECONDS = 60.0
_CODES = (catalog.RPC_REQUESTS.name, catalog.RPC_REQUESTS.name.removesuffix("_total") + "_created")

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""


class Scrape(NamedTuple):
    """The observations of one moment.

    Attributes:
        at: monotonic seconds.
        rss_bytes: of the process.
        samples: by series.
        seconds: that the scrape took.
        size_bytes: of the scrape.
    """

    at: float
    rss_bytes: int
    samples: dict[Series, float]
    seconds: float
    size_bytes: int


@dataclass(slots=True)
class Watch:
    """Scrapes a manager.

    Attributes:
        pid: of the process.
        port: of its admin HTTP service.
        marker: in every name that clients make up; none may be in a label.
        scrapes: observations.
        wrong: scrapes that were not complete or not valid, in words.
    """

    pid: int
    port: int
    marker: str
    scrapes: list[Scrape] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Look once a second until cancelled."""
        due = time.monotonic()
        while True:
            await asyncio.to_thread(self.scrape)
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def scrape(self) -> None:
        """Look once: in OpenMetrics and in Prometheus' own format by turns."""
        wants_openmetrics = len(self.scrapes) % 2 == 0
        try:
            begin = time.monotonic()
            text = self._scraped(_OPENMETRICS if wants_openmetrics else "")
            seconds = time.monotonic() - begin
            parse = parse_openmetrics if wants_openmetrics else parser.text_string_to_metric_families
            samples = self._checked(list(parse(text)))
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
            self.wrong.append(f"scrape {len(self.scrapes)}: {error!r}")
            return
        self._compare(samples)
        self.scrapes.append(Scrape(begin, rss_bytes(self.pid), samples, seconds, len(text)))

    def _scraped(self, accept: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics", headers={"accept": accept} if accept else {})
            answer = connection.getresponse()
            body = answer.read().decode()
        finally:
            connection.close()
        assert answer.status == 200, f"status {answer.status}"
        return body

    def _checked(self, families: Iterable[Any]) -> dict[Series, float]:
        """Return the samples of a scrape that has every metric once."""
        listed = list(families)
        names = [family.name for family in listed]
        missing = {metric.name.removesuffix("_total") for metric in catalog.METRICS} - {
            name.removesuffix("_total") for name in names
        }
        assert not missing, f"without {sorted(missing)}"
        assert len(set(names)) == len(names), "a family twice"
        samples: dict[Series, float] = {}
        for sample in (sample for family in listed for sample in family.samples):
            series = sample.name, tuple(sorted(sample.labels.items()))
            assert series not in samples, f"{series} twice"
            assert not any(self.marker in value for _, value in series[1]), f"{series} names what a client made up"
            assert not math.isnan(sample.value), f"{series} is no number"
            samples[series] = sample.value
        return samples

    def _compare(self, samples: dict[Series, float]) -> None:
        """No series may go, and no counter may go down."""
        before = self.scrapes[-1].samples if self.scrapes else {}
        for series, value in before.items():
            now = samples.get(series)
            if now is None and not series[0].startswith(("process_", "python_")):
                self.wrong.append(f"scrape {len(self.scrapes)}: {series} is gone")
            elif now is not None and now < value and series[0].endswith(("_total", "_count", "_bucket")):
                self.wrong.append(f"scrape {len(self.scrapes)}: {series} went from {value} to {now}")

    def after(self, moment: float) -> list[Scrape]:
        """Return the observations from a moment on."""
        return [scrape for scrape in self.scrapes if scrape.at >= moment]

    def new_series(self, moment: float) -> list[Series]:
        """Return series that came after a moment, but for codes of answers that were given for the first time."""
        known = {series for scrape in self.scrapes if scrape.at < moment for series in scrape.samples}
        later = {series for scrape in self.after(moment) for series in scrape.samples}
        return sorted(series for series in later - known if series[0] not in _CODES)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def growth_per_second(scrapes: Sequence[Scrape]) -> float:
    """Return by how many bytes per second the memory grows: the slope of the line through the observations."""
    return statistics.linear_regression(
        [scrape.at for scrape in scrapes], [scrape.rss_bytes for scrape in scrapes]
    ).slope


def lag_quantile(before: Scrape, after: Scrape, share: float) -> float:
    """Return the upper bound, in seconds, of the bucket in which that share of wake-ups between two scrapes lies."""
    name = f"{catalog.LOOP_LAG.name}_bucket"

    def counts(scrape: Scrape) -> dict[float, float]:
        return {float(labels[0][1]): value for (found, labels), value in scrape.samples.items() if found == name}

    begin, end = counts(before), counts(after)
    total = end[math.inf] - begin[math.inf]
    return min(bound for bound in end if end[bound] - begin[bound] >= share * total)
