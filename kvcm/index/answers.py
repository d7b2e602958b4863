"""Answers: what a match returns for a block, encoded once and kept until the block or a storage changes.

One entry per key (design.md decision 14): for each spec the fastest available serving location, ties to the first,
specs joined, `type` of the first. Nearly every block has one location, whose own chunk is the answer: no second copy
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, decode_chunk, encode_chunk

__all__ = ["AnswerBook", "StorageView", "compose_answer", "filter_specs"]


class StorageView(Protocol):
    """Which storages can be read, and how fast each is."""

    @property
    def generation(self) -> int:
        """Grows with every change of any storage."""

    def rank(self, storage: str) -> int | None:
        """Return the speed rank of a storage (lower is faster), None while it is not available."""


def compose_answer(record: BlockRecord, view: StorageView) -> bytes | None:
    """Return the encoded answer for a block, None when nothing of it can be read (invariant 1)."""
    readable = [
        (rank, location)
        for location in record.locations
        if location.status is LocationStatus.SERVING and (rank := view.rank(location.storage)) is not None
    ]
    if not readable:
        return None
    if len(readable) == 1:
        return readable[0][1].chunk
    return _join([location for _, location in sorted(readable, key=lambda ranked: ranked[0])])


def _join(fastest_first: Sequence[Location]) -> bytes:
    specs: dict[str, SpecUri] = {}
    for location in fastest_first:
        for spec in decode_chunk(location.chunk).specs:
            specs.setdefault(spec.name, spec)
    return encode_chunk(fastest_first[0].storage_type, len(specs), specs.values())


def filter_specs(chunk: bytes, spec_names: frozenset[str]) -> bytes:
    """Return the answer with only the named specs; `spec_size` still counts all of the location's (wire.md 5.3)."""
    decoded = decode_chunk(chunk)
    kept = (spec for spec in decoded.specs if spec.name in spec_names)
    return encode_chunk(decoded.storage_type, decoded.spec_size, kept)


class AnswerBook:
    """Answers by key. A key that is absent is unknown, not a miss: ask the records."""

    def __init__(self, view: StorageView) -> None:
        self._view = view
        self._generation = view.generation
        self._answers: dict[int, bytes] = {}

    @property
    def view(self) -> StorageView:
        return self._view

    def lookup(self) -> Callable[[int], bytes | None]:
        """Return the function that finds a key's answer; valid until the caller next suspends."""
        if self._generation != self._view.generation:
            self._generation = self._view.generation
            self._answers.clear()
        return self._answers.get

    def note(self, key: int, record: BlockRecord | None) -> bytes | None:
        """Keep the answer for a record that is current right now, and return it."""
        answer = compose_answer(record, self._view) if record is not None else None
        if answer is None:
            self._answers.pop(key, None)
        else:
            self._answers[key] = answer
        return answer
