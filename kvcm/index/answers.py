"""Answers: what a match returns for a block.

One entry per key (design.md decision 14): for each spec the fastest available serving location, ties to the first,
specs joined, `type` of the first. Nearly every block has one location, whose own chunk is the answer: no second copy
exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, decode_chunk, encode_chunk

__all__ = ["StorageView", "compose_answer", "filter_specs"]


class StorageView(Protocol):
    """Which storages can be read, and how fast each is."""

    @property
    def generation(self) -> int:
        """Grows with every change of any storage."""

    def rank(self, storage: str) -> int | None:
        """Return the speed rank of a storage (lower is faster), None while it is not available."""


def compose_answer(record: BlockRecord, view: StorageView) -> bytes | None:
    """Return the encoded answer for a block, None when nothing of it can be read (invariant 1)."""
    if len(record.locations) == 1:  # nearly always; on the hot path of a match that the search cache does not know
        (only,) = record.locations
        return only.chunk if only.status is LocationStatus.SERVING and view.rank(only.storage) is not None else None
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
