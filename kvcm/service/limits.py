"""Sizes of requests that are refused before any work."""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.model.errors import InvalidArgumentError

__all__ = ["RequestLimits"]


@dataclass(slots=True)
class RequestLimits:
    """Most keys and tokens of one request, most bytes of one body. Every call looks at the same object, whose first two
    change when settings are read anew."""

    max_keys: int = 65536
    max_tokens: int = 1 << 20
    max_body_bytes: int = 64 << 20

    def check(self, key_count: int, token_count: int) -> None:
        """Refuse a request that is too large.

        Raises:
            InvalidArgumentError: naming the field, its size and the limit.
        """
        if key_count > self.max_keys:
            raise InvalidArgumentError(f"block_keys has {key_count} entries, at most {self.max_keys} are allowed")
        if token_count > self.max_tokens:
            raise InvalidArgumentError(f"token_ids has {token_count} entries, at most {self.max_tokens} are allowed")
