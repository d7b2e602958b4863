"""Blocks whose only locations differ in nothing but the chunk, and how their writing ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from kvcm.model.locations import Location

__all__ = ["Alike", "Ending"]


class Alike(NamedTuple):
    """Blocks with one location each.

    Attributes:
        keys: of the blocks.
        location: what the locations have in common; its `chunk` is empty.
        chunks: of the locations, by block.
    """

    keys: Sequence[int]
    location: Location
    chunks: Sequence[bytes]


Ending: TypeAlias = Callable[[Alike], Alike | None]
"""From blocks that are being written to the same blocks serving, None where these do not end like that. It is pure;
where the blocks lie and what they take stays as it is."""
