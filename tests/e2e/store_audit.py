"""An audit of the store itself, past the managers: recounts everything that they claim.

It knows the records and the documents, and shares no bookkeeping with the managers: usage, deadlines and extents are
counted again from the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcm.cache.quotas import group_account
from kvcm.cache.write_sessions import WriteSession
from kvcm.components import Metadata, open_metadata
from kvcm.config import Settings, load_settings
from kvcm.index.backends.backend import IndexBackend
from kvcm.model.clock import SystemClock
from kvcm.model.instances import Instance, Placement
from kvcm.model.keys import mixed, unmixed_key
from kvcm.model.locations import BlockRecord, LocationStatus, StorageKey, decode_chunk
from kvcm.model.uri import LocationUri
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.store.redis.quota import Counters, QuotaCounters

_LATE_SECONDS = 0.3
_VERIFY_SECONDS = 60.0
_UNSETTLED = 2


@dataclass(slots=True)
class StoreAudit:
    """The findings.

    Attributes:
        broken: broken invariants.
        torn: parts of the store that disagree, perhaps since it changed while it was read.
        used_bytes: by group, counted from the records.
        blocks: number of records.
        statuses: locations by status.
        sessions: documents of write sessions.
        paths: files that records refer to.
        groups_off: groups whose shared counters differ from the records, and how.
        groups_below: those of them that count less than there is.
    """

    broken: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    used_bytes: Counter[str] = field(default_factory=Counter)
    blocks: int = 0
    statuses: Counter[LocationStatus] = field(default_factory=Counter)
    sessions: int = 0
    paths: set[str] = field(default_factory=set)
    groups_off: list[str] = field(default_factory=list)
    groups_below: list[str] = field(default_factory=list)
    _extents: Counter[str] = field(default_factory=Counter)
    _fields: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def wrong(self) -> list[str]:
        """Everything that must not be, once the store is quiet."""
        return [*self.broken, *self.torn]

    @property
    def unfinished(self) -> int:
        """Locations that are writing or deleting."""
        return self.statuses[LocationStatus.WRITING] + self.statuses[LocationStatus.DELETING]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is unfinished, and usage agrees. A block that goes between two reads of one audit leaves
        neither, and is torn."""
        return not (self.unfinished or self.sessions or self.groups_off or self.torn)

    def unrest(self) -> list[str]:
        """Return why it is not quiet."""
        return (
            [] if self.is_quiet else [f"not quiet: {dict(self.statuses)}, {self.sessions} sessions", *self.groups_off]
        )

    async def index(self, instance: Instance, placement: Placement, backend: IndexBackend) -> None:
        """Audit the records of one instance."""
        where, group = instance.instance_id, instance.instance_group_name
        await backend.refresh()
        kept, kept_count = +Counter(backend.usage_bytes), backend.key_count
        kept_deleting = +Counter(backend.deleting_bytes), backend.deleting_keys
        used, deleting = Counter[StorageKey](), Counter[StorageKey]()
        keys = list(dict.fromkeys([key async for page in backend.scan(1024) for key in page]))
        records = [record for record in await backend.get_many(keys) if record is not None]
        for key, record in zip(keys, await backend.get_many(keys), strict=True):
            if record is None:
                self.torn.append(f"{where}: {unmixed_key(key)} is listed and has no record")
            else:
                self._record(f"{where}/{unmixed_key(key)}", record, used, deleting)
        await self._pending(where, backend, keys)
        if kept_count != len(records):
            self.torn.append(f"{where}: {kept_count} keys counted, {len(records)} records")
        leaving = sum(all(each.status is LocationStatus.DELETING for each in record.locations) for record in records)
        if kept != used:
            self.torn.append(f"{where}: usage is kept as {dict(kept)}, recounted {dict(used)}")
        if kept_deleting != (deleting, leaving):
            self.torn.append(f"{where}: deletions are kept as {kept_deleting}, recounted {(deleting, leaving)}")
        self.blocks += len(records)
        self.used_bytes[group] += sum(used.values())
        self._fields[group].update(
            {f"b{int(place.storage_type)}/{place.storage}": size for place, size in used.items()}
        )
        self._fields[group][f"k{placement.uid}"] += len(records)

    def _record(
        self, where: str, record: BlockRecord, used: Counter[StorageKey], deleting: Counter[StorageKey]
    ) -> None:
        now = time.time()
        for location in record.locations:
            self.statuses[location.status] += 1
            used[location.place] += location.size_bytes
            if location.status is LocationStatus.DELETING:
                deleting[location.place] += location.size_bytes
            if location.status is not LocationStatus.SERVING and location.deadline < now - _LATE_SECONDS:
                late = now - location.deadline
                self.broken.append(f"{where}: {location.status.name} for {late:.1f} s longer than allowed: {location}")
            for spec in decode_chunk(location.chunk).specs:
                uri = LocationUri.parse(spec.uri)
                self.paths.add(uri.path)
                self._extents[f"{uri.storage}{uri.path}#{uri.blkid}"] += 1

    async def _pending(self, where: str, backend: IndexBackend, keys: list[int]) -> None:
        pending = set(await backend.due(float("inf"), len(keys) + 1))
        records = zip(keys, await backend.get_many(keys), strict=True)
        expected = {key for key, record in records if record is not None and record.due is not None}
        if pending != expected:
            self.torn.append(f"{where}: due are {len(pending)} blocks, by their records {len(expected)}")

    def group(self, name: str, before: Counters, received: Counters) -> None:
        """Compare the shared counters of a group, as they were before and after the records, with the records."""
        truth, used = +self._fields[name], +Counter(received.used)
        if used != truth or any(received.reserved.values()):
            text = f"{name}: counted {dict(used)}, reserved {dict(received.reserved)}, in the records {dict(truth)}"
            self.groups_off.append(text)
            # Blocks are reserved only where their number is limited; without a limit their reports come a moment later.
            sizes = ((field, size) for field, size in truth.items() if field.startswith("b"))
            if any(max(_covered(before, field), _covered(received, field)) < size for field, size in sizes):
                self.groups_below.append(text)

    def conclude(self) -> None:
        """Check what spans instances."""
        self.broken += [
            f"{extent} belongs to {count} locations" for extent, count in self._extents.items() if count > 1
        ]


def _covered(counters: Counters, field: str) -> int:
    return counters.used.get(field, 0) + counters.reserved.get(field, 0)


def settings_of(values: dict[str, str]) -> Settings:
    """Return settings as `kvcm serve` reads them."""
    return load_settings(None, [f"{key}={value}" for key, value in values.items()], {}, lambda _text: None)


@contextlib.asynccontextmanager
async def _opened(values: dict[str, str]) -> AsyncIterator[tuple[Metadata, Registry]]:
    metadata = await open_metadata(settings_of(values), SystemClock(), "look")
    try:
        registry = Registry(StorageDirectory("look"), metadata.store.table("registry"), store_kind=metadata.kind)
        await registry.load()
        yield metadata, registry
    finally:
        await metadata.close()


async def used_bytes(values: dict[str, str]) -> Counter[str]:
    """Return what groups use right now, by the counters that change with the records."""
    used: Counter[str] = Counter()
    async with _opened(values) as (metadata, registry):
        for instance, placement in _placements(registry):
            backend = metadata.new_backend(placement)
            await backend.refresh()
            used[instance.instance_group_name] += sum(backend.usage_bytes.values())
    return used


async def records_left(values: dict[str, str], instance_id: str, keys: Sequence[int]) -> int:
    """Return how many of the blocks of an instance have a record, in any status."""
    async with _opened(values) as (metadata, registry):
        backend = metadata.new_backend(registry.instances.placement(instance_id))
        return sum(record is not None for record in await backend.get_many(mixed(keys)))


async def audit_store(values: dict[str, str], *, capacities: dict[str, int] | None = None) -> StoreAudit:
    """Open the store that the settings name, and audit everything in it. A RocksDB must not be in use.

    Args:
        values: settings of a manager.
        capacities: bytes that groups may use at most.
    """
    async with _opened(values) as (metadata, registry):
        return await _audit(metadata, registry, capacities or {})


async def audit_until(
    values: dict[str, str],
    seconds: float,
    is_enough: Callable[[StoreAudit], bool] = lambda audit: audit.is_quiet,
    *,
    capacities: dict[str, int] | None = None,
) -> tuple[StoreAudit, float]:
    """Audit a shared store until it is quiet, or time is up; returns the last audit, and how long that took."""
    begin = time.monotonic()
    while True:
        audit = await audit_store(values, capacities=capacities)
        passed = time.monotonic() - begin
        if is_enough(audit) or passed > seconds:
            return audit, passed
        await asyncio.sleep(0.2)


async def _audit(metadata: Metadata, registry: Registry, capacities: dict[str, int]) -> StoreAudit:
    audit, before = StoreAudit(), await _counters(metadata, registry)
    for instance, placement in _placements(registry):
        await audit.index(instance, placement, metadata.new_backend(placement))
    for session_id, document in (await metadata.store.table("sessions", 16).all()).items():
        audit.sessions += 1
        session = WriteSession.decoded(session_id, document)
        if session.deadline < time.time() - _LATE_SECONDS:
            audit.broken.append(f"session {session_id[:8]} is {time.time() - session.deadline:.1f} s overdue")
    for name, received in (await _counters(metadata, registry)).items():
        audit.group(name, before[name], received)
    for name, capacity in capacities.items():
        if audit.used_bytes[name] > capacity:
            audit.broken.append(f"group {name} uses {audit.used_bytes[name]} of {capacity} bytes")
    audit.conclude()
    return audit


async def _counters(metadata: Metadata, registry: Registry) -> dict[str, Counters]:
    if metadata.client is None:
        return {}
    counters = QuotaCounters(metadata.client)
    return {group.name: await counters.read(group_account(group.name)) for group in registry.groups.all()}


def _placements(registry: Registry) -> Iterator[tuple[Instance, Placement]]:
    for instance in registry.instances.all():
        yield instance, registry.instances.placement(instance.instance_id)
    for removal in registry.instances.removals():
        yield removal.instance, removal.placement


def verified(manager_options: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Run `kvcm index verify` over the store that the options name; returns what it found.

    What changed all the time, so that it could not be checked, is looked at once more.

    Args:
        manager_options: of `kvcm serve`.
        environment: variables of the command, None for those of the test.
    """
    done = _verify(manager_options, environment)
    if done.returncode == _UNSETTLED:
        done = _verify(manager_options, environment)
    return [] if done.returncode == 0 else [f"index verify ends with {done.returncode}: {done.stdout}{done.stderr}"]


def _verify(manager_options: Sequence[str], environment: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcm", "index", "verify", "--json", *manager_options],
        capture_output=True,
        text=True,
        timeout=_VERIFY_SECONDS,
        check=False,
        cwd="/",  # or the packages there would be taken
        env=environment,
    )


def orphan_files(root: Path, audit: StoreAudit) -> list[Path]:
    """Return the files below a storage's directory that no record refers to."""
    files = (path for path in root.rglob("*") if path.is_file() and ".kvcm-" not in path.name)
    return [path for path in files if str(path).removesuffix(".deleted") not in audit.paths]
