"""How a stored block looks."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.layout.dtypes import item_bytes
from kvcm.model.errors import InvalidArgumentError

__all__ = ["BlockLayout"]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The stored format of one block of KV, version 1.

    A stored block is one contiguous array without a header, in the machine's byte order (little endian):

        [layer][K, V][kv_head][token][head_dim]

    so layer `l` is the byte range `[l * layer_bytes, (l + 1) * layer_bytes)` and can be read alone.

    Attributes:
        layers: attention layers that keep KV.
        kv_heads: key/value heads stored per layer (of this rank).
        head_dim: elements per head and token, the same for K and V.
        block_tokens: tokens per block.
        dtype: of the elements, as torch names it: `float32`, `bfloat16`, ...

    Raises:
        InvalidArgumentError: a count is not positive, or the dtype is unknown.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    VERSION = 1

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, field) <= 0:
                raise InvalidArgumentError(f"{field} is {getattr(self, field)}, must be > 0")
        item_bytes(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * item_bytes(self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block."""
        return self.token_bytes * self.block_tokens

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer inside a stored block."""
        return self.block_bytes // self.layers

    @property
    def piece_shape(self) -> tuple[int, int, int]:
        """Shape of the K, or the V, of one layer: [kv_head, token, head_dim]."""
        return (self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def fingerprint(self) -> str:
        """Text that two layouts share exactly when their stored bytes are interchangeable."""
        return (
            f"kvcm-block/{self.VERSION} layers={self.layers} kv_heads={self.kv_heads} head_dim={self.head_dim}"
            f" block_tokens={self.block_tokens} dtype={self.dtype} order=layer.kv.head.token.dim"
        )
