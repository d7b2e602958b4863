"""Claim: whatever fails in a cluster, no token is wrong, no acknowledged block is lost, and nothing stays stuck.

Game day. Three managers, a Redis, two storages and four engines run in network name spaces. In an order that follows
from a seed they are killed, frozen, cut off from each other, slowed down; disks fill up, hang, fail and go bad.
Meanwhile engines generate tokens and a prober asks the managers. Outside of the faults and the recovery that is stated
for them, calls are answered.

    make gameday MINUTES=2 SEED=7                # as root
    python benchmarks/gameday.py --minutes 20 --seed 7 --report docs/gameday
    python benchmarks/gameday.py --minutes 2 --seed 7 --plan
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "gameday"))

import game_spaces
from game_plan import made
from report import Row, arguments, left_out, publish

ROOT = Path(__file__).parents[1]
_LEAST_MINUTES, _MOST_MINUTES = 1.0, 24 * 60.0


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, help="how long faults happen (default: 20, 2 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens when")
    parser.add_argument("--plan", action="store_true", help="print what would happen, and end")
    parser.add_argument("--report", type=Path, help="folder to write seed_<seed>.md and .svg to")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gameday", help="folder for logs")
    parser.add_argument("--keep", action="store_true", help="keep logs also when it passes")
    options = parser.parse_args()
    minutes = options.minutes if options.minutes is not None else 2.0 if options.quick else 20.0
    if not _LEAST_MINUTES <= minutes <= _MOST_MINUTES:
        parser.error(f"argument --minutes: {minutes:g}, allowed are {_LEAST_MINUTES:g} to {_MOST_MINUTES:g}")
    from game_network import left_out as lacking
    from game_storages import why_no_fuse

    if options.plan:
        for step in made(options.seed, minutes * 60):
            print(f"{step.number:3d}  {step.at:7.1f} s  {step.kind}: {step.target}, {step.seconds:g} s")
        return 0
    reason = game_spaces.why_not()
    if reason:
        row: Row = left_out("game day", reason, options.quick)
        return 0 if publish("gameday: left out", [row], options.json) else 1
    lacks = lacking() | ({"fuse": why_no_fuse()} if why_no_fuse() else {})
    for capability, why in lacks.items():
        print(f"left out: faults that need {capability}: {why}", file=sys.stderr)
    os.environ["PYTHONPATH"] = str(ROOT)  # every started process imports this tree, not an installed package
    from game_run import GameOptions, play

    files = (options.logs, options.json, options.report)
    game = GameOptions(options.seed, minutes * 60, lacks, *files, options.keep, options.quick)
    return game_spaces.enter(lambda: play(game))


if __name__ == "__main__":
    sys.exit(main())
