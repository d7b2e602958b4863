"""Claim: a memory pool is as fast as memory.

Each row compares the transfer engine (stamps and locks of every extent, results per item, deadline, byte budget,
statistics) with a loop of `numpy.copyto` over the same blocks, the same extents of the same mapped memory and the same
buffers, in alternating windows of the same run. The figure is the median of the ratios of neighbouring windows. Targets
are for the engine as it is configured by default, which has as many threads as there are cores, at most 4, while the
loop has one. An engine of one thread must reach the same with blocks of 1 MiB. With blocks of 64 KiB it does not, for
every block costs it more than the loop's one call; that row shows by how much, and has no target.

Every block has bytes of its own. Before they are compared, the pool is cleared and saved by the engine once more: the
loop writes the same extents.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from report import Row, arguments, publish

from kvcm.connectors.transfer import TransferEngine, TransferItem
from kvcm.connectors.transfer.mempool import MemPoolMover
from kvcm.connectors.transfer.pool_segment import PoolAccess
from kvcm.model.storages import chunk_bytes
from kvcm.model.uri import LocationUri

STORAGE, NODE = "medium", "here"
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (64 * KIB, MIB)
# Threads of the engine, None for its default, and block size → what it must reach of the copies alone.
TARGETS: dict[tuple[int | None, int], float] = {(None, 64 * KIB): 0.80, (None, MIB): 0.80, (1, MIB): 0.80}
DEADLINE_SECONDS = 60.0

Move = Callable[[], object]
Copies = Sequence[tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", "np.ndarray[tuple[int], np.dtype[np.uint8]]"]]


def pool_items(memory: memoryview, capacity_bytes: int, block_bytes: int, stamp: int) -> list[TransferItem]:
    """Return items for all of `memory`, block by block, in extents as a manager hands them out: within chunks."""
    per_chunk = chunk_bytes(capacity_bytes) // block_bytes
    items = []
    for index in range(memory.nbytes // block_bytes):
        offset = index // per_chunk * chunk_bytes(capacity_bytes) + index % per_chunk * block_bytes
        uri = LocationUri("pace", STORAGE, f"/{offset}", block_bytes, node_id=NODE, range_id=stamp)
        items.append(TransferItem(uri, [memory[index * block_bytes : (index + 1) * block_bytes]]))
    return items


def seconds(move: Move) -> float:
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def speed_row(case: str, total_bytes: int, ours: Move, theirs: Move, windows: int, target: float | None) -> Row:
    """Return a row in GB/s; both sides are warmed up, and take turns."""
    ours()
    theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(windows)]
    ratio = median(theirs_seconds / ours_seconds for ours_seconds, theirs_seconds in pairs)
    gigabytes = total_bytes / 1e9
    return Row(
        case,
        "speed, against numpy.copyto",
        gigabytes / median(pair[0] for pair in pairs),
        "GB/s",
        gigabytes / median(pair[1] for pair in pairs),
        ratio,
        "" if target is None else f"engine/copyto >= {target:.2f}",
        None if target is None else ratio >= target,
    )


def copies(access: PoolAccess, items: Sequence[TransferItem]) -> Copies:
    """Return the same as pairs of arrays: in the pool, and in memory."""
    segment = access.find_or_create()
    return [
        (segment.data[item.uri.offset : item.uri.offset + item.uri.size], np.frombuffer(item.buffers[0], np.uint8))
        for item in items
    ]


def rows_of(directory: Path, total_bytes: int, windows: int) -> list[Row]:
    rows: list[Row] = []
    capacity_bytes = max(64 * 2 * MIB, total_bytes * 2)
    access = PoolAccess(directory / "kvcm-benchmark", capacity_bytes)
    mover = MemPoolMover(STORAGE, NODE, capacity_bytes, access)
    memory = memoryview(bytearray(total_bytes))
    for threads in (1, None):
        engine = TransferEngine({("pace", STORAGE): mover}, threads, checksums=False)
        for block_bytes in BLOCK_BYTES:
            rows += block_rows(engine, access, memory, capacity_bytes, block_bytes, windows, threads)
    return rows


def block_rows(
    engine: TransferEngine,
    access: PoolAccess,
    memory: memoryview,
    capacity_bytes: int,
    block_bytes: int,
    windows: int,
    threads: int | None,
) -> list[Row]:
    """Saves and loads of blocks of one size."""
    items = pool_items(memory, capacity_bytes, block_bytes, time.time_ns())
    pairs = copies(access, items)
    name = f"{block_bytes // KIB} KiB, " + ("default threads" if threads is None else f"{threads} thread")
    target = TARGETS.get((threads, block_bytes))

    def save() -> None:
        assert all(result.ok for result in engine.save(items, DEADLINE_SECONDS))

    def load() -> None:
        assert all(result.ok for result in engine.load(items, DEADLINE_SECONDS))

    def copy_in() -> None:
        for theirs, mine in pairs:
            np.copyto(theirs, mine)

    def copy_out() -> None:
        for theirs, mine in pairs:
            np.copyto(mine, theirs)

    expected = np.random.default_rng(block_bytes).bytes(memory.nbytes)
    memory[:] = expected
    saving = speed_row(f"save: {name}", memory.nbytes, save, copy_in, windows, target)
    for extent, _ in pairs:
        extent[:] = 0
    save()
    memory[:] = bytes(memory.nbytes)
    load()
    equal = memory == expected
    loading = speed_row(f"load: {name}", memory.nbytes, load, copy_out, windows, target)
    return [loading, Row(f"load: {name}", "bytes are equal", int(equal), "", target="1", ok=equal), saving]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the pool is made")
    options = parser.parse_args()
    total_bytes, windows = (16 * MIB, 5) if options.quick else (128 * MIB, 31)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows = rows_of(Path(directory), total_bytes, windows)
    met = publish("memory pool: engine against copies of the same memory", rows, options.json)
    sound = all(row.ok for row in rows if row.metric == "bytes are equal")
    return 0 if met or (options.quick and sound) else 1


if __name__ == "__main__":
    sys.exit(main())
