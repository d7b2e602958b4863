"""What the layer driver needs of a model: everything of a decoder but its attention.

The rows of a batch follow each other: row i brings `extend_lens[i]` tokens, one in decode. A model that looks back
beyond its attention (a convolution, say) keeps what it needs in the request's `ModelState`, which the driver makes
empty at the request's first token and hands in at each later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gpu_tier.geometry import KVKind

__all__ = ["AttentionInputs", "DecoderModel", "ModelState"]

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
    """A decoder whose attention somebody else computes."""

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
