"""Block keys: signed 64-bit numbers, each depending on the whole prefix before its block.

Clients choose these numbers, and Python's dictionaries place a number by its value: keys can be chosen that make every
look-up walk through a whole table. So everything between the calls and the stores works on *mixed* keys: a bijection
of 64-bit numbers with secrets of this process, as Python itself hashes texts. `mixed` is applied where a key enters
(a request, a stored row or document, the name of an object) and `unmixed` where it leaves; no mixed key leaves the
process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import Final, NewType

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_MASK",
    "BlockKey",
    "BlockMask",
    "block_keys_from_tokens",
    "cut_keys",
    "encode_keys",
    "join_keys",
    "key_hex",
    "keys_hex",
    "mixed",
    "mixed_array",
    "mixed_key",
    "pack_keys",
    "split_keys",
    "unmixed",
    "unmixed_array",
    "unmixed_key",
    "unpack_keys",
]

BlockKey = NewType("BlockKey", int)
_InstanceId = NewType("_InstanceId", str)
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


def block_keys_from_tokens(token_ids: Sequence[int], block_size: int, previous: int = 0) -> list[int]:
    """Return the key of every full block of `token_ids`; the tail that fills no block is dropped.

    The running hash of wire.md 5.2: ``h ^= v + 0x9e3779b97f4a7c15 + (h << 12) + (h >> 32)`` per token, modulo 2^64,
    with an arithmetic right shift of the signed ``h``, never reset between blocks.

    Args:
        token_ids: tokens of the prompt from its start, any int64.
        block_size: tokens per block, > 0.
        previous: key of the block before the first token, 0 at the start of the prompt.
    """
    state = previous & _MASK
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
    """Return `key_hex` of many mixed keys."""
    if len(keys) <= _FEW:
        return [key_hex(unmixed_key(key)) for key in keys]
    digits = unmixed_array(keys).byteswap(True).tobytes().hex(" ", _KEY_BYTES).split()
    found = list(map(str.lstrip, digits, repeat("0")))  # a loop in C
    return found if "" not in found else [text or "0" for text in found]


def key_hex(key: int) -> str:
    """Return the key as lower-case hex of its unsigned 64-bit value, as in object names (wire.md 8)."""
    return f"{key & _MASK:x}"


# Mixing: two rounds of a product with a secret odd number modulo 2^64 and a reversal of the bytes. A product spreads a
# difference of keys over all higher bits, the reversal brings these to the low end, which dictionaries look at first;
# the second round leaves no structure of the first. Every step can be undone, so distinct keys stay distinct.
#
# Rejected: one round (arithmetic progressions of keys stay such); keys as bytes, which Python hashes with a secret (all
# that works on numbers would have to change); a keyed hash of each key (must be remembered, to be undone).

_FACTORS: Final = (secrets.randbits(64) | 1, secrets.randbits(64) | 1)
_INVERSES: Final = tuple(pow(factor, -1, 1 << 64) for factor in _FACTORS)
# Products of numbers with sign have the same 64 bits as those without, and need no further view of the array.
_MIX: Final = tuple(np.array(factor, np.uint64).view(np.int64) for factor in _FACTORS)
_UNMIX: Final = tuple(np.array(inverse, np.uint64).view(np.int64) for inverse in _INVERSES)
_FEW: Final = 3  # keys for which plain numbers are faster than an array
_KEY_BYTES: Final = 8
_PLAIN: Final = (list, tuple)
_unpack_key: Final = Struct(">q").unpack


def mixed(keys: Sequence[int]) -> list[int]:
    """Return the mixed keys for keys from outside, each of 64 bits with sign. The keys of a message are best given as
    its field: that becomes an array without a Python number per key."""
    if len(keys) <= _FEW:
        return [mixed_key(key) for key in keys]
    found: list[int] = mixed_array(keys).tolist()
    return found


def mixed_array(keys: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what `mixed` returns as an array."""
    numbers = _array_of(keys)
    for factor in _MIX:
        numbers *= factor
        numbers.byteswap(True)
    return numbers


def unmixed(keys: Sequence[int]) -> list[int]:
    """Return the keys that `mixed` was given."""
    if len(keys) <= _FEW:
        return [unmixed_key(key) for key in keys]
    found: list[int] = unmixed_array(keys).tolist()
    return found


def unmixed_array(keys: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what `unmixed` returns as an array."""
    numbers = _array_of(keys)
    for inverse in reversed(_UNMIX):
        numbers.byteswap(True)
        numbers *= inverse
    return numbers


def _array_of(keys: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a new array. Of a list `np.array` would make it in three times the time: it looks for the type first."""
    return np.fromiter(keys, np.int64, len(keys)) if isinstance(keys, _PLAIN) else np.array(keys, np.int64)


def encode_keys(keys: Sequence[int]) -> bytes:
    """Return what documents hold for mixed keys: 8 bytes each, little endian."""
    if len(keys) <= _FEW:
        return b"".join([unmixed_key(key).to_bytes(_KEY_BYTES, "little", signed=True) for key in keys])
    return unmixed_array(keys).tobytes()


def mixed_key(key: int) -> int:
    """Return the mixed key for one key from outside."""
    first, second = _FACTORS
    number = int.from_bytes((key * first & _MASK).to_bytes(_KEY_BYTES, "little")) * second & _MASK
    return int.from_bytes(number.to_bytes(_KEY_BYTES, "little"), signed=True)


def unmixed_key(key: int) -> int:
    """Return the key that `mixed_key` was given."""
    first, second = _INVERSES
    number = int.from_bytes((key & _MASK).to_bytes(_KEY_BYTES, "little")) * second & _MASK
    number = int.from_bytes(number.to_bytes(_KEY_BYTES, "little")) * first & _MASK
    return number - (1 << 64) if number & _SIGN else number


def pack_keys(keys: Sequence[int]) -> Sequence[bytes]:
    """Return what stores hold for mixed keys: 8 bytes each, big endian, as they were before they were mixed."""
    if len(keys) <= _FEW:
        return [unmixed_key(key).to_bytes(_KEY_BYTES, signed=True) for key in keys]
    return cut_keys(join_keys(keys))


def join_keys(keys: Sequence[int]) -> bytes:
    """Return what `pack_keys` returns, one after the other."""
    if len(keys) <= _FEW:
        return b"".join(pack_keys(keys))
    return unmixed_array(keys).byteswap(True).tobytes()


def cut_keys(joined: bytes) -> Sequence[bytes]:
    """Return what `pack_keys` returns for the keys that `join_keys` was given.

    Raises:
        struct.error: they have not 8 bytes each.
    """
    return _cut_every_8_bytes(len(joined) // _KEY_BYTES).unpack(joined)


def unpack_keys(members: Iterable[bytes]) -> list[int]:
    """Return the mixed keys that `pack_keys` was given.

    Raises:
        struct.error: one has not 8 bytes.
    """
    return mixed([_unpack_key(member)[0] for member in members])


def split_keys(joined: bytes) -> list[int]:
    """Return the mixed keys that `join_keys` was given."""
    found: list[int] = mixed_array(np.frombuffer(joined, ">i8")).tolist()
    return found


@lru_cache(1024)
def _cut_every_8_bytes(count: int) -> Struct:
    return Struct("8s" * count)


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
