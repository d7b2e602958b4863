"""Continuous batching over the coordinator: which tokens the next pass computes, greedily and one process only.

A step decodes one token of every request whose prompt is computed, and then computes up to `chunk_tokens` tokens of the
prompts that are not, oldest first. So a long prompt never stops the others, and a request's first token comes out of
the step that computes the last of its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.engine.interfaces import EndReason, EngineHooks, ModelState, PassRunner
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.types import ForwardBatch

__all__ = ["BatchEngine", "generate"]


@dataclass(slots=True)
class _Running:
    """A request: its tokens, how many of them have KV, and what the model keeps."""

    tokens: list[int]
    n_prompt: int
    computed: int
    state: ModelState = field(default_factory=dict)

    @property
    def in_prompt(self) -> bool:
        """Whether tokens of the prompt are still to be computed."""
        return self.computed < self.n_prompt


class BatchEngine:
    """Decodes requests of unequal lengths in one batch.

    Args:
        runner: computes the passes.
        hooks: of the coordinator.
        device: where the runner computes.
        chunk_tokens: most prompt tokens of a step.
        pad_to: rows of a decode pass at least, as an engine with CUDA graphs has them.

    Attributes:
        logits: ``[vocab]`` of each request that got a token in the last step.
        is_exact: whether prompts are computed with exact attention.
    """

    def __init__(
        self,
        runner: PassRunner,
        hooks: EngineHooks,
        *,
        device: torch.device | str = "cpu",
        chunk_tokens: int = 8192,
        pad_to: int = 0,
    ) -> None:
        if chunk_tokens < 1:
            raise ConfigError("chunk_tokens", chunk_tokens, "must be at least 1")
        self._runner = runner
        self._hooks = hooks
        self._device = torch.device(device)
        self._chunk_tokens = chunk_tokens
        self._pad_to = pad_to
        self._running: dict[int, _Running] = {}
        self.logits: dict[int, Tensor] = {}
        self.is_exact = True

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests that run, oldest first."""
        return tuple(self._running)

    def tokens(self, request: int) -> list[int]:
        """Return a request's prompt and generated tokens."""
        return list(self._resolve(request).tokens)

    def add(self, prompt_ids: Sequence[int], prefix: Any = None) -> int:
        """Take a prompt in and return its request; a step computes it.

        Args:
            prompt_ids: at least one token.
            prefix: KV of the prompt's beginning that the coordinator attaches.

        Raises:
            PoolExhaustedError: the pools are full; nothing is held.
        """
        if not prompt_ids:
            raise ConfigError("prompt_ids", prompt_ids, "must have at least one token")
        request = self._hooks.on_request_begin(len(prompt_ids), prefix)
        cached = self._hooks.trackers[request].cached_tokens
        self._running[request] = _Running(list(prompt_ids), len(prompt_ids), cached)
        return request

    @torch.no_grad()
    def step(self) -> dict[int, int]:
        """Compute the next pass of every request and return the token that each got.

        Raises:
            PoolExhaustedError: there is no page for another token; nothing has changed. Ending a request frees pages.
        """
        self.logits = {}
        prompts = [request for request, running in self._running.items() if running.in_prompt]
        decoding = [request for request, running in self._running.items() if not running.in_prompt]
        tokens = self._decode(decoding) if decoding else {}
        if prompts:
            tokens |= self._prefill(prompts, may_wait=bool(decoding))
        return tokens

    def finish(self, request: int) -> None:
        """End a request whose output is complete."""
        self._resolve(request)
        self._end(request, "finished")

    def abort(self, request: int) -> None:
        """End a request in any state; one that is not known too."""
        if request in self._running:
            self._end(request, "aborted")

    def retract(self, request: int) -> list[int]:
        """End a request to free its pages, and return its tokens: the prompt with which it resumes."""
        tokens = self.tokens(request)
        self._end(request, "retracted")
        return tokens

    def _end(self, request: int, reason: EndReason) -> None:
        del self._running[request]
        self._hooks.on_request_end(request, reason)

    def _resolve(self, request: int) -> _Running:
        if request not in self._running:
            raise StateError(f"no such request: {request}")
        return self._running[request]

    def _decode(self, requests: list[int]) -> dict[int, int]:
        batch = self._hooks.plan_decode(requests, self._pad_to)
        return self._run(batch, dict.fromkeys(requests, 1))

    def _prefill(self, requests: list[int], *, may_wait: bool) -> dict[int, int]:
        lens = dict(self._chunks(requests))
        try:
            batch = self._hooks.plan_prefill(list(lens), list(lens.values()))
        except PoolExhaustedError:
            if may_wait:
                return {}  # those that decode end at some time
            raise
        return self._run(batch, lens)

    def _chunks(self, requests: list[int]) -> Iterator[tuple[int, int]]:
        tokens_left = self._chunk_tokens
        for request in requests:
            running = self._running[request]
            take = min(running.n_prompt - running.computed, tokens_left)
            if not take:
                return
            tokens_left -= take
            yield request, take

    def _run(self, batch: ForwardBatch, lens: dict[int, int]) -> dict[int, int]:
        rows = [self._running[request] for request in lens]
        new = [row.tokens[row.computed :][:count] for row, count in zip(rows, lens.values(), strict=True)]
        token_ids = torch.tensor(list(chain(*new)), dtype=torch.long, device=self._device)
        logits = self._runner.run(batch, token_ids, [row.state for row in rows])
        chosen = logits.argmax(-1).tolist()
        tokens: dict[int, int] = {}
        for i, (request, count) in enumerate(lens.items()):
            if self._prompt_is_computed(request, count):
                tokens[request] = chosen[i]
                self._running[request].tokens.append(chosen[i])
                self.logits[request] = logits[i]
        return tokens

    def _prompt_is_computed(self, request: int, count: int) -> bool:
        """Note that `count` more tokens have KV; return whether the last of them is not inside the prompt."""
        running = self._running[request]
        was_in_prompt = running.in_prompt
        running.computed += count
        if was_in_prompt and not running.in_prompt:
            self._hooks.prompt_finished(request)
        return not running.in_prompt


# Generates for more prompts than fit: what waits, what runs, and what has to give way.


def generate(
    engine: BatchEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_tokens: Collection[int] = ()
) -> list[list[int]]:
    """Return the greedy continuation of each prompt; one that ended by a stop token has it as its last.

    Prompts that do not fit wait. When the pools run out, the youngest request is retracted and recomputed later.

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
                self._append_token(request, token)
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
        self._must_wait = True  # until a request ends: otherwise it would come back only to be retracted again

    def _append_token(self, request: int, token: int) -> None:
        output = self._outputs[self._running[request]]
        output.append(token)
        if token in self._stop_tokens or len(output) == self._max_new_tokens:
            self._engine.finish(request)
            del self._running[request]
            self._must_wait = False
