"""Every metric of `GET /metrics`: its name, what it counts, its labels. `docs/metrics.md` shows the same table.

Base units, `_total` for counters, histograms for durations. No label holds a key, a token, a client or an instance.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

__all__ = ["METRICS", "Kind", "Metric"]


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
RPC_REJECTED: Final = _counter("rpc_rejected", "Requests turned away before any work.", "reason")

AUTH: Final = _counter("auth", "Credentials that were looked at, by what became of them.", "outcome")
AUTHZ_DENIED: Final = _counter(
    "authz_denied", "Requests of known principals that they may not make, by what they wanted to do.", "action"
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
STORE_DROPPED: Final = _counter("store_dropped", "Reads of blocks that were not recorded, the backlog being full.")

GROUP_USED: Final = _gauge(
    "group_used_bytes",
    "Bytes that a group uses: on each kind of storage, and in total (tier `total`).",
    "group",
    "tier",
)
GROUP_QUOTA: Final = _gauge(
    "group_quota_bytes", "What it may use: on kinds of storages that have a quota, and in total.", "group", "tier"
)
PINNED: Final = _gauge(
    "pinned_bytes", "Bytes kept from eviction by pins; where they overlap each counts.", "group", "kind"
)
WRITES_REFUSED: Final = _counter("writes_refused", "Writes refused for want of room, wholly or partly.", "group")
EVICTED_KEYS: Final = _counter("evicted_keys", "Blocks evicted.", "group", "policy", "reason")
EVICTED_BYTES: Final = _counter("evicted_bytes", "Bytes evicted.", "group", "policy", "reason")
EVICTION_AGE: Final = _histogram(
    "eviction_age_seconds", "From the last read of a block, or its write, to its eviction; some of each batch."
)
EVICT_REUSE_GAP: Final = _histogram(
    "evict_reuse_gap_seconds",
    "From the eviction of a block to a prefix match that ends in front of it; of one block in 8, the latest ones.",
)
RECLAIM_ROUND: Final = _histogram("reclaim_round_seconds", "Looks for what is to be evicted, with its marking.")
RECLAIM_UNMET: Final = _gauge(
    "reclaim_unmet_need",
    "What the last look could not bring below its mark: bytes, or blocks for reason `keys`.",
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
    "orphans", "Found without use: blocks without their prefix or bytes, bytes without a block.", "kind"
)
CHECKSUM_MISMATCH: Final = _counter(
    "checksum_mismatch", "Blocks whose bytes did not match their checksum.", "group", "backend"
)

LEADER: Final = _gauge("leader", "1 while this manager runs the background duties, else 0.")
LEADER_TRANSITIONS: Final = _counter("leader_transitions", "Times that this manager began to lead.")
LEASE_REMAINING: Final = _gauge(
    "lease_remaining_seconds", "Until this manager's term ends unless renewed; 0 if it does not lead."
)

LOOP_LAG: Final = _histogram("loop_lag_seconds", "How late the event loop wakes what is due.")
BUILD_INFO: Final = _gauge("build_info", "Always 1.", "version", "python")

METRICS: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""In the order of the document."""
