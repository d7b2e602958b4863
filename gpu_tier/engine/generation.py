"""Generates for more prompts than fit: what waits, what runs, and what has to give way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from gpu_tier.engine.batch_engine import BatchEngine
from gpu_tier.errors import ConfigError, PoolExhaustedError

__all__ = ["generate"]


def generate(
    engine: BatchEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_tokens: Collection[int] = ()
) -> list[list[int]]:
    """Return the greedy continuation of each prompt; one that ended by a stop token has it as its last.

    Prompts that do not fit wait. When the pools run out, the youngest request gives way and is computed anew later.

    Args:
        engine: runs nothing else meanwhile.
        prompts: each of at least one token.
        max_new_tokens: most tokens of a continuation.
        stop_tokens: tokens that end it.

    Raises:
        PoolExhaustedError: a prompt does not fit although nothing else runs.
    """
    if max_new_tokens < 1:
        raise ConfigError("max_new_tokens", max_new_tokens, "must be at least 1")
    generation = _Generation(engine, prompts, max_new_tokens, stop_tokens)
    try:
        return generation.run()
    finally:
        generation.abort()


class _Generation:
    def __init__(
        self, engine: BatchEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_tokens: Collection[int]
    ) -> None:
        self._engine = engine
        self._max_new_tokens = max_new_tokens
        self._stop_tokens = stop_tokens
        self._outputs: list[list[int]] = [[] for _ in prompts]
        self._waiting = deque((i, list(prompt)) for i, prompt in enumerate(prompts))
        self._running: dict[int, int] = {}
        self._must_wait = False

    def run(self) -> list[list[int]]:
        while self._waiting or self._running:
            self._admit()
            for request, token in self._step().items():
                self._take(request, token)
        return self._outputs

    def abort(self) -> None:
        for request in self._running:
            self._engine.abort(request)

    def _admit(self) -> None:
        while self._waiting and not self._must_wait:
            index, tokens = self._waiting[0]
            try:
                request = self._engine.add(tokens)
            except PoolExhaustedError:
                if not self._running:
                    raise
                return
            self._running[request] = index
            self._waiting.popleft()

    def _step(self) -> dict[int, int]:
        while True:
            try:
                return self._engine.step()
            except PoolExhaustedError:
                if len(self._running) == 1:
                    raise
                self._retract_youngest()

    def _retract_youngest(self) -> None:
        request, index = self._running.popitem()
        self._waiting.appendleft((index, self._engine.retract(request)))
        self._must_wait = True  # until somebody ends: otherwise it would come back only to be retracted again

    def _take(self, request: int, token: int) -> None:
        output = self._outputs[self._running[request]]
        output.append(token)
        if token in self._stop_tokens or len(output) == self._max_new_tokens:
            self._engine.finish(request)
            del self._running[request]
            self._must_wait = False
