"""Claim: reclaiming survives kills, storages that fail or hang, neighbours in its directory and a change of leaders.

One: managers are killed while they evict and delete real files, started again and judged by what clients know, by the
files, by a recount of the store and by `kvcm index verify`. Two: a storage that cannot delete, and one that hangs, hold
up no other and are caught up with when they return. Three: two deployments on one directory evict and scrub while both
write. Four: the leader of two managers dies in the middle of an eviction, which the other ends without taking more.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from report import Row, arguments, is_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from crash_rounds import crash
from failing_storages import OUTAGES, OutageReport, run_outage
from reclaim_handover import Takeover, take_over
from reclaim_rounds import EvictionReport, eviction_rig
from redis_servers import standalone
from shared_directory import SharedReport, share_directory

AUDIT_EVERY = 10
STORES = {"rocksdb, fsync always": "always", "rocksdb, fsync everysec": "everysec", "redis": ""}
LEAST_RATE = 0.5
MOST_DRAIN_SECONDS = 70.0  # the longest pause between attempts is 60 s
MOST_TAKEOVER_SECONDS = 10.0  # a lease of 2 s, and the rest of the eviction in steps


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvcm-reclaim-") as name:
        yield Path(name)


def _reported(case: str, texts: Iterable[str]) -> Row:
    wrong = list(texts)
    for text in wrong:
        print(f"{case}: {text}", file=sys.stderr)
    return Row(case, "violations", len(wrong), "", target="= 0", ok=not wrong)


# ── kills ──


def kills(store: str, count: int, seed: int) -> list[Row]:
    """Kill a manager over a fresh store so many times."""
    with contextlib.ExitStack() as stack:
        directory, uri = stack.enter_context(_directory()), ""
        if not STORES[store]:
            uri = stack.enter_context(standalone(directory / "redis")).uri("reclaim")
        rig = stack.enter_context(eviction_rig(directory, uri, seed, STORES[store] or "always"))
        asyncio.run(crash(rig, count, AUDIT_EVERY, lambda text: print(f"{store}: {text}", file=sys.stderr)))
    return kill_rows(f"{store}, {count} kills", rig.report)


def kill_rows(case: str, report: EvictionReport) -> list[Row]:
    """Return the effects of the kills."""
    return [
        _reported(case, report.wrong),
        Row(case, "kills that left deletions to do", report.left_deleting, ""),
        Row(case, "served blocks whose bytes were compared", report.checked_blocks, ""),
        Row(case, "requests answered", report.requests, ""),
        Row(case, "until nothing was deleting after a restart, longest", max(report.quiet_seconds), "s"),
        Row(case, "from a mark to the low mark, median", statistics.median(report.low_mark_seconds), "s"),
        Row(case, "from a mark to the low mark, longest", max(report.low_mark_seconds), "s"),
        Row(case, "files without a record, of sessions cut off", len(report.cut_off), ""),
    ]


# ── storages ──


def outages(seconds: dict[str, float], *, is_timed: bool) -> list[Row]:
    """Let a storage fail, and one hang."""
    rows: list[Row] = []
    for name in OUTAGES:
        with _directory() as directory:
            case = f"{name} for {seconds[name]:g} s, another storage beside it"
            rows += outage_rows(case, asyncio.run(run_outage(directory, name, seconds[name])), is_timed=is_timed)
    return rows


def outage_rows(case: str, report: OutageReport, *, is_timed: bool) -> list[Row]:
    """Return the effects of an outage."""
    ratio, drain = report.meanwhile / report.before, report.drain_seconds
    target, ok = (f"value/baseline >= {LEAST_RATE:g}", ratio >= LEAST_RATE) if is_timed else ("", None)
    most = f"<= {MOST_DRAIN_SECONDS:g} s"
    return [
        _reported(case, report.wrong),
        Row(case, "deletions of the other meanwhile", report.meanwhile, "1/s", report.before, ratio, target, ok),
        Row(case, "most pending deletes in the metric", report.backlog, "", target="> 0", ok=report.backlog > 0),
        Row(case, "failures in the metric", report.failures, ""),
        Row(case, "until nothing waits after the return", drain, "s", target=most, ok=drain <= MOST_DRAIN_SECONDS),
    ]


# ── two deployments ──


def shared(seconds: float, seed: int) -> list[Row]:
    """Let two deployments work in one directory."""
    with _directory() as directory:
        return shared_rows("two deployments, one directory", asyncio.run(share_directory(directory, seconds, seed)))


def shared_rows(case: str, report: SharedReport) -> list[Row]:
    """Return the state of the directory."""
    own, other, dead = report.own_orphans, report.other_orphans, report.dead_orphans
    return [
        _reported(case, report.wrong),
        Row(case, "served blocks whose bytes were compared", report.checked_blocks, ""),
        Row(case, "scrubs under load", report.scrubs, ""),
        Row(case, "planted files found by their own deployment", own, "", target="= 48", ok=own == 48),
        Row(case, "planted files taken by another deployment", other, "", target="= 0", ok=other == 0),
        Row(case, "files of a dead deployment, by its cluster id", dead, "", target="= 12", ok=dead == 12),
    ]


# ── two managers ──


def takeovers(rounds: int, seed: int) -> list[Row]:
    """Kill the leader in the middle of evictions."""
    with _directory() as directory, standalone(directory / "redis") as server:
        found = asyncio.run(take_over(directory, server.uri("reclaim"), rounds, seed))
    return takeover_rows(f"redis, two managers, leader killed {rounds} times", found)


def takeover_rows(case: str, found: Sequence[Takeover]) -> list[Row]:
    """Return the effects of the deaths of leaders."""
    beyond, seconds = max(each.beyond_blocks for each in found), max(each.seconds for each in found)
    left, quiet = min(each.left_blocks for each in found), max(each.quiet_seconds for each in found)
    most = f"<= {MOST_TAKEOVER_SECONDS:g} s"
    return [
        _reported(case, (text for each in found for text in each.wrong)),
        Row(case, "blocks still to be evicted at the kill, least", left, ""),
        Row(case, "blocks evicted too many, most", beyond, "", target="<= 201", ok=beyond <= 201),
        Row(case, "from the kill to the mark", seconds, "s", target=most, ok=seconds <= MOST_TAKEOVER_SECONDS),
        Row(case, "until usage equals the recount, longest", quiet, "s"),
    ]


PARTS = ("kills", "storages", "deployments", "leaders")


def measure(parts: Sequence[str], count: int, seed: int, *, is_quick: bool) -> Iterator[Row]:
    """Do the parts that are asked for."""
    if "kills" in parts:
        for store in STORES:
            yield from kills(store, count, seed)
    if "storages" in parts:
        # A hanging deletion counts as failed after 30 s.
        seconds = dict.fromkeys(OUTAGES, 2.0) if is_quick else {"deletes fail": 6.0, "deletes hang": 33.0}
        yield from outages(seconds, is_timed=not is_quick)
    if "deployments" in parts:
        yield from shared(3.0 if is_quick else 20.0, seed)
    if "leaders" in parts:
        yield from takeovers(1 if is_quick else 5, seed)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=0, help="kills per store (default: 50, 5 with --quick)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of what clients do and when managers die")
    options = parser.parse_args()
    count = options.kills or (5 if options.quick else 50)
    found = list(measure(options.part or PARTS, count, options.seed, is_quick=options.quick))
    is_met = publish("reclaim_faults: eviction and deletion under faults", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
