"""The Triton kernels compile for a GPU as well: the interpreter accepts things that the compiler refuses.

Compiling needs no GPU. It needs another process, because in this one kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_PROGRAM = """
import json, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for case in json.load(sys.stdin):
    kernel = getattr(import_module(case["module"]), case["kernel"])
    constants, types = case["constants"], case["types"]
    assert set(kernel.arg_names) == set(constants) | set(types), set(kernel.arg_names) ^ (set(constants) | set(types))
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"]
"""


def _ints(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


_STRIDES = "src_base src_page src_token src_layer_stride src_head dst_base dst_page dst_token dst_layer_stride dst_head"
_IO_TYPES = {
    "src": "*i64", "dst": "*i64", "src_idx": "*i64", "dst_idx": "*i32", "count": "*i32", "moved": "*i64",
    **_ints("rows entries programs src_layer dst_layer layers src_page_size dst_page_size num_heads " + _STRIDES),
    "src_page": "i64",
}  # fmt: skip
_IO = {
    "heads": 2, "unit": 1, "words": 144, "word_size": 8, "per_head": True, "has_count": True, "has_moved": True,
    "tile": 4096,
}  # fmt: skip
_GATHER_TYPES = {
    **{f"source{i}": "*i32" for i in range(3)}, **_ints("stride0 stride1 stride2 runs buffer_words"), "kind": "*i32",
    "src_row": "*i64", "n_rows": "*i32", "dst_row": "*i32", "count": "*i32", "out": "*i32",
}  # fmt: skip
_LRU_IDS = """
items seq_lens num_real slot_item newest_item slot_loc newest_slots device_slot load_device load_count evicted
promote_src promote_dst errors item_slot order
"""
_LRU_TYPES = {
    **dict.fromkeys(_LRU_IDS.split(), "*i32"), **_ints("row_stride head_stride host_stride map_stride"),
    "requests": "*i64", "host_loc": "*i64", "load_host": "*i64", "counters": "*i64", "sparse_mask": "*i1",
    "lru_slots": "*i16",
}  # fmt: skip
_LRU = {
    "item_stride": 1, "heads": 8, "width": 2048, "capacity": 4096, "unit": 1, "promote": True, "loads_hottest": False,
    "block": 1024,
}  # fmt: skip
_CASES = {
    "lru_diff": {"kernel": "_diff", "types": _LRU_TYPES, "constants": _LRU},
    "io_transfer": {"kernel": "_copy_kernel", "types": _IO_TYPES, "constants": _IO},
    "gather_copy": {"kernel": "_kernel", "types": _GATHER_TYPES, "constants": {"words": 6, "tile": 1024}},
}


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    cases = [{"module": f"gpu_tier.kernels.{name}.triton_impl", **case} for name, case in _CASES.items()]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        command, input=json.dumps(cases), env=plain | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
