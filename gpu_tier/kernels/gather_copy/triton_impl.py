"""`gather_copy` in Triton: the programs take the runs of all lines in turn.

Lines are looked at in groups. What a group's lines have to copy is counted up at once, so that a program finds the line
of its next run by comparing with these sums, and lines without runs cost nothing. Each part is a launch of its own.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.gather_copy import word_bytes
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.kernels.tuning import interpreting, next_power_of_2
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")
_jit: Callable[[Callable[..., Any]], Any] = triton.jit

_TILE = 1024  # words that a program copies at once
_MOST_LINES = 256  # of a group
_MOST_PROGRAMS = 2048
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Triton evaluates the annotations of a kernel, hence the text and no `annotations` of the future in this file.


@_jit
def _copy_run(
    source: "Any", PAGE_SIZE: tl.constexpr, page: "Any", token: "Any", first: "Any", target: "Any",
    TO_PAGE_SIZE: tl.constexpr, to_page: "Any", to_token: "Any", to_first: "Any", tokens: "Any", WORDS: tl.constexpr,
    PADDED: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the rows from slot `first` of a source on, which begins at its head's first row."""
    word = tl.arange(0, PADDED)
    start = tokens * 0
    while start < tokens:
        ahead = start + tl.arange(0, TILE)
        here = first + ahead
        there = to_first + ahead
        read = here // PAGE_SIZE * page + here % PAGE_SIZE * token
        written = there // TO_PAGE_SIZE * to_page + there % TO_PAGE_SIZE * to_token
        exists = (ahead < tokens)[:, None] & (word < WORDS)[None, :]
        value = tl.load(source + read[:, None] + word[None, :], mask=exists, eviction_policy="evict_first")
        tl.store(target + written[:, None] + word[None, :], value, mask=exists)
        start += TILE


def _gather(
    source0: "Any", source1: "Any", source2: "Any", target: "Any",
    page0: "Any", token0: "Any", head0: "Any",
    page1: "Any", token1: "Any", head1: "Any",
    page2: "Any", token2: "Any", head2: "Any",
    to_page: "Any", to_token: "Any", to_head: "Any",
    kind: "Any", src: "Any", dst: "Any", tokens: "Any", count: "Any", moved: "Any",
    lines: "Any", width: "Any", heads: "Any", programs: "Any",
    WORDS: tl.constexpr, PADDED: tl.constexpr, WORD_BYTES: tl.constexpr, SOURCES: tl.constexpr, LINES: tl.constexpr,
    TILE: tl.constexpr, COUNTS: tl.constexpr, PAGE_SIZE0: tl.constexpr, PAGE_SIZE1: tl.constexpr,
    PAGE_SIZE2: tl.constexpr, TO_PAGE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    task = program  # of this program, counted from the first run of the group
    group = program * 0
    number = tl.arange(0, 4)  # of a source
    copied = tl.zeros([4], tl.int64)  # tokens
    while group < lines:
        line_of = group + tl.arange(0, LINES)
        live = tl.load(count + line_of, mask=line_of < lines, other=0)
        upto = tl.cumsum(tl.minimum(tl.maximum(live, 0), width), axis=0)
        runs = tl.max(upto, axis=0)
        while task < runs:
            before = upto <= task
            line = group + tl.sum(before.to(tl.int32), axis=0)
            place = line.to(tl.int64) * width + task - tl.max(tl.where(before, upto, 0), axis=0)
            head = (line % heads).to(tl.int64)
            which = tl.load(kind + place)
            which = tl.where(which < SOURCES, which, -1)
            first = tl.load(src + place).to(tl.int64)
            to_first = tl.load(dst + place).to(tl.int64)
            total = tl.maximum(tl.load(tokens + place), 0)
            to = target + head * to_head
            if which == 0:
                _copy_run(source0 + head * head0, PAGE_SIZE0, page0, token0, first, to, TO_PAGE_SIZE, to_page,
                          to_token, to_first, total, WORDS, PADDED, TILE)  # fmt: skip
            if which == 1:
                _copy_run(source1 + head * head1, PAGE_SIZE1, page1, token1, first, to, TO_PAGE_SIZE, to_page,
                          to_token, to_first, total, WORDS, PADDED, TILE)  # fmt: skip
            if which == 2:
                _copy_run(source2 + head * head2, PAGE_SIZE2, page2, token2, first, to, TO_PAGE_SIZE, to_page,
                          to_token, to_first, total, WORDS, PADDED, TILE)  # fmt: skip
            copied += tl.where(number == which, total, 0)
            task += programs
        task -= runs
        group += LINES
    if COUNTS:
        tl.atomic_add(moved + number, copied * (WORDS * WORD_BYTES), mask=number < SOURCES)


# A size of one would be made a constant, and constants have no `.to`.
_SAME_KERNEL = ["lines", "width", "heads", "programs"]
_kernel = triton.jit(_gather, do_not_specialize=_SAME_KERNEL)


def run(sources: tuple[RowPool, ...], target: RowPool, runs: CopyRuns, *, num_heads: int, moved: Tensor | None) -> None:
    """See `kvcm.gpu_tier.kernels.gather_copy.gather_copy`."""
    lines, width = runs.kind.shape
    programs = min(lines * width, 2 if interpreting() else _MOST_PROGRAMS)
    pools = (*sources, *(sources[0],) * (3 - len(sources)), target)
    tables = (runs.kind, runs.src, runs.dst, runs.tokens, runs.count)
    for part in range(len(target.addressing.parts)):
        size = word_bytes(pools, part, 8)
        words = target.addressing.parts[part].row_bytes // size
        padded = next_power_of_2(words)
        _kernel[(programs,)](
            *(_first_row(pool, part, size) for pool in pools),
            *(number for pool in pools for number in _strides(pool, part, size)),
            *tables, runs.count if moved is None else moved, lines, width, num_heads, programs,
            WORDS=words, PADDED=padded, WORD_BYTES=size, SOURCES=len(sources),
            LINES=min(_MOST_LINES, next_power_of_2(lines)), TILE=max(1, _TILE // padded), COUNTS=moved is not None,
            **_page_sizes(pools),
        )  # fmt: skip


def _first_row(pool: RowPool, part: int, size: int) -> Tensor:
    """Return the layer's first row of a part and what follows, as words."""
    strides = pool.addressing.parts[part]
    return pool.data[strides.base + strides.layer * pool.layer :].view(_WORDS[size])


def _page_sizes(pools: tuple[RowPool, ...]) -> dict[str, int]:
    names = ("PAGE_SIZE0", "PAGE_SIZE1", "PAGE_SIZE2", "TO_PAGE_SIZE")
    return {name: pool.addressing.page_size for name, pool in zip(names, pools, strict=True)}


def _strides(pool: RowPool, part: int, size: int) -> tuple[int, ...]:
    """Return the words from page to page, token to token and head to head."""
    strides = pool.addressing.parts[part]
    return strides.page // size, strides.token // size, strides.head // size
