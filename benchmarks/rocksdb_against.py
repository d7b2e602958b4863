"""Claim: RocksDB costs a manager little beside its metadata in memory, and less than with the code of another commit.

Managers of both commits take the same blocks of one spec in sessions of 64 to 1,024, in turn. Measured on each:

* resident memory that the blocks added, right away and when the allocator has returned what it freed;
* CPU time of a start with them, less that of a start without any, per block; this commit starts with what the other
  one stored;
* CPU time of a start and a finish of 1,024 blocks, against that over the memory backend plus that of a bare
  `WriteBatch` of the same rows into a database of the same options.

CPU times are those of a whole process by the operating system, so that background work counts.

    git worktree add /tmp/before COMMIT
    python benchmarks/rocksdb_against.py --before /tmp/before [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from report import Row, arguments, is_sound, publish
from rocksdict import Rdict, WriteBatch
from service_site import Site, site

from kvcm.index.backends.rocks import BLOCKS
from kvcm.model.clock import SystemClock
from kvcm.store.rocks import CommitLog, Fsync, database_options
from kvcm.store.rocks import Row as StoredRow

PARTS = ("memory", "start", "write")
SESSIONS = (64, 128, 256, 512, 1024)
BLOCKS_PER_TURN = 25_600
WRITE_BLOCKS = 1024
WARM_WRITES = 8
TRIM_SECONDS = 33.0  # managers return freed memory twice a minute at least
MOST_START_US = 6.0
MOST_RSS_BYTES = 400.0


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
        blocks: stored before a start.
        starts: of each manager.
        writes: of each window.
        windows: of each manager.
    """

    blocks: int
    starts: int
    writes: int
    windows: int


FULL, QUICK = Plan(256_000, 3, 40, 7), Plan(25_600, 1, 8, 1)


def on_rocksdb(directory: Path) -> list[str]:
    """Return the settings of a manager with its metadata in a directory."""
    return [f"kvcm.registry_storage.uri=local://{directory}"]


def fill(running: Site, blocks: int) -> None:
    """Store blocks in sessions of all sizes."""
    for number, first in enumerate(range(0, blocks, BLOCKS_PER_TURN)):
        size = SESSIONS[number % len(SESSIONS)]
        running.client.fill(running.manager, "blocks", size, first, BLOCKS_PER_TURN // size)


def resident_bytes(running: Site) -> int:
    """Return the resident memory of a manager."""
    pages = Path(f"/proc/{running.manager.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory_rows(store: str, now: list[str], before: list[str], code: Path, plan: Plan) -> list[Row]:
    """Measure the memory that blocks take over one store."""
    with ExitStack() as stack:
        sides = [stack.enter_context(site(now)), stack.enter_context(site(before, code=code))]
        begins = []
        for each in sides:
            each.manager.register("blocks", 1)
            each.client.write(each.manager, "grpc", "blocks", WRITE_BLOCKS, WARM_WRITES, 2)
            begins.append(resident_bytes(each))
        for each in sides:
            fill(each, plan.blocks)
        full = [resident_bytes(each) for each in sides]
        time.sleep(TRIM_SECONDS)
        settled = [resident_bytes(each) for each in sides]
    case = f"{plan.blocks:,} blocks, {store}"
    rows = []
    for when, measured in (("right away", full), ("settled", settled)):
        value, other = ((end - begin) / plan.blocks for end, begin in zip(measured, begins, strict=True))
        most = min(other, MOST_RSS_BYTES) if store == "RocksDB" else other
        is_judged = when == "settled" and plan is FULL
        target = f"<= {most:.0f} B" if is_judged else ""
        ok = value <= most if is_judged else None
        rows.append(Row(case, f"resident memory per block, {when}", value, "B", other, value / other, target, ok))
    return rows


def start_rows(stored: Path, code: Path, work: Path, plan: Plan) -> list[Row]:
    """Measure starts of both managers with copies of the same directory."""
    sides: dict[str, tuple[Path | None, list[float], list[float]]] = {"now": (None, [], []), "before": (code, [], [])}
    for number in range(plan.starts):
        for name, (side, full, empty) in sides.items():
            copy = Path(shutil.copytree(stored, work / f"{name}-{number}"))
            for directory, costs in ((copy, full), (work / f"{name}-empty-{number}", empty)):
                with site(on_rocksdb(directory), code=side) as running:
                    costs.append(running.manager.cpu_seconds())
    value, other = (
        statistics.median(cpu - bare for cpu, bare in zip(full, empty, strict=True)) / plan.blocks * 1e6
        for _, full, empty in sides.values()
    )
    case = f"start with {plan.blocks:,} blocks of RocksDB"
    target = f"<= {MOST_START_US:.0f} us"
    return [Row(case, "server CPU per block", value, "us", other, value / other, target, value <= MOST_START_US)]


def write_cost(running: Site, count: int) -> float:
    """Return the CPU time in us of a start and a finish of fresh blocks."""
    cost = running.client.write(running.manager, "grpc", "fresh", WRITE_BLOCKS, count, 1).cpu_us
    running.manager.forget("fresh")
    return cost


def write_rows(rows: list[StoredRow], code: Path, work: Path, plan: Plan) -> list[Row]:
    """Measure writes over both stores, of both managers over RocksDB, and of the bare database, in turn."""
    with ExitStack() as stack:
        memory = stack.enter_context(site())
        now = stack.enter_context(site(on_rocksdb(work / "writes-now")))
        before = stack.enter_context(site(on_rocksdb(work / "writes-before"), code=code))
        costs: list[tuple[float, float, float, float]] = []
        for each in (memory, now, before):
            each.manager.register("fresh", 1)
            write_cost(each, WARM_WRITES)
        for _ in range(plan.windows):
            ours, theirs, least = (write_cost(each, plan.writes) for each in (now, before, memory))
            costs.append((ours, theirs, least, bare_cost(rows, work / "bare", plan.writes)))
    case = f"start + finish, {WRITE_BLOCKS:,} fresh blocks, RocksDB"
    ours, theirs, least, bare = map(statistics.median, zip(*costs, strict=True))
    floor = statistics.median(each[0] / (each[2] + each[3]) for each in costs)
    ratio = statistics.median(each[0] / each[1] for each in costs)
    return [
        Row(case, "server CPU per write", ours, "us", theirs, ratio, "value/before <= 1", ratio <= 1),
        Row(
            f"{case}, against memory + bare",
            "server CPU",
            ours,
            "us",
            least + bare,
            floor,
        ),
        Row("memory backend, the same writes", "server CPU per write", least, "us"),
        Row("bare WriteBatch of the same rows, twice", "CPU", bare, "us"),
    ]


def bare_cost(rows: list[StoredRow], directory: Path, count: int) -> float:
    """Return the CPU time in us of writing 1,024 rows twice, with the work in the background."""
    database = Rdict(str(directory), database_options())
    begin = time.process_time()
    for number in range(2 * count):
        at = number // 2 * WRITE_BLOCKS % (len(rows) - WRITE_BLOCKS + 1)
        batch = WriteBatch(raw_mode=True)
        for key, value in rows[at : at + WRITE_BLOCKS]:
            batch.put(key, value)
        database.write(batch)
    database.flush()
    taken = time.process_time() - begin
    database.close()
    shutil.rmtree(directory)
    return taken / count * 1e6


def stored_rows(directory: Path, work: Path) -> list[StoredRow]:
    """Return the rows of blocks in a copy of a directory."""
    log = CommitLog(Path(shutil.copytree(directory, work / "rows")), Fsync.NEVER, SystemClock())
    try:
        return list(log.read(BLOCKS))
    finally:
        log.close_at_once()


def measure(code: Path, plan: Plan, parts: list[str]) -> list[Row]:
    """Measure everything."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvcm-rocksdb-") as name:
        work, stored = Path(name), Path(name) / "stored"
        if "memory" in parts:
            rows += memory_rows("memory", [], [], code, plan)
            rows += memory_rows("RocksDB", on_rocksdb(work / "fill"), on_rocksdb(work / "fill-before"), code, plan)
        with site(on_rocksdb(stored), code=code) as running:
            running.manager.register("blocks", 1)
            fill(running, plan.blocks)
        if "start" in parts:
            rows += start_rows(stored, code, work, plan)
        if "write" in parts:
            rows += write_rows(stored_rows(stored, work), code, work, plan)
    return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    options = parser.parse_args()
    rows = measure(options.before.resolve(), QUICK if options.quick else FULL, options.part or list(PARTS))
    met = publish("rocksdb: memory, starts and writes against another commit", rows, options.json)
    return 0 if met or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
