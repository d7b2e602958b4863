"""`kvcm index verify`: whether a store holds what the invariants promise.

* Invariant 4: per instance and lock shard the usage kept with the records is that of the records; the counters that
  managers share, of groups, storages and all together, are the sums of those.
* Invariant 5: no two locations share an extent.
* Of every block, the record and all that is derived from it agree; nothing is being written past its deadline or by a
  session that is gone; what cannot be read is named.
* Documents can be read, become due, and belong to instances that exist; so do all keys of blocks.

Nothing is held in memory that grows with the index but one part of its extents (extents.py). Managers may go on working
on a shared store: what changes while it is looked at is looked at again (audit_blocks.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Container, Sequence
from typing import Final, NamedTuple, Protocol

from kvcm.cache.accounts import field_title
from kvcm.cache.audit_blocks import BlockAudit, Pause
from kvcm.cache.audit_documents import DocumentAudit
from kvcm.cache.audit_report import AuditReport, Finding, Repair
from kvcm.cache.endings import SessionEndings
from kvcm.cache.extents import ExtentPart, Owner, overlapping, part_count
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.recount import UsageRecount
from kvcm.cache.shared_usage import SharedLedger
from kvcm.index.backends.audited import AuditedIndex
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import Placement
from kvcm.model.locations import BlockRecord, Location
from kvcm.registry.registry import Registry
from kvcm.store.store import Store

__all__ = ["AuditedStore", "IndexAuditor", "StoredBlocks"]

_SESSION_SHARDS: Final = 16
_COUNTER_PAUSES: Final = 12  # whoever leads recounts what differed in two looks, five seconds apart
_MOST_PAIRS: Final = 10_000


class StoredBlocks(Protocol):
    """Everything that a store holds of blocks, whether an instance is registered for it or not."""

    async def uids(self) -> Counter[int]:
        """Return about how many keys or rows there are of each registration."""

    def unlisted(self) -> AsyncIterator[tuple[int, int, list[int]]]:
        """Yield uid, shard and keys of records that no scan of their index finds."""

    async def drop(self, uids: Container[int]) -> None:
        """Forget all that there is of registrations."""


class AuditedStore(NamedTuple):
    """What is verified.

    Attributes:
        store: documents.
        registry: loaded from it.
        caches: the indexes, for repairs.
        audited: from a placement to the records with all that is derived from them.
        blocks: everything that is stored of blocks.
        ledger: the counters that managers share, None where there is one manager.
    """

    store: Store
    registry: Registry
    caches: OpenCaches
    audited: Callable[[Placement], AuditedIndex]
    blocks: StoredBlocks
    ledger: SharedLedger | None = None


class IndexAuditor:
    """Verifies one store.

    Args:
        audited: the store.
        clock: time source.
        pause: waits between two looks at what looks wrong; a second does.
        repair: what may be changed.
        progress: told of blocks looked at and of about how many there are.
    """

    def __init__(
        self,
        audited: AuditedStore,
        clock: Clock,
        pause: Pause,
        repair: Repair,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._store = audited
        self._clock = clock
        self._pause = pause
        self._repair = repair
        self._progress = progress
        self._done = 0
        self._total = 0
        self._sessions = audited.store.table("sessions", _SESSION_SHARDS)
        self._endings = SessionEndings(self._sessions, self._find, clock)
        self._audits: dict[int, BlockAudit] = {}
        self.report = AuditReport()

    async def _find(self, uid: int) -> InstanceCache | None:
        return self._store.caches.by_uid(uid)

    async def run(self) -> AuditReport:
        """Look at everything.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._check_documents()
        await self._check_strays()
        parts = await self._open()
        await self._check_unlisted()
        await self._check_blocks(parts)
        if self._store.ledger is not None:
            await self._check_counters(self._store.ledger)
        await self._store.store.flush()
        return self.report

    async def _open(self) -> int:
        """Open every index, and return into how many parts to cut the extents."""
        extents = 0
        for cache in self._store.caches.all():
            await cache.index.refresh()
            self._total += cache.index.key_count
            extents += cache.index.key_count * len(cache.instance.location_spec_infos)
            audited = self._store.audited(cache.placement)
            self._audits[cache.placement.uid] = BlockAudit(
                cache, audited, self._sessions, self._endings, self._clock, self._pause, self._repair, self.report
            )
        self.report.looked_at["instances"] = len(self._audits)
        return part_count(extents)

    # ── documents, and keys of instances that are gone ──

    async def _check_documents(self) -> None:
        documents = DocumentAudit(self._known, self._repair, self.report)
        await documents.look_at_registry(self._store.store.table("registry"))
        await documents.look_at_sessions(self._sessions)
        await documents.look_at_leases(self._store.store.table("leases", _SESSION_SHARDS))
        await documents.look_at_pins(self._store.store.table("pins", _SESSION_SHARDS))
        if documents.has_suspects:
            await self._pause()
            await self._store.registry.refresh()
            await documents.judge()

    async def _check_strays(self) -> None:
        stored = await self._store.blocks.uids()
        if stored.keys() <= self._known():
            return
        await self._pause()
        await self._store.registry.refresh()
        strays = stored.keys() - self._known()
        if self._repair.mend and strays:
            await self._store.blocks.drop(strays)
        for uid in sorted(strays):
            what = f"{stored[uid]} keys of blocks, but no such instance is registered or being removed"
            repair = "forgets them; their bytes are left to the scrub"
            self.report.add(Finding("stray", f"registration {uid}", what, repair, self._repair.mend))

    def _known(self) -> set[int]:
        instances = self._store.registry.instances
        uids = {instances.placement(instance.instance_id).uid for instance in instances.all()}
        return uids | {removal.placement.uid for removal in instances.removals()}

    # ── blocks ──

    async def _check_unlisted(self) -> None:
        async for uid, shard, keys in self._store.blocks.unlisted():
            if uid in self._audits:
                await self._audits[uid].inspect(shard, dict.fromkeys(keys, frozenset()))
        for audit in self._audits.values():
            await audit.judge()

    async def _check_blocks(self, parts: int) -> None:
        part = ExtentPart(0, parts)
        for audit in self._audits.values():
            await audit.run(part, self._count)
        await self._check_extents(part)
        for number in range(1, parts):
            part = ExtentPart(number, parts)
            for audit in self._audits.values():
                await audit.gather(part)
            await self._check_extents(part)

    def _count(self, blocks: int) -> None:
        self._done += blocks
        self._progress(self._done, self._total)

    # ── extents (invariant 5) ──

    async def _check_extents(self, part: ExtentPart) -> None:
        self.report.looked_at["extents"] += len(part)
        suspects = dict.fromkeys(part.suspects(_MOST_PAIRS))  # a pair may share several objects
        if not suspects:
            return
        await self._pause()
        for one, other in suspects:
            await self._check_pair(one, other)

    async def _check_pair(self, one: Owner, other: Owner) -> None:
        mine = await self._locations(one)
        theirs = mine if other == one else await self._locations(other)
        for at, location in enumerate(mine):
            for to, another in enumerate(theirs):
                if other == one and to <= at:
                    continue
                name = _shared_extent(location, another)
                if name:
                    await self._found_shared(name, (one, location), (other, another))

    async def _locations(self, owner: Owner) -> Sequence[Location]:
        (view,) = await self._audits[owner.uid].views([owner.key])
        return view.record.locations if view.record is not None else ()

    async def _found_shared(self, name: str, *places: tuple[Owner, Location]) -> None:
        for owner, location in places if self._repair.mend else ():
            await self._forget(owner, location)
        (one, _), (other, _) = places
        where = f"block {one.key} of registration {one.uid} and block {other.key} of registration {other.uid}"
        repair = "forgets both locations: either may hold the other's bytes"
        self.report.add(Finding("extent", where, f"they share bytes of {name}", repair, self._repair.mend))

    async def _forget(self, owner: Owner, location: Location) -> None:
        def without(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            left = tuple(place for place in old.locations if place != location) if old is not None else ()
            if old is None or not left:
                return None
            return old if left == old.locations else old._replace(locations=left)

        await self._audits[owner.uid].cache.index.read_modify_write([owner.key], without)

    # ── counters that managers share (invariant 4) ──

    async def _check_counters(self, ledger: SharedLedger) -> None:
        await ledger.flush()
        recount = UsageRecount(self._store.registry, self._store.caches, ledger, self._clock)
        titles = recount.accounts()
        first = last = await self._counter_differences(recount, titles)
        changing: set[str] = set()
        for _ in range(_COUNTER_PAUSES):
            if not last:
                return
            await self._pause()
            last = await self._counter_differences(recount, last)
            changing |= {account for account, difference in last.items() if difference != first[account]}
        for account, difference in last.items():
            if account in changing:
                self.report.unsettled.append(f"shared counters of {titles[account]}, which change all the time")
            else:
                await self._found_counters(recount, account, titles[account], difference)

    async def _counter_differences(self, recount: UsageRecount, accounts: Collection[str]) -> dict[str, dict[str, int]]:
        different = await recount.different(accounts)
        return {account: different[account] for account in accounts if different.get(account)}

    async def _found_counters(
        self, recount: UsageRecount, account: str, title: str, difference: dict[str, int]
    ) -> None:
        is_mended = self._repair.mend and await recount.recount([account])
        what = ", ".join(f"{field_title(account, field)} {value:+}" for field, value in difference.items())
        what = f"the counters that managers share differ from what is kept with the records: {what}"
        self.report.add(Finding("usage", title, what, "recounts it", is_mended))


def _shared_extent(one: Location, other: Location) -> str:
    """Return the object in which two locations share bytes, "" when they share none."""
    try:
        extent = overlapping(one, other)
    except InvalidArgumentError:  # a uri cannot be read; that is a finding of its own
        return ""
    return extent.object_name if extent is not None else ""
