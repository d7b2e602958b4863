"""The bytes of stored parts: the tests on real engines read and change them in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcm.model.uri import LocationUri


def read_part(uri: LocationUri) -> bytes:
    """Return the bytes of a part."""
    return Path(uri.path).read_bytes()[uri.offset : uri.offset + uri.size]


def overwrite(uri: LocationUri, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a part where they lie."""
    changed = change(read_part(uri))
    assert len(changed) == uri.size
    with Path(uri.path).open("r+b") as file:
        file.seek(uri.offset)
        file.write(changed)


def swapped_halves(stored: bytes) -> bytes:
    """Return a part with its halves exchanged: its later layers have the KV of the earlier ones."""
    return stored[len(stored) // 2 :] + stored[: len(stored) // 2]
