"""/v1/storages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import ConfigDict, Field, model_validator

from kvcm.model.errors import ErrorCode
from kvcm.service.rest.calls import (
    MAX_ATTEMPTS,
    CallRefusedError,
    CallRunner,
    ResourceLocks,
    apply_patch,
    change_existing,
    check_same_name,
    conflict,
    fields_of,
)
from kvcm.service.rest.conversion import message_to_dict
from kvcm.service.rest.documents import (
    Document,
    Int32,
    Int64,
    Page,
    PageQuery,
    Ratio,
    StoragePath,
    StorageTypeName,
    Text,
    page_of,
)
from kvcm.service.rest.routing import (
    MERGE_PATCH,
    add_route,
    answer,
    answer_item,
    check_preconditions,
    etag_of,
    not_found,
)

__all__ = ["StorageDocument", "StorageResource", "StorageStatusDocument"]

# Storages as JSON documents.

_SPEC_FIELDS = ("threefs", "mooncake", "tair_mem_pool", "nfs", "vcnsthreefs", "dummy", "event_report")


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
    service_discovery_url: Text = ""
    """Has no effect."""
    media_type: Int32 = 0
    """Has no effect."""


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


class EventReportDocument(Document):
    """Reports of engines about blocks in their hosts' memory; no bytes are written to it."""

    heartbeat_timeout_ms: Int64 = 0
    """A reporter without a heartbeat for so long is unavailable; 0 = 30000."""
    cleanup_grace_ms: Int64 = 0
    """After so long more it is forgotten, with what it reported; 0 = 300000."""
    liveness_check_interval_ms: Int64 = 0
    """Time between checks of heartbeats; 0 = 5000."""
    snapshot_min_interval_ms: Int64 = 0
    """Least time between two snapshots of a reporter; 0 = 30000."""
    snapshot_delta_drain_timeout_ms: Int64 = 0
    """Most time that a snapshot and changes wait for each other; 0 = 10000."""


class StorageStatusDocument(Document):
    """Health of a storage as the manager that answers sees it: each manager probes the storages that it has open."""

    storage_unique_name: str
    """Name of the storage."""
    is_enabled: bool
    """false = it was disabled: it is neither read nor written, whatever its health."""
    health: Literal["SH_UNSPECIFIED", "SH_UP", "SH_DEGRADED", "SH_DOWN"]
    """Result of its probes."""
    reason: str
    """The last problem; empty while it is up."""
    since_ms: Int64
    """When `health` changed last, unix time in ms; 0 = it was not probed."""
    probe_seconds: Ratio
    """Duration of the last probe; so far, of one that is late."""
    failed_probes: Int64
    """Probes that failed since the storage was opened."""
    medium_bytes: Int64
    """Bytes of the medium when it last answered; -1 = not known."""
    medium_free_bytes: Int64
    """Those of them that are free; -1 = not known."""
    is_draining: bool
    """It is being drained: nothing is written to it, and its blocks are evicted."""
    is_full: bool
    """Its medium has no space, or too little: blocks go to other storages if they can, and leave it until there is
    some."""


def _is_given(field: str) -> dict[str, Any]:
    return {"required": [field], "properties": {field: {"type": "object"}}}


class StorageDocument(Document):
    """A storage and how to reach it: exactly one of the kinds, which cannot be changed later."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_is_given(field) for field in _SPEC_FIELDS]})

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
    event_report: EventReportDocument | None = None
    """Reports of engines; `storage_type` says of which level."""
    storage_type: StorageTypeName = "ST_UNSPECIFIED"
    """The type: required with event_report; otherwise the kind says it, and it may be left out."""
    check_storage_available_when_open: bool = False
    """3FS: check when opening that mount point and directory exist. Not kept."""
    capacity_bytes: Int64 = 0
    """Bytes that all groups together may use on it; 0 = not limited here."""
    used_percentage: Ratio = 0.0
    """Share of capacity_bytes above which reclaiming begins, as a ratio; above 1 is never, 0 = 0.9."""
    is_available: bool = True
    """false = it is disabled: nothing is read from it or written to it."""
    status: Annotated[StorageStatusDocument | None, Field(json_schema_extra={"readOnly": True})] = None
    """Its health; in lists with `with_status`. Ignored in requests."""

    @model_validator(mode="after")
    def has_one_kind(self) -> StorageDocument:
        """Refuse a storage of no kind or of several."""
        given = [field for field in _SPEC_FIELDS if getattr(self, field) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(_SPEC_FIELDS)} must be given, not {given or 'none'}")
        return self


_LIST = "AdminService.ListStorage"
_SWITCHES = ("is_available", "status")  # of the document, and not of the storage's config
_Storage = dict[str, Any]


class StorageQuery(PageQuery):
    """Which storages, and what of them."""

    with_status: Annotated[bool, Field(description="With the health that the manager that answers sees.")] = False


class StorageResource:
    """Storages. They have no versions: `If-Match` holds among clients of one manager's resources.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls
        self._turns = ResourceLocks()

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/storages/{name}"
        add_route(
            router=router, method="GET", path="/v1/storages", endpoint=self.list_storages, model=Page[StorageDocument]
        )
        add_route(
            router=router, method="GET", path=one, endpoint=self.get_storage, model=StorageDocument, problems=[404]
        )
        add_route(
            router=router,
            method="PUT",
            path=one,
            endpoint=self.put_storage,
            model=StorageDocument,
            problems=[409, 412, 502],
        )
        add_route(
            router=router,
            method="PATCH",
            path=one,
            endpoint=self.patch_storage,
            model=StorageDocument,
            problems=[404, 409, 412, 502],
        )
        add_route(
            router=router, method="DELETE", path=one, endpoint=self.delete_storage, status=204, problems=[404, 412]
        )
        add_route(
            router=router,
            method="GET",
            path=f"{one}/status",
            endpoint=self.get_storage_status,
            model=StorageStatusDocument,
            problems=[404],
        )

    async def list_storages(self, request: Request, query: Annotated[StorageQuery, Query()]) -> Response:
        """List storages, ordered by name."""
        storages = await self._all(request)
        if not query.with_status:
            storages = [_without_status(storage) for storage in storages]
        return answer(page_of(storages, lambda storage: (storage["global_unique_name"],), query, dict))

    async def get_storage(self, request: Request, name: StoragePath) -> Response:
        """Get a storage."""
        storage = _without_status(await self._existing(request, name))
        return answer_item(request, storage, etag_of(storage))

    async def get_storage_status(self, request: Request, name: StoragePath) -> Response:
        """Get the health of a storage as the manager that answers sees it."""
        storage = await self._existing(request, name)
        return answer(storage["status"])

    async def put_storage(
        self, request: Request, name: StoragePath, body: Annotated[StorageDocument, Body()]
    ) -> Response:
        """Create or replace a storage. `If-None-Match: *` only creates, `If-Match` only replaces that state."""
        check_same_name("global_unique_name", body.global_unique_name, name)
        async with self._turns.lock(name):
            for _ in range(MAX_ATTEMPTS):
                known = await self._find(request, name)
                check_preconditions(request.headers, None if known is None else etag_of(_without_status(known)))
                if await self._store(request, name, body, known):
                    return await self._stored(request, name, 201 if known is None else 200)
        raise conflict(request, name)

    async def patch_storage(
        self, request: Request, name: StoragePath, body: Annotated[dict[str, Any], Body(media_type=MERGE_PATCH)]
    ) -> Response:
        """Change fields of a storage by a JSON merge patch (RFC 7396); `is_available` switches it off and on."""
        async with self._turns.lock(name):
            known = await self._existing(request, name)
            before = _without_status(known)
            check_preconditions(request.headers, etag_of(before))
            wanted = apply_patch(StorageDocument, before, body)
            check_same_name("global_unique_name", wanted.global_unique_name, name)
            if fields_of(wanted) == {**before, "is_available": wanted.is_available}:
                await self._switch(request, name, before["is_available"], wanted.is_available)
            else:
                await self._store(request, name, wanted, known)
            return await self._stored(request, name, 200)

    async def delete_storage(self, request: Request, name: StoragePath) -> Response:
        """Remove a storage; its blocks count as missing. The task `removal:NAME` forgets them in the background."""
        async with self._turns.lock(name):
            if "if-match" in request.headers:
                known = _without_status(await self._existing(request, name))
                check_preconditions(request.headers, etag_of(known))
            removal = self._calls.run(request, "AdminService.RemoveStorage", storage_unique_name=name)
            await change_existing(removal, lambda: self._existing(request, name))
        return Response(status_code=204)

    async def _store(self, request: Request, name: str, wanted: StorageDocument, known: _Storage | None) -> bool:
        """Create or replace a storage; False if it was created meanwhile."""
        config = fields_of(wanted, global_unique_name=name)
        for field in _SWITCHES:
            config.pop(field, None)
        call = "AdminService.AddStorage" if known is None else "AdminService.UpdateStorage"
        try:
            await self._calls.run(request, call, storage=config)
        except CallRefusedError as error:
            if known is None and error.code is ErrorCode.DUPLICATE_ENTITY:
                return False
            raise
        await self._switch(request, name, known is None or known["is_available"], wanted.is_available)
        return True

    async def _switch(self, request: Request, name: str, is_available: bool, wanted: bool) -> None:
        if wanted is not is_available:
            call = "EnableStorage" if wanted else "DisableStorage"
            await self._calls.run(request, f"AdminService.{call}", storage_unique_name=name)

    async def _all(self, request: Request) -> list[_Storage]:
        listed = await self._calls.run(request, _LIST)
        statuses = {status.storage_unique_name: message_to_dict(status) for status in listed.storage_status}
        return [_document(message_to_dict(storage), statuses) for storage in listed.storage]

    async def _find(self, request: Request, name: str) -> _Storage | None:
        found = [each for each in await self._all(request) if each["global_unique_name"] == name]
        return found[0] if found else None

    async def _existing(self, request: Request, name: str) -> _Storage:
        if (storage := await self._find(request, name)) is None:
            raise not_found("storage", name)
        return storage

    async def _stored(self, request: Request, name: str, status: int) -> Response:
        storage = _without_status(await self._existing(request, name))
        headers = {"location": f"/v1/storages/{name}"} if status == 201 else None
        return answer_item(request, storage, etag_of(storage), status, headers)


def _document(storage: _Storage, statuses: dict[str, _Storage]) -> _Storage:
    status = statuses.get(storage["global_unique_name"])
    return {**storage, "is_available": status is None or status["is_enabled"], "status": status}


def _without_status(storage: _Storage) -> _Storage:
    return {key: value for key, value in storage.items() if key != "status"}
