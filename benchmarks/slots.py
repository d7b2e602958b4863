"""Claim: packed files hand out freed slots again, safely, and take up no more space than the live blocks.

A million random creates and deletes of blocks, a write at a time or scattered, against a plain model of the owners of
slot; once where the file system punches holes and space is counted in blocks, and once on one that cannot (ramfs),
where the length of all files counts. The notes beside the files count too. Every block is read before it is deleted.
About half of the deletions are those of a manager that is written to while it evicts: a write comes between the bytes
and their metadata. A few writes are rolled back, whose slots are never handed out again, and blocks that are long gone
are deleted once more every now and then. The clock is injected: the grace of a freed slot is over at the next
operation.

Mounting a ramfs takes root; without it that side is left out, which only a smoke run may. Both run at the same time.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

from report import Row, arguments, is_sound, left_out, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))
from slot_world import Counts, SlotWorld, live_through
from storage_rig import can_punch_holes

OPERATIONS, QUICK_OPERATIONS = 1_000_000, 20_000
MOST_LIVE, QUICK_LIVE = 4096, 2048  # of fewer blocks, half-empty files and notes are much: space hangs on chance
SLOT_BYTES, SLOTS_PER_FILE = 4096, 32
MOST_SPACE = 1.2


@contextmanager
def ramfs(folder: Path) -> Iterator[Path | None]:
    """Mount a file system that cannot punch holes; None where that is not allowed."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def one_side(root: Path, operations: int, most_live: int, *, by_blocks: bool) -> tuple[Counts, float]:
    """Return what happened on one file system, and the seconds that it took."""
    world = SlotWorld(root, Random(16), slot_bytes=SLOT_BYTES, slots_per_file=SLOTS_PER_FILE, specs=("tp0", "tp1"))
    began = time.perf_counter()
    asyncio.run(live_through(world, operations, most_live, by_blocks=by_blocks))
    return world.counts, time.perf_counter() - began


def rows_of(side: str, counts: Counts, seconds: float) -> list[Row]:
    """Return the figures of one side."""
    case = f"{SLOTS_PER_FILE} slots of {SLOT_BYTES >> 10} KiB a file, {side}"
    reused = counts.reused / counts.created
    return [
        Row(case, "operations", counts.operations, "blocks"),
        Row(case, "operations a second", counts.operations / seconds, "1/s"),
        *(
            Row(case, metric, value, "blocks", target="0", ok=value == 0)
            for metric, value in (
                ("overlaps", counts.overlaps),
                ("wrong reads", counts.wrong_reads),
                ("failed deletions", counts.failures),
            )
        ),
        Row(case, "created in reused slots", 100 * reused, "%", target="> 50", ok=reused > 0.5),
        Row(
            case,
            "space of all files, at its peak",
            counts.peak_space_bytes / 2**20,
            "MiB",
            baseline=counts.peak_live_bytes / 2**20,
            ratio=counts.space_ratio,
            target=f"space/peak of live bytes <= {MOST_SPACE}",
            ok=counts.space_ratio <= MOST_SPACE,
        ),
    ]


def main() -> int:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--operations", type=int, help=f"creates and deletes, {OPERATIONS:,} by default")
    parser.add_argument("--smoke", dest="quick", action="store_true", help="the same as --quick")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where holes can be punched")
    options = parser.parse_args()
    operations = options.operations or (QUICK_OPERATIONS if options.quick else OPERATIONS)
    most_live = QUICK_LIVE if options.quick else MOST_LIVE
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder, ramfs(Path(folder) / "ram") as ram:
        if not can_punch_holes(Path(folder)):
            sys.exit(f"{options.dir} cannot punch holes: name another one with --dir")
        with ProcessPoolExecutor(2) as sides:
            with_holes = sides.submit(one_side, Path(folder) / "root", operations, most_live, by_blocks=True)
            if ram is not None:
                without = sides.submit(one_side, ram / "root", operations, most_live, by_blocks=False)
                rows += rows_of("without holes", *without.result())
            else:
                rows.append(left_out("without holes", "no ramfs can be mounted", options.quick))
            rows = [*rows_of("with holes", *with_holes.result()), *rows]
    good = publish("Slots of packed files", rows, options.json)
    return 0 if good or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
