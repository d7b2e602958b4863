"""SparseCoordinator: the hooks that an engine calls, and what happens in them.

| hook | when | what |
|---|---|---|
| `on_request_begin` | a request arrives | memory for its prompt is held, an attached prefix is taken over |
| `plan_prefill`, `plan_decode` | before a pass | states advance, slots for the new tokens are allocated |
| `forward_begin` | before any layer | compute waits for what the pass depends on |
| `attention_begin` | before a layer's attention | retrieve → estimate → resolve → fetch → adapt |
| `attention_end` | after it | commit, representations of the new tokens |
| `forward_end` | after the last layer | the new tokens go to the host; lengths advance once |
| `prompt_finished` | after the last chunk | the request goes to STAGING, SPARSE or DENSE |
| `on_request_end` | finished, aborted, retracted | everything is released |

States advance in `plan_decode` and not in `forward_begin`: they decide where a new token's KV is written, which an
engine must know before the pass begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm
from kvcm.gpu_tier.backend import BackendAdaptor, FlashAdaptor
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.errors import StateError
from kvcm.gpu_tier.forward_pass import Step
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.kernels.lse_merge import lse_merge
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix
from kvcm.gpu_tier.manager.sparse_kvcache_manager import KVReader, OffloadTicket, ResidentLayers, SparseKVCacheManager
from kvcm.gpu_tier.manager.stream import HostStream
from kvcm.gpu_tier.request_lifecycle import RequestLifecycle, RequestState, RequestTrackers
from kvcm.gpu_tier.runtime import DeviceRuntime
from kvcm.gpu_tier.types import AttnMetadata, ForwardBatch, LayerKV, Mode, PagedMeta, Partial, ResidencyPlan

__all__ = ["SparseCoordinator", "attend"]

_LAGGING_STEPS = 3  # a token's host copy is relied on in the third step after its own at the latest


@dataclass(slots=True)
class _LayerInputs:
    """What `attention_end` needs of `attention_begin`."""

    layer_id: int
    q: Tensor
    k: Tensor
    v: Tensor | None
    extra: dict[str, Tensor]
    plan: ResidencyPlan | None = None


class SparseCoordinator:
    """Calls algorithm, manager and adaptor at the hooks of an engine. `kvcm.gpu_tier.assembly.build` makes one.

    Args:
        config: settings.
        lifecycle: the requests.
        adaptor: makes the metadata that sparse attention reads.
        stream: full attention from the host; None for other residencies.
        runtime: of the device.
        sm_scale: what scores are multiplied by.

    Attributes:
        sparse_tokens: tokens decoded with sparse attention so far.
        dense_tokens: tokens decoded densely so far.
    """

    def __init__(
        self,
        config: SparseConfig,
        lifecycle: RequestLifecycle,
        adaptor: BackendAdaptor,
        stream: HostStream | None,
        runtime: DeviceRuntime,
        sm_scale: float,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.sm_scale = sm_scale
        self._lifecycle = lifecycle
        self._adaptor = adaptor
        self._dense_adaptor = FlashAdaptor(config.page_size)
        self._stream = stream
        self._step: Step | None = None
        self._inputs: _LayerInputs | None = None
        self._offloads: deque[OffloadTicket] = deque(maxlen=2)
        self.sparse_tokens = 0
        self.dense_tokens = 0

    @property
    def trackers(self) -> RequestTrackers:
        """The requests."""
        return self._lifecycle.trackers

    @property
    def manager(self) -> SparseKVCacheManager:
        """Pools and residency."""
        return self._lifecycle.manager

    @property
    def algorithm(self) -> BaseSparseAlgorithm:
        """What selects."""
        return self._lifecycle.algorithm

    @property
    def resident(self) -> ResidentLayers | None:
        """Layers that attend densely, None when there are none."""
        return self._lifecycle.resident

    @property
    def key_reader(self) -> KVReader:
        """Reads a request's KV from both pools."""
        return self.manager.reader

    def close(self) -> None:
        """End threads and give host memory back; nothing may be called afterwards but this again, which does nothing.

        Fallback of the garbage collector.
        """
        self.manager.close()
        self.algorithm.close()

    # Requests.

    def on_request_begin(self, n_prompt: int, prefix: AttachedPrefix | None = None) -> int:
        """Take a request in and return its row in the per-request tables.

        Args:
            n_prompt: tokens of its prompt.
            prefix: host pages with the KV of its first tokens; with this call they are the coordinator's to release.

        Raises:
            ConfigError: the prompt or the prefix is too long, or side data that cannot be rebuilt is missing.
            PoolExhaustedError: there is too little memory. In each case nothing is held, the prefix neither.
        """
        return self._lifecycle.begin(n_prompt, prefix)

    def prompt_finished(self, request: int) -> None:
        """Take note that the last chunk of a prompt was computed.

        Raises:
            StateError: the prompt is not complete.
        """
        self._lifecycle.prompt_finished(request)

    def on_request_end(self, request: int, reason: str = "finished") -> None:
        """Release everything of a request; a row that is not in use is passed over.

        Args:
            request: its row, which may be given to another request from now on.
            reason: finished, aborted or retracted.

        A pass that has begun with the request must not go on: its hooks raise StateError, nothing of it counts, and the
        others' tokens are planned again.
        """
        if self._step is not None and request in self._step.batch.requests:
            self._step = None
        self._lifecycle.end(request, reason)

    def plan_prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> ForwardBatch:
        """Return the pass that brings the next `extend_lens[i]` prompt tokens of each request.

        Raises:
            ConfigError: more tokens than the prompt has left.
            StateError: a request's prompt is complete already.
            PoolExhaustedError: the device pool has too few pages; no request lost anything.
        """
        return self._lifecycle.plan_prefill(requests, extend_lens)

    def plan_decode(self, requests: Sequence[int], pad_to: int = 0) -> ForwardBatch:
        """Return the pass that brings one token of each request, padded to `pad_to` rows.

        Raises:
            ConfigError: a request has `max_tokens` tokens.
            StateError: a request's prompt is not complete.
            PoolExhaustedError: a pool has too few pages; no request lost anything, one has to be retracted.
        """
        return self._lifecycle.plan_decode(requests, pad_to)

    # A forward pass.

    def forward_begin(self, batch: ForwardBatch) -> None:
        """Begin a pass.

        Raises:
            StateError: a request has ended or advanced since the pass was planned.
        """
        self._step = None
        self._lifecycle.check_fresh(batch)
        self.manager.poll()
        if len(self._offloads) == 2:
            # The newest slots of the step before the last are about to be overwritten, and what lay there may have to
            # be loaded. The host may be several steps ahead of the device, so that it has not seen the copy end.
            self.manager.reach(self._offloads[0])
        if self._offloads and self._reads_last_token(batch):
            self.manager.reach(self._offloads[-1])
        trackers = [self.trackers[request] for request in batch.requests]
        sparse = [t.state is RequestState.SPARSE and batch.mode is Mode.DECODE for t in trackers]
        resident = None if self.resident is None else self.resident.table
        self._step = Step.of(batch, sparse, self.manager.tables.table, resident)
        if self._stream is not None and any(sparse):
            if self._offloads:  # the last step's token is read from the host, too
                self.runtime.fence(self._offloads[-1].done, "h2d")
            totals = [t.seq_len if is_sparse else 0 for t, is_sparse in zip(trackers, sparse, strict=True)]
            self._stream.begin(batch.requests, tuple(totals))

    def _reads_last_token(self, batch: ForwardBatch) -> bool:
        """Whether the token of the step before may have to be loaded at once, or may be overwritten."""
        if self.manager.blocks is not None:
            return self.manager.blocks.shortest_ring(batch.requests) < _LAGGING_STEPS
        return not self.config.promote_newest

    def write_kv(self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None) -> None:
        """Write the pass's KV to `out_cache_loc`; for engines that do not do so themselves.

        Args:
            layer_id: id of the layer.
            batch: the pass.
            k: ``[T, H, d]`` keys after RoPE, or latents ``[T, 1, D]``.
            v: ``[T, H, dv]`` values; None for MLA.
        """
        self.manager.device.write(layer_id, batch.out_cache_loc, k, v)

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
        """Prepare a layer's attention; the KV of the pass is written already.

        Args:
            q: ``[T, Hq, D]`` queries after RoPE; of MLA absorbed.
            k: ``[T, H, D]`` keys of the pass.
            v: its values; None for MLA.
            layer_id: id of the layer.
            batch: the pass.
            meta: the engine's own metadata of this layer, returned as it is when no row is sparse.
            extra: what the algorithm needs beyond them.

        Returns:
            Of a decode step what the attention kernel is to read, and partials to merge with what it computes; of
            prefill (None, []): the engine computes exact attention.
        """
        step = self._current(batch)
        if self.resident is not None and layer_id in self.resident.layers:
            self.resident.pool.write(layer_id, step.resident_slots, k, v)
        inputs = _LayerInputs(layer_id, q, *self._as_stored(k, v), extra)
        if batch.mode is Mode.DECODE and self._represents(layer_id) and self.algorithm.updates_before_retrieval:
            self.algorithm.update_representations(layer_id, batch, inputs.k, inputs.v, **extra)
        partials: list[Partial] = []
        if batch.mode is Mode.DECODE and (meta is None or step.any_sparse):
            meta, partials, inputs.plan = self._to_read(inputs, step)
        self._inputs = inputs
        return meta, partials

    def _to_read(self, inputs: _LayerInputs, step: Step) -> tuple[AttnMetadata, list[Partial], ResidencyPlan | None]:
        """Return what a layer's attention reads, what to merge with that, and the plan that brought it there."""
        layer_id = inputs.layer_id
        if self.resident is not None and layer_id in self.resident.layers:
            assert step.resident is not None
            return self._dense_adaptor.dense_metadata(self.resident.pool.layer(layer_id), step.resident), [], None
        if not step.any_sparse:
            return self._dense_adaptor.dense_metadata(self.manager.device.layer(layer_id), step.dense), [], None
        if self._stream is not None:
            return *self._streamed(inputs.q, layer_id, step), None
        return self._selected(inputs, step)

    def _represents(self, layer_id: int) -> bool:
        return self.algorithm.selects and not (self.resident and layer_id in self.resident.layers)

    def _current(self, batch: ForwardBatch) -> Step:
        if self._step is None or self._step.batch is not batch:
            raise StateError("forward_begin was not called for this batch")
        return self._step

    def _as_stored(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what representations are made of: numbers as attention will read them."""
        formats = self.manager.device.geometry.parts
        if self.algorithm.selects and self.algorithm.represents_keys:
            k = formats[0].decode(formats[0].encode(k))
        if v is None or not self.algorithm.needs_values:
            return k, None
        return k, formats[1].decode(formats[1].encode(v))

    def _selected(self, inputs: _LayerInputs, step: Step) -> tuple[AttnMetadata, list[Partial], ResidencyPlan]:
        layer_id, batch = inputs.layer_id, step.batch
        kv = self.manager.device.layer(layer_id)
        selection = self.algorithm.retrieve_topk(inputs.q, layer_id, batch, step.sparse_mask, **inputs.extra)
        if self.config.debug_checks:
            selection.validate(batch)
        self.manager.announce(layer_id, batch, selection)
        # The device estimates while the host looks up what to fetch, or beside the copies that it has planned itself.
        estimate = self.algorithm.estimate(inputs.q, layer_id, batch, selection) if self.manager.plans_on_host else None
        plan = self.manager.resolve(layer_id, batch, selection, step.sparse_mask)
        fetched = self.manager.fetch(layer_id, plan)
        if not self.manager.plans_on_host:
            estimate = self.algorithm.estimate(inputs.q, layer_id, batch, selection)
        dense = self._dense_part(inputs.q, kv, step) if plan.execution is not None and step.dense.longest else None
        if fetched is not None:
            self.runtime.fence(fetched, "compute")
        meta = self._adaptor.adapt_for_attn_metadata(
            selection=selection, plan=plan, sparse_mask=step.sparse_mask, batch=batch, kv=kv, dense=step.dense
        )
        return meta, [partial for partial in (dense, estimate) if partial is not None], plan

    def _dense_part(self, q: Tensor, kv: LayerKV, step: Step) -> Partial:
        """Return the attention of the dense rows, which are not in the execution buffer; while misses are fetched."""
        meta = replace(self._dense_adaptor.dense_metadata(kv, step.dense), cache_seqlens=step.dense_lengths)
        return _partial_of(q, meta, self.sm_scale, self.config.kernels)

    def _streamed(self, q: Tensor, layer_id: int, step: Step) -> tuple[AttnMetadata, list[Partial]]:
        """The tokens that are not yet on the host from the arena, the others streamed."""
        assert self._stream is not None
        kv = self.manager.device.layer(layer_id)
        newest = step.newest_token
        meta = self._adaptor.adapt_for_attn_metadata(
            selection=newest[0], plan=newest[1], sparse_mask=step.sparse_mask, batch=step.batch, kv=kv, dense=step.dense
        )
        return meta, self._stream.partials(q, layer_id, self.sm_scale)

    def attend(self, q: Tensor, meta: AttnMetadata | None, partials: list[Partial], sm_scale: float) -> Tensor:
        """Return the attention of a decode step, ``f32 [B, Hq, dv]``; for engines without a kernel of their own."""
        return attend(q, meta, partials, sm_scale, self.config.kernels)

    def attention_end(self, out: Tensor, layer_id: int, batch: ForwardBatch) -> None:
        """Finish a layer's attention, whose output was `out`."""
        self._current(batch)
        inputs, self._inputs = self._inputs, None
        if inputs is None or inputs.layer_id != layer_id:
            raise StateError(f"attention_begin was not called for layer {layer_id}")
        if inputs.plan is not None:
            self.manager.commit(layer_id, inputs.plan)
        if self._represents(layer_id):
            self._represent(inputs, batch)

    def _represent(self, inputs: _LayerInputs, batch: ForwardBatch) -> None:
        k, v = inputs.k, inputs.v
        if batch.mode is Mode.PREFILL:
            self.algorithm.construct_representations(inputs.layer_id, batch, k, v, inputs.q, **inputs.extra)
        elif not self.algorithm.updates_before_retrieval:
            self.algorithm.update_representations(inputs.layer_id, batch, k, v, **inputs.extra)

    def forward_end(self, batch: ForwardBatch) -> None:
        """Finish a pass: its tokens begin their way to the host, and lengths advance."""
        step = self._current(batch)
        self._step = None
        if batch.mode is Mode.DECODE:
            self.sparse_tokens += step.num_sparse
            self.dense_tokens += batch.num_real - step.num_sparse
        if (ticket := self._lifecycle.offload_pass(batch)) is not None:
            self._offloads.append(ticket)
        for request, length, extend in zip(batch.requests, batch.lengths, batch.extend_lens, strict=True):
            tracker = self.trackers[request]
            if self._lifecycle.is_exact(tracker):
                tracker.exact_tokens += extend
            tracker.seq_len = length


def attend(
    q: Tensor, meta: AttnMetadata | None, partials: list[Partial], sm_scale: float, kernels: str = "auto"
) -> Tensor:
    """Return the attention of one token per row.

    Args:
        q: ``[B, Hq, D]`` queries.
        meta: what to read; None when everything is in `partials`.
        partials: attention over other tokens.
        sm_scale: what scores are multiplied by.
        kernels: implementation.

    Returns:
        ``f32 [B, Hq, dv]``; 0 for rows without tokens.
    """
    parts = [*partials] if meta is None else [_partial_of(q, meta, sm_scale, kernels), *partials]
    if len(parts) == 1:
        return parts[0].o
    o, lse = torch.empty_like(parts[0].o), torch.empty_like(parts[0].lse)
    lse_merge(torch.stack([p.o for p in parts]), torch.stack([p.lse for p in parts]), o, lse, impl=kernels)
    return o


def _partial_of(q: Tensor, meta: AttnMetadata, sm_scale: float, kernels: str = "auto") -> Partial:
    """Return the attention over what the metadata names, to be merged; arguments as of `attend`."""
    o = torch.empty(*q.shape[:2], meta.kv.v_dims, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if isinstance(meta, PagedMeta):
        decode_attn_paged(
            q=q,
            kv=meta.kv,
            page_table=meta.page_table,
            cache_seqlens=meta.cache_seqlens,
            page_tokens=meta.page_tokens,
            sm_scale=sm_scale,
            out_o=o,
            out_lse=lse,
            impl=kernels,
        )
    else:
        decode_attn_token(
            q=q,
            kv=meta.kv,
            token_table=meta.token_table,
            lens=meta.lens,
            sm_scale=sm_scale,
            out_o=o,
            out_lse=lse,
            impl=kernels,
        )
    return Partial(o, lse)
