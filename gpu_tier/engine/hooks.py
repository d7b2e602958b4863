"""What an engine sees of the coordinator.

A step calls, in this order: `plan_prefill` or `plan_decode`, `forward_begin`, then for each layer `write_kv` (an engine
that keeps its own pool writes there itself), `attention_begin`, the layer's attention, `attention_end`, and at last
`forward_end`. A request begins with `on_request_begin` and ends with `on_request_end`, which may come at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from gpu_tier.types import AttnMetadata, ForwardBatch, Partial

__all__ = ["EndReason", "EngineHooks", "KeyReader", "Tracker", "Trackers"]

EndReason = Literal["finished", "aborted", "retracted"]


class KeyReader(Protocol):
    """Reads a request's KV wherever it is."""

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys ``f32 [n, H, D]`` and values ``f32 [n, H, dv]`` of tokens start to stop - 1, as stored."""


class Tracker(Protocol):
    """What is known of a request."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was attached, so that nobody computes them."""


class Trackers(Protocol):
    """The requests that are known."""

    def __getitem__(self, request: int, /) -> Tracker:
        """Return what is known of a request."""


class EngineHooks(Protocol):
    """The hooks of `gpu_tier.coordinator.SparseCoordinator`."""

    @property
    def trackers(self) -> Trackers:
        """The requests."""

    @property
    def key_reader(self) -> KeyReader:
        """Reads KV for prefill attention, the tokens of the running pass included."""

    def on_request_begin(self, n_prompt: int, prefix: Any = None) -> int:
        """Take a request in and return its row of the per-request tables.

        Raises:
            PoolExhaustedError: there is no room; nothing is held.
        """

    def plan_prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> ForwardBatch:
        """Return a pass over the next tokens of prompts.

        Raises:
            PoolExhaustedError: there is no room; nothing has changed.
        """

    def plan_decode(self, requests: Sequence[int], pad_to: int = 0) -> ForwardBatch:
        """Return a pass over one more token of each request, with rows of padding up to `pad_to`.

        Raises:
            PoolExhaustedError: there is no room; nothing has changed.
        """

    def forward_begin(self, batch: ForwardBatch) -> None:
        """Before the first layer."""

    def write_kv(self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None) -> None:
        """Store the KV of the pass's tokens, ``k [T, H, D]`` and ``v [T, H, dv]``, None for MLA."""

    def attention_begin(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer_id: int,
        batch: ForwardBatch,
        meta: AttnMetadata | None = None,
        **extra: Tensor,
    ) -> tuple[AttnMetadata | None, list[Partial]]:
        """Before a layer's attention. Return what attention is to read and what to merge with it; None in prefill."""

    def attend(self, q: Tensor, meta: AttnMetadata | None, partials: list[Partial], sm_scale: float) -> Tensor:
        """Compute the attention of a decode step, ``f32 [B, Hq, dv]``."""

    def attention_end(self, out: Tensor, layer_id: int, batch: ForwardBatch) -> None:
        """After a layer's attention."""

    def forward_end(self, batch: ForwardBatch) -> None:
        """After the last layer."""

    def prompt_finished(self, request: int) -> None:
        """After the pass with a prompt's last tokens."""

    def on_request_end(self, request: int, reason: EndReason = "finished") -> None:
        """Forget a request; one that is not known too."""
