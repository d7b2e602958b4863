"""The paged KV of one rank, as tensors in one form whatever the engine's own form is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from connectors.layout.paged import PagedKv
from connectors.layout.shard import Shard
from connectors.layout.stored import StoredFormat
from connectors.layout.tensors import dtype_name
from kvcm.model.errors import InvalidArgumentError

__all__ = ["EngineKv"]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        blocks: of the engine, that every tensor has room for.
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
    numbers = tensor.detach().view(_SAME_SIZE[tensor.element_size()])
    return numbers.as_strided(paged.shape, paged.strides, int(numbers.storage_offset()))
