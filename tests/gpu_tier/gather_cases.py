"""Random runs between random pools, and the expected address of each row, one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import Addressing, KVDtype, KVGeometry, KVKind, Layout, PartStrides
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.types import CopyRuns

LAYERS = 2


@dataclass(frozen=True, slots=True)
class Gather:
    """Arguments of a call.

    Attributes:
        sources: pools of random bytes.
        target: pool of sevens.
        runs: of them.
        num_heads: KV heads.
    """

    sources: tuple[RowPool, ...]
    target: RowPool
    runs: CopyRuns
    num_heads: int

    def wanted(self) -> tuple[Tensor, list[int]]:
        """Return the target's bytes after the call, and the bytes from each source."""
        out, moved = self.target.data.clone(), [0] * len(self.sources)
        for line, count in enumerate(self.runs.count.tolist()):
            for u in range(min(count, self.runs.kind.shape[1])):
                kind, src, dst, tokens = (
                    int(table[line, u])
                    for table in (self.runs.kind, self.runs.src, self.runs.dst, self.runs.tokens)
                )  # fmt: skip
                if not 0 <= kind < len(self.sources):
                    continue
                for i in range(tokens):
                    moved[kind] += self._row(out, self.sources[kind], src + i, dst + i, line % self.num_heads)
        return out, moved

    def _row(self, out: Tensor, source: RowPool, here: int, there: int, head: int) -> int:
        target, copied = self.target, 0
        for part, strides in enumerate(target.addressing.parts):
            read = source.addressing.address(part, here, source.layer, head)
            written = target.addressing.address(part, there, target.layer, head)
            out[written : written + strides.row_bytes] = source.data[read : read + strides.row_bytes]
            copied += strides.row_bytes
        return copied

    def on(self, device: str) -> Gather:
        """Return the same on a device; the last source stays on the host, pinned."""
        sources = [replace(pool, data=pool.data.to(device)) for pool in self.sources[:-1]]
        last = replace(self.sources[-1], data=self.sources[-1].data.pin_memory())
        tables = {name: getattr(self.runs, name).to(device) for name in ("kind", "src", "dst", "tokens", "count")}
        target = replace(self.target, data=self.target.data.to(device))
        return Gather((*sources, last), target, CopyRuns(**tables), self.num_heads)


def random_gather(seed: int, *, most_tokens: int = 9, most_runs: int = 5, most_rows: int = 4) -> Gather:
    """Return runs of 0 to `most_tokens` tokens; some are of no kind, some behind the count, some counts are odd."""
    draw = random.Random(seed)
    kind = draw.choice([KVKind.MHA, KVKind.MHA, KVKind.MLA])
    heads = 1 if kind is KVKind.MLA else draw.randint(1, 4)
    dims, dims_v = (12, 8) if kind is KVKind.MLA else (draw.choice([3, 8, 32]), draw.choice([1, 8, 32]))
    geometry = KVGeometry(kind, LAYERS, heads, dims, dims_v, draw.choice([KVDtype.F16, KVDtype.F32, KVDtype.FP8]))
    width, lines = draw.randint(1, most_runs), heads * draw.randint(1, most_rows)
    space = lines // heads * width * most_tokens
    sources = tuple(_source(draw, geometry, most_tokens) for _ in range(draw.randint(1, 3)))
    target = _pool(draw, geometry, draw.choice(list(Layout)), space)
    rows = []
    for line in range(lines):
        starts = draw.sample(range(width), width)
        for u in range(width):
            number, tokens = draw.randint(-1, len(sources)), draw.choice([0, 1, draw.randint(0, most_tokens)])
            last = _slots(sources[number % len(sources)]) - tokens
            dst = (line // heads * width + starts[u]) * most_tokens
            rows.append((number, draw.randint(0, last), dst, tokens))
    table = torch.tensor(rows).view(lines, width, 4).unbind(-1)
    count = torch.tensor([draw.choice([0, width, draw.randint(-1, width + 1)]) for _ in range(lines)])
    number, src, dst, tokens = (column.contiguous() for column in table)
    runs = CopyRuns(number.int(), src, dst.int(), tokens.int(), count.int())
    return Gather(sources, replace(target, data=torch.full_like(target.data, 7)), runs, heads)


def _slots(pool: RowPool) -> int:
    rows = pool.data.numel() // sum(part.row_bytes for part in pool.addressing.parts)
    return rows if pool.addressing.parts[0].head == 0 else 2 * pool.addressing.page_size


def _source(draw: random.Random, geometry: KVGeometry, most_tokens: int) -> RowPool:
    if draw.random() < 0.4:
        return _blocks(draw, geometry, most_tokens)
    return _pool(draw, geometry, draw.choice(list(Layout)), most_tokens)


def _pool(draw: random.Random, geometry: KVGeometry, layout: Layout, tokens: int) -> RowPool:
    """Return a pool of at least two pages and so many tokens."""
    page_size = draw.choice([1, 3, 4, 16])
    page_size = page_size if page_size * 2 >= tokens else -(-tokens // 2)
    geometry = replace(geometry, page_size=page_size)
    addressing = Addressing.of(geometry, layout, 2)
    return RowPool(_bytes(draw, addressing.total_bytes), addressing, draw.randrange(LAYERS))


def _blocks(draw: random.Random, geometry: KVGeometry, most_tokens: int) -> RowPool:
    """Return blocks of one head each: head and layer do not matter, all keys lie before all values."""
    block, sizes = draw.choice([2, 8]), [part.row_bytes for part in geometry.parts]
    blocks = -(-most_tokens // block) + 3
    parts = tuple(
        PartStrides(blocks * block * sum(sizes[:i]), block * size, size, 0, 0, size) for i, size in enumerate(sizes)
    )
    total = blocks * block * sum(sizes)
    return RowPool(_bytes(draw, total), Addressing(Layout.LAYER_FIRST, block, total, parts), draw.randrange(LAYERS))


def _bytes(draw: random.Random, number: int) -> Tensor:
    return torch.randint(
        0, 256, (number,), dtype=torch.uint8, generator=torch.Generator().manual_seed(draw.getrandbits(31))
    )
