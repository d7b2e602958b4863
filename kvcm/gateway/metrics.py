"""Metrics of a gateway, as Prometheus scrapes them. `docs/gateway.md` shows the table.

Labels are bounded: engines are configured, all other values are few words. No label holds a client, a prompt or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from kvcm.gateway.engines import Engine, EngineState

__all__ = ["NO_ENGINE", "GatewayMetrics"]

NO_ENGINE: Final = "none"
"""Label of requests that no engine was chosen for."""
_DECISIONS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_FIRST_BYTES: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """The metrics of one gateway.

    Args:
        policy: name of the policy in force.
        engines: all of them.
        queued: returns how many requests wait for an engine.
    """

    def __init__(self, policy: str, engines: Sequence[Engine], queued: Callable[[], int]) -> None:
        self.policy = policy
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvcm_gateway_requests",
            "Requests ended, by outcome: ok, client_error, engine_error, broken, timeout, client_gone, or a rejection.",
            ("engine", "policy", "outcome"),
            registry=registry,
        )
        self.retries = Counter(
            "kvcm_gateway_retries", "Requests sent to another engine, by reason.", ("reason",), registry=registry
        )
        self.fallbacks = Counter(
            "kvcm_gateway_fallbacks",
            "Requests of policy kvcm that consistent_hash placed, by reason.",
            ("reason",),
            registry=registry,
        )
        self.score_seconds = Histogram(
            "kvcm_gateway_score_seconds",
            "From a prompt's tokens to its scores, failures included.",
            buckets=_DECISIONS,
            registry=registry,
        )
        self.tokenize_seconds = Histogram(
            "kvcm_gateway_tokenize_seconds",
            "Tokenizations by engines, failures included.",
            buckets=_DECISIONS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvcm_gateway_prompt_tokens", "Tokens of prompts that were placed by scores.", registry=registry
        )
        self.promised_tokens = Counter(
            "kvcm_gateway_promised_tokens",
            "Tokens of them that the chosen engine holds in GPU memory (gpu), in host memory (host), or loads from a "
            "disk or a storage (storage), by the scores.",
            ("tier",),
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "kvcm_gateway_first_byte_seconds",
            "From the complete request to the first byte of the answer.",
            ("policy",),
            buckets=_FIRST_BYTES,
            registry=registry,
        )
        self._add_gauges(engines, queued)

    def _add_gauges(self, engines: Sequence[Engine], queued: Callable[[], int]) -> None:
        registry = self.registry
        Gauge("kvcm_gateway_queued", "Requests that wait for an engine.", registry=registry).set_function(queued)
        in_flight = Gauge("kvcm_gateway_in_flight", "Requests on an engine.", ("engine",), registry=registry)
        tokens = Gauge(
            "kvcm_gateway_tokens_in_flight",
            "Tokens of prompts that an engine still has to compute.",
            ("engine",),
            registry=registry,
        )
        state = Gauge(
            "kvcm_gateway_engine_state", "1 for the state of an engine.", ("engine", "state"), registry=registry
        )
        for engine in engines:
            in_flight.labels(engine.name).set_function(partial(_in_flight, engine))
            tokens.labels(engine.name).set_function(partial(_tokens_in_flight, engine))
            for each in EngineState:
                state.labels(engine.name, each.value).set_function(partial(_is_in, engine, each))

    def written(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type.

        Args:
            accept: header of the request, "" for none.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # a version that is none
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type


def _in_flight(engine: Engine) -> float:
    return engine.in_flight


def _tokens_in_flight(engine: Engine) -> float:
    return engine.tokens_in_flight


def _is_in(engine: Engine, state: EngineState) -> float:
    return float(engine.state is state)
