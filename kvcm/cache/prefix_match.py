"""The match modes: which blocks of a request can be read, and where (wire.md 5.3, 14).

The path of a plain prefix match: keys → answers of the index → the answers before the first miss. No per-block object,
no per-block await. Every mode respects masks (design.md decision 13).

Reads are recorded in batches (`AccessRecorder`, design.md decision 18): a request appends one entry, and entries are
merged and stored in the background. A crash loses the reads since the last drain, which only affects the order of
eviction. When reads come faster than they drain, the newest are dropped.

* A drain stores the least recent reads first: request after request, and within a request the tail before the head,
  since the head of a prefix must outlive its continuations (invariant 7).
* Only in an instance that is read by prefix match alone a block without its prefix is garbage (invariant 7). An
  instance that was read in another mode once is never such an instance again (`ReadModes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import structlog

from kvcm.cache.instance_cache import InstanceCache, batches
from kvcm.index.search_cache import ChunkCache, StorageView
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.groups import EvictionPolicy
from kvcm.model.instances import Instance
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.store.store import Table
from kvcm.telemetry.metrics import timed
from kvcm.telemetry.tracing import record_stage, staged

__all__ = [
    "NO_OBSERVER",
    "PREFIX_MODES",
    "AccessRecorder",
    "BlockMeta",
    "CacheObserver",
    "CombinedObserver",
    "Match",
    "MatchMode",
    "MatchQuery",
    "ReadModes",
    "WriteEnd",
    "block_metas",
    "match",
]

Value = TypeVar("Value", bytes, frozenset[str])


class MatchMode(IntEnum):
    """Query types of the wire protocol."""

    BATCH_GET = 1
    PREFIX_MATCH = 2
    REVERSE_ROLL_SW_MATCH = 3
    PREFIX_MATCH_WITH_MAMBA = 4


class MatchQuery(NamedTuple):
    """What a reader asks for. A tuple, as is the answer: every read makes both, in half the time of dataclasses.

    Attributes:
        mode: how keys are matched.
        keys: block keys in request order.
        mask: positions to leave out.
        window: keys per window of the sliding-window match.
        spec_names: specs to return; empty for all.
        node_id: the reader's node, whose memory pools it can read; "" for none.
        requires_specs: whether a block counts as found only when it has all of `spec_names`.
    """

    mode: MatchMode
    keys: Sequence[int]
    mask: BlockMask = NO_MASK
    window: int = 0
    spec_names: frozenset[str] = frozenset()
    node_id: str = ""
    requires_specs: bool = False

    @property
    def needed(self) -> frozenset[str]:
        """Specs without which a block does not count as found."""
        return self.spec_names if self.requires_specs else frozenset()


class Match(NamedTuple):
    """The result of a match.

    Attributes:
        chunks: encoded locations, as field 2 of an answer.
        keys: keys that were hit, in request order.
    """

    chunks: Sequence[bytes]
    keys: Sequence[int]


@staged("match", "match.py:match")
async def match(cache: InstanceCache, query: MatchQuery, view: StorageView | None = None) -> Match:
    """Answer a query.

    Args:
        cache: the instance.
        query: the request.
        view: which storages the reader can read; None is those that everybody can.

    Raises:
        InvalidArgumentError: the window does not fit the keys.
    """
    found = await _MATCHERS[query.mode](cache, query, view)
    record_stage(keys=len(query.keys), hits=len(found.keys))
    only = cache.filter_of(query.spec_names) if query.spec_names else None
    return found if only is None else Match(await _map_locations(cache, only, found.chunks), found.keys)


async def _map_locations(cache: InstanceCache, memo: ChunkCache[Value], chunks: Sequence[bytes]) -> list[Value]:
    """Return what a memo makes of locations, giving way to others as long as it has to compute that."""
    values: list[Value] = []
    for page in batches(chunks, cache.batch_keys):
        computed = memo.computed
        values += memo.map(page)
        if memo.computed != computed and len(page) < len(chunks):
            await asyncio.sleep(0)
    return values


async def _prefix(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    keys = query.keys if query.mask is NO_MASK else _unmasked_keys(query)
    answers = cast("list[bytes]", await cache.index.answers(keys, stop_at_miss=True, view=view))
    if query.requires_specs and query.spec_names:  # it ends before the first None already
        lacking = [not has for has in await _have_specs(cache, query.needed, answers)]
        del answers[lacking.index(True) if True in lacking else len(answers) :]
    return Match(answers, keys if len(answers) == len(keys) else keys[: len(answers)])


async def _have_specs(cache: InstanceCache, needed: frozenset[str], chunks: Sequence[bytes]) -> list[bool]:
    """Return for each location whether it has all of these specs."""
    return [needed <= present for present in await _map_locations(cache, cache.present, chunks)]


async def _prefix_with_mamba(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    """The longest prefix with all full-attention specs whose last block has the linear-attention state too."""
    prefix = await _prefix(cache, query, view)
    length = 0
    for position, present in enumerate(await _map_locations(cache, cache.present, prefix.chunks), start=1):
        if not cache.full_specs <= present:
            break
        if cache.linear_specs <= present:
            length = position
    return Match(prefix.chunks[:length], prefix.keys[:length])


async def _batch(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    answers = await _answers_by_position(cache, query, view)
    hits = [key for key, answer in zip(query.keys, answers, strict=True) if answer is not None]
    return Match([cache.placeholder if answer is None else answer for answer in answers], hits)


async def _window(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    """The right-most window of consecutive hits; every other position is a placeholder."""
    count, window = len(query.keys), query.window
    if not 1 <= window <= count:
        raise InvalidArgumentError(f"sw_size is {window}, must be from 1 to the number of keys, {count}")
    answers = await _answers_by_position(cache, query, view)
    start = _rightmost_hits(answers, window)
    chunks: list[bytes] = [cache.placeholder] * count
    if start is None:
        return Match(chunks, ())
    chunks[start : start + window] = [answer for answer in answers[start : start + window] if answer is not None]
    return Match(chunks, query.keys[start : start + window])


def _rightmost_hits(answers: Sequence[bytes | None], length: int) -> int | None:
    run = 0
    for position in range(len(answers) - 1, -1, -1):
        run = run + 1 if answers[position] is not None else 0
        if run == length:
            return position
    return None


_MATCHERS = {
    MatchMode.BATCH_GET: _batch,
    MatchMode.PREFIX_MATCH: _prefix,
    MatchMode.REVERSE_ROLL_SW_MATCH: _window,
    MatchMode.PREFIX_MATCH_WITH_MAMBA: _prefix_with_mamba,
}


def _unmasked_keys(query: MatchQuery) -> Sequence[int]:
    positions = query.mask.unmasked(len(query.keys))
    if len(positions) == len(query.keys):
        return query.keys
    return [query.keys[i] for i in positions]


async def _answers_by_position(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> list[bytes | None]:
    """Answers at the positions of the request; None where the key is missing or masked."""
    positions = query.mask.unmasked(len(query.keys))
    is_masked = len(positions) < len(query.keys)
    keys = [query.keys[i] for i in positions] if is_masked else query.keys
    with timed("manager.batch_get_location_time_us"):
        found = await cache.index.answers(keys, view=view)
    if query.needed:
        there = [answer for answer in found if answer is not None]
        has = iter(await _have_specs(cache, query.needed, there))
        found = [answer if answer is not None and next(has) else None for answer in found]
    if not is_masked:
        return found
    answers: list[bytes | None] = [None] * len(query.keys)
    for position, answer in zip(positions, found, strict=True):
        answers[position] = answer
    return answers


# Read modes: a document per instance, so that they hold for every manager and after a restart.

PREFIX_MODES: Final = frozenset({MatchMode.PREFIX_MATCH, MatchMode.PREFIX_MATCH_WITH_MAMBA})
_NOT_PREFIX_MATCH: Final = b"1"
_log = structlog.get_logger("kvcm.cache")


class ReadModes:
    """Remembers which instances were read out of order.

    Args:
        table: where that is stored, by the number of the registration.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._out_of_order: set[int] = set()

    async def record(self, uid: int) -> None:
        """Record that an instance is read out of order; if the store fails, the next such read tries again."""
        if uid in self._out_of_order:
            return
        try:
            if await self._table.get(str(uid)) is None:
                await self._table.replace(str(uid), None, _NOT_PREFIX_MATCH)
        except StorageIOError as error:  # the read itself is not harmed
            _log.warning("read_mode_not_stored", registration=uid, reason=str(error))
        else:
            self._out_of_order.add(uid)

    async def is_prefix_match_only(self, uid: int) -> bool:
        """Return whether an instance was read by prefix match alone, through whatever manager.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if uid not in self._out_of_order and await self._table.get(str(uid)) is not None:
            self._out_of_order.add(uid)
        return uid not in self._out_of_order

    async def forget(self, uid: int) -> None:
        """Drop the document of an instance that is gone for good.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._out_of_order.discard(uid)
        await self._table.replace(str(uid), _NOT_PREFIX_MATCH, None)


# GetCacheMeta: every location of a block, readable or still being written.


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """The metadata of one block.

    Attributes:
        key: the block.
        parent: key before it in its chain, None at the head or when unknown.
        depth: position in its chain.
        locations: visible locations, best first: readable ones by speed, then those being written. What is being
            deleted has vanished from every answer. Empty when the block is not there.
    """

    key: int
    parent: int | None
    depth: int
    locations: tuple[Location, ...]


async def block_metas(cache: InstanceCache, keys: Sequence[int], mask: BlockMask, view: StorageView) -> list[BlockMeta]:
    """Return one entry per unmasked key, in order."""
    metas: list[BlockMeta] = []
    for page in batches([keys[i] for i in mask.unmasked(len(keys))], cache.batch_keys):
        with timed("manager.batch_get_location_time_us"):
            records = await cache.index.get(page)
        metas += [_meta(key, record, view) for key, record in zip(page, records, strict=True)]
        await asyncio.sleep(0)
    return metas


def _meta(key: int, record: BlockRecord | None, view: StorageView) -> BlockMeta:
    if record is None:
        return BlockMeta(key=key, parent=None, depth=0, locations=())
    visible = [location for location in record.locations if location.status is not LocationStatus.DELETING]
    visible.sort(key=lambda location: _worst_status(location, view))
    return BlockMeta(key, record.parent, record.depth, tuple(visible))


def _worst_status(location: Location, view: StorageView) -> tuple[bool, float]:
    rank = view.rank(location.storage)
    return location.status is not LocationStatus.SERVING, float("inf") if rank is None else rank


# Observers of lookups and write sessions.


class WriteEnd(Enum):
    """How a write session ended: with all its blocks, some, none, or by its deadline."""

    COMMITTED = "committed"
    PARTIAL = "partial"
    ABORTED = "aborted"
    EXPIRED = "expired"


class CacheObserver(Protocol):
    """Follows lookups and writes on the path of every request: it does little and never waits or raises."""

    def on_lookup(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        """A lookup that counts as an access was answered."""

    def on_lookup_failed(self, instance: Instance, query: MatchQuery) -> None:
        """A lookup could not be answered."""

    def on_revisits(self, instance: Instance, seconds: float) -> None:
        """A block was read again so long after its last read; reported for some blocks, after a while."""

    def on_write_started(self, masked_keys: int) -> None:
        """A write session was opened; so many keys of the request need not be written."""

    def on_write_ended(self, end: WriteEnd, seconds: float | None) -> None:
        """A write session was ended by this manager, once; seconds since its start if it was started here."""


class _ChainObserver(Protocol):
    """Follows the chains that are read, on the path of every request."""

    def on_read(self, group_name: str, keys: Sequence[int], block_bytes: int) -> None:
        """A prefix match for blocks of so many bytes each was answered."""


class CombinedObserver:
    """An observer, and a reader beside it.

    Args:
        observer: gets everything.
        reader: gets prefix matches, without masked keys.
    """

    def __init__(self, observer: CacheObserver, reader: _ChainObserver) -> None:
        self._reader = reader
        self._observer = observer
        self.on_lookup_failed = observer.on_lookup_failed
        self.on_revisits = observer.on_revisits
        self.on_write_started = observer.on_write_started
        self.on_write_ended = observer.on_write_ended

    def on_lookup(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        """Tell both."""
        self._observer.on_lookup(instance, query, found)
        if query.mode in PREFIX_MODES:
            positions = query.mask.unmasked(len(query.keys))
            is_masked = len(positions) < len(query.keys)
            keys = [query.keys[position] for position in positions] if is_masked else query.keys
            self._reader.on_read(instance.instance_group_name, keys, instance.block_bytes)


class _NoObserver:
    def on_lookup(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        pass

    def on_lookup_failed(self, instance: Instance, query: MatchQuery) -> None:
        pass

    def on_revisits(self, instance: Instance, seconds: float) -> None:
        pass

    def on_write_started(self, masked_keys: int) -> None:
        pass

    def on_write_ended(self, end: WriteEnd, seconds: float | None) -> None:
        pass


NO_OBSERVER: CacheObserver = _NoObserver()

# Access recording.

_MOST_KEYS = 1 << 20
_SLICE_KEYS = 256  # worked on without giving way
_SAMPLED_KEYS = 4096  # looked through without giving way
_SAMPLE_RATE = 64  # blocks, a power of two, whose reads are compared with their last one
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # keys need not be well mixed
_PolicyOf = Callable[[InstanceCache], EvictionPolicy]
"""Finds the policy in force for an instance."""


class _PendingReads(NamedTuple):
    """Requests for the same blocks in the same order."""

    cache: InstanceCache
    keys: Sequence[int]
    times: int


class AccessRecorder:
    """Gathers reads until they are drained.

    Args:
        clock: time source.
        policy_of: finds the policy of an instance: whether reads move its blocks, or only count.
    """

    def __init__(self, clock: Clock, policy_of: _PolicyOf = lambda _cache: EvictionPolicy()) -> None:
        self._clock = clock
        self._policy_of = policy_of
        self._entries: dict[tuple[int, ...], _PendingReads] = {}
        self._waiting = 0
        self.dropped = 0
        self.observer = NO_OBSERVER

    @property
    def pending_count(self) -> int:
        """Blocks of requests whose reads are not written down yet."""
        return self._waiting

    def record(self, cache: InstanceCache, keys: Sequence[int]) -> None:
        """Note that blocks were read just now."""
        if not keys:
            return
        place: tuple[int, ...] = (
            cache.placement.uid,
            len(keys),
            keys[-1],
        )  # a key stands for the prefix before it, too
        entry = self._entries.get(place)
        if entry is not None and entry.keys == keys:
            del self._entries[place]  # to the end: what was read last is written down last
            self._entries[place] = _PendingReads(cache, keys, entry.times + 1)
        elif self._waiting + len(keys) > _MOST_KEYS:
            self.dropped += len(keys)
        else:
            self._waiting += len(keys)
            self._entries[place if entry is None else (*place, self._waiting)] = _PendingReads(cache, keys, 1)

    async def drain(self) -> None:
        """Store the gathered reads, giving way to requests in between.

        Raises:
            StorageIOError: the store cannot be asked; the gathered reads are lost.
        """
        entries, self._entries, self._waiting = self._entries.values(), {}, 0
        at = self._clock.now()
        caches = {entry.cache.placement.uid: entry.cache for entry in entries}
        counts: dict[int, dict[int, int]] = {uid: {} for uid in caches}
        taken = 0
        for cache, keys, times in entries:
            of_cache = counts[cache.placement.uid]
            for end in range(len(keys), 0, -_SLICE_KEYS):
                part = keys[max(0, end - _SLICE_KEYS) : end]
                _count_reads(of_cache, part, times)
                taken += len(part)
                if taken >= _SLICE_KEYS:
                    taken = 0
                    await asyncio.sleep(0)
        for uid, cache in caches.items():
            await self._store(cache, counts[uid], at)

    async def _store(self, cache: InstanceCache, counts: dict[int, int], at: float) -> None:
        moves = not self._policy_of(cache).orders_by_write
        # A shared store gives way by itself, and is asked in fewer and larger calls.
        size = cache.index.most_touched if cache.index.is_shared else _SLICE_KEYS
        if moves:
            await self._report_revisits(cache, counts, at)
        items = iter(counts.items())
        while page := dict(islice(items, size)):
            await cache.index.touch(page, at, moves=moves)
            await asyncio.sleep(0)

    async def _report_revisits(self, cache: InstanceCache, counts: Mapping[int, int], at: float) -> None:
        """Tell how long ago some of the blocks were read before; to be asked before they are touched."""
        sampled: list[int] = []
        keys = iter(counts)
        while page := list(islice(keys, _SAMPLED_KEYS)):
            sampled += _sampled(page)
            await asyncio.sleep(0)
        for some in batches(sampled, _SLICE_KEYS):
            for access in await cache.index.accesses(some):
                if access is not None and access.reads:
                    self.observer.on_revisits(cache.instance, max(0.0, at - access.at))


def _sampled(keys: Collection[int]) -> list[int]:
    """Return one key of `_SAMPLE_RATE`, always the same ones."""
    numbers = np.fromiter(keys, np.int64, len(keys))
    sampled: list[int] = numbers[numbers.view(np.uint64) * _SPREAD >> 32 & _SAMPLE_RATE - 1 == 0].tolist()
    return sampled


def _count_reads(counts: dict[int, int], keys: Sequence[int], times: int) -> None:
    """Count the reads of a request, whose head is read last; a key stands where its last read does."""
    fresh = dict.fromkeys(reversed(keys), times)
    if len(fresh) == len(keys) and counts.keys().isdisjoint(fresh):  # mostly; in a third of the time
        counts.update(fresh)
        return
    for key in reversed(keys):
        counts[key] = counts.pop(key, 0) + times
