"""Claim: no engine is given another host's memory, or other bytes than were written, whatever happens to hosts.

A manager, two hosts with a memory pool each and an engine that names no host, in network namespaces, mounts and shared
memory of their own. Engines read and write the same and other blocks, more than the pools keep, and compare every byte,
while a cable is cut, a pool's memory is deleted, a host is booted, and the manager is killed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from report import Row, arguments, is_sound, left_out, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from engine_figures import SHARED, pool_of
from host_networks import why_no_hosts
from host_run import PHASES, HostsReport, run_hosts
from host_site import HOSTLESS, HOSTS

TITLE = "hosts: no engine gets memory of another host"
MOST_NOTICED_SECONDS = 10.0  # with reports every 0.8 s that hold for 2.4 s, and probes every 0.2 s
MOST_OVERRUN_SECONDS = 0.5
_CUT_OFF = {"a": {"cut", "mended", "killed"}, "b": {"killed"}, HOSTLESS: {"killed"}}
_CASE = "two hosts with pools, one without"


def rows(report: HostsReport) -> Iterator[Row]:
    """Return the rows of a run."""
    seen = report.all()
    yield Row(_CASE, "lookups", seen.lookups, "")
    yield Row(_CASE, "addresses in their answers", seen.places, "")
    yield Row(_CASE, "blocks evicted from pools", report.evicted, "")
    yield _none("addresses in another host's memory", seen.foreign)
    yield Row(_CASE, "blocks loaded and compared", sum(seen.served.values()), "")
    yield _none("parts with wrong bytes", seen.wrong)
    yield _none("failures that no fault explains", seen.errors)
    yield _none("steps with another outcome than the right one", report.wrong)
    yield _none("failed requests of whom the manager could be reached by", _failed(report, is_cut_off=False))
    yield Row(_CASE, "failed requests of whom it could not be reached by", len(list(_failed(report, True))), "")
    yield _most("held beyond a deadline, longest", seen.overrun_seconds, MOST_OVERRUN_SECONDS)
    yield from _storage_rows(report)
    for what, seconds in report.seconds.items():
        yield _most(what, seconds, MOST_NOTICED_SECONDS)


def _storage_rows(report: HostsReport) -> Iterator[Row]:
    for name in report.engines:
        seen = report.all(name)
        for storage in (SHARED, *map(pool_of, HOSTS)):
            yield Row(f"engine {name}", f"blocks from {storage}", seen.served.get(storage, 0), "")
        yield Row(f"engine {name}", "parts that were lost with memory", seen.lost_parts, "")
        unmoved = report.of(name, *PHASES[-2:]).unmoved
        yield _none("parts promised at the end that are not there", unmoved, f"engine {name}")


def _failed(report: HostsReport, is_cut_off: bool) -> Iterator[str]:
    for name, phases in report.engines.items():
        for phase, seen in phases.items():
            if (phase in _CUT_OFF[name]) is is_cut_off:
                yield from (f"{name}, {phase}: {text}" for text in seen.failed_requests)


def _none(metric: str, texts: Iterable[str], case: str = _CASE) -> Row:
    found = list(texts)
    for text in found[:20]:
        print(f"{metric}: {text}", file=sys.stderr)
    return Row(case, metric, len(found), "", target="= 0", ok=not found)


def _most(metric: str, seconds: float, most: float) -> Row:
    return Row(_CASE, metric, seconds, "s", target=f"<= {most:g} s", ok=seconds <= most)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--smoke", dest="quick", action="store_true", help="the same as --quick")
    parser.add_argument("--seconds", type=float, default=0.0, help="of each phase under load")
    parser.add_argument("--seed", type=int, default=1, help="of what engines do")
    options = parser.parse_args()
    reason = why_no_hosts()
    if reason:
        return 0 if publish(TITLE, [left_out(_CASE, reason, options.quick)], options.json) else 1
    seconds = options.seconds or (1.0 if options.quick else 20.0)
    with tempfile.TemporaryDirectory(prefix="kvcm-hosts-") as directory:
        found = list(rows(run_hosts(Path(directory), seconds, options.seed)))
    is_met = publish(TITLE, found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
