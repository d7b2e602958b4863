"""Names and keys that stand for others: equal for equal ones, and nobody without the salt can tell for which."""

from __future__ import annotations

import hashlib
import secrets

from kvcm.optimizer.errors import OptionError

__all__ = ["Pseudonyms"]

_LEAST_SALT_BYTES = 16
_MOST_SALT_BYTES = 64  # what the hash takes as its key


class Pseudonyms:
    """Keyed hashes (BLAKE2b); those of keys, sessions, instances and specs have nothing to do with each other.

    Args:
        salt: 16 to 64 secret bytes: files made with the same one have the same pseudonyms. None: drawn now and
            forgotten.

    Raises:
        OptionError: the salt is too short or too long.
    """

    def __init__(self, salt: bytes | None = None) -> None:
        if salt is not None and not _LEAST_SALT_BYTES <= len(salt) <= _MOST_SALT_BYTES:
            raise OptionError(f"salt: has {len(salt)} bytes; allowed: {_LEAST_SALT_BYTES} to {_MOST_SALT_BYTES}")
        self._salt = secrets.token_bytes(_MOST_SALT_BYTES) if salt is None else salt
        self._keys: dict[int, int] = {}

    def keys(self, keys: list[int]) -> list[int]:
        """Return what stands for block keys, signed 64-bit ones: positive numbers of 63 bits."""
        known = self._keys
        for key in keys:
            if key not in known:
                known[key] = self._number("key", f"{key}")
        return [known[key] for key in keys]

    def session(self, session: int | str) -> int | str:
        """Return what stands for a session: a number for a number, a text for a text."""
        if isinstance(session, int):
            return self._number("number", f"{session}") >> 10  # what a double holds, as readers of JSON may use
        return self.text("session", session)

    def text(self, kind: str, text: str) -> str:
        """Return what stands for a text of this kind: 32 hexadecimal digits."""
        return self._hash(kind, text, 16).hex()

    def _number(self, kind: str, text: str) -> int:
        return int.from_bytes(self._hash(kind, text, 8), "little") >> 1

    def _hash(self, kind: str, text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=size, key=self._salt, person=kind.encode()).digest()
