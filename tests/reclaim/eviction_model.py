"""What is evicted next, written down a second time: plain lists and searches instead of linked arrays and cursors.

One instance of blocks of one size. The order of a policy is asked for one victim at a time; while blocks follow that
victim, its coldest descendant leaf goes instead (design.md decision 18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["MODELS", "Block", "Model", "Order"]


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


class Order:
    """First in, first out; other policies change what a read does, or who comes first."""

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        self.is_leaf = is_leaf
        self.queue: list[int] = []

    def insert(self, key: int) -> None:
        self.queue.append(key)

    def touch(self, key: int, reads: int) -> None:
        """Nothing changes."""

    def remove(self, key: int, evicted: bool) -> None:
        self.queue.remove(key)

    def victim(self) -> int:
        return self.queue[0]


class LruOrder(Order):
    def touch(self, key: int, reads: int) -> None:
        self.queue.remove(key)
        self.queue.append(key)


class LeafLruOrder(LruOrder):
    def victim(self) -> int:
        return next(key for key in self.queue if self.is_leaf(key))


class LfuOrder(LruOrder):
    """Every access gives a block its frequency plus the worth of the best block that was evicted so far."""

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.frequency: dict[int, int] = {}
        self.worth: dict[int, int] = {}
        self.allowance = 0

    def insert(self, key: int) -> None:
        super().insert(key)
        self.frequency[key] = 0
        self.touch(key, 1)

    def touch(self, key: int, reads: int) -> None:
        super().touch(key, reads)
        self.frequency[key] += reads
        self.worth[key] = self.frequency[key] + self.allowance

    def remove(self, key: int, evicted: bool) -> None:
        super().remove(key, evicted)
        if evicted:
            self.allowance = max(self.allowance, self.worth[key])

    def victim(self) -> int:
        return min(self.queue, key=lambda key: self.worth[key])  # of equals the first: the least recently accessed


class SieveOrder(Order):
    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.visited: set[int] = set()
        self.hand: int | None = None

    def touch(self, key: int, reads: int) -> None:
        self.visited.add(key)

    def after(self, key: int) -> int | None:
        behind = self.queue[self.queue.index(key) + 1 :]
        return behind[0] if behind else None

    def remove(self, key: int, evicted: bool) -> None:
        if key == self.hand:
            self.hand = self.after(key)
        self.visited.discard(key)
        super().remove(key, evicted)

    def victim(self) -> int:
        while True:
            hand = self.hand if self.hand is not None else self.queue[0]
            if hand not in self.visited:
                self.hand = hand
                return hand
            self.visited.remove(hand)
            self.hand = self.after(hand)


class S3FifoOrder(Order):
    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.main: list[int] = []
        self.reads: dict[int, int] = {}
        self.ghost: list[int] = []
        self.ghost_room = 0

    def insert(self, key: int) -> None:
        came_back = key in self.ghost
        if came_back:
            self.ghost.remove(key)
        self.ghost = self.ghost[max(0, len(self.ghost) - self.ghost_room) :]
        (self.main if came_back else self.queue).append(key)
        self.reads[key] = 0

    def touch(self, key: int, reads: int) -> None:
        self.reads[key] = min(3, self.reads[key] + reads)

    def remove(self, key: int, evicted: bool) -> None:
        if key in self.main:
            self.main.remove(key)
            return
        if evicted:
            self.ghost_room = int(0.9 * (len(self.queue) + len(self.main)))
            self.ghost = [name for name in self.ghost if name != key] + [key]
        self.queue.remove(key)

    def victim(self) -> int:
        total = len(self.queue) + len(self.main)
        if len(self.main) <= total - int(0.1 * total):
            while self.queue:
                oldest = self.queue[0]
                if self.reads[oldest] < 2:
                    return oldest
                self.main.append(self.queue.pop(0))
                self.reads[oldest] = 0
        while self.reads[self.main[0]]:
            oldest = self.main.pop(0)
            self.main.append(oldest)
            self.reads[oldest] -= 1
        return self.main[0]


MODELS = {
    "fifo": Order,
    "leaf_lru": LeafLruOrder,
    "lfu": LfuOrder,
    "lru": LruOrder,
    "s3fifo": S3FifoOrder,
    "sieve": SieveOrder,
    "ttl": Order,
}


class Model:
    """The blocks of one instance, and who is evicted.

    Args:
        policy: its name.

    Attributes:
        blocks: that can be read.
        order: of the policy.
    """

    def __init__(self, policy: str) -> None:
        self.blocks: dict[int, Block] = {}
        self._moves = policy in {"lru", "leaf_lru", "lfu"}
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
            victim = self.order.victim()
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
