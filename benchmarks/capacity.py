"""Claim: eviction takes as many blocks as needed, the coldest first, and no request waits for it.

Real managers, with their metadata in RocksDB and in Redis: the experiments of the original with ten blocks too many;
a prefix that is read while one-time writes flood the cache; groups beside one that floods their storage; victims
against orders that are known; bytes on a disk against the accounts; and writers at full speed into a full group.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from capacity_order import FULL_FLOOD, FULL_ORDER, QUICK_FLOOD, QUICK_ORDER, FloodPlan, OrderPlan, hot_prefix, order
from capacity_site import STORES, CapacitySite, GroupShape, dummy_storage, fresh_chains, sites
from report import Row, arguments, is_sound, publish

from kvcm.model.uri import LocationUri
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.storage.file_objects import NOTES_SUFFIX

MOST_LOSS = 0.01
MOST_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything.

    Attributes:
        hysteresis: of the experiments; None is the default of 0.02.
        flood: of a hot prefix.
        flooded_blocks: of the storage that one of eight groups floods.
        order: of victims.
        file_blocks: of the groups with real files.
        writer_seconds: at full speed.
    """

    hysteresis: tuple[float | None, ...] = (None, 0.0, 0.0213)
    flood: FloodPlan = FULL_FLOOD
    flooded_blocks: int = 4000
    order: OrderPlan = FULL_ORDER
    file_blocks: int = 4000
    writer_seconds: float = 8.0


QUICK = Plan((0.0213,), QUICK_FLOOD, 800, QUICK_ORDER, 800, 2.0)


# ---- ten blocks too many --------------------------------------------------------------------------------------------

EXPERIMENT_BLOCKS, EXPERIMENT_MARK = 10_000, Fraction(8, 10)
ORIGINAL = {0: 100, 100: 900, 1000: 1000}
"""What the original evicts, by its delay before a deletion in ms (wire.md 9.3)."""


async def experiments(stores: Sequence[str], plan: Plan) -> list[Row]:
    """Fill groups up to their mark, write ten blocks more, and count the evicted ones."""
    async with sites(*stores) as found:
        return [row for rows in await asyncio.gather(*(_experiments(site, plan) for site in found)) for row in rows]


async def _experiments(site: CapacitySite, plan: Plan) -> list[Row]:
    capacity = int(EXPERIMENT_BLOCKS / EXPERIMENT_MARK)
    shapes = [
        GroupShape(f"{below}-{delay}", capacity, float(EXPERIMENT_MARK), below, "lru", delay)
        for below in plan.hysteresis
        for delay in ORIGINAL
    ]
    for number, shape in enumerate(shapes):
        await site.create(shape)
        await site.fill(shape.name, EXPERIMENT_BLOCKS, seed=number)
    await site.settle()
    assert not site.evicted(), "evicted at the mark, not above it"
    await asyncio.gather(*(site.fill(shape.name, 10, 100 + number) for number, shape in enumerate(shapes)))
    await site.settle(max(ORIGINAL) / 1000)
    evicted, blocks = site.evicted(), await site.blocks()
    return [_experiment_row(site.store, shape, len(evicted[shape.name]), blocks[shape.name]) for shape in shapes]


def _experiment_row(store: str, shape: GroupShape, evicted: int, left: int) -> Row:
    below = Fraction(str(0.02 if shape.hysteresis is None else shape.hysteresis))
    needed = math.ceil(EXPERIMENT_BLOCKS + 10 - shape.capacity_blocks * (EXPERIMENT_MARK - below))
    case = f"{store}, 10 blocks above the mark of {EXPERIMENT_BLOCKS:,}, delay {shape.delay_ms} ms"
    is_met = evicted == needed and left == EXPERIMENT_BLOCKS + 10 - needed
    original = ORIGINAL[shape.delay_ms]
    metric = f"blocks evicted, hysteresis {float(below):g}"
    return Row(case, metric, evicted, "", original, original / max(1, evicted), f"= {needed}", is_met)


# ---- eight groups on one storage ------------------------------------------------------------------------------------

BYSTANDERS = 7


async def fairness(stores: Sequence[str], plan: Plan) -> list[Row]:
    """Let one of eight groups flood their storage. Below its equal share a group loses nothing, above it neither if
    that much is guaranteed; the third case shows that the guarantee does it."""
    blocks = plan.flooded_blocks
    share = int(0.88 * blocks) // (1 + BYSTANDERS)  # of the low mark of a storage
    cases = (
        ("half its equal share", share // 2, 0, True),
        ("107 % of it, guaranteed", share * 107 // 100, share * 107 // 100, True),
        ("107 % of it, not guaranteed", share * 107 // 100, 0, False),
    )
    async with sites(*stores) as found:
        return list(await asyncio.gather(*(_fairness(site, blocks, *case) for site in found for case in cases)))


async def _fairness(site: CapacitySite, blocks: int, case: str, held: int, guaranteed: int, is_bound: bool) -> Row:
    await site.add_storage(dummy_storage(f"s{held}-{guaranteed}", blocks))
    names = [f"{held}-{guaranteed}-{number}" for number in range(BYSTANDERS + 1)]
    for number, name in enumerate(names[:-1]):
        shape = GroupShape(name, blocks, storage=f"s{held}-{guaranteed}", guaranteed_blocks=guaranteed)
        await site.create(shape)
        await site.fill(name, held, number, length=50)
    await site.create(GroupShape(names[-1], blocks, storage=f"s{held}-{guaranteed}"))
    for keys in fresh_chains(3 * blocks, 50, seed=99):
        while keys:
            written = await site.write(names[-1], keys)
            keys = keys[written.blocks :]
            await asyncio.sleep(0.01 if written.is_refused else 0)
    await site.settle()
    left = await site.blocks()
    lost = 1 - sum(left[name] for name in names[:-1]) / (BYSTANDERS * held)
    what = f"{site.store}, one of eight groups writes 3 storages"
    target = f"< {MOST_LOSS:g}" if is_bound else ""
    return Row(
        what, f"lost by the others with {case}", lost, "", target=target, ok=lost < MOST_LOSS if is_bound else None
    )


# ---- bytes on a disk ------------------------------------------------------------------------------------------------


async def real_files(stores: Sequence[str], plan: Plan) -> list[Row]:
    """Write real files, evict, and compare the disk with the accounts."""
    with tempfile.TemporaryDirectory(prefix="kvcm-capacity-files-") as directory:
        async with sites(*stores) as found:
            tasks = [
                _real_files(site, Path(directory) / site.store / str(keys_per_file), keys_per_file, plan.file_blocks)
                for site in found
                for keys_per_file in (1, 8)
            ]
            return [row for rows in await asyncio.gather(*tasks) for row in rows]


async def _real_files(site: CapacitySite, root: Path, keys_per_file: int, blocks: int) -> list[Row]:
    name = f"files-{keys_per_file}"
    spec = admin_pb.NfsStorageSpec(root_path=f"{root}/", key_count_per_file=keys_per_file)
    await site.add_storage(admin_pb.StorageConfig(global_unique_name=name, nfs=spec))
    await site.create(GroupShape(name, blocks, mark=0.8, delay_ms=200, storage=name))
    half = list(fresh_chains(blocks // 2, 61, seed=1))
    for keys in half:
        await site.write(name, keys, put=_put)
    for keys in half[::2]:
        await site.read(name, keys[:37])  # so that tails leave, and packed files become sparse
    await asyncio.sleep(1.5)
    for keys in fresh_chains(blocks // 2, 61, seed=2):
        while keys:
            written = await site.write(name, keys, put=_put)
            keys = keys[written.blocks :]
            await asyncio.sleep(0.02 if written.is_refused else 0)
    usage = await site.settle(seconds=0.2)
    (used,) = (each.total.used_bytes for each in usage.groups if each.name == name)
    return list(_file_rows(site.store, root, keys_per_file, used))


def _put(uris: Sequence[str]) -> None:
    for uri in map(LocationUri.parse, uris):
        path = Path(uri.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, b"k" * uri.size, uri.offset)
        os.close(descriptor)


def _file_rows(store: str, root: Path, keys_per_file: int, used: int) -> Iterator[Row]:
    """A file is as long as its blocks, or takes as much of the disk as they do where some of its slots are punched."""
    files = [path.stat() for path in root.rglob("*") if path.is_file()]
    beside = [*root.rglob(f"*{NOTES_SUFFIX}"), *root.rglob(".kvcm-*")]  # the witness, and space for the next one
    notes = [path.stat() for path in beside]
    allocated = sum(each.st_blocks for each in files) * 512 - sum(each.st_blocks for each in notes) * 512
    apparent = sum(each.st_size for each in files) - sum(each.st_size for each in notes)
    case = f"{store}, real files, {keys_per_file} block{'s' if keys_per_file > 1 else ''} per file"
    on_disk, how = (apparent, "their lengths") if keys_per_file == 1 else (allocated, "the disk's blocks")
    is_met = on_disk == used
    yield Row(case, f"bytes in {how}", on_disk, "B", used, on_disk / max(1, used), "value/usage = 1", is_met)
    if keys_per_file > 1:
        yield Row(case, "punched bytes in their lengths", apparent - allocated, "B")
        yield Row(case, "bytes of notes beside them", sum(each.st_blocks for each in notes) * 512, "B")


# ---- writers at full speed ------------------------------------------------------------------------------------------

WRITERS, FULL_BLOCKS, WRITE_BLOCKS = 4, 5000, 64


async def full_speed(stores: Sequence[str], plan: Plan) -> list[Row]:
    """Write as fast as the manager answers into a group at its watermark; refused writes are repeated at once."""
    rows = []
    for store in stores:
        async with sites(store) as (site,):
            rows += await _full_speed(site, plan.writer_seconds)
    return rows


async def _full_speed(site: CapacitySite, seconds: float) -> list[Row]:
    await site.create(GroupShape("full", FULL_BLOCKS, mark=0.8))
    await site.fill("full", int(0.8 * FULL_BLOCKS), seed=0)
    begin, retries = time.monotonic(), list[float]()
    writers = [_write_on(site, begin + seconds, number, retries) for number in range(WRITERS)]
    counts = await asyncio.gather(*writers)
    writes, refused, took = sum(counts), len(retries), time.monotonic() - begin
    longest = max(retries, default=0.0)
    case = f"{site.store}, {WRITERS} writers into a group at its mark"
    target = f"<= {MOST_RETRY_SECONDS:g} s"
    return [
        Row(case, "blocks written per second", writes * WRITE_BLOCKS / took, "1/s"),
        Row(case, f"writes refused at first, of {writes:,}", refused / writes, ""),
        Row(case, "until a refused write is taken, longest", longest, "s", None, None, target, longest <= 1.0),
    ]


async def _write_on(site: CapacitySite, end: float, seed: int, retries: list[float]) -> int:
    """Write until then; note how long refused writes took until they were taken. Return the number of writes."""
    count = 0
    for keys in fresh_chains(1 << 40, WRITE_BLOCKS, seed + 1):
        begin = time.monotonic()
        if begin > end:
            break
        count += 1
        is_refused, left = False, keys
        while left:
            written = await site.write("full", left, keys[-len(left) - 1] if len(left) < len(keys) else None)
            left = left[written.blocks :]
            is_refused |= written.is_refused
            await asyncio.sleep(0.01 if written.is_refused else 0)
        if is_refused:
            retries.append(time.monotonic() - begin)
    return count


# ---- all of it ------------------------------------------------------------------------------------------------------


async def _hot_prefix(stores: Sequence[str], plan: Plan) -> list[Row]:
    return await hot_prefix(stores, plan.flood)


async def _order(stores: Sequence[str], plan: Plan) -> list[Row]:
    return await order(stores, plan.order)


CASES: dict[str, Callable[[Sequence[str], Plan], Awaitable[list[Row]]]] = {
    "experiments": experiments,
    "prefix": _hot_prefix,
    "fairness": fairness,
    "order": _order,
    "files": real_files,
    "speed": full_speed,
}


async def run(cases: Sequence[str], stores: Sequence[str], plan: Plan) -> list[Row]:
    """Measure one case after the other."""
    return [row for case in cases for row in await CASES[case](stores, plan)]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--case", choices=[*CASES], action="append", help="only this one")
    parser.add_argument("--store", choices=STORES, action="append", help="only this one")
    options = parser.parse_args()
    plan = QUICK if options.quick else Plan()
    rows = asyncio.run(run(options.case or [*CASES], options.store or STORES, plan))
    is_met = publish("capacity: what eviction takes", rows, options.json)
    return 0 if is_met or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
