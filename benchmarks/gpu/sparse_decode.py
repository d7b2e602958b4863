"""Decode steps of attention under RetroInfer or PQCache, as the coordinator's hooks have them.

In each layer the new token is written, the algorithm ranks all clusters (or scores all tokens), attention of clusters
is estimated, the manager looks up and puts the execution buffer together (or names the slots of resident KV), attention
is computed and merged, and the cache is brought up to date. The attended KV comes from `fed_selections`. Requests
keep their length, alternately with one token more, so that the work due once a step is done in every step.

Not in a step: projections and norms, and clustering of decoded tokens, which is due once in a thousand steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from fed_selections import fed_selections
from sparse_system import SparseSystem
from torch import Tensor

from kvcm.gpu_tier.coordinator import attend
from kvcm.gpu_tier.kernels.operands import pool_rows
from kvcm.gpu_tier.types import ForwardBatch, Mode, Partial, ResidencyPlan, Selection, TokenMeta

__all__ = ["BEGIN", "PARTS", "Marks", "SparseDecode", "counted_hit_rate", "decode_pass"]

PARTS = ("write", "ranking", "estimation", "lookup", "gather", "attention", "admission", "new codes")
"""What a layer's step consists of, in its order."""
BEGIN = "begin"
"""Time before this mark is no part of a step."""
_COUNTED_STEPS = 8


def decode_pass(requests: Sequence[int], n_tokens: int, slots: Tensor) -> ForwardBatch:
    """Return a decode step of requests that all have `n_tokens` tokens, the new one included."""
    rows, device = len(requests), slots.device
    seq_lens = torch.full((rows,), n_tokens, dtype=torch.int32, device=device)
    return ForwardBatch(
        Mode.DECODE, torch.tensor(requests, device=device), seq_lens, slots, seq_lens.long() - 1,
        torch.tensor([rows], dtype=torch.int32, device=device), tuple(requests), (n_tokens,) * rows, (1,) * rows,
    )  # fmt: skip


class Marks:
    """Takes the time between the parts of a step, on the device; on a CPU by a wall clock.

    Args:
        is_gpu: whether there are events of a device.
    """

    def __init__(self, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._marks: list[tuple[str, torch.cuda.Event | float, float]] = []

    def __call__(self, part: str) -> None:
        """Take note that a part was issued."""
        host = time.perf_counter()
        if not self._is_gpu:
            self._marks.append((part, host, host))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event, host))

    def read(self, on_host: bool = False) -> dict[str, float]:
        """Return the seconds of each part so far, of the device or of the host; the device is done."""
        total: dict[str, float] = {}
        for before, now in pairwise(self._marks):
            if now[0] == BEGIN:
                continue
            total[now[0]] = total.get(now[0], 0.0) + (now[2] - before[2] if on_host else _apart(before[1], now[1]))
        return total

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()


def _apart(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3


class SparseDecode:
    """Steps of the first requests of a system.

    Args:
        system: the requests.
        batch: how many of them.
        hit_rate: of the selections.
    """

    def __init__(self, system: SparseSystem, batch: int, hit_rate: float) -> None:
        self.system, self.batch = system, batch
        work, device = system.work, system.runtime.device
        geometry = work.geometry
        self.fed = fed_selections(system, batch, hit_rate)
        self.q = torch.randn(batch, work.shape.num_q_heads, geometry.head_dim, device=device, dtype=torch.bfloat16)
        self.k, self.v = (
            torch.randn(batch, geometry.num_kv_heads, dims, device=device, dtype=torch.bfloat16)
            for dims in (geometry.head_dim, geometry.v_head_dim)
        )
        requests = system.requests[:batch]
        lengths = (work.n_tokens, work.n_tokens + 1)
        self._passes = [decode_pass(requests, n, system.newest_slots(batch, n - 1)) for n in lengths]
        self._mask = torch.ones(batch, dtype=torch.bool, device=device)
        self._number = 0
        self._last: tuple[ResidencyPlan, Selection] | None = None
        self.prepare()

    def prepare(self, _step: int = 0) -> None:
        """Go on to the next step, outside its time."""
        self._number += 1
        self.fed.prepare(self._number)

    def run(self, mark: Callable[[str], object] = lambda _part: None) -> None:
        """Run one step; it calls `mark` with the name of each part after issuing it."""
        batch = replace(self._passes[self._number % 2])  # a pass of its own: nothing of the step before is kept
        manager = self.system.manager
        mark(BEGIN)
        for layer in self.system.work.geometry.layers:
            self._layer(layer, batch, mark)
        if self.system.work.config.algo.keeps_host_copy() and not self.system.is_resident:
            stops = batch.lengths
            manager.offload(batch.requests, [stop - 1 for stop in stops], stops, batch.out_cache_loc)

    def _layer(self, layer: int, batch: ForwardBatch, mark: Callable[[str], object]) -> None:
        system, manager, algorithm = self.system, self.system.manager, self.system.algorithm
        manager.device.write(layer, batch.out_cache_loc, self.k, self.v)
        mark("write")
        selection = algorithm.retrieve_topk(self.q, layer, batch, self._mask)
        fed = self.fed.select(system.work.geometry.layer_index(layer), selection)
        manager.announce(layer, batch, fed)
        mark("ranking")
        estimate = algorithm.estimate(self.q, layer, batch, selection)
        mark("estimation")
        plan = manager.resolve(layer, batch, fed, self._mask)
        mark("lookup")
        fetched = manager.fetch(layer, plan)
        if fetched is not None:
            system.runtime.fence(fetched, "compute")
        mark("gather")
        self._attend(layer, plan, fed, estimate)
        mark("attention")
        manager.commit(layer, plan)
        mark("admission")
        algorithm.update_representations(layer, batch, self.k, self.v)
        mark("new codes")
        self._last = plan, fed

    def _attend(self, layer: int, plan: ResidencyPlan, fed: Selection, estimate: Partial | None) -> Tensor:
        blocks, geometry = self.system.manager.blocks, self.system.work.geometry
        if plan.execution is not None:
            assert blocks is not None
            meta = TokenMeta(blocks.execution.layer_kv(), plan.device_slot, plan.execution.lens)
        else:
            lens = fed.lengths if plan.lens is None else plan.lens
            meta = TokenMeta(self.system.manager.device.layer(layer), plan.device_slot, lens)
        partials = [] if estimate is None else [estimate]
        return attend(self.q, meta, partials, geometry.head_dim**-0.5, self.system.work.config.kernels)

    def is_right(self) -> bool:
        """Run a step and compare the KV that its last layer attended to, in the first request, with the stored KV."""
        self.run()
        assert self._last is not None
        plan, fed = self._last
        heads = range(self.system.work.geometry.num_kv_heads)
        return all(self._is_right(plan, head, fed.indices[0, head]) for head in heads)

    def _is_right(self, plan: ResidencyPlan, head: int, ids: Tensor) -> bool:
        system = self.system
        tokens = system.retrieved_tokens(head, ids)
        lens = plan.lens if plan.execution is None else plan.execution.lens
        assert lens is not None
        length = int(lens[0, head])
        slots = plan.device_slot[0, head, length - len(tokens) : length].long()
        if plan.execution is None:
            return torch.equal(slots.int(), system.manager.tables.table[system.requests[0], tokens])
        assert system.manager.blocks is not None
        pool = system.manager.blocks.execution.pool
        size = pool.geometry.page_size
        rows = pool_rows(pool.data, pool.addressing, 0, 0, pool.geometry.num_kv_heads)
        return torch.equal(rows[slots // size, slots % size, head].cpu(), system.stored_rows(head, tokens))


def counted_hit_rate(step: SparseDecode) -> float:
    """Return the hit rate of some steps from here on, by tokens; earlier ones were cold."""

    def counted() -> tuple[int, int]:
        counters = step.system.manager.policy.counters  # type: ignore[union-attr]
        if hasattr(counters, "token_hits"):
            return counters.token_hits, counters.tokens
        return counters.hits, counters.selected

    hits, tokens = counted()
    for _ in range(_COUNTED_STEPS):
        step.prepare()
        step.run()
    after = counted()
    return (after[0] - hits) / max(1, after[1] - tokens)
