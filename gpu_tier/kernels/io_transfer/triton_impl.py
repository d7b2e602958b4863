"""`io_transfer` in Triton.

The words of a row's live entries are one flat range that is cut into tiles; the programs take the tiles of all rows in
turn, so that rows with few entries cost one load and the work is even. The tile that a program takes first in a row
follows from the tiles of the rows before it.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import Addressing, PartStrides
from kvcm.gpu_tier.kernels.io_transfer import layer_runs, part_copies, word_bytes

__all__ = ["addresses", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_TILE = 4096
_MOST_PROGRAMS = 512
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Triton evaluates the annotations of a kernel, hence the text and no `annotations` of the future in this file.


def _row_offset(
    slot: "Any", layer: "Any", head: "Any", page_size: "Any", base: "Any", page: "Any", token: "Any",
    layer_stride: "Any", head_stride: "Any",
) -> "Any":  # fmt: skip
    return base + slot // page_size * page + slot % page_size * token + layer * layer_stride + head * head_stride


row_offset: Any = triton.jit(_row_offset)


def _copy_rows(
    src: "Any", dst: "Any", src_idx: "Any", dst_idx: "Any", count: "Any", moved: "Any", rows: "Any", entries: "Any",
    programs: "Any", src_layer: "Any", dst_layer: "Any", layers: "Any",
    src_page_size: tl.constexpr, dst_page_size: tl.constexpr,
    src_base: "Any", src_page: "Any", src_token: "Any", src_layer_stride: "Any", src_head: "Any",
    dst_base: "Any", dst_page: "Any", dst_token: "Any", dst_layer_stride: "Any", dst_head: "Any", num_heads: "Any",
    heads: tl.constexpr, unit: tl.constexpr, words: tl.constexpr, word_size: tl.constexpr, per_head: tl.constexpr,
    has_count: tl.constexpr, has_moved: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    item_words = layers.to(tl.int64) * (unit * heads * words)
    before = program * 0  # tiles of the rows before this one
    copied = program * 0  # words
    row = program * 0
    while row < rows:
        live = entries.to(tl.int64)
        if has_count:
            live = tl.minimum(tl.load(count + row).to(tl.int64), live)
        total = live * item_words
        start = (program - before % programs + programs) % programs * tile
        while start < total:
            # A division of 64 bits takes many registers, so only numbers of the whole program are divided like that.
            # What counts the words of one item has 32.
            first = start // item_words
            ahead = (start - first * item_words).to(tl.int32) + tl.arange(0, tile)
            item = ahead // item_words.to(tl.int32)
            within = ahead - item * item_words.to(tl.int32)
            word = within % words
            head = (within // words % heads).to(tl.int64)
            token = within // (words * heads) % unit
            layer = (within // (words * heads * unit)).to(tl.int64)
            inside = tl.arange(0, tile) < total - start
            entry = row * entries + first + item
            here = tl.load(src_idx + entry, mask=inside, other=-1).to(tl.int64)
            there = tl.load(dst_idx + entry, mask=inside, other=-1).to(tl.int64)
            inside = inside & (here >= 0) & (there >= 0)
            if per_head:
                head = head + row % num_heads
            source = row_offset(here + token, src_layer + layer, head, src_page_size, src_base, src_page, src_token,
                                src_layer_stride, src_head)  # fmt: skip
            target = row_offset(there + token, dst_layer + layer, head, dst_page_size, dst_base, dst_page, dst_token,
                                dst_layer_stride, dst_head)  # fmt: skip
            value = tl.load(src + source + word, mask=inside, eviction_policy="evict_first")
            tl.store(dst + target + word, value, mask=inside, eviction_policy="evict_first")
            copied += tl.sum(inside.to(tl.int32)).to(tl.int64)
            start += programs.to(tl.int64) * tile
        before += (total + tile - 1) // tile
        row += 1
    if has_moved:
        tl.atomic_add(moved, copied * word_size)


def _write_addresses(
    slots: "Any", out: "Any", number: "Any", layer: "Any", head: "Any", page_size: "Any", base: "Any", page: "Any",
    token: "Any", layer_stride: "Any", head_stride: "Any", tile: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    slot = tl.load(slots + place, mask=place < number, other=0).to(tl.int64)
    offset = row_offset(slot, layer, head, page_size, base, page, token, layer_stride, head_stride)
    tl.store(out + place, offset, mask=place < number)


# A size of one would be made a constant, and constants have no `.to`; layers 0, 1 and 16 would be kernels of their own.
_SAME_KERNEL = ["rows", "entries", "programs", "layers", "src_layer", "dst_layer"]
_copy_kernel = triton.jit(_copy_rows, do_not_specialize=_SAME_KERNEL)
_address_kernel = triton.jit(_write_addresses)


def run(
    src: Tensor,
    dst: Tensor,
    src_addr: Addressing,
    dst_addr: Addressing,
    src_idx: Tensor,
    dst_idx: Tensor,
    *,
    layers: tuple[tuple[int, int], ...],
    num_heads: int,
    count: Tensor | None,
    per_head: bool,
    unit_tokens: int,
    blocks: int,
    moved: Tensor | None,
) -> None:
    """See `kvcm.gpu_tier.kernels.io_transfer.io_transfer`."""
    rows, entries = src_idx.shape
    src_idx, dst_idx = src_idx.contiguous(), dst_idx.contiguous()
    tallies = [src_idx if tally is None else tally for tally in (count, moved)]  # those that are None are not read
    for part in part_copies(src_addr, dst_addr, num_heads, per_head):
        size = word_bytes(part, src, dst)
        words = part.row_bytes // size
        pools = src.view(_WORDS[size]), dst.view(_WORDS[size])
        for src_layer, dst_layer, n_layers in layer_runs(layers):
            item_words = n_layers * unit_tokens * part.heads * words
            programs = min(rows * triton.cdiv(entries * item_words, _TILE), blocks or _MOST_PROGRAMS)
            _copy_kernel[(programs,)](
                *pools, src_idx, dst_idx, *tallies, rows, entries, programs, src_layer, dst_layer, n_layers,
                src_addr.page_size, dst_addr.page_size, *_strides(part.src, size), *_strides(part.dst, size), num_heads,
                heads=part.heads, unit=unit_tokens, words=words, word_size=size, per_head=per_head,
                has_count=count is not None, has_moved=moved is not None, tile=_tile(entries * item_words),
                num_warps=8,
            )  # fmt: skip


def addresses(addressing: Addressing, part: int, slots: Tensor, layer: int, head: int) -> Tensor:
    """Return the first byte of rows as the kernel computes it, ``int64 [n]`` of slots ``int [n]``. For tests."""
    out = torch.empty(slots.shape, dtype=torch.int64, device=slots.device)
    grid = (triton.cdiv(slots.numel(), 64),)
    strides = _strides(addressing.parts[part], 1)
    _address_kernel[grid](slots, out, slots.numel(), layer, head, addressing.page_size, *strides, tile=64)
    return out


def _strides(strides: PartStrides, size: int) -> tuple[int, ...]:
    numbers = (strides.base, strides.page, strides.token, strides.layer, strides.head)
    return tuple(number // size for number in numbers)


def _tile(words: int) -> int:
    return min(_TILE, max(128, 1 << (words - 1).bit_length()))
