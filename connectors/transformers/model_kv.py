"""The parts of a model's stored blocks, detected by a probe, and the length of a prefix by its stored parts.

Layers that keep KV in the same way and shape are one part: those with full attention, and those with a sliding window.
The state of linear-attention layers after a token is another part; only blocks at whose end a computation stopped have
it. A computation that continues after block `n` needs

1. the full-attention parts of all `n` blocks,
2. a window's part of as many blocks before `n` as the window reaches back,
3. the state at the end of block `n - 1`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from kvcm.connectors.layout import BlockLayout
from kvcm.connectors.layout.tensors import dtype_name
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, LocationSpecKind

__all__ = [
    "STATE",
    "KVPart",
    "ModelKV",
    "ModelParts",
    "PartOfBlock",
    "StatePart",
    "StateTensor",
    "compute",
    "empty_state",
    "join_states",
    "pack_state",
    "probe_model",
    "unpack_state",
]

STATE = "state"
_KV_GROUP, _ALL_GROUP = "kv", "kv+state"
_ALIGNMENT_BYTES = 16
PartOfBlock = tuple[str, int]
"""Name of a part, and index of the block in its prefix."""


@dataclass(frozen=True, slots=True)
class KVPart:
    """Layers whose KV is stored together.

    Attributes:
        name: of the spec.
        layers: their indices in the model's cache.
        layout: of the stored part.
        dtype: of K and V.
        devices: where each layer's KV is.
        window: tokens that a token sees, itself included; None for all.
    """

    name: str
    layers: tuple[int, ...]
    layout: BlockLayout
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    window: int | None = None

    @property
    def window_blocks(self) -> int | None:
        """Blocks before a block boundary that a token behind it may see; None for all."""
        return None if self.window is None else math.ceil((self.window - 1) / self.layout.block_tokens)

    @property
    def fingerprint(self) -> str:
        """Text that two parts share exactly when their stored bytes are interchangeable."""
        return f"{self.layout.fingerprint} of={self.layers} window={self.window}"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a linear-attention layer's state.

    Attributes:
        layer: its index in the model's cache.
        kind: `conv_states` or `recurrent_states`, as the cache names them.
        index: which of the layer's states.
        shape: of one sequence's, without the batch.
        dtype: of the elements.
        device: where it is.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(compare=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of one sequence's."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StatePart:
    """State of all linear-attention layers, stored as one part: each tensor from a multiple of 16 bytes on."""

    tensors: tuple[StateTensor, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor."""
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end)
            end += -(-tensor.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return tuple(offsets)

    @property
    def size_bytes(self) -> int:
        """Bytes of the stored part."""
        last = self.tensors[-1]
        return self.offsets[-1] + -(-last.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def fingerprint(self) -> str:
        """Text that two parts share exactly when their stored bytes are interchangeable."""
        return "kvcm-state/1 " + " ".join(
            f"{tensor.layer}.{tensor.kind}.{tensor.index}{list(tensor.shape)}{dtype_name(tensor.dtype)}"
            for tensor in self.tensors
        )


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a stored block.

    Attributes:
        block_tokens: tokens per block.
        kv: layers with attention, one entry per part; at least one.
        state: None when no layer has one.
    """

    block_tokens: int
    kv: tuple[KVPart, ...]
    state: StatePart | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block, without state."""
        return sum(part.layout.block_bytes for part in self.kv)

    @property
    def formats(self) -> dict[str, str]:
        """How each part is stored, by its name."""
        formats = {part.name: part.fingerprint for part in self.kv}
        return formats | ({STATE: self.state.fingerprint} if self.state else {})

    @property
    def spec_infos(self) -> list[LocationSpecInfo]:
        """The parts, to be registered."""
        full = LocationSpecKind.LSK_FULL_ATTENTION if self.state else LocationSpecKind.LSK_UNSPECIFIED
        infos = [LocationSpecInfo(part.name, part.layout.block_bytes, full) for part in self.kv]
        if self.state:
            infos.append(LocationSpecInfo(STATE, self.state.size_bytes, LocationSpecKind.LSK_LINEAR_ATTENTION))
        return infos

    @property
    def spec_groups(self) -> list[LocationSpecGroup]:
        """The sets of parts that are written together: all parts, and without the state for blocks that have none."""
        if not self.state:
            return []
        names = tuple(part.name for part in self.kv)
        return [LocationSpecGroup(_KV_GROUP, names), LocationSpecGroup(_ALL_GROUP, (*names, STATE))]

    @property
    def reach_blocks(self) -> int | None:
        """Blocks before a block boundary that the next token needs; None for all, or when there is a state."""
        reaches = [part.window_blocks for part in self.kv]
        known = [reach for reach in reaches if reach is not None]
        return None if self.state is not None or len(known) < len(reaches) else max([1, *known])

    @property
    def without_state(self) -> ModelParts:
        """The same blocks without state."""
        return replace(self, state=None)

    def group_of(self, has_state: bool) -> str:
        """Return the name of the spec group of a block that has a state, or has none."""
        return _ALL_GROUP if has_state else _KV_GROUP

    def usable_blocks(self, has: Callable[[str, int], bool], blocks: int) -> int:
        """Return the length of the longest prefix that can be gone on from.

        Args:
            has: whether a part of a block is known, by name of the part and index of the block.
            blocks: most blocks.
        """
        for part in self.kv:
            if part.window is None:
                blocks = next((block for block in range(blocks) if not has(part.name, block)), blocks)
        runs = [_runs(part, has, blocks) for part in self.kv if part.window is not None]
        for length in range(blocks, 0, -1):
            in_windows = all(run[length - 1] >= min(length, needed) for run, needed in runs)
            if in_windows and (self.state is None or has(STATE, length - 1)):
                return length
        return 0

    def needed(self, blocks: int) -> list[PartOfBlock]:
        """Return the parts that have to be loaded to go on behind a prefix of so many blocks."""
        needed: list[PartOfBlock] = []
        for part in self.kv:
            reach = part.window_blocks
            first = 0 if reach is None else max(0, blocks - reach)
            needed += [(part.name, block) for block in range(first, blocks)]
        return needed + ([(STATE, blocks - 1)] if self.state and blocks else [])


def _runs(part: KVPart, has: Callable[[str, int], bool], blocks: int) -> tuple[Sequence[int], int]:
    """Return how many consecutive blocks up to each one are known, and how many are needed."""
    runs: list[int] = []
    for block in range(blocks):
        runs.append((runs[-1] if runs else 0) + 1 if has(part.name, block) else 0)
    return runs, part.window_blocks or 0


# ---- the state of linear-attention layers as stored bytes ----


def _state_tensors(layers: Sequence[Any]) -> list[tuple[int, str, int, torch.Tensor]]:
    """Return layer, kind, index and value of every tensor of state in a cache, each `[batch, ...]`."""
    return [
        (position, kind, index, tensor)
        for position, layer in enumerate(layers)
        if isinstance(layer, LinearAttentionLayer)
        for kind in ("conv_states", "recurrent_states")
        for index, tensor in getattr(layer, kind).items()
        if tensor is not None
    ]


def empty_state(part: StatePart) -> torch.Tensor:
    """Return host memory for a stored state, zeroed: that is the state before the first token."""
    return torch.zeros(part.size_bytes, dtype=torch.uint8)


def pack_state(part: StatePart, layers: Sequence[Any], row: int) -> torch.Tensor:
    """Return a copy of a sequence's state as stored bytes in host memory; zeros where there is none yet."""
    memory = empty_state(part)
    for place, tensor in _places(part, memory):
        value = getattr(layers[tensor.layer], tensor.kind)[tensor.index]
        if value is not None:
            place.copy_(value[row])
    return memory


def unpack_state(part: StatePart, memory: torch.Tensor, layers: Sequence[Any]) -> None:
    """Give the layers of a cache of one sequence the state that was stored."""
    join_states(part, [memory], layers)


def join_states(part: StatePart, memories: Sequence[torch.Tensor], layers: Sequence[Any]) -> None:
    """Give the layers of a cache the stored states of its sequences, in their order."""
    rows = [_places(part, memory) for memory in memories]
    for places in zip(*rows, strict=True):
        tensor = places[0][1]
        value = torch.stack([place for place, _ in places]).to(tensor.device)
        _put(layers[tensor.layer], tensor, value)


def _put(layer: Any, tensor: StateTensor, value: torch.Tensor) -> None:
    layer.lazy_initialization(**{tensor.kind: value, "state_idx": tensor.index})
    getattr(layer, tensor.kind)[tensor.index].copy_(value)
    layer.has_previous_state[tensor.index] = True


def _places(part: StatePart, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, StateTensor]]:
    for offset, tensor in zip(part.offsets, part.tensors, strict=True):
        place = memory[offset : offset + tensor.size_bytes].view(tensor.dtype).view(tensor.shape)
        yield place, tensor


# ---- computation of some tokens of a sequence, as `generate` does it ----


def compute(
    model: Any,
    tokens: Sequence[int],
    start: int,
    cache: Cache,
    *,
    last_only: bool = True,
    last_position: int | None = None,
) -> torch.Tensor:
    """Compute tokens of one sequence without padding, and return their logits, `[token, vocabulary]`.

    Args:
        model: a causal language model.
        tokens: to compute.
        start: position of the first one; the cache holds all before it. Given to the model where it takes that: some
            models would count from 0.
        cache: is filled.
        last_only: whether the logits of the last token suffice.
        last_position: of the last token, when it does not follow the others.
    """
    positions = torch.arange(start, start + len(tokens), device=model.device)[None]
    if last_position is not None:
        positions[0, -1] = last_position
    possible = {"position_ids": positions, "logits_to_keep": int(last_only)}
    taken = inspect.signature(model.forward).parameters
    arguments = {name: value for name, value in possible.items() if name in taken}
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments).logits
    return logits[0]


# ---- detection of a model's KV, by computing a few tokens ----

_FULL_PART = "tp0"  # one process holds all heads; named as engines name their first rank
_KINDS = frozenset(
    {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
)
# More than a convolution reaches back; the second step is short, so that a lost state shows.
_PROBE_TOKENS, _PROBE_SPLIT = 24, 16
# Logits of a state that is carried on differ by rounding: by no more than what steps of other lengths make, several
# times over, or than the type resolves. Random models that lost theirs differ by 0.002 and more.
_MAX_NOISE_FACTOR = 4.0
_MIN_DIFFERENCE = 1e-3
_Shape = tuple[int | None, int, int, torch.dtype]


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The KV that a model computes.

    Attributes:
        parts: of a stored block.
        states_per_layer: of the model's cache, 0 for layers with attention alone.
        dtype: of the model.
        device: of its first weights.
        max_tokens: of a prompt, up to which KV depends on the tokens before it alone; None for no limit.
    """

    parts: ModelParts
    states_per_layer: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    max_tokens: int | None = None

    def check_layout(self, model: PreTrainedModel) -> None:
        """Check that a model's KV still looks like this.

        Raises:
            InvalidArgumentError: the model has another type, or is elsewhere.
        """
        if (model.dtype, model.device) != (self.dtype, self.device):
            raise InvalidArgumentError(
                f"model is {model.dtype} on {model.device}, was {self.dtype} on {self.device}: connect it again"
            )


def probe_model(model: PreTrainedModel, block_tokens: int) -> ModelKV:
    """Return the format of the model's KV, found by computing a few tokens.

    Args:
        model: a causal language model.
        block_tokens: tokens per block.

    Raises:
        InvalidArgumentError: KV of this kind of model cannot be reused; the message says why.
    """
    _check_kind(model)
    with torch.no_grad():
        layers, logits = _compute(model)
        state = _state_part(layers)
        parts = ModelParts(block_tokens, _kv_parts(layers, block_tokens), state)
        if state is not None:
            _check_state(model, logits)
        _check_later_tokens(model)
        max_tokens = _max_tokens(model)
    states = tuple(getattr(layer, "number_of_states", 0) for layer in layers)
    return ModelKV(parts, states, model.dtype, model.device, max_tokens)


def _check_kind(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise InvalidArgumentError("model is an encoder-decoder, must be a decoder only")
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if "chunked_attention" in kinds:
        raise InvalidArgumentError("model has layers of kind chunked_attention, whose KV is not reused")
    layers = DynamicCache(config=model.config).layers
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KINDS})
    if unknown:
        raise InvalidArgumentError(f"model has cache layers of kind {unknown}, whose KV is not reused")
    if all(type(layer) is LinearAttentionLayer for layer in layers):
        raise InvalidArgumentError("model has no layer with attention, must have one: blocks are of its KV")


def _compute(model: PreTrainedModel) -> tuple[list[Any], torch.Tensor]:
    cache = DynamicCache(config=model.config)
    try:
        logits = compute(model=model, tokens=_tokens(model), start=0, cache=cache, last_only=False)
    except Exception as error:  # models with caches of their own raise all kinds of them
        raise InvalidArgumentError(f"model cannot compute with the cache of transformers: {error!r}") from error
    return list(cache.layers), logits


def _tokens(model: PreTrainedModel) -> list[int]:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    return [number * 7919 % vocabulary for number in range(1, _PROBE_TOKENS + 1)]


def _kv_parts(layers: Sequence[Any], block_tokens: int) -> tuple[KVPart, ...]:
    shapes: dict[_Shape, list[int]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, DynamicLayer):
            shapes.setdefault(_shape_of(index, layer), []).append(index)
    parts: list[KVPart] = []
    for (window, heads, head_dim, dtype), indices in shapes.items():
        layout = BlockLayout(
            len(indices), kv_heads=heads, head_dim=head_dim, block_tokens=block_tokens, dtype=dtype_name(dtype)
        )
        devices = tuple(layers[index].keys.device for index in indices)
        name = _FULL_PART if window is None else f"window{window}"
        taken = sum(part.window == window for part in parts)
        parts.append(
            KVPart(
                f"{name}-{taken}" if taken else name,
                layers=tuple(indices),
                layout=layout,
                dtype=dtype,
                devices=devices,
                window=window,
            )
        )
    return tuple(parts)


def _shape_of(index: int, layer: Any) -> _Shape:
    if layer.keys is None:
        raise InvalidArgumentError(f"model: layer {index} of its cache keeps no KV, must keep it")
    keys, values = layer.keys, layer.values
    if keys.shape != values.shape or keys.dtype != values.dtype:
        found = f"K {tuple(keys.shape)} {keys.dtype}, V {tuple(values.shape)} {values.dtype}"
        raise InvalidArgumentError(f"model: layer {index} has {found}, must be of the same shape and type")
    return getattr(layer, "sliding_window", None), keys.shape[1], keys.shape[3], keys.dtype


def _state_part(layers: Sequence[Any]) -> StatePart | None:
    tensors = tuple(
        StateTensor(layer, kind=kind, index=index, shape=tuple(value.shape[1:]), dtype=value.dtype, device=value.device)
        for layer, kind, index, value in _state_tensors(layers)
    )
    return StatePart(tensors) if tensors else None


def _check_state(model: PreTrainedModel, at_once: torch.Tensor) -> None:
    """Check that the model goes on from a state: some compute several tokens as if there were none before them."""
    tokens, steps = _tokens(model), _PROBE_TOKENS - _PROBE_SPLIT
    alone = compute(
        model=model, tokens=tokens[:steps], start=0, cache=DynamicCache(config=model.config), last_only=False
    )
    noise = _difference(alone, at_once[:steps])
    cache = DynamicCache(config=model.config)
    compute(model=model, tokens=tokens[:_PROBE_SPLIT], start=0, cache=cache)
    behind = compute(model, tokens[_PROBE_SPLIT:], _PROBE_SPLIT, cache, last_only=False)
    difference = _difference(behind, at_once[_PROBE_SPLIT:])
    most = max(_MAX_NOISE_FACTOR * noise, torch.finfo(model.dtype).eps, _MIN_DIFFERENCE)
    if not difference <= most:  # also when it is not a number
        raise InvalidArgumentError(
            f"model: {type(model).__name__} does not go on from the state of its linear attention when several tokens"
            f" follow, so its state cannot be reused (its logits differ by {difference:.2g}, rounding by {noise:.2g})"
        )


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative difference at any token."""
    logits, expected = logits.float(), expected.float()
    return float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).max())


# ---- whether KV of a prefix depends on what comes behind it ----
#
# It may: attention that sees later tokens, activations quantised over a whole prompt, and RoPE whose frequencies follow
# the length of the prompt (dynamic NTK, LongRoPE). The first two show when other tokens follow. The last one shows when
# one more token is computed at a far position, which costs no more than at the next one: frequencies follow the highest
# position. Only computations of equal shapes are compared: those of others round differently.

# Of the first layer that differs at all, or the resolution of the type where that is coarser. Rounding begins below
# this and grows from layer to layer; what depends on later tokens begins above it.
_MAX_DIFFERENCE = 1e-5
_LENGTH_WORDS = frozenset({"chunk", "context", "ctx", "len", "length", "position", "positions", "seq", "window"})
_BEYOND = 4  # times the longest length in a configuration


def _check_later_tokens(model: PreTrainedModel) -> None:
    """Check that KV of the probe's tokens stays the same when other tokens follow."""
    tokens = _tokens(model)
    one, other = ([*tokens, *later] for later in (tokens, tokens[:1] * _PROBE_TOKENS))
    layer = _dependent_layer(_prefix_kv(model, one), _prefix_kv(model, other))
    if layer is not None:
        raise InvalidArgumentError(
            f"model: KV of {type(model).__name__} depends on the tokens that follow, in layer {layer}, so it cannot"
            " be reused"
        )


def _max_tokens(model: PreTrainedModel) -> int | None:
    """Return the length up to which KV does not depend on a prompt's length, None when it never does.

    Raises:
        InvalidArgumentError: it depends on it, and not from one length on.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None  # positions are places in the cache
    config = model.config.get_text_config(decoder=True)
    lengths = sorted({length for length in _lengths(config.to_dict()) if length > _PROBE_TOKENS + 1})
    if getattr(config, "rope_parameters", None):
        far = min([max(lengths, default=0) * _BEYOND, *_table_ends(model)])
    else:  # positions may be looked up in a table, which ends here
        far = int(getattr(config, "max_position_embeddings", None) or 0) - 1
    if far <= _PROBE_TOKENS:
        return None
    near = _kv_beside(model, _PROBE_TOKENS)
    layer = _dependent_layer(_kv_beside(model, far), near)
    limit = None if layer is None else _longest_independent(model, near, layer, far)
    _kv_beside(model, _PROBE_TOKENS)  # frequencies are back where they were
    for length in lengths:
        if length < (far if limit is None else limit) and _dependent_layer(_kv_beside(model, length), near) is not None:
            raise InvalidArgumentError(
                f"model: KV of {type(model).__name__} depends on whether a prompt has {length} tokens, but not on"
                f" whether it has {limit or far}, so it cannot be reused"
            )
    return limit


def _dependent_layer(kv: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> int | None:
    """Return the first layer whose KV differs, None when it is the same or differs by rounding."""
    for layer, pair in enumerate(zip(kv, other, strict=True)):
        if not torch.equal(*pair):
            return None if _kv_difference(*pair) <= max(_MAX_DIFFERENCE, torch.finfo(pair[0].dtype).eps) else layer
    return None


def _longest_independent(model: PreTrainedModel, near: Sequence[torch.Tensor], layer: int, far: int) -> int:
    """Return the longest prompt whose length does not change a layer's KV, after a longer one that may have done so."""
    same, other = _PROBE_TOKENS, far
    while other - same > 1:
        middle = (same + other) // 2
        _kv_beside(model, far)  # dynamic frequencies are put back by some lengths, and kept by others
        # The first difference is much smaller than the one that shows whether there is any.
        if torch.equal(_kv_beside(model, middle)[layer], near[layer]):
            same = middle
        else:
            other = middle
    return same + 1


def _table_ends(model: PreTrainedModel) -> list[int]:
    """Return the last positions of tables that may be of positions; some have two entries before the first position."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    sizes = [table.num_embeddings for table in tables if table is not model.get_input_embeddings()]
    return [size - 3 for size in sizes if size > _PROBE_TOKENS + 3]


def _lengths(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of tokens in a configuration."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif type(value) is int and _LENGTH_WORDS & set(str(name).split("_")):
            yield value


def _kv_beside(model: PreTrainedModel, position: int) -> list[torch.Tensor]:
    """Return the KV of the probe's tokens when one more token is at a position behind them."""
    tokens = _tokens(model)
    try:
        return _prefix_kv(model, [*tokens, tokens[0]], position)
    except Exception as error:  # models with a table of positions raise all kinds of them
        raise InvalidArgumentError(f"model cannot compute a token at position {position}: {error!r}") from error


def _prefix_kv(model: PreTrainedModel, tokens: Sequence[int], last_position: int | None = None) -> list[torch.Tensor]:
    """Return K and V of each layer with attention for the probe's tokens, `[kv_head, token, 2 * head_dim]`.

    A window keeps fewer of them.
    """
    cache = DynamicCache(config=model.config)
    compute(model=model, tokens=tokens, start=0, cache=cache, last_position=last_position)
    later = len(tokens) - _PROBE_TOKENS
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    return [torch.cat([layer.keys[0], layer.values[0]], dim=-1)[:, :-later] for layer in layers]


def _kv_difference(kv: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative difference at any token."""
    kv, expected = kv.float().transpose(0, 1).flatten(1), expected.float().transpose(0, 1).flatten(1)
    return _difference(kv, expected)
