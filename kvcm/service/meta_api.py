"""MetaService and LeaseService: what engines call. Thin translation; decisions are made in the cache and the
registry.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kvcm.cache.instance_cache import batches
from kvcm.cache.manager import CacheManager
from kvcm.cache.prefix_match import BlockMeta, Match, MatchMode, MatchQuery
from kvcm.cache.read_leases import MAX_LEASE_MS
from kvcm.cache.write_sessions import LocationChecksums, Retention, StartedWrite, WriteRequest
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError
from kvcm.model.instances import Instance
from kvcm.model.keys import NO_MASK, BlockMask, block_keys_from_tokens, mixed, mixed_key, unmixed, unmixed_key
from kvcm.model.locations import Location, SpecUri, decode_chunk, retag_all
from kvcm.model.nodes import Endpoint
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease_pb
from kvcm.registry.assignment import Assignment
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.registry.startup_document import storage_configs_json
from kvcm.registry.validation import require
from kvcm.service.access import redacted_for_principal
from kvcm.service.calls import Call, Plane, Reply, instance_call
from kvcm.service.request_limits import RequestLimits
from kvcm.service.translate import fill, instance_of
from kvcm.telemetry.events import CACHE_MANAGER, EventLog, RecentAccesses

__all__ = ["BlockCalls", "MetaApi", "RequestEvents", "block_keys_of", "mask_of", "node_endpoint"]

# Calls about blocks that the meta and the admin package share: GetCacheMeta and RemoveCache.

_TOKENS_ON_LOOP = 16_384  # some milliseconds; more are hashed in a thread, beside other requests
_KEYS_OF_LISTS = 128  # so many become an array faster by way of a list, more straight from their message
_TEXT_BATCH = 64  # with eight parts each some milliseconds
_NO_LOCATION = b"\x12\x00"  # an empty CacheLocation as field 2 of an answer


async def block_keys_of(api: str, request: Any, instance: Instance) -> Sequence[int]:
    """Return the mixed block keys of a request: of those given, else of its tokens (wire.md 5.2).

    Raises:
        InvalidArgumentError: neither is given, or the instance has no block size.
    """
    keys: Sequence[int] = request.block_keys
    if not keys:
        keys = await _keys_of_tokens(api, request, instance)
    elif len(keys) <= _KEYS_OF_LISTS:
        keys = keys[:]  # a list, made faster than by `list`
    return mixed(keys)


async def _keys_of_tokens(api: str, request: Any, instance: Instance) -> Sequence[int]:
    require(request.token_ids, f"{api}.block_keys and token_ids", "is required: one of the two")
    if instance.block_size <= 0:
        raise InvalidArgumentError(
            f"tokens size per block error: instance {instance.instance_id!r} has block_size "
            f"{instance.block_size}, token_ids need one > 0"
        )
    tokens = list(request.token_ids)
    if len(tokens) <= _TOKENS_ON_LOOP:
        return block_keys_from_tokens(tokens, instance.block_size)
    return await asyncio.to_thread(block_keys_from_tokens, tokens, instance.block_size)


class BlockCalls:
    """Block calls of one package.

    Args:
        cache: answers them.
        meta_response: class of GetCacheMetaResponse in the package.
        common_response: class of CommonResponse in the package.
    """

    def __init__(self, cache: CacheManager, meta_response: type[Any], common_response: type[Any]) -> None:
        self._cache = cache
        self._meta_response = meta_response
        self._common_response = common_response

    async def get_cache_meta(self, request: Any) -> Reply:
        """Answer GetCacheMeta: one entry per unmasked key; all locations of a key are in its meta text."""
        cache = self._cache.cache(request.instance_id)
        keys = await block_keys_of("GetCacheMeta", request, cache.instance)
        blocks = await self._cache.metas(cache, keys, mask_of(request, "block_mask"))
        message = self._meta_response()
        for page in batches(blocks, _TEXT_BATCH):
            message.metas.extend([_meta_text(block, request.detail_level) for block in page])
            if len(page) < len(blocks):
                await asyncio.sleep(0)
        return Reply(message, [block.locations[0].chunk if block.locations else _NO_LOCATION for block in blocks])

    async def remove_cache(self, request: Any) -> Reply:
        """Answer RemoveCache."""
        cache = self._cache.cache(request.instance_id)
        keys = await block_keys_of("RemoveCache", request, cache.instance)
        await self._cache.remove(cache, keys, mask_of(request, "block_mask"))
        return Reply(self._common_response())


def _meta_text(block: BlockMeta, detail_level: int) -> str:
    if not block.locations:
        return '{"status":"CLS_NOT_FOUND"}'
    best = block.locations[0]
    meta: dict[str, Any] = {"id": best.id, "status": f"CLS_{best.status.name}"}
    if len(block.locations) > 1 or detail_level > 0:
        meta["locations"] = [_location_text(location) for location in block.locations]
    if detail_level > 0:
        # Keys are 64-bit numbers, which many JSON readers would round: a text, as everywhere in this interface.
        meta |= {"parent": None if block.parent is None else str(unmixed_key(block.parent)), "depth": block.depth}
    return json.dumps(meta, separators=(",", ":"), ensure_ascii=False)


def _location_text(location: Location) -> dict[str, Any]:
    decoded = decode_chunk(location.chunk)
    text: dict[str, Any] = {
        "id": location.id,
        "status": f"CLS_{location.status.name}",
        "type": location.storage_type.name,
        "storage": location.storage,
        "size": str(location.size_bytes),
        "written_at": location.written_at,
        "location_specs": [_spec_text(spec) for spec in decoded.specs],
    }
    return text | {"event_hash": str(decoded.event_hash)} if decoded.event_hash else text


def _spec_text(spec: SpecUri) -> dict[str, str]:
    text = {"name": spec.name, "uri": spec.uri}
    return text | {"checksum": str(spec.checksum)} if spec.checksum else text


# Calls as events, in the original's format (wire.md 10.3): what engines asked for, so that it can be replayed.

_READ, _STARTED, _FINISHED = "GetCacheLocation", "StartWriteCache", "FinishWriteCache"


class RequestEvents:
    """Publishes successful calls to the event log, and keeps the latest. Builds nothing while neither is active.

    Args:
        log: where events go.
        recent: keeps the latest with their outcomes, without the tokens of prompts.
    """

    def __init__(self, log: EventLog, recent: RecentAccesses) -> None:
        self._log = log
        self._recent = recent

    def on_read(self, request: Any, query: MatchQuery, found: Match) -> None:
        """GetCacheLocation that counts as an access."""
        if not (self._log.is_active or self._recent.is_active):
            return
        fields: dict[str, Any] = {
            "query_type": query.mode.name.lower(),
            "block_mask": _mask(query.mask),
            "sw_size": query.window,
            "location_spec_names": list(request.location_spec_names),
        }
        if self._recent.is_active:
            event = {**fields, "hit_keys": len(found.keys)}
            self._recent.add(request.instance_id, _READ, event, query.keys, flags=_flags(query.mask))
        if self._log.is_active:
            event = {**fields, "keys": unmixed(query.keys), "tokens": list(request.token_ids)}
            self._log.publish(request.instance_id, CACHE_MANAGER, _READ, event)

    def on_write_started(self, request: Any, keys: Sequence[int], started: StartedWrite) -> None:
        """StartWriteCache."""
        if not (self._log.is_active or self._recent.is_active):
            return
        fields = {
            "write_session_id": started.session.id,
            "block_mask": _mask(started.mask),
            "location_spec_group_names": list(request.location_spec_group_names),
            "write_timeout_seconds": request.write_timeout_seconds,
        }
        if self._recent.is_active:
            event = {**fields, "refused_keys": started.rejected}
            self._recent.add(request.instance_id, _STARTED, event, keys, flags=_flags(started.mask))
        if self._log.is_active:
            event = {**fields, "keys": unmixed(keys), "tokens": list(request.token_ids)}
            self._log.publish(request.instance_id, CACHE_MANAGER, _STARTED, event)

    def on_write_refused(self, request: Any, keys: Sequence[int]) -> None:
        """StartWriteCache without space for any block: no event, but kept as a write without a session."""
        if self._recent.is_active:
            fields = {"write_session_id": "", "block_mask": len(keys), "refused_keys": len(keys)}
            self._recent.add(request.instance_id, _STARTED, fields, keys)

    def on_write_finished(self, request: Any, success: BlockMask) -> None:
        """FinishWriteCache."""
        if not (self._log.is_active or self._recent.is_active):
            return
        fields = {"write_session_id": request.write_session_id, "success_block": _mask(success)}
        if self._recent.is_active:
            self._recent.add(request.instance_id, _FINISHED, fields, flags=_flags(success))
        if self._log.is_active:
            self._log.publish(request.instance_id, CACHE_MANAGER, _FINISHED, fields)


def _mask(mask: BlockMask) -> int | list[bool]:
    return mask.offset if mask.offset is not None else list(mask.flags or ())


def _flags(mask: BlockMask) -> int:
    return len(mask.flags or ())


_META = "kv_cache_manager.proto.meta.MetaService"
_LEASE = "kvcm.v1.LeaseService"
_START_WRITE_LOCATIONS_FIELD = 4
_MAX_SPECS = 1024  # of one location; more than any model has
_MAX_REPLICAS = 16  # each further one costs the bytes of the block once more


def node_endpoint(endpoint: Endpoint) -> pb.MetaNodeEndpoint:
    """Return where a manager is, as clients of the data plane learn it."""
    return pb.MetaNodeEndpoint(
        node_id=endpoint.node_id,
        host=endpoint.host,
        meta_rpc_port=endpoint.meta_rpc_port,
        meta_http_port=endpoint.meta_http_port,
    )


class MetaApi:
    """Handlers of the data plane.

    Args:
        cache: blocks.
        registry: groups and storages.
        leadership: of this manager.
        limits: sizes of requests.
        events: of the calls of engines.
        recent: keeps the latest calls.
        assignment: of instances to managers; None announces nothing.
    """

    def __init__(
        self,
        cache: CacheManager,
        registry: Registry,
        leadership: Leadership,
        limits: RequestLimits,
        events: EventLog | None = None,
        recent: RecentAccesses | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        self._cache = cache
        self._registry = registry
        self._leadership = leadership
        self._assignment = assignment if assignment is not None else Assignment(leadership.node_id, {})
        kept = recent if recent is not None else RecentAccesses(0)
        self._events = RequestEvents(events if events is not None else EventLog(), kept)
        self._limits = limits
        self._blocks = BlockCalls(cache, pb.GetCacheMetaResponse, pb.CommonResponse)

    def calls(self) -> list[Call]:
        """Return every call of the data plane."""

        def meta(name: str, request: type[Any], response: type[Any], handler: Any, **options: Any) -> Call:
            return Call(
                service=_META,
                name=name,
                plane=Plane.DATA,
                request_type=request,
                response_type=response,
                handler=handler,
                **options,
            )

        lease = partial(instance_call, _LEASE)
        common = pb.CommonResponse
        blocks = self._blocks
        per = {"per_instance": True}
        return [
            meta("RegisterInstance", pb.RegisterInstanceRequest, pb.RegisterInstanceResponse, self.register_instance),
            meta("GetInstanceInfo", pb.GetInstanceInfoRequest, pb.GetInstanceInfoResponse, self.get_instance_info),
            meta("GetCacheMeta", pb.GetCacheMetaRequest, pb.GetCacheMetaResponse, blocks.get_cache_meta, **per),
            meta("GetCacheLocation", pb.GetCacheLocationRequest, pb.GetCacheLocationResponse, self.match, **per),
            meta(
                "GetCacheLocationLen",
                pb.GetCacheLocationLenRequest,
                pb.GetCacheLocationLenResponse,
                self.match_length,
                **per,
            ),
            meta("StartWriteCache", pb.StartWriteCacheRequest, pb.StartWriteCacheResponse, self.start_write, **per),
            meta("FinishWriteCache", pb.FinishWriteCacheRequest, common, self.finish_write, **per),
            meta("RemoveCache", pb.RemoveCacheRequest, common, blocks.remove_cache, **per),
            meta("TrimCache", pb.TrimCacheRequest, common, self.trim, **per),
            meta(
                "GetClusterInfo",
                pb.GetClusterInfoRequest,
                pb.GetClusterInfoResponse,
                self.cluster_info,
                leader_only=False,
            ),
            lease("RenewReadLease", lease_pb.RenewReadLeaseRequest, lease_pb.RenewReadLeaseResponse, self.renew_lease),
            lease("ReleaseReadLease", lease_pb.ReleaseReadLeaseRequest, common, self.release_lease),
            lease(
                "RenewWriteSession",
                lease_pb.RenewWriteSessionRequest,
                lease_pb.RenewWriteSessionResponse,
                self.renew_write,
            ),
        ]

    async def register_instance(self, request: Any) -> Reply:
        """Register an instance; the answer has the storages of its group, for the transfer layer, and the managers to
        call."""
        instance = await self._cache.register_instance(instance_of(request))
        group = self._registry.groups.find(instance.instance_group_name)
        candidates = group.storage_candidates if group is not None else ()
        if len(self._registry.storages.existing(candidates)) < len(set(candidates)):
            await self._registry.refresh()  # another manager may have added one a moment ago
        storages = self._registry.storages.existing(candidates)
        return Reply(
            pb.RegisterInstanceResponse(
                storage_configs=storage_configs_json(storages),
                extra_info=group.extra_info if group is not None else "",
                preferred_managers=map(node_endpoint, self._assignment.managers_of(instance.instance_id)),
            )
        )

    async def get_instance_info(self, request: Any) -> Reply:
        """Return a registration."""
        instance = self._registry.instances.get(request.instance_id)
        message = pb.GetInstanceInfoResponse(instance_group=instance.instance_group_name)
        fill(message.instance_info, redacted_for_principal(instance))
        return Reply(message)

    async def match(self, request: Any) -> Reply:
        """Answer GetCacheLocation, with a read lease when one is asked for."""
        cache = self._cache.cache(request.instance_id)
        lease_ms = request.read_lease_ms
        if not 0 <= lease_ms <= MAX_LEASE_MS:
            raise InvalidArgumentError(f"read_lease_ms is {lease_ms}, must be from 0 (none) to {MAX_LEASE_MS}")
        mask = mask_of(request, "block_mask") if request.HasField("block_mask") else NO_MASK
        mode = _MODE_OF_TYPE.get(request.query_type) or _match_mode(request)
        spec_names = request.location_spec_names
        query = MatchQuery(
            mode,
            await block_keys_of("GetCacheLocation", request, cache.instance),
            mask=mask,
            window=request.sw_size,
            spec_names=frozenset(spec_names) if spec_names else _ALL_SPECS,
            node_id=request.node_id,
            requires_specs=request.require_location_specs,
        )
        found = await self._cache.match(cache, query, peek=request.peek)
        message = pb.GetCacheLocationResponse()
        if lease_ms and found.keys:
            lease = await self._cache.lease(cache, found, lease_ms)
            message.read_lease_id = lease.id
            message.read_lease_deadline_ms = int(lease.deadline * 1000)
        if (other := self._assignment.other_manager(request.instance_id)) is not None:
            message.preferred_manager.CopyFrom(node_endpoint(other))
        if not request.peek:  # a peek is no access
            self._events.on_read(request, query, found)
        return Reply(message, found.chunks)

    async def match_length(self, request: Any) -> Reply:
        """Answer GetCacheLocationLen: the number of hits."""
        cache = self._cache.cache(request.instance_id)
        mode = _match_mode(request)
        keys = await block_keys_of("GetCacheLocationLen", request, cache.instance)
        query = MatchQuery(mode, keys, window=request.sw_size, node_id=request.node_id)
        found = await self._cache.match(cache, query, peek=request.peek)
        return Reply(pb.GetCacheLocationLenResponse(cache_location_len=len(found.keys)))

    async def start_write(self, request: Any) -> Reply:
        """Answer StartWriteCache. Blocks that do not fit are masked, and the header's message says why."""
        if request.min_replica_count > _MAX_REPLICAS:
            raise InvalidArgumentError(
                f"min_replica_count is {request.min_replica_count}, must be at most {_MAX_REPLICAS}"
            )
        cache = self._cache.cache(request.instance_id)
        write = WriteRequest(
            keys=await block_keys_of("StartWriteCache", request, cache.instance),
            spec_groups=list(request.location_spec_group_names),
            timeout_seconds=request.write_timeout_seconds,
            min_replica_count=request.min_replica_count,
            parent_key=mixed_key(request.parent_block_key) if request.HasField("parent_block_key") else None,
            node_id=request.node_id,
            event_hashes=request.event_hashes[:],
        )
        try:
            started = await self._cache.start_write(cache, write)
        except CapacityError:
            self._events.on_write_refused(request, write.keys)
            raise
        self._events.on_write_started(request, write.keys, started)
        message = pb.StartWriteCacheResponse(write_session_id=started.session.id)
        _write_mask(message.block_mask, started.mask)
        if started.rejected:
            message.header.status.message = f"{started.rejected} blocks were refused: {started.rejection}"
        return Reply(message, retag_all(started.chunks, _START_WRITE_LOCATIONS_FIELD))

    async def finish_write(self, request: Any) -> Reply:
        """Answer FinishWriteCache."""
        cache = self._cache.cache(request.instance_id)
        if not request.write_session_id or not request.HasField("success_blocks"):
            _reject_incomplete_finish(request)
        success = mask_of(request, "success_blocks")
        retention = Retention(request.retention.priority, request.retention.ttl_seconds)
        locations = _LazyLocations(request.locations, self._limits.max_keys)
        finished = await self._cache.finish_write(cache, request.write_session_id, success, retention, locations)
        self._events.on_write_finished(request, success)
        message = pb.CommonResponse()
        if finished.vanished:
            message.header.status.message = f"{finished.vanished} blocks were removed while they were being written"
        return Reply(message)

    async def trim(self, request: Any) -> Reply:
        """Answer TrimCache."""
        cache = self._cache.cache(request.instance_id)
        if request.strategy == pb.TS_REMOVE_ALL_CACHE:
            await self._cache.trim(cache)
        elif request.strategy == pb.TS_REMOVE_ALL_META:
            await self._cache.trim_meta(cache)
        elif request.strategy == pb.TS_TIMESTAMP:
            await self._cache.trim_written_between(cache, request.begin_timestamp, request.end_timestamp)
        else:
            raise InvalidArgumentError(
                f"strategy is {request.strategy}, must be TS_REMOVE_ALL_CACHE, TS_REMOVE_ALL_META or TS_TIMESTAMP"
            )
        return Reply(pb.CommonResponse())

    async def cluster_info(self, request: Any) -> Reply:
        """Answer GetClusterInfo: this node, the leader, and the managers to call for an instance."""
        message = pb.GetClusterInfoResponse(
            self_node_id=self._leadership.node_id, leader_node_id=self._leadership.leader_node_id
        )
        if (endpoint := self._leadership.leader_endpoint) is not None:
            message.leader_endpoint.CopyFrom(node_endpoint(endpoint))
        if request.instance_id:
            message.preferred_managers.extend(map(node_endpoint, self._assignment.managers_of(request.instance_id)))
        return Reply(message)

    async def renew_lease(self, request: Any) -> Reply:
        """Move a read lease's deadline."""
        cache = self._cache.cache(request.instance_id)
        lease = await self._cache.renew_lease(cache, request.read_lease_id, request.read_lease_ms)
        return Reply(lease_pb.RenewReadLeaseResponse(read_lease_deadline_ms=int(lease.deadline * 1000)))

    async def release_lease(self, request: Any) -> Reply:
        """End read leases: all that can be ended, be there one among them that cannot."""
        cache = self._cache.cache(request.instance_id)
        refused: KvcmError | None = None
        for lease_id in (request.read_lease_id, *request.more_read_lease_ids):
            try:
                await self._cache.release_lease(cache, lease_id)
            except KvcmError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return Reply(pb.CommonResponse())

    async def renew_write(self, request: Any) -> Reply:
        """Move a write session's deadline."""
        cache = self._cache.cache(request.instance_id)
        session = await self._cache.renew_write(cache, request.write_session_id, request.write_timeout_seconds)
        return Reply(lease_pb.RenewWriteSessionResponse(write_session_deadline_ms=int(session.deadline * 1000)))


class _LazyLocations(Sequence[LocationChecksums]):
    """The locations of a request, read when they are needed: there may be hundreds of thousands of parts."""

    def __init__(self, locations: Sequence[Any], most: int) -> None:
        if len(locations) > most:
            raise InvalidArgumentError(f"locations has {len(locations)} entries, at most {most} are allowed")
        self._locations = locations

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, position: Any) -> Any:
        location = self._locations[position]
        specs = location.location_specs
        if len(specs) > _MAX_SPECS:
            raise InvalidArgumentError(
                f"locations[{position}] has {len(specs)} location_specs, at most {_MAX_SPECS} are allowed"
            )
        return LocationChecksums(
            [(spec.name, checksum) for spec in specs if (checksum := spec.checksum)], location.checksum % (1 << 64)
        )


_ALL_SPECS: Final[frozenset[str]] = frozenset()
_MODE_OF_TYPE: Final = {mode.value: mode for mode in MatchMode}


def _match_mode(request: Any) -> MatchMode:
    """Return the match mode of a request.

    Raises:
        InvalidArgumentError: `query_type` is none of them.
    """
    mode = _MODE_OF_TYPE.get(request.query_type)
    if mode is None:
        allowed = ", ".join(f"QT_{mode.name}" for mode in MatchMode)
        raise InvalidArgumentError(f"query_type is {request.query_type}, must be one of {allowed}")
    return mode


def _reject_incomplete_finish(request: Any) -> None:
    require(request.write_session_id, "FinishWriteCache.write_session_id")
    require(request.HasField("success_blocks"), "FinishWriteCache.success_blocks")


def mask_of(message: Any, field: str) -> BlockMask:
    """Return the block mask in a field of a request."""
    if not message.HasField(field):
        return NO_MASK
    mask = getattr(message, field)
    member = mask.WhichOneof("info")
    if member == "offset":
        return BlockMask(offset=mask.offset)
    if member == "bool_masks":
        return BlockMask(flags=tuple(mask.bool_masks.values))
    return NO_MASK


def _write_mask(message: Any, mask: BlockMask) -> None:
    """Fill a BlockMask message."""
    if mask.flags is not None:
        message.bool_masks.values.extend(mask.flags)
    else:
        message.offset = mask.offset or 0
