"""Scores for a selection, and the selection."""

from __future__ import annotations

import math
import random
from importlib import import_module

import pytest
import torch
from attention_cases import device_under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.indexer_score import indexer_score
from gpu_tier.kernels.quest_score import quest_score
from gpu_tier.kernels.quest_score.bounds import page_bounds, round_down, round_up
from gpu_tier.kernels.topk_select import topk_select
from gpu_tier.rows import KVDtype, RowFormat

IMPLEMENTATIONS = ["reference", "triton"]
ANY_F32 = st.floats(width=32, allow_nan=False)


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


# topk_select ---------------------------------------------------------------------------------------------------------


def sorted_top(scores: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


def run_top(impl: str, rows: list[list[list[float]]], lengths: list[int], k: int, width: int) -> list[list[list[int]]]:
    device = where(impl)
    scores = torch.tensor(rows, dtype=torch.float32, device=device)
    ids = torch.full((*scores.shape[:2], width), 77, dtype=torch.int32, device=device)
    counts = torch.full(scores.shape[:2], 77, dtype=torch.int32, device=device)
    topk_select(scores, torch.tensor(lengths, dtype=torch.int32, device=device), k, ids, counts, impl=impl)
    assert counts.tolist() == [[min(k, n)] * len(row) for n, row in zip(lengths, rows, strict=True)]
    return ids.tolist()  # type: ignore[no-any-return]


@settings(max_examples=examples(200), deadline=None)
@given(
    scores=st.lists(ANY_F32 | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=60),
    short=st.integers(0, 60),
    k=st.integers(1, 70),
)
def test_reference_top_k_is_that_of_a_sort(scores: list[float], short: int, k: int) -> None:
    length = max(0, len(scores) - short)
    top = sorted_top(scores[:length], k)
    assert run_top("reference", [[scores]], [length], k, 72) == [[top + [-1] * (72 - len(top))]]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", [1, 7, 64, 300])
def test_top_k_of_rows_and_heads(impl: str, k: int) -> None:
    chooser = random.Random(k)
    lengths = [0, 1, 150, 200]

    def score() -> float:
        return chooser.choice([chooser.gauss(0, 1), float(chooser.randint(-2, 2)), -math.inf, -0.0, 1e-42, math.inf])

    rows = [[[float(torch.tensor(score())) for _ in range(200)] for _ in range(2)] for _ in lengths]
    got = run_top(impl, rows, lengths, k, 304)
    for row, length, ids in zip(rows, lengths, got, strict=True):
        for scores, chosen in zip(row, ids, strict=True):
            top = sorted_top(scores[:length], k)
            assert chosen == top + [-1] * (304 - len(top))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ties_go_to_the_lower_id_and_nan_is_last(impl: str) -> None:
    got = run_top(impl, [[[1.0, 2.0, 2.0, 0.0, 2.0, math.nan, -math.inf, -math.inf]]], [8], 2, 4)
    assert got == [[[1, 2, -1, -1]]]
    assert run_top(impl, [[[0.0] * 40]], [40], 5, 5) == [[[0, 1, 2, 3, 4]]]
    assert run_top(impl, [[[math.nan, -math.inf, 3.0]]], [3], 2, 2) == [[[0, 2]]]


@pytest.mark.parametrize("k", [1, 30, 500])
def test_triton_top_k_of_rows_in_several_chunks(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_impl = import_module("gpu_tier.kernels.topk_select.triton_impl")
    monkeypatch.setattr(triton_impl, "_ALONE", 64)
    monkeypatch.setattr(triton_impl, "_CHUNK", 128)
    chooser = random.Random(k)
    lengths = [0, 7, 300, 420]
    rows = [
        [[float(chooser.choice([chooser.randint(-3, 3), -math.inf, 2.5])) for _ in range(420)] for _ in range(2)]
        for _ in lengths
    ]
    got = run_top("triton", rows, lengths, k, 512)
    for row, length, ids in zip(rows, lengths, got, strict=True):
        assert ids == [top + [-1] * (512 - len(top)) for top in (sorted_top(scores[:length], k) for scores in row)]


@settings(max_examples=examples(60), deadline=None)
@given(
    scores=st.lists(ANY_F32 | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=40),
    k=st.integers(1, 45),
)
def test_triton_top_k_is_that_of_a_sort(scores: list[float], k: int) -> None:
    top = sorted_top(scores, k)
    assert run_top("triton", [[scores]], [len(scores)], k, 48) == [[top + [-1] * (48 - len(top))]]


def test_top_k_arguments_are_checked() -> None:
    scores, ids = torch.zeros(2, 1, 8), torch.zeros(2, 1, 4, dtype=torch.int32)
    lengths, counts = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ConfigError, match="k=5"):
        topk_select(scores, lengths, 5, ids, counts)
    with pytest.raises(ConfigError, match="lengths"):
        topk_select(scores, lengths[:1], 4, ids, counts)
    with pytest.raises(ConfigError, match="out_lengths"):
        topk_select(scores, lengths, 4, ids, counts[:1])


# quest_score ---------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(ANY_F32, min_size=1, max_size=20))
def test_rounded_bounds_are_the_nearest_on_their_side(numbers: list[float]) -> None:
    exact = torch.tensor(numbers, dtype=torch.float32)
    low, high = round_down(exact), round_up(exact)
    assert low.dtype is high.dtype is torch.bfloat16
    assert torch.all(low.float() <= exact)
    assert torch.all(high.float() >= exact)
    representable = exact.bfloat16().float() == exact
    assert torch.equal(low.float() == high.float(), representable)
    between = high.view(torch.int16).int() - low.view(torch.int16).int()
    crosses_zero = (low == 0) | (high == 0)
    assert torch.all(representable | crosses_zero | (between.abs() == 1))


def direct_bound(q: Tensor, bounds: Tensor) -> Tensor:
    """Return ``f64 [B, Hx, pages]`` by the definition."""
    group = q.shape[1] // bounds.shape[1]
    pages = bounds.repeat_interleave(group, dim=1).double()
    products = q.double()[:, None, :, None] * pages[None]
    return products.amax(3).sum(-1).transpose(1, 2)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "group", "dims"), [(2, 1, 64), (2, 4, 128), (1, 20, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quest_scores(impl: str, heads: int, group: int, dims: int, dtype: torch.dtype) -> None:
    device = where(impl)
    g = torch.Generator().manual_seed(7)
    bounds = page_bounds(torch.randn(40, 4, heads, dims, generator=g))
    q = torch.randn(3, heads * group, dims, generator=g).to(dtype)
    table = torch.stack([torch.randperm(40, generator=g)[:35] for _ in range(3)]).int()
    table[2, 4] = -1
    n_pages = torch.tensor([35, 0, 20], dtype=torch.int32)
    out = torch.full((3, heads * group, 35), torch.nan, device=device)
    quest_score(*(x.to(device) for x in (q, bounds, table, n_pages)), out, impl=impl)
    direct = direct_bound(q, bounds).gather(2, table.clamp_min(0).long()[:, None].expand(out.shape))
    counts = (torch.arange(35) < n_pages[:, None]) & (table >= 0)
    torch.testing.assert_close(
        out.double().cpu(), direct.masked_fill(~counts[:, None], -torch.inf), rtol=1e-5, atol=1e-4
    )


def test_quest_arguments_are_checked() -> None:
    q, bounds = torch.zeros(2, 4, 8), torch.zeros(3, 2, 2, 8, dtype=torch.bfloat16)
    table, n_pages = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ConfigError, match="bounds"):
        quest_score(q, bounds.float(), table, n_pages, torch.zeros(2, 4, 5))
    with pytest.raises(ConfigError, match="n_pages"):
        quest_score(q, bounds, table, n_pages[:1], torch.zeros(2, 4, 5))
    with pytest.raises(ConfigError, match="out"):
        quest_score(q, bounds, table, n_pages, torch.zeros(2, 4, 6))


# indexer_score -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "dims", "page_tokens"), [(4, 64, 16), (64, 128, 64), (3, 32, 5)])
def test_indexer_scores_have_their_scales_before_or_after_the_relu(
    impl: str, heads: int, dims: int, page_tokens: int
) -> None:
    device = where(impl)
    g = torch.Generator().manual_seed(dims)
    row = RowFormat(dims, KVDtype.FP8)
    pages = -(-90 // page_tokens)
    keys = row.encode(torch.randn(pages * page_tokens, dims, generator=g))
    lengths = torch.tensor([90, 0, 33], dtype=torch.int32)
    query = row.encode(torch.randn(3, heads, dims, generator=g))
    q8 = query[..., :dims].contiguous().view(torch.float8_e4m3fn)
    q_scale = query[..., dims:].contiguous().view(torch.float32)[..., 0]
    weight = torch.randn(3, heads, generator=g)
    table = torch.stack([torch.randperm(pages, generator=g) for _ in range(3)]).int()
    out = torch.full((3, 90), torch.nan, device=device)
    inputs = [x.to(device) for x in (q8, weight * q_scale, keys, table)]
    indexer_score(*inputs, page_tokens, lengths.to(device), out, impl=impl)
    position = torch.arange(90)
    slots = table.long()[:, position // page_tokens] * page_tokens + position % page_tokens
    dots = torch.einsum("bhd,bnd->bhn", row.decode(query).double(), row.decode(keys)[slots].double())
    want = (weight.double()[..., None] * dots.relu()).sum(1)
    want = want.masked_fill(position >= lengths[:, None], -torch.inf)
    # Tensor cores of Hopper add fp8 products with 14 bits.
    near = {"rtol": 1e-4, "atol": 1e-3} if device.type == "cpu" else {"rtol": 2**-8, "atol": 0.05}
    torch.testing.assert_close(out.double().cpu(), want, **near)


def test_indexer_skips_negative_pages_and_checks_its_arguments() -> None:
    q8, weight = torch.ones(1, 2, 8).to(torch.float8_e4m3fn), torch.ones(1, 2)
    keys = RowFormat(8, KVDtype.FP8).encode(torch.ones(8, 8))
    table, lengths, out = (
        torch.tensor([[-1, 1]], dtype=torch.int32),
        torch.tensor([8], dtype=torch.int32),
        torch.zeros(1, 8),
    )
    indexer_score(q8, weight, keys, table, 4, lengths, out)
    assert torch.all(out[0, :4] == -torch.inf)
    assert torch.all(out[0, 4:] == 16)
    with pytest.raises(ConfigError, match="q8"):
        indexer_score(q8.float(), weight, keys, table, 4, lengths, out)
    with pytest.raises(ConfigError, match="keys"):
        indexer_score(q8, weight, keys[:, :8], table, 4, lengths, out)
    with pytest.raises(ConfigError, match="lengths"):
        indexer_score(q8, weight, keys, table, 4, lengths[:0], out)
    with pytest.raises(ConfigError, match="out"):
        indexer_score(q8, weight, keys, table, 4, lengths, torch.zeros(1, 9))
