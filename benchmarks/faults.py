"""Claim: while the store fails, requests end in time, well or with a clear code; afterwards all recovers by itself.

Two managers under light load; the store is killed and restarted, silent, paused, or replaced by a replica. Every
request counts from the moment of the fault. What a failover lost, because replication is asynchronous, is counted.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from report import Row, arguments, is_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from fault_cases import FAULTS, FaultReport, run_fault

MOST_SECONDS = 5.0


def rows(name: str, report: FaultReport) -> list[Row]:
    """Return the figures of one fault."""
    for text in (
        *report.wrong,
        *(f"lost: {text}" for text in report.lost),
        *(f"below: {text}" for text in report.below),
    ):
        print(f"{name}: {text}", file=sys.stderr)  # fmt: skip
    wrong, longest, recovery = len(report.wrong), report.longest_seconds, report.recovery_seconds
    failed = sum(count for outcome, count in report.requests.items() if not outcome.endswith(":OK"))
    most = f"<= {MOST_SECONDS:g} s"
    return [
        Row(name, "violations", wrong, "", target="= 0", ok=wrong == 0),
        Row(name, f"requests with a retryable code, of {sum(report.requests.values())}", failed, ""),
        Row(name, "longest request", longest, "s", target=most, ok=longest <= MOST_SECONDS),
        Row(name, "reads answered while the store was away", report.served_meanwhile, ""),
        Row(name, "recovery after the fault", recovery, "s", target=most, ok=recovery <= MOST_SECONDS),
        Row(name, "shared counters seen below the truth", len(report.below), "", target="= 0", ok=not report.below),
        Row(name, "until usage equals the recount", report.quiet_seconds, "s"),
        Row(name, "confirmed changes that a failover lost", len(report.lost), ""),
    ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--fault", choices=[*FAULTS], action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of what clients do")
    options = parser.parse_args()
    names = options.fault or [*FAULTS][: 3 if options.quick else None]
    found: list[Row] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="kvcm-faults-") as directory:
            found += rows(name, asyncio.run(run_fault(Path(directory), FAULTS[name], options.seed)))
    is_met = publish("faults: the store fails under load", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
