"""The values that algorithms, adaptors, residency policies and the coordinator exchange.

Symbols: B rows of the batch, T tokens of the batch, H KV heads, Hq query heads, Hs heads that select on their own (1 or
H), K selected items, n tokens of a request. Ids are int32 with -1 as padding; host slots are int64. An *item* is what
residency moves: `unit_tokens` consecutive tokens (1, or a scoring page). A *slot* is a token's place in a pool
(page · page_size + offset); the slot of an item is that of its first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Rows

__all__ = [
    "AttnMetadata", "CopyRuns", "ExecutionPlan", "ForwardBatch", "LayerKV", "MissPlan", "Mode", "PagedMeta", "Partial",
    "Promotion", "ResidencyPlan", "Selection", "Source", "SteadyRing", "SteadyZone", "TokenMeta",
    "TokenRanges", "Unit",
]  # fmt: skip


class Mode(StrEnum):
    """What a forward pass does."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"


class Unit(StrEnum):
    """What an algorithm selects."""

    TOKEN = "token"  # noqa: S105 - no secret
    PAGE = "page"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass.

    In a decode step a row is one token of one request, T = B. In prefill row i brings `extend_lens[i]` tokens, and the
    rows' tokens follow each other. Rows from `num_real` on are padding of a CUDA graph: kernels leave -1 or 0 for them.

    Attributes:
        mode: prefill, decode or idle.
        req_pool_indices: ``int64 [B]`` slot of each request in the per-request tables.
        seq_lens: ``int32 [B]`` tokens of each request, those of this pass included.
        out_cache_loc: ``int64 [T]`` device slot each token's KV is written to, before `attention_begin`.
        positions: ``int64 [T]`` position of each token in its request.
        num_real_reqs: ``int32 [1]`` rows that are requests.
        requests: `req_pool_indices` of the real rows on the host, without waiting for the device.
        lengths: `seq_lens` of the real rows on the host.
        extend_lens: tokens that each real row brings, on the host; all 1 in decode.
    """

    mode: Mode
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    positions: Tensor
    num_real_reqs: Tensor
    requests: tuple[int, ...]
    lengths: tuple[int, ...]
    extend_lens: tuple[int, ...]

    @property
    def rows(self) -> int:
        """B, padding included."""
        return self.req_pool_indices.shape[0]

    @property
    def num_real(self) -> int:
        """Rows that are requests."""
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """Tokens that are attended to without retrieval: the first `sink` and the last `local` of each request."""

    sink: int
    local: int


@dataclass(frozen=True, slots=True)
class SteadyRing:
    """Places of a request's steady tokens on the device: the first `sink` for good, the others by turns.

    Attributes:
        sink: first tokens.
        ring: places of the others; at no time are more of them steady.
    """

    sink: int
    ring: int

    @property
    def capacity(self) -> int:
        """All places."""
        return self.sink + self.ring

    def position(self, token: int) -> int:
        """Return the place of a token while it is steady."""
        return token if token < self.sink else self.sink + (token - self.sink) % self.ring


@dataclass(frozen=True, slots=True)
class SteadyZone:
    """Tokens of a layer that are attended to without retrieval and never leave the device: those before `sink` and
    those from `first` on, the same for all heads.

    Attributes:
        sink: first tokens of every request.
        first: ``int32 [B]`` first token of the recent ones, at least `sink` where the request has so many tokens; 0 for
            rows that do not select.
        firsts: the same of the real rows on the host; of those that do not select it may be any token.
    """

    sink: int
    first: Tensor
    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """What each row, and each head that selects on its own, attends to.

    Attributes:
        unit: kind of the items. The id of a cluster is its place in the request's index of the layer.
        unit_tokens: tokens of an item; 0 for clusters, whose sizes differ.
        indices: ``int32 [B, Hs, K]`` ids of items, unique in a row, left-aligned, -1 behind `lengths`.
        lengths: ``int32 [B, Hs]`` valid ids.
        always: tokens among them that were not retrieved but always belong to the set; for metrics only.
        steady: tokens attended to beside the items; None when the items are all.
        estimate: items whose attention is estimated and not computed, disjoint from these; None when there are none.
    """

    unit: Unit
    unit_tokens: int
    indices: Tensor
    lengths: Tensor
    always: TokenRanges | None = None
    steady: SteadyZone | None = None
    estimate: Selection | None = None

    def validate(self, batch: ForwardBatch) -> None:
        """Check the invariants above; reads the device, so only for tests and `debug_checks`.

        Raises:
            ConfigError: one of them does not hold.
        """
        width = self.indices.shape[-1]
        inside = torch.arange(width, device=self.indices.device) < self.lengths[..., None]
        if not torch.equal(self.indices >= 0, inside):
            raise ConfigError("indices", self.indices.tolist(), "ids must be left-aligned, -1 behind lengths")
        items = -(-batch.seq_lens // max(1, self.unit_tokens))
        if bool((self.indices >= items[:, None, None]).any()):
            raise ConfigError("indices", int(self.indices.max()), "an id is not below the number of items")
        ordered = self.indices.sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
            raise ConfigError("indices", self.indices.tolist(), "an id repeats in a row")


@dataclass(frozen=True, slots=True)
class MissPlan:
    """Items to copy from host to device, left-aligned.

    Attributes:
        src_host: ``int64 [B, Hs, K]`` host slot of each item's first token.
        dst_dev: ``int32 [B, Hs, K]`` device slot of it.
        count: ``int32 [B, Hs]`` items to copy.
    """

    src_host: Tensor
    dst_dev: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Promotion:
    """Items to copy on the device before anything is loaded: the previous newest item into the buffer.

    Attributes:
        src: ``int32 [B, Hs]`` device slot of the item, -1 when there is none.
        dst: ``int32 [B, Hs]`` device slot it moves to.
    """

    src: Tensor
    dst: Tensor


class Source(IntEnum):
    """Where a run of an execution plan lies."""

    STEADY = 0
    CACHE = 1
    HOST = 2


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Runs of consecutive tokens to copy, for each row and KV head; line ``r·H + h`` is head h of row r.

    Attributes:
        kind: ``int32 [B·H, U]`` source of each run, see `Source`; a negative one is skipped.
        src: ``int64 [B·H, U]`` slot of its first token in the source.
        dst: ``int32 [B·H, U]`` slot of it in the target.
        tokens: ``int32 [B·H, U]`` tokens of the run.
        count: ``int32 [B·H]`` runs of each line.
    """

    kind: Tensor
    src: Tensor
    dst: Tensor
    tokens: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How the tokens that a layer attends to are put together in the execution buffer.

    Row r's head h attends to the first ``lens[r, h]`` tokens of the row's part of the buffer. Their order depends on
    the selection alone and never on where they come from: attention adds up in the same order for any content of
    the cache.

    Attributes:
        runs: what to copy.
        lens: ``int32 [B, H]`` tokens of each row and head; 0 for rows that do not select.
    """

    runs: CopyRuns
    lens: Tensor


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Where the selected items are after the step, and what has to move for that.

    Attributes:
        device_slot: ``int32 [B, Hs, K]`` device slot of the first token of each selected item, -1 as in the selection.
            With `execution` it is the table of the execution buffer, ``[B, H, S]``; of clusters without it, the slots
            of their tokens and of the steady ones.
        misses: what to load; None when the policy never loads.
        promotion: what to move on the device first; None when the policy never does.
        evicted_items: ``int32 [B, Hs, K]`` items that lost their place, -1 for an empty one; None likewise.
        evicted_slots: ``int32 [B, Hs, K]`` their device slots, left-aligned; None likewise.
        execution: how the execution buffer is put together; None where attention reads tokens where they lie.
        lens: ``int32 [B, Hs]`` valid slots of `device_slot` where that follows from more than the selection.
    """

    device_slot: Tensor
    misses: MissPlan | None = None
    promotion: Promotion | None = None
    evicted_items: Tensor | None = None
    evicted_slots: Tensor | None = None
    execution: ExecutionPlan | None = None
    lens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The rows of one layer that attention reads: keys and values, or latents alone (`v` is None) for MLA."""

    k: Rows
    v: Rows | None
    v_dims: int


@dataclass(frozen=True, slots=True)
class PagedMeta:
    """FlashAttention's paged form: one table for all heads; all pages but a row's last are full.

    Attributes:
        kv: the rows that the table points into.
        page_table: ``int32 [B, Pmax]`` pages; page p is slots ``p·page_tokens`` to ``(p+1)·page_tokens - 1``.
        cache_seqlens: ``int32 [B]`` tokens of each row; 0 for padding.
        page_tokens: tokens of a page of this table.
    """

    kv: LayerKV
    page_table: Tensor
    cache_seqlens: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class TokenMeta:
    """Attention over single tokens, for each head that selects on its own.

    Attributes:
        kv: the rows that the table points into.
        token_table: ``int32 [B, Hs, K]`` slots, -1 as padding.
        lens: ``int32 [B, Hs]`` valid slots.
    """

    kv: LayerKV
    token_table: Tensor
    lens: Tensor


AttnMetadata = PagedMeta | TokenMeta


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the tokens: output ``o f32 [B, Hq, dv]`` and log-sum-exp ``lse f32 [B, Hq]``.

    An empty part has lse = -inf and o = 0.
    """

    o: Tensor
    lse: Tensor
