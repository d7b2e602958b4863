"""Which bytes a transfer moves, as contiguous runs: what a copy engine wants to be told.

Runs are merged over heads, tokens and pages wherever both pools are contiguous there. Only for indices on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpu_tier.geometry import Addressing, PartStrides

__all__ = ["Runs", "copy_runs", "slot_pairs"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous copies.

    Attributes:
        src: ``int64 [n]`` first byte of each in the pool that is read.
        dst: ``int64 [n]`` first byte in the other pool.
        nbytes: ``int64 [n]`` bytes of each.
    """

    src: Ints
    dst: Ints
    nbytes: Ints

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    @property
    def mean_bytes(self) -> float:
        """Bytes of a run on average, 0 without runs."""
        return self.total_bytes / len(self.nbytes) if len(self.nbytes) else 0.0

    def split(self, src_border: int, dst_border: int) -> Runs:
        """Return the same copies cut where either side passes a multiple of its border; 0 means no border."""
        runs = self
        for side, border in (("src", src_border), ("dst", dst_border)):
            if border:
                runs = runs._split_side(getattr(runs, side), border)
        return runs

    def _split_side(self, start: Ints, border: int) -> Runs:
        first, last = start // border, (start + self.nbytes - 1) // border
        pieces = last - first + 1
        which = np.repeat(np.arange(len(start)), pieces)
        chunk = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.maximum(start[which], chunk * border)
        end = np.minimum(start[which] + self.nbytes[which], (chunk + 1) * border)
        shift = begin - start[which]
        return Runs(self.src[which] + shift, self.dst[which] + shift, end - begin)


def slot_pairs(src_idx: Tensor, dst_idx: Tensor, count: Tensor | None, unit_tokens: int) -> tuple[Ints, Ints, Ints]:
    """Return the tokens that a transfer moves as (row, source slot, target slot), in order.

    Args:
        src_idx: ``int [R, M]`` on the host.
        dst_idx: ``int [R, M]`` on the host.
        count: ``int [R]`` on the host, or None.
        unit_tokens: tokens of an entry.
    """
    src, dst = src_idx.numpy().astype(np.int64), dst_idx.numpy().astype(np.int64)
    live = (src >= 0) & (dst >= 0)
    if count is not None:
        live &= np.arange(live.shape[1]) < count.numpy()[:, None]
    rows = np.repeat(np.nonzero(live)[0], unit_tokens)
    offsets = np.arange(unit_tokens)
    return rows, (src[live][:, None] + offsets).ravel(), (dst[live][:, None] + offsets).ravel()


def copy_runs(
    src_addr: Addressing,
    dst_addr: Addressing,
    pairs: tuple[Ints, Ints, Ints],
    *,
    layers: tuple[tuple[int, int], ...],
    num_heads: int,
    per_head: bool,
) -> Runs:
    """Return the runs of a transfer; arguments as of `io_transfer`, `pairs` of `slot_pairs`."""
    rows, src_slots, dst_slots = pairs
    heads = rows[:, None] % num_heads if per_head else np.arange(num_heads)[None]
    runs = []
    for src, dst in zip(src_addr.parts, dst_addr.parts, strict=True):
        begin = _token_bytes(src, src_addr.page_size, src_slots), _token_bytes(dst, dst_addr.page_size, dst_slots)
        one_layer = _merge(_head_rows(begin[0], src, heads), _head_rows(begin[1], dst, heads), src.row_bytes)
        runs += [_shifted(one_layer, src.layer * here, dst.layer * there) for here, there in layers]
    return Runs(*(np.concatenate([getattr(run, field) for run in runs]) for field in ("src", "dst", "nbytes")))


def _token_bytes(part: PartStrides, page_size: int, slots: Ints) -> Ints:
    return part.base + part.page * (slots // page_size) + part.token * (slots % page_size)


def _head_rows(tokens: Ints, part: PartStrides, heads: Ints) -> Ints:
    return (tokens[:, None] + part.head * heads).ravel()


def _merge(src: Ints, dst: Ints, row_bytes: int) -> Runs:
    if not len(src):
        return Runs(src, dst, np.zeros(0, np.int64))
    starts = np.ones(len(src), bool)
    starts[1:] = (np.diff(src) != row_bytes) | (np.diff(dst) != row_bytes)
    first = np.nonzero(starts)[0]
    return Runs(src[first], dst[first], np.diff(np.append(first, len(src))) * row_bytes)


def _shifted(runs: Runs, src: int, dst: int) -> Runs:
    return Runs(runs.src + src, runs.dst + dst, runs.nbytes)
