"""How an engine makes the block keys of tokens: its hash of each block, cut to 64 bits and XORed with a number.

An engine's hash of a block covers the hash of the block before it and the block's tokens, so blocks form a chain. What
lies before the first block, how a block is written down before it is hashed, and which bytes of the hash make the key
depend on the algorithm:

=====================  ====================  =================================  ==============================
algorithm              before block 0        hashed                             key before the mask
=====================  ====================  =================================  ==============================
``kvcm``               0                     token by token, see `keys`         the running hash itself
``vllm-sha256``        SHA-256 of a seed     pickle of (parent, tokens, extra)  first 8 bytes, little endian
``vllm-sha256-cbor``   SHA-256 of a seed     CBOR of the same                   first 8 bytes, little endian
``sglang-sha256``      nothing               parent ‖ tokens as 32-bit numbers  first 8 bytes, big endian
=====================  ====================  =================================  ==============================

The forms are those of vLLM 0.32 and SGLang 0.5.23. The mask is the number of a namespace (`kvcm.connectors.keys`,
`kvcm.connectors.sglang`), 0 for keys that no connector of ours made.
"""

from __future__ import annotations

import pickle  # only to hash what it writes, as vLLM does; nothing is ever loaded
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.keys import BlockKey, block_keys_from_tokens

__all__ = [
    "ALGORITHMS",
    "KVCM",
    "SGLANG_SHA256",
    "VLLM_SHA256",
    "VLLM_SHA256_CBOR",
    "KeyScheme",
    "block_hash",
    "block_hashes",
    "block_keys",
    "salt_seed",
    "vllm_root",
]

KVCM: Final = "kvcm"
VLLM_SHA256: Final = "vllm-sha256"
VLLM_SHA256_CBOR: Final = "vllm-sha256-cbor"
SGLANG_SHA256: Final = "sglang-sha256"
ALGORITHMS: Final = (KVCM, VLLM_SHA256, VLLM_SHA256_CBOR, SGLANG_SHA256)

_DEFAULT_SEED: Final = "vllm-none-hash"  # vLLM's, unless PYTHONHASHSEED is set
_PICKLE_PROTOCOL: Final = 5  # vLLM takes the highest one: 5 from Python 3.8 to 3.14
_KEY_BYTES: Final = 8
_HASH_BYTES: Final = 32
_INT64: Final = range(-(1 << 63), 1 << 63)
_MAX_UINT32: Final = (1 << 32) - 1
_WIDE_TAG: Final = b"\xff"
_NAMESPACE_TAG: Final = b"sglang-cache-namespace-v1"

Extra = tuple[object, ...]
"""Extra keys of a block as vLLM hashes them: tagged tuples such as ("cache_salt", "…")."""


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How an engine makes block keys.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        root: the hash before the first block, of vLLM's algorithms alone.
        mask: the number that every key is XORed with, an int64.
        block_tokens: tokens of a block.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    algorithm: str
    root: bytes
    mask: int
    block_tokens: int

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise InvalidArgumentError(f"algorithm is {self.algorithm!r}, must be one of {', '.join(ALGORITHMS)}")
        root_bytes = _HASH_BYTES if self.algorithm in _SERIALIZERS else 0
        if len(self.root) != root_bytes:
            raise InvalidArgumentError(
                f"root has {len(self.root)} bytes, must have {root_bytes} with algorithm {self.algorithm}"
            )
        if self.mask not in _INT64:
            raise InvalidArgumentError(f"mask is {self.mask}, must be a signed 64-bit number")
        if self.block_tokens <= 0:
            raise InvalidArgumentError(f"block_tokens is {self.block_tokens}, must be > 0")

    @property
    def is_vllm(self) -> bool:
        """Whether hashes are vLLM's."""
        return self.algorithm in _SERIALIZERS

    @property
    def has_keys_in_events(self) -> bool:
        """Whether a key is the number in the engine's KV events XOR the mask. That number is the first 8 bytes of the
        hash for SGLang, as of a key; vLLM's is the last 8 bytes, which say nothing about the first."""
        return self.algorithm == SGLANG_SHA256

    def key(self, digest: bytes) -> BlockKey:
        """Return the key of a block by its full hash."""
        first = digest[:_KEY_BYTES]
        return BlockKey(int.from_bytes(first, "little" if self.is_vllm else "big", signed=True) ^ self.mask)


def block_keys(scheme: KeyScheme, token_ids: Sequence[int], cache_salt: str = "") -> list[BlockKey]:
    """Return the key of every full block of a prompt; the tail that fills no block is dropped.

    Args:
        scheme: of the engine.
        token_ids: of the prompt from its start.
        cache_salt: of the request, which separates its blocks from those of others; "" for none.

    Raises:
        InvalidArgumentError: the algorithm has no salts, or a token id is not one.
        UnsupportedError: the algorithm needs a package that is not installed; names it.
    """
    if scheme.algorithm == KVCM:
        if cache_salt:
            raise InvalidArgumentError("cache_salt is given, but block keys of algorithm kvcm have no salt")
        return [BlockKey(key ^ scheme.mask) for key in block_keys_from_tokens(token_ids, scheme.block_tokens)]
    return [scheme.key(digest) for digest in block_hashes(scheme, token_ids, cache_salt)]


def block_hashes(scheme: KeyScheme, token_ids: Sequence[int], cache_salt: str = "") -> list[bytes]:
    """Return the engine's full hash of every full block of a prompt, for all algorithms but `kvcm`.

    Raises:
        InvalidArgumentError: see `block_keys`.
        UnsupportedError: see `block_keys`.
    """
    parent: bytes | None = None
    extra: Extra | None = None
    if cache_salt:
        if scheme.is_vllm:
            extra = (("cache_salt", cache_salt),)
        else:
            parent = salt_seed(cache_salt)
    found: list[bytes] = []
    size = scheme.block_tokens
    for end in range(size, len(token_ids) + 1, size):
        parent = block_hash(scheme, parent, token_ids[end - size : end], extra)
        extra = None  # vLLM has a salt in the first block alone
        found.append(parent)
    return found


def block_hash(scheme: KeyScheme, parent: bytes | None, token_ids: Sequence[int], extra: Extra | None = None) -> bytes:
    """Return the engine's full hash of one block.

    Args:
        scheme: of the engine; not `kvcm`.
        parent: hash of the block before it, None for the first block.
        token_ids: of the block.
        extra: vLLM's extra keys of the block.

    Raises:
        InvalidArgumentError: a token id is none.
        UnsupportedError: see `block_keys`.
    """
    serialize = _SERIALIZERS.get(scheme.algorithm)
    if serialize is None:
        assert scheme.algorithm == SGLANG_SHA256, scheme
        return sha256((parent or b"") + _packed(token_ids)).digest()
    return sha256(serialize((parent or scheme.root, tuple(token_ids), extra))).digest()


def vllm_root(algorithm: str, seed: str | None = None) -> bytes:
    """Return the hash before the first block of one of vLLM's algorithms.

    Args:
        algorithm: `vllm-sha256` or `vllm-sha256-cbor`.
        seed: PYTHONHASHSEED of the engine; None where it is not set.

    Raises:
        InvalidArgumentError: the algorithm is another one.
        UnsupportedError: see `block_keys`.
    """
    serialize = _SERIALIZERS.get(algorithm)
    if serialize is None:
        raise InvalidArgumentError(f"algorithm is {algorithm!r}, must be one of {', '.join(_SERIALIZERS)}")
    return sha256(serialize(_DEFAULT_SEED if seed is None else seed)).digest()


def salt_seed(cache_salt: str) -> bytes:
    """Return what SGLang's chain of a request with a salt begins with, for the keys of its storage."""
    encoded = cache_salt.encode()
    # Each part has a byte that says whether it is there, and its length; the first one, `extra_key`, is not.
    return sha256(_NAMESPACE_TAG + b"\0" + b"\1" + len(encoded).to_bytes(8, "little") + encoded).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    """Return tokens as SGLang hashes them: 32 bits each, or all as 64 bits behind a tag where one needs more."""
    try:
        is_wide = max(token_ids, default=0) > _MAX_UINT32
        values = array("Q" if is_wide else "I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidArgumentError(f"token_ids holds a value that is not a token id: {error}") from None
    if sys.byteorder == "big":
        values.byteswap()
    return (_WIDE_TAG if is_wide else b"") + values.tobytes()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=_PICKLE_PROTOCOL)


def _cbor(value: object) -> bytes:
    try:
        import cbor2
    except ImportError:
        raise UnsupportedError(
            f"algorithm {VLLM_SHA256_CBOR} needs the package cbor2: pip install cbor2, or 'kvcm[subscriber]'"
        ) from None
    return cbor2.dumps(value, canonical=True)


_SERIALIZERS: Final[dict[str, Callable[[object], bytes]]] = {VLLM_SHA256: _pickled, VLLM_SHA256_CBOR: _cbor}
