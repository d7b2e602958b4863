"""Decode steps of DSA attention as an engine would drive them, over some layers of the model's size.

Three ways to hold the same KV: `Hierarchical` (all on the host, a buffer on the device), `Resident` (all on the device,
sparse attention) and `Dense` (all on the device, full attention). Each layer stores the new token's latent, scores all
index keys, takes the top-k and attends. The attended tokens come from a `SlidingTrace`, so that the hit rate is an
input; the scores and their top-k are computed all the same. Not part of a step: projections, experts, and the index
keys of the new token, which are the same for the two sparse ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from device_clock import DeviceClock
from pinned_pool import pinned_pool
from sliding_trace import SlidingTrace
from torch import Tensor

from kvcm.gpu_tier.config import DsaConfig, SparseConfig
from kvcm.gpu_tier.geometry import KVGeometry, Layout
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.kernels.indexer_score import indexer_score
from kvcm.gpu_tier.kernels.lru_diff import DiffOutputs, DiffScratch, SwapIn, lru_diff
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime
from kvcm.gpu_tier.types import ForwardBatch, LayerKV, MissPlan, Mode, ResidencyPlan, Selection, Unit

__all__ = ["Dense", "Hierarchical", "Indexer", "Resident", "Workload", "counted_hit_rate", "decode_batch", "host_pool"]

_COUNTED_STEPS = 8
_COUNTERS = ((4, torch.int64), (1, torch.int32))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one length.

    Attributes:
        geometry: of the measured layers.
        config: of DSA.
        num_q_heads: query heads.
        batch: requests B.
        n_tokens: tokens of each when the measurement starts; a multiple of the page size.
        most_steps: steps at most; space for so many more tokens is allocated.
        hit_rate: of the trace.
    """

    geometry: KVGeometry
    config: SparseConfig
    num_q_heads: int
    batch: int
    n_tokens: int
    most_steps: int
    hit_rate: float

    @property
    def max_tokens(self) -> int:
        """Tokens of a request at the end, in whole pages."""
        page = self.geometry.page_size
        return -(-(self.n_tokens + self.most_steps) // page) * page

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return pages ``int32 [B, P]`` and slots ``int64 [B, tokens]`` of requests that lie one behind the other."""
        pages = self.max_tokens // self.geometry.page_size
        table = torch.arange(self.batch * pages, dtype=torch.int32, device=device).view(self.batch, pages)
        return table, torch.arange(self.batch * self.max_tokens, device=device).view(self.batch, -1)


class Step:
    """What all three ways share: queries, new latents, the trace, outputs and the step's number.

    Args:
        work: the decoded workload.
        device: where.
    """

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.work = work
        self.device = device
        geometry, batch = work.geometry, work.batch
        self.q = torch.randn(batch, work.num_q_heads, geometry.head_dim, device=device, dtype=torch.bfloat16)
        self.latent = torch.randn(batch, 1, geometry.head_dim, device=device, dtype=torch.bfloat16)
        self.out_o = torch.empty(batch, work.num_q_heads, geometry.v_head_dim, device=device)
        self.out_lse = torch.empty(batch, work.num_q_heads, device=device)
        self.sm_scale = geometry.head_dim**-0.5
        self.trace = SlidingTrace(
            geometry.num_layers * batch, work.n_tokens - 1, work.config.top_k, work.hit_rate, device
        )
        shape = (geometry.num_layers, batch, 1, work.config.top_k)
        self.selected = torch.zeros(shape, dtype=torch.int32, device=device)
        self.lens = torch.full((batch, 1), work.config.top_k, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.number = -1

    def prepare(self, _step: int = 0) -> None:
        """Go on to the next step, outside its time: what a scheduler would do. Requests only grow."""
        self.number += 1
        newest = self.newest_token
        if newest >= self.work.max_tokens:
            raise ValueError(f"step {self.number}: {self.work.max_tokens} tokens fit; raise most_steps")
        self.seq_lens.fill_(newest + 1)
        self.selected.copy_(self.trace.select(self.number, newest).view(self.selected.shape))

    @property
    def newest_token(self) -> int:
        """The token of this step, the same in all requests."""
        return self.work.n_tokens + self.number


class Indexer:
    """Index keys of all requests, and the queries against them.

    Args:
        work: the decoded workload.
        clock: of the device.
    """

    def __init__(self, work: Workload, clock: DeviceClock) -> None:
        algo, device = work.config.algo, clock.device
        assert isinstance(algo, DsaConfig)
        self.k = work.config.top_k
        self.page_tokens = work.geometry.page_size
        self.table, slots = work.tables(device)
        row = algo.index_dim + 4
        self.keys = torch.empty(work.geometry.num_layers, slots.numel(), row, dtype=torch.uint8, device=device)
        piece = self._random_keys(min(slots.numel(), 1 << 16), algo.index_dim, device)
        for layer in self.keys:
            for start in range(0, len(layer), len(piece)):
                layer[start : start + len(piece)] = piece[: len(layer) - start]
        heads = torch.randn(work.batch, algo.index_heads, algo.index_dim, device=device)
        self.q8 = heads.to(torch.float8_e4m3fn)
        self.weight = torch.randn(work.batch, algo.index_heads, device=device)
        self.scores = torch.empty(work.batch, 1, work.max_tokens, device=device)
        self.indices = torch.empty(work.batch, 1, self.k, dtype=torch.int32, device=device)
        self.lengths = torch.empty(work.batch, 1, dtype=torch.int32, device=device)

    @staticmethod
    def _random_keys(rows: int, dim: int, device: torch.device) -> Tensor:
        numbers = torch.randn(rows, dim, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(rows, 1, device=device).add(0.5).view(torch.uint8)
        return torch.cat([numbers, scales], dim=1)

    def score(self, layer: int, seq_lens: Tensor) -> None:
        """Score all tokens."""
        keys, scores = self.keys[layer], self.scores[:, 0]
        indexer_score(self.q8, self.weight, keys, self.table, self.page_tokens, seq_lens, scores)

    def pick(self, seq_lens: Tensor) -> None:
        """Take the top-k of the scores."""
        topk_select(self.scores, seq_lens, self.k, self.indices, self.lengths)


class Hierarchical(Step):
    """All KV on the host, a buffer of the newest and most recently selected tokens on the device.

    Args:
        work: the decoded workload.
        indexer: its index keys.
        host: pool with at least its pages.
        runtime: of the device.
    """

    def __init__(self, work: Workload, indexer: Indexer, host: HostKVPool, runtime: DeviceRuntime) -> None:
        super().__init__(work, runtime.device)
        self.indexer = indexer
        self.host = host
        self._out: DiffOutputs | None = None
        geometry, capacity = work.geometry, work.config.device_buffer_size
        per_request = -(-(capacity + 2) // geometry.page_size) * geometry.page_size
        self.pool = DeviceKVPool(geometry, work.batch * per_request // geometry.page_size, runtime)
        self.transfer = KVTransfer(host, self.pool, runtime, work.config)
        _, self.host_slots = work.tables(self.device)
        self.policy = LruDiffPolicy(
            geometry, capacity=capacity, unit_tokens=1, selecting_heads=1, max_requests=work.batch,
            max_items=work.max_tokens, host_loc=self.host_slots, runtime=runtime,
        )  # fmt: skip
        self._admit(per_request)
        # Device and host slot of the new token of each request.
        self.written = torch.zeros(work.batch, dtype=torch.int64, device=self.device)
        self.backed_up = torch.zeros_like(self.written)
        self.prepare()
        self.batch = decode_batch(work, self.seq_lens)
        self.mask = torch.ones(work.batch, dtype=torch.bool, device=self.device)
        self.run()
        # The policy writes its plans to the same tensors in every step, one set for even layers and one for odd ones.
        self.plans: list[ResidencyPlan] = [self.resolve(layer) for layer in geometry.layers[:2]]

    def _admit(self, per_request: int) -> None:
        capacity = self.work.config.device_buffer_size
        first = torch.arange(self.work.batch, device=self.device, dtype=torch.int32)[:, None] * per_request
        slots = first + torch.arange(per_request, device=self.device, dtype=torch.int32)
        self.newest = slots[:, capacity : capacity + 2].contiguous()
        for request in range(self.work.batch):
            fill = self.policy.admit(request, slots[request, :capacity], self.newest[request], self.work.n_tokens)
            sources = self.host_slots[request][fill.items]
            self.transfer.load(sources[None], fill.slots[None], layers=self.work.geometry.layers)

    def prepare(self, _step: int = 0) -> None:
        """See `Step`; and where the new token goes."""
        super().prepare()
        self.written.copy_(self.newest[:, self.newest_token % 2])
        self.backed_up.copy_(self.host_slots[:, self.newest_token])

    def resolve(self, layer: int) -> ResidencyPlan:
        """Plan a layer."""
        selection = Selection(Unit.TOKEN, 1, self.selected[layer], self.lens)
        return self.policy.resolve(layer, self.batch, selection, self.mask)

    def swap(self, layer: int) -> None:
        """Plan a layer and move what the plan says, in one kernel where there is such a one."""
        if self._out is None:
            counters, errors = (torch.zeros(n, dtype=kind, device=self.device) for n, kind in _COUNTERS)
            rows, heads, width = self.selected.shape[1:]
            self._out = DiffOutputs.empty(rows, heads, width, counters, errors)
            items, capacity = self.host_slots.shape[1], self.work.config.device_buffer_size
            self._scratch = DiffScratch(rows, heads, items, capacity, self.device)
        swap_in = SwapIn(
            self.host.data, self.pool.data, self.host.addressing, self.pool.addressing, layer, layer, num_heads=1
        )
        batch = self.batch
        lru_diff(
            self.selected[layer], batch.req_pool_indices, batch.seq_lens, self.mask, batch.num_real_reqs,
            self.policy.layer_state(layer), self._out, self._scratch, unit_tokens=1, swap_in=swap_in,
        )  # fmt: skip

    def load(self, layer: int, plan: ResidencyPlan) -> None:
        """Move what the plan says."""
        layers = range(layer, layer + 1)
        if plan.promotion is not None:
            self.transfer.move(plan.promotion.src, plan.promotion.dst, layers=layers)
        misses: MissPlan | None = plan.misses
        assert misses is not None
        rows = misses.src_host.flatten(0, 1), misses.dst_dev.flatten(0, 1)
        self.transfer.load(*rows, layers=layers, count=misses.count.flatten())

    def attend(self, layer: int, plan: ResidencyPlan) -> None:
        """Attend to the buffer."""
        kv = self.pool.layer(layer)
        decode_attn_token(self.q, kv, plan.device_slot, self.lens, self.sm_scale, self.out_o, self.out_lse)

    def store(self) -> None:
        """Copy the new token of all layers to the host."""
        slots = self.written[:, None], self.backed_up[:, None]
        self.transfer.store(*slots, layers=self.work.geometry.layers)

    def is_right(self, host: HostKVPool) -> bool:
        """Run a step and compare what its last layer attended to with the same tokens on the host."""
        self.run()
        layer = self.work.geometry.layers[-1]
        plan = self.resolve(layer)
        read = self.pool.layer(layer).k.data[plan.device_slot[:, 0].long()].cpu()
        theirs = host.read(layer, 0, self.host_slots.gather(1, self.selected[layer, :, 0].long()).flatten())
        return bool((plan.device_slot >= 0).all()) and torch.equal(read.flatten(0, 1), theirs)

    def run(self) -> None:
        """One step."""
        for layer in self.work.geometry.layers:
            self.pool.write(layer, self.written, self.latent)
            self.indexer.score(layer, self.seq_lens)
            self.indexer.pick(self.seq_lens)
            plan = self.resolve(layer)
            self.load(layer, plan)
            self.attend(layer, plan)
        self.store()


class Resident(Step):
    """All KV on the device; each step attends to the selected tokens alone.

    Args:
        work: the decoded workload.
        indexer: its index keys; None for `Dense`.
        runtime: of the device.
        clock: fills the pool.
    """

    def __init__(self, work: Workload, indexer: Indexer | None, runtime: DeviceRuntime, clock: DeviceClock) -> None:
        super().__init__(work, runtime.device)
        self.indexer = indexer
        self.table, self.slots = work.tables(self.device)
        self.pool = DeviceKVPool(work.geometry, self.table.numel(), runtime)
        clock.fill(self.pool.data, random_latents(work.geometry, self.device))
        self.first = self.slots[:, :1, None].int().contiguous()
        # Slot of the new token of each request.
        self.written = torch.zeros(work.batch, dtype=torch.int64, device=self.device)
        self.prepare()

    def prepare(self, _step: int = 0) -> None:
        """See `Step`; and where the new token goes."""
        super().prepare()
        self.written.copy_(self.slots[:, self.newest_token])

    def attend(self, layer: int) -> None:
        """Attend to the selected tokens."""
        assert self.indexer is not None
        self.indexer.score(layer, self.seq_lens)
        self.indexer.pick(self.seq_lens)
        table = self.selected[layer] + self.first
        decode_attn_token(self.q, self.kv(layer), table, self.lens, self.sm_scale, self.out_o, self.out_lse)

    def kv(self, layer: int) -> LayerKV:
        """Return the rows of a layer."""
        return self.pool.layer(layer)

    def run(self) -> None:
        """One step."""
        for layer in self.work.geometry.layers:
            self.pool.write(layer, self.written, self.latent)
            self.attend(layer)


class Dense(Resident):
    """All KV on the device; each step attends to all of it."""

    def attend(self, layer: int) -> None:
        """Attend to all tokens."""
        page_tokens = self.work.geometry.page_size
        decode_attn_paged(
            self.q, self.kv(layer), self.table, self.seq_lens, page_tokens, self.sm_scale, self.out_o, self.out_lse
        )  # fmt: skip


def decode_batch(work: Workload, seq_lens: Tensor) -> ForwardBatch:
    """Return a decode step of all requests; the tokens on the host bound their lengths."""
    rows = torch.arange(work.batch, device=seq_lens.device)
    real = torch.tensor([work.batch], dtype=torch.int32, device=seq_lens.device)
    requests = tuple(range(work.batch))
    return ForwardBatch(
        Mode.DECODE, rows, seq_lens, rows, seq_lens.long() - 1, real, requests, (work.max_tokens,) * work.batch,
        (1,) * work.batch,
    )  # fmt: skip


def counted_hit_rate(policy: LruDiffPolicy, advance: Callable[[], object], step: Callable[[], object]) -> float:
    """Return the hit rate of some steps from here on: earlier ones were cold, or repeated to warm up."""
    before = policy.counters
    for _ in range(_COUNTED_STEPS):
        advance()
        step()
    after = policy.counters
    return (after.hits - before.hits) / (after.selected - before.selected)


def host_pool(work: Workload, runtime: DeviceRuntime, clock: DeviceClock, layout: Layout) -> HostKVPool:
    """Return a filled host pool for the requests of a workload."""
    pages = work.batch * work.max_tokens // work.geometry.page_size
    pool = pinned_pool(work.geometry, pages, layout, runtime)
    clock.fill(pool.data, random_latents(work.geometry, clock.device))
    return pool


def random_latents(geometry: KVGeometry, device: torch.device) -> Tensor:
    """Return some random rows, one behind the other: in every layout a pool of latents is a sequence of rows."""
    return geometry.parts[0].encode(torch.randn(1 << 12, geometry.head_dim, device=device)).flatten()
