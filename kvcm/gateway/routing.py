"""From a request to an engine: its tokens (from an engine), its scores (from the manager), the policy's choice.

What takes time comes first (`study`); the choice itself (`choose`) does not wait, so that loads do not change between
the look at them and the request that is added to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from kvcm.gateway.engine_client import EngineClient
from kvcm.gateway.engines import Engine, Flight
from kvcm.gateway.metrics import GatewayMetrics
from kvcm.gateway.openai_api import RequestFacts, tokenize_request
from kvcm.gateway.policies import Policy, Prompt, expected_wait_seconds
from kvcm.gateway.scoring import EngineScore, ScoreClient, ScoreError

__all__ = ["Choice", "Router", "Studied"]

_log = structlog.get_logger("kvcm.gateway")
_NO_SCORE: Final = EngineScore()


@dataclass(frozen=True, slots=True)
class Studied:
    """A request with all that its choice needs.

    Attributes:
        facts: of the request.
        tokens: of the prompt; estimated where no engine said them.
        scores: by engine, None where they are unknown.
    """

    facts: RequestFacts
    tokens: int
    scores: Mapping[str, EngineScore] | None = field(default=None, repr=False)

    @property
    def prompt(self) -> Prompt:
        """What policies see."""
        if self.scores is None:
            return Prompt(self.facts.affinity)
        return Prompt(self.facts.affinity, {name: each.seconds_saved for name, each in self.scores.items()})


@dataclass(frozen=True, slots=True)
class Choice:
    """A request on its engine.

    Attributes:
        engine: the chosen one.
        flight: of the request; to be ended.
        score: of the engine, None where scores are unknown.
    """

    engine: Engine
    flight: Flight
    score: EngineScore | None = None


class Router:
    """Places requests.

    Args:
        policy: chooses.
        client: calls engines for tokens.
        scorer: calls the manager; None for policies without scores.
        metrics: of the gateway.
        tokens_per_second: that an engine computes.
        timer: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        policy: Policy,
        client: EngineClient,
        scorer: ScoreClient | None,
        metrics: GatewayMetrics,
        *,
        tokens_per_second: float,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._policy = policy
        self._client = client
        self._scorer = scorer
        self._metrics = metrics
        self._tokens_per_second = tokens_per_second
        self._timer = timer

    async def study(
        self, facts: RequestFacts, engines: Sequence[Engine], request_id: str, headers: Mapping[str, str]
    ) -> Studied:
        """Return the request with its tokens and scores, as far as they are known.

        Args:
            facts: of the request.
            engines: candidates.
            request_id: of the request.
            headers: for a tokenization: what authenticates the request.
        """
        unknown = Studied(facts, facts.estimated_tokens)
        if self._scorer is None or not facts.is_generation or not engines:
            return unknown
        tokens = await self._tokens(facts, engines, headers)
        if tokens is None:
            return self._fall_back(unknown, "tokenize")
        begin = self._timer()
        try:
            scores = await self._scorer.scores(tokens, engines, request_id, facts.cache_salt)
        except ScoreError as error:
            _log.debug("scores_unknown", request_id=request_id, reason=error.reason, text=str(error))
            return self._fall_back(Studied(facts, len(tokens)), f"score_{error.reason}")
        finally:
            self._metrics.score_seconds.observe(self._timer() - begin)
        return Studied(facts, len(tokens), scores)

    def _fall_back(self, studied: Studied, reason: str) -> Studied:
        self._metrics.fallbacks.labels(reason).inc()
        return studied

    async def _tokens(
        self, facts: RequestFacts, engines: Sequence[Engine], headers: Mapping[str, str]
    ) -> Sequence[int] | None:
        asked = tokenize_request(facts)
        if not isinstance(asked, Mapping):
            return asked
        begin = self._timer()
        # All of them have the tokenizer; the one with the least to do answers soonest.
        engine = min(engines, key=lambda each: each.in_flight)
        try:
            return await self._client.tokenize(engine.url, asked, headers)
        finally:
            self._metrics.tokenize_seconds.observe(self._timer() - begin)

    def choose(self, studied: Studied, engines: Sequence[Engine]) -> Choice:
        """Put a request on an engine.

        Args:
            studied: the request.
            engines: that take more, at least one.
        """
        loads = [engine.load for engine in engines]
        name = self._policy.choose(studied.prompt, loads)
        engine, load = next(pair for pair in zip(engines, loads, strict=True) if pair[0].name == name)
        score = None if studied.scores is None else studied.scores.get(name, _NO_SCORE)
        tokens = max(0, studied.tokens - (score.loadable_tokens if score is not None else 0))
        seconds = expected_wait_seconds(load.tokens_in_flight + tokens, self._tokens_per_second)
        flight = engine.begin(tokens, None if studied.facts.is_streamed else seconds)
        return Choice(engine, flight, score)

    def record_promise(self, studied: Studied, score: EngineScore) -> None:
        """Count what the scores promise of an engine that answers."""
        host = max(0, score.host_tokens - score.gpu_tokens)
        tiers = {"gpu": score.gpu_tokens, "host": host, "storage": score.loadable_tokens - score.gpu_tokens - host}
        self._metrics.prompt_tokens.inc(studied.tokens)
        for tier, tokens in tiers.items():
            self._metrics.promised_tokens.labels(tier).inc(max(0, tokens))
