"""Search cache: what a match returns for a block, encoded once and kept until the block or a storage changes.

Invariants:

* An entry is the answer for the record that the store has, or had a moment ago: every change of a record, here or by
  another manager, drops its entry (design.md decision 4). Only resident blocks have one: other managers say nothing of
  changes of the others.
* A read that overlaps a change never puts the old record back. A read in flight learns of every key that changes, and
  what it read of those does not enter the cache.
* Bounded: entries live in two generations. A hit in the old one moves the entry to the young one; when the young ones
  of all caches hold half of the budget, they become the old ones, and the old entries without a hit are dropped.

Rejected: strict LRU, where a lookup costs half as much again as a bare dict lookup (decision 19); one epoch for all
keys, which on a busy cluster would keep nothing; a placeholder per key that is read, which costs each read of a
thousand keys a tenth of a millisecond.

An answer of a block with one location is that location's own chunk, so in front of a backend that keeps its records in
this process the cache holds references, no copies, and needs no bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Final, Generic, Protocol, TypeVar, cast
from weakref import WeakSet

from kvcm.index.backends.backend import (
    IndexBackend,
    SharedBackend,
    UniformRun,
    is_resident,
    measure_runs,
    read_answers,
    read_records,
    read_runs,
)
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, decode_chunk, encode_chunk
from kvcm.telemetry.metrics import Measures, current_measures, measure

__all__ = [
    "AnswerCache",
    "AnswerWatch",
    "CacheBudget",
    "ChunkCache",
    "ReadInFlight",
    "SearchCache",
    "StorageView",
    "compose_answer",
    "filter_specs",
]

# Answers: what a match returns for a block.
#
# One entry per key (design.md decision 14): for each spec the fastest available serving location, ties to the first,
# specs joined, `type` of the first. Nearly every block has one location, whose own chunk is the answer: no second copy
# exists.


class StorageView(Protocol):
    """Which storages can be read, and how fast each is."""

    @property
    def generation(self) -> int:
        """Grows with every change of any storage."""

    def rank(self, storage: str) -> int | None:
        """Return the speed rank of a storage (lower is faster), None while it is not available."""


def compose_answer(record: BlockRecord, view: StorageView) -> bytes | None:
    """Return the encoded answer for a block, None when nothing of it can be read (invariant 1)."""
    if len(record.locations) == 1:  # nearly always; on the hot path of a match that the search cache does not know
        (only,) = record.locations
        return only.chunk if only.status is LocationStatus.SERVING and view.rank(only.storage) is not None else None
    readable = [
        (rank, location)
        for location in record.locations
        if location.status is LocationStatus.SERVING and (rank := view.rank(location.storage)) is not None
    ]
    if not readable:
        return None
    if len(readable) == 1:
        return readable[0][1].chunk
    return _join([location for _, location in sorted(readable, key=lambda ranked: ranked[0])])


def _join(fastest_first: Sequence[Location]) -> bytes:
    specs: dict[str, SpecUri] = {}
    event_hash = 0
    for location in fastest_first:
        decoded = decode_chunk(location.chunk)
        event_hash = event_hash or decoded.event_hash  # one writer may have given it, and another not
        for spec in decoded.specs:
            specs.setdefault(spec.name, spec)
    return encode_chunk(fastest_first[0].storage_type, len(specs), specs.values(), event_hash)


def filter_specs(chunk: bytes, spec_names: frozenset[str]) -> bytes:
    """Return the answer with only the named specs; `spec_size` still counts all of the location's (wire.md 5.3).

    The event hash stays: it is the block's, whatever parts of it are asked for. Twelve bytes of the answer, and the
    encoding happens once per location.
    """
    decoded = decode_chunk(chunk)
    kept = (spec for spec in decoded.specs if spec.name in spec_names)
    return encode_chunk(decoded.storage_type, decoded.spec_size, kept, decoded.event_hash)


_ENTRY_BYTES = 150  # dict slot, key, and the headers of chunk and key
Cached = TypeVar("Cached", bound=Sized)


class CacheBudget:
    """Bytes that all search caches of a process may hold together, and their hits and misses.

    Args:
        capacity_bytes: None is no bound.
        is_coherent: whether invalidations by other managers of the store of that name arrive right now; while they do
            not, nothing is kept of it.
    """

    def __init__(self, capacity_bytes: int | None = None, is_coherent: Callable[[str], bool] = lambda _: True) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_coherent = is_coherent
        self.hits = 0
        self.misses = 0
        self._young_bytes = self._old_bytes = 0
        self._caches: WeakSet[SearchCache[Any]] = WeakSet()

    def join(self, cache: SearchCache[Any]) -> None:
        """Let a cache share the budget."""
        self._caches.add(cache)

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the entries of all caches take, about; those that left early count until their turn."""
        return self._young_bytes + self._old_bytes + _ENTRY_BYTES * sum(cache.reference_count for cache in self._caches)

    def spend(self, size_bytes: int) -> None:
        """Count an entry that was added. What leaves early is not given back: the next turn makes up for it."""
        self._young_bytes += size_bytes + _ENTRY_BYTES
        if self.capacity_bytes is not None and self.capacity_bytes < 2 * self._young_bytes:
            self._young_bytes, self._old_bytes = 0, self._young_bytes
            for cache in self._caches:
                cache.age()

    def try_spend(self, size_bytes: int, count: int) -> bool:
        """Count so many entries that were added, unless a generation ends with one of them: then count none."""
        young_bytes = self._young_bytes + size_bytes + count * _ENTRY_BYTES
        if self.capacity_bytes is not None and self.capacity_bytes < 2 * young_bytes:
            return False
        self._young_bytes = young_bytes
        return True


@dataclass(slots=True, eq=False)
class ReadInFlight:
    """A read of records that is under way.

    Attributes:
        keys: that are read.
        changed: keys that changed since it began, of whatever read: what is read of them is not kept.
    """

    keys: Sequence[int]
    changed: set[int] = field(default_factory=set)


class SearchCache(Generic[Cached]):
    """Answers by key. A key that is absent is unknown, not a miss: ask the records.

    Args:
        view: which storages can be read; a change of it empties the cache.
        budget: bytes to share with other caches.
        compose: from a record to the cached value, None for none: `compose_answer`, for answers.
        weigh: returns the bytes that a kept value takes.
        is_bounded: false in front of records of this process, to which the cache only refers.
        store: name of the store of the records.
    """

    def __init__(
        self,
        view: StorageView,
        budget: CacheBudget,
        compose: Callable[[BlockRecord, StorageView], Cached | None],
        weigh: Callable[[Cached], int] = len,
        *,
        is_bounded: bool = True,
        store: str = "",
    ) -> None:
        self._view = view
        self._store = store
        self._compose = compose
        self._weigh = weigh
        self._generation = view.generation
        self._budget = budget
        self._is_bounded = is_bounded and budget.capacity_bytes is not None
        self._young: dict[int, Cached] = {}
        self._old: dict[int, Cached] = {}
        self._reads: set[ReadInFlight] = set()
        budget.join(self)

    @property
    def reference_count(self) -> int:
        """Return how many entries refer to records of this process, which the budget does not count."""
        return 0 if self._is_bounded else len(self._young) + len(self._old)

    @property
    def holds_any(self) -> bool:
        """Whether an answer is kept, or read right now."""
        return bool(self._young or self._old or self._reads)

    def holds(self, key: int) -> bool:
        """Return whether the answer of a key is kept; it may be one of storages as they were."""
        return key in self._young or key in self._old

    def lookup(self, keys: Sequence[int]) -> list[Cached | None]:
        """Return the answers that are known, None for the others."""
        if self._generation != self._view.generation:
            self._sync_with_view()
        found: list[Cached | None] = list(map(self._young.get, keys))
        if self._old and None in found:
            for position, answer in enumerate(found):
                if answer is None and (old := self._old.pop(keys[position], None)) is not None:
                    found[position] = old
                    self._keep(keys[position], old)
        return found

    def store(self, key: int, record: BlockRecord | None) -> Cached | None:
        """Keep the answer for a record that is current right now, and return it."""
        self._note_changed((key,))
        answer = self._compose(record, self._view) if record is not None else None
        if answer is None:
            self._young.pop(key, None)
            self._old.pop(key, None)
        else:
            self._keep(key, answer)
        return answer

    def store_all(self, keys: Sequence[int], records: Sequence[BlockRecord | None]) -> None:
        """Do `store` for many keys."""
        answers = [None if record is None else self._compose(record, self._view) for record in records]
        if None in answers:
            self.forget([key for key, answer in zip(keys, answers, strict=True) if answer is None])
            known = [(key, answer) for key, answer in zip(keys, answers, strict=True) if answer is not None]
            keys, answers = [key for key, _ in known], [answer for _, answer in known]
        self.store_answers(keys, cast("list[Cached]", answers))

    def store_answers(self, keys: Sequence[int], answers: Sequence[Cached]) -> None:
        """Keep the answers for records that are current right now."""
        self._note_changed(keys)
        if self._is_bounded:
            self._keep_all(dict(zip(keys, answers, strict=True)))
        else:
            self._young.update(zip(keys, answers, strict=True))

    def add_answers(self, keys: Sequence[int], answers: Sequence[Cached | None]) -> None:
        """Keep the answers of keys that the cache does not know, as far as there are any; more keys may follow."""
        if None not in answers:
            self.store_answers(keys[: len(answers)], cast("Sequence[Cached]", answers))
            return
        known = [(key, answer) for key, answer in zip(keys, answers, strict=False) if answer is not None]
        self.store_answers([key for key, _ in known], [answer for _, answer in known])

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the answers of keys that changed, and keep nothing of reads that are under way."""
        keys = list(keys)
        self._note_changed(keys)
        for table in (self._young, self._old):
            if table and not table.keys().isdisjoint(keys):
                for key in keys:
                    table.pop(key, None)

    def _note_changed(self, keys: Iterable[int]) -> None:
        for read in self._reads:
            read.changed.update(keys)

    def clear(self) -> None:
        """Drop everything, reads under way included: changes may have been missed."""
        self._young.clear()
        self._old.clear()
        self._reads.clear()

    def age(self) -> None:
        """Begin a new generation."""
        self._old, self._young = self._young, {}

    def begin_read(self, keys: Sequence[int]) -> ReadInFlight:
        """Note from now on what changes of records that are about to be read."""
        self._sync_with_view()
        read = ReadInFlight(keys)
        self._reads.add(read)
        return read

    def end_read(self, read: ReadInFlight, records: Sequence[BlockRecord | None]) -> list[Cached | None]:
        """Return the answers for the records of a read, and keep those that did not change meanwhile."""
        self._sync_with_view()
        answers = [self._compose(record, self._view) if record is not None else None for record in records]
        return self.end_read_of(read, answers)

    def end_read_of(self, read: ReadInFlight, answers: Sequence[Cached | None]) -> list[Cached | None]:
        """Do `end_read` with the answers for the first records, as the view is now."""
        self._sync_with_view()
        if read in self._reads:  # else any record may have changed
            self._reads.discard(read)
            found = dict(zip(read.keys, answers, strict=False))
            for key in read.changed:
                found.pop(key, None)
            if None in answers:
                found = {key: answer for key, answer in found.items() if answer is not None}
            self._keep_all(cast("dict[int, Cached]", found))
        return list(answers)

    def abandon(self, read: ReadInFlight) -> None:
        """End a read that failed."""
        self._reads.discard(read)

    def _keep_all(self, answers: Mapping[int, Cached]) -> None:
        if not self._is_bounded:
            self._young.update(answers)
        elif self._budget.is_coherent(self._store):
            if self._budget.try_spend(sum(map(self._weigh, answers.values())), len(answers)):
                self._young.update(answers)
                return
            for key, answer in answers.items():
                self._keep(key, answer)

    def _keep(self, key: int, answer: Cached) -> None:
        if not self._is_bounded:
            self._young[key] = answer
        elif self._budget.is_coherent(self._store):
            self._young[key] = answer
            self._budget.spend(self._weigh(answer))

    def _sync_with_view(self) -> None:
        """Empty the cache after a change of the storages that can be read."""
        if self._generation != self._view.generation:
            self._generation = self._view.generation
            self.clear()


# Answers for callers on nodes with memory of their own.
#
# Memory of a node is readable on that node alone, so the same block has another answer there. Every request composes
# its answers from records. In this process that costs half a microsecond per block; records of a shared store are
# cached, once for all nodes.
#
# Rejected: a search cache per node. Every change of a block would have to invalidate each of them, so the cost of a
# write would grow with the number of nodes.

_FIRST_WINDOW = 16  # records a prefix match reads first: nearly always it ends there
_WINDOW = 1024
_RECORD_BYTES = 300
_LOCATION_BYTES = 600


class _NodeAnswers:
    """Composes answers of one index.

    Args:
        backend: where the records live.
        budget: bytes of the records that are kept, shared with other caches.
        store: name of the store of the records.
    """

    def __init__(self, backend: IndexBackend, budget: CacheBudget, store: str) -> None:
        self._backend = backend
        self._budget = budget
        self._records: SearchCache[BlockRecord] = SearchCache(_AnyRank(), budget, _itself, _size_of, store=store)

    async def answers(self, keys: Sequence[int], view: StorageView, *, stop_at_miss: bool) -> list[bytes | None]:
        """Do `AnswerCache.answers` for callers with this view of the storages."""
        compose = partial(compose_answer, view=view)
        found: list[bytes | None] = []
        window = _FIRST_WINDOW if stop_at_miss else len(keys)
        while len(found) < len(keys):
            batch = keys[len(found) : len(found) + window]
            if self._backend.awaits:
                answers = [record and compose(record) for record in await self._read(batch)]
            else:
                answers = read_answers(self._backend, batch, compose, stop_at_miss=stop_at_miss)
            if stop_at_miss and (miss := _next_none(answers, 0, len(answers))) >= 0:
                return found + answers[:miss]
            found += answers
            if len(answers) < len(batch):
                return found
            window = _WINDOW
        return found

    async def _read(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        records = self._records.lookup(keys)
        unknown = [position for position, record in enumerate(records) if record is None]
        self._budget.hits += len(keys) - len(unknown)
        self._budget.misses += len(unknown)
        measure("meta_indexer.search_cache_hit_count", len(keys) - len(unknown))
        measure("meta_indexer.search_cache_miss_count", len(unknown))
        for position, record in zip(unknown, await self._fetch([keys[i] for i in unknown]), strict=True):
            records[position] = record
        return records

    async def _fetch(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        if not keys:
            return []
        read = self._records.begin_read(keys)
        try:
            return self._records.end_read(read, await read_records(self._backend, keys))
        except BaseException:
            self._records.abandon(read)
            raise

    @property
    def holds_any(self) -> bool:
        """Whether a record is kept, or read right now."""
        return self._records.holds_any

    def holds(self, key: int) -> bool:
        """Return whether the record of a key is kept."""
        return self._records.holds(key)

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the records of keys that changed, and keep nothing of reads that are under way."""
        self._records.forget(keys)

    def clear(self) -> None:
        """Drop everything, reads under way included: changes may have been missed."""
        self._records.clear()


class _AnyRank:
    """Records are the same whatever storages are available."""

    generation = 0

    def rank(self, _storage: str) -> int | None:
        return 0


def _itself(record: BlockRecord, _view: StorageView) -> BlockRecord | None:
    return record if is_resident(record) else None


def _size_of(record: BlockRecord) -> int:
    chunks = sum(len(location.chunk) for location in record.locations)
    return _RECORD_BYTES + _LOCATION_BYTES * len(record.locations) + chunks


# Changes of the answers, for those that follow all of them.


class AnswerWatch(Protocol):
    """Learns which answers of an index may be others. A read that begins afterwards returns the new ones."""

    def changed(self, keys: Iterable[int]) -> None:
        """Those of these keys."""

    def all_changed(self) -> None:
        """Any."""


class _NoWatch:
    def changed(self, _keys: Iterable[int]) -> None:
        pass

    def all_changed(self) -> None:
        pass


_NO_WATCH: Final = _NoWatch()


# The answers of one index, composed once and looked up afterwards.
#
# Large requests give way to others: an answer that is not known yet is composed from its record, and after a thousand
# of those the event loop gets a turn.


class AnswerCache:
    """Answers of one index, and their invalidation.

    Args:
        backend: where the records live.
        view: which storages can be read.
        budget: bytes of the search cache, shared with other indexes.
        store: name of the store of the records.
    """

    def __init__(self, backend: IndexBackend, view: StorageView, budget: CacheBudget, store: str = "") -> None:
        self._backend = backend
        self._view = view
        self._budget = budget
        self._compose = partial(compose_answer, view=view)
        self._cache = SearchCache(view, budget, compose_answer, is_bounded=backend.is_shared, store=store)
        self._on_nodes = _NodeAnswers(backend, budget, store)
        self._watch: AnswerWatch = _NO_WATCH

    def watch(self, watch: AnswerWatch | None) -> None:
        """Report changes to one watch, and to no other any more; None ends that. Changes of the storages that can be
        read are not reported."""
        self._watch = watch if watch is not None else _NO_WATCH

    async def answers(
        self, keys: Sequence[int], *, stop_at_miss: bool = False, view: StorageView | None = None
    ) -> list[bytes | None]:
        """Return the encoded answer of every key, None where nothing can be read.

        Args:
            keys: block keys, in request order.
            stop_at_miss: return only the answers before the first miss.
            view: which storages the caller can read; None is the index's own view.
        """
        measures = current_measures()
        begin_ns = time.perf_counter_ns() if measures is not None else 0
        if view is not None and view is not self._view:
            on_node = await self._on_nodes.answers(keys, view, stop_at_miss=stop_at_miss)
            _count_query(measures, begin_ns, len(keys), 0, 0)
            return on_node
        found = self._cache.lookup(keys)
        if all(found):  # no answer is empty; `all` is three times as fast as `in`
            self._budget.hits += len(found)
            _count_query(measures, begin_ns, len(keys), len(found), 0)
            return found
        hits = len(found) - found.count(None)
        self._budget.hits += hits
        misses = await self._read_unknown(found, keys, stop_at_miss=stop_at_miss)
        self._budget.misses += misses
        _count_query(measures, begin_ns, len(keys), hits, misses)
        return found

    async def _read_unknown(self, found: list[bytes | None], keys: Sequence[int], *, stop_at_miss: bool) -> int:
        """Fill the answers that are unknown, and with `stop_at_miss` end at a miss; return how many were read."""
        position, read_count = found.index(None), 0
        window = self._first_window(len(keys), stop_at_miss=stop_at_miss)
        while position >= 0:
            # Unknown to the cache: a miss nearly always. A prefix match asks for a few records before it asks for many,
            # unless the store itself ends the read at a miss.
            end = min(position + window, len(found))
            if found[position:end].count(None) == end - position:  # nearly always: nothing is known from there on
                answers = await self._fill(keys[position:end], stop_at_miss=stop_at_miss)
                found[position : position + len(answers)] = answers
                read_count += min(len(answers) + 1, end - position)
            else:
                unknown = list(islice((i for i in range(position, len(found)) if found[i] is None), window))
                answers = await self._fill([keys[i] for i in unknown], stop_at_miss=stop_at_miss)
                for i, answer in zip(unknown, answers, strict=False):
                    found[i] = answer
                read_count, end = read_count + min(len(answers) + 1, len(unknown)), unknown[-1] + 1
            if stop_at_miss and (miss := _next_none(found, position, end)) >= 0:
                del found[miss:]
                break
            position = _next_none(found, end, len(found))
            if position >= 0 and window >= _WINDOW:
                await asyncio.sleep(0)
            window = max(window, _WINDOW)
        return read_count

    def _first_window(self, count: int, *, stop_at_miss: bool) -> int:
        if stop_at_miss:
            ends_itself = self._backend.is_shared and cast("SharedBackend", self._backend).ends_at_miss
            return _WINDOW if ends_itself else _FIRST_WINDOW
        return count if self._backend.awaits else _WINDOW  # a store is asked in few calls, and gives way itself

    async def _fill(self, keys: Sequence[int], *, stop_at_miss: bool) -> Sequence[bytes | None]:
        """Return the answers that are not kept, and keep them; with `stop_at_miss` those before the first None do."""
        if not self._backend.awaits:
            answers = read_answers(self._backend, keys, self._compose, stop_at_miss=stop_at_miss)
            if answers:
                self._cache.add_answers(keys, answers)
            return answers
        read = self._cache.begin_read(keys)
        try:
            if not self._backend.is_shared:
                return self._cache.end_read(read, await read_records(self._backend, keys))
            runs, records = await read_runs(cast("SharedBackend", self._backend), keys, stop_at_miss=stop_at_miss)
            composed = self._composed(keys, runs, records, stop_at_miss=stop_at_miss)
            read_keys = keys[: len(composed) + 1]
            measure_runs(read_keys, runs, records, all_found=len(read_keys) == len(composed) and None not in composed)
            return self._cache.end_read_of(read, composed)
        except BaseException:
            self._cache.abandon(read)
            raise

    def _composed(
        self,
        keys: Sequence[int],
        runs: Sequence[UniformRun],
        records: Mapping[int, BlockRecord],
        *,
        stop_at_miss: bool,
    ) -> Sequence[bytes | None]:
        """Return the answers for blocks; with `stop_at_miss` those before the first None do. That of a block with one
        location is its chunk."""
        serving = [run for run in runs if self._serves(run.location)]
        blocks = list(chain.from_iterable([run.keys for run in serving]))
        if stop_at_miss and not blocks and not records:
            return ()
        if not records and keys[0] in blocks:
            begin = blocks.index(keys[0])
            found = blocks[begin : begin + len(keys)]
            # Mostly they are requested as they lie in the runs: no dictionary is needed. A request may also repeat a
            # block, or go back to one before the first.
            if found == keys or (stop_at_miss and found == keys[: len(found)] and keys[len(found)] not in blocks):
                return list(chain.from_iterable([run.chunks for run in serving]))[begin : begin + len(found)]
        answers = {key: compose_answer(record, self._view) for key, record in records.items()}
        for run in serving:
            answers.update(zip(run.keys, run.chunks, strict=True))
        return list(map(answers.get, keys))

    def _serves(self, location: Location) -> bool:
        """Return whether a block with this location only has an answer, whatever its chunk."""
        return compose_answer(BlockRecord(None, 0, (location,)), self._view) is not None

    @property
    def holds_any(self) -> bool:
        """Whether an answer is kept, or read right now, or changes are reported."""
        return self._cache.holds_any or self._on_nodes.holds_any or self._watch is not _NO_WATCH

    def holds(self, key: int) -> bool:
        """Return whether something is kept of a block: then there was one a moment ago."""
        return self._cache.holds(key) or self._on_nodes.holds(key)

    def forget(self, keys: Sequence[int]) -> None:
        """The records of these keys changed, or may have."""
        self._watch.changed(keys)
        self._cache.forget(keys)
        if self._backend.awaits:
            self._on_nodes.forget(keys)

    def clear(self) -> None:
        """Any record may have changed."""
        self._watch.all_changed()
        self._cache.clear()
        self._on_nodes.clear()

    def stored(self, keys: Sequence[int], records: Sequence[BlockRecord | None]) -> None:
        """Store the answers of records that are current; no other manager changes them."""
        self._watch.changed(keys)
        if self._backend.awaits:
            self._on_nodes.forget(keys)
        self._cache.store_all(keys, records)

    def served(self, blocks: UniformRun) -> None:
        """Do `stored` for blocks that serve from now on."""
        self._watch.changed(blocks.keys)
        if self._backend.awaits:
            self._on_nodes.forget(blocks.keys)
        if self._serves(blocks.location):
            self._cache.store_answers(blocks.keys, blocks.chunks)
        else:
            self._cache.forget(blocks.keys)


def _count_query(measures: Measures | None, begin_ns: int, keys: int, hits: int, misses: int) -> None:
    """Measure one query for answers; spelled out, since every match has one."""
    if measures is None:
        return
    so_far = measures.get
    microseconds = (time.perf_counter_ns() - begin_ns) / 1000
    measures["meta_searcher.indexer_query_times"] = so_far("meta_searcher.indexer_query_times", 0) + 1
    measures["meta_searcher.indexer_get_time_us"] = so_far("meta_searcher.indexer_get_time_us", 0) + microseconds
    measures["meta_indexer.query_key_count"] = so_far("meta_indexer.query_key_count", 0) + keys
    measures["meta_indexer.search_cache_hit_count"] = so_far("meta_indexer.search_cache_hit_count", 0) + hits
    measures["meta_indexer.search_cache_miss_count"] = so_far("meta_indexer.search_cache_miss_count", 0) + misses


def _next_none(answers: list[bytes | None], start: int, end: int) -> int:
    try:
        return answers.index(None, start, end)
    except ValueError:
        return -1


# Cached results of a pure function of encoded locations.
#
# A chunk never changes, so a result never gets stale: nothing has to be invalidated. Bytes keep their hash,
# so a known chunk costs one lookup in C, with no per-block Python.
#
# Blocks come and go without a signal here. So there are two generations: a requested chunk is in the younger one, and a
# new one begins when that is full, and when it is old. So the cache holds recent requests, however many blocks there
# were before. Rejected: to start over when all is full, which keeps the chunks of deleted blocks until then: they may
# be the larger part of a manager's memory.

Value = TypeVar("Value", bound=Sized)
_CHUNK_ENTRY_BYTES = 200  # slot of the table, headers of chunk and value
_GENERATION_SECONDS = 60.0


class ChunkCache(Generic[Value]):
    """Results of one function, by chunk.

    Args:
        function: pure, from an encoded location to anything but None.
        most_bytes: kept, about; half of it may be of chunks that are not requested any more.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        computed: how often the function was asked.
    """

    def __init__(
        self,
        function: Callable[[bytes], Value],
        most_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function = function
        self._most_bytes = most_bytes // 2
        self._clock = clock
        self._young: dict[bytes, Value] = {}
        self._old: dict[bytes, Value] = {}
        self._young_bytes = 0
        self.computed = 0
        self._old_from = clock() + _GENERATION_SECONDS

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def young_bytes(self) -> int:
        """Bytes of the younger generation, about."""
        return self._young_bytes

    def map(self, chunks: Sequence[bytes]) -> list[Value]:
        """Return the function's result for every chunk, in order."""
        if self._clock() >= self._old_from:
            self._begin_generation()
        found = list(map(self._young.get, chunks))
        if None not in found:
            return cast("list[Value]", found)
        return [self._value(chunk) if value is None else value for chunk, value in zip(chunks, found, strict=True)]

    def _value(self, chunk: bytes) -> Value:
        value = self._young.get(chunk)
        if value is not None:  # it is there twice
            return value
        value = self._old.pop(chunk, None)
        if value is None:
            value = self._function(chunk)
            self.computed += 1
        if self._young_bytes > self._most_bytes:
            self._begin_generation()
        self._young[chunk] = value
        self._young_bytes += len(chunk) + len(value) + _CHUNK_ENTRY_BYTES
        return value

    def _begin_generation(self) -> None:
        self._young, self._old, self._young_bytes = {}, self._young, 0
        self._old_from = self._clock() + _GENERATION_SECONDS
