"""A storage that fails or hangs when bytes are deleted, beside one that does not.

Failing: a file stands where the storage's directory was. Hanging: the packed files are replaced by named pipes, so that
a thread that opens one to punch a slot out waits for a reader; that is a real hang of a thread, as a mount has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from manager_site import BLOCK_BYTES, GroupPlan, Manager, Site, Wire, managers_on
from reclaim_site import command, metrics, remove, sum_of, until, usage_of, write

from kvcm.model.uri import LocationUri

_BLOCKS = 512  # that cannot be deleted
_BATCH = 64
_DRAIN_SECONDS = 70.0  # the longest pause, and some
_INSTANCES = {"good": "g/one", "bad": "b/one"}


@dataclass(slots=True)
class OutageReport:
    """The effects of an outage.

    Attributes:
        before: deletions per second of the good storage while both were well.
        meanwhile: the same, while the bad storage was away.
        backlog: most deletions that waited for the bad storage, as the metric says.
        failures: of deletions, as the metric says.
        drain_seconds: from the storage's return until nothing waited.
        wrong: broken invariants.
    """

    before: float = 0.0
    meanwhile: float = 0.0
    backlog: float = 0.0
    failures: float = 0.0
    drain_seconds: float = float("inf")
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _failing(root: Path, _paths: list[Path]) -> Iterator[None]:
    aside = root.with_name(root.name + "-aside")
    root.rename(aside)
    root.write_text("not a directory")
    try:
        yield
    finally:
        root.unlink()
        aside.rename(root)


@contextlib.contextmanager
def _hanging(_root: Path, paths: list[Path]) -> Iterator[None]:
    for path in paths:
        path.rename(_aside(path))
        os.mkfifo(path)
    try:
        yield
    finally:
        for path in paths:
            pipe = path.with_name(path.name + "-pipe")
            path.rename(pipe)
            _aside(path).rename(path)
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # wakes the thread that waits in it
            pipe.unlink()


def _aside(path: Path) -> Path:
    return path.with_name(path.name + "-aside")


OUTAGES: dict[str, Callable[[Path, list[Path]], contextlib.AbstractContextManager[None]]] = {
    "deletes fail": _failing,
    "deletes hang": _hanging,
}


async def run_outage(directory: Path, name: str, seconds: float) -> OutageReport:
    """Run a manager over two storages, and let one be away for a while.

    Args:
        directory: for everything.
        name: of the outage.
        seconds: how long it lasts.
    """
    plans = [GroupPlan(each, (_INSTANCES[each],), 1 << 30, directory / each, delay_ms=0) for each in _INSTANCES]
    with managers_on(directory) as (manager,):
        async with manager.connected() as wire:
            await Site(*plans).set_up(wire)
            return await _outage(manager, wire, directory / "bad", OUTAGES[name], seconds)


async def _outage(
    manager: Manager,
    wire: Wire,
    root: Path,
    outage: Callable[[Path, list[Path]], contextlib.AbstractContextManager[None]],
    seconds: float,
) -> OutageReport:
    report = OutageReport()
    uris = await write(wire, "b/one", range(_BLOCKS))
    paths = sorted({Path(LocationUri.parse(uri).path) for uri in uris})
    # The first block of every file stays, so that the others are punched out of it.
    removed = [key for key in range(_BLOCKS) if key % 8]
    keys = iter(range(1 << 20, 1 << 40, _BATCH))
    report.before = await _deletion_rate(wire, keys, min(seconds, 3.0))
    with outage(root, paths):
        await remove(wire, "b/one", removed)
        report.meanwhile = await _deletion_rate(wire, keys, seconds, lambda: _note(wire, report))
        done = await asyncio.to_thread(command, manager, "group", "usage")
        report.wrong += [] if done.returncode == 0 else [f"kvcm group usage: {done.stdout}{done.stderr}"]
        if (await usage_of(wire, "bad")).deleting_bytes != len(removed) * BLOCK_BYTES:
            report.wrong.append("usage does not show what waits for its deletion")
    report.drain_seconds = await until(lambda: _is_drained(wire), _DRAIN_SECONDS)
    used = (await usage_of(wire, "bad")).used_bytes
    if used != (_BLOCKS - len(removed)) * BLOCK_BYTES:
        report.wrong.append(f"{used} bytes are in use when all is drained")
    report.wrong += [f"{path} is gone with a block that was not removed" for path in paths if not path.exists()]
    report.wrong += [text[-1500:] for text in manager.failures()]
    return report


async def _note(wire: Wire, report: OutageReport) -> None:
    found = await metrics(wire)
    report.backlog = max(report.backlog, found.get(("kvcm_reclaim_pending_deletes", "bad-storage"), 0.0))
    report.failures = found.get(("kvcm_delete_failures_total", "bad-storage"), 0.0)


async def _is_drained(wire: Wire) -> bool:
    found = await metrics(wire)
    waiting = found.get(("kvcm_reclaim_pending_deletes", "bad-storage"), 0.0)
    return not waiting and not (await usage_of(wire, "bad")).deleting_bytes


async def _nothing() -> None:
    pass


async def _deletion_rate(
    wire: Wire, keys: Iterator[int], seconds: float, observe: Callable[[], Awaitable[None]] = _nothing
) -> float:
    """Write and remove on the good storage all the time; returns how many deletions per second that made."""
    begin, deleted = time.monotonic(), sum_of(await metrics(wire), "cache_reclaimer.location_del_count")
    while time.monotonic() < begin + seconds:
        start = next(keys)
        await write(wire, "g/one", range(start, start + _BATCH))
        await remove(wire, "g/one", range(start, start + _BATCH))
        await observe()
    at_the_end = sum_of(await metrics(wire), "cache_reclaimer.location_del_count")
    return (at_the_end - deleted) / (time.monotonic() - begin)
