"""A Hugging Face model that decodes with sparse attention over KV in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.engine.batch_engine import BatchEngine, generate
from kvcm.gpu_tier.engine.interfaces import EngineHooks, ModelState, last_tokens
from kvcm.gpu_tier.engine.layer_attention import AttentionLayer, PrefillAttention
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.types import ForwardBatch

__all__ = ["ATTENTION_NAME", "AttentionShape", "HfRunner", "KVForm", "SparseGenerator", "register", "running"]

# How the layers of a Hugging Face model hand over their keys and values, and what attention makes of them.


class KVForm(Protocol):
    """What a layer's tensors are as rows ``[T, heads, dims]``; those of transformers are ``[1, heads, T, dims]``.

    Most hand over keys and values of their heads. Models like DeepSeek-V3 hand over a latent and a rotated part, which
    all heads share, and expand them only afterwards. There attention runs in the absorbed form on the latents
    themselves, so that a token has one row: queries go through the key map and outputs through the value map of
    `kv_b_proj`.
    """

    def rows(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows to store of what a layer gave to its cache."""

    def queries(self, module: Any, query: Tensor) -> Tensor:
        """Return the queries ``[T, Hq, D]`` that fit the rows."""

    def output(self, module: Any, out: Tensor) -> Tensor:
        """Return what the layer expects, ``[T, Hq, value dims]``, from the attention over the rows."""


class _HeadsForm:
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


class _LatentForm:
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


# What the tier has to know of a Hugging Face model, and which models it cannot serve.

_DTYPES = {torch.float32: KVDtype.F32, torch.float16: KVDtype.F16, torch.bfloat16: KVDtype.BF16}
_INDEXED_MODEL = "deepseek_v32"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a coordinator has to know of a model.

    Attributes:
        geometry: of its KV.
        num_q_heads: query heads.
        sm_scale: what scores are multiplied by before the softmax.
        has_indexer: whether its layers score tokens themselves, as DeepSeek-V3.2's do.
    """

    geometry: KVGeometry
    num_q_heads: int
    sm_scale: float
    has_indexer: bool = False

    @classmethod
    def of(cls, model: Any, page_size: int, kv_dtype: KVDtype | None = None) -> AttentionShape:
        """Return the shape of a model like Llama or DeepSeek-V3.

        Args:
            model: a causal language model of transformers.
            page_size: tokens of a page.
            kv_dtype: how KV is stored; None means as the model computes.

        Raises:
            ConfigError: the model keeps KV in a way that is not supported.
        """
        config = model.config.get_text_config(decoder=True)
        _check_layers(model, config)
        if kv_dtype is None and model.dtype not in _DTYPES:
            raise ConfigError.choice("model.dtype", model.dtype, _DTYPES)
        kind, heads, head_dim, v_head_dim = _rows(config)
        dtype = kv_dtype or _DTYPES[model.dtype]
        geometry = KVGeometry(
            kind=kind,
            num_layers=config.num_hidden_layers,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            page_size=page_size,
        )
        has_indexer = config.model_type == _INDEXED_MODEL
        return cls(geometry, config.num_attention_heads, _scaling(model, head_dim), has_indexer)

    @property
    def form(self) -> KVForm:
        """How the model's layers hand their KV over."""
        return _LatentForm() if self.geometry.kind is KVKind.MLA else _HeadsForm()


def _attention_modules(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling"))


def _check_layers(model: Any, config: Any) -> None:
    known = {"full_attention", "indexed_attention"} if config.model_type == _INDEXED_MODEL else {"full_attention"}
    other = set(getattr(config, "layer_types", None) or ()) - known
    if other:
        raise ConfigError("layer_types", sorted(other), f"every layer must be {' or '.join(sorted(known))}")
    for module in _attention_modules(model):
        if hasattr(module, "kv_lora_rank") and not hasattr(module, "expand_kv"):
            raise ConfigError("kv_lora_rank", module.kv_lora_rank, "such a model must hand its latents to its cache")


def _rows(config: Any) -> tuple[KVKind, int, int, int]:
    """Return the kind of KV, its heads, and the numbers of a key row and of a value row."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return KVKind.MLA, 1, rank + config.qk_rope_head_dim, rank
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVKind.MHA, getattr(config, "num_key_value_heads", None) or heads, head_dim, head_dim


def _scaling(model: Any, head_dim: int) -> float:
    found = {float(module.scaling) for module in _attention_modules(model)}
    if len(found) > 1:
        raise ConfigError("scaling", sorted(found), "must be the same in all layers")
    return found.pop() if found else float(head_dim**-0.5)


# Captures the outputs of a Hugging Face model's lightning indexers, for the algorithm `dsa`.

Report = Callable[[int, str, Tensor], None]


class _IndexerTaps:
    """Hooks on the indexers of a model, until `close`.

    DeepSeek-V3.2 selects tokens itself: each layer's indexer scores all keys in its cache. Here the coordinator
    selects, so the indexer gets a cache with one key, and hooks on its projections take the index queries and weights
    that it would have scored with. Its own choice, which is then meaningless, goes unused.

    Args:
        model: of the type deepseek_v32; for any other nothing is hooked.
        report: is called with ``(layer, name, tensor)`` of `index_query` and `index_weight`, each ``[T, ...]``.
    """

    def __init__(self, model: Any, report: Report) -> None:
        self._report = report
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        indexers = [module.indexer for module in model.modules() if getattr(module, "indexer", None) is not None]
        self._handles = [handle for indexer in indexers for handle in self._tap(indexer)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _tap(self, indexer: Any) -> list[Any]:
        layer: int = indexer.layer_idx

        def before(_module: Any, arguments: tuple[Any, ...]) -> None:
            self._angles[layer] = arguments[2]

        def query(_module: Any, _arguments: Any, out: Tensor) -> None:
            heads = out[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
            self._report(layer, "index_query", _rotated(heads, *self._angles.pop(layer)))

        def weight(_module: Any, _arguments: Any, out: Tensor) -> None:
            self._report(layer, "index_weight", out[0].float() * (indexer.n_heads**-0.5 * indexer.softmax_scale))

        return [
            indexer.register_forward_pre_hook(before),
            indexer.wq_b.register_forward_hook(query),
            indexer.weights_proj.register_forward_hook(weight),
        ]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading numbers of ``x [T, heads, d]`` by the angles ``[1, T, rope]``, in half-split order."""
    half = cos.shape[-1] // 2
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    c, s = cos[0, :, None, :half], sin[0, :, None, :half]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)


# The two places where a Hugging Face model accepts another implementation of attention, without a change of its code.

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
        yield _HfAttentionCache()
    finally:
        _RUNNING.reset(token)


def _record_extra(layer_id: int, name: str, value: Tensor) -> None:
    """Keep what an algorithm needs of a layer beyond keys and values until its attention; outside a pass nothing."""
    if (current := _RUNNING.get()) is not None:
        current.extra[layer_id][name] = value


class _HfAttentionCache(Cache):
    """Holds nothing: what a layer adds goes to the coordinator's pools, and attention reads it there.

    Its cache gets the new keys and values of a layer and hands them to the coordinator; its attention function, chosen
    by name in the configuration, gets the queries and asks the coordinator. Both find the running pass in a context
    variable: models pass no argument of ours down to their layers reliably.

    A pass is packed: all its tokens are one sequence of batch size 1 with explicit positions, so that requests of
    unequal lengths need no padding and no mask.
    """

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
        _record_extra(layer_idx, "index_key", indexer_key_states[0])
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


# Runs the passes of a Hugging Face causal language model.


class HfRunner:
    """Implements `kvcm.gpu_tier.engine.interfaces.PassRunner`.

    Args:
        model: a causal language model in evaluation mode, which uses this attention until `close`.
        hooks: of the coordinator.
        shape: of the model.
        prefill: attention of prompts.
    """

    def __init__(self, model: Any, hooks: EngineHooks, shape: AttentionShape, prefill: PrefillAttention) -> None:
        if model.training:
            raise ConfigError("model", "in training mode", "must be in evaluation mode; call model.eval()")
        self._model = model
        self._hooks = hooks
        self._shape = shape
        self._attention = AttentionLayer(hooks, prefill)
        self._original = model.config._attn_implementation
        if self._original == ATTENTION_NAME:
            raise StateError("the model decodes through another coordinator; close that first")
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        self._taps = _IndexerTaps(model, _record_extra)
        # Indexers want a mask; one that is given with four dimensions is passed on as it is.
        self._mask = torch.zeros(1, 1, 1, 1, device=model.device) if shape.has_indexer else None

    def close(self) -> None:
        """Give the model its own attention back."""
        self._taps.close()
        self._model.set_attn_implementation(self._original)

    def run(self, batch: ForwardBatch, token_ids: Tensor, states: Sequence[ModelState]) -> Tensor:
        """See `PassRunner`.

        Raises:
            StateError: the model was given another attention meanwhile.
        """
        if self._model.config._attn_implementation != ATTENTION_NAME:
            # It would attend to the pass's own tokens alone, without an error.
            raise StateError(f"the model's attention is now {self._model.config._attn_implementation!r}")
        positions = batch.positions[: len(token_ids)]
        self._hooks.forward_begin(batch)
        with running(self._attention, batch, self._shape) as cache:
            output = self._model(
                input_ids=token_ids[None],
                attention_mask=self._mask,
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last_tokens(batch),
            )
        self._hooks.forward_end(batch)
        logits: Tensor = output.logits[0]
        return logits


class SparseGenerator:
    """Generates with a causal language model of transformers, whose code stays as it is.

    The model has to be like Llama: every layer is softmax attention over all tokens and takes its attention function
    from transformers' registry. Until `close`, it can be used only through this object.

    Args:
        model: in evaluation mode, on the device it is to run on.
        config: settings of the tier.
        device_pages: pages of the KV pool on the device.
        max_requests: most prompts that run at a time.
        max_tokens: most tokens of one prompt and its continuation.
        chunk_tokens: most prompt tokens of a pass.
        piece_tokens: most keys of a prompt that prefill has decoded at a time.
        prefill: kernel of prefill attention, exact or flash; see `kvcm.gpu_tier.engine.layer_attention`.
        kv_dtype: how KV is stored; None means as the model computes.

    Attributes:
        coordinator: of the tier.
        engine: runs the passes; for callers that add and abort requests themselves.

    Raises:
        ConfigError: the model keeps KV in a way that is not supported, or is in training mode.
        StateError: another object decodes with the model.
    """

    def __init__(
        self,
        model: Any,
        config: SparseConfig,
        *,
        device_pages: int,
        max_requests: int,
        max_tokens: int,
        chunk_tokens: int = 8192,
        piece_tokens: int = 8192,
        prefill: str = "exact",
        kv_dtype: KVDtype | None = None,
    ) -> None:
        shape = AttentionShape.of(model, config.page_size, kv_dtype)
        self.coordinator = build(
            config,
            shape.geometry,
            num_q_heads=shape.num_q_heads,
            sm_scale=shape.sm_scale,
            device_pages=device_pages,
            max_requests=max_requests,
            max_tokens=max_tokens,
            device=model.device,
        )
        attention = PrefillAttention(self.coordinator.key_reader, shape.sm_scale, piece_tokens, prefill)
        try:
            self._runner = HfRunner(model, self.coordinator, shape, attention)
        except Exception:
            self.coordinator.close()
            raise
        self.engine = BatchEngine(self._runner, self.coordinator, device=model.device, chunk_tokens=chunk_tokens)
        self._max_tokens = max_tokens
        self._is_closed = False
        self._own_stop_tokens = _stop_tokens(model)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, stop_tokens: Collection[int] | None = None
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt; one that ended by a stop token has it as its last.

        Args:
            prompts: token ids, of any lengths.
            max_new_tokens: most tokens of a continuation.
            stop_tokens: tokens that end it; None means those of the model's generation settings.

        Raises:
            ConfigError: a prompt and its continuation would have more than `max_tokens`.
            PoolExhaustedError: a prompt does not fit although nothing else runs.
        """
        longest = max((len(prompt) for prompt in prompts), default=0)
        if longest + max_new_tokens > self._max_tokens:
            allowed = f"a prompt has {longest} tokens, and max_tokens={self._max_tokens} counts both"
            raise ConfigError("max_new_tokens", max_new_tokens, allowed)
        stop = self._own_stop_tokens if stop_tokens is None else stop_tokens
        return generate(self.engine, prompts, max_new_tokens, stop)

    def close(self) -> None:
        """End what runs, give the model its own attention and the host its memory back. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for request in self.engine.requests:
            self.engine.abort(request)
        self._runner.close()
        self.coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stop_tokens(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
