"""Where the KV of a block lies in an engine's paged tensor, as strides.

Engines differ in the order of the axes, in whether K and V share a tensor and how, and in whether a block is an axis or
a range of token slots. Named axes turn all of that into one form: a size and a stride for block, kv, head, token and
dim. Nothing is assumed from a shape alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcm.connectors.layout.stored_format import item_bytes
from kvcm.model.errors import InvalidArgumentError

__all__ = ["Axis", "PagedKv"]

_NAMES = ("block", "token", "slot", "head", "kv", "dim", "kv_dim")


class Axis(NamedTuple):
    """Size and stride of one axis, in elements."""

    size: int
    stride: int


_ABSENT = Axis(1, 0)


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One tensor of paged KV.

    Attributes:
        block: capacity of the tensor, in blocks.
        kv: 2 for K and V, 1 for either of them or for MLA's latent KV.
        head: KV heads of this rank; 1 for MLA.
        token: tokens per block.
        dim: elements per head and token.
        dtype: of the elements, as torch names it.

    Raises:
        InvalidArgumentError: an axis is empty, kv is not 1 or 2, the dtype is unknown, or elements share memory.
    """

    block: Axis
    kv: Axis
    head: Axis
    token: Axis
    dim: Axis
    dtype: str

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        for name in ("block", "kv", "head", "token", "dim"):
            axis: Axis = getattr(self, name)
            if axis.size <= 0 or (axis.size > 1 and axis.stride <= 0):
                raise InvalidArgumentError(f"{name} has size {axis.size}, stride {axis.stride}, must be > 0")
        if self.kv.size > 2:
            raise InvalidArgumentError(f"kv has size {self.kv.size}, must be 2 for K and V or 1")
        self._check_apart()

    @classmethod
    def named(
        cls,
        axes: Sequence[str],
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: str,
        block_tokens: int | None = None,
    ) -> PagedKv:
        """Describe a tensor by the names of its axes.

        Args:
            axes: one name per dimension: `block` and `token`, or `slot` for all tokens of all blocks in one axis;
                `dim`, or `kv_dim` for K and V one behind the other in one axis; where there are any, `head` and `kv`.
            shape: of the tensor.
            strides: in elements.
            dtype: as torch names it.
            block_tokens: tokens per block, needed with `slot`.

        Raises:
            InvalidArgumentError: the names do not describe such a tensor; names the missing ones.
        """
        found = _by_name(axes, shape, strides)
        block, token = _block_and_token(found, block_tokens)
        kv, dim = _kv_and_dim(found)
        return cls(block, kv, found.get("head", _ABSENT), token, dim, dtype)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Sizes of [block, kv, head, token, dim]."""
        return (self.block.size, self.kv.size, self.head.size, self.token.size, self.dim.size)

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Strides of [block, kv, head, token, dim], in elements."""
        return (self.block.stride, self.kv.stride, self.head.stride, self.token.stride, self.dim.stride)

    def _check_apart(self) -> None:
        """Refuse axes whose elements may meet: each must step over all that the smaller ones reach."""
        reach = 0
        for stride, size in sorted((stride, size) for size, stride in zip(self.shape, self.strides, strict=True)):
            if size > 1 and stride <= reach:
                raise InvalidArgumentError(f"strides {self.strides} of shape {self.shape} let elements share memory")
            reach += stride * (size - 1)


def _by_name(axes: Sequence[str], shape: Sequence[int], strides: Sequence[int]) -> dict[str, Axis]:
    unknown = [name for name in axes if name not in _NAMES]
    if unknown:
        raise InvalidArgumentError(f"axes has {unknown[0]!r}, must be of {', '.join(_NAMES)}")
    if len(set(axes)) != len(axes):
        raise InvalidArgumentError(f"axes is {tuple(axes)}, must name each axis once")
    if not len(axes) == len(shape) == len(strides):
        raise InvalidArgumentError(
            f"axes has {len(axes)} names, must be one for each of the {len(shape)} sizes and {len(strides)} strides"
        )
    return {name: Axis(size, stride) for name, size, stride in zip(axes, shape, strides, strict=True)}


def _block_and_token(found: dict[str, Axis], block_tokens: int | None) -> tuple[Axis, Axis]:
    names = found.keys() & {"block", "token", "slot"}
    if names == {"block", "token"}:
        if block_tokens not in (None, found["token"].size):
            raise InvalidArgumentError(
                f"block_tokens is {block_tokens}, must be {found['token'].size} as the axis says"
            )
        return found["block"], found["token"]
    if names != {"slot"}:
        raise InvalidArgumentError(f"axes has {sorted(names)}, must have block and token, or slot alone")
    slots, stride = found["slot"]
    if block_tokens is None or block_tokens <= 0 or slots % block_tokens:
        raise InvalidArgumentError(f"block_tokens is {block_tokens}, must divide the {slots} slots")
    return Axis(slots // block_tokens, stride * block_tokens), Axis(block_tokens, stride)


def _kv_and_dim(found: dict[str, Axis]) -> tuple[Axis, Axis]:
    names = found.keys() & {"kv", "dim", "kv_dim"}
    if names == {"kv_dim"}:
        size, stride = found["kv_dim"]
        if size % 2:
            raise InvalidArgumentError(f"kv_dim has size {size}, must be even: K and V one behind the other")
        return Axis(2, stride * (size // 2)), Axis(size // 2, stride)
    if "kv_dim" in names or "dim" not in names:
        raise InvalidArgumentError(f"axes has {sorted(names)}, must have dim with or without kv, or kv_dim alone")
    return found.get("kv", _ABSENT), found["dim"]
