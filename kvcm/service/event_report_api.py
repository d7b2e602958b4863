"""The original's event reports: ReportEvent, and the two reads that answer from the reports.

`_Batch` reads the events of a request; nothing takes effect before all of them are read. Then they do within one step
of the event loop, so no other request sees half of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.manager import CacheManager
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.model.errors import (
    CapacityError,
    ErrorCode,
    InvalidArgumentError,
    KvcmError,
    NodeNotRegisteredError,
    NotReadyError,
    SnapshotRateLimitedError,
    StorageIOError,
    UnknownInstanceError,
)
from kvcm.model.instances import Instance, QueryType
from kvcm.model.keys import NO_MASK, mixed_array
from kvcm.model.locations import SpecUri, decode_chunk, encode_chunk, retag
from kvcm.model.storages import StorageType
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.residency.event_reports import MOST_MEDIA, BlockChange, EventReports
from kvcm.residency.host_matches import (
    MOST_JOINT_HOSTS,
    Flags,
    HostMatch,
    HostQuery,
    Joint,
    joint_matches,
    longest_held,
    matches,
)
from kvcm.residency.residency import InstanceResidency, Residency
from kvcm.service.calls import Call, Reply, instance_call
from kvcm.service.meta_api import block_keys_of, mask_of
from kvcm.service.request_limits import MAX_ENTRIES, MAX_NAME_BYTES, MAX_TEXT_BYTES, RequestLimits, check_text

__all__ = ["EventReportApi"]

_SERVICE: Final = "kv_cache_manager.proto.meta.MetaService"
_SOURCES: Final = {int(each): each for each in StorageType if each.is_event_report}
_REGISTER: Final = pb.EVENT_NODE_REGISTER
_ADD: Final = pb.EVENT_BLOCK_ADD
_DELETE: Final = pb.EVENT_BLOCK_DELETE
_HOST_DOWN: Final = pb.EVENT_HOST_DOWN
_HEARTBEAT: Final = pb.EVENT_HEARTBEAT
_SNAPSHOT: Final = pb.EVENT_BLOCK_SNAPSHOT
_MEMBERS: Final = {
    int(_REGISTER): "node_register",
    int(_ADD): "block_add",
    int(_DELETE): "block_delete",
    int(_HOST_DOWN): "host_down",
    int(_HEARTBEAT): "heartbeat",
    int(_SNAPSHOT): "block_snapshot",
}
_MOST_DIGITS: Final = 20  # of an int64 with its sign, or an uint64
_LEAST_KEY, _SIGN, _MOST_KEY = -(1 << 63), 1 << 63, (1 << 64) - 1
_BLOCKS_AT_ONCE: Final = 1024  # that are read before others have their turn: some milliseconds
_LOCATIONS_AT_ONCE: Final = 1024
_LOCATIONS_FIELD: Final = 1  # of CacheLocationVector


class EventReportApi:
    """Handlers of the calls about reported blocks.

    Args:
        cache: blocks in storages.
        registry: groups.
        residency: blocks in engines' own memory.
        limits: sizes of requests.
    """

    def __init__(self, cache: CacheManager, registry: Registry, residency: Residency, limits: RequestLimits) -> None:
        self._cache = cache
        self._registry = registry
        self._residency = residency
        self._limits = limits

    def calls(self) -> list[Call]:
        """Return the calls."""

        call = partial(instance_call, _SERVICE)
        return [
            call("ReportEvent", pb.ReportEventRequest, pb.ReportEventResponse, self.report),
            call("GetHostCacheState", pb.GetHostCacheStateRequest, pb.GetHostCacheStateResponse, self.host_state),
            call(
                "GetCacheLocationsByBackend",
                pb.GetCacheLocationsByBackendRequest,
                pb.GetCacheLocationsByBackendResponse,
                self.locations_by_backend,
            ),
        ]

    # ReportEvent.

    async def report(self, request: Any) -> Reply:
        """Answer ReportEvent. The events are no transaction: the answer says of each what became of it."""
        instance = self._cache.cache(request.instance_id).instance
        if not request.events:
            return Reply(pb.ReportEventResponse())
        residency = self._residency.open(instance)
        source = _source_of(request, instance, residency.events)
        host = request.host_ip_port
        _check_host(host)
        batch = _Batch(
            instance,
            self._limits.max_keys,
            known_media=residency.events.media(source, host),
            may_add=residency.may_add(),
            is_out=residency.events.is_tombstoned(source, host),
        )
        life = residency.events.life(source, host)
        await batch.read(request.events)
        if residency.events.life(source, host) != life:  # reading a long request gives way to others
            raise NodeNotRegisteredError(
                f"the reporter of {host!r} ended or registered while the request was being read: send it again"
            )
        message = pb.ReportEventResponse()
        code, text = _apply(batch, residency.events, source, host, message)
        group = self._registry.groups.find(instance.instance_group_name)
        message.extra_info = group.extra_info if group is not None else ""
        return Reply(message, code=code, text=text)

    # GetHostCacheState.

    async def host_state(self, request: Any) -> Reply:
        """Answer GetHostCacheState. An instance that nothing was reported of has no hosts, which is no error."""
        cache = self._cache.cache(request.instance_id)
        asked = _Asked.of(request, cache.instance)
        keys = mixed_array(request.block_cache_keys)
        if not len(keys):
            return Reply(pb.GetHostCacheStateResponse())
        residency = self._residency.view(cache.instance)
        pooled = None
        if asked.joint_hosts and asked.counts_pool and len(residency.columns):
            pooled = await self._stored_parts(cache, keys, StorageType.ST_TAIRMEMPOOL)
        stored_blocks = await self._stored_prefix(cache, keys, asked.needs_linear) if len(residency.columns) else 0
        # From here on nothing waits: all numbers are of one moment.
        hosts = _HostStates(residency, keys, asked).found(pooled)
        for host in hosts:
            host.storage_prefix_blocks = stored_blocks
        return Reply(pb.GetHostCacheStateResponse(hosts=hosts))

    async def _stored_prefix(self, cache: InstanceCache, keys: NDArray[np.int64], needs_linear: bool) -> int:
        mode = MatchMode.PREFIX_MATCH_WITH_MAMBA if needs_linear else MatchMode.PREFIX_MATCH
        try:
            return len((await self._cache.match(cache, MatchQuery(mode, keys.tolist()), peek=True)).keys)
        except (NotReadyError, StorageIOError):
            return 0  # storages that cannot be read hold nothing for now; engines' memory still counts

    async def _stored_parts(self, cache: InstanceCache, keys: NDArray[np.int64], storage_type: StorageType) -> Flags:
        """Return which parts of the blocks lie in storages of a type, in the order of the holders' parts."""
        holders = self._residency.view(cache.instance).holders
        flags = np.zeros((len(keys), holders.parts), np.bool_)
        answers = await self._answers(cache, keys, storage_type)
        places = [place for place, answer in enumerate(answers) if answer is not None]
        names = cache.present.map([answer for answer in answers if answer is not None])
        for place, parts in zip(places, names, strict=True):
            rows = [row for name in parts if (row := holders.row_of_part(name)) >= 0]
            flags[place, rows] = True
        return flags

    async def _answers(
        self, cache: InstanceCache, keys: NDArray[np.int64], storage_type: StorageType
    ) -> Sequence[bytes | None]:
        try:
            return await self._cache.answers(cache, keys.tolist(), stop_at_miss=False, of_type=storage_type)
        except (NotReadyError, StorageIOError):
            return [None] * len(keys)

    # GetCacheLocationsByBackend.

    async def locations_by_backend(self, request: Any) -> Reply:
        """Answer GetCacheLocationsByBackend: for each key what each selector chooses, in the selectors' order."""
        cache = self._cache.cache(request.instance_id)
        if request.query_type != pb.QT_BATCH_GET:
            raise InvalidArgumentError(f"query_type is {request.query_type}, must be QT_BATCH_GET")
        selectors = _selectors_of(request)
        keys = np.array(await block_keys_of("GetCacheLocationsByBackend", request, cache.instance), np.int64)
        wanted = _spec_names_of(request, len(keys))
        mask = mask_of(request, "block_mask") if request.HasField("block_mask") else NO_MASK
        unmasked = np.array(mask.unmasked(len(keys)), np.int64)
        names = [wanted[place] for place in unmasked.tolist()] if wanted else []
        message = pb.GetCacheLocationsByBackendResponse()
        message.key_locations.extend([pb.CacheLocationVector() for _ in range(len(keys))])
        for storage_type, ends_at_gap in selectors:
            if storage_type.is_event_report:
                found = self._reported(cache.instance, storage_type, keys[unmasked], names, ends_at_gap)
            else:
                found = _stored(await self._answers(cache, keys[unmasked], storage_type), names)
            for count, (place, specs) in enumerate(zip(unmasked.tolist(), found, strict=True), start=1):
                if specs:
                    location = retag(encode_chunk(storage_type, len(specs), specs), _LOCATIONS_FIELD)
                    message.key_locations[place].MergeFromString(location)
                if count % _LOCATIONS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return Reply(message)

    def _reported(
        self,
        instance: Instance,
        source: StorageType,
        keys: NDArray[np.int64],
        names: Sequence[str],
        ends_at_gap: bool,
    ) -> Sequence[tuple[SpecUri, ...]]:
        residency = self._residency.view(instance)
        events, holders = residency.events, residency.holders
        rows = np.array([holders.row_of_part(name) for name in names], np.int64) if names else None
        peer = longest_held(
            holders,
            residency.columns,
            keys,
            units=holders.mask_of(events.units(frozenset(), [source])),
            hosts=events.hosts_of(source),
            part_of=rows,
            ends_at_gap=ends_at_gap,
        )
        if peer is None:
            return [()] * len(keys)
        found = events.locations(source, peer, keys, names)
        if ends_at_gap and () in found:
            gap = found.index(())
            found[gap:] = [()] * (len(found) - gap)
        return found


# ReportEvent: who reports, what whole requests are refused for, what single events are.


def _source_of(request: Any, instance: Instance, events: EventReports) -> StorageType:
    source = _SOURCES.get(request.storage_type)
    if source is None:
        allowed = " or ".join(each.name for each in _SOURCES.values())
        raise InvalidArgumentError(f"ReportEvent.storage_type is {request.storage_type}, must be {allowed}")
    if events.times_of(source) is None:
        raise UnknownInstanceError(
            f"group {instance.instance_group_name!r} of instance {instance.instance_id!r} has no enabled event report "
            f"storage of type {source.name}: add one with AddStorage (storage_type and event_report), and list it in "
            "the group's event_report_storage_candidates"
        )
    return source


def _check_host(host: str) -> None:
    if not 1 <= len(host.encode()) <= MAX_NAME_BYTES or not host.isprintable() or "#" in host:
        raise InvalidArgumentError(
            f"ReportEvent.host_ip_port is {host[:MAX_NAME_BYTES]!r}, must be 1 to {MAX_NAME_BYTES} bytes without "
            "control characters and '#': host:port, as routers call the engine"
        )


@dataclass(slots=True)
class _Unit:
    """What events say of one part in one kind of memory, in their order."""

    keys: list[int] = field(default_factory=list)
    uris: list[str | None] = field(default_factory=list)
    last_uri: str | None = None


_Shape = Sequence[tuple[list[int], list[str | None], str | None]]
"""Where the key of a block goes: keys and uris of each of its units, and its uri there."""

# Most blocks of a request differ in their keys alone: kind of memory, parts, and uris that name the memory are the
# same. So an event is compared as it is encoded, and the bytes behind its key are read once for all events that share
# them: a quarter of the time. An event that is encoded in another way is read field by field.

_ADD_HEAD: Final = bytes((0x08, _ADD, 0x1A))  # event_type, and the tag of block_add
_DELETE_HEAD: Final = bytes((0x08, _DELETE, 0x22))
_KEY_TAG: Final = 0x0A  # block_key of either
_MOST_SHAPES: Final = 64  # of a request; where each block has uris of its own, there is no use in more


def _split(encoded: bytes) -> tuple[bytes, bytes]:
    """Return the text of the key and all that is behind it; two empty ones where the event is encoded otherwise."""
    at = 4 if encoded[3] < 128 else 5  # behind the length of the member
    if (at == 5 and encoded[4] >= 128) or len(encoded) < at + 2 or encoded[at] != _KEY_TAG:
        return b"", b""
    end = at + 2 + encoded[at + 1]
    return encoded[at + 2 : end], encoded[end:]


def _try_read(encoded: bytes, shape_of: dict[bytes, _Shape]) -> bool:
    """Read a block that is like one before it but for its key; return whether it is."""
    key, rest = _split(encoded)
    shape = shape_of.get(rest)
    if shape is None or not key.isdigit() or len(key) > _MOST_DIGITS:
        return False
    number = int(key)
    if number >= _SIGN:
        if number > _MOST_KEY:
            return False
        number -= _MOST_KEY + 1
    for keys, uris, uri in shape:
        keys.append(number)
        uris.append(uri)
    return True


def _keep_shape(encoded: bytes, shape: _Shape, shapes: dict[bytes, dict[bytes, _Shape]]) -> None:
    shape_of = shapes.get(encoded[:3])
    if shape_of is not None and len(shape_of) < _MOST_SHAPES and (rest := _split(encoded)[1]):
        shape_of[rest] = shape


def _read_block(number: int, shape: _Shape) -> None:
    for keys, uris, uri in shape:
        keys.append(number)
        uris.append(uri)


class _Batch:
    """The events of a request.

    Args:
        instance: whose blocks they are about.
        most_blocks: of a snapshot.
        known_media: kinds of memory that the reporter holds something in.
        may_add: whether blocks can be added.
        is_out: whether the reporter was unregistered, so that nothing counts before it registers.

    Attributes:
        codes: outcome of each event.
        refusal: outcome and reason of the first event that was refused; None where none was.
        registers: whether there is a registration.
        beats: whether there is a heartbeat.
        is_down: whether the host is down.
        snapshot_at: position of a snapshot, -1 for none.
    """

    def __init__(
        self, instance: Instance, most_blocks: int, *, known_media: set[str], may_add: bool, is_out: bool
    ) -> None:
        self._names = frozenset(instance.spec_names)
        self._most_blocks = most_blocks
        self._known_media = known_media
        self._may_add = may_add
        self._is_out = is_out
        self._media: dict[str, dict[str, _Unit]] = {}
        self._kinds: Counter[int] = Counter()  # of events that were read field by field
        self._shapes: dict[bytes, dict[bytes, _Shape]] = {_ADD_HEAD: {}, _DELETE_HEAD: {}}
        self.codes: list[ErrorCode] = []
        self.refusal: tuple[ErrorCode, str] | None = None
        self._refused_at = -1
        self.registers = self.beats = self.is_down = False
        self.snapshot_at = -1

    async def read(self, events: Sequence[Any]) -> None:
        """Read all events, and give way to other requests between them.

        Raises:
            InvalidArgumentError: such events are not allowed together.
        """
        self.codes = [ErrorCode.OK] * len(events)
        shapes = self._shapes
        for position, item in enumerate(events):
            encoded = item.SerializeToString()
            shape_of = shapes.get(encoded[:3])
            if shape_of is None or not _try_read(encoded, shape_of):
                await self._read_item(position, item, encoded)
            if position % _BLOCKS_AT_ONCE == _BLOCKS_AT_ONCE - 1:
                await asyncio.sleep(0)
        self._check_kinds(len(events))

    def _check_kinds(self, events: int) -> None:
        kinds = self._kinds
        snapshots = kinds[_SNAPSHOT]
        if snapshots > 1:
            raise InvalidArgumentError(f"ReportEvent.events has {snapshots} snapshots, at most 1 is allowed")
        if snapshots and (kinds[_ADD] or kinds[_DELETE]):
            raise InvalidArgumentError(
                "ReportEvent.events has a snapshot and single blocks: a snapshot is all that a host holds"
            )
        if kinds[_HOST_DOWN] and events > 1:
            raise InvalidArgumentError("ReportEvent.events: EVENT_HOST_DOWN must be the only event of a request")

    def refuse(self, position: int, error: KvcmError) -> None:
        """Note why an event has no effect."""
        self.codes[position] = error.code
        if self.refusal is None or position < self._refused_at:
            self._refused_at = position
            self.refusal = error.code, f"ReportEvent.events[{position}]: {error}"

    def changes(self) -> list[BlockChange]:
        """Return what the events say of blocks. Units with the same blocks share an array."""
        changes = []
        for medium, units in self._media.items():
            keys: list[int] = []
            mixed = _NO_KEYS
            for part, unit in units.items():
                if unit.keys != keys:
                    keys, mixed = unit.keys, mixed_array(unit.keys)
                if unit.keys:
                    changes.append(BlockChange(medium, part, mixed, unit.uris))
        return changes

    async def _read_item(self, position: int, item: Any, encoded: bytes) -> None:
        try:
            if item.event_type == _SNAPSHOT:
                await self._read_snapshot(position, item)
            else:
                self._read_event(item, encoded)
        except KvcmError as error:
            self.refuse(position, error)

    def _read_event(self, item: Any, encoded: bytes) -> None:
        kind = item.event_type
        self._kinds[kind] += 1
        _check_member(item)
        if kind == _REGISTER:
            self._register(item.node_register.mediums)
        elif kind == _HOST_DOWN:
            self.is_down = True
        else:
            self._check_registered()
            if kind == _HEARTBEAT:
                self.beats = True
            else:
                block = item.block_add if kind == _ADD else item.block_delete
                shape = self._shape(block) if kind == _ADD else self._delete_shape(block)
                _read_block(_number(block.block_key), shape)
                _keep_shape(encoded, shape, self._shapes)

    def _check_registered(self) -> None:
        if self._is_out:
            raise NodeNotRegisteredError(
                "the reporter was unregistered: send EVENT_NODE_REGISTER, then this event again"
            )

    def _register(self, media: Sequence[str]) -> None:
        for medium in media[:MAX_ENTRIES]:
            _check_medium("node_register.mediums", medium)
        self.registers, self._is_out = True, False

    def _shape(self, block: Any) -> _Shape:
        """Read what a block of a snapshot, or one that is added, has beside its key."""
        if not self._may_add:
            raise CapacityError("there is no room for more blocks: raise kvcm.residency.max_bytes")
        medium, specs = block.medium, block.specs
        if len(specs) > 2 * len(self._names):  # else each is read, to say which is wrong
            raise InvalidArgumentError(f"specs has {len(specs)} entries, the instance has {len(self._names)} specs")
        units = self._media.get(medium)
        if units is None:
            units = self._open_medium(medium)
        found = []
        for spec in specs:
            name, uri = spec.name, spec.uri
            unit = units.get(name)
            if unit is None:
                unit = self._open_unit(units, name)
            if uri != unit.last_uri:
                _check_uri(uri)
                unit.last_uri = uri
            found.append((unit.keys, unit.uris, uri))
        if len(found) != 1:
            _check_names("specs", [spec.name for spec in specs])
        return found

    def _delete_shape(self, block: Any) -> _Shape:
        medium, names = block.medium, block.spec_names
        if len(names) > 2 * len(self._names):
            raise InvalidArgumentError(
                f"spec_names has {len(names)} entries, the instance has {len(self._names)} specs"
            )
        units = self._media.get(medium)
        if units is None:
            units = self._open_medium(medium)
        if len(names) != 1:
            _check_names("spec_names", names)
        found = [units.get(name) or self._open_unit(units, name) for name in names]
        return [(unit.keys, unit.uris, None) for unit in found]

    def _open_medium(self, medium: str) -> dict[str, _Unit]:
        _check_medium("medium", medium)
        known = self._known_media | self._media.keys() | {medium}
        if len(known) > MOST_MEDIA:
            raise InvalidArgumentError(
                f"medium {medium[:MAX_NAME_BYTES]!r} is one more than the {MOST_MEDIA} kinds of memory that a reporter "
                "may have"
            )
        return self._media.setdefault(medium, {})

    def _open_unit(self, units: dict[str, _Unit], name: str) -> _Unit:
        if name not in self._names:
            raise InvalidArgumentError(
                f"spec name {name[:MAX_NAME_BYTES]!r} is not one of the instance's location_spec_infos: "
                f"{', '.join(sorted(self._names)[:8])}"
            )
        return units.setdefault(name, _Unit())

    async def _read_snapshot(self, position: int, item: Any) -> None:
        self._kinds[_SNAPSHOT] += 1
        _check_member(item)
        self._check_registered()
        blocks = item.block_snapshot.blocks
        if len(blocks) > self._most_blocks:
            raise InvalidArgumentError(
                f"block_snapshot.blocks has {len(blocks)} entries, at most {self._most_blocks} are allowed: send the "
                "rest as EVENT_BLOCK_ADD"
            )
        try:
            await self._read_blocks(blocks)
        except KvcmError:
            self._media.clear()  # a snapshot counts as a whole
            raise
        self.snapshot_at = position

    async def _read_blocks(self, blocks: Sequence[Any]) -> None:
        keys: dict[str, list[int]] = {}
        self._known_media = set()  # a snapshot replaces them
        for place, block in enumerate(blocks):
            try:
                number, shape = _number(block.block_key), self._shape(block)
                _read_block(number, shape)
                keys.setdefault(block.medium, []).append(number)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"block_snapshot.blocks[{place}]: {error}") from None
            if place % _BLOCKS_AT_ONCE == _BLOCKS_AT_ONCE - 1:
                await asyncio.sleep(0)
        for medium, numbers in keys.items():
            distinct, counts = np.unique(np.array(numbers, np.int64), return_counts=True)
            if len(distinct) < len(numbers):
                raise InvalidArgumentError(
                    f"block_snapshot.blocks has key {distinct[counts.argmax()]} in medium {medium[:MAX_NAME_BYTES]!r} "
                    f"{counts.max()} times: give each block once, with all its specs"
                )


_NO_KEYS: Final = np.zeros(0, np.int64)


def _apply(batch: _Batch, events: EventReports, source: StorageType, host: str, message: Any) -> tuple[ErrorCode, str]:
    """Let a batch take effect, fill in the answer, and return its outcome and the reason."""
    had_generation = not events.is_tombstoned(source, host) and bool(events.generation(source, host))
    if batch.is_down:
        events.host_down(source, host)
    if batch.registers:
        events.register(source, host)
    if batch.beats:
        events.heartbeat(source, host)
    if batch.snapshot_at >= 0:
        try:
            events.snapshot(source, host, batch.changes())
            had_generation = True
        except SnapshotRateLimitedError as error:
            message.retry_after_ms = error.retry_after_ms
            batch.refuse(batch.snapshot_at, error)
    elif changes := batch.changes():
        events.change(source, host, changes)
    message.committed_snapshot_version = events.generation(source, host)
    message.snapshot_required = not had_generation
    if batch.refusal is None:
        return ErrorCode.OK, ""
    message.item_results.extend(batch.codes)
    return batch.refusal


def _check_member(item: Any) -> None:
    kind, given = item.event_type, item.WhichOneof("event_params")
    member = _MEMBERS.get(kind)
    if member is None:
        raise InvalidArgumentError(f"event_type is {kind}, must be one of {', '.join(_EVENT_NAMES)}")
    if given != member:
        raise InvalidArgumentError(
            f"event_type is {pb.ReportEventType.Name(kind)}, which needs {member}, also where that is empty: "
            f"{given or 'nothing'} is given"
        )


_EVENT_NAMES: Final = [pb.ReportEventType.Name(kind) for kind in (*_MEMBERS,)]


def _number(text: str) -> int:
    """Return the key that a decimal text stands for, with sign."""
    if len(text) <= _MOST_DIGITS and text.isascii() and text.removeprefix("-").isdecimal():
        number = int(text)
        if _LEAST_KEY <= number < _SIGN:
            return number
        if _SIGN <= number <= _MOST_KEY:
            return number - (_MOST_KEY + 1)
    raise InvalidArgumentError(
        f"block_key is {text[:MAX_NAME_BYTES]!r}, must be a decimal int64 or uint64 without a plus sign and blanks"
    )


def _check_medium(path: str, medium: str) -> None:
    if len(medium.encode()) > MAX_NAME_BYTES or "#" in medium or not medium.isprintable():
        raise InvalidArgumentError(
            f"{path} is {medium[:MAX_NAME_BYTES]!r}, must be at most {MAX_NAME_BYTES} bytes without control characters "
            "and '#'"
        )


def _check_names(path: str, names: Sequence[str]) -> None:
    require(names, path, "is required: the parts of the block, as in the instance's location_spec_infos")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    require(not repeated, path, f"names {repeated[:1]} more than once")


def _check_uri(uri: str) -> None:
    check_text("uri", uri, MAX_TEXT_BYTES)
    scheme, separator, _ = uri.partition("://")
    if not scheme or not separator or not uri.isprintable():
        raise InvalidArgumentError(f"uri is {uri[:MAX_NAME_BYTES]!r}, must be <scheme>://<address> without blanks")
    query = uri.partition("#")[0].partition("?")[2]
    if any(param.partition("=")[0] == "s_version" for param in query.split("&")):
        raise InvalidArgumentError(
            f"uri is {uri[:MAX_NAME_BYTES]!r}, must not have the parameter s_version: the manager adds it to answers"
        )


# GetHostCacheState.


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks of hosts.

    Attributes:
        needs_linear: whether the last block of a prefix must have its linear-attention parts, too.
        media: kinds of memory that count; none for all.
        peer_hosts: hosts for which a peer is looked for.
        joint_hosts: hosts for which `global` is computed.
        counts_pool: whether blocks in memory pools count there.
        counts_peer: whether blocks of a peer count there.
        taken_off: blocks that a prefix counts less.
    """

    needs_linear: bool
    media: frozenset[str]
    peer_hosts: int
    joint_hosts: int
    counts_pool: bool
    counts_peer: bool
    taken_off: int

    @classmethod
    def of(cls, request: Any, instance: Instance) -> _Asked:
        """Return what a request asks.

        Raises:
            InvalidArgumentError: a field is out of range.
        """
        for name in ("p2p_host_count", "global_kvs_host_count", "top_k_host_count"):
            value = getattr(request, name)
            if value < 0:
                raise InvalidArgumentError(f"GetHostCacheState.{name} is {value}, must be at least 0")
        unknown = [each for each in request.backend_types if each not in _JOINT_TYPES]
        if unknown:
            raise InvalidArgumentError(
                f"GetHostCacheState.backend_types has {unknown[0]}, allowed are {', '.join(_JOINT_TYPES.values())}"
            )
        joint, types = request.top_k_host_count, set(request.backend_types)
        if not joint and request.global_kvs_host_count:  # how an earlier state of the original asked for the same
            joint = request.global_kvs_host_count
            types |= {pb.ST_TAIRMEMPOOL} | ({pb.ST_EVENT_REPORT_L2} if request.enable_p2p else set())
        return cls(
            needs_linear=_query_type_of(request, instance) is QueryType.QT_PREFIX_MATCH_WITH_MAMBA,
            media=frozenset(request.medium),
            peer_hosts=min(request.p2p_host_count, MOST_JOINT_HOSTS),
            joint_hosts=min(joint, MOST_JOINT_HOSTS) if types else 0,
            counts_pool=pb.ST_TAIRMEMPOOL in types,
            counts_peer=pb.ST_EVENT_REPORT_L2 in types,
            taken_off=int(instance.model_deployment.use_eagle_pop),
        )


_JOINT_TYPES: Final = {
    int(pb.ST_TAIRMEMPOOL): "ST_TAIRMEMPOOL",
    int(pb.ST_EVENT_REPORT_L2): "ST_EVENT_REPORT_L2",
}
_HOST_QUERY_TYPES: Final = (QueryType.QT_PREFIX_MATCH, QueryType.QT_PREFIX_MATCH_WITH_MAMBA)


def _query_type_of(request: Any, instance: Instance) -> QueryType:
    kind = request.query_type or instance.default_query_type
    if kind not in _HOST_QUERY_TYPES:
        raise InvalidArgumentError(
            f"GetHostCacheState.query_type is {request.query_type}, must be "
            f"{' or '.join(each.name for each in _HOST_QUERY_TYPES)}, or left out where the instance has one of them "
            f"as default_query_type, which is {instance.default_query_type.name}"
        )
    return QueryType(kind)


class _HostStates:
    """The hosts that hold the beginning of a prompt.

    Args:
        residency: blocks in engines' own memory.
        keys: mixed keys of the prompt.
        asked: what counts.
    """

    def __init__(self, residency: InstanceResidency, keys: NDArray[np.int64], asked: _Asked) -> None:
        self._residency = residency
        self._holders = residency.holders
        self._asked = asked
        own = self._holders.mask_of(residency.units(asked.media)) if asked.media else self._holders.every_unit()
        self._query = HostQuery(keys, own, asked.needs_linear, self._holders.full_parts)

    def found(self, pooled: Flags | None) -> list[Any]:
        """Return the hosts, those first that hold most themselves.

        Args:
            pooled: parts of each block that lie in memory pools; None where these do not count.
        """
        asked = self._asked
        local = matches(self._holders, self._residency.columns, self._query)
        # Each joint host is compared with all others, block by block: of long prompts and many hosts, fewer are.
        most = max(1, _MOST_CELLS // (len(self._query.keys) * max(1, len(self._residency.columns))))
        joint = self._joint(local[: min(asked.joint_hosts, most)], pooled, with_peer=asked.counts_peer)
        peers = self._joint(local[: min(asked.peer_hosts, most)], None, with_peer=True)
        hosts = []
        for place, (host, blocks) in enumerate(local):
            reachable = joint[place].blocks if place < len(joint) else blocks
            alone = Joint(blocks, 0)
            peer = peers[place] if place < len(peers) else alone
            if not asked.peer_hosts:
                peer = Joint(0, 0)
            message = pb.HostCacheMatch(
                host_ip_port=host,
                local=max(0, blocks - asked.taken_off),
                p2p_1_fetch=peer.fetched,
                p2p_1_total_match=max(0, peer.blocks - asked.taken_off),
            )
            setattr(message, "global", max(0, reachable - asked.taken_off))  # no name in Python
            if message.local or message.p2p_1_total_match or reachable > asked.taken_off:
                hosts.append(message)
        return hosts

    def _joint(self, hosts: Sequence[HostMatch], pooled: Flags | None, *, with_peer: bool) -> list[Joint]:
        if not hosts:
            return []
        events, peers = self._residency.events, None
        if with_peer:
            sources = [StorageType.ST_EVENT_REPORT_L2]
            peers = events.hosts_of(*sources), self._holders.mask_of(events.units(self._asked.media, sources))
        return joint_matches(
            self._holders,
            self._residency.columns,
            self._query,
            hosts=[host for host, _ in hosts],
            peers=peers,
            stored=None if pooled is None else pooled.__getitem__,
        )


# GetCacheLocationsByBackend.


def _selectors_of(request: Any) -> list[tuple[StorageType, bool]]:
    """Return the type of each selector, and whether it ends at a gap."""
    path = "GetCacheLocationsByBackend.backend_selectors"
    require(request.backend_selectors, path, "is required: the types of storages that are wanted")
    found: list[tuple[StorageType, bool]] = []
    for place, selector in enumerate(request.backend_selectors):
        try:
            storage_type = StorageType(selector.backend_type)
        except ValueError:
            storage_type = StorageType.ST_UNSPECIFIED
        require(storage_type, f"{path}[{place}].backend_type", f"is {selector.backend_type}, which is no storage type")
        allowed = _STRATEGIES[storage_type.is_event_report]
        if selector.strategy not in allowed:
            names = ", ".join(map(pb.LocationSelectStrategy.Name, allowed))
            raise InvalidArgumentError(
                f"{path}[{place}].strategy is {selector.strategy}, must be one of {names} with {storage_type.name}"
            )
        if storage_type in {each for each, _ in found}:
            raise InvalidArgumentError(f"{path}[{place}].backend_type is {storage_type.name} once more: give it once")
        found.append((storage_type, selector.strategy != pb.LSS_V6D_COVERAGE))
    return found


_MOST_CELLS: Final = 1 << 24  # of a block and a pair of hosts: some hundred milliseconds
_STRATEGIES: Final = {
    True: (pb.LSS_UNSPECIFIED, pb.LSS_V6D_PREFIX, pb.LSS_V6D_COVERAGE),
    # The fastest storage is the answer to both: the original draws one, which makes two answers to one question.
    False: (pb.LSS_UNSPECIFIED, pb.LSS_WEIGHTED_RANDOM),
}


def _spec_names_of(request: Any, keys: int) -> list[str]:
    names = list(request.location_spec_names)
    path = "GetCacheLocationsByBackend.location_spec_names"
    if names and len(names) != keys:
        raise InvalidArgumentError(f"{path} has {len(names)} entries, must have none or one for each of {keys} keys")
    if "" in names:
        raise InvalidArgumentError(f"{path}[{names.index('')}] is empty, must be a spec name")
    return names


def _stored(answers: Sequence[bytes | None], names: Sequence[str]) -> list[tuple[SpecUri, ...]]:
    """Return the parts of each block in storages, or the one that is wanted."""
    found = []
    for place, answer in enumerate(answers):
        specs = decode_chunk(answer).specs if answer is not None else ()
        found.append(tuple(spec for spec in specs if spec.uri and (not names or spec.name == names[place])))
    return found
