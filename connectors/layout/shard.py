"""Which part of a model's KV something holds: a rank, a spec, or what one of them needs of the other.

A part is a range of layers times a range of KV heads. Pipeline stages cut the layers, tensor parallelism cuts the
heads, and two parts have in common what both ranges have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcm.model.errors import InvalidArgumentError

__all__ = ["RankHeads", "Shard", "Span", "rank_heads"]


class Span(NamedTuple):
    """Whole numbers from `first` up to, not including, `end`."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.end - self.first

    def contains(self, other: Span) -> bool:
        """Return whether every number of `other` is in this span."""
        return self.first <= other.first and other.end <= self.end

    def intersection(self, other: Span) -> Span | None:
        """Return what both have, None when that is nothing."""
        common = Span(max(self.first, other.first), min(self.end, other.end))
        return common if common.size > 0 else None


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of layers times a range of KV heads, counted over the whole model.

    Raises:
        InvalidArgumentError: a range is empty or begins below 0.
    """

    layers: Span
    heads: Span

    def __post_init__(self) -> None:
        for field in ("layers", "heads"):
            first, end = getattr(self, field)
            if not 0 <= first < end:
                raise InvalidArgumentError(f"{field} is {first} to {end}, must be 0 <= first < end")

    @property
    def name(self) -> str:
        """The name of a spec that holds this part: `layers0-16.heads0-4`, ends not included."""
        return f"layers{self.layers.first}-{self.layers.end}.heads{self.heads.first}-{self.heads.end}"

    def contains(self, other: Shard) -> bool:
        """Return whether all of `other` is in this part."""
        return self.layers.contains(other.layers) and self.heads.contains(other.heads)

    def intersection(self, other: Shard) -> Shard | None:
        """Return what both have, None when that is nothing."""
        layers, heads = self.layers.intersection(other.layers), self.heads.intersection(other.heads)
        return Shard(layers, heads) if layers and heads else None


class RankHeads(NamedTuple):
    """The KV heads of one rank.

    Attributes:
        heads: that the rank computes.
        replica: which of the ranks that compute the same heads it is; number 0 stores them, the others only read.
    """

    heads: Span
    replica: int


def rank_heads(heads: int, rank: int, ranks: int) -> RankHeads:
    """Return the KV heads of a tensor-parallel rank.

    With more ranks than heads, each head is computed by several neighbours. MLA is the case of one head: all ranks
    have the same latent KV.

    Args:
        heads: KV heads of the model; 1 for MLA.
        rank: 0 to `ranks` - 1.
        ranks: size of the tensor-parallel group.

    Raises:
        InvalidArgumentError: the rank is not one of the group, or heads and ranks do not divide.
    """
    if heads <= 0 or ranks <= 0:
        raise InvalidArgumentError(f"heads is {heads} and ranks is {ranks}, must both be > 0")
    if not 0 <= rank < ranks:
        raise InvalidArgumentError(f"rank is {rank}, must be 0 to {ranks - 1}")
    if heads % ranks and ranks % heads:
        raise InvalidArgumentError(f"ranks is {ranks}, must divide the {heads} KV heads or be a multiple of them")
    replicas = max(1, ranks // heads)
    share = max(1, heads // ranks)
    first = rank // replicas * share
    return RankHeads(Span(first, first + share), rank % replicas)
