"""Block keys: from an engine's own chained hashes, or computed here for engines that have none.

`HashKeys` cuts the engine's hash, which already depends on the whole prefix and on adapter, images and salt, to 64 bits
and turns it by a number of the namespace:

    key(b) = int64le(first 8 bytes of hash(b)) XOR int64le(first 8 bytes of SHA-256(namespace))

`KeyChain` is for all others. The key of a block is a keyed BLAKE2b of the key before it and the block's tokens, cut to
64 bits. It therefore depends on every token of the prefix, and the same chunk after another prefix has another key. The
namespace (which model, which layout) is the hash's secret: keys of different namespaces have nothing in common. Unlike
`hash()` the result is the same in every process, and this page is its whole definition:

    key(b) = first 8 bytes, little endian signed, of
             BLAKE2b(digest_size=8, key=SHA-256(namespace), data=int64le(key(b-1)) ‖ int64le(token) per token)

with 0 as the key before the first block.

`event_hashes` are other 64 bits of the hashes that `HashKeys` takes: those by which vLLM's KV events name a block. Key
and event hash share no bits, so the manager can name a block as events do only if its writer told it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import cast

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey

__all__ = ["HashKeys", "KeyChain", "event_hashes"]

_ROOT = 0
_KEY_BYTES = 8


class HashKeys:
    """Turns chained hashes of an engine into block keys.

    Args:
        namespace: everything besides the hashed tokens that KV depends on, in any fixed form.
    """

    def __init__(self, namespace: bytes) -> None:
        self._turn = int.from_bytes(sha256(namespace).digest()[:_KEY_BYTES], "little", signed=True)

    def keys(self, hashes: Sequence[bytes]) -> list[BlockKey]:
        """Return the key of each hash.

        Raises:
            InvalidArgumentError: a hash has less than 8 bytes.
        """
        numbers = _numbers("<", hashes, [digest[:_KEY_BYTES] for digest in hashes])
        turn = self._turn
        return cast("list[BlockKey]", [number ^ turn for number in numbers])  # a call per key would double the time


def event_hashes(hashes: Sequence[bytes]) -> list[int]:
    """Return the number by which vLLM's KV events name each block, for `ManagerClient.start_write`: the last 8 bytes of
    its hash, big endian. An event has them unsigned, the wire as an int64.

    Raises:
        InvalidArgumentError: a hash has less than 8 bytes.
    """
    return _numbers(">", hashes, [digest[-_KEY_BYTES:] for digest in hashes])


def _numbers(byte_order: str, hashes: Sequence[bytes], parts: Sequence[bytes]) -> list[int]:
    """Return 8 bytes of each hash as a signed number."""
    try:
        return list(struct.unpack(f"{byte_order}{len(hashes)}q", b"".join(parts)))
    except struct.error:
        shortest = min(map(len, hashes))
        raise InvalidArgumentError(f"a block hash has {shortest} bytes, must have at least {_KEY_BYTES}") from None


class KeyChain:
    """Computes chained block keys.

    Args:
        namespace: everything besides the tokens that KV depends on, in any fixed form.
        block_tokens: tokens per block, > 0.

    Raises:
        InvalidArgumentError: `block_tokens` is not positive.
    """

    def __init__(self, namespace: bytes, block_tokens: int) -> None:
        if block_tokens <= 0:
            raise InvalidArgumentError(f"block_tokens is {block_tokens}, must be > 0")
        self.block_tokens = block_tokens
        self._secret = sha256(namespace).digest()

    def keys(self, tokens: Sequence[int], parent: BlockKey | None = None) -> list[BlockKey]:
        """Return the key of every full block of `tokens`; the tail that fills no block is dropped.

        Args:
            tokens: token ids, each an int64.
            parent: key of the block before the first token, None at the start of the prompt.
        """
        full = len(tokens) // self.block_tokens * self.block_tokens
        data = _int64_le(tokens[:full])
        step = self.block_tokens * 8
        keys: list[BlockKey] = []
        previous: int = _ROOT if parent is None else parent
        for start in range(0, len(data), step):
            previous = self._key(previous, data[start : start + step])
            keys.append(BlockKey(previous))
        return keys

    def _key(self, previous: int, block: bytes) -> int:
        digest = blake2b(
            previous.to_bytes(_KEY_BYTES, "little", signed=True) + block, digest_size=_KEY_BYTES, key=self._secret
        )
        return int.from_bytes(digest.digest(), "little", signed=True)


def _int64_le(tokens: Sequence[int]) -> bytes:
    values = array("q", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
