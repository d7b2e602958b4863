"""Imports: what an archive holds, added to a store.

Nothing that exists is changed: equal documents are fine, different ones refuse the import before anything is written,
and a block whose key is there already is kept as it is. So an import that was cut off is simply run again. What a group
says of the store that it came from is fitted to this one.

Quotas are not enforced, so that a deployment can be moved into one that is configured tighter; what exceeds them is
reported. Instances are registered anew: they get new numbers, and as many lock shards as their group says now.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcm.cache.archive import Document, Row, Rows, Trailer
from kvcm.cache.fitting import fitted
from kvcm.cache.imported_documents import KINDS, check_valid, decoded, difference_of, title, title_parts
from kvcm.cache.pin_transfer import ExportedPin
from kvcm.cache.usage import Ledger
from kvcm.index.backends.backend import Change, IndexBackend
from kvcm.model.accounts import Account
from kvcm.model.api_keys import ApiKey
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance, Placement
from kvcm.model.locations import Place
from kvcm.model.storages import StorageConfig
from kvcm.registry.registry import Registry
from kvcm.registry.shelf import Shelf
from kvcm.registry.taken_keys import TakenKey
from kvcm.store.store import Store

__all__ = ["Imported", "Importer"]

_TOUCHES_AT_ONCE = 64


@dataclass(slots=True)
class Imported:
    """What an import did, or would do.

    Attributes:
        created: names of what was added to the registry, by kind.
        stored: records that were added, by instance id.
        skipped: records whose key was there already, by instance id.
        exceeded: a sentence per quota that the imported groups exceed now.
        fitted: a sentence per setting that this store takes otherwise than the export has it.
        pins: number of those that hold something now.
        refused_pins: a sentence per pin that does not.
    """

    created: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    stored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    exceeded: list[str] = field(default_factory=list)
    fitted: list[str] = field(default_factory=list)
    pins: int = 0
    refused_pins: list[str] = field(default_factory=list)


class Importer:
    """Takes the frames of one archive.

    Args:
        registry: loaded; its storages need not be open.
        new_backend: makes or finds the backend of an index.
        usage: told of what is stored.
        store: made durable as the import goes on.
        group_name: of the only group to import, "" for all.
        store_kind: memory, rocksdb or redis: what groups may name.
        dry_run: whether to write nothing, and only tell what would be.
        progress: told how many records were seen.

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
    ) -> None:
        self._registry = registry
        self._new_backend = new_backend
        self._usage = usage
        self._store = store
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
        self._check([value for value in map(decoded, documents) if isinstance(value, tuple(KINDS.values()))])

    async def take(self, frame: Document | Rows | Trailer) -> None:
        """Take the next frame.

        Raises:
            KvcmError: as `check`, or the store failed; what was stored before stays.
        """
        if isinstance(frame, Document):
            await self._take_document(decoded(frame))
            return
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._check(waiting)
            await self._add_all(waiting)
        if isinstance(frame, Rows):
            await self._take_rows(frame)
        else:
            await self._store.flush()
            await self._report_exceeded()

    async def _take_document(self, value: object) -> None:
        if isinstance(value, ExportedPin):
            if value.instance_id not in self._left_out:
                self.pins.append(value)
        elif isinstance(value, TakenKey):
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
        value, _ = self._fitted(value)
        check_valid(value, self._store_kind)
        known = self._known(value)
        if known is not None and (difference := difference_of(known, value)):
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
        value, changes = self._fitted(value)
        if isinstance(value, InstanceGroup):
            self._groups[value.name] = value
        if self._known(value) is not None:
            return
        self.imported.fitted += changes
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
            shelf = Shelf(self._store.table("registry"), "account/", Account)
            await shelf.change(value.user_name, lambda known: known or value)
        elif isinstance(value, ApiKey):
            keys = Shelf(self._store.table("registry"), "key/", ApiKey)
            await keys.change(value.id, lambda known: known or value)
        elif isinstance(value, TakenKey):
            await self._registry.taken_keys.remember(value)

    def _fitted(self, value: object) -> tuple[object, list[str]]:
        return fitted(value, self._store_kind) if isinstance(value, InstanceGroup) else (value, [])

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

    async def _take_rows(self, rows: Rows) -> None:
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
            written = await backend.write_many([Change(row.key, None, row.record) for row in absent.values()])
            for key in written.lost:  # somebody stored it this very moment
                absent.pop(key, None)
            self._usage.listener(instance.instance_group_name, placement.uid)()(written.usage, len(absent))
            await _restore_accesses(backend, absent.values())
            await self._store.flush()
        self.imported.stored[instance.instance_id] += len(absent)
        self.imported.skipped[instance.instance_id] += len(rows) - len(absent)

    async def _report_exceeded(self) -> None:
        for group in self._groups.values():
            if not self._dry_run:
                self.imported.exceeded += _exceeded(group, await self._used(group.name))

    async def _used(self, group_name: str) -> Counter[Place]:
        used: Counter[Place] = Counter()
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


def _exceeded(group: InstanceGroup, used: Counter[Place]) -> list[str]:
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
