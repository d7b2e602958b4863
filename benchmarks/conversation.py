"""Claim: conversations go on in an engine that has just started as if it had always been there.

Eight sessions talk in turns, each with a system prompt that all share; every turn is answered by a vLLM engine that was
started for it, so its own prefix cache is cold. Once with the connector and once without, turn by turn, on the same
prompts: answers must be the same.

    python benchmarks/conversation.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from engine_site import EngineSite, engine_site
from report import Row, arguments, publish

LEAST_TOKENS_SAVED = 0.8
LEAST_TIME_SAVED = 0.5
_SYSTEM_TOKENS = 512
_USER_TOKENS = 96
_ANSWER_TOKENS = 32
_COMPUTED = 'vllm:prompt_tokens_by_source{source="local_compute"}'


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of all sessions in one engine.

    Attributes:
        prompt_tokens: of all sessions.
        computed_tokens: of these, those that the engine computed.
        first_token_seconds: of each session.
        answers: of each session.
    """

    prompt_tokens: int
    computed_tokens: int
    first_token_seconds: list[float]
    answers: list[list[int]]


def take_turn(site: EngineSite, prompts: list[list[int]], instance_id: str | None) -> Turn:
    """Start an engine, let it answer all sessions, and end it."""
    engine = site.engine(instance_id, max_model_len=4096, max_num_batched_tokens=2048, num_gpu_blocks_override=1200)
    try:
        engine.generate([[1, 2, 3]], 2)  # the set-up of the first request is not part of any turn
        before = _computed(engine.ask("metrics"))
        answers = engine.ask("timed", prompts=prompts, max_tokens=_ANSWER_TOKENS, seconds=600)
        computed = _computed(engine.ask("metrics")) - before
        engine.ask("settle")
    finally:
        engine.close()
    return Turn(
        sum(map(len, prompts)),
        computed,
        [answer["first_token_seconds"] for answer in answers],
        [answer["tokens"] for answer in answers],
    )


def _computed(metrics: dict[str, Any]) -> int:
    return int(metrics[_COMPUTED])


def converse(site: EngineSite, turns: int, sessions: int) -> list[tuple[Turn, Turn]]:
    """Return each turn, with and without the connector."""
    random = Random(7)
    words = partial(random.choices, range(3, 1000))
    system = words(k=_SYSTEM_TOKENS)
    prompts = [list(system) for _ in range(sessions)]
    taken = []
    for number in range(turns):
        prompts = [prompt + words(k=_USER_TOKENS) for prompt in prompts]
        order = (None, "conversation") if number % 2 else ("conversation", None)
        by_side = {instance: take_turn(site, prompts, instance) for instance in order}
        taken.append((by_side["conversation"], by_side[None]))
        prompts = [prompt + answer for prompt, answer in zip(prompts, by_side[None].answers, strict=True)]
        _say(number + 1, *taken[-1])
    return taken


def _say(number: int, reused: Turn, alone: Turn) -> None:
    seconds, before = (statistics.median(turn.first_token_seconds) for turn in (reused, alone))
    computed = f"{reused.computed_tokens:,} of {alone.prompt_tokens:,} tokens computed, {alone.computed_tokens:,} alone"
    print(f"turn {number}: {computed}; first token {seconds:.2f} s, {before:.2f} s alone", file=sys.stderr)


def rows_of(taken: list[tuple[Turn, Turn]]) -> list[Row]:
    """Return a row per turn and metric, and those that have a target."""
    rows = []
    for number, (reused, alone) in enumerate(taken, 1):
        case = f"turn {number}: {alone.prompt_tokens:,} prompt tokens"
        computed, baseline = reused.computed_tokens, alone.computed_tokens
        rows.append(Row(case, "prompt tokens computed", computed, "", baseline, computed / baseline))
        seconds, before = (statistics.median(turn.first_token_seconds) for turn in (reused, alone))
        rows.append(Row(case, "median time to first token", seconds, "s", before, seconds / before))
    return [*rows, *_totals(taken)]


def _totals(taken: list[tuple[Turn, Turn]]) -> list[Row]:
    computed = sum(reused.computed_tokens for reused, _ in taken)
    alone = sum(alone.computed_tokens for _, alone in taken)
    first = statistics.median(seconds for reused, _ in taken for seconds in reused.first_token_seconds)
    before = statistics.median(seconds for _, alone in taken for seconds in alone.first_token_seconds)
    different = sum(
        one != other for reused, alone in taken for one, other in zip(reused.answers, alone.answers, strict=True)
    )
    answers = sum(len(alone.answers) for _, alone in taken)
    return [
        _saved_row("prompt tokens computed", computed, "", alone, LEAST_TOKENS_SAVED),
        _saved_row("median time to first token", first, "s", before, LEAST_TIME_SAVED),
        Row("all turns", f"answers that differ, of {answers}", different, "", target="0", ok=different == 0),
    ]


def _saved_row(metric: str, value: float, unit: str, baseline: float, least_saved: float) -> Row:
    most = 1 - least_saved
    return Row("all turns", metric, value, unit, baseline, value / baseline, f"<= {most:.2f}", value / baseline <= most)


def main() -> int:
    from tiny_models import write_large_llama

    options = arguments(__doc__ or "").parse_args()
    turns, sessions, hidden = (2, 4, 256) if options.quick else (12, 8, 768)
    with engine_site(partial(write_large_llama, hidden=hidden)) as site:
        taken = converse(site, turns, sessions)
    is_sound = publish("conversation: an engine restarted before every turn", rows_of(taken), options.json)
    differ = any(reused.answers != alone.answers for reused, alone in taken)
    return int(differ or not (is_sound or options.quick))


if __name__ == "__main__":
    raise SystemExit(main())
