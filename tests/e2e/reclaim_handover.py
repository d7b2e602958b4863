"""The leader of two managers is killed in the middle of an eviction: the other goes on, and takes no more than due.

It goes on to the low end of the mark, unless the dead one had just come below the mark itself: then nothing is above
any mark, and nothing has to go.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from contended import leader_of
from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, Wire, managers_on
from reclaim_site import remaining_bytes, set_mark, until, usage_of, write
from store_audit import StoreAudit, audit_until, verified

_BLOCKS = 4000
_STEP_BLOCKS = 200
_BATCH = 500
_LEASE_SECONDS = 2.0
_MOST_SECONDS = 40.0
_STEPS_SECONDS = 5.0  # from the mark to its low end it is one step
_PLAN = GroupPlan("wide", ("w/one",), _BLOCKS * BLOCK_BYTES * 2, delay_ms=100)
_MARK = 0.25  # of the quota: half of the blocks have to go


@dataclass(slots=True)
class Takeover:
    """What the death of a leader in the middle of an eviction meant.

    Attributes:
        left_blocks: that were still to be evicted when it died.
        seconds: from the kill until nothing was above the mark.
        beyond_blocks: evicted below the low mark, by both together.
        quiet_seconds: from then until the bytes were free and the counters equalled the records.
        wrong: broken invariants.
    """

    left_blocks: int = 0
    seconds: float = float("inf")
    beyond_blocks: float = 0.0
    quiet_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


async def take_over(directory: Path, uri: str, rounds: int, seed: int) -> list[Takeover]:
    """Run two managers on a store and kill the leader so many times, each time in the middle of an eviction."""
    random, lease = Random(seed), {"kvcm.leader_elector.lease_ms": str(int(_LEASE_SECONDS * 1000))}
    with managers_on(directory, uri, 2, lease) as managers:
        await Site(_PLAN).set_up_at(managers[0])
        async with managers[1].connected() as wire:
            await Site(_PLAN).until_known_at([wire])
        reports: list[Takeover] = []
        for number in range(4 * rounds):
            if len(reports) < rounds:
                report = await _round(managers, number, random)
                reports += [report] if report.left_blocks > 0 or report.wrong else []  # else the kill came too late
        return reports


async def _round(managers: list[Manager], number: int, random: Random) -> Takeover:
    leader = await leader_of(managers)
    (survivor,) = (manager for manager in managers if manager is not leader)
    wire = survivor.connect()
    await _fill(wire, number)
    report = Takeover()
    await set_mark(wire, _PLAN, _MARK, _STEP_BLOCKS)
    total = await usage_of(wire, _PLAN.name)
    low, high = total.low_mark_bytes, total.high_mark_bytes
    to_go = await remaining_bytes(wire, _PLAN.name) - low
    kill_at = low + to_go * random.uniform(0.2, 0.9)
    await until(lambda: _is_at_most(wire, kill_at), _MOST_SECONDS, 0.01)
    leader.kill()
    killed = time.monotonic()
    report.left_blocks = (await remaining_bytes(wire, _PLAN.name) - low) // BLOCK_BYTES
    await until(lambda: _is_at_most(wire, high), _MOST_SECONDS)
    report.seconds = time.monotonic() - killed
    await _settle(survivor, wire, (low, high), report)
    await set_mark(wire, _PLAN, 2.0)
    await wire.close()
    report.wrong += [text[-1500:] for manager in managers for text in manager.failures()]
    await asyncio.to_thread(leader.start)
    return report


async def _fill(wire: Wire, number: int) -> None:
    missing = _BLOCKS - await remaining_bytes(wire, _PLAN.name) // BLOCK_BYTES
    first = (number + 1) * 100_000
    for start in range(first, first + missing, _BATCH):
        keys = range(start, min(start + _BATCH, first + missing))
        await write(wire, "w/one", keys, with_bytes=False)


async def _is_at_most(wire: Wire, size_bytes: float) -> bool:
    return await remaining_bytes(wire, _PLAN.name) <= size_bytes


async def _settle(survivor: Manager, wire: Wire, mark: tuple[int, int], report: Takeover) -> None:
    """Wait for the end of the eviction and for the deletions, and recount."""
    low, high = mark
    await until(lambda: _is_at_most(wire, low), _STEPS_SECONDS)
    # Counters and records are read one after the other, and deletions may end in between.
    audit, report.quiet_seconds = await audit_until(survivor.settings, _MOST_SECONDS, _is_settled)
    report.wrong += [*audit.wrong, *audit.groups_off]
    report.wrong += await asyncio.to_thread(verified, survivor.store_options)
    remaining = await remaining_bytes(wire, _PLAN.name)
    report.beyond_blocks = max(0.0, (low - remaining) / BLOCK_BYTES)
    # Each of the two may have had a step under way, and the last block may have been needed in part only.
    if remaining > high or report.beyond_blocks > _STEP_BLOCKS + 1:
        report.wrong.append(f"{remaining} bytes remain, the mark is {low} to {high}, a step {_STEP_BLOCKS} blocks")
    if not _is_settled(audit):
        report.wrong.append(f"not quiet: {dict(audit.statuses)}")


def _is_settled(audit: StoreAudit) -> bool:
    return not (audit.unfinished or audit.groups_off or audit.wrong)
