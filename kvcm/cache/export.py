"""Exports: the registry and the blocks of a store, page by page into an archive.

Managers may go on working on a shared store meanwhile: every record is read at one moment, different records at
different ones. Locations that are being written are left out, since their sessions are not exported; a block that has
no other location is left out with them. What is being deleted comes along: it counts as usage until its bytes are
freed. Pins come as documents of their own, behind the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvcm import __version__
from kvcm.cache.archive import ArchiveWriter, Document, Head, Row, Rows
from kvcm.cache.pages import PAGE_KEYS
from kvcm.cache.pin_transfer import ExportedPin
from kvcm.index.backends.backend import Access, IndexBackend
from kvcm.model.instances import Instance, Placement
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.registry.codec import encode_document
from kvcm.registry.registry import Registry

__all__ = ["Exported", "Exporter", "head_of"]

NewBackend = Callable[[Placement], IndexBackend]
Progress = Callable[[int, int], None]
"""Told of records done and of about how many there are."""


@dataclass(slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        instances: number of them.
        records: by instance id.
        left_out: blocks that were only being written.
        pins: number of them.
        unknown_storages: storages of locations that are configured no more.
    """

    instances: int = 0
    records: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
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
        progress: told after each page.
    """

    def __init__(
        self,
        registry: Registry,
        new_backend: NewBackend,
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
            {name for group in groups for name in group.storage_candidates}
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
        async for page in backend.scan(PAGE_KEYS):
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
            kept = _portable(record)
            if kept is None:
                self._exported.left_out += 1
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


def _portable(record: BlockRecord) -> BlockRecord | None:
    """Return the record without what belongs to sessions and pins, which are not exported."""
    locations = tuple(
        place._replace(pinned_until=0.0) if place.pinned_until else place
        for place in record.locations
        if place.status is not LocationStatus.WRITING
    )
    if not locations:
        return None
    return record if locations == record.locations else record._replace(locations=locations)
