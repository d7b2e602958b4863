"""Block keys from SGLang's page hashes.

A page hash is a SHA-256 over the hash of the page before it and the page's tokens, as 64 hexadecimal digits; it also
covers the request's cache salt, adapter and images. Its first 64 bits, exclusive-or a number of the namespace, are the
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from kvcm.model.keys import BlockKey

__all__ = ["PageKeys"]

_DIGITS = 16
_SIGN = 1 << 63


class PageKeys:
    """Makes block keys.

    Args:
        namespace: everything besides the tokens that KV depends on, in any fixed form.
    """

    def __init__(self, namespace: bytes) -> None:
        self._mask = int.from_bytes(blake2b(namespace, digest_size=8).digest(), "big")

    def keys(self, page_hashes: Sequence[str]) -> list[BlockKey]:
        """Return the key of every page.

        Args:
            page_hashes: of SGLang, hexadecimal.

        Raises:
            ValueError: a hash is none.
        """
        mask = self._mask
        # Flipping the sign bit and subtracting it reads 64 bits as a signed number.
        return [BlockKey(((int(text[:_DIGITS], 16) ^ mask) ^ _SIGN) - _SIGN) for text in page_hashes]
