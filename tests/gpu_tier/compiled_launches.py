"""Launches attention, score and gather kernels, and compiles each launch for sm_90 in place of running it.

Run as a program, in a process where Triton does not interpret. Prints one JSON object per launch: `case`, `kernel`,
`copies` (bytes of the asynchronous copies to shared memory), `loads` (bytes of the widest plain load), `tensor_cores`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
from attention_cases import Shape, random_kv, random_query
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcm.gpu_tier.geometry import Addressing, KVDtype, KVGeometry, KVKind, Layout, Rows
from kvcm.gpu_tier.index.meta_index import MetaViews, empty_meta_page
from kvcm.gpu_tier.kernels.centroid_score import centroid_score
from kvcm.gpu_tier.kernels.centroid_score import triton_impl as centroid_triton
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.indexer_score import indexer_score
from kvcm.gpu_tier.kernels.indexer_score import triton_impl as indexer_triton
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.kernels.quest_score import quest_score
from kvcm.gpu_tier.kernels.quest_score import triton_impl as quest_triton
from kvcm.gpu_tier.kernels.split_decode import attend as split_call
from kvcm.gpu_tier.kernels.split_decode import triton_impl as split_triton
from kvcm.gpu_tier.kernels.weighted_attn import triton_impl as weighted_triton
from kvcm.gpu_tier.kernels.weighted_attn import weighted_attn
from kvcm.gpu_tier.types import CopyRuns, LayerKV

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8", torch.int16: "*i16",
    torch.int64: "*i64",
}  # fmt: skip
_TARGET = GPUTarget("cuda", 90, 32)
_ALIGNED = [["tt.divisibility", 16]]


class _Recorder:
    """Stands in for `JITFunction.run`."""

    case = ""

    def compile(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        bound = dict(zip(kernel.arg_names, args, strict=False)) | named
        fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        signature, constants, hints = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = bound[name]
            # As Triton does at a launch: 1 is fixed, multiples of 16 and aligned pointers are known to be that.
            if name in fixed or (isinstance(value, int) and value == 1):
                signature[name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = _TYPES[value.dtype]
                hints |= {(place,): _ALIGNED} if value.data_ptr() % 16 == 0 else {}
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                hints |= {(place,): _ALIGNED} if isinstance(value, int) and value % 16 == 0 else {}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
        self.report(kernel.__name__, triton.compile(source, target=_TARGET, options=options).asm["ptx"])

    def report(self, kernel: str, ptx: str) -> None:
        copies = re.findall(r"cp\.async\.c[ga]\.shared\.global [^;]*?, (0x[0-9a-f]+),", ptx)
        loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)", ptx)
        found = {"case": self.case, "kernel": kernel, "copies": sorted({int(size, 16) for size in copies})}
        found["loads"] = max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)
        found["tensor_cores"] = sorted({*re.findall(r"(?:wgmma\.mma_async|mma)\.sync[\w.]*", ptx)})
        print(json.dumps(found), flush=True)


def _record(recorder: _Recorder) -> None:
    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
        recorder.compile(kernel, args, named)

    triton.runtime.JITFunction.run = run
    split_call.processors = lambda _: 132
    for module in (split_triton, quest_triton, indexer_triton, centroid_triton, weighted_triton):
        module.kernel.measures = False


def _aligned(kv: LayerKV) -> LayerKV:
    """Return rows that begin where memory of a pool does."""
    rows = [None if rows is None else Rows(rows.data.clone(), rows.format) for rows in (kv.k, kv.v)]
    assert rows[0] is not None
    return LayerKV(rows[0], rows[1], kv.v_dims)


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _attention(recorder: _Recorder) -> None:
    few = (KVDtype.BF16, KVDtype.FP8)
    shapes = [Shape(8, 4, 128, dtype) for dtype in few] + [Shape(1, 16, 576, dtype, rope=64) for dtype in few]
    for shape in [*shapes, Shape(8, 4, 64, KVDtype.F32)]:
        kv, q = _aligned(random_kv(shape, 64)), random_query(shape, 4)
        out = torch.empty(4, shape.heads * shape.group, shape.v_dims), torch.empty(4, shape.heads * shape.group)
        recorder.case = f"token {shape}"
        decode_attn_token(q, kv, _ints(4, 1, 2048), _ints(4, 1), 0.1, *out, impl="triton")
        if shape is not shapes[0]:
            continue
        recorder.case = f"paged {shape}"
        decode_attn_paged(q, kv, _ints(4, 32), _ints(4), 64, 0.1, *out, impl="triton")


def _clusters(recorder: _Recorder) -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    for heads, group, dims, v_dims, dtype in ((8, 4, 128, 128, bf16), (1, 128, 576, 512, bf16), (8, 1, 128, 128, f32)):
        recorder.case = f"clusters {heads}x{group}-d{dims}-{dtype}"
        views = MetaViews.of(empty_meta_page(heads, dims, v_dims).repeat(9, 1), heads, dims, v_dims)
        q, q_heads = torch.zeros(4, heads * group, dims, dtype=dtype), heads * group
        index, table, ids = (views.centroids, views.value_sums, views.log_size), _ints(4, 64), _ints(4, heads, 1024)
        centroid_score(q, index[0], index[2], table, _ints(4), 0.1, torch.empty(4, q_heads, 4096), impl="triton")
        out = torch.empty(4, q_heads, v_dims), torch.empty(4, q_heads)
        weighted_attn(q, *index, table, ids, _ints(4, heads), 0.1, *out, impl="triton")


def _gather(recorder: _Recorder) -> None:
    recorder.case = "gather"
    geometry = KVGeometry(KVKind.MHA, 2, 8, 128, 128, KVDtype.BF16, 64)
    addressing = Addressing.of(geometry, Layout.LAYER_FIRST, 2)
    pool = RowPool(torch.zeros(addressing.total_bytes, dtype=torch.uint8), addressing, 1)
    table = _ints(16, 32)
    runs = CopyRuns(table, table.long(), table, table, _ints(16))
    gather_copy((pool,) * 3, pool, runs, num_heads=8, moved=torch.zeros(3, dtype=torch.int64), impl="triton")


def _quest(recorder: _Recorder) -> None:
    recorder.case = "quest"
    q, bounds = torch.zeros(4, 32, 128, dtype=torch.bfloat16), torch.zeros(8, 8, 2, 128, dtype=torch.bfloat16)
    quest_score(q, bounds, _ints(4, 64), _ints(4), torch.empty(4, 32, 64), impl="triton")


def _indexer(recorder: _Recorder) -> None:
    recorder.case = "indexer"
    q8, keys = torch.zeros(2, 64, 128).to(torch.float8_e4m3fn), torch.zeros(64, 132, dtype=torch.uint8)
    indexer_score(q8, torch.zeros(2, 64), keys, _ints(2, 64), 64, _ints(2), torch.empty(2, 4096), impl="triton")


def main() -> None:
    recorder = _Recorder()
    _record(recorder)
    _attention(recorder)
    _quest(recorder)
    _indexer(recorder)
    _clusters(recorder)
    _gather(recorder)


if __name__ == "__main__":
    main()
