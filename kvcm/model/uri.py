"""Location uris: ``<kind>://<storage><path>?<params sorted by name>`` (wire.md 8). Nothing in them is ever escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote

from kvcm.model.errors import InvalidArgumentError

__all__ = ["LocationUri", "check_name", "check_storage_name", "path_component"]

# Names that users choose, and what they become in paths (design.md decision 12).

_MAX_NAME_BYTES = 256
_MAX_COMPONENT_BYTES = 200
_STORAGE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(field: str, name: str) -> None:
    """Refuse a name of an instance, group or spec that is not 1 to 256 bytes of UTF-8 without control characters.

    Raises:
        InvalidArgumentError: naming the field and the error.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{field} is not valid UTF-8") from error
    if not 1 <= length <= _MAX_NAME_BYTES:
        raise InvalidArgumentError(f"{field} has {length} bytes of UTF-8, allowed are 1 to {_MAX_NAME_BYTES}")
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise InvalidArgumentError(f"{field} {name!r} holds control characters")


def check_storage_name(field: str, name: str) -> None:
    """Refuse a storage name that cannot be the host of a uri.

    Raises:
        InvalidArgumentError: naming the field and the allowed values.
    """
    if not _STORAGE_NAME.fullmatch(name):
        raise InvalidArgumentError(f"{field} {name!r} is not 1 to 128 characters of A-Z a-z 0-9 . _ -")


@lru_cache(maxsize=4096)
def path_component(name: str) -> str:
    """Return the literal name of `name` on disk and in object stores; it is never decoded.

    Percent-encoded; `.` and `..` too, so that a component never leaves its directory; over 200 bytes it is cut and ends
    in `~` and 16 hex digits of a hash, so that distinct names stay distinct. A `~` of the name itself is encoded, so no
    name is equal to the cut form of another.
    """
    encoded = quote(name, safe="").replace("~", "%7E")
    if encoded in {".", ".."}:
        encoded = encoded.replace(".", "%2E")
    if len(encoded) <= _MAX_COMPONENT_BYTES:
        return encoded
    return f"{encoded[: _MAX_COMPONENT_BYTES - 17]}~{sha256(name.encode()).hexdigest()[:16]}"


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
            InvalidArgumentError: naming the missing or malformed field.
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
