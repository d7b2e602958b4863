"""Claim: `kvcm optimize --routing` predicts the hit rates of real engines behind `kvcm gateway`, within a tenth.

The turns that `routing.py` sends become a trace, the replay has the engines and blocks of its recorded run, and the hit
rates of the replay stand beside those that the engines counted. No engine runs here.

Clients send a turn when an answer comes; in a trace turns come at fixed times, four of them in flight: the recorded
mean time of a turn, of which the answer takes four fifths, a guess. Which engine a hash gives depends on the engines'
ports, which were free ones and are not recorded: a prediction is the mean over several. Beside it stand the least and
the greatest of all these ports and of other times.

    python benchmarks/routing_prediction.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
from report import Row, arguments, publish
from routing import (
    ACTIVE,
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    CLIENTS,
    POLICIES,
    TURNS,
    VOCABULARY,
    Conversation,
    conversations,
)

from kvcm.optimizer.pooling import Engines, Routing, Topology, compare_pooling
from kvcm.optimizer.trace import Trace

_RECORDED: Final = Path(__file__).parent / "results" / "routing.json"
_CASE: Final = re.compile(r"(\d+) engines of (\d+) blocks, (\d+) conversations")
_HIT_RATE: Final = "hit rate in engines"
_SEED: Final = 5  # of the conversations of `routing.py`
_TIME: Final = "time of all turns"
_ANSWER_SHARE: Final = 0.8  # of the time in which a turn is in flight; a guess
_OTHER_TIMES: Final = [(factor, share) for factor in (0.5, 1.0, 2.0) for share in (0.0, 0.5, 0.8, 1.0)]
_FLEETS: Final = 20
_TOKENS_PER_SECOND: Final = 10_000.0  # that the gateway assumes
_MOST_OFF: Final = 0.1


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run.

    Attributes:
        engines: how many.
        blocks: of each.
        conversations: how many.
        case: of its rows, without the policy.
        rates: that the engines counted, by policy.
        turn_seconds: from one turn to the next, by policy.
    """

    engines: int
    blocks: int
    conversations: int
    case: str
    rates: Mapping[str, float] = field(default_factory=dict)
    turn_seconds: Mapping[str, float] = field(default_factory=dict)


def recorded() -> Recorded:
    """Return the run of `results/routing.json`."""
    rows = json.loads(_RECORDED.read_text(encoding="utf-8"))["rows"]
    values = {(row["metric"], row["case"]): float(row["value"]) for row in rows}
    case = next(case for metric, case in values if metric == _HIT_RATE).rpartition(", ")[0]
    found = _CASE.match(case)
    assert found, f"{case} is no case of routing.py"
    engines, blocks, count = map(int, found.groups())
    return Recorded(
        engines,
        blocks,
        count,
        case,
        rates={policy: values[_HIT_RATE, f"{case}, {policy}"] for policy in POLICIES},
        turn_seconds={policy: values[_TIME, f"{case}, {policy}"] / (count * TURNS) for policy in POLICIES},
    )


def as_trace(them: Sequence[Conversation], turn_seconds: float) -> Trace:
    """Return the turns of conversations as a trace, one after each `turn_seconds`.

    An engine computes a prompt's last token in any case, so it reads no block with that; and it writes no block with
    the last token of the answer, whose KV nothing needs.
    """
    answers = Random(9)
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    requests: list[tuple[list[int], int, int, int]] = []  # blocks, those that it reads, tokens, session
    histories: dict[int, list[int]] = {each.number: [] for each in them}
    for each, turn in turns(them):
        prompt = histories[each.number] + each.said[turn]
        whole = histories[each.number] = prompt + answers.choices(range(3, VOCABULARY), k=ANSWER_TOKENS)
        blocks = [-1]
        for end in range(BLOCK_TOKENS, len(whole), BLOCK_TOKENS):
            block = (blocks[-1], tuple(whole[end - BLOCK_TOKENS : end]))
            blocks.append(numbers.setdefault(block, len(numbers)))
        session = each.number if each.session else -1
        requests.append((blocks[1:], (len(prompt) - 1) // BLOCK_TOKENS, len(prompt), session))
    chains, reads, tokens, sessions = zip(*requests, strict=True)
    count = len(requests)
    return Trace(
        name="turns",
        block_tokens=BLOCK_TOKENS,
        times_us=(np.arange(count) * (turn_seconds * 1e6)).astype(np.int64),
        input_tokens=np.array(tokens, np.int64),
        output_tokens=np.full(count, ANSWER_TOKENS, np.int64),
        sessions=np.array(sessions, np.int32),
        instances=np.zeros(count, np.int32),
        read_blocks=np.array(reads, np.int32),
        writes=np.ones(count, np.bool_),
        offsets=np.cumsum([0, *map(len, chains)]).astype(np.int64),
        blocks=np.array([block for chain in chains for block in chain], np.int32),
        parents=np.array([parent for parent, _ in numbers], np.int32),
        instance_block_tokens=(BLOCK_TOKENS,),
    )


def turns(them: Sequence[Conversation]) -> Iterator[tuple[Conversation, int]]:
    """Yield turns in the order in which `routing.place` sends them if all take the same time."""
    coming, random = list(reversed(them)), Random(1)
    idle = [(coming.pop(), 0) for _ in range(min(ACTIVE, len(coming)))]
    running: list[tuple[Conversation, int]] = []
    while idle or running:
        if idle and len(running) < CLIENTS:
            running.append(idle.pop(random.randrange(len(idle))))
            yield running[-1]
            continue
        each, turn = running.pop(0)
        if turn + 1 < TURNS:
            idle.append((each, turn + 1))
        elif coming:
            idle.append((coming.pop(), 0))


def predicted(
    run: Recorded, policy: str, *, ports: Sequence[int], factor: float = 1.0, answer_share: float = _ANSWER_SHARE
) -> float:
    """Return the hit rate of a replay.

    Args:
        run: that is predicted.
        policy: of the gateway.
        ports: of its engines.
        factor: times the recorded mean time is from one turn to the next.
        answer_share: of the time in which a turn is in flight.
    """
    turn_seconds = factor * run.turn_seconds[policy]
    engines = Engines(
        run.engines,
        run.blocks,
        _TOKENS_PER_SECOND,
        seconds_per_output_token=answer_share * CLIENTS * turn_seconds / ANSWER_TOKENS,
        given_names=tuple(f"127.0.0.1:{port}" for port in ports),
    )
    trace = as_trace(conversations(run.conversations, _SEED), turn_seconds)
    (row,) = compare_pooling(trace, engines, routing=[Routing(policy)], topologies=[Topology.LOCAL]).rows
    return row.token_hit_rate


def rows_of(run: Recorded) -> Iterator[Row]:
    """Yield predictions beside the rates that engines counted."""
    random = Random(3)
    fleets = [random.sample(range(32_768, 61_000), run.engines) for _ in range(_FLEETS)]
    for policy, measured in run.rates.items():
        rates = [predicted(run, policy, ports=ports) for ports in fleets]
        mean = sum(rates) / len(rates)
        yield Row(
            case=f"{run.case}, {policy}",
            metric="hit rate predicted, against that of the engines",
            value=mean,
            unit="",
            baseline=measured,
            ratio=mean / measured,
            target=f"value / baseline = 1 +- {_MOST_OFF:g}",
            ok=abs(mean / measured - 1) <= _MOST_OFF,
        )
        rates += [
            predicted(run, policy, ports=fleets[0], factor=factor, answer_share=share) for factor, share in _OTHER_TIMES
        ]
        yield Row(f"{run.case}, {policy}", "the least of other ports and times", min(rates), "")
        yield Row(f"{run.case}, {policy}", "the greatest of other ports and times", max(rates), "")


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    met = publish("routing: predicted against measured", list(rows_of(recorded())), options.json)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
