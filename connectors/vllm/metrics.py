"""The connector's counters, as vLLM logs them and shows them to Prometheus (`vllm:kvcm_...`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connectors.reuse.statistics import BUCKETS_SECONDS, COUNTERS, TIMES, Snapshot, merged

__all__ = ["KvcmPromMetrics", "KvcmStats"]

_PREFIX = "vllm:kvcm_"


@dataclass
class KvcmStats(KVConnectorStats):
    """What was counted in one interval, over all ranks and the scheduler; `data` is a snapshot of `ReuseStatistics`."""

    data: Snapshot = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvcmStats:
        """Add what others have counted."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM writes to its log: counters, and mean times in ms."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                reduced[name.replace("_seconds", "_ms_mean")] = round(1000 * value[-1] / sum(value[:-1]), 3)
            else:
                reduced[name] = value
        return reduced

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        return not self.data


class KvcmPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters, histograms = metric_types[Counter], metric_types[Histogram]
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            self._enter(name, counters(name=_PREFIX + name, documentation=text + ".", labelnames=labelnames))
        for name, text in TIMES.items():
            metric = histograms(
                name=_PREFIX + name, documentation=text + ".", buckets=BUCKETS_SECONDS, labelnames=labelnames
            )
            self._enter(name, metric)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted in an interval."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if isinstance(value, list):
                _add_samples(metric, value)
            else:
                metric.inc(value)

    def _enter(self, name: str, metric: Any) -> None:
        self._metrics[name] = {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}


def _add_samples(histogram: Any, value: list[float]) -> None:
    """Add samples that are known by bucket and sum: each as the mean of all, or what of its bucket is next to it."""
    count = sum(value[:-1])
    if not count:
        return
    mean = value[-1] / count
    for bucket, samples in enumerate(value[:-1]):
        low = BUCKETS_SECONDS[bucket - 1] if bucket else 0.0
        high = BUCKETS_SECONDS[bucket] if bucket < len(BUCKETS_SECONDS) else max(mean, low * 1.01)
        for _ in range(int(samples)):
            histogram.observe(min(max(mean, low * 1.000001), high))
