"""Managers under light load while the store they share fails in every way it can, and comes back.

Every request has to end within its time, well or with a code that allows a retry; nothing that was
confirmed may be lost, unless a replica without it took over: replication is asynchronous, and a failover
may lose the last writes before it. Such losses are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from key_history import History
from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, managers_on
from mixed_load import Load, Sent, finish_later, metas_of, served_blocks
from redis_servers import Cluster, Sentinels, Standalone, cluster, is_replica_in_step, sentinel, standalone
from store_audit import StoreAudit, audit_store, verified
from waiting import until

from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.protocol import meta_service_pb2 as pb

_KEYS = range(4096)
_CLIENTS = 8
_TIMEOUT_MS = 1000  # the default of uris
_LIGHT = (0.45, 0.53, 0.02, 0.0)
_BEFORE_SECONDS = 1.5
_AFTER_SECONDS = 5.0
_QUIET_SECONDS = 60.0
_WHOLE_SECONDS = 60.0
_CLEAR_CODES = {pb.OK, pb.IO_ERROR, pb.SERVICE_NOT_READY}


@dataclass(slots=True)
class FaultReport:
    """The effects of a fault on clients.

    Attributes:
        requests: by call and code, from the fault on.
        longest_seconds: of a request.
        recovery_seconds: from the end of the fault to the end of the last request that failed.
        served_meanwhile: reads that were answered well while the store was away.
        wrong: broken invariants.
        lost: confirmed writes or removals that a failover lost.
        below: whether shared counters were seen below the truth after the fault.
        quiet_seconds: from the end of the load until nothing was unfinished and usage agreed.
    """

    requests: Counter[str] = field(default_factory=Counter)
    longest_seconds: float = 0.0
    recovery_seconds: float = 0.0
    served_meanwhile: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    quiet_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to fail.

    Attributes:
        store: runs the store inside the block.
        fail: breaks the store, and returns when it is whole again.
        may_lose: whether a replica takes over.
    """

    store: Callable[[Path], contextlib.AbstractContextManager[Any]]
    fail: Callable[[Any], None]
    may_lose: bool = False


def _kill(made: Standalone) -> None:
    made.server.kill()
    time.sleep(2)
    made.server.restart()


def _silence(made: Standalone) -> None:
    made.server.pause()
    time.sleep(5)
    made.server.resume()


def _pause(made: Standalone) -> None:
    with made.server.admin() as client:
        client.execute_command("CLIENT", "PAUSE", 3000, "ALL")
    time.sleep(3)


def _fail_over_to_the_replica(made: Sentinels) -> None:
    old = made.master
    old.kill()
    made.give_up_soon()
    until(lambda: made.master is not old and not is_replica_in_step(made.master))


def _fail_over_one_node(made: Cluster) -> None:
    made.nodes[0].kill()
    made.give_up_soon()
    until(lambda: not made.is_whole())
    until(made.is_whole)


FAULTS = {
    "killed and restarted after 2 s (AOF)": Fault(partial(standalone, appendonly=True), _kill),
    "silent for 5 s": Fault(standalone, _silence),
    "CLIENT PAUSE 3000 ALL": Fault(standalone, _pause),
    "sentinel failover": Fault(sentinel, _fail_over_to_the_replica, may_lose=True),
    "cluster failover": Fault(partial(cluster, replicas=1), _fail_over_one_node, may_lose=True),
}


async def run_fault(directory: Path, fault: Fault, seed: int) -> FaultReport:
    """Run two managers on a store, break it under load, and judge."""
    with fault.store(directory / "store") as made:
        uri, fail = made.uri("faults", timeout_ms=_TIMEOUT_MS), partial(fault.fail, made)
        with managers_on(directory, uri, 2, {"kvcm.leader_elector.lease_ms": "2000"}) as managers:
            return await _under_fault(managers, fail, fault.may_lose, Random(seed))


async def _under_fault(
    managers: list[Manager], fail: Callable[[], None], may_lose: bool, random: Random
) -> FaultReport:
    site = Site(GroupPlan("wide", ("w/one", "w/two"), len(_KEYS) * BLOCK_BYTES * 4))
    load, report = Load(site, _KEYS, History(), survives=True, most_seconds=2), FaultReport()
    wires = [manager.connect() for manager in managers]
    await site.set_up(wires[0])
    await site.until_known_at(wires)
    work = load.start(wires, _CLIENTS, random, 0.05, _LIGHT)
    await asyncio.sleep(_BEFORE_SECONDS)
    begin = time.monotonic()
    await asyncio.to_thread(fail)
    end = time.monotonic()
    audit = await _audit_when_whole(managers[0].settings)
    report.below = audit.groups_below
    await asyncio.sleep(_AFTER_SECONDS)
    await load.end(work)
    _judge_requests([sent for sent in load.requests if sent.sent + sent.seconds >= begin], begin, end, report)
    report.wrong += [f"a defect: {text[-1500:]}" for manager in managers for text in manager.failures()]
    report.wrong += [f"{manager.directory.name} ended" for manager in managers if not manager.is_running]
    wrong = await finish_later(load, wires[0], random)
    report.wrong += wrong
    await _quiet(managers[0], report)
    for wire in wires:
        assert not any("CLS_WRITING" in text for text in (await metas_of(wire, load)).values())
        verdicts = load.history.verdicts(load.blocks, await served_blocks(wire, load))
        (report.lost if may_lose else report.wrong).extend(verdicts)
        await wire.close()
    return report


async def _audit_when_whole(values: dict[str, str]) -> StoreAudit:
    """Audit the store as soon as all of it answers: a new client needs every part of a cluster."""
    limit = time.monotonic() + _WHOLE_SECONDS
    while True:
        try:
            return await audit_store(values)
        except StorageIOError:
            if time.monotonic() > limit:
                raise
        await asyncio.sleep(0.2)


def _judge_requests(requests: list[Sent], begin: float, end: float, report: FaultReport) -> None:
    report.requests.update(f"{sent.call}:{_name(sent.code)}" for sent in requests)
    report.longest_seconds = max(sent.seconds for sent in requests)
    # A session that ended while its client could not reach the store is gone, and so is the answer.
    odd = [sent for sent in requests if sent.code not in _CLEAR_CODES and not sent.is_late_finish]
    report.wrong += [f"{sent.sent - begin:+.2f} s: {sent}" for sent in odd]
    failed = [sent.sent + sent.seconds - end for sent in requests if sent.code != pb.OK and not sent.is_late_finish]
    report.recovery_seconds = max(0.0, max(failed, default=0.0))
    report.served_meanwhile = sum(
        sent.call == "GetCacheLocation" and sent.code == pb.OK and begin + 0.1 < sent.sent < end for sent in requests
    )


def _name(code: int | None) -> str:
    return "none" if code is None else pb.ErrorCode.Name(code)


async def _quiet(manager: Manager, report: FaultReport) -> None:
    """Wait until nothing is unfinished and usage agrees."""
    begin, audit = time.monotonic(), StoreAudit()
    while report.quiet_seconds < _QUIET_SECONDS:
        with contextlib.suppress(KvcmError):
            audit = await audit_store(manager.settings)
            report.below = report.below or audit.groups_below
            if audit.is_quiet:
                break
        await asyncio.sleep(0.2)
        report.quiet_seconds = time.monotonic() - begin
    report.wrong += audit.wrong + audit.unrest()
    report.wrong += await asyncio.to_thread(verified, manager.store_options)
