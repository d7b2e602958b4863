"""Claim: a storage that goes away costs hits on its own blocks while it is away, and they come back with it.

Two storages, one manager, engines that read and write all the time and check every byte, and one that generates tokens:
each a process of its own, none is started again. One of the storages goes away in the middle (a mount whose server is
killed, a mount that hangs, a Mooncake store whose master and owner are killed) and comes back.

That they came back is judged by blocks that lie on that storage alone: blocks written again elsewhere in the meantime
would be hit without it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from report import Row, arguments, is_sound, left_out, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from engine_figures import AWAY, STAYS, EngineFigures
from outage_run import OutageReport, run_outage
from outage_storages import OUTAGES, impossible

MOST_DOWN_SECONDS = 5.0  # three probes that fail or are late after 1 s, one every 0.2 s
MOST_UP_SECONDS = 5.0
MOST_SETTLED_SECONDS = 10.0  # engines leave a storage alone for 1 s, and twice as long whenever it fails again
MOST_OVERRUN_SECONDS = 0.5
LEAST_RETURNED_PERCENT = 99.0
_Count = Callable[[EngineFigures], float]


def outages(names: Sequence[str], seconds: float, engines: int, seed: int, is_quick: bool) -> Iterator[Row]:
    """Let storages go away; those that this machine cannot have are left out, and said to be."""
    for name in names:
        reason = impossible(name)
        if reason:
            yield left_out(name, reason, is_quick)
            continue
        with tempfile.TemporaryDirectory(prefix="kvcm-outage-") as directory:
            yield from outage_rows(name, run_outage(Path(directory), name, seconds, engines, seed))


def outage_rows(case: str, report: OutageReport) -> list[Row]:
    """Return the effects of an outage."""
    return [
        *_promise_rows(case, report),
        *_hit_rows(case, report),
        *_write_rows(case, report),
        *_time_rows(case, report),
        *_token_rows(case, report),
    ]


def _promise_rows(case: str, report: OutageReport) -> Iterator[Row]:
    phases = report.engines.values()
    overrun = max(seen.overrun_seconds for seen in phases)
    yield Row(case, "requests to the manager", _sum(report, lambda seen: seen.requests), "")
    yield _none(case, "requests that failed", (text for seen in phases for text in seen.failed_requests))
    yield _none(case, "failures of engines that are no misses", (text for seen in phases for text in seen.errors))
    yield _none(case, "blocks with other bytes", (text for seen in phases for text in seen.wrong))
    yield _none(case, "other violations", report.wrong)
    yield _most(case, "held beyond a deadline, longest", overrun, MOST_OVERRUN_SECONDS)
    yield Row(case, "slowest request to the manager", max(seen.slowest_request_seconds for seen in phases), "s")
    yield Row(case, "blocks loaded and compared", _sum(report, lambda seen: sum(seen.served.values())), "")


def _hit_rows(case: str, report: OutageReport) -> Iterator[Row]:
    phases, down = report.engines, report.engines["down"]
    others = _percent(
        _sum(report, lambda seen: seen.hit.get(STAYS, 0)), _sum(report, lambda seen: seen.asked.get(STAYS, 0))
    )
    yield _equal(case, "hits of blocks on the other storage, all phases", others, 100.0, "%")
    for phase in ("before", "unnoticed", "down", "after"):
        yield Row(case, f"hits of all blocks, {phase}", _all_hits(phases[phase]), "%")
    yield _equal(case, "hits of blocks on that storage alone, before", _hits_there(phases["before"]), 100.0, "%")
    yield Row(case, "hits of blocks on that storage alone, unnoticed", _hits_there(phases["unnoticed"]), "%")
    yield _equal(case, "blocks served from the storage while down", down.served.get(AWAY, 0), 0, "")
    for phase in ("after", "audit"):
        asked = phases[phase].asked.get(AWAY, 0)
        yield Row(case, f"blocks on that storage alone, {phase}", asked, "", target="> 0", ok=asked > 0)
    if report.keeps_bytes:
        yield _least(case, "hits of blocks on that storage alone, after", _hits_there(phases["after"]))
        yield _least(case, "blocks that survived on it alone and are hit at the end", _hits_there(phases["audit"]))
        lost = _sum(report, lambda seen: seen.lost_parts)
        yield _equal(case, "parts that an engine took for lost", lost, 0, "")
    else:
        yield Row(case, "hits of blocks lost with it, some written again, after", _hits_there(phases["after"]), "%")
        yield _least(case, "blocks hit at the end, all written again there", _hits_there(phases["audit"]))


def _write_rows(case: str, report: OutageReport) -> Iterator[Row]:
    unnoticed, down = report.engines["unnoticed"], report.engines["down"]
    yield Row(case, "blocks not stored before it was noticed", unnoticed.offered - _accepted(unnoticed), "")
    yield Row(case, "blocks stored while down", _accepted(down), "", target="> 0", ok=_accepted(down) > 0)
    on_other = _percent(down.accepted.get(STAYS, 0), down.offered)
    yield _equal(case, "of those offered while down, stored on the other", on_other, 100.0, "%")


def _time_rows(case: str, report: OutageReport) -> Iterator[Row]:
    yield _most(case, "until the manager shows it as down", report.down_seconds, MOST_DOWN_SECONDS)
    yield _most(case, "until the manager shows it as up", report.up_seconds, MOST_UP_SECONDS)
    yield _most(case, "from up until all engines read and write there", report.settled_seconds, MOST_SETTLED_SECONDS)


def _token_rows(case: str, report: OutageReport) -> Iterator[Row]:
    phases = report.tokens
    yield Row(case, "prompts answered", sum(seen.generations for seen in phases.values()), "")
    yield _none(case, "prompts with other tokens", (text for seen in phases.values() for text in seen.wrong))
    yield _none(case, "exceptions of generate", (text for seen in phases.values() for text in seen.errors))
    for phase in ("before", "down", "after"):
        seen = phases[phase]
        yield Row(case, f"tokens loaded per prompt, {phase}", seen.loaded_tokens / max(1, seen.generations), "")
    yield Row(case, "slowest prompt", max(seen.slowest_seconds for seen in phases.values()), "s")


def _sum(report: OutageReport, count: _Count) -> float:
    return sum(map(count, report.engines.values()))


def _accepted(seen: EngineFigures) -> int:
    return sum(seen.accepted.values())


def _all_hits(seen: EngineFigures) -> float:
    return _percent(sum(seen.hit.values()), sum(seen.asked.values()))


def _hits_there(seen: EngineFigures) -> float:
    """Return the percentage of hits among blocks that lie on no other storage than the one that goes away."""
    return _percent(seen.hit.get(AWAY, 0), seen.asked.get(AWAY, 0))


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def _none(case: str, metric: str, texts: Iterable[str]) -> Row:
    found = list(texts)
    for text in found[:20]:
        print(f"{case}: {metric}: {text}", file=sys.stderr)
    return _equal(case, metric, len(found), 0, "")


def _equal(case: str, metric: str, value: float, wanted: float, unit: str) -> Row:
    return Row(case, metric, value, unit, target=f"= {wanted:g}", ok=value == wanted)


def _least(case: str, metric: str, percent: float) -> Row:
    return Row(
        case, metric, percent, "%", target=f">= {LEAST_RETURNED_PERCENT:g} %", ok=percent >= LEAST_RETURNED_PERCENT
    )


def _most(case: str, metric: str, seconds: float, most: float) -> Row:
    return Row(case, metric, seconds, "s", target=f"<= {most:g} s", ok=seconds <= most)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--smoke", dest="quick", action="store_true", help="the same as --quick")
    parser.add_argument("--outage", choices=list(OUTAGES), action="append", help="only this one")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the phases before, down and after, each")
    parser.add_argument("--seed", type=int, default=1, help="of what engines read")
    options = parser.parse_args()
    seconds, engines = options.seconds or (1.0 if options.quick else 20.0), 2 if options.quick else 3
    found = list(outages(options.outage or list(OUTAGES), seconds, engines, options.seed, options.quick))
    is_met = publish("storage_outage: a storage goes away while engines work", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
