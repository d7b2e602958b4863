"""Brings blocks of an engine's paged KV to contiguous stored blocks and back.

Three ways, from the cheapest on:

1. `block_memory`: the engine's own memory as pieces in the order of the stored bytes, for storages that take pieces.
2. `gather` and `scatter` on a CPU: strided copies, one per layer, or per layer and block.
3. The same on a GPU: one launch of a kernel per layer (and again for K and V that are tensors of their own, and for
   each of the engine's blocks in a stored one).

No way touches memory outside of the named blocks, layers and heads: ids are checked before anything is copied.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Protocol

import numpy as np
import torch

from kvcm.connectors.layout.paged import PagedKv
from kvcm.connectors.layout.stored_format import AXES, Shard, StoredFormat
from kvcm.connectors.layout.tensors import dtype_name, iovec, run_count
from kvcm.model.errors import InvalidArgumentError

__all__ = [
    "CopyRows",
    "EngineKv",
    "block_memory",
    "gather",
    "gather_rows",
    "gather_rows_on",
    "scatter",
    "scatter_rows",
    "scatter_rows_on",
    "widen",
]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EngineKv:
    """The KV of one rank: views of the engine's memory, whose elements are whole numbers of the same size.

    Whole numbers, because KV is moved bit for bit, and not every type of KV can be indexed on every device.

    Args:
        stored: how blocks lie in storage.
        shard: the layers and heads of this rank.
        layers: for each layer of the shard in order, one tensor with all of it, or K and V. They may be views of one
            memory or of several, in any order, but each layer's has to be its own.
        axes: names of the tensors' dimensions, see `PagedKv.named`.
        block_tokens: tokens per block of the engine, needed when there is a `slot` axis. A stored block is one or more
            whole blocks of the engine; blocks of an engine that are larger than the stored ones are refused.

    Attributes:
        blocks: capacity of every tensor, in blocks.
        blocks_per_stored: blocks of the engine that make a stored block.
        kv_apart: whether K and V are tensors of their own.
        device: of all tensors.

    Raises:
        InvalidArgumentError: the tensors do not fit the format and the shard.
    """

    def __init__(
        self,
        stored: StoredFormat,
        shard: Shard,
        layers: Sequence[Sequence[torch.Tensor]],
        axes: Sequence[str],
        block_tokens: int | None = None,
    ) -> None:
        if not stored.model.contains(shard):
            raise InvalidArgumentError(f"shard is {shard.name}, must lie in {stored.model.name}")
        if len(layers) != shard.layers.size:
            raise InvalidArgumentError(f"layers has {len(layers)} entries, must be {shard.layers.size} as the shard")
        self.stored = stored
        self.shard = shard
        if not layers[0]:
            raise InvalidArgumentError("layers has a layer without tensors, must have one, or K and V")
        dtypes = {dtype_name(tensor.dtype) for tensors in layers for tensor in tensors}
        if dtypes != {stored.dtype}:
            raise InvalidArgumentError(f"layers are of {sorted(dtypes)}, must all be {stored.dtype}")
        self._planes = [[_view(tensor, axes, block_tokens) for tensor in tensors] for tensors in layers]
        for layer, planes in enumerate(self._planes, shard.layers.first):
            self._check(layer, planes)
        first = self._planes[0][0]
        self.blocks = int(first.shape[0])
        self.device = first.device
        self.blocks_per_stored = stored.block_tokens // int(first.shape[3])
        self.kv_apart = len(self._planes[0]) > 1

    def planes(self, shard: Shard) -> list[tuple[int, int, torch.Tensor]]:
        """Return the memory of a part of this rank's shard.

        Returns:
            Layer, counted from the first one of `shard`, first kv part, and the view [block, kv, head, token, dim].

        Raises:
            InvalidArgumentError: the rank does not have all of it.
        """
        if not self.shard.contains(shard):
            raise InvalidArgumentError(f"shard is {shard.name}, must lie in {self.shard.name}")
        first_head = shard.heads.first - self.shard.heads.first
        skipped = shard.layers.first - self.shard.layers.first
        return [
            (layer, part, plane.narrow(2, first_head, shard.heads.size))
            for layer, planes in enumerate(self._planes[skipped : skipped + shard.layers.size])
            for part, plane in enumerate(planes)
        ]

    def stored_view(self, memory: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Return stored blocks as [block, layer, kv, head, token, dim], without a copy.

        Args:
            memory: uint8, of shape [stored blocks, bytes of the shard]; rows may be apart.
            shard: that the rows hold.

        Raises:
            InvalidArgumentError: the memory has another shape, type or device, or its rows are not contiguous.
        """
        row_bytes = self.stored.shard_bytes(shard)
        if memory.dtype != torch.uint8 or memory.dim() != 2 or memory.shape[1] != row_bytes:
            raise InvalidArgumentError(
                f"memory is {tuple(memory.shape)} {memory.dtype}, must be rows of {row_bytes} bytes as torch.uint8"
            )
        element = self._planes[0][0].dtype
        apart = (memory.stride(0), int(memory.storage_offset()))
        if memory.stride(1) != 1 or any(number % element.itemsize for number in apart):
            raise InvalidArgumentError(
                f"memory has strides {memory.stride()} from byte {apart[1]}, must be contiguous rows"
                f" that begin at multiples of {element.itemsize}"
            )
        if memory.device != self.device:
            raise InvalidArgumentError(
                f"memory is on {memory.device}, must be on {self.device} as the engine's tensors"
            )
        shape = self.stored.shape(shard)
        rows = memory.view(element).view(len(memory), *shape.values())
        names = list(shape)
        return rows.permute(0, *(1 + names.index(axis) for axis in ("layer", "kv", "head", "token", "dim")))

    def _check(self, layer: int, planes: list[torch.Tensor]) -> None:
        stored = self.stored
        if len(planes) not in (1, stored.kv_parts) or len(planes) != len(self._planes[0]):
            raise InvalidArgumentError(
                f"layer {layer} has {len(planes)} tensors, must have 1, or {stored.kv_parts}, as all layers have"
            )
        first = self._planes[0][0]
        wanted = (
            first.shape[0],
            stored.kv_parts // len(planes),
            self.shard.heads.size,
            first.shape[3],
            stored.head_dim,
        )
        for plane in planes:
            if tuple(plane.shape) != wanted:
                raise InvalidArgumentError(
                    f"layer {layer} is {tuple(plane.shape)} as [block, kv, head, token, dim], must be {wanted}"
                )
            if plane.device != first.device:
                raise InvalidArgumentError(f"layer {layer} is on {plane.device}, must be on {first.device}")
            if stored.block_tokens % plane.shape[3]:
                raise InvalidArgumentError(
                    f"layer {layer} has blocks of {plane.shape[3]} tokens, must divide the {stored.block_tokens} stored"
                )


def _view(tensor: torch.Tensor, axes: Sequence[str], block_tokens: int | None) -> torch.Tensor:
    """Return the tensor's memory as [block, kv, head, token, dim]."""
    paged = PagedKv.named(axes, tensor.shape, tensor.stride(), dtype_name(tensor.dtype), block_tokens)
    numbers = tensor.detach().view(_INTEGERS[tensor.element_size()])
    return numbers.as_strided(paged.shape, paged.strides, int(numbers.storage_offset()))


# ---- copies between blocks of a paged tensor and stored blocks ----
#
# A block is a row here. `gather_rows` and `scatter_rows` of this file work on every device and are the reference;
# those of `kvcm.connectors.layout.rows_triton` have the same signature, move the same bits, and are used for GPUs
# where Triton is installed.

_FEW_VALUES = 64  # of a row; for more of them a turn of Python per row is quicker than indexing with all rows


class CopyRows(Protocol):
    """Copies between a tensor with all rows and a tensor with some of them."""

    def __call__(self, paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy.

        Args:
            paged: [block, kv, head, token, dim], any strides.
            rows: int64, which blocks of `paged`; each of them exists, and none is named twice in a scatter.
            packed: [row, kv, head, token, dim], any strides, same type and device.
        """


def gather_rows(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy rows of `paged` to `packed`, see `CopyRows`."""
    if _has_values(paged, packed):
        source, target = _dims_as_values(paged), _dims_as_values(packed)
        for place, row in enumerate(rows.tolist()):  # indexing with all of them would make a copy in between
            target[place] = source[row]
    else:
        torch.index_select(paged, 0, rows, out=packed)


def scatter_rows(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy `packed` to rows of `paged`, see `CopyRows`."""
    if _has_values(paged, packed):
        target, source = _dims_as_values(paged), _dims_as_values(packed)
        if math.prod(source.shape[1:]) < _FEW_VALUES:
            target[rows.numpy()] = source
        else:
            for place, row in enumerate(rows.tolist()):
                target[row] = source[place]
    else:
        paged.index_copy_(0, rows, packed)


def widen(paged: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors with as many neighbours of `dim` taken as one number as both layouts allow.

    Copying half as many numbers of twice the size takes about half the time.
    """
    item = paged.element_size()
    if paged.stride(-1) != 1 or packed.stride(-1) != 1:
        return paged, packed
    numbers = [int(paged.shape[-1])]
    for tensor in (paged, packed):
        numbers += [*tensor.stride()[:-1], int(tensor.storage_offset()), tensor.data_ptr() // item]
    number = _INTEGERS[item * math.gcd(8 // item, *numbers)]
    return paged.view(number), packed.view(number)


def gather_rows_on(device: torch.device) -> CopyRows:
    """Return the fastest gather for a device."""
    if not _has_kernels(device):
        return gather_rows
    from kvcm.connectors.layout import rows_triton

    return rows_triton.gather_rows


def scatter_rows_on(device: torch.device) -> CopyRows:
    """Return the fastest scatter for a device."""
    if not _has_kernels(device):
        return scatter_rows
    from kvcm.connectors.layout import rows_triton

    return rows_triton.scatter_rows


def _has_values(paged: torch.Tensor, packed: torch.Tensor) -> bool:
    """Return whether numpy can take every `dim` as one value; torch goes number by number, and is half as fast."""
    return paged.device.type == "cpu" and paged.stride(-1) == packed.stride(-1) == 1


def _dims_as_values(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return the same memory as [..., 1 value of all bytes of `dim`], without the last axis."""
    numbers = tensor.numpy()
    return numbers.view(f"V{tensor.shape[-1] * tensor.element_size()}")[..., 0]


def _has_kernels(device: torch.device) -> bool:
    """Return whether Triton is there and can reach the device: a GPU, or any when it interprets."""
    reachable = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return reachable and importlib.util.find_spec("triton") is not None


_MAX_PIECES: int = os.sysconf("SC_IOV_MAX")


def gather(engine: EngineKv, block_ids: Sequence[int], shard: Shard, out: torch.Tensor) -> None:
    """Copy blocks of the engine to stored blocks.

    Args:
        engine: to copy from.
        block_ids: of the engine, `engine.blocks_per_stored` for each stored block, in order.
        shard: which layers and heads.
        out: uint8, [stored blocks, bytes of the shard], on the engine's device; rows may be apart.

    Raises:
        InvalidArgumentError: a block does not exist, or shapes do not fit; nothing was copied.
    """
    _copy(gather_rows_on(engine.device), engine, block_ids, shard, out)


def scatter(engine: EngineKv, block_ids: Sequence[int], shard: Shard, stored: torch.Tensor) -> None:
    """Copy stored blocks to blocks of the engine.

    Args:
        engine: to copy to.
        block_ids: of the engine, `engine.blocks_per_stored` for each stored block, in order; none twice.
        shard: which layers and heads.
        stored: uint8, [stored blocks, bytes of the shard], on the engine's device; rows may be apart.

    Raises:
        InvalidArgumentError: a block does not exist or is named twice, or shapes do not fit; nothing was copied.
    """
    if len(set(block_ids)) != len(block_ids):
        raise InvalidArgumentError(f"block_ids has {len(block_ids)} ids, must name each block once")
    _copy(scatter_rows_on(engine.device), engine, block_ids, shard, stored)


def block_memory(engine: EngineKv, block_ids: Sequence[int], shard: Shard) -> list[memoryview] | None:
    """Return the engine's own memory of one stored block, in the order of the stored bytes.

    Args:
        engine: whose memory.
        block_ids: of the engine, those that make the stored block.
        shard: which layers and heads.

    Returns:
        As few pieces as there are; None when the memory is on another device or in more pieces than one system call
        takes: then gather and scatter.

    Raises:
        InvalidArgumentError: a block does not exist.
    """
    _check_ids(engine, block_ids, stored_blocks=1)
    if engine.device.type != "cpu":
        return None
    enumerated = _enumerated_axes(engine)
    sizes = _sizes(engine, shard)
    if math.prod(sizes[axis] for axis in enumerated) > _MAX_PIECES:
        return None
    pieces = list(_pieces(engine, block_ids, shard, enumerated))
    return iovec(pieces) if run_count(pieces) <= _MAX_PIECES else None


def _copy(copy: CopyRows, engine: EngineKv, block_ids: Sequence[int], shard: Shard, memory: torch.Tensor) -> None:
    _check_ids(engine, block_ids, stored_blocks=len(memory))
    if not block_ids:
        return  # memory of no rows has strides that say nothing
    view = engine.stored_view(memory, shard)
    ids = torch.tensor(block_ids, dtype=torch.int64).view(len(memory), engine.blocks_per_stored).to(engine.device)
    by_place = ids.t().contiguous().unbind()  # first the first engine block of each stored block, then the second, ...
    for layer, part, plane in engine.planes(shard):
        tokens, parts = plane.shape[3], plane.shape[1]
        of_layer = view[:, layer].narrow(1, part, parts)
        for place, rows in enumerate(by_place):
            paged, packed = widen(plane, of_layer.narrow(3, place * tokens, tokens))
            copy(paged, rows, packed)


def _check_ids(engine: EngineKv, block_ids: Sequence[int], stored_blocks: int) -> None:
    wanted = stored_blocks * engine.blocks_per_stored
    if len(block_ids) != wanted:
        raise InvalidArgumentError(
            f"block_ids has {len(block_ids)} ids, must have {wanted}: {engine.blocks_per_stored} per stored block"
        )
    for block in block_ids:
        if not 0 <= block < engine.blocks:
            raise InvalidArgumentError(f"block_ids has {block}, must be 0 to {engine.blocks - 1}")


def _axes(engine: EngineKv) -> list[str]:
    """Return the axes of a stored block, with `place` before `token`: which of the engine's blocks."""
    return [part for axis in engine.stored.axes for part in (("place", "token") if axis == "token" else (axis,))]


def _sizes(engine: EngineKv, shard: Shard) -> dict[str, int]:
    places = engine.blocks_per_stored
    shape = engine.stored.shape(shard)
    return {**shape, "place": places, "token": shape["token"] // places}


def _enumerated_axes(engine: EngineKv) -> list[str]:
    """Return the outer axes that no single stride describes: up to the last one along which memory may jump."""
    jumps = {"layer"}
    if engine.kv_apart:
        jumps.add("kv")
    if engine.blocks_per_stored > 1:
        jumps.add("place")
    axes = _axes(engine)
    return axes[: max(axes.index(axis) for axis in jumps) + 1]


def _pieces(
    engine: EngineKv, block_ids: Sequence[int], shard: Shard, enumerated: Sequence[str]
) -> Iterator[torch.Tensor]:
    """Yield strided pieces of memory whose elements, one after the other, are the stored block."""
    planes = {(layer, part): plane for layer, part, plane in engine.planes(shard)}
    order = [AXES.index(axis) - 1 for axis in engine.stored.axes if axis != "layer"]
    sizes = _sizes(engine, shard)
    for index in product(*(range(sizes[axis]) for axis in enumerated)):
        at = dict(zip(enumerated, index, strict=True))
        part = at.pop("kv", 0) if engine.kv_apart else 0
        piece = planes[at.pop("layer"), part][block_ids[at.pop("place", 0)]]
        for axis, number in at.items():
            piece = piece.narrow(AXES.index(axis) - 1, number, 1)
        yield piece.permute(order)
