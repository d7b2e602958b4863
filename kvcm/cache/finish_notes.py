"""Finish notes: which blocks were finished, kept beside their bytes, so that a lost index can be made again.

Off unless `kvcm.storage.finish_notes` is set: notes cost about as much as the index. Each manager appends the blocks
whose writes ended to a file of its own on every path storage that they lie on. The files have the frames of an export
(`kvcm.cache.archive`): a head, the instance before its blocks, and no trailer, since they never end.

The files also have what blocks need to be read: their instance, its group and quota, and the storages. Accounts and
API keys are not there: every client that mounts a storage can read them.

1. A block is noted after it was finished, so no bytes without a finish ever are.
2. Nothing notes that a block is removed: that its bytes are there, and still its own, is looked up when the index is
   made again. Names of files are never used twice, and notes of slots say whose a slot is.
3. Blocks that were finished in the last second may not be noted. They are missed then, and never wrong.
4. The leader writes all that is there into a new file when the files have grown to twice as much, and removes those
   that were not written since it began. Files of another store, and for a week those from before a loss, stay: the
   index may be the smaller of the two.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from typing import Final

import structlog

from kvcm.cache.archive import (
    ArchiveReader,
    ArchiveWriter,
    Document,
    Importer,
    Row,
    Rows,
    decode_exported,
    head_of,
    title_parts,
    without_sessions_and_pins,
)
from kvcm.cache.instance_cache import InstanceCache, OpenCaches, batches
from kvcm.index.backends.backend import Access
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.instances import Instance
from kvcm.model.locations import Location, LocationStatus, uris_of
from kvcm.model.storages import PathStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri, path_component
from kvcm.registry.document_cache import encode_document
from kvcm.registry.loss_journal import LossJournal
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.file import FileStorage
from kvcm.storage.file_objects import NoFolderError
from kvcm.storage.finish_notes import NotesFile, NotesFolder

__all__ = ["FinishNotes", "NotesReader", "Rebuilt", "deployment_of"]

_WHOLE: Final = "all"  # beginning of the name of a file that the leader wrote
_UNFINISHED: Final = "new"
_LEAST_BYTES: Final = 64 << 20
_KEPT_SECONDS: Final = 7 * 24 * 3600.0
_APART_SECONDS: Final = 60.0  # that clocks of manager and storage may be
_IDLE_SECONDS: Final = 2.0  # that a file was not written for, before it is removed
_SECONDS: Final = 5.0  # for a storage to answer
_MOST_PENDING: Final = 1 << 20  # blocks; a storage that is away must not take all memory
_log = structlog.get_logger("kvcm.cache")


class FinishNotes:
    """The notes of one manager.

    Args:
        caches: of all instances.
        registry: of their groups and storages.
        storages: the open storages.
        journal: of the losses of the store.
        clock: time source.
        least_bytes: of the files of a storage, below which they are not written again.
    """

    def __init__(
        self,
        caches: OpenCaches,
        registry: Registry,
        storages: StorageDirectory,
        journal: LossJournal,
        clock: Clock,
        *,
        least_bytes: int = _LEAST_BYTES,
    ) -> None:
        self._caches = caches
        self._journal = journal
        self._registry = registry
        self._storages = storages
        self._clock = clock
        self._least_bytes = least_bytes
        self._writers: dict[str, str] = {}  # by storage: the file in use
        self._described: dict[str, dict[Instance, Sequence[Document]]] = {}  # by file
        self._pending: dict[int, tuple[InstanceCache, dict[int, None]]] = {}
        self._pending_count = 0
        self._incomplete: set[str] = set()  # storages whose files lack blocks that this manager finished
        self._documents: dict[Instance, Sequence[Document]] = {}
        self._documents_generation = -1  # of the registry

    def note(self, cache: InstanceCache, keys: Iterable[int]) -> None:
        """Remember blocks whose write was finished, for the next `write`."""
        if self._pending_count >= _MOST_PENDING:
            self._incomplete.update(self._places())
            return
        _, known = self._pending.setdefault(cache.placement.uid, (cache, {}))
        before = len(known)
        known.update(dict.fromkeys(keys))
        self._pending_count += len(known) - before

    def _places(self) -> dict[str, FileStorage]:
        """Return the storages that this host can write to."""
        return {name: each for name, each in self._storages.path_storages().items() if not each.is_elsewhere}

    async def write(self) -> None:
        """Append the blocks that were noted. A storage that does not take them gets a whole file later (`tidy`).

        Raises:
            StorageIOError: the store cannot be asked; the blocks stay noted.
        """
        left = list(self._pending.values())
        self._pending, self._pending_count = {}, 0
        try:
            while left:
                await self._write(*left[-1])
                left.pop()
        finally:
            for cache, keys in left:
                self.note(cache, keys)

    async def _write(self, cache: InstanceCache, keys: Iterable[int]) -> None:
        for page in batches(tuple(keys), cache.batch_keys):
            rows = await _rows_of(cache, page)
            for name, storage in self._places().items():
                there = _rows_on(name, rows)
                if there and name not in self._incomplete:
                    writer = self._writers.setdefault(name, self._new_writer())
                    try:
                        await self._append(storage, writer, cache.instance, there)
                    except (StorageIOError, TimeoutError) as error:
                        self._give_up(name, str(error) or "no answer")
            await asyncio.sleep(0)

    def _give_up(self, name: str, reason: str) -> None:
        """Write no more into a file whose end may be torn, or which a thread may still write to."""
        _log.warning("finish_notes_failed", storage=name, reason=reason)
        self._incomplete.add(name)
        self._described.pop(self._writers.pop(name, ""), None)

    async def _append(self, storage: FileStorage, writer: str, instance: Instance, rows: Sequence[Row]) -> None:
        described = self._described.setdefault(writer, {})
        documents = self._documents_of(instance)  # here: the registry is of the event loop's thread

        def content(is_new: bool) -> bytes:
            file = BytesIO()
            archive = ArchiveWriter(file, head_of(self._storages.cluster_id, "", self._clock.now()))
            begin = 0 if is_new else file.tell()
            if is_new or described.get(instance) is not documents:
                for document in documents:
                    archive.document(document)
            archive.rows(Rows(instance.instance_id, rows))
            return file.getvalue()[begin:]

        async with asyncio.timeout(_SECONDS):
            is_new = await storage.with_notes(lambda folder: folder.append(writer, content))
        if is_new:
            described.clear()
        described[instance] = documents

    def _new_writer(self, kind: str = "") -> str:
        return f"{self._journal.deployment}.{kind}{secrets.token_hex(8)}"

    def _documents_of(self, instance: Instance) -> Sequence[Document]:
        """Return what the blocks of an instance need, each after its own needs; the same object until it changes."""
        if self._documents_generation != self._registry.generation:
            self._documents_generation = self._registry.generation
            for each, documents in list(self._documents.items()):
                now = tuple(_documents_of(each, self._registry))
                if now != documents:
                    self._documents[each] = now
        if instance not in self._documents:
            self._documents[instance] = tuple(_documents_of(instance, self._registry))
        return self._documents[instance]

    async def tidy(self, *, is_leader: bool) -> None:
        """Write all blocks of a storage into one file where this manager's are missing, and, as the leader, where the
        files have grown too large.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        for name, storage in self._places().items():
            with suppress(StorageIOError, TimeoutError):
                files = self._own(await storage.with_notes(NotesFolder.files))
                is_large = is_leader and _are_too_large(files, self._least_bytes)
                if is_large or name in self._incomplete:
                    await self._write_whole(name, storage, removes=is_large)

    def _own(self, files: Iterable[NotesFile]) -> list[NotesFile]:
        """Return the files that may be removed once all that is there is in a new one."""
        own = [file for file in files if file.writer.startswith(f"{self._journal.deployment}.")]
        if self._clock.now() - self._journal.lost_at > _KEPT_SECONDS:
            return own
        return [file for file in own if file.changed_at > self._journal.lost_at + _APART_SECONDS]

    async def _write_whole(self, name: str, storage: FileStorage, *, removes: bool) -> None:
        new = self._new_writer(_UNFINISHED)
        self._incomplete.discard(name)  # blocks from now on are noted again, in another file
        self._described.pop(self._writers.pop(name, ""), None)
        try:
            await storage.with_notes(lambda folder: folder.append(new, lambda _is_new: b""))
            files = await storage.with_notes(NotesFolder.files)
            begun_at = next(file.changed_at for file in files if file.writer == new)
            for cache in self._caches.all():
                async for page in cache.index.scan(cache.batch_keys):
                    if rows := _rows_on(name, await _rows_of(cache, page)):
                        await self._append(storage, new, cache.instance, rows)
            whole = new.replace(f".{_UNFINISHED}", f".{_WHOLE}")
            await storage.with_notes(lambda folder: folder.rename(new, whole))
        except BaseException:
            self._incomplete.add(name)
            with suppress(StorageIOError):
                await storage.with_notes(lambda folder: folder.remove([new]))
            raise
        finally:
            self._described.pop(new, None)
        if removes:  # what others wrote since the beginning may not be in the new file
            files = self._own(await storage.with_notes(NotesFolder.files))
            old = [file.writer for file in files if file.changed_at < begun_at - _IDLE_SECONDS]
            await storage.with_notes(lambda folder: folder.remove(old))


def _documents_of(instance: Instance, registry: Registry) -> Iterator[Document]:
    group = registry.groups.find(instance.instance_group_name)
    if group is not None:
        for config in registry.storages.existing(group.storage_candidates):
            yield Document("storage", encode_document(replace(config, draining_since=0.0)))
        quota = registry.quotas.find(group.global_quota_group_name)
        if quota is not None:
            yield Document("quota", encode_document(quota))
        yield Document("group", encode_document(group))
    yield Document("instance", encode_document(instance))


async def _rows_of(cache: InstanceCache, keys: Sequence[int]) -> list[Row]:
    """Return the blocks that have a location that is no write session's."""
    rows = []
    for key, record in zip(keys, await cache.index.get(keys), strict=True):
        kept = without_sessions_and_pins(record) if record is not None else None
        if kept is not None:
            rows.append(Row(key, kept, Access(int(kept.locations[0].written_at), 0)))
    return rows


def _rows_on(storage: str, rows: Iterable[Row]) -> list[Row]:
    """Return the blocks with their serving locations on one storage, without those that have none there."""
    return _with_locations(rows, lambda location: _serves_on(storage, location))


def _with_locations(rows: Iterable[Row], is_kept: Callable[[Location], bool]) -> list[Row]:
    """Return the blocks with the locations that are kept, without those that have none."""
    found = []
    for row in rows:
        kept = tuple(filter(is_kept, row.record.locations))
        if kept:
            found.append(row._replace(record=row.record._replace(locations=kept)))
    return found


def _serves_on(storage: str, location: Location) -> bool:
    return location.storage == storage and location.status is LocationStatus.SERVING


def _are_too_large(files: Sequence[NotesFile], least_bytes: int) -> bool:
    """Whether there is no whole file yet, or the others are larger than the newest of them."""
    whole = [file.size_bytes for file in files if f".{_WHOLE}" in file.writer]
    total = sum(file.size_bytes for file in files)
    return not whole or total > max(least_bytes, 2 * whole[-1])


# ── making an index again ──

_Name = tuple[str, str]
"""Kind and name of a document."""


@dataclass(slots=True)
class Rebuilt:
    """The outcome of making an index again.

    Attributes:
        stored: blocks that were added, by instance.
        known: blocks that were there already, by instance.
        gone: noted blocks whose bytes are not there any more, or not all of them, by storage.
        files: number of files of notes, by storage; 0 where there are none.
        unreadable: a sentence per storage, file or part of one that could not be read.
        left_out: instances and storages whose blocks were left out, with the reason.
    """

    stored: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    gone: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def deployment_of(folder: NotesFolder) -> str | None:
    """Return the id of the deployment whose notes lie there, None where no file says so. Blocks.

    Raises:
        NoFolderError: the directory is gone.
        OSError: the storage failed.
    """
    for file in folder.files():
        with folder.opened(file.writer) as content, suppress(InvalidArgumentError):
            cluster_id = ArchiveReader(content, file.writer).head.cluster_id
            if folder.directory.rstrip("/").endswith(f"/{path_component(cluster_id)}"):
                return cluster_id
    return None


class NotesReader:
    """Adds to an index the blocks that notes have and whose bytes are there.

    What the registry has counts; an instance, a group, a quota or a storage that it does not have is added, as it was
    noted last.

    Args:
        registry: loaded.
        importer: adds the blocks.
        cluster_id: of the deployment.
    """

    def __init__(self, registry: Registry, importer: Importer, cluster_id: str) -> None:
        self._registry = registry
        self._importer = importer
        self._directory = StorageDirectory(cluster_id)
        self._newest: dict[_Name, Document] = {}
        self._added: set[str] = set()
        self.rebuilt = Rebuilt()

    async def read(self, folders: Sequence[NotesFolder]) -> None:
        """Read all notes of some storages.

        Raises:
            KvcmError: the store failed.
        """
        found: list[tuple[NotesFolder, NotesFile]] = []
        for folder in folders:
            try:
                files = [file for file in folder.files() if file.size_bytes]
            except (OSError, NoFolderError) as error:
                self.rebuilt.unreadable.append(f"{folder.directory}: {error}")
                continue
            self.rebuilt.files[folder.storage] = len(files)
            found += [(folder, file) for file in files]
        found.sort(key=lambda each: each[1].changed_at)
        for folder, file in found:
            self._newest.update(_documents_in(folder, file))
        for folder, file in found:
            await self._read(folder, file)
        self.rebuilt.stored, self.rebuilt.known = self._importer.imported.stored, self._importer.imported.skipped

    async def _read(self, folder: NotesFolder, file: NotesFile) -> None:
        documents: dict[_Name, Document] = {}
        try:
            with folder.opened(file.writer) as content:
                reader = ArchiveReader(content, f"{folder.storage}: notes {file.writer}")
                for frame in reader.open_frames(self.rebuilt.unreadable.append):
                    if isinstance(frame, Document):
                        documents[title_parts(decode_exported(frame))] = frame
                    elif (instance := documents.get(("instance", frame.instance_id))) is not None:
                        await self._add(folder, instance, frame)
                    else:
                        self.rebuilt.left_out[f"instance {frame.instance_id}"] = "it is not in its file of notes"
        except (OSError, NoFolderError, InvalidArgumentError) as error:
            self.rebuilt.unreadable.append(f"{folder.storage}: notes {file.writer}: {error}")

    async def _add(self, folder: NotesFolder, instance: Document, rows: Rows) -> None:
        storage = self._storage(folder)
        if storage is None:
            return
        found = await asyncio.to_thread(_with_locations, rows.rows, partial(_has_bytes, storage))
        self.rebuilt.gone[folder.storage] += len(rows.rows) - len(found)
        if found and await self._is_known(rows.instance_id, instance):
            await self._importer.load(Rows(rows.instance_id, found))

    def _storage(self, folder: NotesFolder) -> FileStorage | None:
        """Return the storage whose notes these are, None if another one has its name."""
        storage = self._directory.backend(folder.storage)
        if storage is None:
            known = next(iter(self._registry.storages.existing([folder.storage])), None)
            noted = self._newest.get(("storage", folder.storage))
            config = known if known is not None else decode_exported(noted) if noted is not None else None
            if isinstance(config, StorageConfig) and isinstance(config.spec, PathStorageSpec):
                with suppress(KvcmError):  # not mounted where it is configured
                    self._directory.install(config, self._directory.prepare(config, is_new=False))
                storage = self._directory.backend(folder.storage)
        if isinstance(storage, FileStorage) and storage.directory == folder.directory:
            return storage
        self.rebuilt.left_out[f"storage {folder.storage}"] = f"as it is configured it is not in {folder.directory}"
        return None

    async def _is_known(self, instance_id: str, noted: Document) -> bool:
        """Return whether blocks can be added that were noted with this instance. One that is not registered is, as it
        was noted last, with what it needs."""
        newest = self._newest["instance", instance_id]
        try:
            if instance_id not in self._added:
                wanted = [*(each for name, each in self._newest.items() if self._is_missing(*name)), newest]
                self._importer.check(wanted)
                for document in wanted:
                    await self._importer.load(document)
                self._added.add(instance_id)
        except StorageIOError:
            raise
        except KvcmError as error:
            self.rebuilt.left_out[f"instance {instance_id}"] = str(error)
            return False
        now, then = decode_exported(newest), decode_exported(noted)
        assert isinstance(now, Instance)
        assert isinstance(then, Instance)
        if difference := now.difference(then):
            self.rebuilt.left_out[f"instance {instance_id}"] = f"blocks of one with another {difference.field}"
        return difference is None

    def _is_missing(self, kind: str, name: str) -> bool:
        registry = self._registry
        if kind == "storage":
            return not list(registry.storages.existing([name]))
        if kind == "global quota":
            return registry.quotas.find(name) is None
        return kind == "group" and registry.groups.find(name) is None


def _documents_in(folder: NotesFolder, file: NotesFile) -> dict[_Name, Document]:
    """Return the documents of a file, each as it stands there last; none of what cannot be read. Blocks."""
    found: dict[_Name, Document] = {}
    with suppress(OSError, NoFolderError, KvcmError), folder.opened(file.writer) as content:
        reader = ArchiveReader(content, file.writer)
        for frame in reader.open_frames(lambda _damage: None, with_rows=False):
            if isinstance(frame, Document):
                found[title_parts(decode_exported(frame))] = frame
    return found


def _has_bytes(storage: FileStorage, location: Location) -> bool:
    """Return whether all bytes of a location are there. Blocks."""
    return all(storage.has_bytes(LocationUri.parse(uri)) for uri in uris_of(location.chunk) if uri)
