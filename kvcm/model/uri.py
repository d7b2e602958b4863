"""Location uris: ``<kind>://<storage><path>?<params sorted by name>`` (wire.md 8). Nothing in them is ever escaped."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvcm.model.errors import InvalidArgumentError

__all__ = ["LocationUri"]

_NUMBER = re.compile("[0-9]{1,20}")


class LocationUri(NamedTuple):
    """Where one spec of one block lies.

    Attributes:
        scheme: kind of storage: `file`, `hf3fs`, `mooncake`, `pace`, `dummy`.
        storage: the storage's globally unique name.
        path: absolute path inside the scheme, `/` at least.
        size: bytes of this part.
        blkid: slot inside a packed file, None when the object holds one part only.
        key: object key of stores that have no paths, None elsewhere.
    """

    scheme: str
    storage: str
    path: str
    size: int
    blkid: int | None = None
    key: str | None = None

    @property
    def offset(self) -> int:
        """First byte of the part inside its object."""
        return (self.blkid or 0) * self.size

    def __str__(self) -> str:
        blkid = "" if self.blkid is None else f"blkid={self.blkid}&"
        key = "" if self.key is None else f"key={self.key}&"
        return f"{self.scheme}://{self.storage}{self.path}?{blkid}{key}size={self.size}"

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
        blkid = params.get("blkid")
        return cls(
            scheme,
            storage,
            slash + path,
            size=_number(text, "size", params.get("size")),
            blkid=None if blkid is None else _number(text, "blkid", blkid),
            key=params.get("key"),
        )


def _number(uri: str, name: str, text: str | None) -> int:
    if text is None or not _NUMBER.fullmatch(text):
        raise InvalidArgumentError(f"uri {uri[:200]!r}: {name} must be a decimal number of at most 20 digits")
    return int(text)
