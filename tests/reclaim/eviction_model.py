"""Which block is evicted next, by the plain models of the policies.

One instance of blocks of one size. The order of a policy is asked for one victim at a time; while blocks follow that
victim, its coldest descendant leaf goes instead (design.md decision 18).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policy_models import MODELS as ORDERS

__all__ = ["MODELS", "Block", "Model"]


@dataclass
class Block:
    """A resident block.

    Attributes:
        parent: the block before it.
        depth: in its chain.
        read_at: whole seconds.
    """

    parent: int | None
    depth: int
    read_at: int


MODELS = {**ORDERS, "ttl": ORDERS["fifo"]}


class Model:
    """The blocks of one instance, and the choice of victims.

    Args:
        policy: its name.

    Attributes:
        blocks: that can be read.
        order: of the policy.
    """

    def __init__(self, policy: str) -> None:
        self.blocks: dict[int, Block] = {}
        self._moves = policy in {"lru", "leaf_lru", "lfu", "lfu_aging"}
        self.order = MODELS[policy](self.is_leaf)

    def children(self, key: int) -> list[int]:
        """The resident blocks that directly follow."""
        return [child for child, block in self.blocks.items() if block.parent == key]

    def is_leaf(self, key: int) -> bool:
        """Whether no resident block follows."""
        return not self.children(key)

    def write(self, key: int, parent: int | None, depth: int, at: float) -> None:
        """Add a block that is not there."""
        self.blocks[key] = Block(parent, depth, int(at))
        self.order.insert(key)

    def read(self, keys: Iterable[int], reads: int, at: float) -> None:
        """Read blocks, in this order."""
        for key in keys:
            if key in self.blocks:
                if self._moves:
                    self.blocks[key].read_at = int(at)
                self.order.touch(key, reads)

    def remove(self, key: int, *, evicted: bool = False) -> None:
        """Take a block out if it is there."""
        if key in self.blocks:
            self.order.remove(key, evicted)
            del self.blocks[key]

    def evict(self, count: int) -> list[int]:
        """Evict so many blocks; return them in order."""
        evicted: list[int] = []
        while len(evicted) < count:
            walk = self.order.begin()
            victim = self.order.next(walk)
            self.order.end(walk)
            assert victim is not None
            while victim in self.blocks and len(evicted) < count:
                leaf = self._coldest_leaf(victim)
                self.remove(leaf, evicted=True)
                evicted.append(leaf)
        return evicted

    def _coldest_leaf(self, key: int) -> int:
        below, leaves = [key], []
        while below:
            at = below.pop()
            children = self.children(at)
            below += children
            if not children:
                leaves.append(at)
        return min(leaves, key=lambda leaf: (self.blocks[leaf].read_at, -self.blocks[leaf].depth, leaf))
