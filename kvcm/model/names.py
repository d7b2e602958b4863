"""Names that users choose, and what they become in paths (design.md decision 12)."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from hashlib import sha256
from urllib.parse import quote

from kvcm.model.errors import InvalidArgumentError

__all__ = ["check_name", "check_storage_name", "path_component"]

_MAX_NAME_BYTES = 256
_MAX_COMPONENT_BYTES = 200
_STORAGE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(field: str, name: str) -> None:
    """Refuse a name of an instance, group or spec that is not 1 to 256 bytes of UTF-8 without control characters.

    Raises:
        InvalidArgumentError: naming the field and what is wrong with it.
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
        InvalidArgumentError: naming the field and what is allowed.
    """
    if not _STORAGE_NAME.fullmatch(name):
        raise InvalidArgumentError(f"{field} {name!r} is not 1 to 128 characters of A-Z a-z 0-9 . _ -")


@lru_cache(maxsize=4096)
def path_component(name: str) -> str:
    """Return the literal name of `name` on disk and in object stores; nobody decodes it.

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
