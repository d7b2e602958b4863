"""Loads layer by layer: attention waits for the KV of its own layer alone, and computes while the next one arrives.

The checksum of a part is that of all its bytes, and a part has its layers one behind the other. So it is taken on the
way, and a mismatch is found after the last layer: before the step ends, which is early enough, since vLLM drops a
step's tokens of requests whose blocks have failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from xxhash import xxh3_64

from kvcm.connectors.layout.stored_format import ByteRange
from kvcm.connectors.reuse.loads import Bytes, Deliver, PartToLoad
from kvcm.connectors.transfer import Failure, TransferResult
from kvcm.connectors.transfer.mover import moved, not_moved

__all__ = ["LayerMemory", "LayerProgress", "LoadPieces", "load_layers"]

LoadPieces = Callable[[Sequence[PartToLoad], int, Deliver], list[TransferResult]]
"""Loads pieces of parts, all of so many bytes, as `load_parts` does."""


class LayerMemory(Protocol):
    """Where layers go, see `GroupMemory`."""

    @property
    def layers(self) -> int:
        """Number of layers in a part."""

    @property
    def part_bytes(self) -> int:
        """Bytes of a part."""

    def layer_range(self, layer: int) -> ByteRange:
        """Return where the bytes of a layer lie in a part."""

    def put(self, block_ids: Sequence[int], rows: Bytes, layer: int | None = None) -> None:
        """Bring stored bytes of a layer, [block, byte], into blocks."""


class LayerProgress:
    """How far the loads of a step are; safe to use from several threads.

    Args:
        layer_names: in the order in which they are loaded.
        jobs: loads of the step.
    """

    def __init__(self, layer_names: Sequence[str], jobs: int) -> None:
        self._layers = {name: layer for layer, name in enumerate(layer_names)}
        self._changed = threading.Condition()
        self._done = [0] * jobs  # layers of each job

    def advance(self, job: int, layers: int) -> None:
        """Record that the first layers of a job have loaded or failed."""
        with self._changed:
            self._done[job] = layers
            self._changed.notify_all()

    def finish(self, job: int, _load: Future[None]) -> None:
        """Record that a job has ended, with or without an error."""
        self.advance(job, len(self._layers))

    def wait(self, layer_name: str) -> None:
        """Wait until a layer's KV is there, or never will be. Every job ends by its deadline, and so does this."""
        layer = self._layers.get(layer_name)
        if layer is not None:
            with self._changed:
                self._changed.wait_for(lambda: min(self._done) > layer)


def load_layers(
    memory: LayerMemory,
    block_ids: Sequence[int],
    parts: Sequence[PartToLoad],
    load: LoadPieces,
    on_layers: Callable[[int], None],
) -> list[TransferResult]:
    """Load parts of blocks, the first layer of all of them first.

    Args:
        memory: where they go.
        block_ids: of the engine, one per part.
        parts: whole ones, with their checksums.
        load: loads pieces of them.
        on_layers: called after each layer with the number of layers done.

    Returns:
        One result per part, in order.
    """
    results = [_expected(part, memory.part_bytes) for part in parts]
    digests = [xxh3_64() for _ in parts]
    for layer in range(memory.layers):
        start, size_bytes = memory.layer_range(layer)
        left = [number for number, result in enumerate(results) if result.ok]

        def deliver(rows: Bytes, places: Sequence[int], layer: int = layer, left: Sequence[int] = left) -> None:
            numbers = [left[place] for place in places]
            memory.put([block_ids[number] for number in numbers], rows, layer)
            for number, row in zip(numbers, rows, strict=True):
                if parts[number].checksum:
                    digests[number].update(row)

        pieces = [parts[number]._replace(start=start, checksum=0) for number in left]
        for number, result in zip(left, load(pieces, size_bytes, deliver), strict=True):
            if not result.ok:
                results[number] = result
        on_layers(layer + 1)
    found = [digest.intdigest() or 1 for digest in digests]
    return [
        not_moved(Failure.CORRUPT, "the bytes have another checksum than what was saved", memory.part_bytes)
        if result.ok and part.checksum and part.checksum != digest
        else result
        for part, digest, result in zip(parts, found, results, strict=True)
    ]


def _expected(part: PartToLoad, part_bytes: int) -> TransferResult:
    """Return the result of a part whose pieces all arrive. Pieces of a part of the wrong size might arrive, too."""
    if part.uri.size == part_bytes:
        return moved(part_bytes)
    return not_moved(Failure.REFUSED, f"the part has {part.uri.size} bytes, must have {part_bytes}")
