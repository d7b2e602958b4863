"""Brings blocks of an engine's paged KV to contiguous stored blocks and back.

Three ways, from the cheapest on:

1. `block_memory`: the engine's own memory as pieces in the order of the stored bytes, for storages that take pieces.
2. `gather` and `scatter` on a CPU: strided copies, one per layer, or per layer and block.
3. The same on a GPU: one launch of a kernel per layer (and again for K and V that are tensors of their own, and for
   each of the engine's blocks in a stored one).

No way touches memory outside of the named blocks, layers and heads: ids are checked before anything is copied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from connectors.layout.engine_kv import EngineKv
from connectors.layout.rows import CopyRows, gather_rows_on, scatter_rows_on, widened
from connectors.layout.shard import Shard
from connectors.layout.stored import AXES
from connectors.layout.tensors import iovec, run_count
from kvcm.model.errors import InvalidArgumentError

__all__ = ["block_memory", "gather", "scatter"]

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
            paged, packed = widened(plane, of_layer.narrow(3, place * tokens, tokens))
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
