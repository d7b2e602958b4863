"""Iovecs of tensors: the same bytes as plain indexing, for any strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connectors.layout import BlockLayout, contiguous_runs
from connectors.layout.sequence import sequence_block
from connectors.layout.staging import Staging
from connectors.layout.tensors import dtype_name, iovec, run_count
from kvcm.model.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Return a view of random numbers: transposed, sliced and stepped."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    tensor = numbers.permute(draw(st.permutations(range(len(shape)))))
    for dimension, size in enumerate(tensor.shape):
        start = draw(st.integers(0, size - 1))
        tensor = tensor.narrow(dimension, start, draw(st.integers(1, size - start)))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    return tensor[tuple(slice(None, None, step) for step in steps)]


def raw(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in row-major order."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


@given(st.lists(strided_tensors(), min_size=1, max_size=4))
def test_iovec_covers_the_elements_in_order(tensors: list[torch.Tensor]) -> None:
    assert b"".join(iovec(tensors)) == b"".join(raw(tensor) for tensor in tensors)


@given(strided_tensors())
def test_writing_the_iovec_writes_the_elements_and_nothing_else(tensor: torch.Tensor) -> None:
    base = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    before = base.clone()
    new = torch.randint(0, 255, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8).numpy().tobytes()
    position = 0
    for view in iovec([tensor]):
        view[:] = new[position : position + len(view)]
        position += len(view)
    assert raw(tensor) == new
    written = {(address - base.data_ptr()) // tensor.element_size() for address in _addresses(tensor)}
    for index in range(base.numel() // tensor.element_size()):
        if index not in written:
            piece = slice(index * tensor.element_size(), (index + 1) * tensor.element_size())
            assert torch.equal(base[piece], before[piece])


def _addresses(tensor: torch.Tensor) -> list[int]:
    indices = torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape)).reshape(-1, tensor.dim())
    offsets = (indices * torch.tensor(tensor.stride())).sum(1) * tensor.element_size()
    return [tensor.data_ptr() + int(offset) for offset in offsets]


def test_adjacent_runs_become_one() -> None:
    memory = torch.arange(24.0)
    assert len(iovec([memory[:6], memory[6:12]])) == 1
    assert len(iovec([memory[6:12], memory[:6]])) == 2
    assert [view.nbytes for view in iovec([memory.view(4, 6)[:, :3]])] == [12] * 4


def test_repeated_memory_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="repeat memory"):
        iovec([torch.zeros(1).expand(4)])
    assert contiguous_runs((3, 0), (5, 1), 4).starts(8) == []


def test_other_devices_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="meta"):
        iovec([torch.zeros(2, device="meta")])


LAYOUT = BlockLayout(layers=2, kv_heads=3, head_dim=4, block_tokens=5, dtype="float32")


def test_block_format_is_layer_kv_head_token_dim() -> None:
    pairs = [(torch.randn(3, 17, 4), torch.randn(3, 17, 4)) for _ in range(2)]
    block = Staging(LAYOUT).host_block(sequence_block(pairs, 2, 5), 0)
    stored = torch.frombuffer(bytearray(b"".join(block.buffers)), dtype=torch.float32).view(2, 2, 3, 5, 4)
    for layer, pair in enumerate(pairs):
        for part, tensor in enumerate(pair):
            assert torch.equal(stored[layer, part], tensor[:, 10:15])
    assert block.copies == ()
    assert LAYOUT.block_bytes == 2 * 2 * 3 * 5 * 4 * 4
    assert LAYOUT.layer_bytes * 2 == LAYOUT.block_bytes
    assert LAYOUT.token_bytes * 5 == LAYOUT.block_bytes


@given(st.sampled_from(DTYPES), st.permutations([0, 1, 2]), st.integers(0, 1))
def test_staged_blocks_are_the_same_bytes(dtype: torch.dtype, order: list[int], slot: int) -> None:
    # Memory [head][dim][token] or the like with 1,100 tokens: more pieces than a system call takes, hence staged.
    layout = BlockLayout(layers=1, kv_heads=2, head_dim=3, block_tokens=1100, dtype=dtype_name(dtype))
    shape = [layout.piece_shape[dimension] for dimension in order]
    inverse = [order.index(dimension) for dimension in range(3)]
    pieces = [torch.randn(shape).to(dtype).permute(inverse)[:, :, :] for _ in range(2)]
    staging = Staging(layout, slots=2)
    block = staging.host_block(pieces, slot)
    block.gather()
    stored = b"".join(block.buffers)
    assert stored == b"".join(raw(piece) for piece in pieces)
    assert bool(block.copies) == (run_count(pieces) > 1024)

    targets = [torch.zeros(shape, dtype=dtype).permute(inverse) for _ in range(2)]
    block = staging.host_block(targets, slot)
    position = 0
    for view in block.buffers:
        view[:] = stored[position : position + len(view)]
        position += len(view)
    block.scatter()
    assert all(torch.equal(target, piece) for target, piece in zip(targets, pieces, strict=True))


def test_staged_blocks_are_limited_by_slots_and_direct_ones_are_not() -> None:
    direct = Staging(LAYOUT, slots=2)
    pairs = [(torch.randn(3, 50, 4), torch.randn(3, 50, 4)) for _ in range(2)]
    assert len(direct.host_blocks(sequence_block(pairs, index, 5) for index in range(10))) == 10

    layout = BlockLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=1100, dtype="float32")
    scattered = [(torch.randn(1, 2, 4400).transpose(1, 2), torch.randn(1, 2, 4400).transpose(1, 2))]
    staged = Staging(layout, slots=3)
    blocks = staged.host_blocks(sequence_block(scattered, index, 1100) for index in range(4))
    assert len(blocks) == 3
    for block in blocks:
        block.gather()
    for index, block in enumerate(blocks):  # slots do not overlap
        assert b"".join(block.buffers) == b"".join(raw(p) for p in sequence_block(scattered, index, 1100))


def test_pieces_must_fit_the_layout() -> None:
    staging = Staging(LAYOUT)
    good = [torch.zeros(3, 5, 4) for _ in range(4)]
    staging.host_block(good, 0)
    for bad in (good[:3], [torch.zeros(3, 5, 5)] * 4, [piece.double() for piece in good]):
        with pytest.raises(InvalidArgumentError, match="must be"):
            staging.host_block(bad, 0)
    with pytest.raises(InvalidArgumentError, match="slots"):
        Staging(LAYOUT, slots=0)


def test_fingerprints_differ_with_every_field() -> None:
    values = {"layers": 2, "kv_heads": 3, "head_dim": 4, "block_tokens": 5, "dtype": "float32"}
    changed = [{**values, name: 7} for name in ("layers", "kv_heads", "head_dim", "block_tokens")]
    changed.append({**values, "dtype": "bfloat16"})
    prints = {BlockLayout(**fields).fingerprint for fields in [values, *changed]}  # type: ignore[arg-type]
    assert len(prints) == 6
    assert LAYOUT.fingerprint == (
        "kvcm-block/1 layers=2 kv_heads=3 head_dim=4 block_tokens=5 dtype=float32 order=layer.kv.head.token.dim"
    )


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_tokens"])
def test_layouts_are_checked(field: str) -> None:
    values = {"layers": 1, "kv_heads": 1, "head_dim": 1, "block_tokens": 1, field: 0}
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0"):
        BlockLayout(**values, dtype="float32")
    with pytest.raises(InvalidArgumentError, match="int3"):
        BlockLayout(1, 1, 1, 1, "int3")
