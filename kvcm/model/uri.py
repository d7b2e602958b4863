"""Location uris: ``<kind>://<storage><path>?<params sorted by name>`` (wire.md 8). Nothing in them is ever escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvcm.model.errors import InvalidArgumentError

__all__ = ["LocationUri"]

_NUMBER = re.compile("[0-9]{1,20}")


class LocationUri(NamedTuple):
    """Where one spec of one block lies.

    Attributes:
        scheme: kind of storage: `file`, `hf3fs`, `mooncake`, `pace`, `dummy`.
        storage: the storage's globally unique name.
        path: absolute path inside the scheme, `/` at least; `/<offset>` in a memory pool.
        size: bytes of this part.
        blkid: slot inside a packed file, None when the object holds one part only.
        key: object key of stores that have no paths, None elsewhere.
        node_id: node of a memory pool, None elsewhere.
        range_id: stamp of the allocation in a memory pool: it grows with every allocation of the same bytes. None
            elsewhere.
        location_id: location that a slot of a packed file was handed out to when it was not the first to have it; the
            first one's is in the path. So no two locations ever have the same uri.
    """

    scheme: str
    storage: str
    path: str
    size: int
    blkid: int | None = None
    key: str | None = None
    node_id: str | None = None
    range_id: int | None = None
    location_id: str | None = None

    @property
    def offset(self) -> int:
        """First byte of the part inside its object, or its memory pool."""
        if self.range_id is not None:
            return int(self.path[1:])
        return (self.blkid or 0) * self.size

    def __str__(self) -> str:
        blkid = "" if self.blkid is None else f"blkid={self.blkid}&"
        key = "" if self.key is None else f"key={self.key}&"
        location = "" if self.location_id is None else f"location={self.location_id}&"
        pool = "" if self.range_id is None else f"node_id={self.node_id}&range_id={self.range_id}&"
        return f"{self.scheme}://{self.storage}{self.path}?{blkid}{key}{location}{pool}size={self.size}"

    def below(self, names: Sequence[str], counts: Sequence[int] = ()) -> list[str]:
        """Return the texts of the uris of objects with these names below this path, of each object as many slots as its
        count; without counts each object as a whole. For uris that have no parameter but the size."""
        before, after = str(self).rsplit("?", 1)
        if not counts:
            return [f"{before}{name}?{after}" for name in names]
        pairs = zip(names, counts, strict=True)
        return [before + name + end for name, count in pairs for end in _of_slots(count, after)]

    @classmethod
    def parse(cls, text: str) -> LocationUri:
        """Read a uri as the manager prints it.

        Raises:
            InvalidArgumentError: naming what is missing or malformed.
        """
        scheme, separator, rest = text.partition("://")
        address, question, query = rest.rpartition("?")
        if not separator or not scheme or not question:
            raise InvalidArgumentError(f"uri {text!r} is not <kind>://<storage><path>?<params>")
        storage, slash, path = address.partition("/")
        if not storage or not slash:
            raise InvalidArgumentError(f"uri {text!r} names no storage or no path")
        params = dict(part.partition("=")[::2] for part in query.split("&"))
        blkid, range_id = params.get("blkid"), params.get("range_id")
        if range_id is not None:
            _number(text, "the path without its slash", path)
        return cls(
            scheme,
            storage,
            slash + path,
            size=_number(text, "size", params.get("size")),
            blkid=None if blkid is None else _number(text, "blkid", blkid),
            key=params.get("key"),
            node_id=params.get("node_id"),
            range_id=None if range_id is None else _number(text, "range_id", range_id),
            location_id=params.get("location"),
        )


@lru_cache(1024)
def _of_slots(count: int, params: str) -> tuple[str, ...]:
    """Return the ends of the texts of that many uris with these parameters, which differ in their slot."""
    return tuple([f"?blkid={slot}&{params}" for slot in range(count)])


def _number(uri: str, name: str, text: str | None) -> int:
    if text is None or not _NUMBER.fullmatch(text):
        raise InvalidArgumentError(f"uri {uri[:200]!r}: {name} must be a decimal number of at most 20 digits")
    return int(text)
