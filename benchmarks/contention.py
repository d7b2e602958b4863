"""Claim: three managers on one store never hand out a block twice, lose an update, exceed a quota or serve the past.

Clients of all three work on the same few blocks; the history that they keep is checked afterwards, every single read
included. Then writes and removals through one manager are timed until the others show them, and managers that lead are
killed: duties move within one lease and a second, and the others go on answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from report import Row, arguments, is_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from contended import ContendedReport, Handover, contend, contended_rig, hand_over, visibility
from redis_servers import cluster, standalone

STORES = {"redis": standalone, "cluster of 3": cluster}
MOST_STALE_SECONDS = 0.1
MOST_HANDOVER_SECONDS = 3.0  # one lease of 2 s, and 1 s


def run(store: str, operations: int, rounds: int, deaths: int, seed: int) -> list[Row]:
    """Measure on a fresh store."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-contention-")))
        uri = stack.enter_context(STORES[store](directory / "redis")).uri("contention")
        rig = stack.enter_context(contended_rig(directory, uri, seed))

        async def measure() -> list[Row]:
            found = contended_rows(store, await contend(rig, operations))
            found += visibility_rows(store, *await visibility(rig, rounds))
            return found + handover_rows(store, [await hand_over(rig) for _ in range(deaths)])

        return asyncio.run(measure())


def contended_rows(store: str, report: ContendedReport) -> list[Row]:
    """Return the rows of the history."""
    for text in report.wrong:
        print(f"{store}: {text}", file=sys.stderr)
    case = f"{store}, {report.operations:,} block operations"
    reads, wrong = report.reads, len(report.wrong)
    stale = [*reads.removed_but_read, *reads.written_but_missed]
    model, stored, quota = report.most_bytes["tight"]
    group, limit = "most bytes of the tight group", "value/quota <= 1"
    return [
        Row(case, "violations", wrong, "", target="= 0", ok=wrong == 0),
        Row(case, "block operations per second", report.operations / report.seconds, "1/s"),
        Row(case, "blocks read and checked", reads.entries, ""),
        Row(case, "stale answers", len(stale), ""),
        _bounded(case, "oldest stale answer", max(stale, default=0.0), MOST_STALE_SECONDS),
        Row(case, f"{group}, by the store", stored, "B", quota, stored / quota, limit, stored <= quota),
        Row(case, f"{group}, by the model", model, "B", quota, model / quota, limit, model <= quota),
        Row(case, "until usage equals the recount", report.quiet_seconds, "s"),
    ]


def visibility_rows(store: str, written: Sequence[float], removed: Sequence[float]) -> list[Row]:
    """Return how long other managers show the past."""
    case = f"{store}, {len(written)} writes and removals seen from other managers"
    rows = []
    for what, seconds in (("write", written), ("removal", removed)):
        ordered = sorted(seconds)
        rows.append(Row(case, f"{what} not seen for, p99", ordered[int(0.99 * (len(ordered) - 1))], "s"))
        rows.append(_bounded(case, f"{what} not seen for, longest", ordered[-1], MOST_STALE_SECONDS))
    return rows


def handover_rows(store: str, handovers: Sequence[Handover]) -> list[Row]:
    """Return the effects of the deaths of leaders."""
    case = f"{store}, leader killed {len(handovers)} times"
    failed = _reported(store, (str(sent) for each in handovers for sent in each.failed))
    wrong = _reported(store, (text for each in handovers for text in each.wrong))
    asked = sum(each.requests for each in handovers)
    return [
        _bounded(case, "first deletion by another", max(h.deletion_seconds for h in handovers), MOST_HANDOVER_SECONDS),
        _bounded(case, "first expiry by another", max(h.expiry_seconds for h in handovers), MOST_HANDOVER_SECONDS),
        Row(case, f"failed requests to the others, of {asked}", failed, "", target="= 0", ok=failed == 0),
        Row(case, "longest request to the others", max(h.longest_seconds for h in handovers), "s"),
        Row(case, "defects in logs", wrong, "", target="= 0", ok=wrong == 0),
    ]


def _bounded(case: str, metric: str, seconds: float, most: float) -> Row:
    return Row(case, metric, seconds, "s", target=f"<= {most:g} s", ok=seconds <= most)


def _reported(store: str, texts: Iterable[str]) -> int:
    count = 0
    for count, text in enumerate(texts, 1):  # noqa: B007 - the last number is the count
        print(f"{store}: {text}", file=sys.stderr)
    return count


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ops", type=int, default=0, help="block operations (default: 300,000, 5,000 with --quick)")
    parser.add_argument("--store", choices=[*STORES], action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="of what clients do")
    options = parser.parse_args()
    operations = options.ops or (5_000 if options.quick else 300_000)
    rounds, deaths = (20, 1) if options.quick else (500, 10)
    found = [row for store in options.store or STORES for row in run(store, operations, rounds, deaths, options.seed)]
    is_met = publish("contention: three managers on one store", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
