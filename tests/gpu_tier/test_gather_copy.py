"""Execution buffers are put together from their sources, in all implementations of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gather_cases import Gather, random_gather
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing, KVGeometry, KVKind, Layout
from gpu_tier.kernels.gather_copy import gather_copy
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.rows import KVDtype
from gpu_tier.types import CopyRuns

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PARTS = 4


def _run(gather: Gather, impl: str) -> tuple[Tensor, list[int]]:
    moved = torch.full((len(gather.sources),), 5, dtype=torch.int64, device=gather.runs.kind.device)
    gather_copy(gather.sources, gather.target, gather.runs, num_heads=gather.num_heads, moved=moved, impl=impl)
    return gather.target.data.cpu(), [number - 5 for number in moved.tolist()]


def _seeds(part: int, number: int) -> range:
    each = examples(number) // PARTS
    return range(part * each, (part + 1) * each)


def _compare(gather: Gather, impl: str, device: str, seed: int) -> None:
    data, moved = gather.wanted()
    got, counted = _run(gather if device == "cpu" else gather.on(device), impl)
    assert torch.equal(got, data), seed
    assert counted == moved, seed


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("impl", "number"), [("reference", 200), ("triton", 100)])
def test_each_run_is_where_it_was_sent(impl: str, number: int, part: int) -> None:
    for seed in _seeds(part, number):
        _compare(random_gather(seed), impl, "cpu", seed)


@needs_gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_kernels_of_a_gpu_do_the_same(impl: str, part: int) -> None:
    for seed in _seeds(part, 200):
        _compare(random_gather(seed), impl, "cuda", seed)
        _compare(random_gather(seed, most_tokens=150, most_runs=40, most_rows=16), impl, "cuda", seed)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_runs_longer_than_a_tile_and_more_lines_than_a_group_are_whole(impl: str) -> None:
    for seed in range(10):
        _compare(random_gather(seed, most_tokens=700, most_runs=1, most_rows=1), impl, "cpu", seed)
    _compare(random_gather(4, most_tokens=2, most_runs=2, most_rows=400), impl, "cpu", 4)


def test_nothing_is_counted_and_nothing_copied_without_runs() -> None:
    gather = random_gather(3)
    none = torch.zeros_like(gather.runs.count)
    empty = replace(gather, runs=replace(gather.runs, count=none))
    assert empty.wanted()[1] == [0] * len(gather.sources)
    for impl in ("reference", "triton"):
        _compare(empty, impl, "cpu", 3)
    no_width = CopyRuns(*(table[:, :0].contiguous() for table in _tables(gather.runs)), none)
    gather_copy(gather.sources, gather.target, no_width, num_heads=gather.num_heads)


def _tables(runs: CopyRuns) -> tuple[Tensor, ...]:
    return runs.kind, runs.src, runs.dst, runs.tokens


def _pool(dims: int, heads: int = 2) -> RowPool:
    addressing = Addressing.of(KVGeometry(KVKind.MHA, 1, heads, dims, dims, KVDtype.F16, 4), Layout.LAYER_FIRST, 2)
    return RowPool(torch.zeros(addressing.total_bytes, dtype=torch.uint8), addressing, 0)


def test_pools_and_runs_that_do_not_fit_are_refused() -> None:
    pool, table, count = _pool(8), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    runs = CopyRuns(table, table.long(), table, table, count)
    for sources in ((), (pool,) * 4, (pool, _pool(4))):
        with pytest.raises(ConfigError, match="sources"):
            gather_copy(sources, pool, runs, num_heads=2)
    with pytest.raises(ConfigError, match="target"):
        gather_copy((pool,), replace(pool, data=pool.data.view(torch.int16)), runs, num_heads=2)
    with pytest.raises(ConfigError, match="heads"):
        gather_copy((pool,), pool, runs, num_heads=3)
    with pytest.raises(ConfigError, match="moved"):
        gather_copy((pool,), pool, runs, num_heads=2, moved=torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("field", ["kind", "src", "dst", "tokens", "count"])
def test_tables_that_a_kernel_would_misread_are_refused(field: str) -> None:
    pool, table = _pool(8), torch.zeros(2, 3, dtype=torch.int32)
    runs = CopyRuns(table, table.long(), table, table, table[:, 0].contiguous())
    right = getattr(runs, field)
    other = right.to(torch.int32 if field == "src" else torch.int64)
    for wrong in (other, right[:1], right.double()):
        with pytest.raises(ConfigError, match="runs"):
            gather_copy((pool,), pool, replace(runs, **{field: wrong}), num_heads=2)
    apart = right.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ConfigError, match=field):
        gather_copy((pool,), pool, replace(runs, **{field: apart}), num_heads=2)
