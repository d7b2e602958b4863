"""One call of the engine, cut into what its threads take.

A group is what a storage gets in one access: one item, or several of one packed file. A batch is what a thread takes at
once: groups whose bytes are counted together, so that small files do not cost a turn of the engine's lock each.

Who gets a group is decided by one atomic `popleft` or `pop`: the thread that begins it, another thread that takes work
over, or the caller that leaves. So a group that its caller has got back never begins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from connectors.transfer.breaker import Passage
from connectors.transfer.mover import Direction, TransferItem, TransferResult

__all__ = ["Batch", "Group", "Transfer", "Visit", "batches", "cut"]

_MOST_ITEMS = 512
_MOST_GROUPS = 16
_BATCH_BYTES = 1 << 20


class Transfer:
    """One call: where its results come together, and what its caller waits for.

    Args:
        direction: of all items.
        count: of items.
        deadline: of the engine's clock; no group is begun afterwards.
    """

    __slots__ = ("_ended", "_left", "deadline", "direction", "results")

    def __init__(self, direction: Direction, count: int, deadline: float) -> None:
        self.direction = direction
        self.deadline = deadline
        self.results: list[TransferResult | None] = [None] * count
        self._left = count
        self._ended = threading.Event()

    def fill(self, positions: Sequence[int], result: TransferResult) -> None:
        """Enter the same result for several items. Under the engine's lock."""
        for position in positions:
            self.results[position] = result
        self.count_down(len(positions))

    def count_down(self, count: int) -> None:
        """Say that so many results have come; the last ones wake the caller. Under the engine's lock."""
        self._left -= count
        if not self._left:
            self.wake()

    def wake(self) -> None:
        """Let the caller go on."""
        self._ended.set()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until all results are there, `wake` is called or the time is over."""
        if self._left:
            self._ended.wait(min(max(0.0, timeout_seconds), threading.TIMEOUT_MAX))


class Group:
    """Items that a storage gets in one access: of one object where the storage has paths, ascending by offset."""

    __slots__ = ("has_ended", "items", "positions", "size_bytes")

    def __init__(self, positions: Sequence[int], items: Sequence[TransferItem], size_bytes: int) -> None:
        self.positions = positions
        self.items = items
        self.size_bytes = size_bytes
        self.has_ended = False  # its results are where they belong


class Visit:
    """The part of one transfer that belongs to one storage."""

    __slots__ = ("batches", "groups", "has_checksums", "passage", "positions", "size_bytes", "transfer")

    def __init__(self, transfer: Transfer, positions: Sequence[int], groups: list[Group]) -> None:
        self.transfer = transfer
        self.positions = positions
        self.groups = groups
        self.size_bytes = sum([group.size_bytes for group in groups])
        self.batches: list[Batch] = []
        self.has_checksums = False  # that its loads must have, or its saves have to tell
        self.passage: Passage | None = None  # None: the breaker did not let it through


class Batch:
    """Groups of a visit that a thread takes at once."""

    __slots__ = ("begun", "groups", "is_abandoned", "is_held_back", "size_bytes", "visit")

    def __init__(self, visit: Visit, groups: Sequence[Group]) -> None:
        self.visit = visit
        self.groups = deque(groups)  # not begun
        self.size_bytes = sum([group.size_bytes for group in groups])
        self.begun = 0.0  # of the engine's clock
        self.is_held_back = False  # the budget, or loads, did not let it go first
        self.is_abandoned = False  # its caller has left while it was moving
        visit.batches.append(self)

    def split(self) -> Batch | None:
        """Take over half of what has not begun, with its share of the counted bytes; None when there is nothing."""
        taken: list[Group] = []
        with suppress(IndexError):  # its thread goes on meanwhile
            taken.extend(self.groups.pop() for _ in range((len(self.groups) + 1) // 2))
        if not taken:
            return None
        other = Batch(self.visit, taken[::-1])
        self.size_bytes -= other.size_bytes
        return other

    def next_group(self) -> Group | None:
        """Take the next group; nobody else gets it."""
        try:
            return self.groups.popleft()
        except IndexError:
            return None


def cut(items: Sequence[TransferItem], positions: Sequence[int], group_bytes: int) -> Iterator[Group]:
    """Yield groups: items of one path together, by offset, up to `group_bytes` or one item."""
    objects: dict[str, list[int]] = {}
    for position in positions:
        uri = items[position].uri
        objects.setdefault(uri.path if uri.range_id is None else "", []).append(position)  # a memory pool is one object
    for members in objects.values():
        if len(members) == 1:
            item = items[members[0]]
            yield Group(members, [item], item.size_bytes)
            continue
        members = _by_offset(items, members)
        sizes = [items[position].size_bytes for position in members]
        for start, end, size_bytes in _chunks(sizes, group_bytes):
            chunk = members[start:end]
            yield Group(chunk, [items[position] for position in chunk], size_bytes)


def batches(groups: Sequence[Group], most_bytes: int) -> Iterator[list[Group]]:
    """Yield groups together as long as they are small."""
    batch: list[Group] = []
    size_bytes = 0
    for group in groups:
        if batch and (size_bytes + group.size_bytes > min(most_bytes, _BATCH_BYTES) or len(batch) == _MOST_GROUPS):
            yield batch
            batch, size_bytes = [], 0
        batch.append(group)
        size_bytes += group.size_bytes
    if batch:
        yield batch


def _by_offset(items: Sequence[TransferItem], members: list[int]) -> list[int]:
    offsets = [items[position].offset for position in members]
    ordered = sorted(offsets)  # which most are, and comparing numbers is quick
    return members if offsets == ordered else [position for _, position in sorted(zip(offsets, members, strict=True))]


def _chunks(sizes: Sequence[int], group_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield where groups begin and end, and their bytes."""
    start = size_bytes = 0
    for index, size in enumerate(sizes):
        if index > start and (size_bytes + size > group_bytes or index - start == _MOST_ITEMS):
            yield start, index, size_bytes
            start, size_bytes = index, 0
        size_bytes += size
    yield start, len(sizes), size_bytes
