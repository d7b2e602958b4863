"""Interfaces of the engine: the coordinator's hooks, a decoder without its attention, and a runner of passes.

A step calls, in this order: `plan_prefill` or `plan_decode`, `forward_begin`, then for each layer `write_kv` (an engine
that keeps its own pool writes there itself), `attention_begin`, the layer's attention, `attention_end`, and at last
`forward_end`. A request begins with `on_request_begin` and ends with `on_request_end`, which may come at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVKind
from kvcm.gpu_tier.types import AttnMetadata, ForwardBatch, Partial

__all__ = [
    "AttentionInputs",
    "DecoderModel",
    "EndReason",
    "EngineHooks",
    "KeyReader",
    "ModelState",
    "PassRunner",
    "Tracker",
    "Trackers",
    "last_tokens",
]

EndReason = Literal["finished", "aborted", "retracted"]


class KeyReader(Protocol):
    """Reads a request's KV from both pools."""

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys ``f32 [n, H, D]`` and values ``f32 [n, H, dv]`` of tokens start to stop - 1, as stored."""


class Tracker(Protocol):
    """Progress of a request."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was attached, so that they are not computed."""


class Trackers(Protocol):
    """The requests that are known."""

    def __getitem__(self, request: int, /) -> Tracker:
        """Return the progress of a request."""


class EngineHooks(Protocol):
    """The hooks of `kvcm.gpu_tier.coordinator.SparseCoordinator`."""

    @property
    def trackers(self) -> Trackers:
        """The requests."""

    @property
    def key_reader(self) -> KeyReader:
        """Reads KV for prefill attention, the tokens of the running pass included."""

    def on_request_begin(self, n_prompt: int, prefix: Any = None) -> int:
        """Take a request in and return its row of the per-request tables.

        Raises:
            PoolExhaustedError: the pools are full; nothing is held.
        """

    def plan_prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> ForwardBatch:
        """Return a pass over the next tokens of prompts.

        Raises:
            PoolExhaustedError: the pools are full; nothing has changed.
        """

    def plan_decode(self, requests: Sequence[int], pad_to: int = 0) -> ForwardBatch:
        """Return a pass over one more token of each request, with rows of padding up to `pad_to`.

        Raises:
            PoolExhaustedError: the pools are full; nothing has changed.
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


# What the layer driver needs of a model: everything of a decoder but its attention.

ModelState = dict[str, Tensor]
"""What a model keeps of one request between passes, by name; empty before its first token."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one layer's attention works on.

    Attributes:
        q: ``[T, Hq, D]`` queries after RoPE; of MLA in the absorbed form.
        k: ``[T, H, D]`` keys after RoPE; of MLA the latents ``[T, 1, D]``.
        v: ``[T, H, dv]`` values; None for MLA.
        extra: what the algorithm needs beyond them (dsa: `index_query`, `index_key`, `index_weight`), ``[T, ...]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    extra: dict[str, Tensor] = field(default_factory=dict)


class DecoderModel(Protocol):
    """A decoder whose attention is computed outside of it.

    The rows of a batch follow each other: row i brings `extend_lens[i]` tokens, one in decode. A model that looks back
    beyond its attention (a convolution, say) keeps what it needs in the request's `ModelState`, which the driver makes
    empty at the request's first token and hands in at each later one.
    """

    @property
    def num_layers(self) -> int:
        """Layers L."""

    @property
    def num_q_heads(self) -> int:
        """Query heads Hq."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads H."""

    @property
    def head_dim(self) -> int:
        """Numbers of a key row, D."""

    @property
    def v_head_dim(self) -> int:
        """Numbers of a value row, dv."""

    @property
    def kind(self) -> KVKind:
        """Whether keys and values are rows of their own."""

    @property
    def sm_scale(self) -> float:
        """What scores are multiplied by before the softmax."""

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states ``[T, dm]`` of ``token_ids int64 [T]`` at ``positions int64 [T]``."""

    def attention_inputs(
        self,
        layer_id: int,
        hidden: Tensor,
        positions: Tensor,
        states: Sequence[ModelState],
        extend_lens: Sequence[int],
    ) -> AttentionInputs:
        """Return what the layer's attention works on, and bring the states up to date.

        Args:
            layer_id: id of the layer.
            hidden: ``[T, dm]``.
            positions: ``int64 [T]`` position of each token in its request.
            states: of each row of the batch.
            extend_lens: tokens of each row.
        """

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Return the layer's output ``[T, dm]`` from its input `hidden` and ``attention f32 [T, Hq, dv]``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[T, vocab]`` of the last layer's output."""


# Interface of the computation that continuous batching drives.


class PassRunner(Protocol):
    """Computes one pass of a model through the hooks."""

    def run(self, batch: ForwardBatch, token_ids: Tensor, states: Sequence[ModelState]) -> Tensor:
        """Return the logits ``[num_real, vocab]`` of each real row's last token.

        Args:
            batch: the pass, as the coordinator planned it.
            token_ids: ``int64`` tokens of the real rows, one row after the other.
            states: what the model keeps of each real row's request.
        """


def last_tokens(batch: ForwardBatch) -> Tensor:
    """Return where the last token of each real row is in the pass, ``int64 [num_real]``."""
    ends = [end - 1 for end in accumulate(batch.extend_lens)]
    return torch.tensor(ends, dtype=torch.long, device=batch.positions.device)
