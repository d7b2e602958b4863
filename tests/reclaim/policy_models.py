"""What each policy means, in lists and dicts: slow, short, and written from the definitions alone.

Models speak of blocks by their names, which never change; the policies under test use slots. Each answer sorts or
searches the list of an order again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

__all__ = ["MODELS", "FifoModel", "LeafLruModel", "LfuModel", "LruModel", "PolicyModel", "S3FifoModel", "SieveModel"]


class Walk:
    """An iteration: it yields at most `left` more, standing on the block `at`, before all while it is None; `at` is
    the one before that when that has left its place."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.yielded: int | None = None
        self.at: int | None = None
        self.stepped_back = False
        self.passed: set[int] = set()

    def ask(self, find: Callable[[Walk], int | None]) -> int | None:
        self.left -= 1
        self.yielded = self.at = find(self) if self.left >= 0 else None
        self.stepped_back = False
        return self.yielded


class PolicyModel(ABC):
    """The common part of all models: the resident blocks, and the walks that have begun."""

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        self.is_leaf = is_leaf
        self.walks: list[Walk] = []

    @abstractmethod
    def order(self) -> list[int]:
        """Return the resident blocks, the one that is to go first in front."""

    @abstractmethod
    def insert(self, block: int) -> None: ...

    @abstractmethod
    def touch(self, block: int, reads: int) -> None: ...

    @abstractmethod
    def drop(self, block: int, evicted: bool) -> None: ...

    @abstractmethod
    def find(self, walk: Walk) -> int | None:
        """Return what a walk yields next."""

    def remove(self, block: int, evicted: bool) -> None:
        self.leave(block)
        self.drop(block, evicted)

    def leave(self, block: int) -> None:
        """A block leaves its place: walks that stand on it step back."""
        for walk in self.walks:
            walk.passed.discard(block)
            if walk.at == block:
                order = self.order()
                place = order.index(block)
                walk.at = order[place - 1] if place else None
                walk.stepped_back = True
            if walk.yielded == block:
                walk.yielded = None

    def begin(self) -> Walk:
        walk = Walk(len(self.order()))
        self.walks.append(walk)
        return walk

    def next(self, walk: Walk) -> int | None:
        if walk.yielded is not None:
            self.pass_over(walk, walk.yielded)
        return walk.ask(self.find)

    def pass_over(self, walk: Walk, block: int) -> None:
        walk.passed.add(block)

    def end(self, walk: Walk) -> None:
        self.walks.remove(walk)

    def victims(self) -> Iterator[int]:
        walk = self.begin()
        while (block := self.next(walk)) is not None:
            yield block
        self.end(walk)


class SortedModel(PolicyModel):
    """Blocks by a rank of which no two have the same."""

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.ranks: dict[int, tuple[int, int]] = {}
        self.time = 0

    def order(self) -> list[int]:
        return sorted(self.ranks, key=self.ranks.__getitem__)

    def now(self) -> int:
        self.time += 1
        return self.time

    def drop(self, block: int, evicted: bool) -> None:
        del self.ranks[block]

    def following(self, walk: Walk) -> list[int]:
        order = self.order()
        return order if walk.at is None else order[order.index(walk.at) + 1 :]

    def find(self, walk: Walk) -> int | None:
        return next(iter(self.following(walk)), None)


class FifoModel(SortedModel):
    def insert(self, block: int) -> None:
        self.ranks[block] = (0, self.now())

    def touch(self, block: int, reads: int) -> None: ...


class LruModel(SortedModel):
    def insert(self, block: int) -> None:
        self.ranks[block] = (0, self.now())

    def touch(self, block: int, reads: int) -> None:
        self.leave(block)
        self.ranks[block] = (0, self.now())


class LeafLruModel(LruModel):
    def find(self, walk: Walk) -> int | None:
        blocks = self.order() if walk.stepped_back else self.following(walk)
        return next((block for block in blocks if block not in walk.passed and self.is_leaf(block)), None)


class LfuModel(SortedModel):
    ageing = False

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.frequencies: dict[int, int] = {}
        self.allowance = 0

    def insert(self, block: int) -> None:
        self.access(block, 1)

    def touch(self, block: int, reads: int) -> None:
        self.leave(block)
        self.access(block, self.frequencies[block] + reads)

    def access(self, block: int, frequency: int) -> None:
        self.frequencies[block] = frequency
        self.ranks[block] = (frequency + self.allowance, self.now())

    def drop(self, block: int, evicted: bool) -> None:
        if self.ageing and evicted:
            self.allowance = max(self.allowance, self.ranks[block][0])
        super().drop(block, evicted)


class AgeingLfuModel(LfuModel):
    ageing = True


class SieveModel(PolicyModel):
    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.blocks: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def order(self) -> list[int]:
        return self.blocks

    def insert(self, block: int) -> None:
        self.blocks.append(block)

    def touch(self, block: int, reads: int) -> None:
        self.visited.add(block)

    def drop(self, block: int, evicted: bool) -> None:
        if self.hand == block:
            self.hand = self.newer(block)
        self.blocks.remove(block)
        self.visited.discard(block)

    def newer(self, block: int) -> int | None:
        return next(iter(self.blocks[self.blocks.index(block) + 1 :]), None)

    def find(self, walk: Walk) -> int | None:
        start = self.blocks.index(self.hand) if self.hand is not None else 0
        lap = self.blocks[start:] + self.blocks[:start]
        for block in lap + lap:
            if block in self.visited:
                self.visited.remove(block)
            elif block not in walk.passed:
                self.hand = block
                return block
        return None

    def pass_over(self, walk: Walk, block: int) -> None:
        super().pass_over(walk, block)
        if self.hand == block:
            self.hand = self.newer(block)


class S3FifoModel(PolicyModel):
    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        super().__init__(is_leaf)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.reads: dict[int, int] = {}
        self.size_at_eviction = 0

    def order(self) -> list[int]:
        return self.small + self.main

    def insert(self, block: int) -> None:
        (self.main if block in self.ghost else self.small).append(block)
        if block in self.ghost:
            self.ghost.remove(block)
        most = int(0.9 * self.size_at_eviction)
        self.ghost = self.ghost[max(0, len(self.ghost) - most) :]
        self.reads[block] = 0

    def touch(self, block: int, reads: int) -> None:
        self.reads[block] += reads

    def drop(self, block: int, evicted: bool) -> None:
        if block in self.main:
            self.main.remove(block)
            return
        if evicted:
            self.size_at_eviction = len(self.order())
            self.ghost.append(block)
        self.small.remove(block)

    def find(self, walk: Walk) -> int | None:
        size = len(self.order())
        ways = [self.from_small, self.from_main]
        if len(self.main) > size - int(0.1 * size) or not self.small:
            ways.reverse()
        for way in ways:
            if (block := way(walk)) is not None:
                return block
        return None

    def from_small(self, walk: Walk) -> int | None:
        for block in list(self.small):
            if self.reads[block] >= 2:
                self.leave(block)
                self.small.remove(block)
                self.main.append(block)
                self.reads[block] = 0
            elif block in walk.passed:
                self.send_back(self.small, block, walk)
            else:
                return block
        return None

    def from_main(self, walk: Walk) -> int | None:
        for _ in range(4 * len(self.main)):
            block = self.main[0]
            if self.reads[block]:
                self.reads[block] = min(self.reads[block], 3) - 1
                self.leave(block)
                self.main.append(self.main.pop(0))
            elif block in walk.passed:
                self.send_back(self.main, block, walk)
            else:
                return block
        return None

    def send_back(self, queue: list[int], block: int, walk: Walk) -> None:
        self.leave(block)
        queue.remove(block)
        queue.append(block)
        walk.passed.add(block)

    def pass_over(self, walk: Walk, block: int) -> None:
        self.send_back(self.main if block in self.main else self.small, block, walk)


MODELS: dict[str, Callable[[Callable[[int], bool]], PolicyModel]] = {
    "fifo": FifoModel,
    "leaf_lru": LeafLruModel,
    "lfu": LfuModel,
    "lfu_aging": AgeingLfuModel,
    "lru": LruModel,
    "s3fifo": S3FifoModel,
    "sieve": SieveModel,
}
