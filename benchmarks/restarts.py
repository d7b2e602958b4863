"""Claim: a manager that is stopped finishes its requests, and the next one goes on; no client is left in doubt.

Clients over gRPC and HTTP write and read while managers are stopped with SIGTERM and started again, each time with a
long request in flight. Judged: exit code 0 every time; every request is answered, turned away by a manager that says
that it stops, cancelled by one that closes its port (rare, grpc/grpc#41785), or finds no listener, and nothing else;
clients repeat rejected requests and find all that was confirmed; with two managers on one store clients of the other
one notice nothing. Managers that are stopped at any moment of their start, while metadata is loaded, end with 0 and
harm nothing; a second signal ends one that still drains at once, and harms nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from report import Row, arguments, is_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from redis_servers import standalone
from restart_rounds import RestartReport, restart_under_load, stop_twice, stop_while_loading

PARTS = ("rocksdb", "redis", "loading", "second")
REDIS_TIMEOUT_MS = 20_000


def rows(case: str, report: RestartReport) -> list[Row]:
    """Return the effects of restarts."""
    for text in report.wrong:
        print(f"{case}: {text}", file=sys.stderr)
    wrong, found = len(report.wrong), report.confirmed_blocks
    return [
        Row(case, "violations", wrong, "", target="= 0", ok=wrong == 0),
        Row(case, "requests answered", report.answered, ""),
        Row(case, "requests turned away", report.turned_away, ""),
        Row(case, "requests cancelled", report.cancelled, ""),
        Row(case, "attempts that found nobody listening", report.refused, ""),
        Row(case, "long requests finished after the signal", report.long_requests, ""),
        Row(case, "signals before the manager served", report.loading_stops, ""),
        Row(case, "confirmed blocks found at the end", found, "", target="> 0", ok=found > 0),
        Row(case, "from the signal to the end, median", statistics.median(report.stop_seconds), "s"),
        Row(case, "from the signal to the end, longest", max(report.stop_seconds), "s"),
        Row(case, "longest answer", report.longest_seconds, "s"),
    ]


def measure(parts: Sequence[str], count: int, seed: int, *, is_quick: bool) -> Iterator[Row]:
    """Do the parts that are asked for."""
    blocks = 50_000 if is_quick else 1_000_000
    if "rocksdb" in parts:
        with _directory() as directory:
            yield from rows(f"rocksdb, {count} stops", asyncio.run(restart_under_load(directory, rounds=count)))
    if "redis" in parts:
        with _directory() as directory, standalone(directory / "redis") as server:
            uri = server.uri("restarts", timeout_ms=REDIS_TIMEOUT_MS)
            found = asyncio.run(restart_under_load(directory, uri, managers=2, rounds=count))
            yield from rows(f"redis, two managers, {count} stops", found)
    if "loading" in parts:
        with _directory() as directory:
            found = asyncio.run(stop_while_loading(directory, blocks, count, seed))
            yield from rows(f"rocksdb, {blocks:,} blocks, {count} stops while it starts", found)
    if "second" in parts:
        with _directory() as directory:
            yield from rows(f"rocksdb, {count} second signals", asyncio.run(stop_twice(directory, count)))


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvcm-restarts-") as name:
        yield Path(name)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--stops", type=int, default=0, help="stops of each part (default: 20, 2 with --quick)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of when managers are stopped while they start")
    options = parser.parse_args()
    count = options.stops or (2 if options.quick else 20)
    found = list(measure(options.part or PARTS, count, options.seed, is_quick=options.quick))
    is_met = publish("restarts: managers stopped under load", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
