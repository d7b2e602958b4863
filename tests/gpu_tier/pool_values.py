"""Pools whose rows say where they are, for the tests of what moves bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.kernels.operands import pool_rows
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool

GEOMETRIES = {
    "mha": KVGeometry(KVKind.MHA, 3, 2, 8, 12, KVDtype.F32, page_size=4, start_layer=5),
    "mha_bf16": KVGeometry(KVKind.MHA, 3, 4, 16, 16, KVDtype.BF16, page_size=8),
    "mha_fp8": KVGeometry(KVKind.MHA, 3, 2, 5, 8, KVDtype.FP8, page_size=4),
    "mla": KVGeometry(KVKind.MLA, 4, 1, 24, 16, KVDtype.BF16, page_size=4, start_layer=1),
    "mla_fp8": KVGeometry(KVKind.MLA, 3, 1, 160, 128, KVDtype.FP8, page_size=2),
}


def fill_coded(pool: HostKVPool | DeviceKVPool, seed: int) -> None:
    """Let each row of a pool hold bytes that depend on its part, layer, slot and head."""
    for part in range(len(pool.geometry.parts)):
        for layer in range(pool.geometry.num_layers):
            rows = _rows(pool, part, layer)
            pages, tokens, heads, row_bytes = rows.shape
            code = torch.arange(pages * tokens * heads).view(pages, tokens, heads, 1)
            places = torch.arange(row_bytes) * 7
            rows.copy_((code * 31 + places + layer * 101 + part * 57 + seed * 13 + code // 8) % 251)


def all_rows(pool: HostKVPool | DeviceKVPool, part: int, layer: int) -> Tensor:
    """Return a copy of the rows of a part and layer, ``uint8 [slots, H, row_bytes]``, on the host."""
    rows = _rows(pool, part, layer)
    return rows.reshape(-1, *rows.shape[2:]).clone().cpu()


def _rows(pool: HostKVPool | DeviceKVPool, part: int, layer: int) -> Tensor:
    return pool_rows(pool.data, pool.addressing, part, layer, pool.geometry.num_kv_heads)
