"""Managers killed at random moments under mixed load, started again, and judged against the clients' history."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from key_history import Block, History
from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, Wire, managers_on
from mixed_load import Load, finish_later, metas_of, served_blocks, without_bytes
from reclaim_site import until, usage_of
from store_audit import audit_until, orphan_files, verified

from kvcm.protocol import meta_service_pb2 as pb

_KEYS = range(96)
_CLIENTS = 10
_SETTLED_SECONDS = 40.0
_USAGE_SECONDS = 25.0


@dataclass(slots=True)
class CrashReport:
    """The observations of a run.

    Attributes:
        kills: managers killed under load.
        wrong: broken invariants, with the number of the kill.
        requests: answered requests by call and code.
        confirmed: confirmed writes of blocks that were checked after a restart.
        repaired_seconds: per kill, from the restart until nothing was overdue.
        restart_seconds: per kill, from the start of the process until it served.
        orphans: files of the storage that no record refers to, at the end.
        usage_seconds: until the shared counters equalled the records, where that was checked.
        audits: times that the store itself was looked at.
    """

    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    confirmed: int = 0
    repaired_seconds: list[float] = field(default_factory=list)
    restart_seconds: list[float] = field(default_factory=list)
    orphans: list[Path] = field(default_factory=list)
    files: int = 0
    usage_seconds: list[float] = field(default_factory=list)
    audits: int = 0


def crash_site(directory: Path) -> Site:
    """Two groups: one with bytes in files, always near its limit, and one far from it."""
    full = int(len(_KEYS) * BLOCK_BYTES * 2 * 0.9)
    files = GroupPlan("files", ("f/one", "f/two"), full, directory / "kv")
    return Site(files, GroupPlan("plain", ("p/one", "p/two"), 8 * full))


@dataclass(slots=True)
class CrashRig:
    """Managers over one store, and the known state of their blocks.

    Attributes:
        site: groups and instances.
        managers: one; or several on a shared store.
        random: of the run.
        is_shared: whether the store can be looked at while managers run.
    """

    site: Site
    managers: list[Manager]
    random: Random
    is_shared: bool
    report: CrashReport = field(default_factory=CrashReport)
    base: dict[Block, str] = field(default_factory=dict)

    async def set_up(self) -> None:
        """Create groups and instances."""
        await self.site.set_up_at(self.managers[0])

    async def round(self, *, audit: bool = False) -> None:
        """Load, kill one manager, start it again (alone) or let the others repair, and judge."""
        load = Load(self.site, _KEYS, History(self.base))
        victim = self.random.choice(self.managers)
        await self._loaded(load, victim)
        self.report.kills += 1
        others = [manager for manager in self.managers if manager is not victim]
        if not others:
            await self._restart(victim)
        survivor = (others or [victim])[0]
        wrong = await self._judge(load, survivor)
        if audit:
            wrong += await self._audit(survivor)
        if others:
            await self._restart(victim)
        self.report.wrong += [f"kill {self.report.kills}: {text}" for text in wrong]
        self.report.requests += load.outcomes()

    async def _loaded(self, load: Load, victim: Manager) -> None:
        """Run clients, kill the victim at a random moment, and let the clients of others go on for a while."""
        wires = [manager.connect() for manager in self.managers]
        work = load.start(wires, _CLIENTS, self.random, 0.01)
        await asyncio.sleep(self.random.uniform(0.05, 1.5))
        victim.kill()
        if len(self.managers) > 1:
            await asyncio.sleep(self.random.uniform(0, 0.5))
        await load.end(work)
        for wire in wires:
            await wire.close()

    async def _restart(self, manager: Manager) -> None:
        begin = time.monotonic()
        await asyncio.to_thread(manager.start)
        self.report.restart_seconds.append(time.monotonic() - begin)

    async def _judge(self, load: Load, manager: Manager) -> list[str]:
        async with manager.connected() as wire:
            begin = time.monotonic()
            before = await served_blocks(wire, load)
            wrong = [f"at once: {text}" for text in _lost(load, before)]
            wrong += await finish_later(load, wire, self.random)
            wrong += await self._settled(load, wire)
            self.report.repaired_seconds.append(time.monotonic() - begin)
            served = await served_blocks(wire, load)
        self.report.confirmed += sum(load.history.due(block) is not None for block in load.blocks)
        wrong += load.history.verdicts(load.blocks, served)
        wrong += without_bytes(served)
        wrong += [text[-2000:] for text in manager.failures()]
        wrong += [f"{sent}" for sent in load.requests if sent.code in {pb.INTERNAL_ERROR, pb.IO_ERROR}]
        self.base = served
        return wrong

    async def _settled(self, load: Load, wire: Wire) -> list[str]:
        """Wait until the sessions are over; returns the blocks that are still being written then."""
        writes = load.history.writes
        over = max((write.deadline for write in writes if write.outcome is None), default=0.0) - time.monotonic()
        await asyncio.sleep(max(0.0, over))
        limit = time.monotonic() + _SETTLED_SECONDS
        while writing := {b: text for b, text in (await metas_of(wire, load)).items() if "CLS_WRITING" in text}:
            if time.monotonic() > limit:
                return [f"{block} is still written: {text}" for block, text in writing.items()]
            await asyncio.sleep(0.1)
        return []

    async def _is_deleted(self, wire: Wire) -> bool:
        return not any([(await usage_of(wire, group.name)).deleting_bytes for group in self.site.groups])

    async def _verified(self, manager: Manager) -> list[str]:
        """Verify the store: again, where a manager still works on it and has just deleted something."""
        limit = time.monotonic() + _USAGE_SECONDS
        while found := await asyncio.to_thread(verified, manager.store_options):
            if not self.is_shared or time.monotonic() > limit:
                return found
        return []

    async def _audit(self, manager: Manager) -> list[str]:
        """Audit the store itself until nothing is unfinished, and usage agrees; at worst until the limits."""
        capacities = {group.name: group.capacity_bytes for group in self.site.groups}
        self.report.audits += 1
        if not self.is_shared:
            await asyncio.sleep(1.0)  # removed bytes stay a moment
            async with manager.connected() as wire:  # a manager that is alone ends what is overdue before any finish
                await wire.meta.FinishWriteCache(pb.FinishWriteCacheRequest(instance_id=self.site.instances[0]))
                await until(lambda: self._is_deleted(wire), _SETTLED_SECONDS)
            await asyncio.to_thread(manager.kill)
        patience = _USAGE_SECONDS if self.is_shared else 0.0
        audit, seconds = await audit_until(manager.settings, patience, capacities=capacities)
        self.report.usage_seconds.append(seconds)
        wrong = audit.wrong + audit.unrest()
        wrong += await self._verified(manager)
        roots = [group.root for group in self.site.groups if group.root is not None]
        self.report.orphans = [path for root in roots for path in orphan_files(root, audit)]
        self.report.files = sum(path.is_file() for root in roots for path in root.rglob("*"))
        if not self.is_shared:
            await asyncio.to_thread(manager.start)
        return wrong


def _lost(load: Load, served: dict[Block, str]) -> Iterator[str]:
    for block in load.blocks:
        due = load.history.due(block)
        if due is not None and served.get(block) != due:
            yield f"{block}: a confirmed write is lost: {due} expected, {served.get(block)} served"


@contextlib.contextmanager
def crash_rig(directory: Path, uri: str, seed: int, managers: int = 1) -> Iterator[CrashRig]:
    """Run a rig inside the block.

    Args:
        directory: for data and logs.
        uri: of a shared store; "" for a RocksDB.
        seed: of the clients' requests and the times of kills.
        managers: so many on the store.
    """
    settings = {"kvcm.store.fsync": "always", "kvcm.leader_elector.lease_ms": "2000"}
    with managers_on(directory, uri, managers, settings) as processes:
        yield CrashRig(crash_site(directory), processes, Random(seed), bool(uri))


async def crash(rig: Any, kills: int, audit_every: int, progress: Callable[[str], None] = lambda _text: None) -> None:
    """Do so many rounds of a rig, and have it audit the store itself every few."""
    await rig.set_up()
    for number in range(1, kills + 1):
        await rig.round(audit=number % audit_every == 0 or number == kills)
        progress(f"{number}/{kills} kills, {len(rig.report.wrong)} violations")
