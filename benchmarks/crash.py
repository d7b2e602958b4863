"""Claim: a manager that is killed at any moment loses nothing that it confirmed, and leaves nothing half done.

Clients start, finish, partly finish, abandon, remove and trim the same few blocks all at once while a manager is
killed, started again and judged, again and again: against the history that the clients kept, the bytes in the files, a
recount of the store and `kvcm index verify`. With two managers on one store the other one has to mend what the dead one
left, without a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

from report import Row, arguments, is_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from crash_rounds import CrashReport, crash, crash_rig
from redis_servers import standalone

AUDIT_EVERY = 10
MANAGERS = {"rocksdb": 1, "redis": 1, "redis, two managers": 2}


def run(store: str, kills: int, seed: int) -> CrashReport:
    """Kill managers over a fresh store so many times."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-crash-")))
        uri = ""
        if store != "rocksdb":
            uri = stack.enter_context(standalone(directory / "redis")).uri("crash")
        rig = stack.enter_context(crash_rig(directory, uri, seed, MANAGERS[store]))
        asyncio.run(crash(rig, kills, AUDIT_EVERY, progress=lambda text: print(f"{store}: {text}", file=sys.stderr)))
    for text in rig.report.wrong:
        print(f"{store}: {text}", file=sys.stderr)
    return rig.report


def rows(store: str, report: CrashReport) -> list[Row]:
    """Return the figures of one store."""
    case = f"{store}, {report.kills} kills"
    wrong = len(report.wrong)
    return [
        Row(case, "violations", wrong, "", target="= 0", ok=wrong == 0),
        Row(case, "confirmed blocks checked after a restart", report.confirmed, ""),
        Row(case, "requests answered", sum(report.requests.values()), ""),
        Row(case, "start of a manager, median", statistics.median(report.restart_seconds), "s"),
        Row(case, "until no session is overdue, longest", max(report.repaired_seconds), "s"),
        Row(case, "until usage equals the recount, longest", max(report.usage_seconds), "s"),
        Row(case, "files without a record at the end", len(report.orphans), ""),
    ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=0, help="kills per store (default: 200, 20 with --quick)")
    parser.add_argument("--store", choices=[*MANAGERS], action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of what clients do and when managers die")
    options = parser.parse_args()
    kills = options.kills or (20 if options.quick else 200)
    found = [
        row
        for store in options.store or MANAGERS
        for row in rows(store, run(store, kills if MANAGERS[store] == 1 else max(5, kills // 5), options.seed))
    ]
    is_met = publish("crash: managers killed under load", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
