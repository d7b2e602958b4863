"""Export and import of an index. An export is a file of frames, each with a checksum, and a trailer with one over all.

::

    file     "KVCMIDX" · format version (1 byte) · frame · frame · ... · trailer
    frame    kind (1 byte) · length of the body (uint32, big endian) · xxh3_128 of kind and body (16 bytes) · body
    head     "H"  msgpack [release, cluster id, group or "", unix seconds]
    document "D"  msgpack [kind, document]            kind: storage, quota, group, instance, account, key, taken_key,
                                                      pin; document: kvcm/registry/document_cache.py
    records  "R"  msgpack [instance id, [[key, record, last access, reads], ...]]       record: kvcm/index/codec.py
    trailer  "E"  msgpack [documents, records, xxh3_128 of all bytes before the trailer]

Invariants:

* The documents of an instance and of the storages of its records come before the records.
* A file without a trailer, or with something behind it, is rejected: it was cut off.
* Reading and writing hold one frame at a time.
* An export reads every record at one moment, different records at different ones. Locations that are being written are
  left out, since sessions are not exported, and blocks without another location with them. Locations that are being
  deleted are exported: they count as usage until their bytes are freed.
* An import changes nothing that exists: equal documents are fine, different ones reject the import before it writes
  anything, and a known block is kept. So an interrupted import is simply run again. Instances get new numbers, and
  quotas are reported and not enforced, so that a deployment can move to one with tighter quotas.

Rejected: zip and tar (their directories are at the end, a pipe cannot be checked on the way); JSON lines (three times
the size, chunks are bytes).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from struct import Struct
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_128, xxh3_128_digest

from kvcm import __version__
from kvcm.cache.instance_cache import BATCH_KEYS, OpenCaches
from kvcm.cache.pins import Pin, PinBudgets, PinnedLocation, PinnedLocations, Pins
from kvcm.cache.quotas import Ledger
from kvcm.index.backends.backend import Access, Change, IndexBackend
from kvcm.index.codec import decode_payloads, encode_payload
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, DuplicateEntityError, InvalidArgumentError, StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup, MetaIndexerConfig, MetaStorageBackendConfig
from kvcm.model.instances import Instance, Placement
from kvcm.model.keys import mixed, unmixed
from kvcm.model.locations import BlockRecord, LocationStatus, StorageKey
from kvcm.model.principals import Account, ApiKey
from kvcm.model.storages import StorageConfig
from kvcm.registry.api_keys import ImportedKey
from kvcm.registry.document_cache import DocumentCache, decode_document, encode_document
from kvcm.registry.registry import Registry
from kvcm.registry.validation import check_global_quota, check_group, check_instance, check_storage, most_shards
from kvcm.store.store import UNVERIFIED, Store

__all__ = [
    "KINDS",
    "ArchiveReader",
    "ArchiveWriter",
    "Document",
    "Exported",
    "ExportedPin",
    "Exporter",
    "Head",
    "Imported",
    "Importer",
    "PinImport",
    "Row",
    "Rows",
    "Trailer",
    "decode_exported",
    "exported_pins",
    "head_of",
    "title",
    "title_parts",
    "without_sessions_and_pins",
]

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"KVCMIDX"
_FRAME: Final = Struct(">cI16s")
_MOST_FRAME_BYTES: Final = 1 << 28  # a damaged length must not ask for all memory
_HEAD, _DOCUMENT, _ROWS, _TRAILER = b"H", b"D", b"R", b"E"
Body = TypeVar("Body")


class Head(NamedTuple):
    """What an export is of.

    Attributes:
        release: that wrote it.
        cluster_id: of the deployment.
        group: the only one that it holds, "" for all.
        written_at: unix seconds.
    """

    release: str
    cluster_id: str
    group: str
    written_at: float


class Document(NamedTuple):
    """A document of the registry.

    Attributes:
        kind: as above.
        document: as the registry encodes it.
    """

    kind: str
    document: bytes


class Row(NamedTuple):
    """A block: its record, and when it was last read."""

    key: int
    record: BlockRecord
    access: Access


class Rows(NamedTuple):
    """Some blocks of one instance."""

    instance_id: str
    rows: Sequence[Row]


class Trailer(NamedTuple):
    """How much came before it."""

    documents: int
    records: int


class _StoredRow(NamedTuple):
    key: int
    record: bytes
    read_at: int
    reads: int


class _StoredRows(NamedTuple):
    instance_id: str
    rows: list[_StoredRow]


class _StoredTrailer(NamedTuple):
    documents: int
    records: int
    digest: bytes


_encode = msgspec.msgpack.encode


class ArchiveWriter:
    """Writes an export.

    Args:
        file: takes the bytes.
        head: what it is of.
    """

    def __init__(self, file: BinaryIO, head: Head) -> None:
        self._file = file
        self._all = xxh3_128()
        self.documents = 0
        self.records = 0
        self._put(_MAGIC + bytes((FORMAT_VERSION,)))
        self._put(_framed(_HEAD, _encode(head)))

    def document(self, document: Document) -> None:
        """Write a document of the registry."""
        self._put(_framed(_DOCUMENT, _encode(document)))
        self.documents += 1

    def rows(self, rows: Rows) -> None:
        """Write blocks."""
        keys = unmixed([row.key for row in rows.rows])
        stored = [
            _StoredRow(key, encode_payload(row.record), *row.access) for key, row in zip(keys, rows.rows, strict=True)
        ]
        self._put(_framed(_ROWS, _encode(_StoredRows(rows.instance_id, stored))))
        self.records += len(stored)

    def finish(self) -> None:
        """Write the trailer, without which no import accepts the file."""
        trailer = _StoredTrailer(self.documents, self.records, self._all.digest())
        self._put(_framed(_TRAILER, _encode(trailer)))

    def _put(self, data: bytes) -> None:
        self._all.update(data)
        self._file.write(data)


class ArchiveReader:
    """Reads an export, checking every frame and, at the trailer, all of them.

    Args:
        file: gives the bytes.
        name: of the file, for messages.

    Attributes:
        head: what it is of.

    Raises:
        InvalidArgumentError: it is no export, or of a version that this release does not know.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._all = xxh3_128()
        self._documents = 0
        self._records = 0
        self._check_format(self._exactly(len(_MAGIC) + 1, "its first bytes"))
        kind, body = self._frame()
        if kind != _HEAD:
            raise self._damaged("it has no head")
        self.head = self._decoded(Head, body)

    def frames(self) -> Iterator[Document | Rows | Trailer]:
        """Yield the frames of the file, the trailer last.

        Raises:
            InvalidArgumentError: the file is damaged, or cut off. Frames yielded before are intact.
        """
        while True:
            before = self._all.digest()
            kind, body = self._frame()
            if kind == _TRAILER:
                yield self._trailer(body, before)
                return
            yield self._content(kind, body)

    def open_frames(self, on_damage: Callable[[str], None], *, with_rows: bool = True) -> Iterator[Document | Rows]:
        """Yield the frames of a file that never got a trailer, up to its end, or to a header that cannot be one. Frames
        that are damaged otherwise are left out.

        Args:
            on_damage: called with a sentence per damaged frame.
            with_rows: whether blocks are wanted, too.
        """
        while start := self._file.read(_FRAME.size):
            kind, length, _ = _FRAME.unpack(start.ljust(_FRAME.size, b"\0"))
            if kind not in (_DOCUMENT, _ROWS) or length > _MOST_FRAME_BYTES:
                on_damage(f"{self._name} cannot be read from byte {self._file.tell() - len(start):,} on")
                return
            if kind == _ROWS and not with_rows:
                self._file.seek(length, os.SEEK_CUR)
                continue
            self._file.seek(-len(start), os.SEEK_CUR)
            try:
                frame = self._content(*self._frame())
            except InvalidArgumentError as error:
                on_damage(str(error))
            else:
                yield frame

    def _content(self, kind: bytes, body: bytes) -> Document | Rows:
        if kind == _DOCUMENT:
            self._documents += 1
            return self._decoded(Document, body)
        if kind == _ROWS:
            rows = self._rows(body)
            self._records += len(rows.rows)
            return rows
        raise self._damaged(f"it has a frame of the unknown kind {kind!r}")

    def _check_format(self, start: bytes) -> None:
        if not start.startswith(_MAGIC):
            raise InvalidArgumentError(f"{self._name} is not an export of `kvcm index export`")
        version = start[len(_MAGIC)]
        if version != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{self._name} has format version {version}, this release reads version {FORMAT_VERSION}: "
                "import it with the release that wrote it"
            )

    def _frame(self) -> tuple[bytes, bytes]:
        header = self._exactly(_FRAME.size, "the header of a frame")
        kind, length, digest = _FRAME.unpack(header)
        if length > _MOST_FRAME_BYTES:
            raise self._damaged(f"a frame says that it has {length} bytes")
        body = self._exactly(length, "a frame")
        if xxh3_128_digest(kind + body) != digest:
            raise self._damaged("the checksum of a frame is wrong")
        return kind, body

    def _rows(self, body: bytes) -> Rows:
        instance_id, stored = self._decoded(_StoredRows, body)
        try:
            keys, records = mixed([row.key for row in stored]), decode_payloads([row.record for row in stored])
            columns = zip(keys, records, stored, strict=True)
            rows = [Row(key, record, Access(row.read_at, row.reads)) for key, record, row in columns]
        except StorageIOError as error:
            raise self._damaged(str(error)) from error
        return Rows(instance_id, rows)

    def _trailer(self, body: bytes, before: bytes) -> Trailer:
        trailer = self._decoded(_StoredTrailer, body)
        if (trailer.documents, trailer.records) != (self._documents, self._records):
            raise self._damaged(
                f"it holds {self._documents} documents and {self._records} records instead of "
                f"{trailer.documents} and {trailer.records}"
            )
        if trailer.digest != before:
            raise self._damaged("the checksum over all of it is wrong")
        if self._file.read(1):
            raise self._damaged("there is something behind its end")
        return Trailer(trailer.documents, trailer.records)

    def _decoded(self, kind: type[Body], body: bytes) -> Body:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"a frame cannot be read: {error}") from error

    def _exactly(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        if len(data) < size:
            raise InvalidArgumentError(f"{self._name} was cut off: {what} is missing at its end")
        self._all.update(data)
        return data

    def _damaged(self, reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._name} is damaged: {reason}")


def _framed(kind: bytes, body: bytes) -> bytes:
    return _FRAME.pack(kind, len(body), xxh3_128_digest(kind + body)) + body


# Groups: settings that depend on the store they came from.


def _adapt_group(group: InstanceGroup, store_kind: str) -> tuple[InstanceGroup, list[str]]:
    """Return the group as a store of that kind takes it, and a sentence per change."""
    indexer, changes = group.cache_config.meta_indexer_config, []
    if indexer.meta_storage_backend_config.storage_type == "redis" and store_kind != "redis":
        # With the uri: it leads to the store that the group comes from.
        indexer = replace(indexer, meta_storage_backend_config=MetaStorageBackendConfig())
        changes.append(f"group {group.name!r} names the store 'redis', this one is {store_kind}: stored as 'local'")
    most = most_shards(store_kind)
    if indexer.mutex_shard_num > most:
        changes.append(f"group {group.name!r} has {indexer.mutex_shard_num} lock shards, {store_kind} takes {most}")
        indexer = replace(indexer, mutex_shard_num=most)
    return _with_indexer(group, indexer), changes


def _with_store_settings_of(group: InstanceGroup, other: InstanceGroup) -> InstanceGroup:
    """Return the group with what `other` says of the store: there is one per deployment, whatever groups say."""
    backend = other.cache_config.meta_indexer_config.meta_storage_backend_config
    return _with_indexer(group, replace(group.cache_config.meta_indexer_config, meta_storage_backend_config=backend))


def _with_indexer(group: InstanceGroup, indexer: MetaIndexerConfig) -> InstanceGroup:
    return replace(group, cache_config=replace(group.cache_config, meta_indexer_config=indexer))


# Pins on their way from one store to another, as documents of an export.
#
# A pin keeps its id, its owner, its deadline and the locations that it holds, whose ids an import does not change. It
# is begun again when the blocks are there, in the three steps of any pin (pins.py), so whatever ends an import in the
# middle leaves no mark without a pin; the next attempt finishes what it finds.

_SHARDS: Final = 16


@dataclass(frozen=True, slots=True)
class ExportedPin:
    """A pin without what belongs to one store.

    Attributes:
        id: names it.
        instance_id: whose blocks it holds.
        owner: name of the principal that pinned.
        deadline: unix seconds.
        places: what it holds, in the order of the prefix; with keys as stores have them, not mixed.
    """

    id: str
    instance_id: str
    owner: str
    deadline: float
    places: tuple[PinnedLocation, ...]


async def exported_pins(store: Store, registry: Registry, now: float, group_name: str = "") -> list[ExportedPin]:
    """Return the pins that hold something at unix time `now`, ordered by id; of one group if it is named.

    Raises:
        StorageIOError: the store cannot be asked, or a pin cannot be read.
    """
    instances = {
        registry.instances.placement(instance.instance_id).uid: instance.instance_id
        for instance in registry.instances.all(group_name)
    }
    documents = await store.table("pins", _SHARDS).all()
    pins = [Pin.decoded(pin_id, document) for pin_id, document in sorted(documents.items())]
    return [
        ExportedPin(pin.id, instances[pin.uid], pin.owner, pin.deadline, _with_keys(unmixed, pin.pinned_locations))
        for pin in pins
        if pin.uid in instances and not pin.is_ended and pin.deadline > now
    ]


def _with_keys(
    convert: Callable[[Sequence[int]], Sequence[int]], places: Sequence[PinnedLocation]
) -> tuple[PinnedLocation, ...]:
    keys = convert([place.key for place in places])
    return tuple(place._replace(key=key) for place, key in zip(places, keys, strict=True))


@dataclass(slots=True)
class PinImport:
    """Begins pins again.

    Args:
        registry: with the instances of the pins.
        caches: opens their indexes.
        store: takes the pins.
        clock: time source.

    Attributes:
        restored: ids of the pins that are there now.
        rejected: a sentence for each that is not.
    """

    registry: Registry
    caches: OpenCaches
    store: Store
    clock: Clock
    restored: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    async def restore(self, exported: Sequence[ExportedPin]) -> None:
        """Begin pins again; those that are over, and those that do not fit, are left out.

        Raises:
            StorageIOError: the store failed; the next import finishes it.
        """
        tables = (self.store.table(name, _SHARDS) for name in ("pins", "pinbudgets"))
        pins, budgets = tables
        work = Pins(
            table=pins,
            budgets=PinBudgets(budgets, self.clock),
            find=self._find_no_cache,
            view=_AssumeReadable(),
            clock=self.clock,
            new_id=_no_new_id,
        )
        for each in exported:
            if each.deadline > self.clock.now():
                await self._restore(work, each)
        await self.store.flush()

    async def _restore(self, work: Pins, each: ExportedPin) -> None:
        cache = self.caches.resolve(each.instance_id)
        group = self.registry.groups.get(cache.instance.instance_group_name)
        pin = Pin(
            each.id,
            cache.placement.uid,
            group=group.name,
            owner=each.owner,
            deadline=each.deadline,
            pinned=PinnedLocations.of(_with_keys(mixed, each.places)),
        )
        try:
            held = await work.restore(cache, group, pin)
        except CapacityError as error:
            self.rejected.append(f"pin {each.id} of instance {each.instance_id!r} was left out: {error}")
            return
        if held is None:
            self.rejected.append(
                f"pin {each.id} of instance {each.instance_id!r} was left out: its blocks are not here"
            )
        else:
            self.restored.append(each.id)

    async def _find_no_cache(self, _uid: int) -> None:
        raise StorageIOError("pins do not end while they are imported")


class _AssumeReadable:
    """Takes the place of the storages: whether their bytes are there is looked at by the manager, later."""

    generation = 0

    def rank(self, storage: str) -> int | None:
        """Return that of any storage."""
        return 0


def _no_new_id() -> str:
    raise AssertionError("pins of an export have their ids")


# Documents of an export: reading them, naming them, and telling in what two of them differ.

KINDS: Final[Mapping[str, type[Any]]] = {
    "storage": StorageConfig,
    "quota": GlobalQuota,
    "group": InstanceGroup,
    "instance": Instance,
    "account": Account,
    "key": ApiKey,
}
"""What an import adds to the registry, in this order: nothing names what comes later."""
_ALL_KINDS: Final[Mapping[str, type[Any]]] = {**KINDS, "taken_key": ImportedKey, "pin": ExportedPin}


def decode_exported(document: Document) -> object:
    """Read a document.

    Raises:
        InvalidArgumentError: it is of a kind that this release does not know.
        StorageIOError: it is damaged, or of another release.
    """
    kind = _ALL_KINDS.get(document.kind)
    if kind is None:
        raise InvalidArgumentError(f"the export holds a {document.kind!r}, which this release does not know")
    value: object = decode_document(kind, document.document)
    return value


def _check_valid(value: object, store_kind: str) -> None:
    """Return if a value could be configured on a store of that kind.

    Raises:
        InvalidArgumentError: it could not.
    """
    if isinstance(value, StorageConfig):
        check_storage(value)
    elif isinstance(value, GlobalQuota):
        check_global_quota(value)
    elif isinstance(value, InstanceGroup):
        check_group(value, store_kind)
    elif isinstance(value, Instance):
        check_instance(value)


def title_parts(value: object) -> tuple[str, str]:
    """Return what a value is and its name, for people."""
    if isinstance(value, StorageConfig):
        return "storage", value.global_unique_name
    if isinstance(value, GlobalQuota):
        return "global quota", value.name
    if isinstance(value, InstanceGroup):
        return "group", value.name
    if isinstance(value, Instance):
        return "instance", value.instance_id
    if isinstance(value, ApiKey):
        return "key", value.name
    assert isinstance(value, Account)
    return "account", value.user_name


def title(value: object) -> str:
    """Return both as one text."""
    return "{} {!r}".format(*title_parts(value))


def _describe_difference(known: object, new: object) -> str:
    """Return in what two documents differ, "" when an import may take one for the other."""
    if isinstance(known, Instance) and isinstance(new, Instance):
        difference = known.difference(new)
        return "" if difference is None else difference.field
    if isinstance(known, InstanceGroup) and isinstance(new, InstanceGroup):
        known = _with_store_settings_of(known, new)
    ignored = {"is_available", "draining_since"} if isinstance(new, StorageConfig) else {"version"}
    return _first_difference(known, new, ignored)


def _first_difference(known: object, new: object, ignored: set[str], path: str = "") -> str:
    if known == new:
        return ""
    if isinstance(known, Account | ApiKey):
        return "rights or secret"  # neither is shown
    if not is_dataclass(known) or type(known) is not type(new):
        return f"{path or 'its type'} is {known!r} here and {new!r} in the export"
    for each in fields(known):
        if each.name not in ignored:
            below = f"{path}.{each.name}" if path else each.name
            difference = _first_difference(getattr(known, each.name), getattr(new, each.name), set(), below)
            if difference:
                return difference
    return ""


# Exports.

_NewBackend = Callable[[Placement], IndexBackend]
Progress = Callable[[int, int], None]
"""Told of records done and of about how many there are."""


@dataclass(slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        instances: number of them.
        records: by instance id.
        skipped: blocks that were only being written.
        pins: number of them.
        unknown_storages: storages of locations that are configured no more.
    """

    instances: int = 0
    records: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    pins: int = 0
    unknown_storages: set[str] = field(default_factory=set)


class _Selection(NamedTuple):
    groups: Sequence[str]
    instances: Sequence[Instance]


class Exporter:
    """Writes the registry and all blocks, or those of one group.

    Args:
        registry: loaded.
        new_backend: makes or finds the backend of an index.
        writer: takes it all.
        progress: called after each batch.
    """

    def __init__(
        self,
        registry: Registry,
        new_backend: _NewBackend,
        writer: ArchiveWriter,
        progress: Progress = lambda _done, _total: None,
    ) -> None:
        self._registry = registry
        self._new_backend = new_backend
        self._writer = writer
        self._progress = progress
        self._storages_written: set[str] = set()
        self._exported = Exported()

    async def run(
        self, group_name: str = "", *, with_accounts: bool = False, pins: Sequence[ExportedPin] = ()
    ) -> Exported:
        """Write everything and the trailer.

        Args:
            group_name: of the only group to export, "" for all.
            with_accounts: whether to export the accounts and the keys, with the hashes of passwords and secrets.
            pins: of the instances that are exported.

        Raises:
            InvalidArgumentError: there is no such group.
            StorageIOError: the store cannot be asked, or a record cannot be read.
        """
        selection = self._select(group_name)
        await self._write_documents(selection, group_name, with_accounts=with_accounts)
        backends = {}
        for instance in selection.instances:
            backend = self._new_backend(self._registry.instances.placement(instance.instance_id))
            await backend.refresh()
            backends[instance.instance_id] = backend
        total = sum(backend.key_count for backend in backends.values())
        for instance_id, backend in backends.items():
            await self._write_blocks(instance_id, backend, total)
        for pin in pins:
            self._write_document("pin", pin)
        self._writer.finish()
        self._exported.pins = len(pins)
        self._exported.instances = len(selection.instances)
        return self._exported

    def _select(self, group_name: str) -> _Selection:
        if not group_name:
            names = [group.name for group in self._registry.groups.all()]
            return _Selection(names, self._registry.instances.all())
        self._registry.groups.get(group_name)
        return _Selection([group_name], self._registry.instances.all(group_name))

    async def _write_documents(self, selection: _Selection, group_name: str, *, with_accounts: bool) -> None:
        groups = [self._registry.groups.get(name) for name in selection.groups]
        wanted = (
            {name for each in groups for name in (*each.storage_candidates, *each.event_report_storage_candidates)}
            if group_name
            else {config.global_unique_name for config in self._registry.storages.all()}
        )
        self._write_storages(wanted)
        names = {group.global_quota_group_name for group in groups}
        for quota in self._registry.quotas.all():
            if not group_name or quota.name in names:
                self._write_document("quota", quota)
        for group in groups:
            self._write_document("group", group)
        for instance in selection.instances:
            self._write_document("instance", instance)
        if with_accounts:
            await self._write_principals()

    async def _write_principals(self) -> None:
        for account in self._registry.accounts.all():
            self._write_document("account", account)
        for key in self._registry.keys.all():
            if not key.account:  # a login is of an hour
                self._write_document("key", key)
        for taken in await self._registry.taken_keys.all():
            self._write_document("taken_key", taken)

    def _write_storages(self, names: Iterable[str]) -> None:
        missing = set(names) - self._storages_written
        for config in self._registry.storages.existing(missing):
            self._write_document("storage", replace(config, draining_since=0.0))
            self._storages_written.add(config.global_unique_name)

    def _write_document(self, kind: str, value: object) -> None:
        self._writer.document(Document(kind, encode_document(value)))

    async def _write_blocks(self, instance_id: str, backend: IndexBackend, total: int) -> None:
        written = 0
        async for page in backend.scan(BATCH_KEYS):
            rows = await self._rows_of(backend, page)
            if rows:
                self._write_storages(place.storage for row in rows for place in row.record.locations)
                self._writer.rows(Rows(instance_id, rows))
                written += len(rows)
            self._progress(self._writer.records, total)
        self._exported.records[instance_id] = written

    async def _rows_of(self, backend: IndexBackend, page: Sequence[int]) -> list[Row]:
        records = await backend.get_many(page)
        rows: list[Row] = []
        for key, record, access in zip(page, records, await backend.accesses(page), strict=True):
            if record is None:
                continue  # removed since the scan found it
            kept = without_sessions_and_pins(record)
            if kept is None:
                self._exported.skipped += 1
                continue
            self._exported.unknown_storages |= self._unknown(kept)
            rows.append(Row(key, kept, access or Access(int(kept.locations[0].written_at), 0)))
        return rows

    def _unknown(self, record: BlockRecord) -> set[str]:
        names = {location.storage for location in record.locations} - self._storages_written
        return names - {config.global_unique_name for config in self._registry.storages.existing(names)}


def head_of(cluster_id: str, group_name: str, now: float) -> Head:
    """Return the head of an export that this release writes."""
    return Head(__version__, cluster_id, group_name, now)


def without_sessions_and_pins(record: BlockRecord) -> BlockRecord | None:
    """Return the record without what belongs to sessions and pins, which are not exported."""
    locations = tuple(
        place._replace(pinned_until=0.0) if place.pinned_until else place
        for place in record.locations
        if place.status is not LocationStatus.WRITING
    )
    if not locations:
        return None
    return record if locations == record.locations else record._replace(locations=locations)


# Imports.

_TOUCHES_AT_ONCE = 64
_MANAGERS_SEE_SECONDS = 2.0  # they look every half second


@dataclass(slots=True)
class Imported:
    """What an import did, or would do.

    Attributes:
        created: names that were added to the registry, by kind.
        stored: records that were added, by instance id.
        skipped: records whose key was there already, by instance id.
        exceeded: a sentence per quota that the imported groups exceed now.
        adapted: a sentence per setting that this store takes otherwise than the export has it.
        pins: number of those that hold something now.
        rejected_pins: a sentence per pin that does not.
    """

    created: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    stored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    exceeded: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    pins: int = 0
    rejected_pins: list[str] = field(default_factory=list)


class Importer:
    """Takes the frames of one archive.

    Args:
        registry: loaded; its storages need not be open.
        new_backend: makes or finds the backend of an index.
        usage: receives the stored bytes.
        store: made durable as the import goes on.
        group_name: of the only group to import, "" for all.
        store_kind: memory, rocksdb or redis: what groups may name.
        dry_run: whether to write nothing, and only tell what would be.
        progress: called with the number of records read.
        pause: waits some seconds.

    Attributes:
        imported: what was done so far.
        pins: that the archive has, of instances that are wanted; they are begun when all blocks are there.
    """

    def __init__(
        self,
        registry: Registry,
        new_backend: Callable[[Placement], IndexBackend],
        usage: Ledger,
        store: Store,
        group_name: str = "",
        store_kind: str = "memory",
        *,
        dry_run: bool = False,
        progress: Callable[[int], None] = lambda _done: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._new_backend = new_backend
        self._usage = usage
        self._store = store
        self._pause = pause
        self._group_name = group_name
        self._store_kind = store_kind
        self._dry_run = dry_run
        self._progress = progress
        self._waiting: list[object] = []
        self._groups: dict[str, InstanceGroup] = {}
        self._instances: dict[str, Instance] = {}
        self._left_out: set[str] = set()
        self._quota_names: set[str] = set()
        self._seen = 0
        self.imported = Imported()
        self.pins: list[ExportedPin] = []

    def check(self, documents: Iterable[Document]) -> None:
        """Return if every document can be added, before anything is written.

        Args:
            documents: all of the archive.

        Raises:
            DuplicateEntityError: something different of that name exists; says in what it differs.
            NotReadyError: a storage of that name and another medium is still to be forgotten.
            InvalidArgumentError: a document is malformed, or something that it needs is missing.
            StorageIOError: a document is of another release.
        """
        self._check([value for value in map(decode_exported, documents) if isinstance(value, tuple(KINDS.values()))])

    async def load(self, frame: Document | Rows | Trailer) -> None:
        """Take the next frame.

        Raises:
            KvcmError: as `check`, or the store failed; stored records stay.
        """
        if isinstance(frame, Document):
            await self._load_document(decode_exported(frame))
            return
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._check(waiting)
            await self._add_all(waiting)
        if isinstance(frame, Rows):
            await self._load_rows(frame)
        else:
            await self._store.flush()
            await self._report_exceeded()

    async def _load_document(self, value: object) -> None:
        if isinstance(value, ExportedPin):
            if value.instance_id not in self._left_out:
                self.pins.append(value)
        elif isinstance(value, ImportedKey):
            if not self._dry_run and not self._group_name:
                await self._registry.taken_keys.remember(value)
        else:
            self._waiting.append(value)

    # ── the registry ──

    def _check(self, values: Sequence[object]) -> None:
        groups = {value.name for value in values if isinstance(value, InstanceGroup)}
        if self._group_name and self._group_name not in groups | self._groups.keys():
            raise InvalidArgumentError(f"the export holds no group {self._group_name!r}, only {sorted(groups)}")
        self._quota_names |= {
            value.global_quota_group_name
            for value in values
            if isinstance(value, InstanceGroup) and self._is_wanted(value)
        }
        for value in values:
            self._check_one(value, groups)

    def _check_one(self, value: object, groups: set[str]) -> None:
        if not self._is_wanted(value):
            return
        value, _ = self._adapt(value)
        _check_valid(value, self._store_kind)
        known = self._known(value)
        if known is not None and (difference := _describe_difference(known, value)):
            raise DuplicateEntityError(f"{title(value)} exists and differs: {difference}; nothing is changed")
        if isinstance(value, StorageConfig) and known is None:
            self._registry.storages.check_new(value)  # a name that is still being forgotten is nobody's yet
        if isinstance(value, Instance) and known is None:
            group_name = value.instance_group_name
            if group_name not in groups and self._registry.groups.find(group_name) is None:
                raise InvalidArgumentError(f"{title(value)} belongs to group {group_name!r}, which exists nowhere")

    async def _add_all(self, values: Sequence[object]) -> None:
        for kind in KINDS.values():  # in whatever order they came
            for value in values:
                if isinstance(value, kind):
                    await self._add(value)

    async def _add(self, value: object) -> None:
        wanted = self._is_wanted(value)
        if isinstance(value, Instance):
            self._instances[value.instance_id] = value
            if not wanted:
                self._left_out.add(value.instance_id)
        if not wanted:
            return
        value, changes = self._adapt(value)
        if isinstance(value, InstanceGroup):
            self._groups[value.name] = value
        if self._known(value) is not None:
            return
        self.imported.adapted += changes
        kind, name = title_parts(value)
        self.imported.created[kind].append(name)
        if not self._dry_run:
            await self._create(value)

    async def _create(self, value: object) -> None:
        if isinstance(value, StorageConfig):
            await self._registry.storages.add(value)
        elif isinstance(value, GlobalQuota):
            await self._registry.quotas.set(value)
        elif isinstance(value, InstanceGroup):
            await self._registry.groups.create(value)
        elif isinstance(value, Instance):
            await self._registry.instances.register(value)
        elif isinstance(value, Account):
            cache = DocumentCache(self._store.table("registry"), "account/", Account)
            await cache.change(value.user_name, lambda known: known or value)
        elif isinstance(value, ApiKey):
            keys = DocumentCache(self._store.table("registry"), "key/", ApiKey)
            await keys.change(value.id, lambda known: known or value)
        elif isinstance(value, ImportedKey):
            await self._registry.taken_keys.remember(value)

    def _adapt(self, value: object) -> tuple[object, list[str]]:
        return _adapt_group(value, self._store_kind) if isinstance(value, InstanceGroup) else (value, [])

    def _is_wanted(self, value: object) -> bool:
        if not self._group_name:
            return True
        if isinstance(value, InstanceGroup):
            return value.name == self._group_name
        if isinstance(value, Instance):
            return value.instance_group_name == self._group_name
        if isinstance(value, GlobalQuota):
            return value.name in self._quota_names
        return isinstance(value, StorageConfig)

    def _known(self, value: object) -> object | None:
        registry = self._registry
        if isinstance(value, StorageConfig):
            return next(iter(registry.storages.existing([value.global_unique_name])), None)
        if isinstance(value, GlobalQuota):
            return registry.quotas.find(value.name)
        if isinstance(value, InstanceGroup):
            return registry.groups.find(value.name)
        if isinstance(value, Instance):
            return next((i for i in registry.instances.all() if i.instance_id == value.instance_id), None)
        if isinstance(value, ApiKey):
            return registry.keys.find(value.id)
        assert isinstance(value, Account)
        return next((each for each in registry.accounts.all() if each.user_name == value.user_name), None)

    # ── blocks ──

    async def _load_rows(self, rows: Rows) -> None:
        if rows.instance_id in self._left_out:
            return
        instance = self._instances.get(rows.instance_id)
        if instance is None:
            raise InvalidArgumentError(
                f"the export holds blocks of instance {rows.instance_id!r}, but not the instance"
            )
        if self._dry_run and self._known(instance) is None:
            self.imported.stored[rows.instance_id] += len(rows.rows)
        else:
            await self._put(instance, rows.rows)
        self._seen += len(rows.rows)
        self._progress(self._seen)

    async def _put(self, instance: Instance, rows: Sequence[Row]) -> None:
        placement = self._registry.instances.placement(instance.instance_id)
        backend = self._new_backend(placement)
        there = await backend.get_many([row.key for row in rows])
        # A shared store that was scanned while it changed may have given a block twice.
        absent = {row.key: row for row, record in zip(rows, there, strict=True) if record is None}
        if not self._dry_run and absent:
            await self._mark_unverified(absent.values())
            written = await backend.write_many([Change(row.key, None, row.record) for row in absent.values()])
            for key in written.lost:  # somebody stored it this very moment
                absent.pop(key, None)
            self._usage.listener(instance.instance_group_name, placement.uid)()(written.usage, len(absent))
            await _restore_accesses(backend, absent.values())
            await self._store.flush()
        self.imported.stored[instance.instance_id] += len(absent)
        self.imported.skipped[instance.instance_id] += len(rows) - len(absent)

    async def _mark_unverified(self, rows: Iterable[Row]) -> None:
        """Have the packed locations of rows verified before they are served: their storages went on after the export.

        With another mark each time, so that no verification ends which began before these rows were there.
        """
        places = (place for row in rows for place in row.record.locations)
        marks, is_new = self._store.table(UNVERIFIED), False
        for name in {place.storage for place in places if b"blkid=" in place.chunk}:
            before = await marks.get(name)
            await marks.replace(name, before, secrets.token_bytes(16))
            is_new = is_new or before is None
        if is_new and self._store.is_shared:
            await self._pause(_MANAGERS_SEE_SECONDS)

    async def _report_exceeded(self) -> None:
        for group in self._groups.values():
            if not self._dry_run:
                self.imported.exceeded += _exceeded(group, await self._used(group.name))

    async def _used(self, group_name: str) -> Counter[StorageKey]:
        used: Counter[StorageKey] = Counter()
        for instance in self._registry.instances.all(group_name):
            backend = self._new_backend(self._registry.instances.placement(instance.instance_id))
            await backend.refresh()
            used.update(backend.usage_bytes)
        return used


async def _restore_accesses(backend: IndexBackend, rows: Iterable[Row]) -> None:
    by_time: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for row in rows:
        if row.access.reads or row.access.at != int(row.record.locations[0].written_at):
            by_time[row.access.at][row.key] = row.access.reads
    touches = [backend.touch(counts, at) for at, counts in by_time.items()]
    for start in range(0, len(touches), _TOUCHES_AT_ONCE):
        await asyncio.gather(*touches[start : start + _TOUCHES_AT_ONCE])


def _exceeded(group: InstanceGroup, used: Counter[StorageKey]) -> list[str]:
    total = sum(used.values())
    found = []
    if total > group.quota.capacity:
        found.append(f"group {group.name!r} uses {total} bytes, its quota is {group.quota.capacity}")
    for quota in group.quota.quota_config:
        on_type = sum(size for place, size in used.items() if place.storage_type is quota.storage_type)
        if on_type > quota.capacity:
            kind = quota.storage_type.kind
            found.append(f"group {group.name!r} uses {on_type} bytes on {kind}, its quota is {quota.capacity}")
    return found
