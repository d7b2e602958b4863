"""The table of metrics, and the counters behind them: histograms, bounded labels, measures of calls and series of
GetMetrics (wire.md 10.1).

All of them belong to the event loop's thread, and none takes a lock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from enum import Enum
from itertools import accumulate
from types import TracebackType
from typing import Final, NamedTuple

__all__ = [
    "AGES",
    "CALL_MEASURES",
    "DURATIONS",
    "KEYS",
    "METRICS",
    "OTHER",
    "ApiMetrics",
    "BoundedLabels",
    "Distribution",
    "Histogram",
    "Kind",
    "Measures",
    "Metric",
    "Reading",
    "Series",
    "Tags",
    "close_measures",
    "current_measures",
    "measure",
    "measure_all",
    "open_measures",
    "timed",
]

# Every metric of `GET /metrics`, with its labels. `docs/metrics.md` shows the same table.
#
# Base units, `_total` for counters, histograms for durations. No label holds a key, a token, a client or an instance.


class Kind(Enum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: as scraped; counters end in `_total`.
        kind: its type.
        about: one sentence.
        labels: their names.
    """

    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()


def _counter(name: str, about: str, *labels: str) -> Metric:
    return Metric(f"kvcm_{name}_total", Kind.COUNTER, about, labels)


def _gauge(name: str, about: str, *labels: str) -> Metric:
    return Metric(f"kvcm_{name}", Kind.GAUGE, about, labels)


def _histogram(name: str, about: str, *labels: str) -> Metric:
    return Metric(f"kvcm_{name}", Kind.HISTOGRAM, about, labels)


RPC_REQUESTS: Final = _counter(
    "rpc_requests",
    "Requests answered, by call and code of the answer; CANCELLED where the client went away.",
    "method",
    "code",
)
RPC_DURATION: Final = _histogram("rpc_duration_seconds", "From the parsed request to its answer.", "method")
RPC_INFLIGHT: Final = _gauge("rpc_inflight", "Requests that are being worked on.")
RPC_REQUEST_KEYS: Final = _histogram(
    "rpc_request_keys", "Block keys per request; requests that give token ids instead are left out.", "method"
)
RPC_REJECTED: Final = _counter("rpc_rejected", "Requests rejected before any work.", "reason")
AUTH: Final = _counter("auth", "Checked credentials, by outcome.", "outcome")
AUTHZ_DENIED: Final = _counter(
    "authz_denied", "Requests of authenticated principals without the permission, by action.", "action"
)
CERTIFICATE_EXPIRY: Final = _gauge(
    "certificate_expiry_seconds",
    "When the certificate of the ports ends (`server`), or the first authority of clients (`client_ca`), in unix "
    "seconds; 0 while there is none.",
    "file",
)
LOOKUP_KEYS: Final = _counter(
    "lookup_keys",
    "Block keys asked for: handed out (hit), not (miss), left out by the request's mask (filtered), "
    "or in a lookup that failed (error). Peeks do not count.",
    "group",
    "result",
)
LOOKUP_TOKENS: Final = _counter(
    "lookup_tokens", "The same in tokens, where the block size is known.", "group", "result"
)
LOOKUP_PREFIX_BLOCKS: Final = _histogram("lookup_prefix_blocks", "Blocks that a prefix match found.", "group")
REVISIT_INTERVAL: Final = _histogram(
    "revisit_interval_seconds", "From one read of a block to the next, of one block in 64.", "group"
)
LOOKUP_MODE: Final = _counter("lookup_mode", "Lookups by match mode.", "mode")
WRITE_SESSIONS: Final = _counter(
    "write_sessions", "Write sessions ended: with all blocks, some, none, or by their deadline.", "outcome"
)
WRITE_SESSIONS_OPEN: Final = _gauge("write_sessions_open", "Write sessions that this manager opened and that are open.")
WRITE_SESSION_SECONDS: Final = _histogram(
    "write_session_seconds", "From the start of a session to its end, for those started and ended by this manager."
)
WRITE_MASKED_KEYS: Final = _counter("write_masked_keys", "Keys of writes that were there, or being written, already.")
INDEX_KEYS: Final = _gauge("index_keys", "Blocks in the indexes, in any status.", "group")
INDEX_BYTES: Final = _gauge("index_bytes", "Bytes of all locations in the indexes, in any status.")
INDEX_LOCK_WAIT: Final = _histogram(
    "index_lock_wait_seconds", "Waits for the lock shards of one sub-batch; only a shared store needs locks.", "op"
)
STORE_OP: Final = _histogram(
    "store_op_duration_seconds", "Operations of the metadata store, failed ones included.", "backend", "op"
)
STORE_BACKLOG: Final = _gauge("store_backlog_items", "Reads of blocks that wait to be written to the metadata store.")
STORE_LOST: Final = _gauge(
    "store_lost_items",
    "What repairs of damaged metadata found to be gone or doubtful: blocks, documents, changes; and verifications of "
    "storages: blocks_without_bytes.",
    "what",
)
STORE_DROPPED: Final = _counter("store_dropped", "Reads of blocks that were not recorded, the backlog being full.")
STORE_UNSOUND: Final = _gauge(
    "store_unsound",
    "1 while a shared metadata store is not to be used: `closed` (it has another registry), `evicts` (it drops keys).",
    "reason",
)
BLOCK_STORE_USABLE: Final = _gauge(
    "block_store_usable",
    "1 while the manager uses a metadata store that keeps blocks, 0 while it does not; `registry` is the one of the "
    "registry.",
    "store",
)
MISPLACED_INSTANCES: Final = _gauge(
    "misplaced_instances", "Instances whose blocks are to be moved to another metadata store."
)
STORE_RESTORATIONS: Final = _counter(
    "store_restorations", "Times that this manager put the registry back into a shared store that had lost it."
)
STORE_LOSSES: Final = _counter("store_losses", "Times that managers saw that the store had lost changes.")
STORE_NEW_SERVERS: Final = _counter(
    "store_new_servers",
    "Times that a server answered as a master of a shared store that this manager did not know as one.",
)
STORE_EVICTED: Final = _counter("store_evicted_keys", "Keys that a shared store dropped by itself.")
GROUP_USED: Final = _gauge(
    "group_used_bytes",
    "Bytes that a group uses: on each kind of storage, and in total (tier `total`).",
    "group",
    "tier",
)
GROUP_QUOTA: Final = _gauge(
    "group_quota_bytes", "Quota of a group: on kinds of storages that have a quota, and in total.", "group", "tier"
)
PINNED: Final = _gauge(
    "pinned_bytes", "Bytes kept from eviction by pins; where they overlap each counts.", "group", "kind"
)
WRITES_REFUSED: Final = _counter("writes_refused", "Writes refused for want of space, wholly or partly.", "group")
EVICTED_KEYS: Final = _counter("evicted_keys", "Blocks evicted.", "group", "policy", "reason")
EVICTED_BYTES: Final = _counter("evicted_bytes", "Bytes evicted.", "group", "policy", "reason")
EVICTION_AGE: Final = _histogram(
    "eviction_age_seconds", "From the last read of a block, or its write, to its eviction; some of each batch."
)
EVICT_REUSE_GAP: Final = _histogram(
    "evict_reuse_gap_seconds",
    "From the eviction of a block to a prefix match that ends in front of it; of one block in 8, the latest ones.",
)
RECLAIM_ROUND: Final = _histogram(
    "reclaim_round_seconds", "Rounds of eviction: the choice of victims, with their marking."
)
RECLAIM_UNMET: Final = _gauge(
    "reclaim_unmet_need",
    "Excess that the last round could not evict: bytes, or blocks for reason `keys`.",
    "reason",
)
RECLAIM_PENDING: Final = _gauge(
    "reclaim_pending_deletes", "Locations that wait for their deletion or are being deleted.", "backend"
)
OPTIMIZER_ATTAINABLE: Final = _gauge(
    "optimizer_attainable_ratio",
    "Part of the blocks asked for that an unlimited cache would have found, estimated of a sample; halved every hour.",
    "group",
)
OPTIMIZER_BYTES_NEEDED: Final = _gauge(
    "optimizer_bytes_needed",
    "Bytes that give this part of those hits under lru or leaf_lru, estimated in the same way.",
    "group",
    "attainable",
)
BACKEND_UP: Final = _gauge("backend_up", "1 while probes find the storage usable for this manager, else 0.", "backend")
BACKEND_FULL: Final = _gauge(
    "backend_full", "1 while the medium of a storage has no space, or too little, for this manager, else 0.", "backend"
)
BACKEND_PROBE: Final = _histogram("backend_probe_seconds", "Probes of storages, late ones included.", "backend")
BACKEND_USED: Final = _gauge("backend_used_bytes", "Bytes of all groups on a storage.", "backend")
BACKEND_CAPACITY: Final = _gauge(
    "backend_capacity_bytes",
    "Limit of a storage, else the size of its medium; absent while neither is known.",
    "backend",
)
DELETE_FAILURES: Final = _counter(
    "delete_failures", "Locations that a storage did not delete when it was asked.", "backend"
)
ORPHANS: Final = _counter(
    "orphans", "Garbage found: blocks without their prefix or bytes, bytes without a block.", "kind"
)
CHECKSUM_MISMATCH: Final = _counter(
    "checksum_mismatch", "Blocks whose bytes did not match their checksum.", "group", "backend"
)
LEADER: Final = _gauge("leader", "1 while this manager runs the background duties, else 0.")
LEADER_TRANSITIONS: Final = _counter("leader_transitions", "Times that this manager began to lead.")
LEASE_REMAINING: Final = _gauge(
    "lease_remaining_seconds", "Until this manager's term ends unless renewed; 0 if it does not lead."
)
LOOP_LAG: Final = _histogram("loop_lag_seconds", "How late the event loop runs callbacks that are due.")
BUILD_INFO: Final = _gauge("build_info", "Always 1.", "version", "python")
RESIDENCY_REPORTS: Final = _counter(
    "residency_reports",
    "Reports of what engines hold, by outcome: applied, or repeated and therefore ignored.",
    "outcome",
)
RESIDENCY_CHANGES: Final = _counter(
    "residency_changes",
    "Block keys in reports, by what became of them: added, removed, or dropped since there was no room.",
    "change",
)
RESIDENCY_CLEARED: Final = _counter("residency_cleared", "Media of engines that were reported as cleared.")
RESIDENCY_SNAPSHOTS: Final = _counter("residency_snapshots", "Snapshots of reporters that were completed.")
RESIDENCY_GAPS: Final = _counter("residency_gaps", "Gaps in the sequence numbers of reports.")
RESIDENCY_EXPIRED: Final = _counter("residency_expired", "Times that a reporter sent nothing for too long.")
RESIDENCY_REPORTERS: Final = _gauge(
    "residency_reporters", "Reporters of engines' memory, by state: complete, partial or quiet.", "state"
)
RESIDENCY_BLOCKS: Final = _gauge("residency_blocks", "Blocks that lie in the memory of at least one engine.")
RESIDENCY_MEMORY: Final = _gauge("residency_memory_bytes", "Memory of the manager that knowing these blocks takes.")
RESIDENCY_MAX_MEMORY: Final = _gauge("residency_max_bytes", "The most that it may take.")
STORAGE_EVENTS: Final = _counter(
    "storage_events",
    "Blocks of storages that came to be readable (stored) or ceased to be (removed), as published.",
    "change",
)
STORAGE_EVENT_BLOCKS: Final = _gauge("storage_event_blocks", "Blocks of storages that listeners of events know.")
STORAGE_EVENT_MEMORY: Final = _gauge("storage_event_memory_bytes", "Memory of the manager that knowing these takes.")
STORAGE_EVENTS_INCOMPLETE: Final = _gauge(
    "storage_events_incomplete", "Instances whose blocks are all compared once more: their events may lag."
)
METRICS: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""In the order of the document."""

# Values between two scrapes: plain numbers of the event loop's thread.
#
# A request updates several of them, so they are as cheap as numbers: a histogram of prometheus-client takes some ten
# times as long per value, for locks that one thread does not need. That library formats them for a scrape
# (`kvcm/service/metrics_page.py`).

DURATIONS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Seconds. From 100 µs, the duration of most calls; clients do not wait for more than 5 s."""
KEYS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)
"""Blocks of a request or a prefix; 128 is where the objective of latency ends."""
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)
"""Seconds that blocks live: from a second to a week."""
OTHER = "other"
"""The label of every name beyond the bound."""


class Distribution(NamedTuple):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds, ascending, without infinity.
        counts: values up to each bound and all of them: cumulative, one entry more than bounds.
        total: sum of the values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


class Histogram:
    """Counts values by size.

    Args:
        bounds: upper bounds of the buckets, inclusive, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = DURATIONS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of the buckets."""
        return tuple(self._bounds)

    @property
    def counts(self) -> tuple[int, ...]:
        """Values in each bucket so far, and those beyond all bounds."""
        return tuple(self._counts)

    def read(self) -> Distribution:
        """Return the histogram at this moment."""
        return Distribution(self._bounds, tuple(accumulate(self._counts)), self._total)


class Reading(NamedTuple):
    """One series at one moment; labels are in the order of the metric's."""

    metric: Metric
    value: float | Distribution
    labels: tuple[str, ...] = ()


class BoundedLabels:
    """Names that become labels: the first ones, and `OTHER` for all later ones, so that clients cannot grow the table
    without bound.

    Args:
        most: how many names become labels.
    """

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._names: set[str] = set()

    def retain(self, names: Container[str]) -> None:
        """Forget all other names, so that new ones can become labels."""
        self._names = {name for name in self._names if name in names}

    def label(self, name: str) -> str:
        """Return the name, or `OTHER` if there are too many."""
        if name not in self._names:
            if len(self._names) >= self._most:
                return OTHER
            self._names.add(name)
        return name


# Measures of one call: how much of what it did, and how long that took, under the names of GetMetrics (wire.md 10.1).
#
# A call opens its measures; functions below it add to them. Outside of a call, in background work, nothing is measured,
# and adding costs one read of a context variable.

Measures = dict[str, float]
"""Amounts by name; times in µs. Others are 0."""

CALL_MEASURES = (
    "service.request_queue_size",
    "manager.request_key_count",
    "manager.prefix_match_len",
    "manager.prefix_match_time_us",
    "manager.lock_write_location_retry_times",
    "manager.write_cache_io_cost_us",
    "manager.filter_write_cache_time_us",
    "manager.gen_write_location_us",
    "manager.put_write_location_manager_us",
    "manager.batch_get_location_time_us",
    "manager.batch_add_location_time_us",
    "manager.batch_update_location_time_us",
    "meta_searcher.indexer_get_time_us",
    "meta_searcher.indexer_read_modify_write_time_us",
    "meta_searcher.index_serialize_time_us",
    "meta_searcher.index_deserialize_time_us",
    "meta_searcher.indexer_query_times",
    "meta_indexer.query_key_count",
    "meta_indexer.get_not_exist_key_count",
    "meta_indexer.query_batch_num",
    "meta_indexer.search_cache_hit_count",
    "meta_indexer.search_cache_miss_count",
    "meta_indexer.search_cache_hit_ratio",
    "meta_indexer.io_data_size",
    "meta_indexer.put_io_time_us",
    "meta_indexer.update_io_time_us",
    "meta_indexer.upsert_io_time_us",
    "meta_indexer.delete_io_time_us",
    "meta_indexer.get_io_time_us",
    "meta_indexer.read_modify_write_put_key_count",
    "meta_indexer.read_modify_write_update_key_count",
    "meta_indexer.read_modify_write_skip_key_count",
    "meta_indexer.read_modify_write_delete_key_count",
)
"""Gauges of the last call of an api; `docs/metrics.md` says what each is."""

_current: ContextVar[Measures | None] = ContextVar("measures_of_call", default=None)


# Without frames of our own: every call does all of these.
open_measures: Callable[[Measures], Token[Measures | None]] = _current.set
"""Lets work that begins from here on add to these."""
close_measures: Callable[[Token[Measures | None]], None] = _current.reset
"""Ends what `open_measures` began."""
current_measures: Callable[[], Measures | None] = _current.get
"""Returns the measures of the call that runs here, None where none does."""


def measure(name: str, amount: float) -> None:
    """Add to a measure of the call that runs here, if one does."""
    measures = _current.get()
    if measures is not None:
        measures[name] = measures.get(name, 0.0) + amount


def measure_all(amounts: Mapping[str, float]) -> None:
    """Add to several measures of the call that runs here, if one does."""
    measures = _current.get()
    if measures is not None:
        for name, amount in amounts.items():
            measures[name] = measures.get(name, 0.0) + amount


class timed:  # noqa: N801 - a context manager that reads as a verb; as a generator it would cost three times as much
    """Add the time that the block takes to measures of the call that runs here, if one does.

    Args:
        names: of the measures, in µs.
    """

    __slots__ = ("_begin", "_measures", "_names")

    def __init__(self, *names: str) -> None:
        self._names = names
        self._measures = _current.get()
        self._begin = 0

    def __enter__(self) -> None:
        if self._measures is not None:
            self._begin = time.perf_counter_ns()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        measures = self._measures
        if measures is not None:
            microseconds = (time.perf_counter_ns() - self._begin) / 1000
            for name in self._names:
                measures[name] = measures.get(name, 0.0) + microseconds


Tags = tuple[tuple[str, str], ...]

# Series of GetMetrics.

# Later instances share one series, so that a client cannot grow the table without bound.
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
        self._series: dict[tuple[str, ...], _ApiSeries] = {}  # by api and values of labels
        self._instances: set[str] = set()

    def declare(self, api_name: str, *, is_measured: bool = False) -> None:
        """Make the series of an api exist before its first call, with `is_measured` those of `CALL_MEASURES`, too."""
        series = self._series.get((api_name,)) or self._add((api_name,), {})
        if is_measured and series.measures is None:
            series.measures = {}

    def record(
        self,
        api_name: str,
        labels: Mapping[str, str],
        code: int,
        ok: bool,
        duration_us: float,
        measures: Measures | None = None,
    ) -> None:
        """Count one call.

        Args:
            api_name: name of the rpc.
            labels: `instance_group` and `instance_id` if the call names a registered instance, else empty.
            code: outcome code of the wire.
            ok: whether it succeeded.
            duration_us: microseconds from request to answer.
            measures: of the call; None where it has none.
        """
        if labels and labels["instance_id"] not in self._instances:
            labels = self._bounded(labels)
        key = (api_name, *labels.values())
        series = self._series.get(key) or self._add(key, labels)
        series.queries += 1
        series.errors += not ok
        series.last_us = duration_us
        series.last_code = code
        if measures is not None:
            series.measures = measures

    def _add(self, key: tuple[str, ...], labels: Mapping[str, str]) -> _ApiSeries:
        series = self._series[key] = _ApiSeries((("api_name", key[0]), *labels.items()))
        return series

    def _bounded(self, labels: Mapping[str, str]) -> Mapping[str, str]:
        """Return the labels of an instance that has no series yet."""
        if len(self._instances) >= _MAX_INSTANCES:
            return dict.fromkeys(labels, _OVERFLOW)
        self._instances.add(labels["instance_id"])
        return labels

    def series(self) -> Iterator[Series]:
        """Yield every series."""
        for api in self._series.values():
            tags = api.tags
            yield Series("service.query_counter", tags, api.queries)
            yield Series("service.error_counter", tags, api.errors)
            yield Series("service.query_rt_us", tags, float(api.last_us))
            yield Series("service.error_code", tags, float(api.last_code))
            if api.measures is not None:
                for name in CALL_MEASURES:
                    yield Series(name, tags, float(_last(api.measures, name)))


def _last(measures: Measures, name: str) -> float:
    if name != "meta_indexer.search_cache_hit_ratio":
        return measures.get(name, 0.0)
    hits = measures.get("meta_indexer.search_cache_hit_count", 0.0)
    asked = hits + measures.get("meta_indexer.search_cache_miss_count", 0.0)
    return 100.0 * hits / asked if asked else 0.0


class _ApiSeries:
    __slots__ = ("errors", "last_code", "last_us", "measures", "queries", "tags")

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self.measures: Measures | None = None
        self.queries = 0
        self.errors = 0
        self.last_us = 0.0
        self.last_code = 0
