"""Block keys: signed 64-bit numbers, each depending on the whole prefix before its block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

__all__ = ["NO_MASK", "BlockKey", "BlockMask", "block_keys_from_tokens", "key_hex", "keys_hex"]

BlockKey = NewType("BlockKey", int)
_InstanceId = NewType("_InstanceId", str)
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


def block_keys_from_tokens(token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return the key of every full block of `token_ids`; the tail that fills no block is dropped.

    The running hash of wire.md 5.2: ``h ^= v + 0x9e3779b97f4a7c15 + (h << 12) + (h >> 32)`` per token, modulo 2^64,
    with an arithmetic right shift of the signed ``h``, never reset between blocks.

    Args:
        token_ids: tokens of the prompt from its start, any int64.
        block_size: tokens per block, > 0.
    """
    state = 0
    keys: list[int] = []
    append = keys.append
    for end in range(block_size, len(token_ids) + 1, block_size):
        for token in token_ids[end - block_size : end]:
            # `& _MASK` makes Python's unbounded numbers behave as 64-bit ones; `>>` needs the signed value.
            signed = state - (1 << 64) if state & _SIGN else state
            state = (state ^ (token + _GOLDEN_RATIO + (state << 12) + (signed >> 32))) & _MASK
        append(state - (1 << 64) if state & _SIGN else state)
    return keys


def keys_hex(keys: Sequence[int]) -> list[str]:
    """Return `key_hex` of many keys."""
    return [f"{key & _MASK:x}" for key in keys]


def key_hex(key: int) -> str:
    """Return the key as lower-case hex of its unsigned 64-bit value, as in object names (wire.md 8)."""
    return f"{key & _MASK:x}"


# Block masks: which positions of a request are left out (wire.md 5.1).


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Either the first `offset` positions, or those whose flag is true; at most one of the two is set.

    Attributes:
        offset: positions [0, offset) are masked; a negative one masks everything, as the original does.
        flags: position i is masked when `flags[i]`; positions past the end are not.
    """

    offset: int | None = None
    flags: Sequence[bool] | None = None

    @classmethod
    def of(cls, flags: Sequence[bool]) -> BlockMask:
        """Return the shortest mask that masks exactly where `flags` is true."""
        count = sum(flags)
        if all(flags[:count]):
            return cls(offset=count)
        return cls(flags=tuple(flags))

    def unmasked(self, count: int) -> Sequence[int]:
        """Return the positions below `count` that are not masked, ascending."""
        if self.offset is not None:
            return range(self.offset, count) if self.offset >= 0 else ()
        if self.flags is None:
            return range(count)
        known = len(self.flags)
        return [i for i in range(count) if i >= known or not self.flags[i]]


NO_MASK = BlockMask()
