"""How the layers of a Hugging Face model hand over their keys and values, and what attention makes of them.

Most hand over keys and values of their heads. Models like DeepSeek-V3 hand over a latent and a rotated part, which all
heads share, and expand them only afterwards. There attention runs in the absorbed form on the latents themselves, so
that a token has one row: queries go through the key map and outputs through the value map of `kv_b_proj`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["HeadsForm", "KVForm", "LatentForm"]


class KVForm(Protocol):
    """What a layer's tensors are as rows ``[T, heads, dims]``; those of transformers are ``[1, heads, T, dims]``."""

    def rows(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows to store of what a layer gave to its cache."""

    def queries(self, module: Any, query: Tensor) -> Tensor:
        """Return the queries ``[T, Hq, D]`` that fit the rows."""

    def output(self, module: Any, out: Tensor) -> Tensor:
        """Return what the layer expects, ``[T, Hq, value dims]``, from the attention over the rows."""


class HeadsForm:
    """Keys and values of heads, as they come."""

    def rows(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `KVForm`."""
        return _tokens_first(key_states), _tokens_first(value_states)

    def queries(self, module: Any, query: Tensor) -> Tensor:
        """See `KVForm`."""
        return _tokens_first(query)

    def output(self, module: Any, out: Tensor) -> Tensor:
        """See `KVForm`."""
        return out


class LatentForm:
    """One latent row per token."""

    def rows(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Join the latent and the rotated part."""
        return _tokens_first(torch.cat([key_states, value_states], dim=-1)), None

    def queries(self, module: Any, query: Tensor) -> Tensor:
        """Absorb the key map into the part of the queries that has no position."""
        q = _tokens_first(query)
        nope, rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        absorbed = torch.einsum("thn,hnr->thr", nope, _expansion(module)[:, : module.qk_nope_head_dim])
        return torch.cat([absorbed, rope], dim=-1)

    def output(self, module: Any, out: Tensor) -> Tensor:
        """Apply the value map."""
        values = _expansion(module)[:, module.qk_nope_head_dim :]
        return torch.einsum("thr,hvr->thv", out.to(values.dtype), values)


def _expansion(module: Any) -> Tensor:
    """The maps from the latent to each head's key and value, ``[Hq, nope + value dims, rank]``."""
    maps: Tensor = module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
    return maps


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
