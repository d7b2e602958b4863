"""The pages of one rank in the manager and its storages: matches, loads and saves.

A page is a hit when every rank has saved its part of it, and a rank moves only its own part. No rank waits for another.
Nothing here raises because of the manager, the network or a storage: an error is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import Location, MatchResult, Outcome
from kvcm.connectors.reuse.loads import Bytes, PartToLoad, StagingTrays, load_parts, missing_report
from kvcm.connectors.reuse.registration import ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.reuse.write_sessions import SessionSettings, WriteSessions, save_blocks
from kvcm.connectors.sglang.host_pool import PageMemory
from kvcm.connectors.sglang.options import SglangOptions
from kvcm.connectors.transfer import Failure, TransferEngine, TransferResult
from kvcm.connectors.transfer.worker_pool import PRIORITY_SAVE, WorkerPool
from kvcm.model.errors import ErrorCode, InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo
from kvcm.model.keys import BlockKey

__all__ = [
    "FoundPages",
    "MatchCache",
    "PageKeys",
    "PageParents",
    "PageStore",
    "RankParts",
    "ReadLease",
    "TransferSummary",
    "event_hashes",
    "stage_instance",
]


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A read lease.

    Attributes:
        id: of the manager; "" for none.
        ends_at: of the cache's clock.
    """

    id: str
    ends_at: float


@dataclass(frozen=True, slots=True)
class FoundPages:
    """Pages popped from the cache; pass them to `release` when they are loaded.

    Attributes:
        locations: of the leading pages.
        leases: that they are under, with the number of pages.
        ends_at: when the first of the leases ends.
    """

    locations: tuple[Location, ...]
    leases: Counter[ReadLease]
    ends_at: float


class MatchCache:
    """Locations of matched pages until they are loaded; safe to use from several threads.

    SGLang first counts the hits of a prompt (`batch_exists`) and loads them a little later, 128 at a time and perhaps
    not all: ranks agree on the shortest prefix, and the host pool may be full. In between a read lease keeps them
    readable. Invariants:

    1. A lease is released when no page under it is left in the cache and no load of its pages is in flight.
    2. Pages that are not loaded are dropped when their lease is about to end, or when there are too many.
    3. A page that is matched again is under the newer lease.

    Args:
        release: releases a lease; called without the lock and must not block.
        clock: seconds of a clock that never runs backwards.
        most: pages to keep.
    """

    def __init__(self, release: Callable[[str], None], clock: Callable[[], float], most: int = 65_536) -> None:
        self._release = release
        self._clock = clock
        self._most = most
        self._pages: OrderedDict[BlockKey, tuple[Location, ReadLease]] = OrderedDict()
        self._uses: Counter[ReadLease] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, keys: Sequence[BlockKey], locations: Sequence[Location], lease: ReadLease) -> None:
        """Add the locations of pages.

        Args:
            keys: of the pages.
            locations: of them; there are as many or fewer.
            lease: that they are under.
        """
        dropped: Counter[ReadLease] = Counter()
        with self._lock:
            for key, location in zip(keys, locations, strict=False):
                before = self._pages.pop(key, None)
                if before is not None:
                    dropped[before[1]] += 1
                self._pages[key] = (location, lease)
                self._uses[lease] += 1
            dropped += self._drop_expired()
            unused = self._decrement(dropped)
        self._release_leases(unused)

    def pop(self, keys: Sequence[BlockKey]) -> FoundPages:
        """Remove the leading pages that are in the cache, and return them."""
        now = self._clock()
        locations: list[Location] = []
        leases: Counter[ReadLease] = Counter()
        with self._lock:
            for key in keys:
                known = self._pages.get(key)
                if known is None or known[1].ends_at <= now:
                    break
                del self._pages[key]
                locations.append(known[0])
                leases[known[1]] += 1
        return FoundPages(tuple(locations), leases, min((lease.ends_at for lease in leases), default=now))

    def release(self, found: FoundPages) -> None:
        """Release popped pages: they are loaded, or will not be."""
        with self._lock:
            unused = self._decrement(found.leases)
        self._release_leases(unused)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            dropped = Counter(lease for _, lease in self._pages.values())
            self._pages.clear()
            unused = self._decrement(dropped)
        self._release_leases(unused)

    def _drop_expired(self) -> Counter[ReadLease]:
        """Drop pages whose lease has ended, and the oldest ones that are too many; those come first."""
        now = self._clock()
        dropped: Counter[ReadLease] = Counter()
        while self._pages:
            key, (_, lease) = next(iter(self._pages.items()))
            if len(self._pages) <= self._most and lease.ends_at > now:
                break
            del self._pages[key]
            dropped[lease] += 1
        return dropped

    def _decrement(self, dropped: Counter[ReadLease]) -> list[ReadLease]:
        """Count fewer uses, and return the leases that have none left."""
        self._uses -= dropped  # keeps positive counts
        return [lease for lease in dropped if lease not in self._uses]

    def _release_leases(self, leases: Sequence[ReadLease]) -> None:
        now = self._clock()
        for lease in leases:
            if lease.id and lease.ends_at > now:
                self._release(lease.id)


class PageParents:
    """Parents of recent pages; safe to use from several threads.

    SGLang saves the pages of one node of its tree at a time and passes their prefix only with
    `hicache_storage_pass_prefix_keys`. A lookup has whole chains, though, and its computed pages are saved soon after.
    A page without a known parent is stored as the head of a chain: it is found all the same, and only evicted in a less
    suitable order.

    Args:
        most: pages to remember.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._parents: OrderedDict[BlockKey, BlockKey] = OrderedDict()
        self._lock = threading.Lock()

    def record_chain(self, chain: Sequence[BlockKey]) -> None:
        """Remember consecutive pages."""
        chain = chain[-self._most :]
        with self._lock:
            for parent, child in pairwise(chain):
                self._parents[child] = parent
                self._parents.move_to_end(child)
            while len(self._parents) > self._most:
                self._parents.popitem(last=False)

    def parent(self, key: BlockKey) -> BlockKey | None:
        """Return the page before one, None when it was not seen."""
        with self._lock:
            return self._parents.get(key)


# A page hash is a SHA-256 over the hash of the page before it and the page's tokens, as 64 hexadecimal digits; it also
# covers the request's cache salt, adapter and images. Its first 64 bits, exclusive-or a number of the namespace, are
# the key.

_DIGITS = 16
_SIGN = 1 << 63


class PageKeys:
    """Makes block keys.

    Args:
        namespace: everything besides the tokens that KV depends on, in any fixed form.
    """

    def __init__(self, namespace: bytes) -> None:
        self._mask = int.from_bytes(blake2b(namespace, digest_size=8).digest(), "big")

    def keys(self, page_hashes: Sequence[str]) -> list[BlockKey]:
        """Return the key of every page.

        Args:
            page_hashes: of SGLang, hexadecimal.

        Raises:
            ValueError: a hash is none.
        """
        mask = self._mask
        # Flipping the sign bit and subtracting it reads 64 bits as a signed number.
        return [BlockKey(((int(text[:_DIGITS], 16) ^ mask) ^ _SIGN) - _SIGN) for text in page_hashes]


def event_hashes(page_hashes: Sequence[str]) -> list[int]:
    """Return the number by which SGLang's KV events name each page: its first 64 bits, signed.

    That holds for pages of requests without cache salt, adapter or another extra key. Events have other hashes for the
    rest, and a storage backend gets neither these nor what they are made of: it cannot leave such pages out, whose
    numbers then are of no event.

    Args:
        page_hashes: of SGLang, hexadecimal.

    Raises:
        ValueError: a hash is none.
    """
    return [(int(text[:_DIGITS], 16) ^ _SIGN) - _SIGN for text in page_hashes]


# Every tensor-parallel rank saves its own heads: a page has a part `tp0`, `tp1`… per rank. MLA's latent rows are the
# same on all ranks: there is one part, which the first one saves and all load. The stages of a pipeline have different
# layers of different sizes, and register as instances of their own.


@dataclass(frozen=True, slots=True)
class RankParts:
    """Parts of a page as one rank sees them.

    Attributes:
        names: of all parts.
        name: of this rank's.
    """

    names: tuple[str, ...]
    name: str

    @classmethod
    def of(cls, config: Any) -> RankParts:
        """Return the parts for a rank.

        Args:
            config: SGLang's storage config of the rank.

        Raises:
            InvalidArgumentError: ranks are laid out in a way that is not supported; says which.
        """
        for name in ("attn_cp_size", "dcp_size"):
            if getattr(config, name) != 1:
                raise InvalidArgumentError(f"{name} is {getattr(config, name)}, must be 1")
        names = ("tp0",) if config.is_mla_model else tuple(f"tp{rank}" for rank in range(config.tp_size))
        return cls(names, "tp0" if config.is_mla_model else f"tp{config.tp_rank}")

    def infos(self, part_bytes: int) -> list[LocationSpecInfo]:
        """Return the registration data of the parts, which are all of one size."""
        return [LocationSpecInfo(name, part_bytes) for name in self.names]

    @property
    def groups(self) -> list[LocationSpecGroup]:
        """One group per part, so that a rank starts write sessions for its own only."""
        return [LocationSpecGroup(name, (name,)) for name in self.names] if len(self.names) > 1 else []

    def groups_of(self, pages: int) -> list[str]:
        """Return the group of every page in a write session."""
        return [self.name] * pages if len(self.names) > 1 else []


def stage_instance(instance_id: str, config: Any) -> str:
    """Return the instance of a pipeline stage."""
    return instance_id if config.pp_size == 1 else f"{instance_id}-pp{config.pp_rank}"


_log = logging.getLogger(__name__)

# A request to the manager may have 65,536 keys; a prompt of a million tokens has as many pages of 16.
_MAX_KEYS = 16_384


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """The result of a load or save of pages.

    Attributes:
        flags: one per page; a page that counts is there with every byte.
        pages: that really moved.
        bytes: of them.
        seconds: that it took.
    """

    flags: list[bool]
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class PageStore:
    """Pages of one rank; safe to use from several threads.

    Args:
        link: to the manager; closed with the store.
        memory: of the host pool.
        keys: makes block keys; the attribute may be replaced, for calls that begin later.
        parts: of a block, and which of them is this rank's.
        options: how patient to be.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        link: ManagerLink,
        memory: PageMemory,
        keys: PageKeys,
        parts: RankParts,
        options: SglangOptions,
        statistics: ReuseStatistics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statistics = statistics or ReuseStatistics()
        self._link = link
        self._memory = memory
        self.keys = keys
        self._parts = parts
        self._options = options
        self._clock = clock
        self._background = WorkerPool(1, "kvcm-sglang")
        self._matches = MatchCache(self._release_lease_soon, clock)
        self._parents = PageParents()
        self._trays = StagingTrays(max(options.staging_bytes, memory.page_bytes), trays=1)
        settings = SessionSettings(session_seconds=options.session_seconds, call_seconds=options.call_seconds)
        self._sessions = WriteSessions(link.client, settings, clock)

    @property
    def abandoned_trays(self) -> int:
        """Staging trays abandoned to storages that hang."""
        return self._trays.abandoned

    def exists(self, page_hashes: Sequence[str], prefix_hashes: Sequence[str] = ()) -> int:
        """Return how many of the leading pages can be loaded; they stay readable for a while.

        Args:
            page_hashes: consecutive pages.
            prefix_hashes: of the pages before them, if SGLang passes them.
        """
        before, keys = self._keys_of(prefix_hashes[-1:], page_hashes)
        self._parents.record_chain([*before, *keys])
        if not keys or not self._link.is_ready():
            return 0
        hits = 0
        for first in range(0, len(keys), _MAX_KEYS):
            chunk = keys[first : first + _MAX_KEYS]
            locations, lease = self._match(chunk)
            self._matches.add(chunk, locations, lease)
            hits += len(locations)
            if len(locations) < len(chunk):
                break
        self.statistics.add(lookup_blocks=len(keys), hit_blocks=hits)
        return hits

    def load(self, page_hashes: Sequence[str], host_indices: Any) -> TransferSummary:
        """Load pages into the host pool.

        Args:
            page_hashes: of the pages.
            host_indices: where they belong, as SGLang gives them.
        """
        begun = self._clock()
        (keys,) = self._keys_of(page_hashes)
        engine = self._link.engine_if_ready()
        if engine is None:
            return TransferSummary([False] * len(keys))
        pages = self._memory.pages(host_indices)
        found = self._locate(keys)
        try:
            results = self._load(engine, keys, pages, found)
        finally:
            self._matches.release(found)
        flags = [result.ok for result in results] + [False] * (len(keys) - len(results))
        seconds = self._clock() - begun
        self.statistics.add(loaded_blocks=sum(flags))
        self.statistics.observe("load_seconds", seconds)
        return TransferSummary(flags, sum(flags), sum(flags) * self._memory.page_bytes, seconds)

    def save(self, page_hashes: Sequence[str], host_indices: Any, prefix_hashes: Sequence[str] = ()) -> TransferSummary:
        """Save pages of the host pool that are not stored yet.

        Args:
            page_hashes: consecutive pages.
            host_indices: where they are, as SGLang gives them.
            prefix_hashes: of the pages before them, if SGLang passes them.
        """
        begun = self._clock()
        before, keys = self._keys_of(prefix_hashes[-1:], page_hashes)
        engine = self._link.engine_if_ready() if self._options.publish else None
        if engine is None or not keys:
            if self._options.publish:
                self.statistics.count_unsaved(Unsaved.UNREGISTERED, len(keys), self._link.registration.message)
            return TransferSummary([False] * len(keys))
        pages = self._memory.pages(host_indices)
        saved = save_blocks(
            self._sessions,
            engine=engine,
            keys=keys,
            parent=self._parent(keys[0], before),
            memory_of=lambda index, _: [piece.data for piece in pages[index]],
            deadline_seconds=self._options.save_seconds,
            part_groups=self._parts.groups_of(len(keys)),
            event_hashes=event_hashes(page_hashes),
            statistics=self.statistics,
            clock=self._clock,
        )
        self._parents.record_chain(keys)
        return TransferSummary(list(saved.stored), saved.saved, saved.saved_bytes, self._clock() - begun)

    def clear(self) -> None:
        """Drop the matched pages."""
        self._matches.clear()

    def close(self) -> None:
        """Abort saves, release leases and close everything, within the deadline."""
        deadline = self._clock() + self._options.shutdown_seconds
        self._matches.clear()
        self._sessions.close(self._options.shutdown_seconds / 2)
        self._background.close(max(0.0, deadline - self._clock()))
        self._link.close()

    def _match(self, keys: Sequence[BlockKey]) -> tuple[list[Location], ReadLease]:
        """Ask the manager; an error is a miss."""
        begun, options = self._clock(), self._options
        answer = self._link.client.match(
            keys,
            spec_names=self._parts.names,
            read_lease_ms=int(options.lease_seconds * 1000),
            timeout_seconds=options.call_seconds,
        )
        self._record_match(answer)
        self.statistics.observe("lookup_seconds", self._clock() - begun)
        locations = [location for location in answer.locations if location is not None]
        # The lease begins in the manager later than here, so it is there for a little longer than we believe.
        return locations, ReadLease(answer.lease_id, begun + options.lease_seconds)

    def _record_match(self, answer: MatchResult) -> None:
        is_ok = answer.outcome is Outcome.OK
        self.statistics.add(lookups=int(is_ok), lookups_failed=int(not is_ok))
        if answer.code == ErrorCode.INSTANCE_NOT_EXIST:
            self._link.invalidate()  # the manager lost its state

    def _locate(self, keys: Sequence[BlockKey]) -> FoundPages:
        """Return the locations of the leading pages: from the last lookup, else from the manager."""
        found = self._matches.pop(keys)
        missing = keys[len(found.locations) :]
        if not missing:
            return found
        locations, lease = self._match(missing)
        self._matches.add(missing, locations, lease)
        more = self._matches.pop(missing)
        ends = [part.ends_at for part in (found, more) if part.locations]
        return FoundPages(found.locations + more.locations, found.leases + more.leases, min(ends, default=more.ends_at))

    def _load(
        self, engine: TransferEngine, keys: Sequence[BlockKey], pages: Sequence[Sequence[Bytes]], found: FoundPages
    ) -> list[TransferResult]:
        name = self._parts.name
        parts = [
            PartToLoad(key, location.uris[name], location.checksums.get(name, 0) if self._options.checksums else 0)
            for key, location in zip(keys, found.locations, strict=False)
        ]

        def deliver(rows: Bytes, arrived: Sequence[int]) -> None:
            for row, index in zip(rows, arrived, strict=True):
                self._memory.fill(pages[index], row)

        # No load starts after the lease ends: an evicted page's bytes may be another page's by then.
        seconds = min(self._options.load_seconds, found.ends_at - self._clock())
        results = load_parts(
            engine,
            trays=self._trays,
            parts=parts,
            part_bytes=self._memory.page_bytes,
            deliver=deliver,
            deadline_seconds=seconds,
            clock=self._clock,
        )
        report = missing_report(parts, results, self.statistics)
        if report:
            _log.warning("%d pages are gone and %d have other bytes", len(report.lost), len(report.corrupt))
            self._submit(partial(self._report_missing, self._link.client, report.lost, report.corrupt))
        if any(result.failure is Failure.REFUSED for result in results):
            self._link.invalidate()  # perhaps a storage was added since
        return results

    def _report_missing(self, client: ManagerClient, lost: Any, corrupt: Any) -> None:
        client.report_missing(lost, corrupt=corrupt, timeout_seconds=self._options.call_seconds)

    def _parent(self, key: BlockKey, before: Sequence[BlockKey]) -> BlockKey | None:
        return before[-1] if before else self._parents.parent(key)

    def _keys_of(self, *page_hashes: Sequence[str]) -> list[list[BlockKey]]:
        keys = self.keys
        return [keys.keys(each) for each in page_hashes]

    def _release_lease_soon(self, lease_id: str) -> None:
        self._submit(partial(self._release_lease, lease_id))

    def _release_lease(self, lease_id: str) -> None:
        self._link.client.release_lease(lease_id, timeout_seconds=self._options.call_seconds)

    def _submit(self, task: Callable[[], None]) -> None:
        self._background.submit(PRIORITY_SAVE, task)
