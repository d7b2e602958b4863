"""What it takes to delete one location for good."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DeletionItem"]


class DeletionItem(NamedTuple):
    """A location in status deleting, whose bytes and then metadata have to go.

    Attributes:
        instance_id: owner of the block.
        key: the block.
        location_id: the location within the block.
        storage: name of the storage that holds the bytes.
        uris: one per spec.
    """

    instance_id: str
    key: int
    location_id: str
    storage: str
    uris: tuple[str, ...]
