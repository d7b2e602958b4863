"""Managers killed while they evict and delete, started again, and judged: real files, groups at their marks.

Eviction may take any block that serves, so a confirmed write may be gone; a served block must have been confirmed, and
its bytes must be there. The rest leaves records that become due, and bytes of sessions that were cut off. Of
a packed file these are the slots of sessions without an answer, which keep the slots punched out around them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from key_history import Block, History, Outcome, Removal
from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, Wire, managers_on
from mixed_load import Load, finish_later, lacking_bytes, metas_of, served_blocks, without_bytes
from reclaim_site import remaining_bytes, until, usage_of, write
from store_audit import audit_store, verified

from kvcm.model.uri import LocationUri
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.storage.backend import slot_count
from kvcm.storage.file_slots import deleted_slots

Slot = tuple[str, int | None]
"""A file, and the number of a slot in it where it is packed."""

_KEYS = range(1000)
_CLIENTS = 8
_SHARES = (0.75, 0.2, 0.05, 0.0)
_SOME_SECONDS = 40.0
_EVICTION_SECONDS = 40.0
_USAGE_SECONDS = 40.0


@dataclass(slots=True)
class EvictionReport:
    """What a run saw.

    Attributes:
        kills: managers killed under load.
        wrong: broken invariants, with the number of the kill.
        left_deleting: kills that left blocks marked for deletion.
        checked_blocks: served blocks whose bytes were compared after a restart.
        quiet_seconds: per kill, from the restart until nothing was being written or deleted.
        low_mark_seconds: per crossing of a mark after a restart, until what remains was at the low mark.
        cut_off: files without a record, of sessions that never ended well.
        requests: answered.
        audits: times that the store itself was recounted.
    """

    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    left_deleting: int = 0
    checked_blocks: int = 0
    quiet_seconds: list[float] = field(default_factory=list)
    low_mark_seconds: list[float] = field(default_factory=list)
    cut_off: set[str] = field(default_factory=set)
    requests: int = 0
    audits: int = 0


def eviction_site(directory: Path) -> Site:
    """A group whose bytes go at once, in files of their own, and one whose packed bytes stay a second."""
    swift = GroupPlan("swift", ("s/one",), 400 * BLOCK_BYTES, directory / "swift", 0.8, 0, 1)
    patient = GroupPlan("patient", ("p/one",), 800 * BLOCK_BYTES, directory / "patient", 0.4, 1000, 8)
    return Site(swift, patient)


def history_of(site: Site, base: dict[Block, str]) -> History:
    """Return a history in which every block may be gone at any time."""
    history = History(base)
    for instance in site.instances:
        history.removing(Removal(instance, None, float("-inf"), float("inf"), is_confirmed=False))
    return history


@dataclass(slots=True)
class EvictionRig:
    """A manager that evicts, and the known state of its blocks.

    Attributes:
        site: groups and instances.
        manager: the one.
        random: of the run.
        is_shared: whether the store can be looked at while the manager runs.
    """

    site: Site
    manager: Manager
    random: Random
    is_shared: bool
    report: EvictionReport = field(default_factory=EvictionReport)
    base: dict[Block, str] = field(default_factory=dict)
    _confirmed: set[Slot] = field(default_factory=set)

    async def set_up(self) -> None:
        """Create groups and instances, and fill them up to their marks."""
        wire = self.manager.connect()
        await self.site.set_up(wire)
        for group in self.site.groups:
            await self._cross(wire, group)
        self.base = await served_blocks(wire, Load(self.site, _KEYS, History()))
        self._confirmed.update(map(_slot, self.base.values()))
        await wire.close()

    async def round(self, *, audit: bool) -> None:
        """Load, kill, start again, judge, and cross the marks once more."""
        load = Load(self.site, _KEYS, history_of(self.site, self.base))
        await self._loaded(load)
        self.report.kills += 1
        await asyncio.to_thread(self.manager.start)
        wire = self.manager.connect()
        wrong = await self._judge(load, wire)
        if audit:
            wrong += await self._audit()
        for group in self.site.groups:
            judgement = await self._cross(wire, group)
            # What a dead manager reserved and did not report counts for some seconds: writes that would cross the mark
            # may be refused until then. An audit has waited for that.
            wrong += judgement if audit or not self.is_shared else []
        self.base = await served_blocks(wire, load)
        self._confirmed.update(map(_slot, self.base.values()))
        await wire.close()
        self.report.wrong += [f"kill {self.report.kills}: {text}" for text in wrong]
        self.report.requests += sum(sent.code is not None for sent in load.requests)

    async def _loaded(self, load: Load) -> None:
        wire = self.manager.connect()
        work = load.start([wire], _CLIENTS, self.random, 0.01, _SHARES)
        await asyncio.sleep(self.random.uniform(0.05, 1.0))
        self.manager.kill()
        await load.end(work)
        await wire.close()

    async def _judge(self, load: Load, wire: Wire) -> list[str]:
        begin = time.monotonic()
        totals = [await usage_of(wire, group.name) for group in self.site.groups]
        self.report.left_deleting += any(total.deleting_bytes for total in totals)
        lacking = lacking_bytes(await served_blocks(wire, load))
        if lacking:  # unless they were evicted between the answer and the look: then they are served no more
            lacking = dict(lacking.items() & (await served_blocks(wire, load)).items())
        wrong = [f"at once: {text}" for text in without_bytes(lacking)]
        wrong += await finish_later(load, wire, self.random)
        wrong += await self._quiet(load, wire, begin)
        served = await served_blocks(wire, load)
        self.report.checked_blocks += len(served)
        wrong += load.history.verdicts(load.blocks, served)
        wrong += [f"when quiet: {text}" for text in without_bytes(served)]
        wrong += await self._usage(wire, served)
        confirmed = (each for each in load.history.writes if each.outcome is Outcome.OK)
        self._confirmed.update(_slot(uri) for each in confirmed for uri in each.uris.values())
        wrong += self._files(served)
        wrong += [text[-2000:] for text in self.manager.failures()]
        wrong += [f"{sent}" for sent in load.requests if sent.code in {pb.INTERNAL_ERROR, pb.IO_ERROR}]
        return wrong

    async def _quiet(self, load: Load, wire: Wire, begin: float) -> list[str]:
        """Wait until nothing is being written or deleted: for the longest session and delay, and some seconds."""
        unfinished: list[str] = []

        async def is_quiet() -> bool:
            metas = await metas_of(wire, load)
            totals = [await usage_of(wire, group.name) for group in self.site.groups]
            unfinished[:] = [f"{block}: {text}" for block, text in metas.items() if "CLS_SERVING" not in text]
            unfinished.extend(f"{total.deleting_bytes} bytes deleting" for total in totals if total.deleting_bytes)
            return not unfinished

        longest = max(group.delay_ms for group in self.site.groups) / 1000 + load.most_seconds
        await until(is_quiet, longest + _SOME_SECONDS, 0.1)
        self.report.quiet_seconds.append(time.monotonic() - begin)
        return [f"unfinished too long after the restart: {text}" for text in unfinished]

    async def _usage(self, wire: Wire, served: dict[Block, str]) -> list[str]:
        """Compare usage with the served blocks: when all is quiet there is nothing else."""
        wrong: list[str] = []
        for group in self.site.groups:
            expected = sum(BLOCK_BYTES for instance, _ in served if instance in group.instances)
            if self.is_shared:  # counters are put right within seconds of a death
                continue
            total = await usage_of(wire, group.name)
            if total.used_bytes != expected:
                wrong.append(f"{group.name}: {total.used_bytes} bytes are used, {expected} are served")
            if total.used_bytes > total.high_mark_bytes:
                wrong.append(f"{group.name}: {total.used_bytes} bytes stay above the mark {total.high_mark_bytes}")
        return wrong

    def _files(self, served: dict[Block, str]) -> list[str]:
        roots = [group.root for group in self.site.groups if group.root is not None]
        without_record = judge_files(roots, served)
        confirmed = {path for path in without_record if self._confirmed & set(_slots_left(path))}
        self.report.cut_off |= without_record - confirmed
        return [f"{path} is still there and no metadata names it" for path in sorted(confirmed)]

    async def _cross(self, wire: Wire, group: GroupPlan) -> list[str]:
        """Write until the mark is crossed, and wait until what remains is at the low mark, and not below it."""
        (instance,) = group.instances
        total = await usage_of(wire, group.name)
        low, high = total.low_mark_bytes, total.high_mark_bytes
        served = await served_blocks(wire, Load(Site(group), _KEYS, History()))
        free = [key for key in _KEYS if (instance, key) not in served]
        missing = (high - await remaining_bytes(wire, group.name)) // BLOCK_BYTES + 2
        await write(wire, instance, free[: max(2, missing)])

        async def is_low() -> bool:
            return await remaining_bytes(wire, group.name) <= low

        seconds = await until(is_low, _EVICTION_SECONDS, 0.02)
        remaining = await remaining_bytes(wire, group.name)
        if math.isfinite(seconds):
            self.report.low_mark_seconds.append(seconds)
        if not low - BLOCK_BYTES < remaining <= low:
            return [f"{group.name}: {remaining} bytes remain {seconds:.1f} s after the mark was crossed, not {low}"]
        return []

    async def _audit(self) -> list[str]:
        """Recount the store; a shared one until its counters agree, and each until abandoned sessions are over that
        were granted nothing: no block has a trace of them."""
        self.report.audits += 1
        begin = time.monotonic()
        capacities = {group.name: group.capacity_bytes for group in self.site.groups}
        while True:
            if not self.is_shared:
                await asyncio.to_thread(self.manager.kill)
            audit = await audit_store(self.manager.settings, capacities=capacities)
            is_wrong = audit.unfinished or audit.groups_off
            beside_deletions = is_wrong or audit.sessions or audit.wrong  # read one after the other
            may_become_good = beside_deletions if self.is_shared else audit.sessions and not is_wrong
            if not may_become_good or time.monotonic() > begin + _USAGE_SECONDS:
                break
            if not self.is_shared:
                await asyncio.to_thread(self.manager.start)
            await asyncio.sleep(0.2 if self.is_shared else 1.5)
        wrong = [*audit.wrong, *audit.groups_off]
        if audit.unfinished or audit.sessions:
            wrong.append(f"recounted: {dict(audit.statuses)}, {audit.sessions} sessions")
        wrong += await asyncio.to_thread(verified, self.manager.store_options)
        if not self.is_shared:
            await asyncio.to_thread(self.manager.start)
        return wrong


def _path(uri: str) -> str:
    return LocationUri.parse(uri).path


def _slot(uri: str) -> Slot:
    parsed = LocationUri.parse(uri)
    return parsed.path, parsed.blkid


def _slots_left(path: str) -> Iterator[Slot]:
    """Yield the slots of a file that were not deleted."""
    deleted = deleted_slots(path)
    yield from ((path, slot) for slot in (None, *range(slot_count(path))) if slot not in deleted)


def judge_files(roots: list[Path], served: dict[Block, str]) -> set[str]:
    """Return the files below directories that no served block lies in."""
    known = set(map(_path, served.values()))
    found = (path for root in roots for path in root.rglob("*") if path.is_file() and ".kvcm-" not in path.name)
    return {str(path).removesuffix(".deleted") for path in found} - known


@contextlib.contextmanager
def eviction_rig(directory: Path, uri: str, seed: int, fsync: str = "always") -> Iterator[EvictionRig]:
    """Run a rig inside the block.

    Args:
        directory: for data and logs.
        uri: of a shared store; "" for a RocksDB.
        seed: of what the clients do and when the manager dies.
        fsync: of the RocksDB.
    """
    settings = {"kvcm.store.fsync": fsync, "kvcm.leader_elector.lease_ms": "1000"}
    with managers_on(directory, uri, settings=settings) as (manager,):
        yield EvictionRig(eviction_site(directory), manager, Random(seed), bool(uri))
