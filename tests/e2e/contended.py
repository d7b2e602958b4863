"""Three managers on one store under a contended workload, and the kill of their leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from key_history import History
from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, Wire, code_of, managers_on
from mixed_load import Load, Sent, finish_later, metas_of, served_blocks
from read_checks import ReadVerdict, certain_bytes, judge_reads
from store_audit import audit_until, records_left, used_bytes, verified

from kvcm.protocol import meta_service_pb2 as pb

_KEYS = range(64)
_CLIENTS_PER_MANAGER = 4
_QUIET_SECONDS = 30.0
_LEASE_SECONDS = 2.0


@dataclass(slots=True)
class ContendedReport:
    """The observations of a contended run.

    Attributes:
        operations: keys of all answered requests.
        requests: by call and code.
        wrong: broken invariants.
        reads: verdict on every read.
        most_bytes: per group, most bytes that were in use at a moment, by the model and by the store, and its quota.
        quiet_seconds: from the end of the load until nothing was unfinished and usage agreed.
        seconds: of the load.
    """

    operations: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    reads: ReadVerdict = field(default_factory=ReadVerdict)
    most_bytes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    quiet_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class ContendedRig:
    """Managers on one store.

    Attributes:
        site: the managers of all clients.
        quiet_site: for measurements.
        managers: on the store.
        random: of the run.
    """

    site: Site
    quiet_site: Site
    managers: list[Manager]
    random: Random


@contextlib.contextmanager
def contended_rig(directory: Path, uri: str, seed: int) -> Iterator[ContendedRig]:
    """Run three managers on a store inside the block."""
    quota = int(len(_KEYS) * BLOCK_BYTES * 0.9)
    site = Site(GroupPlan("tight", ("t/one",), quota), GroupPlan("wide", ("w/one",), 40 * quota))
    lease = {"kvcm.leader_elector.lease_ms": str(int(_LEASE_SECONDS * 1000))}
    with managers_on(directory, uri, 3, lease) as managers:
        yield ContendedRig(site, Site(GroupPlan("quiet", ("q/one",), 40 * quota)), managers, Random(seed))


async def _set_up(rig: ContendedRig, wires: Sequence[Wire]) -> None:
    for site in (rig.site, rig.quiet_site):
        await site.set_up(wires[0])
        await site.until_known_at(wires)


async def contend(rig: ContendedRig, operations: int) -> ContendedReport:
    """Let clients of all managers work on the same blocks until so many block operations are answered."""
    wires = [manager.connect() for manager in rig.managers]
    await _set_up(rig, wires)
    report, load = ContendedReport(), Load(rig.site, _KEYS, History(), survives=True)
    begin = time.monotonic()
    work = load.start(wires, _CLIENTS_PER_MANAGER * len(wires), rig.random)
    most: Counter[str] = Counter()
    while sum(sent.keys for sent in load.requests) < operations:
        await asyncio.sleep(0.2)
        await _sample(rig, most)
        if work.done():
            work.result()
    await load.end(work)
    report.seconds = time.monotonic() - begin
    await _conclude(rig, load, wires, report)
    for group in rig.site.groups:
        certain = certain_bytes(load.history, group.instances, BLOCK_BYTES)
        report.most_bytes[group.name] = (certain, most[group.name], group.capacity_bytes)
        if max(certain, most[group.name]) > group.capacity_bytes:
            report.wrong.append(f"group {group.name}: (model, store, quota) {report.most_bytes[group.name]} bytes")
    for wire in wires:
        await wire.close()
    return report


async def _sample(rig: ContendedRig, most: Counter[str]) -> None:
    """Record the present usage of groups, by the counters that change with the records."""
    for name, used in (await used_bytes(rig.managers[0].settings)).items():
        most[name] = max(most[name], used)


async def _conclude(rig: ContendedRig, load: Load, wires: list[Wire], report: ContendedReport) -> None:
    report.wrong += await finish_later(load, wires[0], rig.random)
    report.operations = sum(sent.keys for sent in load.requests)
    report.requests = load.outcomes()
    audit, report.quiet_seconds = await audit_until(rig.managers[0].settings, _QUIET_SECONDS)
    report.wrong += audit.unrest() + audit.wrong
    report.wrong += await asyncio.to_thread(verified, rig.managers[0].store_options)
    for wire in wires:
        report.wrong += load.history.verdicts(load.blocks, await served_blocks(wire, load))
    report.reads = judge_reads(load.history, load.reads)
    report.wrong += report.reads.wrong
    allowed = {pb.OK, pb.REACH_MAX_ENTITY_CAPACITY, pb.INVALID_ARGUMENT}
    report.wrong += [str(sent) for sent in load.requests if sent.code not in allowed]
    report.wrong += [text[-1500:] for manager in rig.managers for text in manager.failures()]


async def visibility(rig: ContendedRig, rounds: int) -> tuple[list[float], list[float]]:
    """Write through one manager and remove through it, and see when the others show it.

    Returns:
        Seconds from the confirmation of each write and of each removal until all others had it.
    """
    wires = [manager.connect() for manager in rig.managers]
    await _set_up(rig, wires)
    written, removed = [], []
    (instance,) = rig.quiet_site.instances
    for number in range(rounds):
        writer, others = wires[number % 3], [wire for wire in wires if wire is not wires[number % 3]]
        keys = range(10_000 + 8 * number, 10_008 + 8 * number)
        started = await writer.meta.StartWriteCache(pb.StartWriteCacheRequest(instance_id=instance, block_keys=keys))
        finish = pb.FinishWriteCacheRequest(instance_id=instance, write_session_id=started.write_session_id)
        finish.success_blocks.offset = len(keys)
        assert code_of(await writer.meta.FinishWriteCache(finish)) == pb.OK
        written.append(await _until_seen(others, instance, keys, len(keys)))
        request = pb.RemoveCacheRequest(instance_id=instance, block_keys=keys)
        assert code_of(await writer.meta.RemoveCache(request)) == pb.OK
        removed.append(await _until_seen(others, instance, keys, 0))
    for wire in wires:
        await wire.close()
    return written, removed


async def _until_seen(wires: list[Wire], instance: str, keys: range, count: int) -> float:
    """Ask until all agree; returns when the last answer that did not was sent, from now. 0: all did at once."""
    begin, latest = time.monotonic(), 0.0

    async def ask(wire: Wire) -> None:
        nonlocal latest
        while True:
            sent = time.monotonic()
            request = pb.GetCacheLocationLenRequest(
                instance_id=instance, block_keys=keys, query_type=pb.QT_PREFIX_MATCH
            )
            if (await wire.meta.GetCacheLocationLen(request)).cache_location_len == count:
                return
            latest = max(latest, sent - begin + 1e-6)

    await asyncio.gather(*map(ask, wires))
    return latest


@dataclass(slots=True)
class Handover:
    """The effects of a leader's death.

    Attributes:
        deletion_seconds: from the kill until the bytes of a removed block were deleted by another manager.
        expiry_seconds: from the kill until an abandoned session was rolled back.
        failed: requests to the living managers that did not end well.
        requests: requests to the living managers meanwhile.
        longest_seconds: of those.
        wrong: broken invariants.
    """

    deletion_seconds: float
    expiry_seconds: float
    failed: list[Sent]
    requests: int
    longest_seconds: float
    wrong: list[str]


async def leader_of(managers: Sequence[Manager]) -> Manager:
    """Return the manager that leads."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        for manager in managers:
            async with manager.connected() as wire:
                info = await wire.meta.GetClusterInfo(pb.GetClusterInfoRequest())
            if info.self_node_id == info.leader_node_id:
                return manager
        await asyncio.sleep(0.05)
    raise AssertionError("no manager leads")


async def hand_over(rig: ContendedRig) -> Handover:
    """Kill the leader while something is to be deleted and to expire, under load on the others; start it again."""
    leader = await leader_of(rig.managers)
    wires = [manager.connect() for manager in rig.managers if manager is not leader]
    load = Load(rig.site, _KEYS, History(), survives=True)
    await _set_up(rig, wires)
    await _removed_all(load, wires[0])
    work = load.start(wires, len(wires), rig.random, 0.05)
    (instance,) = rig.quiet_site.instances
    await _leave_work(wires[0], instance)
    leader.kill()
    killed = time.monotonic()
    deletion, expiry = await _until_done(rig, wires[0], instance, killed)
    await load.end(work)
    allowed = {pb.OK, pb.REACH_MAX_ENTITY_CAPACITY}
    failed = [sent for sent in load.requests if sent.code not in allowed and not sent.is_late_finish]
    longest = max(sent.seconds for sent in load.requests)
    for wire in wires:
        await wire.close()
    wrong = [text[-1500:] for manager in rig.managers for text in manager.failures()]
    await asyncio.to_thread(leader.start)
    return Handover(deletion, expiry, failed, len(load.requests), longest, wrong)


_REMOVED, _ABANDONED = range(20_000, 20_016), range(30_000, 30_016)


async def _removed_all(load: Load, wire: Wire) -> None:
    for instance in load.site.instances:
        await wire.meta.TrimCache(pb.TrimCacheRequest(instance_id=instance, strategy=pb.TS_REMOVE_ALL_CACHE))


async def _leave_work(wire: Wire, instance: str) -> None:
    """Blocks that are removed and whose bytes stay a moment, and an abandoned session."""
    started = await wire.meta.StartWriteCache(pb.StartWriteCacheRequest(instance_id=instance, block_keys=_REMOVED))
    finish = pb.FinishWriteCacheRequest(instance_id=instance, write_session_id=started.write_session_id)
    finish.success_blocks.offset = len(_REMOVED)
    assert code_of(await wire.meta.FinishWriteCache(finish)) == pb.OK
    abandoned = pb.StartWriteCacheRequest(instance_id=instance, block_keys=_ABANDONED, write_timeout_seconds=1)
    assert code_of(await wire.meta.StartWriteCache(abandoned)) == pb.OK
    removal = pb.RemoveCacheRequest(instance_id=instance, block_keys=_REMOVED)
    assert code_of(await wire.meta.RemoveCache(removal)) == pb.OK


async def _until_done(rig: ContendedRig, wire: Wire, instance: str, killed: float) -> tuple[float, float]:
    deletion = expiry = float("inf")
    own = Load(rig.quiet_site, _ABANDONED, History())
    alive = next(manager for manager in rig.managers if manager.is_running)
    while (deletion == float("inf") or expiry == float("inf")) and time.monotonic() < killed + 60:
        if expiry == float("inf") and not await metas_of(wire, own):
            expiry = time.monotonic() - killed
        if deletion == float("inf") and not await records_left(alive.settings, instance, _REMOVED):
            deletion = time.monotonic() - killed
        await asyncio.sleep(0.01)
    return deletion, expiry
