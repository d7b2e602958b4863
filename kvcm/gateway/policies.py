"""Which engine a request goes to. Pure rules: loads and scores in, the name of an engine out.

The trace optimizer predicts with the same rules, so nothing here knows of HTTP, gRPC or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

__all__ = [
    "DEFAULT_LOAD_FACTOR",
    "DEFAULT_PREFIX_CHARACTERS",
    "REGISTRY",
    "ConsistentHash",
    "EngineLoad",
    "LeastLoaded",
    "Policy",
    "Prompt",
    "RoundRobin",
    "ScoreMinusWait",
    "best_engine",
    "expected_wait_seconds",
    "rendezvous_weight",
]

DEFAULT_LOAD_FACTOR: Final = 1.25
"""Of bounded loads."""
DEFAULT_PREFIX_CHARACTERS: Final = 1024
"""Of a prompt that make its affinity where it names no session."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine that may be chosen, as it is at this moment.

    Attributes:
        engine: its name, `host:port`.
        in_flight: requests that it works on.
        tokens_in_flight: tokens of prompts that it still has to compute.
    """

    engine: str
    in_flight: int = 0
    tokens_in_flight: float = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, as far as policies see it.

    Attributes:
        affinity: equal for requests that should go to the same engine: of a session, or with the same beginning.
        scores: seconds that each engine saves against computing the whole prompt; an engine that is missing saves none.
            None where they are unknown.
    """

    affinity: bytes = b""
    scores: Mapping[str, float] | None = None


class Policy(Protocol):
    """Chooses engines."""

    def choose(self, prompt: Prompt, loads: Sequence[EngineLoad]) -> str:
        """Return the name of one of the engines, of which there is at least one."""


class RoundRobin:
    """Chooses the engine whose last turn is longest ago, so that engines may come and go."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, prompt: Prompt, loads: Sequence[EngineLoad]) -> str:
        """Return the next engine."""
        return self.take(min(loads, key=lambda load: self.last_turn(load.engine)).engine)

    def last_turn(self, engine: str) -> int:
        """Return the number of an engine's last turn, 0 for none."""
        return self._turns.get(engine, 0)

    def take(self, engine: str) -> str:
        """Record a turn."""
        self._turn += 1
        self._turns[engine] = self._turn
        return engine


class LeastLoaded:
    """Chooses the engine with the fewest requests in flight; ties go round."""

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def choose(self, prompt: Prompt, loads: Sequence[EngineLoad]) -> str:
        """Return the least loaded engine."""
        least = min(loads, key=lambda load: (load.in_flight, self._ties.last_turn(load.engine)))
        return self._ties.take(least.engine)


class ConsistentHash:
    """Chooses the engine by a hash of the prompt's affinity, by rendezvous hashing: every engine has a weight for every
    affinity, and the heaviest one is chosen. A removed engine's prompts move to others and no other prompt moves; a new
    engine takes its share of all and nothing else changes.

    Rejected: a ring of hashes. It needs a hundred points for each engine to be about even, and gains nothing for a few
    hundred engines.

    Args:
        load_factor: with bounded loads, an engine is passed over while its requests in flight are this many times the
            average, this request included (Mirrokni et al., 2016); 0 for no bound.
    """

    def __init__(self, load_factor: float = 0.0) -> None:
        self._load_factor = load_factor

    def choose(self, prompt: Prompt, loads: Sequence[EngineLoad]) -> str:
        """Return the heaviest engine that is not above the bound."""
        candidates = loads
        if self._load_factor:
            total = sum(load.in_flight for load in loads)
            most = math.ceil(self._load_factor * (total + 1) / len(loads))
            candidates = [load for load in loads if load.in_flight < most]
        assert candidates, "the factor is at least 1, so the least loaded engine is below the bound"
        return max(candidates, key=lambda load: rendezvous_weight(load.engine, prompt.affinity)).engine


def rendezvous_weight(engine: str, affinity: bytes) -> int:
    """Return the weight of an engine for an affinity: 64 bits, even over both."""
    return xxhash.xxh3_64_intdigest(affinity, seed=xxhash.xxh3_64_intdigest(engine.encode()))


class ScoreMinusWait:
    """Chooses by `best_engine`; prompts without scores are left to another policy.

    Args:
        tokens_per_second: that an engine computes.
        fallback: chooses where scores are unknown.
    """

    def __init__(self, tokens_per_second: float, fallback: Policy) -> None:
        self._tokens_per_second = tokens_per_second
        self._fallback = fallback

    def choose(self, prompt: Prompt, loads: Sequence[EngineLoad]) -> str:
        """Return the engine on which the prompt is done first, as far as is known."""
        if prompt.scores is None:
            return self._fallback.choose(prompt, loads)
        return best_engine(loads, prompt.scores, self._tokens_per_second, prompt.affinity)


def best_engine(
    loads: Sequence[EngineLoad], scores: Mapping[str, float], tokens_per_second: float, affinity: bytes = b""
) -> str:
    """Return the engine with the highest value::

        value = score - tokens_in_flight / tokens_per_second

    Both terms are seconds: the score is how much sooner this engine has the prompt's KV than one that computes all of
    it, the other term is how long the engine is busy with prompts that came before. Ties go to the engine with the
    fewest requests in flight, then to the heaviest of the affinity, so that equal prompts meet on an idle fleet.

    Args:
        loads: candidates, at least one.
        scores: seconds saved by engine; an engine that is missing saves none.
        tokens_per_second: that an engine computes, > 0.
        affinity: of the prompt.
    """

    def value(load: EngineLoad) -> tuple[float, int, int]:
        wait = expected_wait_seconds(load.tokens_in_flight, tokens_per_second)
        return scores.get(load.engine, 0.0) - wait, -load.in_flight, rendezvous_weight(load.engine, affinity)

    return max(loads, key=value).engine


def expected_wait_seconds(tokens_in_flight: float, tokens_per_second: float) -> float:
    """Return how long an engine computes before it can begin with another prompt."""
    return tokens_in_flight / tokens_per_second


REGISTRY: Mapping[str, Callable[[float, float], Policy]] = {
    "round_robin": lambda _rate, _factor: RoundRobin(),
    "least_loaded": lambda _rate, _factor: LeastLoaded(),
    "consistent_hash": lambda _rate, factor: ConsistentHash(factor),
    "kvcm": lambda rate, factor: ScoreMinusWait(rate, ConsistentHash(factor)),
}
"""Makes each policy by its name, from `tokens_per_second` and `load_factor`."""
