"""Scores from codes are sums of table entries, in all implementations."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from attention_cases import device_under_test
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.pq_score import pq_score

IMPLEMENTATIONS = ["reference", "triton"]
FIRST, LENGTHS = [0, 32, 5, 0, 7], [200, 150, 5, 0, 3]
PAGES = 9


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


def problem(heads: int, group: int, parts: int, bits: int, page_tokens: int, seed: int) -> tuple[Tensor, ...]:
    """Return a table, codes of which the pages hold more, pages of which one is missing, first tokens and lengths."""
    g = torch.Generator().manual_seed(seed)
    rows = len(LENGTHS)
    table = torch.randn(rows, heads * group, parts, 2**bits, generator=g)
    room = torch.randint(0, 2**bits, (rows * PAGES, page_tokens * heads * parts + 24), dtype=torch.uint8, generator=g)
    codes = room[:, 8:-16].unflatten(1, (page_tokens, heads, parts))
    pages = torch.randperm(rows * PAGES, generator=g).view(rows, PAGES).int()
    pages[1, 3] = -1
    limits = [torch.tensor(numbers, dtype=torch.int32) for numbers in (FIRST, LENGTHS)]
    return table, codes, pages, *limits


def direct(table: Tensor, codes: Tensor, pages: Tensor, width: int) -> Tensor:
    page_tokens, heads = codes.shape[1:3]
    out = torch.full((*table.shape[:2], width), -torch.inf, dtype=torch.float64)
    for row, (first, length) in enumerate(zip(FIRST, LENGTHS, strict=True)):
        for token in range(first, min(length, width)):
            page = int(pages[row, token // page_tokens])
            if page < 0:
                continue
            for head in range(table.shape[1]):
                code = codes[page, token % page_tokens, head * heads // table.shape[1]]
                out[row, head, token] = sum(float(table[row, head, j, c]) for j, c in enumerate(code.tolist()))
    return out


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "group", "parts", "bits"), [(2, 4, 4, 8), (1, 5, 3, 4), (3, 1, 1, 2)])
@pytest.mark.parametrize("page_tokens", [64, 25])
def test_scores_are_sums_of_the_table(
    impl: str, heads: int, group: int, parts: int, bits: int, page_tokens: int
) -> None:
    table, codes, *rest = problem(heads, group, parts, bits, page_tokens, 11)
    for width in (200, 170):
        out = torch.full((*table.shape[:2], width + 5), torch.nan, device=where(impl))[..., :width]
        pq_score(*(tensor.to(where(impl)) for tensor in (table, codes, *rest)), out, impl=impl)
        torch.testing.assert_close(out.double().cpu(), direct(table, codes, rest[0], width), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tables_may_have_any_strides(impl: str) -> None:
    table, codes, *rest = (tensor.to(where(impl)) for tensor in problem(2, 4, 4, 4, 32, 12))
    turned = table.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    outs = [torch.full((*table.shape[:2], 200), torch.nan, device=table.device) for _ in range(2)]
    for tensor, out in zip((table, turned), outs, strict=True):
        pq_score(tensor, codes, *rest, out, impl=impl)
    assert torch.equal(*outs)


def test_every_tiling_scores_the_same() -> None:
    kernel = import_module("gpu_tier.kernels.pq_score.triton_impl").kernel
    table, codes, *rest = problem(1, 4, 2, 6, 64, 13)
    want = direct(table, codes, rest[0], 200)
    for tiling in kernel.tilings:
        kernel.forced = tiling
        out = torch.full(want.shape, torch.nan, device=where("triton"))
        pq_score(*(tensor.to(where("triton")) for tensor in (table, codes, *rest)), out, impl="triton")
        kernel.forced = None
        torch.testing.assert_close(out.double().cpu(), want, rtol=1e-6, atol=1e-5)


def test_arguments_are_checked() -> None:
    table, codes, pages, first, lengths = problem(2, 2, 2, 4, 16, 14)
    out = torch.zeros(5, 4, PAGES * 16)
    pq_score(table, codes, pages, first, lengths, out)
    for field, arguments in {
        "table": (table.double(), codes, pages, first, lengths, out),
        "codes": (table, codes.int(), pages, first, lengths, out),
        "page_table": (table, codes, pages[:2], first, lengths, out),
        "first": (table, codes, pages, first[:2], lengths, out),
        "lengths": (table, codes, pages, first, lengths[:2], out),
        "out": (table, codes, pages, first, lengths, torch.zeros(5, 4, PAGES * 16 + 1)),
    }.items():
        with pytest.raises(ConfigError, match=field):
            pq_score(*arguments)
