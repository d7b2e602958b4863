"""Execution buffers are put together from their sources, in all implementations of the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.gather_copy import cuda, gather_copy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS, SPACE = 9, 10


@st.composite
def gathers(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], list[list[tuple[int, int, int, int]]], list[int], int]:
    """Return sources, and for each buffer the runs (kind, first row, rows, target) and how many of them are live."""
    row_bytes = draw(st.sampled_from([1, 6, 16, 40]))
    padding = draw(st.sampled_from([0, 0, 2, 8]))
    number = draw(st.integers(1, 3))
    wide = [torch.randint(0, 256, (ROWS, row_bytes + padding), dtype=torch.uint8) for _ in range(number)]
    buffers, runs = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    plan = []
    for _ in range(buffers):
        place, plan_of_buffer = 0, []
        for _ in range(runs):
            rows = draw(st.integers(0, min(4, SPACE - place)))
            kind, first = draw(st.integers(-1, number - 1)), draw(st.integers(0, ROWS - rows))
            plan_of_buffer.append((kind, first, rows, place))
            place += rows
        plan.append(plan_of_buffer)
    counts = draw(st.lists(st.integers(0, runs), min_size=buffers, max_size=buffers))
    return tuple(source[:, :row_bytes] for source in wide), plan, counts, row_bytes


def _wanted(sources: tuple[Tensor, ...], plan: list[list[tuple[int, int, int, int]]], counts: list[int]) -> Tensor:
    out = torch.full((len(plan), SPACE, sources[0].shape[1]), 7, dtype=torch.uint8)
    for buffer, (runs, count) in enumerate(zip(plan, counts, strict=True)):
        for kind, first, rows, place in runs[:count]:
            if kind >= 0:
                out[buffer, place : place + rows] = sources[kind][first : first + rows]
    return out


def _run(
    sources: tuple[Tensor, ...], plan: list[list[tuple[int, int, int, int]]], counts: list[int], impl: str, device: str
) -> Tensor:
    table = torch.tensor(plan, device=device)
    kind, src_row, n_rows, dst_row = (table[..., i] for i in range(4))
    out = torch.full((len(plan), SPACE, sources[0].shape[1]), 7, dtype=torch.uint8, device=device)
    gather_copy(
        tuple(source.to(device) for source in sources), kind.int(), src_row.long(), n_rows.int(), dst_row.int(),
        torch.tensor(counts, dtype=torch.int32, device=device), out, impl=impl,
    )  # fmt: skip
    return out.cpu()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@settings(max_examples=examples(120), deadline=None)
@given(gathers())
def test_each_run_is_where_it_was_sent(
    impl: str, gather: tuple[tuple[Tensor, ...], list[list[tuple[int, int, int, int]]], list[int], int]
) -> None:
    sources, plan, counts, _ = gather
    assert torch.equal(_run(sources, plan, counts, impl, "cpu"), _wanted(sources, plan, counts))


@needs_gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@settings(max_examples=examples(120), deadline=None)
@given(gathers())
def test_kernels_of_a_gpu_do_the_same(
    impl: str, gather: tuple[tuple[Tensor, ...], list[list[tuple[int, int, int, int]]], list[int], int]
) -> None:
    sources, plan, counts, _ = gather
    assert torch.equal(_run(sources, plan, counts, impl, "cuda"), _wanted(sources, plan, counts))


def test_runs_longer_than_a_tile_are_whole() -> None:
    pytest.importorskip("triton")
    source = torch.randint(0, 256, (600, 24), dtype=torch.uint8)
    out = torch.zeros(1, 600, 24, dtype=torch.uint8)
    one = torch.zeros(1, 1, dtype=torch.int32)
    gather_copy((source,), one, one.long(), one + 600, one, one[0] + 1, out, impl="triton")
    assert torch.equal(out[0], source)


def test_shapes_that_do_not_fit_are_refused() -> None:
    source, one = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32)
    out, count = torch.zeros(1, 4, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    tables = one, one.long(), one, one
    with pytest.raises(ConfigError, match="sources"):
        gather_copy((source,) * 4, *tables, count, out)
    with pytest.raises(ConfigError, match="sources"):
        gather_copy((source[:, :6],), *tables, count, out)
    with pytest.raises(ConfigError, match="out"):
        gather_copy((source,), *tables, count, out[:, :, :6])
    with pytest.raises(ConfigError, match="count"):
        gather_copy((source,), *tables, count[:0], out)
    with pytest.raises(ConfigError, match="kind"):
        gather_copy((source,), one, one.long(), one, one[:, :0], count, out)


@pytest.mark.parametrize("field", range(5))
def test_tables_that_the_cuda_kernel_would_misread_are_refused(field: int) -> None:
    source, one = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32)
    tables = [one, one.long(), one, one, one[0]]
    tables[field] = tables[field].to(torch.int32 if tables[field].dtype is torch.int64 else torch.int64)
    name = ("kind", "src_row", "n_rows", "dst_row", "count")[field]
    with pytest.raises(ConfigError, match=f"{name}={tables[field].dtype}"):
        cuda.run((source,), *tables, torch.zeros(1, 4, 8, dtype=torch.uint8))
