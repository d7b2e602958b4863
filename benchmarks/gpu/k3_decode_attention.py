"""K3, claim: decode attention reads KV at the speed of device memory.

Each row is one layer's attention of B requests of n tokens. The full attention of ours (`decode_attn_paged`) stands
beside torch's (flash and cuDNN, on contiguous KV, which it is given for free); the faster one is the baseline.
Attention over 2,048 selected tokens (`decode_attn_token`) follows, and its speed-up over the baseline only if that
reaches 75 % of what the device allows: of its memory, or for MLA with 128 query heads, of its products.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from device_clock import Samples
from device_run import LEAST_OF_ROOFLINE, DeviceRun, run
from report import Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcm.gpu_tier.eval.model_shapes import ModelShape, model_shape
from kvcm.gpu_tier.geometry import KVDtype, Rows
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.types import LayerKV

MEASURES = "decode attention, ours and torch's, over 8K to 128K tokens against the measured speed of device memory"
SELECTED = 2048
PAGE_TOKENS = 64
# Model, KV and (batch, tokens) of each case; at most about 20 GB of KV.
CASES: list[tuple[str, KVDtype, list[tuple[int, int]]]] = [
    ("llama3-8b", KVDtype.BF16, [(1, 131072), (8, 8192), (8, 32768), (8, 131072), (32, 8192), (32, 32768)]),
    ("llama3-8b", KVDtype.FP8, [(8, 32768), (32, 32768)]),
    ("deepseek-v3.2", KVDtype.BF16, [(1, 131072), (8, 32768), (32, 32768), (64, 32768)]),
    ("deepseek-v3.2", KVDtype.FP8, [(32, 32768)]),
]
QUICK = [(name, dtype, sizes[-1:]) for name, dtype, sizes in CASES]
SMOKE = [(name, dtype, [(2, 128)]) for name, dtype, _ in CASES]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One layer's attention.

    Attributes:
        name: for people.
        shape: of the model.
        batch: requests.
        n_tokens: tokens of each.
        kv: random rows of all of them, request by request.
        q: ``bf16 [B, Hq, D]``.
        out_o: ``f32 [B, Hq, dv]``.
        out_lse: ``f32 [B, Hq]``.
    """

    name: str
    shape: ModelShape
    batch: int
    n_tokens: int
    kv: LayerKV
    q: Tensor
    out_o: Tensor
    out_lse: Tensor

    @property
    def sm_scale(self) -> float:
        """One over the root of the dims."""
        return float(self.shape.geometry.head_dim**-0.5)


def case_name(name: str, dtype: KVDtype, batch: int, n_tokens: int) -> str:
    """For people."""
    return f"{name}, {dtype} KV, B={batch}, n={n_tokens}"


def inputs(this: DeviceRun, name: str, dtype: KVDtype, batch: int, n_tokens: int) -> Inputs:
    """Return random queries and KV."""
    shape = model_shape(name).with_kv(dtype, None)
    geometry, device = shape.geometry, this.device
    parts = [random_rows(batch * n_tokens, geometry.num_kv_heads, part, device) for part in geometry.parts]
    kv = LayerKV(parts[0], parts[1] if len(parts) > 1 else None, geometry.v_head_dim)
    q = torch.randn(batch, shape.num_q_heads, geometry.head_dim, device=device, dtype=torch.bfloat16)
    out_o = torch.empty(batch, shape.num_q_heads, geometry.v_head_dim, device=device)
    return Inputs(
        case_name(name, dtype, batch, n_tokens),
        shape,
        batch,
        n_tokens,
        kv,
        q,
        out_o,
        torch.empty(out_o.shape[:2], device=device),
    )


def random_rows(slots: int, heads: int, part: Any, device: torch.device, chunk: int = 1 << 16) -> Rows:
    """Return rows of random numbers, encoded piece by piece: as f32 they would need several times the memory."""
    data = torch.empty(slots, heads, part.row_bytes, dtype=torch.uint8, device=device)
    for start in range(0, slots, chunk):
        count = min(chunk, slots - start)
        data[start : start + count] = part.encode(torch.randn(count, heads, part.dims, device=device))
    return Rows(data, part)


def roofline_seconds(this: DeviceRun, case: Inputs, tokens: int) -> float:
    """Return the time that reading, or computing, the attention of so many tokens per request takes at least."""
    geometry = case.shape.geometry
    read = case.batch * tokens * geometry.token_layer_bytes / this.peaks.hbm
    products = 2 * case.batch * tokens * case.shape.num_q_heads * (geometry.head_dim + geometry.v_head_dim)
    return float(max(read, products / this.peaks.flops))


def full_ours(this: DeviceRun, case: Inputs) -> Samples:
    """Attention over all tokens, by pages."""
    pages = -(-case.n_tokens // PAGE_TOKENS)
    table = torch.arange(case.batch * pages, dtype=torch.int32, device=this.device).view(case.batch, pages)
    lengths = torch.full((case.batch,), case.n_tokens, dtype=torch.int32, device=this.device)

    def step() -> None:
        decode_attn_paged(case.q, case.kv, table, lengths, PAGE_TOKENS, case.sm_scale, case.out_o, case.out_lse)

    return this.time(f"{case.name}: full, ours", step)


def full_torch(this: DeviceRun, case: Inputs, backend: SDPBackend) -> Samples | None:
    """Torch's attention over contiguous KV of plain numbers; None where it has none for the shape."""
    geometry = case.shape.geometry
    if case.kv.v is None or geometry.dtype is KVDtype.FP8:
        return None
    k, v = (
        rows.typed.view(case.batch, case.n_tokens, geometry.num_kv_heads, -1).transpose(1, 2).contiguous()
        for rows in (case.kv.k, case.kv.v)
    )
    q = case.q[:, :, None].to(k.dtype)

    def step() -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(q, k, v, scale=case.sm_scale, enable_gqa=True)

    try:
        step()
    except RuntimeError as error:
        print(f"{case.name}: torch has no {backend.name} here: {error}".splitlines()[0])
        return None
    return this.time(f"{case.name}: full, torch {backend.name}", step)


def sparse_ours(this: DeviceRun, case: Inputs, selected: int) -> Samples:
    """Attention over so many scattered tokens of each request."""
    rows = [torch.randperm(case.n_tokens, device=this.device)[:selected].sort().values for _ in range(case.batch)]
    first = torch.arange(case.batch, device=this.device)[:, None] * case.n_tokens
    table = (torch.stack(rows) + first).int()[:, None].contiguous()
    lens = torch.full((case.batch, 1), selected, dtype=torch.int32, device=this.device)

    def step() -> None:
        decode_attn_token(case.q, case.kv, table, lens, case.sm_scale, case.out_o, case.out_lse)

    return this.time(f"{case.name}: sparse, ours", step)


def speed_row(this: DeviceRun, case: Inputs, metric: str, samples: Samples, target: float | None) -> float:
    """Publish a time and the share of the roofline that it reaches; return the share."""
    tokens = case.batch * case.n_tokens * case.shape.geometry.token_layer_bytes
    share = roofline_seconds(this, case, case.n_tokens) / samples.median
    wanted = "" if target is None else f"share of the roofline >= {target:.2f}"
    this.add_time(f"{case.name}: {metric}", samples)
    ok = None if target is None else share >= target
    speed = tokens / samples.median / 1e9
    this.add(Row(f"{case.name}: {metric}", "KV read", speed, "GB/s", this.peaks.hbm / 1e9, share, wanted, ok))
    return share


def measure_case(this: DeviceRun, case: Inputs, selected: int) -> None:
    """All attentions of one case."""
    found = {"full, ours": full_ours(this, case)}
    for backend in (
        (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if this.clock.is_gpu else (SDPBackend.MATH,)
    ):
        theirs = full_torch(this, case, backend)
        if theirs is not None:
            found[f"full, torch {backend.name.lower()}"] = theirs
    best = min(found, key=lambda name: found[name].median)
    shares = {
        name: speed_row(this, case, name, samples, LEAST_OF_ROOFLINE if name == best else None)
        for name, samples in found.items()
    }
    sparse = sparse_ours(this, case, selected)
    this.add_time(f"{case.name}: {selected} tokens, ours", sparse)
    least = roofline_seconds(this, case, selected)
    this.add(Row(f"{case.name}: {selected} tokens, ours", "share of the roofline", least / sparse.median, ""))
    gain, graphs = found[best].median / sparse.median, (sparse.is_graph, found[best].is_graph)
    this.add_speed_up(f"{case.name}: {selected} tokens", best, gain, shares[best], graphs)


def measure(this: DeviceRun) -> None:
    """All cases."""
    sizes = SMOKE if this.is_smoke else QUICK if this.is_quick else CASES
    for name, dtype, pairs in sizes:
        for batch, n_tokens in pairs:
            if this.leaves_out(case_name(name, dtype, batch, n_tokens)):
                continue
            measure_case(this, inputs(this, name, dtype, batch, n_tokens), 16 if this.is_smoke else SELECTED)


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
