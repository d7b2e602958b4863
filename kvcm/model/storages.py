"""Storages: one configured storage system each, with a globally unique name and a type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "MIN_POOL_BYTES",
    "PAGE_BYTES",
    "DummyStorageSpec",
    "EventReportStorageSpec",
    "LocalStorageSpec",
    "MooncakeStorageSpec",
    "NfsStorageSpec",
    "PathStorageSpec",
    "StorageConfig",
    "StorageSpace",
    "StorageSpec",
    "StorageType",
    "TairMemPoolStorageSpec",
    "ThreeFSStorageSpec",
    "VcnsThreeFSStorageSpec",
    "chunk_bytes",
    "extent_bytes",
    "pool_bytes",
]


class StorageType(IntEnum):
    """Kinds of storage; numbers are those of the wire protocol."""

    ST_UNSPECIFIED = 0
    ST_3FS = 1
    ST_MOONCAKE = 2
    ST_TAIRMEMPOOL = 3
    ST_NFS = 4
    ST_VCNS_3FS = 5
    ST_DUMMY = 6
    ST_EVENT_REPORT_L1P5 = 7
    ST_EVENT_REPORT_L2 = 8
    ST_TAIRMEMPOOL_SSD = 9

    @property
    def is_event_report(self) -> bool:
        """Whether engines only report what lies there: no bytes are written to it."""
        return self in _EVENT_REPORTS

    @property
    def kind(self) -> str:
        """Name of the type in JSON documents (wire.md 4)."""
        return _KINDS[self]

    @property
    def scheme(self) -> str:
        """Scheme of the uris on storages of the type (wire.md 8)."""
        return self.kind.removeprefix("vcns_")

    @classmethod
    def of_kind(cls, kind: str) -> StorageType:
        """Return the type that JSON documents call `kind`.

        Raises:
            KeyError: no such kind.
        """
        return _TYPES[kind]


_KINDS = {
    StorageType.ST_UNSPECIFIED: "unspecified",
    StorageType.ST_3FS: "hf3fs",
    StorageType.ST_MOONCAKE: "mooncake",
    StorageType.ST_TAIRMEMPOOL: "pace",
    StorageType.ST_NFS: "file",
    StorageType.ST_VCNS_3FS: "vcns_hf3fs",
    StorageType.ST_DUMMY: "dummy",
    StorageType.ST_EVENT_REPORT_L1P5: "event_report_l1p5",
    StorageType.ST_EVENT_REPORT_L2: "event_report_l2",
    StorageType.ST_TAIRMEMPOOL_SSD: "pace_ssd",
}
_EVENT_REPORTS = frozenset({StorageType.ST_EVENT_REPORT_L1P5, StorageType.ST_EVENT_REPORT_L2})
_TYPES = {kind: storage_type for storage_type, kind in _KINDS.items()}


# Field names below are those of the wire messages, so that one generic translation serves all of them.


@dataclass(frozen=True, slots=True)
class LocalStorageSpec:
    """Placeholder of the protocol; no storage of this kind can be opened."""


@dataclass(frozen=True, slots=True)
class ThreeFSStorageSpec:
    """3FS through its FUSE mount."""

    cluster_name: str = ""
    mountpoint: str = ""
    root_dir: str = ""
    key_count_per_file: int = 1
    touch_file_when_create: bool = False

    @property
    def root(self) -> str:
        """Directory that everything of the storage lies below."""
        return _joined(self.mountpoint, self.root_dir)


@dataclass(frozen=True, slots=True)
class VcnsThreeFSStorageSpec:
    """3FS with a remote metadata service."""

    cluster_name: str = ""
    mountpoint: str = ""
    root_dir: str = ""
    key_count_per_file: int = 1
    touch_file_when_create: bool = False
    remote_host: str = ""
    remote_port: int = 0
    meta_storage_uri: str = ""

    @property
    def root(self) -> str:
        """Directory that everything of the storage lies below."""
        return _joined(self.mountpoint, self.root_dir)


@dataclass(frozen=True, slots=True)
class MooncakeStorageSpec:
    """A Mooncake store."""

    local_hostname: str = ""
    metadata_connstring: str = ""
    protocol: str = ""
    rdma_device: str = ""
    master_service_entry: str = ""


@dataclass(frozen=True, slots=True)
class TairMemPoolStorageSpec:
    """A pool of host memory: shared memory of one node where `node_id` is given."""

    domain: str = ""
    timeout: int = 0
    enable_vipserver: bool = False
    node_id: str = ""
    capacity_bytes: int = 0
    service_discovery_url: str = ""
    media_type: int = 0


@dataclass(frozen=True, slots=True)
class NfsStorageSpec:
    """A directory that all engines have mounted at the same path."""

    root_path: str = ""
    key_count_per_file: int = 1

    @property
    def root(self) -> str:
        """Directory that everything of the storage lies below."""
        return self.root_path


@dataclass(frozen=True, slots=True)
class DummyStorageSpec:
    """A storage that moves no bytes, for tests and benchmarks."""

    root_path: str = ""
    key_count_per_file: int = 1


@dataclass(frozen=True, slots=True)
class EventReportStorageSpec:
    """What engines report of blocks in their hosts' memory. Two types have such a spec (`StorageConfig.report_type`).

    Attributes:
        heartbeat_timeout_ms: a reporter without a heartbeat for so long is unavailable.
        cleanup_grace_ms: after so long more it is unregistered.
        liveness_check_interval_ms: between two looks at the heartbeats.
        snapshot_min_interval_ms: least time between two snapshots of a reporter.
        snapshot_delta_drain_timeout_ms: most time that a snapshot and changes wait for each other.
    """

    heartbeat_timeout_ms: int = 30_000
    cleanup_grace_ms: int = 300_000
    liveness_check_interval_ms: int = 5_000
    snapshot_min_interval_ms: int = 30_000
    snapshot_delta_drain_timeout_ms: int = 10_000


StorageSpec = (
    LocalStorageSpec
    | ThreeFSStorageSpec
    | VcnsThreeFSStorageSpec
    | MooncakeStorageSpec
    | TairMemPoolStorageSpec
    | NfsStorageSpec
    | DummyStorageSpec
    | EventReportStorageSpec
)
PathStorageSpec = NfsStorageSpec | ThreeFSStorageSpec | VcnsThreeFSStorageSpec
"""Storages whose objects are files: managers and engines find them below `root`, at the same path."""
_TYPE_OF_SPEC: dict[type[object], StorageType] = {
    LocalStorageSpec: StorageType.ST_UNSPECIFIED,
    ThreeFSStorageSpec: StorageType.ST_3FS,
    VcnsThreeFSStorageSpec: StorageType.ST_VCNS_3FS,
    MooncakeStorageSpec: StorageType.ST_MOONCAKE,
    TairMemPoolStorageSpec: StorageType.ST_TAIRMEMPOOL,
    NfsStorageSpec: StorageType.ST_NFS,
    DummyStorageSpec: StorageType.ST_DUMMY,
    EventReportStorageSpec: StorageType.ST_UNSPECIFIED,  # the config says which of the two
}


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """One storage as the operator configured it.

    Attributes:
        global_unique_name: unique over the deployment; the host of every uri on it.
        spec: what its type needs; decides the type, together with `report_type`.
        check_storage_available_when_open: for 3FS: check mount and root when opening.
        is_available: false while the operator has it disabled.
        capacity_bytes: bytes that all groups together may use on it, 0 for no limit.
        used_percentage: ratio of that above which reclaiming begins; 0 is `groups.DEFAULT_MARK`, above 1 is never.
        draining_since: unix seconds since when it is being emptied, 0 while it is not.
        removed_at: unix seconds when it was removed, 0 while it is there: only what lies on it is still to be
            forgotten, and only the registry sees it.
        report_type: type of an event report storage, unspecified for any other.
    """

    global_unique_name: str
    spec: StorageSpec
    check_storage_available_when_open: bool = False
    is_available: bool = True
    capacity_bytes: int = 0
    used_percentage: float = 0.0
    draining_since: float = 0.0
    removed_at: float = 0.0
    report_type: StorageType = StorageType.ST_UNSPECIFIED

    @property
    def is_event_report(self) -> bool:
        """Whether no bytes are written to it: it is never opened, probed, drained or evicted from."""
        return isinstance(self.spec, EventReportStorageSpec)

    @property
    def is_draining(self) -> bool:
        """Whether it is being emptied."""
        return self.draining_since > 0

    @property
    def is_removed(self) -> bool:
        """Whether it is there no more."""
        return self.removed_at > 0

    @property
    def storage_type(self) -> StorageType:
        """Type of the storage."""
        return self.report_type or _TYPE_OF_SPEC[type(self.spec)]

    @property
    def limit_bytes(self) -> int:
        """Bytes that all groups together may use: as configured, and no more than the medium is known to have; 0 for no
        limit."""
        if not isinstance(self.spec, TairMemPoolStorageSpec) or not self.spec.capacity_bytes:
            return self.capacity_bytes
        return min(self.capacity_bytes or self.spec.capacity_bytes, self.spec.capacity_bytes)


class StorageSpace(NamedTuple):
    """Space of the medium in bytes."""

    capacity_bytes: int
    free_bytes: int


def _joined(mountpoint: str, root_dir: str) -> str:
    """Join paths as wire.md 8 says: slashes become one where they meet, all others stay."""
    return f"{mountpoint.rstrip('/')}/{root_dir.strip('/')}"


# How the memory of a pool is divided: what the manager that hands it out and the engines that fill it must agree on.
#
# A pool is cut into pages of 4096 bytes and, for handing out, into chunks. An extent is a run of whole pages inside
# one chunk, so whoever is given an extent across the border of two chunks was given something wrong.

PAGE_BYTES = 4096
MIN_POOL_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 20
_LEAST_CHUNKS = 64  # of smaller pools too: a chunk serves one size of extents at a time


def extent_bytes(size: int) -> int:
    """Return how many bytes of a pool a part of `size` bytes takes: whole pages, at least one."""
    return max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES


def chunk_bytes(capacity_bytes: int) -> int:
    """Return the size of the chunks of a pool of `capacity_bytes`; its last one may be shorter."""
    if capacity_bytes >= _LEAST_CHUNKS * _CHUNK_BYTES:
        return _CHUNK_BYTES
    return max(1, capacity_bytes // _LEAST_CHUNKS // PAGE_BYTES) * PAGE_BYTES


def pool_bytes(capacity_bytes: int) -> int:
    """Return how many of `capacity_bytes` can be handed out: whole pages."""
    return capacity_bytes // PAGE_BYTES * PAGE_BYTES
