"""Claim: the transfer engine moves KV at the speed of the medium.

The medium is a file system whose files are in the page cache: nothing but copying is left, and every microsecond of the
engine shows. Each row compares the engine (results per item, links refused, deadline, byte budget, statistics) with a
plain loop of system calls over the same files and the same memory, in alternating windows of the same run: open, preadv
and close per file, one thread. The figure is the median of the ratios of neighbouring windows. Rows against `dd` (all
blocks into one buffer, which stays in the processor's cache) and against memcpy (no system calls) show how far that is
from what the machine could do. Rows against "1 thread" and "no checksums" compare the engine with itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from report import Row, arguments, publish

from kvcm.connectors.transfer import FileMover, TransferEngine, TransferItem
from kvcm.connectors.transfer.paths import OpenFolders, open_below, walk_below
from kvcm.model.uri import LocationUri

STORAGE = "medium"
KIB, MIB = 1 << 10, 1 << 20
# Block size → what the engine must reach of the plain loop.
TARGETS = {64 * KIB: 0.50, MIB: 0.70}
SLOTS_PER_FILE = 64
DEADLINE_SECONDS = 60.0

Move = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks in files and in memory.

    Attributes:
        name: for people.
        block_bytes: of each.
        files: path and number of blocks of each file, in the order of the blocks.
        items: the same for the engine.
        memory: all blocks one behind the other.
    """

    name: str
    block_bytes: int
    files: Sequence[tuple[str, int]]
    items: Sequence[TransferItem]
    memory: memoryview

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.memory.nbytes


def make_blocks(root: Path, memory: memoryview, block_bytes: int, per_file: int) -> Blocks:
    """Write blocks to files that lie as the manager places them: cluster, instance, spec, object."""
    count = memory.nbytes // block_bytes
    name = f"{block_bytes // KIB} KiB, {f'{per_file} blocks per file' if per_file > 1 else 'one file per block'}"
    directory = root / "c0ffee0123456789" / f"instance-{block_bytes}-{per_file}" / "tp0"
    directory.mkdir(parents=True)
    files, items = [], []
    for index in range(0, count, per_file):
        path = str(directory / f"{index:016x}.0123456789abcdef")
        slots = min(per_file, count - index)
        files.append((path, slots))
        Path(path).write_bytes(os.urandom(slots * block_bytes))
        for slot in range(slots):
            start = (index + slot) * block_bytes
            uri = LocationUri("file", STORAGE, path, block_bytes, slot if per_file > 1 else None)
            items.append(TransferItem(uri, [memory[start : start + block_bytes]]))
    return Blocks(name, block_bytes, files, items, memory)


def plain(blocks: Blocks, flags: int, move: Callable[[int, list[memoryview], int], int]) -> None:
    """Move all blocks with nothing but system calls."""
    start = 0
    for path, count in blocks.files:
        descriptor = os.open(path, flags)
        for slot in range(count):
            move(descriptor, [blocks.memory[start : start + blocks.block_bytes]], slot * blocks.block_bytes)
            start += blocks.block_bytes
        os.close(descriptor)


def plain_load(blocks: Blocks) -> None:
    plain(blocks, os.O_RDONLY, os.preadv)


def dd_load(blocks: Blocks) -> None:
    """Read all blocks into the memory of the first one."""
    buffer = [blocks.memory[: blocks.block_bytes]]
    for path, count in blocks.files:
        descriptor = os.open(path, os.O_RDONLY)
        for slot in range(count):
            os.preadv(descriptor, buffer, slot * blocks.block_bytes)
        os.close(descriptor)


def plain_save(blocks: Blocks) -> None:
    plain(blocks, os.O_WRONLY | os.O_CREAT, os.pwritev)


def load(engine: TransferEngine, blocks: Blocks) -> None:
    assert all(result.ok for result in engine.load(blocks.items, DEADLINE_SECONDS))


def save(engine: TransferEngine, blocks: Blocks) -> None:
    assert all(result.ok for result in engine.save(blocks.items, DEADLINE_SECONDS))


def seconds(move: Move) -> float:
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def paired(ours: Move, theirs: Move, windows: int) -> tuple[float, float, float]:
    """Return the median seconds of both sides and the median of their ratios theirs/ours; both are warmed up."""
    ours()
    theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(windows)]
    return (
        median(pair[0] for pair in pairs),
        median(pair[1] for pair in pairs),
        median(theirs_seconds / ours_seconds for ours_seconds, theirs_seconds in pairs),
    )


def speed_row(
    case: str, blocks: Blocks, sides: tuple[float, float, float], target: float | None = None, against: str = "plain"
) -> Row:
    """Return a row in GB/s; the ratio is ours/theirs."""
    ours, theirs, ratio = sides
    gigabytes = blocks.total_bytes / 1e9
    wanted = "" if target is None else f"engine/{against} >= {target:.2f}"
    ok = None if target is None else ratio >= target
    return Row(
        f"{case}: {blocks.name}",
        f"speed, against {against}",
        gigabytes / ours,
        "GB/s",
        gigabytes / theirs,
        ratio,
        wanted,
        ok,
    )


def load_is_right(engine: TransferEngine, blocks: Blocks) -> Row:
    """Compare what the engine loads with the files."""
    blocks.memory[:] = bytes(blocks.total_bytes)
    load(engine, blocks)
    equal = b"".join(Path(path).read_bytes() for path, _ in blocks.files) == blocks.memory
    return Row(f"load: {blocks.name}", "bytes are equal", int(equal), "", target="1", ok=equal)


def load_rows(
    engine: TransferEngine, single: TransferEngine, mover: FileMover, blocks: Blocks, windows: int
) -> list[Row]:
    """Loads and saves of one kind of blocks; `single` does not coalesce, `mover` is that of `engine`."""
    source = memoryview(bytearray(os.urandom(MIB)) * (blocks.total_bytes // MIB))

    def ours() -> None:
        load(engine, blocks)

    def copy() -> None:
        blocks.memory[:] = source

    one = TransferEngine({("file", STORAGE): mover}, 1, checksums=False)
    rows = [
        speed_row("load", blocks, paired(ours, lambda: plain_load(blocks), windows), TARGETS[blocks.block_bytes]),
        speed_row("load", blocks, paired(ours, lambda: dd_load(blocks), windows), against="dd"),
        speed_row("load", blocks, paired(ours, copy, windows), against="memcpy"),
        load_is_right(engine, blocks),
        speed_row("save", blocks, paired(lambda: save(engine, blocks), lambda: plain_save(blocks), windows)),
    ]
    if len(blocks.files) < len(blocks.items):
        sides = paired(ours, lambda: load(single, blocks), windows)
        rows.append(speed_row("load", blocks, sides, against="no coalescing"))
    sides = paired(ours, lambda: load(one, blocks), windows)
    rows.append(speed_row("load", blocks, sides, against="1 thread"))
    one.close()
    return rows + checksum_rows(engine, mover, blocks, windows)


def checksum_rows(engine: TransferEngine, mover: FileMover, blocks: Blocks, windows: int) -> list[Row]:
    """The cost of a checksum on saving, and of its comparison on loading."""
    hashing = TransferEngine({("file", STORAGE): mover}, checksums=True)
    saved = hashing.save(blocks.items, DEADLINE_SECONDS)
    items = [replace(item, checksum=result.checksum or 0) for item, result in zip(blocks.items, saved, strict=True)]
    assert all(item.checksum for item in items)
    hashed = replace(blocks, items=items)
    loads = paired(lambda: load(engine, hashed), lambda: load(engine, blocks), windows)
    saves = paired(lambda: save(hashing, blocks), lambda: save(engine, blocks), windows)
    hashing.close()
    return [
        speed_row("load, verified", blocks, loads, against="no checksums"),
        speed_row("save, checksums taken", blocks, saves, against="no checksums"),
    ]


def open_rows(root: Path, blocks: Blocks, windows: int) -> list[Row]:
    """What it costs that no link leads out of the storage: opening all files of a directory that is in the cache."""
    parts = [tuple(Path(path).relative_to(root).parts) for path, _ in blocks.files]

    def ours(open_one: Callable[..., int]) -> None:
        for components in parts:
            os.close(open_one(str(root), components, os.O_RDONLY, 0, 0))

    def plainly() -> None:
        for path, _ in blocks.files:
            os.close(os.open(path, os.O_RDONLY))

    folders = OpenFolders(0o600, 0o700)

    def in_folder(root: str, components: Sequence[str], flags: int, *_: int) -> int:
        return folders.open(root, "/".join((root, *components)), flags)

    ways: list[tuple[str, Callable[..., int]]] = [
        ("in a folder that is open", in_folder),
        ("one call", open_below),
        ("component by component", walk_below),
    ]
    rows = []
    for name, open_one in ways:
        mine, theirs, ratio = paired(lambda open_one=open_one: ours(open_one), plainly, windows)
        per_file = 1e6 / len(parts)
        case = f"open and close: {len(parts[0])} components, {name}"
        rows.append(Row(case, "time per file, against plain", mine * per_file, "µs", theirs * per_file, 1 / ratio))
    folders.close()
    return rows


def rows_of(root: Path, total_bytes: int, windows: int) -> list[Row]:
    memory = memoryview(bytearray(total_bytes))
    mover = FileMover({STORAGE: str(root)})
    engine = TransferEngine({("file", STORAGE): mover}, checksums=False)
    single = TransferEngine({("file", STORAGE): FileMover({STORAGE: str(root)}, coalesce=False)}, checksums=False)
    rows: list[Row] = []
    for block_bytes in TARGETS:
        for per_file in (SLOTS_PER_FILE, 1):
            blocks = make_blocks(root, memory, block_bytes, per_file)
            rows += load_rows(engine, single, mover, blocks, windows)
            if (block_bytes, per_file) == (min(TARGETS), 1):
                rows += open_rows(root, blocks, windows)
    engine.close()
    single.close()
    return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--directory", type=Path, help="where the files are made; default is the temporary directory")
    options = parser.parse_args()
    total_bytes, windows = (16 * MIB, 5) if options.quick else (128 * MIB, 31)
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        rows = rows_of(Path(root), total_bytes, windows)
    met = publish("transfer: files in the page cache, engine against plain system calls", rows, options.json)
    sound = all(row.ok for row in rows if row.metric == "bytes are equal")
    return 0 if met or (options.quick and sound) else 1


if __name__ == "__main__":
    sys.exit(main())
