"""Claim: a reader gets the bytes that were written, wherever in a save a writer is killed or stopped.

Writers save blocks, session after session, and are killed at random points; a reader then loads every
block that the manager serves of them and compares every byte. Others are stopped until their session expired and
another writer wrote the blocks; the bytes that they write when they come back are never served.

As many are killed and stopped as were asked for, and every step of a save is hit; a few kills (--quick) cannot hit all.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from report import Row, arguments, left_out, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from writer_kill_kinds import KINDS, impossible, kill_writers
from writer_kills import POINTS, KillReport

KILLS, QUICK_KILLS = 200, 5
KILLS_PER_STOP = 20
OUTSIDE = POINTS[0]  # no session is open; all other points must be hit


def kills(kinds: Sequence[str], count: int, seed: int, is_quick: bool) -> Iterator[Row]:
    """Kill so many writers on each kind of storage; kinds that this machine cannot have are left out, which is said."""
    for kind in kinds:
        reason = impossible(kind)
        if reason:
            yield left_out(kind, reason, is_quick)
            continue
        with tempfile.TemporaryDirectory(prefix="kvcm-writers-") as directory:
            report = kill_writers(kind, Path(directory), count, stops_of(count), seed)
        yield from kill_rows(kind, report, count, is_quick)


def stops_of(count: int) -> int:
    """Return how many writers are stopped when so many are killed."""
    return max(1, count // KILLS_PER_STOP)


def kill_rows(case: str, report: KillReport, count: int, is_quick: bool) -> list[Row]:
    """Return the effects of the kills.

    Args:
        case: kind of storage.
        report: of the run.
        count: writers that were to be killed.
        is_quick: too few to hit every point of a save.
    """
    for text in report.wrong[:20]:
        print(f"{case}: {text}", file=sys.stderr)
    return [
        _equal(case, "writers killed", report.kills, count),
        *(_point(case, point, report.points.get(point, 0), is_quick or point == OUTSIDE) for point in POINTS),
        _equal(case, "writers that came back after their session", report.comebacks, stops_of(count)),
        _some(case, "blocks served and compared", report.served_blocks),
        _equal(case, "parts with other bytes", report.differing_parts, 0),
        _equal(case, "parts served of late writers", report.late_parts, 0),
        _equal(case, "violations", len(report.wrong), 0),
    ]


def _point(case: str, point: str, count: int, may_be_none: bool) -> Row:
    metric = f"kills that hit: {point}"
    return Row(case, metric, count, "") if may_be_none else _some(case, metric, count)


def _some(case: str, metric: str, count: int) -> Row:
    return Row(case, metric, count, "", target="> 0", ok=count > 0)


def _equal(case: str, metric: str, count: int, wanted: int) -> Row:
    return Row(case, metric, count, "", target=f"= {wanted}", ok=count == wanted)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--smoke", dest="quick", action="store_true", help="the same as --quick")
    default = f"kills per kind of storage (default: {KILLS}, {QUICK_KILLS} with --quick)"
    parser.add_argument("--kills", type=int, default=0, help=default)
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of where writers end")
    options = parser.parse_args()
    count = options.kills or (QUICK_KILLS if options.quick else KILLS)
    found = list(kills(options.kind or list(KINDS), count, options.seed, options.quick))
    return 0 if publish("killed_writers: writers are killed and stopped while they save", found, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
