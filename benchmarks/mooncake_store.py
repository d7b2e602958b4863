"""Claim: the transfer engine moves KV through a Mooncake store at the speed of the store's own batch calls.

A real master, an owner of memory in a process of its own and an engine process, over TCP on one host, in a network of
their own where that is possible. Each row compares the engine with one batch call of the client for the same objects
and the same registered memory, in alternating windows of the same run; the figure is the median of the ratios of
neighbouring windows. Saves write new objects each time and remove them afterwards, outside the measured time: a name
is written once. Rows without a target show what memory costs that was not registered, what a few layers of each block
cost beside the whole, and how the number of threads matters.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
from report import Row, arguments, left_out, publish

from kvcm.connectors.transfer import TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.mooncake import MooncakeMover, MooncakeSettings
from kvcm.model.mooncake import MooncakeClient, open_client
from kvcm.model.storages import MooncakeStorageSpec
from kvcm.model.uri import LocationUri

TITLE = "mooncake: the engine against the store's own batch calls, over TCP"
STORAGE = "store"
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (64 * KIB, MIB)
TARGET = 0.90
DEADLINE_SECONDS = 60.0
LEASE_SECONDS = 10.0  # as masters have it by default
LAYERS = 8  # a read of some layers takes one of so many from each block

Move = Callable[[], object]
_names: Iterator[int] = count()


class Side:
    """One client, one engine, and blocks of one size in memory that both have registered."""

    def __init__(self, spec: MooncakeStorageSpec, block_bytes: int, total_bytes: int, threads: int | None) -> None:
        self.block_bytes = block_bytes
        self.blocks = total_bytes // block_bytes
        self.memory = np.random.default_rng(0).integers(0, 256, total_bytes, np.uint8)
        self.client: MooncakeClient = open_client(spec, segment_bytes=0, buffer_bytes=16 * MIB)
        assert self.client.register_buffer(self._address, total_bytes) == 0
        self.engine = TransferEngine(
            {("mooncake", STORAGE): MooncakeMover(spec, MooncakeSettings())}, threads, checksums=False
        )
        self.engine.register_memory([self.memory.data])
        self.other = np.empty(total_bytes, np.uint8)  # not registered

    @property
    def _address(self) -> int:
        address: int = self.memory.__array_interface__["data"][0]
        return address

    def names(self) -> list[str]:
        """Return unused names."""
        stamp = next(_names)
        return [f"bench/{stamp}/{index:x}" for index in range(self.blocks)]

    def items(self, names: Sequence[str], memory: np.ndarray, start: int | None = None) -> list[TransferItem]:
        """Return what the engine moves: whole blocks, or a layer of each."""
        size = self.block_bytes if start is None else self.block_bytes // LAYERS
        view = memory.data
        return [
            TransferItem(
                LocationUri("mooncake", STORAGE, "/", self.block_bytes, key=name),
                [view[index * self.block_bytes : index * self.block_bytes + size]],
                start,
            )
            for index, name in enumerate(names)
        ]

    def _arguments(self) -> tuple[list[int], list[int]]:
        addresses = [self._address + index * self.block_bytes for index in range(self.blocks)]
        return addresses, [self.block_bytes] * self.blocks

    def direct_load(self, names: Sequence[str]) -> None:
        assert self.client.batch_get_into(names, *self._arguments()) == [self.block_bytes] * self.blocks

    def direct_save(self, names: Sequence[str]) -> None:
        assert not any(self.client.batch_put_from(names, *self._arguments()))

    def load(self, items: Sequence[TransferItem]) -> None:
        check(self.engine.load(items, DEADLINE_SECONDS))

    def save(self, items: Sequence[TransferItem]) -> None:
        check(self.engine.save(items, DEADLINE_SECONDS))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that a reader has a lease on."""
        self.client.batch_remove(names, True)


def check(results: Sequence[TransferResult]) -> None:
    """End the run when not everything has moved."""
    reason = next((result.reason for result in results if not result.ok), "")
    assert not reason, reason


def seconds(move: Move) -> float:
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def ratio_row(
    case: str, metric: str, pairs: Sequence[tuple[float, float]], size_bytes: int, target: float | None
) -> Row:
    """Return a row in GB/s of pairs (engine, other side); the ratio is engine/other."""
    ours, theirs = (median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = median(theirs / ours for ours, theirs in pairs)
    wanted = "" if target is None else f"engine/{metric.rpartition(' ')[2]} >= {target:.2f}"
    ok = None if target is None else ratio >= target
    return Row(case, metric, size_bytes / ours / 1e9, "GB/s", size_bytes / theirs / 1e9, ratio, wanted, ok)


def load_rows(side: Side, name: str, windows: int, target: float | None) -> Iterator[Row]:
    names, total = side.names(), side.memory.nbytes
    wanted = side.memory.copy()
    side.save(side.items(names, side.memory))
    items = side.items(names, side.memory)
    side.memory[:] = 0
    side.load(items)
    equal = bool(np.array_equal(side.memory, wanted))
    yield Row(f"load: {name}", "bytes are equal", int(equal), "", target="1", ok=equal)
    side.direct_load(names)
    pairs = [(seconds(lambda: side.load(items)), seconds(lambda: side.direct_load(names))) for _ in range(windows)]
    yield ratio_row(f"load: {name}", "speed, against direct", pairs, total, target)
    staged = side.items(names, side.other)
    side.load(staged)
    pairs = [(seconds(lambda: side.load(staged)), seconds(lambda: side.load(items))) for _ in range(windows)]
    yield ratio_row(f"load: {name}, not registered", "speed, against registered", pairs, total, None)
    layer = side.items(names, side.memory, side.block_bytes // 2)
    side.load(layer)
    pairs = [(seconds(lambda: side.load(layer)), seconds(lambda: side.load(items))) for _ in range(windows)]
    ours, theirs = (1e3 * median(pair[index] for pair in pairs) for index in (0, 1))
    yield Row(f"load: {name}, 1 of {LAYERS} layers", "time, against all", ours, "ms", theirs, ours / theirs)
    side.remove(names)


def save_rows(side: Side, name: str, windows: int, target: float | None) -> Iterator[Row]:
    pairs = []
    for window in range(windows + 1):
        ours, theirs = side.names(), side.names()
        items = side.items(ours, side.memory)
        moves = [lambda items=items: side.save(items), lambda names=theirs: side.direct_save(names)]
        order = (0, 1) if window % 2 else (1, 0)  # the first may get untouched memory
        spent = {index: seconds(moves[index]) for index in order}
        pair = spent[0], spent[1]
        side.remove([*ours, *theirs])
        if window:  # the first one warms up
            pairs.append(pair)
    yield ratio_row(f"save: {name}", "speed, against direct", pairs, side.memory.nbytes, target)


def rows_of(spec: MooncakeStorageSpec, total_bytes: int, windows: int, threads: Sequence[int | None]) -> list[Row]:
    rows: list[Row] = []
    for block_bytes in BLOCK_BYTES:
        for number in threads:
            side = Side(spec, block_bytes, total_bytes, number)
            name = f"{block_bytes // KIB} KiB" + ("" if number is None else f", {number} threads")
            target = TARGET if number is None else None
            rows += load_rows(side, name, windows, target)
            rows += save_rows(side, name, windows, target)
    return rows


def engine_process(target_file: Path | None) -> int:
    """Run the measurement in a process that is in the store's network."""
    order = json.loads(os.environ["KVCM_BENCHMARK_MOONCAKE"])
    rows = rows_of(MooncakeStorageSpec(**order["spec"]), order["total_bytes"], order["windows"], order["threads"])
    met = publish(TITLE, rows, target_file)
    sound = all(row.ok for row in rows if row.metric == "bytes are equal")
    sys.stdout.flush()
    os._exit(0 if met or (order["quick"] and sound) else 1)  # the client may end the process badly


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, nargs="*", help="also with so many threads")
    options = parser.parse_args()
    if "KVCM_BENCHMARK_MOONCAKE" in os.environ:
        return engine_process(options.json)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "mooncake"))
    from mooncake_rig import Site, missing

    reason = missing()
    if reason:
        return 0 if publish(TITLE, [left_out("mooncake", reason, options.quick)], options.json) else 1
    total_bytes, windows = (8 * MIB, 5) if options.quick else (64 * MIB, 31)
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), LEASE_SECONDS)
        try:
            site.owner(6 * total_bytes)
            order = {
                "spec": site.spec,
                "total_bytes": total_bytes,
                "windows": windows,
                "threads": [None, *(options.threads or [])],
                "quick": options.quick,
            }
            os.environ["KVCM_BENCHMARK_MOONCAKE"] = json.dumps(order)
            return site.run([sys.executable, __file__, *sys.argv[1:]])
        finally:
            site.close()


if __name__ == "__main__":
    sys.exit(main())
