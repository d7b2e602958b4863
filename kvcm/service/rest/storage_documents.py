"""Storages as JSON documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcm.service.rest.documents import Document, Int32, Int64, Ratio, Text

__all__ = ["SPEC_FIELDS", "StorageDocument", "StorageStatusDocument"]

SPEC_FIELDS = ("threefs", "mooncake", "tair_mem_pool", "nfs", "vcnsthreefs", "dummy")


class ThreeFSDocument(Document):
    """A 3FS file system, mounted at the same place on every host."""

    cluster_name: Text = ""
    """Name of the 3FS cluster; informative."""
    mountpoint: Text
    """Mount point."""
    root_dir: Text
    """Directory below the mount point that holds the files."""
    key_count_per_file: Int32 = 0
    """Slots packed into one file; values below 1 mean 1."""
    touch_file_when_create: bool = False
    """Create the empty file when its address is allocated."""


class VcnsThreeFSDocument(ThreeFSDocument):
    """A 3FS file system behind a VCNS metadata service."""

    remote_host: Text
    """Host of the metadata service."""
    remote_port: Int32
    """Port of the metadata service."""
    meta_storage_uri: Text
    """Where the metadata service keeps its state."""


class MooncakeDocument(Document):
    """A Mooncake store."""

    local_hostname: Text
    """Address of the server's own client, ip:port."""
    metadata_connstring: Text
    """Mooncake's metadata service."""
    protocol: Text
    """Transport, `tcp` or `rdma`."""
    rdma_device: Text = ""
    """Device to use; required with `rdma`."""
    master_service_entry: Text
    """Mooncake's master, ip:port, or an etcd:// address when it is replicated."""


class MemoryPoolDocument(Document):
    """A memory pool."""

    domain: Text = ""
    """Domain of the pool's metadata service."""
    timeout: Int32 = 0
    """Timeout of calls to the pool."""
    enable_vipserver: bool = False
    """Resolve the domain through vipserver."""
    node_id: Text = ""
    """The node whose shared memory the pool is; with it there is no domain."""
    capacity_bytes: Int64 = 0
    """Bytes of the pool; required with node_id."""


class NfsDocument(Document):
    """A directory shared by all hosts."""

    root_path: Text
    """Put in front of every file name as it is, so give it a leading and a trailing slash."""
    key_count_per_file: Int32 = 0
    """Slots packed into one file; values below 1 mean 1."""


class DummyDocument(Document):
    """A storage that moves no bytes."""

    root_path: Text = ""
    """Put in front of every name in the URIs."""
    key_count_per_file: Int32 = 0
    """Slots packed into one file; values below 1 mean 1."""


class StorageStatusDocument(Document):
    """How a storage is for the manager that answers: each probes what it has open."""

    storage_unique_name: str
    """Name of the storage."""
    is_enabled: bool
    """false = it was disabled: nothing is read from it or written to it, however it is."""
    health: Literal["SH_UNSPECIFIED", "SH_UP", "SH_DEGRADED", "SH_DOWN"]
    """What probes say of it."""
    reason: str
    """The last thing that was wrong; empty while it is up."""
    since_ms: Int64
    """When `health` changed last, unix time in ms; 0 = it was not probed."""
    probe_seconds: Ratio
    """What the last probe took; so far, of one that is late."""
    failed_probes: Int64
    """Probes that failed since the storage was opened."""
    medium_bytes: Int64
    """Bytes of the medium when it last answered; -1 = not known."""
    medium_free_bytes: Int64
    """Those of them that are free; -1 = not known."""
    is_draining: bool
    """It is being drained: nothing is written to it, and its blocks are evicted."""


def _is_given(field: str) -> dict[str, Any]:
    return {"required": [field], "properties": {field: {"type": "object"}}}


class StorageDocument(Document):
    """A storage and how to reach it: exactly one of the kinds, which cannot be changed later."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_is_given(field) for field in SPEC_FIELDS]})

    global_unique_name: Text = ""
    """Its name; that of the path where it is left out."""
    threefs: ThreeFSDocument | None = None
    """3FS."""
    mooncake: MooncakeDocument | None = None
    """Mooncake store."""
    tair_mem_pool: MemoryPoolDocument | None = None
    """Memory pool."""
    nfs: NfsDocument | None = None
    """Shared directory."""
    vcnsthreefs: VcnsThreeFSDocument | None = None
    """3FS behind VCNS."""
    dummy: DummyDocument | None = None
    """Moves no bytes."""
    check_storage_available_when_open: bool = False
    """3FS: check when opening that mount point and directory exist. Not kept."""
    capacity_bytes: Int64 = 0
    """Bytes that all groups together may use on it; 0 = not limited here."""
    used_percentage: Ratio = 0.0
    """Share of capacity_bytes above which reclaiming begins, as a ratio; above 1 is never, 0 = 0.9."""
    is_available: bool = True
    """false = it is disabled: nothing is read from it or written to it."""
    status: Annotated[StorageStatusDocument | None, Field(json_schema_extra={"readOnly": True})] = None
    """How it is; in lists that ask for it. What is sent is ignored."""

    @model_validator(mode="after")
    def has_one_kind(self) -> StorageDocument:
        """Refuse a storage of no kind or of several."""
        given = [field for field in SPEC_FIELDS if getattr(self, field) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(SPEC_FIELDS)} must be given, not {given or 'none'}")
        return self
