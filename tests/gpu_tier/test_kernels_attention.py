"""Decode attention and the merge of its parts: references against a textbook in f64, and Triton against both."""

from __future__ import annotations

import random
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import TOLERANCE, Shape, device_under_test, expected, random_kv, random_query
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype
from kvcm.gpu_tier.kernels import dense
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.kernels.dense import causal_partial, empty_partial, merge_partials
from kvcm.gpu_tier.kernels.lse_merge import lse_merge
from kvcm.gpu_tier.kernels.split_decode import plan_splits
from kvcm.gpu_tier.kernels.tuning import Tiling
from kvcm.gpu_tier.types import LayerKV, Partial

SLOTS = 96


MLA = Shape(1, 8, 48, KVDtype.F32, rope=16)


EXACT = [Shape(*sizes, KVDtype.F32) for sizes in ((2, 1, 64), (2, 4, 128), (3, 2, 80))]
HALF = [Shape(2, 4, 64, KVDtype.F16), Shape(2, 4, 128, KVDtype.BF16)]
CODED = [Shape(2, 4, 64, KVDtype.FP8), Shape(1, 20, 128, KVDtype.FP8)]
ROTATED = [Shape(1, 4, 80, dtype, rope=16) for dtype in (KVDtype.BF16, KVDtype.FP8)]
SHAPES = [*EXACT, *HALF, *CODED, MLA, *ROTATED, Shape(1, 4, 576, KVDtype.FP8, rope=64)]


IMPLEMENTATIONS = ["reference", "triton"]


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


def outputs(q: Tensor, kv: LayerKV) -> tuple[Tensor, Tensor]:
    """Outputs whose old contents would show."""
    o = torch.full((*q.shape[:2], kv.v_dims), torch.nan, device=q.device)
    return o, torch.full(q.shape[:2], torch.nan, device=q.device)


def close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: KVDtype) -> None:
    for value, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(value.double().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def run_token(
    impl: str, shape: Shape, slots: list[list[list[int]]], width: int, **changes: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (got, wanted); negative slots do not count, and rows without any slot get len 0."""
    device = where(impl)
    kv = random_kv(shape, SLOTS, device=device)
    q = random_query(shape, len(slots)).to(device)
    heads = len(slots[0])
    table = torch.full((len(slots), heads, width), -1, dtype=torch.int32)
    lens = torch.zeros(len(slots), heads, dtype=torch.int32)
    for row, per_head in enumerate(slots):
        for head, chosen in enumerate(per_head):
            table[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            lens[row, head] = len(chosen)
    o, lse = outputs(q, kv)
    decode_attn_token(q, kv, table.to(device), lens.to(device), shape.dims**-0.5, o, lse, impl=impl, **changes)
    wide = [[[s for s in row[min(h, heads - 1)] if s >= 0] for h in range(shape.heads)] for row in slots]
    return (o, lse), expected(q.cpu(), on_cpu(kv), wide, shape.dims**-0.5)


def on_cpu(kv: LayerKV) -> LayerKV:
    def moved(rows: Any) -> Any:
        return type(rows)(rows.data.cpu(), rows.format)

    return LayerKV(moved(kv.k), None if kv.v is None else moved(kv.v), kv.v_dims)


def random_slots(seed: int, lengths: list[list[int]]) -> list[list[list[int]]]:
    chooser = random.Random(seed)
    return [[chooser.sample(range(-9, SLOTS), n) for n in row] for row in lengths]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_token_attention_with_one_table_for_all_heads(impl: str, shape: Shape) -> None:
    got, wanted = run_token(impl, shape, random_slots(1, [[37], [0], [5]]), 48)
    close(got, wanted, shape.dtype)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(KVDtype))
def test_token_attention_with_a_table_per_head(impl: str, dtype: KVDtype) -> None:
    got, wanted = run_token(impl, Shape(3, 2, 64, dtype), random_slots(2, [[33, 1, 0], [16, 40, 17]]), 40)
    close(got, wanted, dtype)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_tokens", [5, 16])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4], SHAPES[5], MLA, SHAPES[9]], ids=str)
def test_paged_attention(impl: str, shape: Shape, page_tokens: int) -> None:
    device = where(impl)
    pages = -(-SLOTS // page_tokens)
    kv = random_kv(shape, pages * page_tokens, device=device)
    lengths = [0, 1, min(41, pages * page_tokens), pages * page_tokens]
    q = random_query(shape, len(lengths)).to(device)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    table = torch.full((len(lengths), pages + 2), -1, dtype=torch.int32)
    slots: list[list[list[int]]] = []
    for row, n in enumerate(lengths):
        used = -(-n // page_tokens)
        table[row, :used] = order[:used]
        slots.append([[int(order[t // page_tokens]) * page_tokens + t % page_tokens for t in range(n)]] * shape.heads)
    o, lse = outputs(q, kv)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    decode_attn_paged(q, kv, table.to(device), seqlens, page_tokens, 0.1, o, lse, impl=impl)
    close((o, lse), expected(q.cpu(), on_cpu(kv), slots, 0.1), shape.dtype)


@pytest.mark.parametrize("splits", [1, 20])
@pytest.mark.parametrize("block", [(16, 128), (64, 16)])
@pytest.mark.parametrize("shape", [SHAPES[4], SHAPES[9]], ids=str)
def test_triton_in_any_pieces_and_tiles(
    shape: Shape, block: tuple[int, int], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_impl = import_module("kvcm.gpu_tier.kernels.split_decode.triton_impl")
    monkeypatch.setattr(triton_impl.kernel, "forced", Tiling.of(BLOCK_M=block[0], BLOCK_N=block[1]))
    call = import_module("kvcm.gpu_tier.kernels.split_decode.attend")
    monkeypatch.setattr(call, "plan_splits", lambda *_: splits)
    got, wanted = run_token("triton", shape, random_slots(4, [[70], [0], [33]]), 72)
    close(got, wanted, shape.dtype)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_length_beyond_the_table_ends_with_it_and_a_negative_one_is_0(impl: str) -> None:
    shape = Shape(1, 2, 64, KVDtype.F32)
    device = where(impl)
    kv, q = random_kv(shape, SLOTS, device=device), random_query(shape, 2).to(device)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    lens = torch.tensor([1000, -5], dtype=torch.int32, device=device)
    slots = [[[*range(48, 64), *range(16, 32)]], [[]]]
    o, lse = outputs(q, kv)
    decode_attn_paged(q, kv, table, lens, 16, 0.125, o, lse, impl=impl)
    close((o, lse), expected(q.cpu(), on_cpu(kv), slots, 0.125), shape.dtype)
    wide = torch.full((2, 1, 64), -1, dtype=torch.int32, device=device)
    wide[:, 0, :32] = torch.tensor(slots[0][0], device=device)
    decode_attn_token(q, kv, wide[..., :32], lens[:, None], 0.125, o, lse, impl=impl)
    close((o, lse), expected(q.cpu(), on_cpu(kv), slots, 0.125), shape.dtype)


def test_splits_fill_the_processors_and_no_more() -> None:
    assert plan_splits(1000, 4096, 132) == 1
    assert plan_splits(1, 64, 132) == 2  # no piece below 32 tokens
    assert plan_splits(1, 1 << 17, 132) > 132
    for programs in (1, 8, 64, 200, 300):
        splits = plan_splits(programs, 1 << 17, 132)
        waves = programs * splits / 264
        assert waves / -(-waves // 1) >= 0.8


def test_shapes_that_do_not_fit_are_refused() -> None:
    shape = Shape(2, 2, 64, KVDtype.F32)
    kv, q = random_kv(shape, SLOTS), random_query(shape, 2)
    o, lse = outputs(q, kv)
    table, lens = torch.zeros(2, 1, 4, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    turned = torch.zeros(2, 64, 4).transpose(1, 2)
    token = {"q": q, "kv": kv, "token_table": table, "lens": lens, "sm_scale": 1.0, "out_o": o, "out_lse": lse}
    paged = {name: token[name] for name in ("q", "kv", "sm_scale", "out_o", "out_lse")}
    paged |= {"page_table": table[:, 0], "cache_seqlens": lens[:, 0], "page_tokens": 16}
    for call, good, message, wrong in (
        (decode_attn_token, token, "query heads", {"q": q[:, :3]}),
        (decode_attn_token, token, "last dimension", {"q": q[..., :32]}),
        (decode_attn_token, token, r"q=.*last dimension", {"q": turned}),
        (decode_attn_token, token, "out_o", {"out_o": o[..., :32]}),
        (decode_attn_token, token, r"out_o.*contiguous", {"out_o": turned}),
        (decode_attn_token, token, "Hs = 1 or 2", {"token_table": table.expand(2, 3, 4)}),
        (decode_attn_paged, paged, "needs 2 rows", {"page_table": table[0], "cache_seqlens": lens[0]}),
        (decode_attn_paged, paged, "page_tokens", {"page_tokens": 0}),
        (decode_attn_paged, paged, "cache_seqlens", {"cache_seqlens": lens}),
    ):
        with pytest.raises(ConfigError, match=message):
            call(**{**good, **wrong})  # type: ignore[operator]


def textbook(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Partial:
    tokens, q_heads, _ = q.shape
    o, lse = torch.zeros(tokens, q_heads, v.shape[-1]).double(), torch.full((tokens, q_heads), -torch.inf).double()
    for t in range(tokens):
        for head in range(q_heads):
            seen = min(k.shape[0], max(0, offset + t + 1))
            kv_head = head // (q_heads // k.shape[1])
            scores = k[:seen, kv_head].double() @ q[t, head].double() * scale
            if seen:
                o[t, head] = scores.softmax(0) @ v[:seen, kv_head].double()
                lse[t, head] = scores.logsumexp(0)
    return Partial(o, lse)


def problem(tokens: int, keys: int, heads: int = 2, group: int = 2, dims: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens * 1000 + keys)
    q = torch.randn(tokens, heads * group, dims, generator=g)
    return q, torch.randn(keys, heads, dims, generator=g), torch.randn(keys, heads, dims - 4, generator=g)


def agree(got: Partial, want: Partial, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.o.double(), want.o.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse.double(), want.lse.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("offset", [-9, -3, 0, 4, 20, 100])
@pytest.mark.parametrize("at_once", [1 << 24, 4 * 7 * 16])
def test_causal_attention_of_a_chunk(offset: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_SCORES_AT_ONCE", at_once)
    q, k, v = problem(7, 50)
    agree(causal_partial(q, k, v, 0.3, offset), textbook(q, k, v, 0.3, offset))


def test_f64_stays_f64_and_bf16_is_computed_in_f32() -> None:
    q, k, v = (x.double() for x in problem(5, 9))
    exact = causal_partial(q, k, v, 0.3, 4)
    assert exact.o.dtype is torch.float64
    agree(exact, textbook(q, k, v, 0.3, 4), 1e-13)
    rounded = [x.bfloat16() for x in (q, k, v)]
    part = causal_partial(*rounded, 0.3, 4)
    assert part.lse.dtype is torch.float32
    agree(part, textbook(*rounded, 0.3, 4))


@settings(max_examples=examples(100), deadline=None)
@given(
    tokens=st.integers(1, 6),
    keys=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    offset=st.integers(-8, 45),
    seed=st.randoms(use_true_random=False),
)
def test_attention_parts_merge_in_any_order(tokens: int, keys: int, cuts: list[int], offset: int, seed: object) -> None:
    q, k, v = problem(tokens, keys)
    edges = sorted({0, keys, *(c for c in cuts if c <= keys)})
    parts = [causal_partial(q, k[a:b], v[a:b], 0.3, offset - a) for a, b in pairwise(edges)]
    parts.append(empty_partial(q, 12))
    seed.shuffle(parts)  # type: ignore[attr-defined]
    whole = causal_partial(q, k, v, 0.3, offset)
    agree(merge_partials(*parts), whole)
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = merge_partials(one_by_one, part)
    agree(one_by_one, whole)
    out_o, out_lse = torch.empty_like(whole.o), torch.empty_like(whole.lse)
    lse_merge(torch.stack([p.o for p in parts]), torch.stack([p.lse for p in parts]), out_o, out_lse)
    agree(Partial(out_o, out_lse), whole)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("parts", "dims"), [(1, 16), (2, 128), (5, 80), (19, 64), (3, 512)])
def test_merge_of_parts(impl: str, parts: int, dims: int) -> None:
    device = where(impl)
    g = torch.Generator().manual_seed(parts)
    o = torch.randn(parts, 3, 4, dims, generator=g)
    lse = torch.randn(parts, 3, 4, generator=g) * 5
    lse[:, 0, 1] = -torch.inf  # all parts empty
    lse[0, 1] = -torch.inf
    o = o.masked_fill((lse == -torch.inf)[..., None], 0.0)
    written = o.masked_fill((lse == -torch.inf)[..., None], torch.nan)  # the output of an empty part is not read
    out_o = torch.full((3, 4, dims), torch.nan, device=device)
    out_lse = torch.full((3, 4), torch.nan, device=device)
    lse_merge(written.to(device), lse.to(device), out_o, out_lse, impl=impl)
    weights = lse.double().exp()
    total = weights.sum(0)
    want = ((weights[..., None] * o.double()).sum(0) / total[..., None]).nan_to_num(0.0)
    agree(Partial(out_o.cpu(), out_lse.cpu()), Partial(want, total.log()))


def test_parts_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="out_lse"):
        lse_merge(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4), torch.zeros(3, 4, 8), torch.zeros(3, 5))
