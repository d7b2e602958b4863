"""What it takes to delete one location for good."""

from __future__ import annotations

from typing import NamedTuple

from kvcm.model.locations import Location, uris_of

__all__ = ["DeletionItem"]


class DeletionItem(NamedTuple):
    """A location whose bytes and then metadata have to go.

    Attributes:
        instance_id: owner of the block.
        uid: number of that instance's registration.
        key: the block.
        location_id: the location within the block.
        storage: name of the storage that holds the bytes.
        uris: one per spec.
        session_id: write session that may still be writing the bytes, "" when it said that it is done.
        size_bytes: bytes of all of it.
    """

    instance_id: str
    uid: int
    key: int
    location_id: str
    storage: str
    uris: tuple[str, ...]
    session_id: str = ""
    size_bytes: int = 0

    @classmethod
    def of(cls, instance_id: str, uid: int, key: int, location: Location) -> DeletionItem:
        """Return the item for a location of a block."""
        uris = tuple(uris_of(location.chunk))
        return cls(instance_id, uid, key, location.id, location.storage, uris, location.session_id, location.size_bytes)
