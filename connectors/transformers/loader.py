"""Loads the parts of a row's prefix into its cache, as far as there is a prefix that can be gone on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from connectors.layout.staging import Staging
from connectors.layout.tensors import iovec
from connectors.results import Location
from connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from connectors.transfer.mover import moved
from connectors.transformers.batch import BlockMemory
from connectors.transformers.parts import STATE, ModelParts, PartOfBlock
from connectors.transformers.states import empty_state

__all__ = ["LoadedPrefix", "PrefixLoad"]


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """What became of a load.

    Attributes:
        blocks: leading blocks that can be gone on from: everything that is needed for it is there.
        state: at the end of the last of them, as stored bytes; None when the model has none.
        bytes_loaded: bytes read, also of parts that cannot be used.
        lost: parts whose bytes are gone although their storage is there.
        corrupt: parts whose bytes are not those that were saved.
        refused: the engine does not know a storage or refuses an address.
        is_tainted: memory behind the leading blocks may still change and must not be used again.
        reason: why not all blocks were loaded, "" when they were.
    """

    blocks: int = 0
    state: torch.Tensor | None = None
    bytes_loaded: int = 0
    lost: tuple[PartOfBlock, ...] = ()
    corrupt: tuple[PartOfBlock, ...] = ()
    refused: bool = False
    is_tainted: bool = False
    reason: str = ""


class PrefixLoad:
    """Loads one prefix. What fails makes the prefix shorter, and then perhaps other parts are needed.

    Args:
        engine: moves the bytes.
        staging: per name of a part, for layers whose memory cannot be given to a storage.
        parts: of a block.
        memory: of the row.
        locations: of the blocks, in order; None where nothing is known.
        present_blocks: leading blocks whose KV is in memory already.
        checksums: whether parts must have the checksums that their locations tell.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        engine: TransferEngine,
        staging: Mapping[str, Staging],
        parts: ModelParts,
        memory: BlockMemory,
        locations: Sequence[Location | None],
        *,
        present_blocks: int = 0,
        checksums: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._staging = staging
        self._parts = parts
        self._memory = memory
        self._locations = locations
        self._checksums = checksums
        self._clock = clock
        self._results: dict[PartOfBlock, TransferResult] = {
            (part.name, block): moved(0) for part in parts.kv for block in range(present_blocks)
        }
        self._state: torch.Tensor | None = None

    def run(self, deadline_seconds: float) -> LoadedPrefix:
        """Load what the longest prefix needs, and return what is there at the end."""
        deadline = self._clock() + deadline_seconds
        while True:
            blocks = self._parts.usable_blocks(self._may_be_used, len(self._locations))
            missing = [part for part in self._parts.needed(blocks) if part not in self._results]
            if not missing:
                break
            for name in dict.fromkeys(name for name, _ in missing):
                self._load(name, [block for part, block in missing if part == name], deadline)
        return self._summary(blocks)

    def _may_be_used(self, name: str, block: int) -> bool:
        location, result = self._locations[block], self._results.get((name, block))
        return location is not None and name in location.uris and (result is None or result.ok)

    def _load(self, name: str, blocks: Sequence[int], deadline: float) -> None:
        """Load a part of some blocks, until one fails."""
        if name == STATE:
            self._load_state(blocks[0], deadline)
            return
        staging, done = self._staging[name], 0
        while done < len(blocks):
            hosts = staging.host_blocks(self._memory.pieces(name, block) for block in blocks[done:])
            batch = blocks[done : done + len(hosts)]
            items = [self._item(name, block, host.buffers) for block, host in zip(batch, hosts, strict=True)]
            results = self._move(name, batch, items, deadline)
            for host, result in zip(hosts, results, strict=True):
                if result.ok:
                    host.scatter()
            if any(result.failure is Failure.PENDING for result in results):
                staging.discard()
            if not all(result.ok for result in results):
                return
            done += len(hosts)

    def _load_state(self, block: int, deadline: float) -> None:
        assert self._parts.state is not None
        memory = empty_state(self._parts.state)
        item = self._item(STATE, block, iovec([memory]))
        (result,) = self._move(STATE, [block], [item], deadline)
        self._state = memory if result.ok else None

    def _item(self, name: str, block: int, buffers: Sequence[memoryview]) -> TransferItem:
        location = self._locations[block]
        assert location is not None  # `_may_be_used` has seen it
        checksum = location.checksums.get(name, 0) if self._checksums else 0
        return TransferItem(location.uris[name], buffers, checksum=checksum)

    def _move(
        self, name: str, blocks: Sequence[int], items: Sequence[TransferItem], deadline: float
    ) -> list[TransferResult]:
        results = self._engine.load(items, deadline - self._clock())
        self._results.update({(name, block): result for block, result in zip(blocks, results, strict=True)})
        return results

    def _summary(self, blocks: int) -> LoadedPrefix:
        failed = {part: result for part, result in self._results.items() if not result.ok}
        by_block = sorted(failed, key=lambda part: part[1])
        kinds = {result.failure for result in failed.values()}
        is_tainted = any(result.failure is Failure.PENDING for (name, _), result in failed.items() if name != STATE)
        return LoadedPrefix(
            blocks=blocks,
            state=self._state if blocks else None,
            bytes_loaded=sum(result.moved_bytes for result in self._results.values()),
            lost=tuple(part for part in by_block if failed[part].failure is Failure.LOST),
            corrupt=tuple(part for part in by_block if failed[part].failure is Failure.CORRUPT),
            refused=Failure.REFUSED in kinds,
            is_tainted=is_tainted,
            reason=_reason(by_block[0], failed[by_block[0]]) if failed else "",
        )


def _reason(part: PartOfBlock, result: TransferResult) -> str:
    name, block = part
    return f"block {block}: {f'{name}: ' if name == STATE else ''}{result.reason}"
