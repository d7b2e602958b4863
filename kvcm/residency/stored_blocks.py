"""Which blocks of an instance can be read from storages, and every change of that, in one order.

Events follow the state of the store, not its changes: a watch of the index names keys whose answer may be
another one, by whichever manager that was caused, and a look into the store decides. So repeated, late and superfluous
hints do no harm, two changes of a block may be published as one or none, and a block is never published twice as stored
without a removal in between. Where hints may be missing (a connection to the store was lost, storages came or went, the
manager starts) every block is compared once; and now and then in any case, since managers of the release before say
nothing of new blocks.

Invariant S1: once all hints are used, the known blocks are those that `GetCacheLocation` returns.
Invariant S2: the changes since the beginning, applied in their order, make the known blocks.

Rejected: to publish from the places that change blocks (a manager that is killed between the change and the event loses
it, and the events of several managers have no order); a log in the store (each write would pay for it).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import StorageView, compose_answer
from kvcm.model.errors import KvcmError
from kvcm.model.keys import key_hex, unmixed_array, unmixed_key
from kvcm.model.locations import event_hashes_of
from kvcm.residency.block_table import ABSENT, FIRST_VALUE, BlockTable, Keys, Values

__all__ = ["Blocks", "StoredBlocks", "StoredChange"]

_BATCH: Final = 1024
_MOST_HINTS: Final = 1 << 17  # some 10 MB; beyond, all blocks are compared
_FEWEST_ROWS: Final = 1024
_NO_KEY: Final = 0  # to ask the store for; it may have it
_ATTEMPTS: Final = 3  # to read a single block, while the store answers
_log = structlog.get_logger("kvcm.residency")

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
    """Blocks whose state changed; the removals come first, since a block whose event hash is another one is in both.

    Attributes:
        stored: can be read now, and could not before.
        removed: cannot be read any more.
    """

    stored: Blocks
    removed: Blocks


class _KnownBlocks:
    """Blocks and their event hashes: 30 to 50 bytes for each."""

    def __init__(self) -> None:
        self._rows_by_key = BlockTable()
        self._hashes = np.zeros(_FEWEST_ROWS, np.int64)
        self._free = np.arange(_FEWEST_ROWS, dtype=np.int32)[::-1].copy()  # a stack
        self._free_count = _FEWEST_ROWS

    @property
    def count(self) -> int:
        return self._rows_by_key.count

    @property
    def memory_bytes(self) -> int:
        return self._rows_by_key.memory_bytes + self._hashes.nbytes + self._free.nbytes

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which keys are there, and the hash of each; 0 where it is not."""
        values = self._rows_by_key.find(keys).astype(np.int64)
        is_there = values != ABSENT
        hashes = np.zeros(len(keys), np.int64)
        hashes[is_there] = self._hashes[values[is_there] - FIRST_VALUE]
        return is_there, hashes

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
            before = len(self._hashes)
            size = before + before // 2
            hashes, free = np.zeros(size, np.int64), np.empty(size, np.int32)
            hashes[:before], free[: self._free_count] = self._hashes, self._free[: self._free_count]
            end = self._free_count + size - before
            free[self._free_count : end] = np.arange(before, size, dtype=np.int32)[::-1]
            self._hashes, self._free, self._free_count = hashes, free, end
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].astype(np.int64)


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
        self._batch: Sequence[int] | None = None  # of the pass, that is to be compared next
        self._has_maintenance = False
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
        return not self._is_pass_due and self._pass is None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._hints) or not self.is_complete or self._has_maintenance

    @property
    def _is_pass_due(self) -> bool:
        return self._is_unknown or self._generation != self._view.generation

    def follow(self, index: MetaIndex) -> None:
        """Go on with another index: the blocks are in another store, or the instance was registered again."""
        if index is not self._index:
            self._index.watch(None)
            self._index, self._pass, self._batch = index, None, None
            index.watch(self)
            self.all_changed()

    def changed(self, keys: Iterable[int]) -> None:
        """Compare these blocks, by mixed keys."""
        self._hints.update(dict.fromkeys(keys))
        if len(self._hints) > _MOST_HINTS:  # the store is away, or slow
            self._hints.clear()
            self._is_unknown = True
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
        keys = keys[np.argsort(keys.view(np.uint64))]
        for start in range(0, len(keys), _BATCH):
            self._publish(_no_numbers(), _no_numbers(), keys[start : start + _BATCH])

    async def step(self) -> None:
        """Compare some blocks with the store: those of hints, and the next ones of a pass. Neither waits for the other.

        Raises:
            KvcmError: the store cannot be asked; they are compared with a later call.
        """
        if self._pass is None and self._is_pass_due:  # a pass goes on to its end, so that there is one
            self._is_unknown, self._generation, self._pass = False, self._view.generation, self._all_batches()
        if self._hints:
            await self._compare_hints()
        if self._pass is not None:
            await self._compare_next(self._pass)
        self._has_maintenance = self._known.maintain()

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
        """Compare the next blocks of a pass; after a failure of the store the same ones."""
        if self._batch is None:
            try:
                self._batch = await anext(batches, None)
            except BaseException:  # an iterator that failed has ended
                self._is_unknown, self._pass = True, None
                raise
        if self._batch is None:
            self._pass = None
            return
        await self._compare(self._batch)
        self._batch = None

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
        answers = await self._read(keys)
        distinct = np.unique(np.array(keys, np.int64).view(np.uint64)).view(np.int64)
        chunks = [answers.get(key) for key in distinct.tolist()]
        is_there = np.array([chunk is not None for chunk in chunks], bool)
        hashes = np.zeros(len(distinct), np.int64)
        hashes[is_there] = event_hashes_of([chunk for chunk in chunks if chunk is not None])
        was_there, known_hashes = self._known.find(distinct)
        is_other = is_there & was_there & (hashes != known_hashes)  # written again, by a writer that names it so
        is_new, is_gone = is_there & ~was_there | is_other, was_there & ~is_there | is_other
        self._publish(distinct[is_new], hashes[is_new], distinct[is_gone])

    async def _read(self, keys: Sequence[int], attempts: int = _ATTEMPTS) -> Mapping[int, bytes]:
        """Return the answers of the blocks that can be read."""
        try:
            return await self._answers(keys)
        except KvcmError as error:
            await self._index.get([_NO_KEY])  # raises where the store cannot be asked: then nothing is known
            if len(keys) > 1:
                middle = len(keys) // 2
                return {**await self._read(keys[:middle]), **await self._read(keys[middle:])}
            if attempts > 1:
                return await self._read(keys, attempts - 1)
            # The record is damaged, or another release's: no lookup returns it.
            _log.warning("storage_events_block_unreadable", key=key_hex(unmixed_key(keys[0])), reason=str(error))
            return {}

    async def _answers(self, keys: Sequence[int]) -> Mapping[int, bytes]:
        # Not by way of the search cache: a pass would take the place of blocks that engines ask for.
        records = await self._index.get(keys)
        composed = [None if record is None else compose_answer(record, self._view) for record in records]
        return {key: chunk for key, chunk in zip(keys, composed, strict=True) if chunk is not None}

    def _publish(self, stored: Keys, hashes: NDArray[np.int64], removed: Keys) -> None:
        if not len(stored) and not len(removed):
            return
        removed_hashes = self._known.remove(removed)
        self._known.add(stored, hashes)
        self._on_change(StoredChange(_blocks(stored, hashes), _blocks(removed, removed_hashes)))


def _blocks(mixed_keys: Keys, hashes: NDArray[np.int64]) -> Blocks:
    return Blocks(unmixed_array(mixed_keys), hashes)


def _no_numbers() -> NDArray[np.int64]:
    return np.empty(0, np.int64)
