"""Which blocks of an instance can be read from storages, and every change of that, in one order.

Events follow the state of the store, not its changes: a watch of the index names keys whose answer may be
another one, by whichever manager that was caused, and a look into the store decides. So repeated, late and superfluous
hints do no harm, two changes of a block may be published as one or none, and a block is never published twice as stored
without a removal in between. Where hints may be missing (a connection to the store was lost, storages came or went, the
manager starts) every block is compared once.

Invariant S1: once all hints are used, the known blocks are those that `GetCacheLocation` returns.
Invariant S2: the changes since the beginning, applied in their order, make the known blocks.

Rejected: to publish from the places that change blocks (a manager that is killed between the change and the event loses
it, and the events of several managers have no order); a log in the store (each write would pay for it).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import StorageView, compose_answer
from kvcm.model.errors import KvcmError
from kvcm.model.keys import unmixed_array
from kvcm.model.locations import event_hashes_of
from kvcm.residency.block_table import ABSENT, FIRST_VALUE, BlockTable, Keys, Values

__all__ = ["Blocks", "StoredBlocks", "StoredChange"]

_BATCH: Final = 1024
_FEWEST_ROWS: Final = 1024

Rows = NDArray[np.int64]


class Blocks(NamedTuple):
    """Some blocks.

    Attributes:
        keys: their block keys as engines know them.
        event_hashes: the 64 bits by which events of the engine name each, as signed numbers; 0 where nobody said.
    """

    keys: Keys
    event_hashes: NDArray[np.int64]


class StoredChange(NamedTuple):
    """Blocks whose state changed.

    Attributes:
        stored: can be read now, and could not before.
        removed: cannot be read any more.
    """

    stored: Blocks
    removed: Blocks


class _KnownBlocks:
    """Blocks and their event hashes: 25 to 40 bytes for each."""

    def __init__(self) -> None:
        self._rows_by_key = BlockTable()
        self._hashes = np.zeros(_FEWEST_ROWS, np.int64)
        self._free = np.arange(_FEWEST_ROWS)[::-1].copy()  # a stack
        self._free_count = _FEWEST_ROWS

    @property
    def count(self) -> int:
        return self._rows_by_key.count

    @property
    def memory_bytes(self) -> int:
        return self._rows_by_key.memory_bytes + self._hashes.nbytes + self._free.nbytes

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._rows_by_key.find(keys) != ABSENT
        return found

    def add(self, keys: Keys, hashes: NDArray[np.int64]) -> None:
        """Add distinct keys that are not there, a few thousand at most, ascending by their bits without sign."""
        rows = self._take_rows(len(keys))
        self._hashes[rows] = hashes
        values, done = (rows + FIRST_VALUE).astype(np.uint32), 0

        def transition(before: Values) -> Values:
            nonlocal done  # the table takes the keys in their order, some at a time
            done += len(before)
            return values[done - len(before) : done]

        self._rows_by_key.update(keys, transition, inserts=True)

    def remove(self, keys: Keys) -> NDArray[np.int64]:
        """Remove distinct keys that are there, and return their hashes."""
        rows = self._rows_by_key.find(keys).astype(np.int64) - FIRST_VALUE
        self._rows_by_key.update(keys, lambda before: np.full(len(before), ABSENT, np.uint32), inserts=False)
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)
        return self._hashes[rows]

    def all(self) -> tuple[Keys, NDArray[np.int64]]:
        keys, values = self._rows_by_key.entries()
        return keys, self._hashes[values.astype(np.int64) - FIRST_VALUE]

    def maintain(self) -> bool:
        """Do some work that makes the table smaller; return whether there is more."""
        return self._rows_by_key.maintain()

    def _take_rows(self, count: int) -> Rows:
        while self._free_count < count:
            size = len(self._hashes)
            self._hashes = np.concatenate([self._hashes, np.zeros(size, np.int64)])
            free = np.empty(2 * size, np.int64)
            free[: self._free_count] = self._free[: self._free_count]
            free[self._free_count : self._free_count + size] = np.arange(size, 2 * size)[::-1]
            self._free, self._free_count = free, self._free_count + size
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()


class StoredBlocks:
    """Follows the blocks of one index.

    Args:
        index: of the instance; this becomes its only watch.
        view: which storages can be read.
        on_change: receives every change, in order; must not raise.
        wake: called when there is work for `step`.
    """

    def __init__(
        self,
        index: MetaIndex,
        view: StorageView,
        on_change: Callable[[StoredChange], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._index = index
        self._view = view
        self._on_change = on_change
        self._wake = wake
        self._known = _KnownBlocks()
        self._hints: dict[int, None] = {}  # in the order in which they came
        self._pass: AsyncIterator[Sequence[int]] | None = None  # through all blocks
        self._is_unknown = True
        self._generation = view.generation
        index.watch(self)

    @property
    def count(self) -> int:
        """Blocks that can be read."""
        return self._known.count

    @property
    def memory_bytes(self) -> int:
        """Memory that knowing them takes."""
        return self._known.memory_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every block was compared since hints were missing last; some hints may be waiting."""
        return not self._is_unknown and self._pass is None and self._generation == self._view.generation

    def follow(self, index: MetaIndex) -> None:
        """Go on with another index: the blocks are in another store, or the instance was registered again."""
        if index is not self._index:
            self._index.watch(None)
            self._index = index
            index.watch(self)
            self.all_changed()

    def changed(self, keys: Iterable[int]) -> None:
        """Compare these blocks, by mixed keys."""
        self._hints.update(dict.fromkeys(keys))
        self._wake()

    def all_changed(self) -> None:
        """Compare every block."""
        self._is_unknown = True
        self._wake()

    def snapshot(self) -> Blocks:
        """Return the known blocks: a copy."""
        return _blocks(*self._known.all())

    def close(self) -> None:
        """Follow no longer: the instance is gone, and so are its blocks for all who follow them."""
        self._index.watch(None)
        keys, _ = self._known.all()
        for start in range(0, len(keys), _BATCH):
            self._publish(_no_keys(), _no_keys(), keys[start : start + _BATCH])

    async def step(self) -> bool:
        """Compare some blocks with the store.

        Returns:
            Whether there are more.

        Raises:
            KvcmError: the store cannot be asked; they are compared with a later call.
        """
        if self._is_unknown or self._generation != self._view.generation:
            self._is_unknown, self._generation, self._pass = False, self._view.generation, self._all_batches()
        if self._hints:
            await self._compare_hints()
        elif self._pass is not None:
            await self._compare_next(self._pass)
        else:
            return self._known.maintain()
        return True

    async def _compare_hints(self) -> None:
        keys = list(islice(self._hints, _BATCH))
        for key in keys:
            del self._hints[key]  # before it is read: a change while that is under way comes again
        try:
            await self._compare(keys)
        except BaseException:
            self._hints.update(dict.fromkeys(keys))
            raise

    async def _compare_next(self, batches: AsyncIterator[Sequence[int]]) -> None:
        try:
            keys = await anext(batches, None)
            if keys is not None:
                await self._compare(keys)
            elif self._pass is batches:
                self._pass = None
        except KvcmError:
            self._is_unknown = True
            raise

    async def _all_batches(self) -> AsyncIterator[Sequence[int]]:
        """Yield the blocks that are known, and then those that are in the index."""
        known, _ = self._known.all()
        for start in range(0, len(known), _BATCH):
            yield known[start : start + _BATCH].tolist()
        async for keys in self._index.scan(_BATCH):
            for start in range(0, len(keys), _BATCH):
                yield keys[start : start + _BATCH]

    async def _compare(self, keys: Sequence[int]) -> None:
        """Read blocks, and publish which of them changed."""
        # Not by way of the search cache: a pass would take the place of blocks that engines ask for.
        records = await self._index.get(keys)
        answers = {
            key: compose_answer(record, self._view)
            for key, record in zip(keys, records, strict=True)
            if record is not None
        }
        distinct = np.unique(np.array(keys, np.int64).view(np.uint64)).view(np.int64)
        chunks = [answers.get(key) for key in distinct.tolist()]
        is_there = np.array([chunk is not None for chunk in chunks], bool)
        was_there = self._known.contains(distinct)
        is_new = is_there & ~was_there
        new_chunks = [chunk for chunk, new in zip(chunks, is_new.tolist(), strict=True) if new and chunk is not None]
        self._publish(
            distinct[is_new], np.array(event_hashes_of(new_chunks), np.int64), distinct[was_there & ~is_there]
        )

    def _publish(self, stored: Keys, hashes: NDArray[np.int64], removed: Keys) -> None:
        if not len(stored) and not len(removed):
            return
        removed_hashes = self._known.remove(removed)
        self._known.add(stored, hashes)
        self._on_change(StoredChange(_blocks(stored, hashes), _blocks(removed, removed_hashes)))


def _blocks(mixed_keys: Keys, hashes: NDArray[np.int64]) -> Blocks:
    return Blocks(unmixed_array(mixed_keys), hashes)


def _no_keys() -> Keys:
    return np.empty(0, np.int64)
