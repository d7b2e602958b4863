"""The cost of a manager's vitals: publishing its own, reading the others', and keeping the history.

CPU of the process, per second of a manager's life, beside nothing: vitals are published and read every five seconds, a
sample is kept every ten. The store is in memory, so that no network is measured. Nothing of it is on the way of a
request. Memory is that of a full history and of the latest vitals.

    python benchmarks/vitals.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import sys
import time
import tracemalloc
from collections.abc import Mapping

from report import Row, arguments, publish

from kvcm.model.clock import SystemClock
from kvcm.model.nodes import METHODS, Endpoint, GroupTotals, Vitals
from kvcm.registry.leadership import VitalsTable
from kvcm.service.vitals_history import History
from kvcm.store.memory import MemoryTable
from kvcm.telemetry.metrics import DURATIONS

MOST_MS = 5.0  # half a percent of a core
MOST_MIB = 10.0
_REPORT_SECONDS = 5.0
_KEEP_SECONDS = 10.0
_CASES = ((3, 5), (3, 64), (10, 64), (3, 1000))


def vitals(node: int, at: float, groups: int) -> Vitals:
    """Return vitals of a manager whose counters have grown all the time."""
    count = int(100 * at)
    names = [f"group-{number}" for number in range(groups)]
    return Vitals(
        Endpoint(f"manager-{node}", "10.0.0.1", 6381, 6382, 6491, 6492),
        "1.0.0",
        0.0,
        at,
        "serving",
        node == 0,
        dict.fromkeys(METHODS, count),
        dict.fromkeys(METHODS, 0),
        DURATIONS,
        (count,) * (len(DURATIONS) + 1),
        dict.fromkeys(names, GroupTotals(count, count, count, count)),
        used_bytes={name: {"file": count, "mooncake": count} for name in names} if node == 0 else {},
    )


def all_vitals(managers: int, groups: int, at: float) -> Mapping[str, Vitals]:
    """Return those of all managers at a moment."""
    return {f"manager-{node}": vitals(node, at, groups) for node in range(managers)}


async def publishing(managers: int, groups: int, rounds: int) -> float:
    """Return CPU seconds of publishing and reading once."""
    clock, table = SystemClock(), MemoryTable()
    for each in all_vitals(managers, groups, 1e6).values():
        await VitalsTable(clock, table).publish(each)
    board, own = VitalsTable(clock, table), vitals(0, 1e6, groups)
    await board.publish(own)
    begin = time.process_time()
    for _ in range(rounds):
        await board.publish(own)
        await board.all()
    return (time.process_time() - begin) / rounds


def keeping(managers: int, groups: int, rounds: int) -> tuple[float, float]:
    """Return CPU seconds of keeping a sample, and MiB of the history."""
    history, quotas, seconds = History(0.0), {f"group-{number}": 1 << 40 for number in range(groups)}, 0.0
    tracemalloc.start()
    history.add(0.0, all_vitals(managers, groups, 0.0), quotas)
    history.add(60.0, all_vitals(managers, groups, 60.0), quotas)
    held = tracemalloc.get_traced_memory()[0] / (1 << 20)
    tracemalloc.stop()
    for number in range(rounds):
        at = 70.0 + _KEEP_SECONDS * number
        received = all_vitals(managers, groups, at)
        begin = time.process_time()
        history.add(at, received, quotas)
        seconds += time.process_time() - begin
    return seconds / rounds, held


def rows(managers: int, groups: int, rounds: int) -> list[Row]:
    """Return the figures of one deployment."""
    published = asyncio.run(publishing(managers, groups, rounds))
    kept, held = keeping(managers, groups, rounds)
    each_second = 1000 * (published / _REPORT_SECONDS + kept / _KEEP_SECONDS)
    case = f"{managers} managers, {groups:,} groups"
    return [
        Row(case, "CPU per second", each_second, "ms", target=f"<= {MOST_MS:g} ms", ok=each_second <= MOST_MS),
        Row(case, "memory of a day's history", held, "MiB", target=f"<= {MOST_MIB:g} MiB", ok=held <= MOST_MIB),
    ]


def main() -> int:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    rounds = 20 if options.quick else 500
    found = [row for case in _CASES for row in rows(*case, rounds)]
    return 0 if publish("What vitals cost", found, options.json) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
