"""vLLM's KV cache as groups of layers, and the stored format of a block of each group.

vLLM keeps layers in groups, each with block tables of its own. A stored block covers the same tokens in every group,
and has one part per group and tensor-parallel rank. A hit needs the parts of full-attention groups for every block,
those of sliding-window groups for the last blocks alone, and of linear attention the state behind the last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcm.connectors.layout import IndexRange, Shard, StoredFormat, rank_heads
from kvcm.connectors.layout.stored_format import KV_PACKED
from kvcm.connectors.layout.tensors import dtype_name
from kvcm.connectors.reuse.lookups import LookupPlan
from kvcm.connectors.reuse.registration import InstanceSpecs, KvIdentity
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, LocationSpecKind

__all__ = ["ALL_PARTS", "FULL_PARTS", "KvCacheGroup", "KvCacheLayout", "RankPart"]

ALL_PARTS = "all"
FULL_PARTS = "full"  # of blocks whose sliding-window parts, or states, the engine has dropped already
_LINEAR = LocationSpecKind.LSK_LINEAR_ATTENTION
_FULL = LocationSpecKind.LSK_FULL_ATTENTION


class RankPart(NamedTuple):
    """The part of a block that one rank has of one group.

    Attributes:
        name: of the spec.
        shard: layers and heads.
        is_writer: whether the rank stores it; ranks with the same heads share one part.
    """

    name: str
    shard: Shard
    is_writer: bool


@dataclass(frozen=True, slots=True)
class KvCacheGroup:
    """Layers that share block tables.

    Attributes:
        id: position among vLLM's groups.
        layer_names: in the order in which they are stored.
        stored: how a block of the group lies in storage; a state counts as one token.
        block_tokens: tokens per block.
        prefix: of the names of its parts.
        window_tokens: that a layer looks back at most, 0 for all.
        is_state: whether its layers keep a state, not KV: the one after the last token of a block.
        quantization: of KV, as vLLM calls it.
    """

    id: int
    layer_names: tuple[str, ...]
    stored: StoredFormat
    block_tokens: int
    prefix: str
    window_tokens: int = 0
    is_state: bool = False
    quantization: str = "NONE"

    @property
    def is_whole(self) -> bool:
        """Whether every block of a prefix is needed."""
        return not self.window_tokens and not self.is_state

    @property
    def window_blocks(self) -> int:
        """Blocks before a position that its next token needs; 0 when it needs all."""
        return -(-(self.window_tokens - 1) // self.block_tokens) if self.window_tokens else 0

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of its parts, those of all ranks."""
        return tuple(self.prefix + spec.name for spec in self.stored.specs)

    def part_of(self, rank: int, ranks: int) -> RankPart:
        """Return the part of a tensor-parallel rank."""
        mine = rank_heads(self.stored.heads, rank, ranks)
        shard = Shard(IndexRange(0, self.stored.layers), mine.heads)
        return RankPart(self.prefix + shard.name, shard, mine.replica == 0)


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """How one engine's KV is stored.

    Attributes:
        groups: of layers.
        block_tokens: tokens per block.
        ranks: tensor-parallel ranks.
    """

    groups: tuple[KvCacheGroup, ...]
    block_tokens: int
    ranks: int

    @classmethod
    def from_config(cls, config: VllmConfig, cache: KVCacheConfig) -> KvCacheLayout:
        """Return the plan of an engine.

        Raises:
            InvalidArgumentError: this kind of model, or this way to run it, is not supported; names the supported ones.
        """
        _check_parallel(config)
        ranks = config.parallel_config.tensor_parallel_size
        ids = cache.prefix_cacheable_group_ids
        if set(ids) != set(range(len(cache.kv_cache_groups))):
            raise InvalidArgumentError(
                "the model has KV that vLLM does not find by block hashes; that is not supported"
            )
        groups = tuple(_group(cache, group_id, config, ranks) for group_id in ids)
        sizes = {group.block_tokens for group in groups}
        if len(sizes) != 1 or (cache.hash_block_size or min(sizes)) != min(sizes):
            raise InvalidArgumentError(
                f"groups of layers have blocks of {sorted(sizes)} tokens, hashed by {cache.hash_block_size}:"
                " must all be the same"
            )
        if not any(group.is_whole for group in groups):
            raise InvalidArgumentError("no layer keeps the KV of all tokens: at least one must")
        if any(group.is_state for group in groups) and any(group.window_tokens for group in groups):
            raise InvalidArgumentError("the model has both sliding windows and linear attention: not supported")
        return cls(groups, min(sizes), ranks)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all groups and ranks."""
        return sum(group.stored.shard_bytes(group.stored.model) for group in self.groups)

    @property
    def lookup(self) -> LookupPlan:
        """The parts that a block must have to be a hit."""
        whole, window, state = (
            tuple(name for group in groups for name in group.part_names)
            for groups in (
                [group for group in self.groups if group.is_whole],
                [group for group in self.groups if group.window_tokens],
                [group for group in self.groups if group.is_state],
            )
        )
        return LookupPlan(whole, window, max(group.window_blocks for group in self.groups), state)

    def specs(self, instance_group: str, identity: KvIdentity) -> InstanceSpecs:
        """Return the registration data of the instance."""
        parts = [
            LocationSpecInfo(group.prefix + spec.name, spec.size_bytes, _LINEAR if group.is_state else _FULL)
            for group in self.groups
            for spec in group.stored.specs
        ]
        plan = self.lookup
        part_groups = [LocationSpecGroup(ALL_PARTS, tuple(sorted(part.name for part in parts)))]
        if plan.window_parts or plan.state_parts:
            part_groups.append(LocationSpecGroup(FULL_PARTS, tuple(sorted(plan.parts))))
        return InstanceSpecs(
            instance_group,
            block_tokens=self.block_tokens,
            parts=parts,
            deployment=identity.deployment(),
            part_groups=part_groups,
        )


def _check_parallel(config: VllmConfig) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(config.parallel_config, name, 1)
        if size != 1:
            raise InvalidArgumentError(f"{name} is {size}, must be 1: not supported by KVCMConnector")


def _group(cache: KVCacheConfig, group_id: int, config: VllmConfig, ranks: int) -> KvCacheGroup:
    group = cache.kv_cache_groups[group_id]
    prefix = f"g{group_id}." if len(cache.kv_cache_groups) > 1 else ""
    if isinstance(group.kv_cache_spec, MambaSpec):
        return _state_group(group_id, layers=group.layer_names, spec=group.kv_cache_spec, ranks=ranks, prefix=prefix)
    spec = _attention(group.kv_cache_spec, group.layer_names)
    is_latent = isinstance(spec, MLAAttentionSpec)
    heads = 1 if is_latent else config.model_config.get_total_num_kv_heads()
    if not is_latent and rank_heads(heads, 0, ranks).heads.size != spec.num_heads:
        raise InvalidArgumentError(
            f"a rank has {spec.num_heads} KV heads per layer, of {heads} over {ranks} ranks: not supported"
        )
    dtype = dtype_name(spec.dtype)
    item_bytes = spec.dtype.itemsize
    kv_parts = 1 if is_latent else 2
    if spec.state_content_size_bytes % (kv_parts * item_bytes) or spec.tokens_per_state != 1:
        raise InvalidArgumentError(f"layers of group {group_id} keep KV with scales or packed: not supported")
    stored = StoredFormat(
        layer_ends=(len(group.layer_names),),
        heads=heads,
        head_shards=min(heads, ranks),
        kv_parts=kv_parts,
        head_dim=spec.state_content_size_bytes // (kv_parts * item_bytes),
        block_tokens=spec.block_size,
        dtype=dtype,
        order=KV_PACKED,
    )
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    names, quantization = tuple(group.layer_names), spec.kv_quant_mode.name
    return KvCacheGroup(
        group_id,
        layer_names=names,
        stored=stored,
        block_tokens=spec.block_size,
        prefix=prefix,
        window_tokens=window,
        quantization=quantization,
    )


def _state_group(group_id: int, layers: Sequence[str], spec: MambaSpec, ranks: int, prefix: str) -> KvCacheGroup:
    """Describe states as blocks of one token: vLLM gives them out as bytes, whatever they consist of."""
    if spec.mamba_cache_mode != "align":
        raise InvalidArgumentError(
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}, must be 'align': otherwise vLLM keeps no state per block"
        )
    shards = 1 if spec.tp_replicated else ranks
    stored = StoredFormat(
        layer_ends=(len(layers),),
        heads=shards,
        head_shards=shards,
        kv_parts=1,
        head_dim=spec.state_content_size_bytes,
        block_tokens=1,
        dtype="int8",
        order=KV_PACKED,
    )
    return KvCacheGroup(
        group_id, layer_names=tuple(layers), stored=stored, block_tokens=spec.block_size, prefix=prefix, is_state=True
    )


def _attention(spec: KVCacheSpec, layers: Sequence[str]) -> AttentionSpec:
    """Return how a layer of a group keeps its KV."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = set(spec.kv_cache_specs.values())
        if len(kinds) != 1:
            raise InvalidArgumentError(f"layers {layers[0]} and others keep KV of different shapes: not supported")
        (spec,) = kinds
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise InvalidArgumentError(
            f"layer {layers[0]} keeps its KV as {type(spec).__name__}; supported are full attention, MLA, sliding"
            " windows and linear attention"
        )
    assert isinstance(spec, AttentionSpec)
    if spec.head_size_v != spec.head_size and not isinstance(spec, MLAAttentionSpec):
        raise InvalidArgumentError(f"K has {spec.head_size} and V {spec.head_size_v} elements per head: must be equal")
    return spec
