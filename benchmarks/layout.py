"""Claim: bringing an engine's paged KV to stored blocks, and back, costs little more than copying the bytes.

Each row compares `gather` or `scatter` of `connectors/layout` on a CPU with a memcpy, in alternating windows of the
same run, both in one thread and by the time of that thread, which counts less of what else the machine does. The
figure is the median of the ratios of neighbouring windows. Blocks are taken in random order.

The target is of a memcpy block by block, in the same order: the least work for blocks that lie apart.
One memcpy of all bytes in one piece is up to twice as fast as that, since it passes the caches by; rows against it have
no target.

The stored order is the default one (layer, kv, head, token, dim): an engine that keeps tokens before heads has all its
tokens change places, in pieces of one head of one token; one that keeps heads before tokens does not, nor does one
whose own order is the stored one. Cases without a target are the known weak ones, where those pieces are short.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from report import Row, arguments, publish

from kvcm.connectors.layout import Shard, StoredFormat
from kvcm.connectors.layout.gather import EngineKv, gather, scatter
from kvcm.connectors.layout.stored_format import KV_PACKED, LAYER_FIRST

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

MIB = 1 << 20
LAYERS = 4
ENGINE_TOKENS = 16
TARGET = 0.60

Move = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """An engine's KV.

    Attributes:
        name: for people.
        dtype: of the numbers.
        head_dim: numbers per head.
        heads: KV heads of the rank.
        axes: of each tensor; `kv` first when K and V share one.
        block_tokens: of a stored block.
        order: of the stored block.
        target: what gather and scatter must reach of memcpy, None when the row only reports.
    """

    name: str
    dtype: torch.dtype
    head_dim: int
    heads: int
    axes: tuple[str, ...]
    block_tokens: int = 64
    order: str = LAYER_FIRST
    target: float | None = TARGET

    @property
    def kv_parts(self) -> int:
        """2 for K and V, 1 for MLA."""
        return 2 if self.heads > 1 else 1


NHD = ("kv", "block", "token", "head", "dim")
HND = ("block", "kv", "head", "token", "dim")
CASES = [
    Case("GQA bf16, 8 heads of 128, tokens first", torch.bfloat16, 128, 8, NHD),
    Case("GQA bf16, 8 heads of 128, heads first", torch.bfloat16, 128, 8, HND),
    Case("GQA bf16, 8 heads of 128, tokens first, blocks of 16", torch.bfloat16, 128, 8, NHD, ENGINE_TOKENS),
    Case("GQA fp16, 8 heads of 64, tokens first", torch.float16, 64, 8, NHD),
    Case("GQA fp16, 8 heads of 64, heads first", torch.float16, 64, 8, HND),
    Case("GQA bf16, 2 heads of 128, tokens first", torch.bfloat16, 128, 2, NHD),
    Case("GQA bf16, 8 heads of 128, own order", torch.bfloat16, 128, 8, NHD, order="layer.kv.token.head.dim"),
    Case("MLA bf16, 576", torch.bfloat16, 576, 1, ("block", "token", "dim")),
    Case("GQA fp32, 8 heads of 32, tokens first", torch.float32, 32, 8, NHD, target=None),
    Case("GQA fp8, 8 heads of 64, tokens first", torch.uint8, 64, 8, NHD, target=None),
    Case("GQA bf16, 8 heads of 128, K beside V in storage", torch.bfloat16, 128, 8, HND, order=KV_PACKED),
]


class Side:
    """Memory of one case, and its operations."""

    def __init__(self, case: Case, total_bytes: int) -> None:
        self.stored = StoredFormat(
            layer_ends=(LAYERS,),
            heads=case.heads,
            head_shards=1,
            kv_parts=case.kv_parts,
            head_dim=case.head_dim,
            block_tokens=case.block_tokens,
            dtype=str(case.dtype).removeprefix("torch."),
            order=case.order,
        )
        row_bytes = self.stored.shard_bytes(self.stored.model)
        self.rows = max(1, total_bytes // row_bytes)
        blocks = self.rows * case.block_tokens // ENGINE_TOKENS
        sizes = {"kv": 2, "block": blocks, "token": ENGINE_TOKENS, "head": case.heads, "dim": case.head_dim}
        shape = [sizes[axis] for axis in case.axes]
        self.layers = [random_tensor(shape, case.dtype, seed) for seed in range(LAYERS)]
        self.engine = EngineKv(self.stored, self.model, [[layer] for layer in self.layers], case.axes)
        self.block_ids = random.Random(0).sample(range(blocks), blocks)
        self.memory = torch.zeros(self.rows, row_bytes, dtype=torch.uint8)
        self.other = np.ones(self.memory.numel(), np.uint8)
        self.target = np.zeros(self.memory.numel(), np.uint8)
        self.pieces = list(self._pieces(case))

    def _pieces(self, case: Case) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield each block of the engine as it lies in memory, and where it goes to."""
        start = 0
        for layer in self.layers:
            blocks_first = layer if case.axes[0] == "block" else layer.transpose(0, 1)
            for block in self.block_ids:
                parts = [blocks_first[block]] if case.axes[0] == "block" else blocks_first[block].unbind()
                for part in parts:
                    source = part.view(torch.uint8).numpy().reshape(-1)
                    yield source, self.target[start : start + source.size]
                    start += source.size

    @property
    def model(self) -> Shard:
        return self.stored.model

    def gather(self) -> None:
        gather(self.engine, self.block_ids, self.model, self.memory)

    def scatter(self) -> None:
        scatter(self.engine, self.block_ids, self.model, self.memory)

    def copy(self) -> None:
        np.copyto(self.target, self.other)

    def copy_blocks(self) -> None:
        """Copy the engine's blocks as they are, one after the other."""
        for source, target in self.pieces:
            np.copyto(target, source)

    def comes_back(self) -> bool:
        """Return whether a scatter after a gather restores the engine's memory."""
        before = [layer.clone() for layer in self.layers]
        self.gather()
        for layer in self.layers:
            layer.zero_()
        self.scatter()
        return all(
            torch.equal(layer.view(torch.uint8), old.view(torch.uint8))
            for layer, old in zip(self.layers, before, strict=True)
        )


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype)


def seconds(move: Move) -> float:
    start = time.thread_time()
    move()
    return time.thread_time() - start


def rows_of(case: Case, total_bytes: int, windows: int) -> Iterator[Row]:
    side = Side(case, total_bytes)
    equal = side.comes_back()
    yield Row(case.name, "bytes are equal", int(equal), "", target="1", ok=equal)
    gigabytes = side.memory.numel() / 1e9
    for name, move in (("gather", side.gather), ("scatter", side.scatter)):
        move()
        for against, copy, target in (("of each block", side.copy_blocks, case.target), ("of all", side.copy, None)):
            copy()
            pairs = [(seconds(move), seconds(copy)) for _ in range(windows)]
            ours, theirs = (median(pair[index] for pair in pairs) for index in (0, 1))
            ratio = median(theirs / ours for ours, theirs in pairs)
            wanted = "" if target is None else f"{name}/memcpy >= {target:.2f}"
            ok = None if target is None else ratio >= target
            metric = f"{name}, against memcpy {against}"
            yield Row(case.name, metric, gigabytes / ours, "GB/s", gigabytes / theirs, ratio, wanted, ok)


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    total_bytes, windows = (8 * MIB, 5) if options.quick else (64 * MIB, 31)
    rows = [row for case in CASES for row in rows_of(case, total_bytes, windows)]
    met = publish("layout: paged KV to stored blocks and back, on one core", rows, options.json)
    sound = all(row.ok for row in rows if row.metric == "bytes are equal")
    return 0 if met or (options.quick and sound) else 1


if __name__ == "__main__":
    sys.exit(main())
