"""An engine whose prompts begin where others have computed already, and which gives back what it computes.

A prompt waits for its prefix while the others go on; then only the rest of it is computed. Its full blocks are
published when they are on the host, those of its answer as they fill, as long as they are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.gpu_tier.connector import KVFormat
from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.engine.batch_engine import BatchEngine
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.manager.prefixes import PrefixAttach, PrefixStore, SidecarSpec
from kvcm.gpu_tier.request_lifecycle import RequestState

__all__ = ["SharingEngine", "sidecar_of"]

# While a request is staged its copies and perhaps its index are made: publishing would wait for them.
_INCOMPLETE = (RequestState.REGISTERED, RequestState.PREFILL, RequestState.STAGING)


def sidecar_of(coordinator: SparseCoordinator, kv: KVFormat) -> SidecarSpec | None:
    """Return what the coordinator's algorithm has to be stored beside KV, None when it has nothing."""
    page_bytes = coordinator.algorithm.sidecar_page_bytes()
    if not page_bytes:
        return None
    # Settings may leave to an engine's sizes what its sidecars are like: of another size they are others.
    settings = {**coordinator.config.algo.sidecar_settings(), "page_bytes": page_bytes}
    name = kv.sidecar_spec(coordinator.config.algorithm, settings)
    return SidecarSpec(name, page_bytes, coordinator.algorithm.required_sidecar)


@dataclass(slots=True)
class _Prompt:
    """A prompt and its state: it waits for free pages (no attach) or for its prefix, or runs."""

    tokens: list[int]
    attach: PrefixAttach | None = None
    request: int | None = None
    published_pages: int = 0


class SharingEngine:
    """Runs prompts in a `BatchEngine` with prefixes of a `PrefixStore`.

    Args:
        engine: computes.
        coordinator: of the engine, built with `publishes`.
        store: over the coordinator's host pool.

    Raises:
        ConfigError: the engine's prompts are not computed with exact attention.
    """

    def __init__(self, engine: BatchEngine, coordinator: SparseCoordinator, store: PrefixStore) -> None:
        if not engine.is_exact:
            raise ConfigError("prefill", "block-sparse", "others would take the KV that is shared for exact")
        self._engine = engine
        self._coordinator = coordinator
        self._store = store
        self._page_size = coordinator.config.page_size
        self._publish_every = coordinator.config.publish_every
        self._numbers = itertools.count()
        self._prompts: dict[int, _Prompt] = {}
        self._full_at: tuple[int, ...] | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """Prompts that are computed or decoded, oldest first; the others wait for their prefix."""
        return tuple(number for number, prompt in self._prompts.items() if prompt.request is not None)

    def submit(self, prompt_ids: Sequence[int]) -> int:
        """Take a prompt in and return its number; steps compute it."""
        number = next(self._numbers)
        self._prompts[number] = _Prompt(list(prompt_ids), self._store.begin(prompt_ids))
        return number

    def step(self) -> dict[int, int]:
        """Compute the next pass of everything that runs, and return the token that each prompt got.

        Raises:
            PoolExhaustedError: the running requests do not fit; retracting one frees pages.
        """
        self._store.step()
        self._admit()
        tokens = self._engine.step()
        for prompt in self._prompts.values():
            if prompt.request is not None:
                self._publish(prompt, at_end=False)
        by_request = {prompt.request: number for number, prompt in self._prompts.items()}
        return {by_request[request]: token for request, token in tokens.items()}

    def tokens(self, number: int) -> list[int]:
        """Return a prompt and the generated tokens."""
        prompt = self._resolve(number)
        return list(prompt.tokens) if prompt.request is None else self._engine.tokens(prompt.request)

    def attached_tokens(self, number: int) -> int:
        """Return the leading tokens that need not be computed, 0 while it is not known."""
        prompt = self._resolve(number)
        return 0 if prompt.request is None else self._coordinator.trackers[prompt.request].cached_tokens

    def finish(self, number: int) -> None:
        """End a prompt whose answer is complete; what of it is exact is published."""
        prompt = self._resolve(number)
        if prompt.request is not None:
            self._publish_rest(prompt)
            self._engine.finish(prompt.request)
        else:
            self._release(prompt)
        del self._prompts[number]

    def retract(self, number: int) -> None:
        """Retract a prompt to free its pages; it resumes when pages are free, from its exact tokens."""
        prompt = self._resolve(number)
        if prompt.request is None:
            return
        self._publish_rest(prompt)
        prompt.tokens = self._engine.retract(prompt.request)
        prompt.request = prompt.attach = None

    def abort(self, number: int) -> None:
        """End a prompt in any state; one that is not known too."""
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        if prompt.request is not None:
            self._engine.abort(prompt.request)
        else:
            self._release(prompt)

    def _release(self, prompt: _Prompt) -> None:
        if prompt.attach is not None:
            self._store.abort(prompt.attach)

    def _resolve(self, number: int) -> _Prompt:
        if number not in self._prompts:
            raise StateError(f"no such prompt: {number}")
        return self._prompts[number]

    def _free_pages(self) -> tuple[int, ...]:
        """Return the free pages of every pool that a request uses."""
        manager = self._coordinator.manager
        return manager.tables.available, manager.device.allocator.available, manager.host.allocator.available

    def _admit(self) -> None:
        """Let prompts run whose prefix is known, as far as pages are free."""
        if self._full_at is not None and all(
            now <= then for now, then in zip(self._free_pages(), self._full_at, strict=True)
        ):
            return
        self._full_at = None
        for number, prompt in list(self._prompts.items()):
            if prompt.request is None and not self._try_admit(number, prompt):
                self._full_at = self._free_pages()
                return

    def _try_admit(self, number: int, prompt: _Prompt) -> bool:
        """Let a prompt run if its prefix is there; returns false when it does not fit."""
        prompt.attach = prompt.attach or self._store.begin(prompt.tokens)
        prefix = self._store.poll(prompt.attach)
        if prefix is None:
            return True
        prompt.attach = None
        try:
            prompt.request = self._engine.add(prompt.tokens, prefix)  # which releases the prefix when it fails
        except PoolExhaustedError:
            if self.running:
                return False
            del self._prompts[number]
            raise
        except Exception:
            del self._prompts[number]
            raise
        prompt.published_pages = len(prefix.pages)
        return True

    def _publish_rest(self, prompt: _Prompt) -> None:
        assert prompt.request is not None
        self._coordinator.manager.wait_for_copies(prompt.request)
        self._publish(prompt, at_end=True)

    def _publish(self, prompt: _Prompt, *, at_end: bool) -> None:
        assert prompt.request is not None
        tracker = self._coordinator.trackers[prompt.request]
        if tracker.state in _INCOMPLETE and not at_end:
            return
        host_tokens = self._coordinator.manager.host_tokens
        exact = min(tracker.exact_tokens, host_tokens.backed_up(prompt.request))
        full, first = exact // self._page_size, prompt.published_pages
        is_prompt = first < tracker.n_prompt // self._page_size <= full
        is_due = self._publish_every and full - first >= self._publish_every
        if not (is_prompt or is_due or at_end):
            return
        size = self._page_size
        sidecar = self._coordinator.algorithm.export_sidecar(prompt.request, first * size, full * size)
        self._store.publish(
            self._engine.tokens(prompt.request),
            host_tokens.pages(prompt.request),
            exact,
            first_page=first,
            sidecar=None if sidecar is None else sidecar.data,
        )
        prompt.published_pages = max(first, full)
