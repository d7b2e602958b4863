"""The interface of an eviction policy, and the queues that policies are made of.

Blocks are named by *slots*: small dense numbers, so that a policy keeps its order in arrays instead of in objects. The
live reclaimer uses the rows of the index, which change when blocks are removed (`moved`); the simulator numbers the ids
of its trace; on a shared store slots are positions in a window of candidates.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "END",
    "Cursor",
    "IsLeaf",
    "Ordered",
    "Policy",
    "SlotLinks",
    "SlotQueue",
    "Summaries",
    "Summary",
    "descends",
    "restore_each",
]

IsLeaf = Callable[[int], bool]
"""Whether no resident block follows the block in a slot."""


class Summary(NamedTuple):
    """What a store remembers of a block: enough to put it back into an order after a restart.

    Attributes:
        written_at: unix seconds.
        read_at: unix seconds of the last read; that of the write if it was never read.
        reads: since it was written.
    """

    written_at: float
    read_at: float
    reads: int


class Summaries(NamedTuple):
    """Summaries of many blocks, in columns."""

    written_at: NDArray[np.float64]
    read_at: NDArray[np.int64]
    reads: NDArray[np.int64]


class Policy(Protocol):
    """An order of eviction over resident blocks."""

    def __len__(self) -> int:
        """Return the number of resident blocks."""

    def __contains__(self, slot: int) -> bool:
        """Return whether a slot is resident."""

    def insert(self, slot: int, key: int) -> None:
        """Add a block that was just written. `key` is its name for ever, a slot only while it is resident."""

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks that were written together: what `insert` does with one after the other."""

    def touch(self, slot: int, reads: int = 1) -> None:
        """Count reads of a resident block, the last of them just now."""

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Count reads of blocks: what `touch` does with one after the other."""

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Remove a block. `evicted` is False when it left for another reason than lack of space."""

    def moved(self, slot: int, to: int) -> None:
        """The block in `slot` is called `to` from now on; nothing was called so."""

    def victims(self) -> Iterator[int]:
        """Yield blocks in the order in which they are to be evicted.

        The caller may evict the yielded block, or others, before it continues. A block that is
        still resident then is passed over, and does not come again in this iteration unless it was touched.
        """

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return the rank of a block by its summary alone: smaller ones are evicted first. Used to put blocks back
        into the order they came from, and to choose among candidates of a shared store. Of many blocks: the columns of
        their ranks."""

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before; called in ascending `rank`."""

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks that were resident before, in ascending `rank`: what `restore` does with one after the other."""


def restore_each(policy: Policy, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
    """Do `restore_all` with one after the other."""
    columns = zip(*(column.tolist() for column in (slots, keys, *summaries)), strict=True)
    for slot, key, written_at, read_at, reads in columns:
        policy.restore(slot, key, Summary(written_at, read_at, reads))


# Queues of slots, from the oldest to the newest, kept in arrays: eight bytes per slot and no object.
#
# Every queue is a ring that begins and ends at a number below zero, its *end*. Such numbers count from the back of the
# arrays, so the ends stay where they are while the arrays grow in front of them, and no step asks whether there is a
# neighbour. Queues over the same `Links` share the arrays. Rejected: `OrderedDict` and `deque` (a hundred bytes per
# block, and a deque cannot lose one from its middle), a heap (blocks leave from its middle as well).
#
# Invariants:
#
# * A slot is in at most one of the queues that share its links; one that is in none is its own neighbour.
# * An iteration stands on a slot that is in its queue, or on the end: when that slot leaves its place, the iteration
#   steps back to the older neighbour. So the caller may do anything in between.

END = -1
"""The end of the first queue over some links, also: no slot."""
_LEAST_GROWTH = 64


class Cursor:
    """Where one iteration stands.

    Attributes:
        at: the slot it looked at last, or the end of its queue.
        stepped_back: whether `at` is only the older neighbour of that slot, which has left its place.
        passed: slots that it yielded and that stayed, for orders in which a slot is met twice.
    """

    __slots__ = ("at", "passed", "stepped_back")

    def __init__(self, at: int) -> None:
        self.at = at
        self.stepped_back = False
        self.passed: set[int] = set()

    def stand_on(self, slot: int) -> None:
        """Go to a slot."""
        self.at = slot
        self.stepped_back = False


class SlotLinks:
    """The neighbours of all slots, and what else policies keep per slot.

    Args:
        queues: how many queues share them.
    """

    __slots__ = ("_capacity", "_columns", "cursors", "newer", "older")

    def __init__(self, queues: int = 1) -> None:
        self.older = array("i", range(-queues, 0))
        self.newer = array("i", range(-queues, 0))
        self.cursors: list[Cursor] = []
        self._columns: list[array[int]] = []
        self._capacity = 0

    def __contains__(self, slot: int) -> bool:
        return 0 <= slot < self._capacity and self.newer[slot] != slot

    def column(self, typecode: str) -> array[int]:
        """Return an array by slot that grows and moves along; its zeros are not restored when a slot is taken again."""
        column = array(typecode, [0]) * self._capacity
        self._columns.append(column)
        return column

    def reserve(self, slot: int) -> None:
        """Grow until there is a place for `slot`."""
        have = self._capacity
        if slot >= have:
            self._capacity = max(slot + 1, have + (have >> 3) + _LEAST_GROWTH)
            fresh = array("i", range(have, self._capacity))
            self.older[have:have] = fresh
            self.newer[have:have] = fresh
            for column in self._columns:
                column.frombytes(bytes(len(fresh) * column.itemsize))

    def move(self, slot: int, to: int) -> None:
        """Call a slot `to`; no queue has a slot of this name."""
        assert slot in self
        assert to not in self
        self.reserve(to)
        before, after = self.older[slot], self.newer[slot]
        self.older[to], self.newer[to] = before, after
        self.newer[before] = self.older[after] = to
        self.older[slot] = self.newer[slot] = slot
        for column in self._columns:
            column[to] = column[slot]
        for cursor in self.cursors:
            if cursor.at == slot:
                cursor.at = to
            if slot in cursor.passed:
                cursor.passed.remove(slot)
                cursor.passed.add(to)

    def open_cursor(self, at: int = END) -> Cursor:
        """Begin an iteration; the caller closes the cursor."""
        cursor = Cursor(at)
        self.cursors.append(cursor)
        return cursor

    def close_cursor(self, cursor: Cursor) -> None:
        """End an iteration."""
        self.cursors.remove(cursor)

    def leave(self, slot: int) -> None:
        """Move the cursors off a slot that is about to leave its place."""
        for cursor in self.cursors:
            cursor.passed.discard(slot)
            if cursor.at == slot:
                cursor.at = self.older[slot]
                cursor.stepped_back = True


def descends(slots: Sequence[int]) -> bool:
    """Return whether each slot is the one below the slot before it: nearly always those of one write, whose tail comes
    first."""
    descending = range(slots[0], slots[0] - len(slots), -1)
    return slots == descending if type(slots) is range else list(slots) == list(descending)


class SlotQueue:
    """One queue.

    Args:
        links: where its slots are linked.
        end: which of the queues over these links it is: -1, -2, and so on.
    """

    __slots__ = ("_count", "_cursors", "_end", "_links", "_newer", "_older")

    def __init__(self, links: SlotLinks, end: int = END) -> None:
        self._links = links
        self._older = links.older
        self._newer = links.newer
        self._cursors = links.cursors
        self._end = end
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def oldest(self) -> int:
        """The oldest slot; below zero if there is none."""
        return self._newer[self._end]

    @property
    def newest(self) -> int:
        """The newest slot; below zero if there is none."""
        return self._older[self._end]

    def newer(self, slot: int) -> int:
        """Return the next newer slot, below zero behind the newest; that of the end is the oldest."""
        return self._newer[slot]

    def older(self, slot: int) -> int:
        """Return the next older slot, below zero behind the oldest; that of the end is the newest."""
        return self._older[slot]

    def push(self, slot: int) -> None:
        """Add a slot as the newest."""
        self.put(slot, self._older[self._end])

    def push_all(self, slots: Sequence[int]) -> None:
        """Add slots as the newest, one after the other; written out, since every block that is written passes here."""
        if not slots:
            return
        if not descends(slots):
            self.push_array(np.array(slots))
            return
        first, last = slots[0], slots[-1]
        self._links.reserve(first)
        older, newer = self._older, self._newer
        own = array("i", np.arange(last, first + 1, dtype=np.int32).tobytes())
        assert newer[last : first + 1] == own
        newer[last + 1 : first + 1] = own[:-1]
        older[last:first] = own[1:]
        self._close_behind(first, last, len(slots))

    def push_array(self, slots: NDArray[np.int64]) -> None:
        """Do `push_all` with an array of one slot at least."""
        self._links.reserve(int(slots.max()))
        older, newer = np.frombuffer(self._older, np.int32), np.frombuffer(self._newer, np.int32)
        assert (newer[slots] == slots).all()
        newer[slots[:-1]], older[slots[1:]] = slots[1:], slots[:-1]
        self._close_behind(int(slots[0]), int(slots[-1]), len(slots))

    def _close_behind(self, first: int, last: int, count: int) -> None:
        """Put slots that are linked among themselves behind the newest."""
        older, newer, end = self._older, self._newer, self._end
        newest = older[end]
        older[first], newer[last] = newest, end
        newer[newest], older[end] = first, last
        self._count += count

    def put(self, slot: int, after: int) -> None:
        """Add a slot as the newer neighbour of `after`; of the end: as the oldest."""
        assert slot not in self._links
        self._links.reserve(slot)
        older, newer = self._older, self._newer
        behind = newer[after]
        older[slot], newer[slot] = after, behind
        newer[after] = older[behind] = slot
        self._count += 1

    def remove(self, slot: int) -> None:
        """Take a slot out."""
        assert slot in self._links
        if self._cursors:
            self._links.leave(slot)
        older, newer = self._older, self._newer
        before, after = older[slot], newer[slot]
        newer[before], older[after] = after, before
        older[slot] = newer[slot] = slot
        self._count -= 1

    def renew(self, slot: int) -> None:
        """Make a slot the newest."""
        older, newer, end = self._older, self._newer, self._end
        before, after = older[slot], newer[slot]
        assert after != slot
        if self._cursors:
            self._links.leave(slot)
        newer[before] = after
        older[after] = before
        newest = older[end]
        newer[newest] = older[end] = slot
        older[slot] = newest
        newer[slot] = end

    def renew_all(self, slots: Sequence[int]) -> None:
        """Make distinct slots the newest, one after the other. What stands together in this order already, as the
        blocks of a chain do from their first read on, is moved in one step: every read of a block passes here."""
        if self._cursors:
            for slot in slots:
                self.renew(slot)
            return
        first = 0
        for end in (*self._breaks(slots), len(slots)):
            self._renew_run(slots[first], slots[end - 1])
            first = end

    def _breaks(self, slots: Sequence[int]) -> list[int]:
        """Return the places of slots that do not stand behind the one before."""
        places = np.array(slots)
        after = np.frombuffer(self._newer, np.int32)[places[:-1]]
        breaks: list[int] = (np.flatnonzero(after != places[1:]) + 1).tolist()
        return breaks

    def _renew_run(self, first: int, last: int) -> None:
        older, newer, end = self._older, self._newer, self._end
        before, after = older[first], newer[last]
        assert after != last
        newer[before] = after
        older[after] = before
        newest = older[end]
        newer[newest], older[end] = first, last
        older[first], newer[last] = newest, end


# Policies whose order is one queue: they differ in where a write or a read puts a block.


class Ordered:
    """One queue of blocks in the order in which they are to be evicted, to which blocks come as the newest."""

    __slots__ = ("_links", "_queue")

    def __init__(self) -> None:
        self._links = SlotLinks()
        self._queue = SlotQueue(self._links)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def insert(self, slot: int, key: int) -> None:
        """Add a block as the newest."""
        self._queue.push(slot)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks, the last as the newest."""
        self._queue.push_all(slots)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before, as the newest."""
        self._queue.push(slot)

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks that were resident before, each as the newest."""
        self._queue.push_array(slots)

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out."""
        self._queue.remove(slot)

    def moved(self, slot: int, to: int) -> None:
        """Call the block in `slot` `to`."""
        self._links.move(slot, to)

    def victims(self) -> Iterator[int]:
        """Yield from the oldest to the newest, at most as many as there are now, so that touching cannot prolong it."""
        queue = self._queue
        cursor = self._links.open_cursor()
        try:
            for _ in range(len(queue)):
                slot = queue.newer(cursor.at)
                if slot < 0:
                    return
                cursor.stand_on(slot)
                yield slot
        finally:
            self._links.close_cursor(cursor)
