"""The attention of one layer, as every engine here runs it through the hooks."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from gpu_tier.engine.hooks import EngineHooks
from gpu_tier.engine.prefill import PrefillAttention
from gpu_tier.types import ForwardBatch, Mode

__all__ = ["AttentionLayer"]


class AttentionLayer:
    """Calls the hooks around the attention of a layer; prefill is exact, decode is the coordinator's.

    It takes and returns the tokens of a pass's real rows. Rows of padding, which only fixed shapes need, are zeros that
    the model never sees.

    Args:
        hooks: of the coordinator.
        prefill: attention of prompts.
    """

    def __init__(self, hooks: EngineHooks, prefill: PrefillAttention) -> None:
        self._hooks = hooks
        self._prefill = prefill

    def write(self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None) -> None:
        """Store the KV of the tokens; before `run`."""
        self._hooks.write_kv(layer_id, batch, _padded(k, batch), None if v is None else _padded(v, batch))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor | None, layer_id: int, batch: ForwardBatch, extra: dict[str, Tensor]
    ) -> Tensor:
        """Return the attention of the tokens, ``f32 [T, Hq, dv]``.

        Args:
            q: ``[T, Hq, D]`` queries.
            k: ``[T, H, D]`` keys, which `write` has stored.
            v: ``[T, H, dv]`` values; None for MLA.
            layer_id: id of the layer.
            batch: the pass.
            extra: what the algorithm needs beyond them, ``[T, ...]``.
        """
        tokens = len(q)
        q, k = _padded(q, batch), _padded(k, batch)
        v = None if v is None else _padded(v, batch)
        extra = {name: _padded(tensor, batch) for name, tensor in extra.items()}
        meta, partials = self._hooks.attention_begin(q, k, v, layer_id, batch, None, **extra)
        if batch.mode is Mode.PREFILL:
            out = self._prefill.run(q, layer_id, batch)
        else:
            out = self._hooks.attend(q, meta, partials, self._prefill.sm_scale)
        self._hooks.attention_end(out, layer_id, batch)
        return out[:tokens]


def _padded(x: Tensor, batch: ForwardBatch) -> Tensor:
    missing = batch.positions.shape[0] - x.shape[0]
    return pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
