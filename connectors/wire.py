"""Encodes requests and decodes answers.

A wrong argument raises `InvalidArgumentError`, a malformed answer `MalformedAnswerError`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from kvcm.connectors.results import ClusterInfo, Endpoint, Location, MatchMode, WriteGrant
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import LocationUri, check_storage_name
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pools
from kvcm.protocol.kvcm.v1 import unread_pb2 as unread

__all__ = [
    "MalformedAnswerError",
    "Requests",
    "decode_locations",
    "encode_locations",
    "parse_cluster_info",
    "parse_match_locations",
    "parse_storage_configs",
    "parse_write_grant",
]

_QUERY_TYPES = {
    MatchMode.PREFIX: meta.QT_PREFIX_MATCH,
    MatchMode.BATCH: meta.QT_BATCH_GET,
    MatchMode.SLIDING_WINDOW: meta.QT_REVERSE_ROLL_SW_MATCH,
    MatchMode.PREFIX_WITH_STATE: meta.QT_PREFIX_MATCH_WITH_MAMBA,
}
_INT64 = range(-(1 << 63), 1 << 63)
_INT32 = range(1 << 31)
_PRIORITIES = range(-100, 101)
_GENERATIONS = range(1, 1 << 64)


class Requests:
    """Builds the requests of one instance.

    Args:
        instance_id: goes into every request.
        node_id: node of the caller, whose memory pools it can use; "" for none.

    Every method raises `InvalidArgumentError` naming the argument that cannot be sent.
    """

    def __init__(self, instance_id: str, node_id: str = "") -> None:
        if not instance_id:
            raise InvalidArgumentError("instance_id is empty, must be the name of the instance")
        if node_id:
            check_storage_name("node_id", node_id)
        self.instance_id = instance_id
        self.node_id = node_id

    def register_instance(
        self,
        trace_id: str,
        instance_group: str,
        block_size: int,
        spec_infos: Sequence[LocationSpecInfo],
        model: ModelDeployment,
        spec_groups: Sequence[LocationSpecGroup],
    ) -> meta.RegisterInstanceRequest:
        """Specs and groups are sent sorted: the manager compares registrations literally, order included."""
        infos = sorted(spec_infos, key=lambda info: info.name)
        groups = sorted(spec_groups, key=lambda group: group.name)
        return meta.RegisterInstanceRequest(
            trace_id=trace_id,
            instance_group=instance_group,
            instance_id=self.instance_id,
            block_size=_number("block_size", block_size),
            location_spec_infos=[
                meta.LocationSpecInfo(name=info.name, size=info.size, kind=meta.LocationSpecKind.Name(info.kind))
                for info in infos
            ],
            model_deployment=_model_deployment(model),
            location_spec_groups=[
                meta.LocationSpecGroup(name=group.name, spec_names=sorted(group.spec_names)) for group in groups
            ],
        )

    def match(
        self,
        trace_id: str,
        keys: Sequence[int],
        mode: MatchMode,
        mask: int | Sequence[bool] | None,
        spec_names: Sequence[str],
        window: int,
        read_lease_ms: int,
    ) -> meta.GetCacheLocationRequest:
        """See `ManagerClient.match`."""
        request = meta.GetCacheLocationRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            query_type=_QUERY_TYPES[mode],
            block_keys=_keys(keys),
            sw_size=_window(window, mode),
            location_spec_names=spec_names,
            read_lease_ms=_number("read_lease_ms", read_lease_ms),
            node_id=self.node_id,
            # With states the mode itself says which block needs what: the last one alone needs them.
            require_location_specs=bool(spec_names) and mode is not MatchMode.PREFIX_WITH_STATE,
        )
        if mask is not None:
            request.block_mask.CopyFrom(block_mask("mask", mask, len(keys)))
        return request

    def match_length(
        self, trace_id: str, keys: Sequence[int], mode: MatchMode, window: int
    ) -> meta.GetCacheLocationLenRequest:
        """See `ManagerClient.match_length`."""
        return meta.GetCacheLocationLenRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            query_type=_QUERY_TYPES[mode],
            block_keys=_keys(keys),
            sw_size=_window(window, mode),
            node_id=self.node_id,
        )

    def start_write(
        self,
        trace_id: str,
        keys: Sequence[int],
        parent_block_key: int | None,
        spec_groups: Sequence[str],
        timeout_seconds: int,
        min_replica_count: int,
        event_hashes: Sequence[int],
    ) -> meta.StartWriteCacheRequest:
        """See `ManagerClient.start_write`."""
        if spec_groups and len(spec_groups) != len(keys):
            raise InvalidArgumentError(f"spec_groups has {len(spec_groups)} names, must be none or one per key")
        if event_hashes and len(event_hashes) != len(keys):
            raise InvalidArgumentError(
                f"event_hashes has {len(event_hashes)} entries, must be none or one per key: {len(keys)}"
            )
        return meta.StartWriteCacheRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            block_keys=_keys(keys),
            location_spec_group_names=spec_groups,
            write_timeout_seconds=_number("session_seconds", timeout_seconds),
            min_replica_count=_number("min_replica_count", min_replica_count),
            parent_block_key=None if parent_block_key is None else _keys([parent_block_key], "parent_block_key")[0],
            node_id=self.node_id,
            event_hashes=_keys(event_hashes, "event_hashes"),
        )

    def finish_write(
        self,
        trace_id: str,
        session_id: str,
        succeeded: Sequence[bool],
        checksums: Sequence[Mapping[str, int]],
        priority: int,
        ttl_seconds: int,
    ) -> meta.FinishWriteCacheRequest:
        """See `ManagerClient.finish_write`."""
        if priority not in _PRIORITIES:
            raise InvalidArgumentError(f"priority is {priority}, must be -100 to 100")
        if checksums and len(checksums) != len(succeeded):
            raise InvalidArgumentError(
                f"checksums has {len(checksums)} entries, must have none, or one per location: {len(succeeded)}"
            )
        request = meta.FinishWriteCacheRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            write_session_id=session_id,
            success_blocks=meta.BlockMask(bool_masks=meta.BoolMasksType(values=succeeded)),
            locations=map(_location_checksums, checksums) if any(checksums) else (),
        )
        if priority or ttl_seconds:
            request.retention.priority = priority
            request.retention.ttl_seconds = _number("ttl_seconds", ttl_seconds)
        return request

    def abort_write(self, trace_id: str, session_id: str) -> meta.FinishWriteCacheRequest:
        """Finish with the first 0 blocks: says "none" without knowing how many blocks the session has."""
        return meta.FinishWriteCacheRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            write_session_id=session_id,
            success_blocks=meta.BlockMask(offset=0),
        )

    def renew_write(self, trace_id: str, session_id: str, timeout_seconds: int) -> lease.RenewWriteSessionRequest:
        """See `ManagerClient.renew_write`."""
        return lease.RenewWriteSessionRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            write_session_id=session_id,
            write_timeout_seconds=_number("session_seconds", timeout_seconds),
        )

    def release_lease(self, trace_id: str, lease_ids: Sequence[str]) -> lease.ReleaseReadLeaseRequest:
        """See `ManagerClient.release_lease`.

        Raises:
            InvalidArgumentError: there is no lease.
        """
        if not lease_ids:
            raise InvalidArgumentError("lease_ids is empty, must name at least one lease")
        return lease.ReleaseReadLeaseRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            read_lease_id=lease_ids[0],
            more_read_lease_ids=lease_ids[1:],
        )

    def remove(self, trace_id: str, keys: Sequence[int]) -> meta.RemoveCacheRequest:
        """See `ManagerClient.remove`."""
        return meta.RemoveCacheRequest(trace_id=trace_id, instance_id=self.instance_id, block_keys=_keys(keys))

    def pin_prefix(self, trace_id: str, keys: Sequence[int], owner: str, ttl_seconds: int) -> pins.PinPrefixRequest:
        """See `ManagerClient.pin_prefix`."""
        return pins.PinPrefixRequest(
            trace_id=trace_id,
            instance_id=self.instance_id,
            block_keys=_keys(keys),
            owner=owner,
            ttl_seconds=_number("ttl_seconds", ttl_seconds),
        )

    def unpin(self, trace_id: str, pin_id: str) -> pins.UnpinPrefixRequest:
        """See `ManagerClient.unpin`."""
        return pins.UnpinPrefixRequest(trace_id=trace_id, instance_id=self.instance_id, pin_id=pin_id)

    def list_pins(self, trace_id: str) -> pins.ListPinsRequest:
        """See `ManagerClient.list_pins`."""
        return pins.ListPinsRequest(trace_id=trace_id, instance_id=self.instance_id)

    def report_missing(
        self,
        trace_id: str,
        parts: Sequence[tuple[int, LocationUri | str]],
        corrupt: Sequence[tuple[int, LocationUri | str, int]],
    ) -> pins.ReportMissingRequest:
        """See `ManagerClient.report_missing`."""
        _keys([key for key, _ in parts])
        _keys([key for key, _, _ in corrupt], "corrupt")
        missing = [pins.MissingPart(block_key=key, uri=str(uri)) for key, uri in parts]
        mismatched = [
            pins.MissingPart(block_key=key, uri=str(uri), mismatched_checksum=_checksum(checksum, 1))
            for key, uri, checksum in corrupt
        ]
        return pins.ReportMissingRequest(trace_id=trace_id, instance_id=self.instance_id, parts=[*missing, *mismatched])

    def report_pool(
        self, trace_id: str, storage: str, node_id: str, generation: int, capacity_bytes: int, valid_ms: int
    ) -> pools.ReportPoolRequest:
        """See `ManagerClient.report_pool`."""
        if generation not in _GENERATIONS:
            raise InvalidArgumentError(f"generation is {generation}, must be 1 to {_GENERATIONS.stop - 1}")
        if capacity_bytes not in _INT64 or capacity_bytes <= 0:
            raise InvalidArgumentError(f"capacity_bytes is {capacity_bytes}, must be 1 to {_INT64.stop - 1}")
        return pools.ReportPoolRequest(
            trace_id=trace_id,
            storage_unique_name=storage,
            node_id=node_id,
            generation=generation,
            capacity_bytes=capacity_bytes,
            valid_ms=_number("valid_ms", valid_ms),
        )

    def cluster_info(self, trace_id: str) -> meta.GetClusterInfoRequest:
        """See `ManagerClient.cluster_info`."""
        return meta.GetClusterInfoRequest(trace_id=trace_id, instance_id=self.instance_id)


def block_mask(field: str, mask: int | Sequence[bool], count: int) -> meta.BlockMask:
    """Return a mask of the first `mask` positions, or of those that are true.

    Raises:
        InvalidArgumentError: an offset outside 0..count, or another number of flags than `count`.
    """
    if isinstance(mask, int):
        if not 0 <= mask <= count:
            raise InvalidArgumentError(f"{field} is {mask}, an offset must be 0 to {count}")
        return meta.BlockMask(offset=mask)
    if len(mask) != count:
        raise InvalidArgumentError(f"{field} has {len(mask)} flags, must be one per key: {count}")
    return meta.BlockMask(bool_masks=meta.BoolMasksType(values=mask))


def _model_deployment(model: ModelDeployment) -> meta.ModelDeployment:
    return meta.ModelDeployment(
        model_name=model.model_name,
        dtype=model.dtype,
        use_mla=model.use_mla,
        tp_size=model.tp_size,
        dp_size=model.dp_size,
        lora_name=model.lora_name,
        pp_size=model.pp_size,
        extra=model.extra,
        user_data=model.user_data,
    )


def _location_checksums(checksums: Mapping[str, int]) -> meta.CacheLocation:
    specs = [meta.LocationSpec(name=name, checksum=_checksum(checksum)) for name, checksum in checksums.items()]
    return meta.CacheLocation(location_specs=specs)


def _checksum(checksum: int, least: int = 0) -> int:
    if not least <= checksum < 1 << 64:
        raise InvalidArgumentError(f"a checksum is {checksum}, must be {least} to {(1 << 64) - 1}")
    return checksum


def _keys(keys: Sequence[int], field: str = "keys") -> Sequence[int]:
    if keys and _INT64.start <= min(keys) and max(keys) < _INT64.stop:
        return keys
    for index, key in enumerate(keys):
        if key not in _INT64:
            raise InvalidArgumentError(f"{field}[{index}] is {key}, must be a signed 64-bit number")
    return keys


def _window(window: int, mode: MatchMode) -> int:
    if (window > 0) != (mode is MatchMode.SLIDING_WINDOW):
        raise InvalidArgumentError(f"window is {window}, must be > 0 for mode sliding_window and 0 for {mode}")
    return _number("window", window)


def _number(field: str, value: int) -> int:
    if value not in _INT32:
        raise InvalidArgumentError(f"{field} is {value}, must be 0 to {_INT32.stop - 1}")
    return value


# ---- answers ----


class MalformedAnswerError(Exception):
    """The manager's answer contradicts the request or itself."""


def parse_match_locations(
    answer: meta.GetCacheLocationResponse, mode: MatchMode, asked: int, spec_names: Collection[str]
) -> tuple[Location | None, ...]:
    """Return the locations of a match.

    Args:
        answer: of the manager.
        mode: of the match; prefix modes list the blocks found, the others one entry per key.
        asked: most locations there may be.
        spec_names: parts that a block must have to count as found; none = at least one part.

    Raises:
        MalformedAnswerError: too many or too few entries, or a uri that cannot be read.
    """
    count = len(answer.locations)
    if count > asked or (count != asked and not mode.is_prefix):
        raise MalformedAnswerError(f"{count} locations for {asked} keys")
    locations = [_location(message, spec_names) for message in answer.locations]
    if mode.is_prefix and None in locations:
        # A prefix ends at the first block that lacks a part.
        del locations[locations.index(None) :]
    return tuple(locations)


def encode_locations(answer: unread.UnreadCacheLocations, mode: MatchMode, asked: int) -> tuple[bytes, ...]:
    """Return the locations of a match as they are, for `decode_locations`; b"" where nothing is.

    Raises:
        MalformedAnswerError: too many or too few entries, or in a mode with an entry per key one that cannot be read.
    """
    count = len(answer.locations)
    if count > asked or (count != asked and not mode.is_prefix):
        raise MalformedAnswerError(f"{count} locations for {asked} keys")
    if mode.is_prefix:
        return tuple(answer.locations)
    return tuple([location if _has_uri(location) else b"" for location in answer.locations])


def decode_locations(encoded: Sequence[bytes], spec_names: Collection[str]) -> tuple[Location | None, ...]:
    """Return locations that `encoded_locations` gave; None for one that cannot be read or lacks a part."""
    return tuple([_decode_location(message, spec_names) for message in encoded])


def parse_write_grant(answer: meta.StartWriteCacheResponse, asked: int) -> WriteGrant:
    """Return the grant of a write for `asked` keys.

    Raises:
        MalformedAnswerError: no session, or mask and locations that do not fit the request.
    """
    if not answer.write_session_id:
        raise MalformedAnswerError("write_session_id is empty")
    mask = _mask(answer.block_mask, asked)
    if len(answer.locations) != mask.count(False):
        raise MalformedAnswerError(f"{len(answer.locations)} locations for {mask.count(False)} blocks to write")
    locations = [_location(message, ()) for message in answer.locations]
    complete = tuple(location for location in locations if location is not None)
    if len(complete) != len(locations):
        raise MalformedAnswerError("a block to write has no address")
    return WriteGrant(answer.write_session_id, mask, complete, answer.header.status.message)


def parse_cluster_info(answer: meta.GetClusterInfoResponse) -> ClusterInfo:
    """Return the answering manager and the leader."""
    leader = None
    if answer.HasField("leader_endpoint"):
        end = answer.leader_endpoint
        leader = Endpoint(end.node_id, end.host, end.meta_rpc_port, end.meta_http_port)
    return ClusterInfo(answer.self_node_id, answer.leader_node_id, leader)


def _location(message: meta.CacheLocation, spec_names: Collection[str]) -> Location | None:
    """Return the location, None when one of `spec_names` (or everything) is missing."""
    try:
        uris = {spec.name: LocationUri.parse(spec.uri) for spec in message.location_specs if spec.uri}
    except InvalidArgumentError as error:
        raise MalformedAnswerError(str(error)) from error
    if not uris or not uris.keys() >= set(spec_names):
        return None
    checksums = {spec.name: spec.checksum for spec in message.location_specs if spec.checksum}
    return Location(uris, message.type, message.checksum, checksums)


def _has_uri(location: bytes) -> bool:
    try:
        return any(spec.uri for spec in meta.CacheLocation.FromString(location).location_specs)
    except DecodeError as error:
        raise MalformedAnswerError(str(error)) from error


def _decode_location(message: bytes, spec_names: Collection[str]) -> Location | None:
    try:
        return _location(meta.CacheLocation.FromString(message), spec_names)
    except (MalformedAnswerError, DecodeError):
        return None


def _mask(mask: meta.BlockMask, count: int) -> tuple[bool, ...]:
    """Return one flag per key; flags that the manager left out at the end are false (wire.md 5.1)."""
    if mask.WhichOneof("info") == "bool_masks":
        flags: Sequence[bool] = mask.bool_masks.values
        if len(flags) > count:
            raise MalformedAnswerError(f"a mask of {len(flags)} flags for {count} keys")
        return tuple(flags) + (False,) * (count - len(flags))
    if not 0 <= mask.offset <= count:
        raise MalformedAnswerError(f"a mask offset of {mask.offset} for {count} keys")
    return (True,) * mask.offset + (False,) * (count - mask.offset)


# ---- `storage_configs` of a registration: the JSON list of the group's storages (wire.md 4.4) ----

_T = TypeVar("_T")
_SPECS: dict[str, type[StorageSpec]] = {
    "file": NfsStorageSpec,
    "hf3fs": ThreeFSStorageSpec,
    "vcns_hf3fs": VcnsThreeFSStorageSpec,
    "mooncake": MooncakeStorageSpec,
    "pace": TairMemPoolStorageSpec,
    "dummy": DummyStorageSpec,
}
# JSON documents spell this key differently from the messages.
_JSON_NAMES = {"master_service_entry": "master_server_entry"}


def parse_storage_configs(text: str) -> tuple[StorageConfig, ...]:
    """Return the storages of the list; kinds that this release does not know are left out.

    Args:
        text: as the manager answered it; "" is an empty list.

    Raises:
        InvalidArgumentError: not a list of storage configs.
    """
    try:
        entries = json.loads(text or "[]")
    except ValueError as error:
        raise InvalidArgumentError(f"storage_configs is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError("storage_configs is not a list of objects")
    return tuple(_storage(entry) for entry in entries if entry.get("type") in _SPECS)


def _storage(entry: Mapping[str, object]) -> StorageConfig:
    spec = entry.get("storage_spec", {})
    if not isinstance(spec, dict):
        raise InvalidArgumentError(f"storage_spec is {spec!r}, must be an object")
    return StorageConfig(
        _typed(values=entry, name="global_unique_name", kind=str, default=""),
        _spec(_SPECS[_typed(values=entry, name="type", kind=str, default="")], spec),
        is_available=_typed(values=entry, name="is_available", kind=bool, default=True),
    )


def _spec(spec_class: type[StorageSpec], values: Mapping[str, object]) -> StorageSpec:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(spec_class)}
    read = {
        name: _typed(values, _JSON_NAMES.get(name, name), type(default), default) for name, default in defaults.items()
    }
    return spec_class(**read)


def _typed(values: Mapping[str, object], name: str, kind: type[_T], default: _T) -> _T:
    value = values.get(name, default)
    if type(value) is not kind:
        raise InvalidArgumentError(f"{name} is {value!r}, must be of type {kind.__name__}")
    return value
