"""Names as parts of paths. Routes are matched with paths as they came, so that `%2F` in a name is no separator."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote_to_bytes

__all__ = ["decoded_name", "encoded_name"]


def decoded_name(value: Any) -> str:
    """Return the name that a path component stands for.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return unquote_to_bytes(str(value)).decode()
    except UnicodeDecodeError:
        raise ValueError("must be percent-encoded UTF-8") from None


def encoded_name(name: str) -> str:
    """Return a name as a path component; clients take `.` and `..` for steps, so those are encoded, too."""
    encoded = quote(name, safe="")
    return encoded.replace(".", "%2E") if encoded in {".", ".."} else encoded
