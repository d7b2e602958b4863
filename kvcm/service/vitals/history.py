"""What the deployment did and held, over the last day: two rings of samples, a fine one and a coarse one.

Bounds: 2,160 slots of 4 bytes per series, and as many groups as `_MOST_GROUPS`; the others are summed up. That is some
80 KiB per group, and 5 MiB at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from kvcm.model.vitals import Vitals
from kvcm.service.vitals.rates import Rates, rates_between
from kvcm.service.vitals.ring import Ring, Series
from kvcm.service.vitals.samples import sample_of
from kvcm.service.vitals.spans import HistorySpan, told
from kvcm.telemetry.metrics_values import BoundedNames

__all__ = ["LONGEST_SECONDS", "History"]

_MOST_GROUPS: Final = 64
_MOST_POINTS: Final = 360
_FINE: Final = (10, 720)  # seconds of a slot, and slots: two hours
_COARSE: Final = (60, 1440)  # a day
LONGEST_SECONDS: Final = _COARSE[0] * _COARSE[1]


class _Level:
    """Samples at one interval; rates are over that interval exactly."""

    def __init__(self, interval_seconds: int, size: int, since: float) -> None:
        self.interval_seconds = interval_seconds
        self.ring = Ring(size)
        self.rates: Mapping[str, Rates] = {}
        self._names = BoundedNames(_MOST_GROUPS)
        self._before: Mapping[str, Vitals] = {}
        self._since = since

    def note(self, now: float, vitals: Mapping[str, Vitals], quotas: Mapping[str, int]) -> None:
        slot = int(now // self.interval_seconds)
        if slot <= self.ring.latest:
            return
        found = {name: rates_between(self._before.get(name), each, self._since) for name, each in vitals.items()}
        self.rates = {name: rates for name, rates in found.items() if rates is not None}
        self._names.keep({value for series in self.ring for label, value in series.labels if label == "group"})
        self.ring.put(slot, sample_of([*self.rates.values()], vitals.values(), quotas, self._names.of))
        self._before, self._since = dict(vitals), now


class History:
    """Samples of the deployment.

    Args:
        since: unix seconds when this manager started; others that start later are heard from their beginning.
    """

    def __init__(self, since: float) -> None:
        self._levels = tuple(_Level(seconds, size, since) for seconds, size in (_FINE, _COARSE))

    def note(self, now: float, vitals: Mapping[str, Vitals], quotas: Mapping[str, int]) -> None:
        """Keep how managers are, if it is time for another sample.

        Args:
            now: unix seconds.
            vitals: of every manager that lives, by node id.
            quotas: bytes by group.
        """
        for level in self._levels:
            level.note(now, vitals, quotas)

    @property
    def rates(self) -> Mapping[str, Rates]:
        """Rates of the managers by node id, over the last interval; those of which none are known are missing."""
        return self._levels[0].rates

    async def span(
        self, now: float, seconds: int, group: str = "", groups: Collection[str] | None = None
    ) -> HistorySpan:
        """Return the last seconds, in 360 values at most. What is much is told by a thread.

        Args:
            now: unix seconds.
            seconds: how many, up to `LONGEST_SECONDS`.
            group: only what is of this group; empty for everything.
            groups: only what is of these groups; None for everything.
        """
        fine, coarse = self._levels
        level = fine if seconds <= fine.interval_seconds * fine.ring.size else coarse
        count = max(1, seconds // level.interval_seconds)
        step = -(-count // _MOST_POINTS)
        points = count // step
        until = max(level.ring.latest, int(now // level.interval_seconds) - 1)
        known = level.ring.read(until, points * step)
        wanted = {series: values for series, values in known.items() if _is_wanted(series, group, groups)}
        series = await asyncio.to_thread(told, wanted, step, has_total=not group and groups is None)
        return HistorySpan(level.interval_seconds * step, float(until * level.interval_seconds), series)


def _is_wanted(series: Series, group: str, groups: Collection[str] | None) -> bool:
    name = dict(series.labels).get("group")
    if group and name != group:
        return False
    return groups is None or name in groups
