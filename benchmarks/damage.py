"""Claim: a store that lies costs no wrong block and no silent loss, and what can still be read comes back.

Random histories: real managers on a RocksDB or a Redis write, remove and register; then bits are flipped, files cut or
removed, older copies and dumps put back, stores emptied, evicted from or exchanged, disks filled, lagging replicas
promoted; an operator does what the documents say; and a client that knows all acknowledged writes judges. A history is
repeated by its seed: `--seed N --histories 1`. A directory has damage of one to three kinds at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from report import Row, arguments, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))

STORES = ("rocksdb", "redis")
_DISK_MEBIBYTES = 64
_FULL = 0.08  # of the histories fill a disk


def run_history(store: str, seed: int, damage: str = "") -> dict[str, Any]:
    """Run one history in this process; returns its report."""
    from damage_histories import HistoryReport, RocksHistory
    from damaged_files import small_disk
    from damaged_redis import RedisHistory

    logging.getLogger("kvcm").setLevel(logging.CRITICAL)  # failed calls are judged, not printed
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-history-")))
        disk = None
        if damage == "full disk" or (not damage and Random(f"disk {seed}").random() < _FULL):
            disk = stack.enter_context(small_disk(directory / "disk", _DISK_MEBIBYTES))
        report: HistoryReport
        if store == "rocksdb":
            report = RocksHistory(directory, seed, disk).run()
        else:
            report = RedisHistory(directory, seed, "" if disk else damage, disk).run()
    return {"store": store, **asdict(report)}


def _begin_worker(numbers: Any) -> None:
    """Give each process ports of its own, see tests/store/ports.py."""
    with numbers.get_lock():
        os.environ["PYTEST_XDIST_WORKER"] = f"gw{numbers.value}"
        numbers.value += 1


def run_histories(store: str, seeds: Sequence[int], jobs: int, damage: str) -> Iterator[dict[str, Any]]:
    """Run histories, so many at once."""
    context = get_context("spawn")
    numbers = context.Value("i", SystemRandom().randrange(32))  # tests that run beside it have the first of them
    with ProcessPoolExecutor(
        jobs, context, initializer=_begin_worker, initargs=(numbers,), max_tasks_per_child=None
    ) as pool:
        yield from pool.map(run_history, [store] * len(seeds), seeds, [damage] * len(seeds))


def show(report: dict[str, Any]) -> None:
    """Print a history that failed, so that it can be repeated."""
    print(f"{report['store']}, seed {report['seed']}: {report['damage']}", file=sys.stderr)
    for step in report["steps"]:
        print(f"    {step}", file=sys.stderr)
    for violation in report["violations"]:
        print(f"  ✗ {violation['kind']}: {violation['text']}", file=sys.stderr)


def rows(store: str, reports: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Return the figures of one store."""
    case = f"{store}, {len(reports)} histories"
    kinds: Counter[str] = Counter()
    for report in reports:
        kinds.update({violation["kind"] for violation in report["violations"]})
    failed = sum(bool(report["violations"]) for report in reports)
    yield Row(case, "histories with a violation", failed, "", target="= 0", ok=failed == 0)
    for kind, number in sorted(kinds.items()):
        yield Row(case, f"histories: {kind}", number, "", target="= 0", ok=False)
    for name, title in _FIGURES.items():
        yield Row(case, title, sum(int(report[name]) for report in reports), "")
    back = max((float(report["back_seconds"]) for report in reports), default=0.0)
    yield Row(case, "until all that is readable was answered, longest", back, "s")


_FIGURES = {
    "acknowledged": "blocks acknowledged before the damage",
    "readable": "of these known to be undamaged",
    "missing": "of these answered no more",
    "failed_loads": "of these whose bytes were damaged, found by the load",
    "evicted": "blocks evicted on full disks",
}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--histories", type=int, default=0, help="per store (default: 100, 4 with --quick)")
    parser.add_argument("--store", choices=STORES, action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the others follow")
    parser.add_argument("--damage", default="", help="only this one: a name of REDIS_DAMAGES, or 'full disk'")
    parser.add_argument("--jobs", type=int, default=2, help="histories at once")
    parser.add_argument("--reports", type=Path, help="file for the reports of all histories, as JSON")
    options = parser.parse_args()
    number = options.histories or (4 if options.quick else 100)
    seeds = range(options.seed, options.seed + number)
    found: list[Row] = []
    kept: list[dict[str, Any]] = []
    for store in options.store or STORES:
        reports = []
        for report in run_histories(store, seeds, min(options.jobs, number), options.damage):
            reports.append(report)
            failed = sum(bool(each["violations"]) for each in reports)
            print(f"{store}: {len(reports)}/{number} histories, {failed} with violations", file=sys.stderr)
            if report["violations"] or number == 1:
                show(report)
        found += rows(store, reports)
        kept += reports
    if options.reports:
        options.reports.write_text(json.dumps(kept, indent=1, default=str) + "\n")
    return 0 if publish("damage: stores that lie", found, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
