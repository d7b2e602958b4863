"""Claim: calls cost a manager no more CPU time than with the code of another commit.

Both managers run at once, each in a process of its own, and answer the same requests in windows that alternate, so that
other load of the machine affects both alike. A figure is the median over rounds of one manager's CPU time in the
other's.

    git worktree add /tmp/before COMMIT
    python benchmarks/service_against.py --before /tmp/before [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from report import Row, arguments, publish
from service import CONCURRENCIES, Case, Plan, cases
from service_site import Site, site

MOST = 1.03
TRANSPORTS = ("grpc", "http")


def ratio_of(now: Site, before: Site, case: Case, transport: str, concurrency: int, plan: Plan) -> Row:
    """Measure one case on one transport."""
    count = plan.count(case, concurrency)
    sides: list[tuple[Site, list[float]]] = [(now, []), (before, [])]
    for running, _ in sides:
        case.measure(running, transport, 2 * concurrency, concurrency)
    for number in range(plan.rounds):
        for running, costs in sides if number % 2 else reversed(sides):
            costs.append(case.measure(running, transport, count, concurrency).cpu_us)
            if case.blocks:
                running.manager.forget("fresh")
    ratio = statistics.median(ours / theirs for ours, theirs in zip(sides[0][1], sides[1][1], strict=True))
    name = f"{case.name}, {concurrency} client{'s' if concurrency > 1 else ''}, {transport}"
    ours, theirs = (statistics.median(costs) for _, costs in sides)
    return Row(name, "server CPU per unit", ours, "us", theirs, ratio, f"value/before <= {MOST}", ratio <= MOST)


def against(before_code: Path, plan: Plan, only: str) -> list[Row]:
    """Measure every case whose name has `only` in it."""
    with site() as now, site(code=before_code) as before:
        chosen = [case for case in cases(before) if only in case.name]
        cases(now)  # stores the same blocks
        return [
            ratio_of(now, before, case, transport, concurrency, plan)
            for case in chosen
            for concurrency in plan.concurrencies
            for transport in TRANSPORTS
        ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--only", default="", help="cases with this text in their names")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    plan = Plan(1, 0.1, CONCURRENCIES[:2]) if options.quick else Plan(options.rounds, 1.0, CONCURRENCIES)
    rows = against(options.before.resolve(), plan, options.only)
    met = publish("service: calls against those of another commit", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
