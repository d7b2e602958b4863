"""Exact attention in pieces, and the merge of pieces into a whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_cases import device_under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels import dense
from gpu_tier.kernels.dense import causal_partial, empty_partial, merge_partials
from gpu_tier.kernels.lse_merge import lse_merge
from gpu_tier.types import Partial

IMPLEMENTATIONS = ["reference", "triton"]


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


def test_no_keys() -> None:
    q, k, v = problem(3, 0)
    part = causal_partial(q, k, v, 0.3, 10)
    agree(part, empty_partial(q, 12))
    assert torch.all(part.lse == -torch.inf)


@settings(max_examples=examples(100), deadline=None)
@given(
    tokens=st.integers(1, 6),
    keys=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    offset=st.integers(-8, 45),
    seed=st.randoms(use_true_random=False),
)
def test_split_attention_merges_to_the_whole_in_any_order(
    tokens: int, keys: int, cuts: list[int], offset: int, seed: object
) -> None:
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
    device = device_under_test() if impl != "reference" else torch.device("cpu")
    g = torch.Generator().manual_seed(parts)
    o = torch.randn(parts, 3, 4, dims, generator=g)
    lse = torch.randn(parts, 3, 4, generator=g) * 5
    lse[:, 0, 1] = -torch.inf  # all parts empty
    lse[0, 1] = -torch.inf
    o = o.masked_fill((lse == -torch.inf)[..., None], 0.0)
    written = o.masked_fill((lse == -torch.inf)[..., None], torch.nan)  # of an empty part nobody reads the output
    out_o = torch.full((3, 4, dims), torch.nan, device=device)
    out_lse = torch.full((3, 4), torch.nan, device=device)
    lse_merge(written.to(device), lse.to(device), out_o, out_lse, impl=impl)
    weights = lse.double().exp()
    total = weights.sum(0)
    want = ((weights[..., None] * o.double()).sum(0) / total[..., None]).nan_to_num(0.0)
    agree(Partial(out_o.cpu(), out_lse.cpu()), Partial(want, total.log()))
    order = torch.randperm(parts, generator=g)
    again_o, again_lse = torch.empty_like(out_o), torch.empty_like(out_lse)
    lse_merge(written[order].to(device), lse[order].to(device), again_o, again_lse, impl=impl)
    agree(Partial(again_o, again_lse), Partial(out_o, out_lse), 1e-6)


def test_parts_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="out_lse"):
        lse_merge(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4), torch.zeros(3, 4, 8), torch.zeros(3, 5))
