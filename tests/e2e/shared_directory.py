"""Two deployments whose storages are one directory: both write, evict and scrub, and neither touches the other's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from key_history import Block
from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, Wire, code_of, running
from mixed_load import Load, finish_later, served_blocks, without_bytes
from reclaim_rounds import history_of, judge_files
from reclaim_site import until, usage_of, write

from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb

_KEYS = range(600)
_CLIENTS = 4
_SHARES = (0.75, 0.2, 0.05, 0.0)
_PLANTED = 12
_OLD_SECONDS = 7200
_DEPLOYMENTS = ("one", "two")
_DEAD = "gone"


@dataclass(slots=True)
class SharedReport:
    """The final state of a shared directory.

    Attributes:
        checked_blocks: served blocks whose bytes were compared.
        scrubs: that were done while everybody wrote.
        own_orphans: planted files that their own deployment found.
        other_orphans: planted files that the wrong deployment deleted.
        dead_orphans: planted files of the dead deployment that went when they were to go.
        wrong: broken invariants.
    """

    checked_blocks: int = 0
    scrubs: int = 0
    own_orphans: int = 0
    other_orphans: int = 0
    dead_orphans: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Deployment:
    name: str
    manager: Manager
    plan: GroupPlan

    async def scrub(self, wire: Wire, *, dry_run: bool, min_age_seconds: int, cluster_id: str = "") -> Any:
        request = capacity_pb.ScrubStorageRequest(
            storage_unique_name=f"{self.plan.name}-storage",
            cluster_id=cluster_id,
            dry_run=dry_run,
            min_age_seconds=min_age_seconds,
        )
        answer = await wire.capacity.ScrubStorage(request, timeout=60)
        assert code_of(answer) == pb.OK, answer.header
        return answer


async def share_directory(directory: Path, seconds: float, seed: int) -> SharedReport:
    """Run two managers with stores of their own over one directory, under load for so long."""
    root = directory / "kv"
    deployments = [
        _Deployment(
            name,
            Manager(directory / name, {"kvcm.data_dir": str(directory / f"data-{name}"), "kvcm.cluster_id": name}),
            GroupPlan("swift", ("s/one",), 300 * BLOCK_BYTES, root, 0.8, 0, number + 1),
        )
        for number, name in enumerate(_DEPLOYMENTS)
    ]
    report = SharedReport()
    with running(*(each.manager for each in deployments)):
        wires = [each.manager.connect() for each in deployments]
        for each, wire in zip(deployments, wires, strict=True):
            await Site(each.plan).set_up(wire)
            await write(wire, "s/one", _KEYS[:24])
        planted = {name: _plant(root / name) for name in (*_DEPLOYMENTS, _DEAD)}
        loads = await _under_load(deployments, wires, seconds, Random(seed), report)
        await _judge(root, deployments, wires, loads, planted, report)
        for wire in wires:
            await wire.close()
    report.wrong += [text[-1500:] for each in deployments for text in each.manager.failures()]
    return report


def _plant(directory: Path) -> list[Path]:
    """Leave old files where a deployment's objects lie, of an instance that it has and of one that it has not."""
    places = [directory / "s%2Fone" / "kv", directory / "other" / "kv"]
    planted = []
    for number in range(_PLANTED):
        place = places[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{0xABC000 + number:x}.planted{number}"
        path.write_bytes(b"orphan" * 10)
        old = time.time() - _OLD_SECONDS
        os.utime(path, (old, old))
        planted.append(path)
    return planted


async def _under_load(
    deployments: Sequence[_Deployment], wires: Sequence[Wire], seconds: float, random: Random, report: SharedReport
) -> list[Load]:
    """Let clients of both work, while both scrub without and with deleting."""
    loads, works = [], []
    for each, wire in zip(deployments, wires, strict=True):
        site = Site(each.plan)
        load = Load(site, _KEYS, history_of(site, await served_blocks(wire, Load(site, _KEYS, history_of(site, {})))))
        loads.append(load)
        works.append(load.start([wire], _CLIENTS, random, 0.02, _SHARES))
    end = time.monotonic() + seconds
    begin_scrub = time.monotonic() + seconds / 4
    while time.monotonic() < end or report.scrubs < 8:  # both have deleted by then
        for each, wire in zip(deployments, wires, strict=True):
            if time.monotonic() > begin_scrub:
                # An hour: finds the planted orphans. A second: removes every file without an owner at the moment.
                await each.scrub(wire, dry_run=report.scrubs % 4 < 2, min_age_seconds=(1, 0)[report.scrubs % 3 == 0])
                report.scrubs += 1
        await asyncio.sleep(0.1)
    for load, work in zip(loads, works, strict=True):
        await load.end(work)
    return loads


async def _judge(
    root: Path,
    deployments: Sequence[_Deployment],
    wires: Sequence[Wire],
    loads: Sequence[Load],
    planted: dict[str, list[Path]],
    report: SharedReport,
) -> None:
    report.own_orphans = sum(not path.exists() for name in _DEPLOYMENTS for path in planted[name])
    report.other_orphans = sum(not path.exists() for path in planted[_DEAD])
    again = {name: _plant(root / name) for name in _DEPLOYMENTS}
    served: dict[Block, str] = {}
    for each, wire, load in zip(deployments, wires, loads, strict=True):
        report.wrong += await finish_later(load, wire, Random(0))
        await asyncio.sleep(load.most_seconds)
        await until(lambda wire=wire: _is_quiet(wire), 60.0)  # type: ignore[misc]
        of_deployment = await served_blocks(wire, load)
        report.wrong += load.history.verdicts(load.blocks, of_deployment)
        report.wrong += [f"{each.name}: {text}" for text in without_bytes(of_deployment)]
        report.checked_blocks += len(of_deployment)
        served |= {(each.name, key): uri for (_, key), uri in of_deployment.items()}
    for each, wire in zip(deployments, wires, strict=True):
        await _judge_scrubs(each, wire, again, report)
    left = judge_files([root], served) - {str(path) for path in planted[_DEAD]}
    await asyncio.sleep(1.1)
    for each, wire in zip(deployments, wires, strict=True):
        await each.scrub(wire, dry_run=False, min_age_seconds=1)
    left &= judge_files([root], served)
    report.wrong += [f"{path} is an orphan and was not scrubbed" for path in sorted(left)]
    await _judge_dead(deployments[0], wires[0], planted[_DEAD], served, report)


async def _judge_scrubs(each: _Deployment, wire: Wire, planted: dict[str, list[Path]], report: SharedReport) -> None:
    """Scrub one deployment: counted first, then deleted, and the other's are left."""
    others = {path for name, paths in planted.items() if name != each.name for path in paths if path.exists()}
    counted = await each.scrub(wire, dry_run=True, min_age_seconds=0)
    if counted.orphans != _PLANTED or not all(path.exists() for path in planted[each.name]):
        report.wrong.append(f"{each.name}: a dry run found {counted.orphans} of {_PLANTED} planted files")
    deleted = await each.scrub(wire, dry_run=False, min_age_seconds=0)
    if deleted.deleted != _PLANTED or any(path.exists() for path in planted[each.name]):
        report.wrong.append(f"{each.name}: {deleted.deleted} of {_PLANTED} planted files were deleted")
    report.own_orphans += sum(not path.exists() for path in planted[each.name])
    report.other_orphans += sum(not path.exists() for path in others)


async def _judge_dead(
    each: _Deployment, wire: Wire, planted: Sequence[Path], served: dict[Block, str], report: SharedReport
) -> None:
    """Scrub for a deployment that is gone: all of its files go, and nothing else."""
    await each.scrub(wire, dry_run=False, min_age_seconds=0, cluster_id=_DEAD)
    report.dead_orphans = sum(not path.exists() for path in planted)
    report.wrong += [f"after the scrub of a dead deployment: {text}" for text in without_bytes(served)]


async def _is_quiet(wire: Wire) -> bool:
    return not (await usage_of(wire, "swift")).deleting_bytes
