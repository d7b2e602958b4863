"""Export, import and verification of the metadata store that the settings name, without a manager.

Each operation opens the store, builds the components that it needs, and closes the store. An import reads a file twice,
so that a damaged archive changes nothing; verification reads the rows of a RocksDB before it loads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from kvcm import __version__
from kvcm.cache.archive import (
    ArchiveReader,
    ArchiveWriter,
    Document,
    Exported,
    Exporter,
    Imported,
    Importer,
    PinImport,
    exported_pins,
    head_of,
)
from kvcm.cache.audit import AuditedStore, IndexAuditor
from kvcm.cache.audit_report import AuditReport, Finding, Repair
from kvcm.cache.finish_notes import NotesReader, Rebuilt, deployment_of
from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.quotas import SharedLedger
from kvcm.cache.usage_recount import UsageRecount
from kvcm.components import Metadata, local_directory, open_metadata, repair_local
from kvcm.config import Settings
from kvcm.index.backends.audit import AuditedIndex, PlainAudit
from kvcm.index.backends.redis_audit import LostRuns, RedisAudit
from kvcm.index.backends.redis_audit import StoredBlocks as RedisBlocks
from kvcm.index.backends.redis_runs_audit import RunsAudit
from kvcm.index.backends.rocks import LoadedBlocks, RowsFound, audit_rows, check_readable, drop_rows
from kvcm.index.search_cache import CacheBudget
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.instances import Placement
from kvcm.model.uri import path_component
from kvcm.registry.document_cache import DocumentCache
from kvcm.registry.leadership import VitalsTable
from kvcm.registry.registry import Registry, Schema, check_schema, ensure_schema, finalize_schema
from kvcm.registry.storages import ClosedStorages
from kvcm.registry.store_guard import Incarnation
from kvcm.storage.finish_notes import NotesFolder
from kvcm.store.rocks import CommitLog, Fsync
from kvcm.store.rocks_check import DamagedStoreError
from kvcm.store.rocks_repair import Found, survey_database

__all__ = ["IndexTools", "Repaired", "audited_store"]

_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
Progress = Callable[[str, int, int], None]
"""Called with the name of a step, its count so far, and its total, 0 for unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Repaired:
    """The outcome of a repair.

    Attributes:
        was_damaged: whether there was anything to repair.
        found: the contents and the losses; None if only an interrupted repair was completed.
    """

    was_damaged: bool
    found: Found | None = None


class IndexTools:
    """Export, import and verification.

    Args:
        settings: name the store.
        clock: time source.
        progress: shows progress.
    """

    def __init__(
        self, settings: Settings, clock: Clock, progress: Progress = lambda _what, _done, _total: None
    ) -> None:
        self._settings = dataclasses.replace(settings, on_damage="refuse")  # but for the command that repairs
        self._clock = clock
        self._progress = progress

    async def export(self, file: BinaryIO, group_name: str, *, with_accounts: bool) -> Exported:
        """Write an archive.

        Raises:
            InvalidArgumentError: there is no store, or no such group.
            StorageIOError: the store cannot be opened, is unavailable, or holds unreadable rows.
        """
        async with self._opened(self._existing(self._settings)) as (metadata, registry):
            if group_name:
                registry.groups.get(group_name)
            known = await DocumentCache(metadata.store.table("registry"), "meta/", str).read("cluster_id")
            head = head_of(self._settings.cluster_id or known or "", group_name, self._clock.now())
            writer = ArchiveWriter(file, head)
            exporter = Exporter(registry, metadata.new_backend, writer, self._progress_of("export"))
            pins = await exported_pins(metadata.store, registry, self._clock.now(), group_name)
            return await exporter.run(group_name, with_accounts=with_accounts, pins=pins)

    async def import_(self, file: BinaryIO, name: str, group_name: str, *, dry_run: bool, is_file: bool) -> Imported:
        """Add the contents of an archive.

        Args:
            file: the archive; read twice if it is a file, so that a damaged one changes nothing.
            name: of the archive, for messages.
            group_name: of the only group to import, "" for all.
            dry_run: whether to write nothing.
            is_file: whether it can be read twice.

        Raises:
            KvcmError: the archive is damaged or does not fit, or the store failed.
        """
        settings = self._settings
        _reject_memory_store(settings)
        documents = self._checked(file, name) if is_file else None
        if dry_run and not _exists(settings):  # opening would create it
            settings = dataclasses.replace(settings, registry_storage_uri="", data_dir="")
        async with self._opened(settings, adds=not dry_run) as (metadata, registry):
            importer = Importer(
                registry=registry,
                new_backend=metadata.new_backend,
                usage=metadata.usage,
                store=metadata.store,
                group_name=group_name,
                store_kind=metadata.kind,
                dry_run=dry_run,
                progress=lambda done: self._progress("import", done, 0),
            )
            if documents is not None:
                importer.check(documents)
                file.seek(0)
            for frame in ArchiveReader(file, name).frames():
                await importer.load(frame)
            await self._restore_pins(metadata, registry, importer, dry_run=dry_run)
            if isinstance(metadata.usage, SharedLedger):
                await metadata.usage.flush()
                if not dry_run:
                    await self._recount(metadata.usage, metadata, registry)
            return importer.imported

    async def _restore_pins(self, metadata: Metadata, registry: Registry, importer: Importer, *, dry_run: bool) -> None:
        imported = importer.imported
        if dry_run:
            imported.pins = len(importer.pins)
            return
        pins = PinImport(registry, _caches(metadata, registry), metadata.store, self._clock)
        await pins.restore(importer.pins)
        imported.pins, imported.rejected_pins = len(pins.restored), pins.rejected

    async def _recount(self, ledger: SharedLedger, metadata: Metadata, registry: Registry) -> None:
        """Correct the usage that an interrupted import stored but did not report; there may be no leader yet."""
        recount = UsageRecount(registry, _caches(metadata, registry), ledger, self._clock)
        before = await recount.different_accounts(recount.accounts())
        if before:
            await _pause()  # for reports of running managers that are in flight
            again = await recount.different_accounts(before)
            await recount.recount(sorted(each for each, by in again.items() if by.items() & before[each].items()))

    async def rebuild(self, roots: Sequence[Path], *, dry_run: bool) -> Rebuilt:
        """Add the blocks that finish notes on storages have and whose bytes are there; the store is made if missing.

        Args:
            roots: of the storages.
            dry_run: whether to write nothing.

        Raises:
            InvalidArgumentError: there are no notes, or they are of several deployments and the store is of none.
            KvcmError: the store failed.
        """
        settings = self._settings
        _reject_memory_store(settings)
        folders = [folder for root in roots for folder in NotesFolder.found_below(root)]
        if dry_run and not _exists(settings):  # opening would create it
            settings = dataclasses.replace(settings, registry_storage_uri="", data_dir="")
        async with self._opened(settings, adds=not dry_run) as (metadata, registry):
            known = await DocumentCache(metadata.store.table("registry"), "meta/", str).read("cluster_id")
            cluster_id = _only_deployment(folders, settings.cluster_id or known or "")
            if not settings.cluster_id and not known and not dry_run:
                await registry.cluster_id(cluster_id)
            importer = Importer(
                registry=registry,
                new_backend=metadata.new_backend,
                usage=metadata.usage,
                store=metadata.store,
                store_kind=metadata.kind,
                dry_run=dry_run,
                progress=lambda done: self._progress("rebuild", done, 0),
            )
            reader = NotesReader(registry, importer, cluster_id)
            await reader.read([each for each in folders if Path(each.directory).name == path_component(cluster_id)])
            await metadata.store.flush()
            if isinstance(metadata.usage, SharedLedger):
                await metadata.usage.flush()
                if not dry_run:
                    await self._recount(metadata.usage, metadata, registry)
            return reader.rebuilt

    async def verify(self, repair: Repair) -> AuditReport:
        """Verify the whole store, and repair it as far as `repair` allows.

        Raises:
            InvalidArgumentError: there is no store.
            StorageIOError: the store cannot be opened or is unavailable.
        """
        settings = self._existing(self._settings)
        report, records = AuditReport(), Counter[int]()
        directory = local_directory(settings)
        if directory is not None:
            rows = await self._verify_rows(settings, directory, repair, report)
            if rows is None:
                report.unconfirmed.append("everything else, since nothing can be loaded as long as there are such rows")
                return report
            records = rows.records
        async with self._opened(settings) as (metadata, registry):
            caches = _caches(metadata, registry)
            auditor = IndexAuditor(
                audited_store(metadata, registry, caches, records),
                self._clock,
                _pause,
                repair,
                self._progress_of("verify"),
            )
            auditor.report = report
            return await auditor.run()

    async def finalize(self) -> tuple[Schema, Schema]:
        """Give the store the newest schema, so that releases before this one cannot read it any more.

        Returns:
            The schema before and now.

        Raises:
            InvalidArgumentError: there is no store, or a manager of another release runs on it.
            StorageIOError: the store cannot be opened or is unavailable.
        """
        async with self._opened(self._existing(self._settings)) as (metadata, _):
            vitals = await VitalsTable(self._clock, metadata.store.table("vitals")).all()
            others = sorted(f"{name} ({each.version})" for name, each in vitals.items() if each.version != __version__)
            if others:
                raise InvalidArgumentError(
                    f"managers of another release than {__version__} run on this store: {', '.join(others)}; replace "
                    "them first"
                )
            table = metadata.store.table("registry")
            before = await finalize_schema(table, metadata.store.flush)
            return before, await check_schema(table)

    async def repair(self) -> Repaired:
        """Keep everything that can be read of a damaged RocksDB, and count the losses.

        Raises:
            InvalidArgumentError: there is no store, or it is no directory of ours.
            StorageIOError: the store cannot be opened for another reason, or the disk failed.
        """
        settings = self._existing(self._settings)
        directory = local_directory(settings)
        if directory is None:
            raise InvalidArgumentError(
                "Redis repairs its own files (redis-check-rdb, redis-check-aof): this is for the metadata in a data "
                "directory. `kvcm index verify --repair` verifies what a Redis holds"
            )
        try:
            await asyncio.to_thread(check_readable, directory, self._clock)
            return Repaired(was_damaged=False)
        except DamagedStoreError:
            found = await asyncio.to_thread(repair_local, directory, self._clock, self._progress_of("repair"))
        return Repaired(was_damaged=True, found=found)

    async def _verify_rows(
        self, settings: Settings, directory: Path, repair: Repair, report: AuditReport
    ) -> RowsFound | None:
        """Verify the rows of a RocksDB before it is loaded; None if it cannot be loaded."""
        if not await self._verify_files(directory, repair, report):
            return None
        log = await asyncio.to_thread(CommitLog, directory, Fsync(settings.fsync), self._clock)
        try:
            found = await asyncio.to_thread(audit_rows, log, self._progress_of("read"))
            dropped = [row for row in found.bad if repair.repair and (repair.drop_unreadable or not row.holds_data)]
            drop_rows(log, dropped)
            await log.flush()
        finally:
            await log.close()
        gone = {row.key for row in dropped}
        for row in found.bad:
            how = "with --drop-unreadable drops the row" if row.holds_data else "drops the row"
            report.add(Finding("row", row.where, row.reason, how, row.key in gone))
        left = [row for row in found.bad if row.key not in gone]
        return None if any(row.stops_loading for row in left) else found

    async def _verify_files(self, directory: Path, repair: Repair, report: AuditReport) -> bool:
        """Return whether the files of a RocksDB are whole, or were repaired."""
        try:
            await asyncio.to_thread(check_readable, directory, self._clock)
        except DamagedStoreError:
            is_mended = repair.repair and repair.drop_unreadable
            how = "with --drop-unreadable, or `kvcm index repair`, keeps what can be read"
            if is_mended:
                found = await asyncio.to_thread(repair_local, directory, self._clock, self._progress_of("repair"))
            else:
                found = await asyncio.to_thread(survey_database, directory, self._progress_of("read"))
            for what in found.sentences() if found is not None else ["a repair was interrupted"]:
                report.add(Finding("store", str(directory), what, how, is_mended))
            return is_mended
        return True

    def _checked(self, file: BinaryIO, name: str) -> list[Document]:
        documents = []
        for done, frame in enumerate(ArchiveReader(file, name).frames(), 1):
            if isinstance(frame, Document):
                documents.append(frame)
            self._progress("check", done, 0)
        return documents

    @contextlib.asynccontextmanager
    async def _opened(self, settings: Settings, *, adds: bool = False) -> AsyncIterator[tuple[Metadata, Registry]]:
        """Open a store; `adds` says that it is made if missing."""
        node_id = f"{socket.gethostname()}:index_{secrets.token_hex(8)}"
        metadata = await open_metadata(
            settings, self._clock, node_id, self._progress_of("load"), least_timeout_seconds=_PATIENCE_SECONDS
        )
        try:
            table = metadata.store.table("registry")
            schema = await check_schema(table)
            if adds:
                schema = await ensure_schema(table, metadata.store.flush, metadata.first_schema)
            await _open_block_stores(metadata)
            registry = Registry(
                ClosedStorages(),
                table,
                metadata.store.flush,
                metadata.kind,
                tags=metadata.tags_with(schema),
                block_stores=metadata.tags_in_block_stores,
            )
            await registry.load()
            yield metadata, registry
        finally:
            await metadata.close()

    def _existing(self, settings: Settings) -> Settings:
        _reject_memory_store(settings)
        if not _exists(settings):
            raise InvalidArgumentError(
                f"{local_directory(settings)} does not exist: no manager has stored anything there"
            )
        return settings

    def _progress_of(self, step: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(step, done, total)


def _only_deployment(folders: Sequence[NotesFolder], cluster_id: str) -> str:
    """Return the id of the deployment whose notes are to be read: the store's, else that of all notes that there are.

    Raises:
        InvalidArgumentError: there are none, or of several.
    """
    found = sorted(set(filter(None, map(deployment_of, folders))))
    if cluster_id in found:
        return cluster_id
    if not found or cluster_id:
        of_which = f"deployment {cluster_id!r}" if cluster_id else "any deployment"
        raise InvalidArgumentError(
            f"below these roots are no finish notes of {of_which}, only of {found}: managers write them with "
            "kvcm.storage.finish_notes=true"
        )
    if len(found) > 1:
        raise InvalidArgumentError(f"below these roots are finish notes of {found}: say which with kvcm.cluster_id")
    return found[0]


def audited_store(metadata: Metadata, registry: Registry, caches: OpenCaches, records: Counter[int]) -> AuditedStore:
    """Return the parts of an opened store to verify; `records` are counts of a RocksDB's rows by uid."""
    client = metadata.client
    if client is None:

        def in_memory(placement: Placement) -> AuditedIndex:
            return PlainAudit(metadata.new_backend(placement))

        blocks = LoadedBlocks(records, metadata.new_backend)
        return AuditedStore(metadata.store, registry, caches, in_memory, {"": blocks})

    clients = {"": client} | {name: each.store.client for name, each in metadata.block_stores.items()}
    lost = {name: LostRuns() for name in clients}

    def in_redis(placement: Placement) -> AuditedIndex:
        if placement.store not in clients:
            raise StorageIOError(
                f"blocks are in store {placement.store!r}, which kvcm.store.block_stores does not name"
            )
        if placement.tags:
            return RunsAudit(clients[placement.store], placement.uid, placement.tags, lost[placement.store])
        return RedisAudit(client, placement.uid, placement.shard_count)

    assert isinstance(metadata.usage, SharedLedger)
    return AuditedStore(
        store=metadata.store,
        registry=registry,
        caches=caches,
        audited=in_redis,
        blocks={name: RedisBlocks(each, lost[name]) for name, each in clients.items()},
        ledger=metadata.usage,
    )


async def _open_block_stores(metadata: Metadata) -> None:
    """Open the further stores for blocks, if a manager has begun this deployment: nothing is in them before."""
    if not metadata.block_stores:
        return
    known = await DocumentCache(metadata.store.table("registry"), "meta/", Incarnation).read("incarnation")
    if known is not None:
        await metadata.check_block_stores(known.deployment)


def _caches(metadata: Metadata, registry: Registry) -> OpenCaches:
    return OpenCaches(registry, ClosedStorages(), metadata.new_backend, metadata.usage, CacheBudget())


async def _pause() -> None:
    await asyncio.sleep(_PAUSE_SECONDS)


def _exists(settings: Settings) -> bool:
    directory = local_directory(settings)
    return directory is None or directory.is_dir()


def _reject_memory_store(settings: Settings) -> None:
    if not settings.registry_storage_uri.startswith("redis") and local_directory(settings) is None:
        raise InvalidArgumentError(
            "the metadata is kept in the manager's memory only: give --data-dir, or the kvcm.registry_storage.uri "
            "that the manager is started with"
        )
