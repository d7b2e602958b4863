"""Loads matched blocks into the layers of a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from connectors.layout.sequence import sequence_block
from connectors.layout.staging import Staging
from connectors.results import Location
from connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult

__all__ = ["LoadedPrefix", "load_prefix"]


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """What became of a load.

    Attributes:
        blocks: leading blocks that are completely there; only these may be used.
        bytes_loaded: bytes read, also of blocks that cannot be used.
        lost: indices of blocks whose bytes are gone although their storage is there.
        corrupt: indices of blocks whose bytes are not those that were saved.
        refused: the engine does not know a storage or refuses an address.
        is_tainted: memory behind the leading blocks may still change and must not be used again.
        reason: why not all blocks were loaded, "" when they were.
    """

    blocks: int = 0
    bytes_loaded: int = 0
    lost: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    refused: bool = False
    is_tainted: bool = False
    reason: str = ""


def load_prefix(
    engine: TransferEngine,
    staging: Staging,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    locations: Sequence[Location],
    spec: str,
    deadline_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    *,
    checksums: bool = True,
) -> LoadedPrefix:
    """Load blocks 0, 1, 2... into the layers.

    Args:
        engine: moves the bytes.
        staging: for layers whose memory cannot be given to a storage.
        layers: K and V of each layer, each `[kv_head, token, head_dim]`.
        locations: of the blocks, in order.
        spec: name of the part to load.
        deadline_seconds: for everything.
        clock: seconds of a clock that never runs backwards.
        checksums: whether blocks must have the checksums that their locations tell.
    """
    deadline = clock() + deadline_seconds
    results: list[TransferResult] = []
    while len(results) < len(locations) and all(result.ok for result in results):
        left = range(len(results), len(locations))
        blocks = staging.host_blocks(sequence_block(layers, index, staging.layout.block_tokens) for index in left)
        items = [
            TransferItem(
                locations[index].uris[spec],
                block.buffers,
                checksum=locations[index].checksums.get(spec, 0) if checksums else 0,
            )
            for index, block in zip(left, blocks, strict=False)
        ]
        moved = engine.load(items, deadline - clock())
        for block, result in zip(blocks, moved, strict=True):
            if result.ok:
                block.scatter()
        results += moved
    prefix = _summary(results)
    if prefix.is_tainted:
        staging.discard()
    return prefix


def _summary(results: Sequence[TransferResult]) -> LoadedPrefix:
    failed = [index for index, result in enumerate(results) if not result.ok]
    kinds = {result.failure for result in results}
    lost, corrupt = (
        tuple(index for index in failed if results[index].failure is kind) for kind in (Failure.LOST, Failure.CORRUPT)
    )
    return LoadedPrefix(
        blocks=failed[0] if failed else len(results),
        bytes_loaded=sum(result.moved_bytes for result in results),
        lost=lost,
        corrupt=corrupt,
        refused=Failure.REFUSED in kinds,
        is_tainted=Failure.PENDING in kinds,
        reason=f"block {failed[0]}: {results[failed[0]].reason}" if failed else "",
    )
