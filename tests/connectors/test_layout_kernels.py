"""The Triton kernel against the torch reference, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter is chosen when Triton is imported, for the whole process: hence one of its own.
PROGRAM = """
import numpy as np
import torch
from hypothesis import given, settings, strategies as st
from layout_cases import chosen_blocks, engine_cases, shards

from connectors.layout import rows, rows_triton
from connectors.layout.gather import gather, scatter

assert rows.gather_rows_on(torch.device("cpu")) is rows_triton.gather_rows
assert rows.scatter_rows_on(torch.device("cpu")) is rows_triton.scatter_rows

@settings(max_examples=100, deadline=None, derandomize=True)
@given(engine_cases(), st.data())
def both_ways(case, data):
    source, target = case.logical(seed=1), case.logical(seed=2)
    ids = data.draw(chosen_blocks(case))
    shard = data.draw(shards(case.shard))
    memory = case.memory(target)
    out = torch.full((len(ids) // case.places + 1, case.stored.shard_bytes(shard)), 0xAA, dtype=torch.uint8)
    gather(case.engine(case.memory(source)), ids, shard, out[:-1])
    assert np.array_equal(out[:-1].numpy(), case.stored_bytes(source, ids, shard))
    assert (out[-1] == 0xAA).all()
    scatter(case.engine(memory), ids, shard, out[:-1])
    layers = slice(shard.layers.first - case.shard.layers.first, shard.layers.end - case.shard.layers.first)
    heads = slice(shard.heads.first - case.shard.heads.first, shard.heads.end - case.shard.heads.first)
    for block in ids:
        target[layers, block, :, heads] = source[layers, block, :, heads]
    assert np.array_equal(memory, case.memory(target))

both_ways()

# More elements than a tile has, of which the last one is not full.
paged, packed = torch.randn(5, 2, 3, 7, 50), torch.zeros(2, 2, 3, 7, 50)
back = torch.zeros_like(paged)
ids = torch.tensor([4, 1])
rows_triton.gather_rows(paged, ids, packed)
assert torch.equal(packed, paged[ids])
rows_triton.scatter_rows(back, ids, packed)
assert torch.equal(back[ids], paged[ids]) and not back[[0, 2, 3]].any()
"""

# Triton's compiler needs no GPU, and accepts less than the interpreter does.
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from connectors.layout.rows_triton import _kernel

for to_paged in (False, True):
    fixed = {"to_paged": to_paged, "tile": 1024, "paged_dim": 1, "packed_dim": 1}
    types = {"paged": "*i64", "packed": "*i64", "rows": "*i64"} | dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in _kernel.arg_names}
    values = {(_kernel.arg_names.index(name),): value for name, value in fixed.items()}
    assert compile(ASTSource(_kernel, signature, values), target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


def test_kernel_moves_the_same_bits_as_torch() -> None:
    """Through the same functions and on the same layouts, types and shards as the reference is tested with."""
    run(PROGRAM, interpret="1")


def test_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """In both directions, to machine code of compute capability 9.0."""
    run(COMPILED, interpret="0", TRITON_CACHE_DIR=str(tmp_path))


def run(program: str, interpret: str, **environment: str) -> None:
    """Run a program in a process of its own and fail with what it says."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": path, **environment},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
