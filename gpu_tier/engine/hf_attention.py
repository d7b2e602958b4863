"""The two places where a Hugging Face model lets somebody else compute its attention, without a change of its code.

Its cache gets the new keys and values of a layer and hands them to the coordinator; its attention function, chosen by
name in the configuration, gets the queries and asks the coordinator. Both find the running pass in a context variable:
models pass no argument of ours down to their layers reliably.

A pass is packed: all its tokens are one sequence of batch size 1 with explicit positions, so that requests of unequal
lengths need no padding and no mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from gpu_tier.engine.attention_layer import AttentionLayer
from gpu_tier.engine.hf_shape import AttentionShape
from gpu_tier.errors import ConfigError, StateError
from gpu_tier.types import ForwardBatch

__all__ = ["ATTENTION_NAME", "HandOverCache", "note_extra", "register", "running"]

ATTENTION_NAME = "gpu_tier"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux")


@dataclass(frozen=True, slots=True)
class _Pass:
    attention: AttentionLayer
    batch: ForwardBatch
    shape: AttentionShape
    written: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    extra: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))


_RUNNING: ContextVar[_Pass | None] = ContextVar("gpu_tier_pass", default=None)


def register() -> None:
    """Make the attention function known to transformers; again and again if wanted."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


@contextmanager
def running(attention: AttentionLayer, batch: ForwardBatch, shape: AttentionShape) -> Iterator[Cache]:
    """Bind what the model computes inside to a pass, and return the cache to give to the model."""
    token = _RUNNING.set(_Pass(attention, batch, shape))
    try:
        yield HandOverCache()
    finally:
        _RUNNING.reset(token)


def note_extra(layer_id: int, name: str, value: Tensor) -> None:
    """Keep what an algorithm needs of a layer beyond keys and values until its attention; outside a pass nothing."""
    if (current := _RUNNING.get()) is not None:
        current.extra[layer_id][name] = value


class HandOverCache(Cache):
    """Holds nothing: what a layer adds goes to the coordinator's pools, and attention reads it there."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values ``[1, H, T, d]`` of a layer and return them alone, without those before them."""
        current = _current()
        rows = current.shape.form.rows(key_states, value_states)
        current.written[layer_idx] = rows
        current.attention.write(layer_idx, current.batch, *rows)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take the index keys ``[1, T, dI]`` of a layer, and return one: what the model would select by is not used."""
        note_extra(layer_idx, "index_key", indexer_key_states[0])
        return indexer_key_states[:, :1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given to the model."""
        return 0


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention: ``[1, heads, T, d]`` each, returns ``[1, T, Hq, dv]``; transformers calls it."""
    current = _current()
    _check_supported(None if current.shape.has_indexer else attention_mask, scaling, current.shape.sm_scale, kwargs)
    layer_id: Any = module.layer_idx
    form = current.shape.form
    rows = current.written.pop(layer_id)
    extra = current.extra.pop(layer_id, {})
    out = current.attention.run(form.queries(module, query), *rows, layer_id, current.batch, extra)
    return form.output(module, out)[None].to(query.dtype), None


def _check_supported(mask: Tensor | None, scaling: float | None, sm_scale: float, kwargs: dict[str, Any]) -> None:
    if mask is not None:
        raise ConfigError("attention_mask", tuple(mask.shape), "a pass is packed and has none")
    if scaling is not None and scaling != sm_scale:
        raise ConfigError("scaling", scaling, f"must be the {sm_scale} that the coordinator was built for")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(name, kwargs[name], "attention other than plain softmax over all tokens is not supported")


def _current() -> _Pass:
    current = _RUNNING.get()
    if current is None:
        raise StateError(f"attention {ATTENTION_NAME!r} works only inside a pass of SparseGenerator")
    return current
