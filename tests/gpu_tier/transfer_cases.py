"""Random arguments of transfers between pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import Addressing, KVDtype, KVGeometry, KVKind, Layout

__all__ = ["random_transfer", "transferred"]


def random_transfer(seed: int, most_rows: int = 2) -> tuple[dict[str, Any], int]:
    """Return arguments, and the bytes of either pool; the targets of a head, or of all rows, are unique."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind, dtype, page = draw.choice(list(KVKind)), draw.choice(list(KVDtype)), draw.choice([1, 3, 4])
    heads, dims, v_dims = draw.randint(1, 4), draw.choice([1, 5, 8, 16]), draw.choice([1, 8])
    if kind is KVKind.MLA:
        heads, dims, v_dims = 1, draw.choice([130, 131, 192]), 128
    geometry = KVGeometry(kind, draw.randint(1, 4), heads, dims, v_dims, dtype, page)
    unit, entries = draw.choice([1, 2, 3]), draw.randint(1, 4)
    rows = heads * draw.randint(1, most_rows)
    items = rows * entries
    pages = -(-items * unit // page)
    src, dst = (unit * torch.randperm(items, generator=generator).view(rows, entries) for _ in range(2))
    for table in (src, dst):
        table[torch.rand(table.shape, generator=generator) < 0.1] = -1
    count = torch.randint(-1, entries + 2, (rows,), dtype=torch.int32, generator=generator)
    layers = draw.sample(range(geometry.num_layers), draw.randint(1, geometry.num_layers))
    arguments: dict[str, Any] = {
        "src_addr": Addressing.of(geometry, draw.choice(list(Layout)), pages),
        "dst_addr": Addressing.of(geometry, draw.choice(list(Layout)), pages),
        "src_idx": src.to(draw.choice([torch.int32, torch.int64])), "dst_idx": dst.int(),
        "layers": tuple((draw.randrange(geometry.num_layers), layer) for layer in layers), "num_heads": heads,
        "per_head": draw.random() < 0.5, "unit_tokens": unit, "blocks": draw.randint(0, 2),
        "count": draw.choice([None, count, count]),
    }  # fmt: skip
    return arguments, geometry.page_bytes * pages


def transferred(
    arguments: dict[str, Any], size: int, run: Callable[..., object], device: str = "cpu"
) -> tuple[Tensor, int]:
    """Return the target of a transfer into sevens, and the bytes that were counted."""
    src = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)).to(device)
    dst, moved = torch.full((size,), 7, dtype=torch.uint8, device=device), torch.tensor([5], device=device)
    on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    run(src, dst, **on_device, moved=moved)
    return dst.cpu(), int(moved) - 5
