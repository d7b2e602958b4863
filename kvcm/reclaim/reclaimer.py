"""The reclaimer: keeps usage below the watermarks by marking blocks as deleting, as few as possible.

A round compares usage with every watermark (`needs`), selects victims a few at a time (`victims`), marks them by
compare-and-set, and compares again, until nothing is above its watermark. Marked blocks count as gone at once, so the
delay before a deletion changes nothing. The deletion executor frees the bytes.

A round runs once per trigger period, and at once when a write crosses a watermark or is rejected, or settings change. A
step limit of a group bounds how much one round marks; then the next round follows after a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import NamedTuple

import msgspec
import structlog

from kvcm.index.backends.backend import Access, RunChange, StoredRun, UniformRun
from kvcm.index.meta_index import Change, IndexHandle, MetaIndex
from kvcm.model.clock import Clock, common_due
from kvcm.model.errors import KvcmError
from kvcm.model.groups import InstanceGroup, PrefixClass
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord
from kvcm.reclaim.background import Pacer
from kvcm.reclaim.eviction_order import (
    TRIGGER_SECONDS,
    EvictionOrders,
    Order,
    OrderPlan,
    WindowOrder,
    WindowScan,
)
from kvcm.reclaim.media import HeldBytes, MediaPressure
from kvcm.reclaim.needs import InstanceUsage, Label, Limits, Reason, ReclaimNeed, UsageReader, needs
from kvcm.reclaim.run_victims import ColdRuns, can_go_by_runs, select_runs
from kvcm.reclaim.victims import (
    Chains,
    Eviction,
    Goal,
    ScanState,
    ShareOrder,
    Source,
    Victim,
    marked,
    marked_location,
    newly_deleting,
    select_expired,
    select_victims,
)
from kvcm.store.store import Revision, Table
from kvcm.telemetry.metrics import AGES, Histogram

__all__ = ["EvictionRecord", "NeedProgress", "NeedQueue", "Payment", "ReclaimStats", "Reclaimer", "WakeBroadcast"]

# Victims of one choice, gathered and marked together.

_BLOCKS = 32  # the longest that requests wait for
_SHARED_BLOCKS = 512


class _VictimBatch:
    """Victims of one choice, which are marked together: over a shared store every compare-and-set is a journey, and in
    memory, too, a few at a time cost half of one by one.

    Args:
        reclaimer: marks them.
        need: what they are for.

    Attributes:
        indexes: by uid.
        is_shared: whether other managers change an index too.
        most: blocks of a batch.
    """

    def __init__(self, reclaimer: Reclaimer, need: ReclaimNeed) -> None:
        self._reclaimer = reclaimer
        self._need = need
        self.indexes = reclaimer.indexes()
        self.is_shared = any(self.indexes[holding.uid].is_shared for holding in need.usages)
        self.most = _SHARED_BLOCKS if self.is_shared else _BLOCKS
        self._gathered: dict[int, tuple[Source, dict[int, Eviction]]] = {}
        self._marked: list[EvictionRecord] = []

    def add(self, victim: Victim) -> None:
        """Keep a victim for the end."""
        source, eviction, _ = victim
        _, evictions = self._gathered.setdefault(source.holding.uid, (source, {}))
        known = evictions.get(eviction.key, eviction)  # a block may give one copy after another
        evictions[eviction.key] = eviction._replace(location_ids=known.location_ids | eviction.location_ids)

    async def yield_to_requests(self) -> None:
        """Let requests run. Victims of an index in this process are marked before: its order does not hold them any
        more. A shared index changes during the selection anyway, and the compare-and-set decides."""
        if not self.is_shared:
            await self._mark_gathered()
        await asyncio.sleep(0)

    async def _mark_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        try:
            for uid, (source, evictions) in gathered.items():
                self._marked += await self._reclaimer.mark(self._need, source, self.indexes[uid], evictions)
        finally:
            for source, _ in gathered.values():
                await source.order.settle()

    async def mark_runs(self, sources: Sequence[ColdRuns]) -> int:
        """Mark what was chosen of runs; return how many blocks were marked."""
        for source in sources:
            runs = source.taken()
            if runs:
                index = self.indexes[source.holding.uid]
                self._marked.append(await self._reclaimer.mark_runs(self._need, source, index, runs))
        return sum(len(evicted.keys) for evicted in self._marked)

    async def finish(self) -> int:
        """Mark the gathered victims; return how many blocks were marked in total."""
        try:
            await self._mark_gathered()
        finally:  # also after a failure
            marked = self.report()
        return marked

    def report(self) -> int:
        """Report the blocks that were marked so far; return how many there are."""
        marked, self._marked = self._marked, []
        for evicted in marked:
            self._reclaimer.report(evicted)
        return sum(len(evicted.keys) for evicted in marked)


# The needs of one look, served batch by batch, one need after the other.
#
# A group that is written to without a pause always needs something. Others do not wait until it needs nothing: needs
# take turns. Evictions for a narrow watermark count for the wider ones, so a wide need has its turn for what goes
# beyond that.

Payment = tuple[Label, str]
"""A watermark, and the group that pays."""


class NeedProgress(NamedTuple):
    """One need, from batch to batch.

    Attributes:
        uids: of the instances that pay.
        shares: which of them is next.
        scan: where the last batch stopped.
    """

    uids: frozenset[int]
    shares: ShareOrder
    scan: ScanState


class NeedQueue:
    """Selects the next need, and keeps the progress of each from batch to batch.

    Args:
        hopeless: needs that cannot be served; the caller keeps the set from round to round.
    """

    def __init__(self, hopeless: set[Payment]) -> None:
        self._hopeless = hopeless
        self._held_back: set[Payment] = set()
        self._servings: dict[Payment, NeedProgress] = {}
        self._gave: set[Payment] = set()
        self._batches = 0
        self._last_batch: dict[Payment, int] = {}

    def next(self, found: Sequence[ReclaimNeed]) -> ReclaimNeed | None:
        """Return the need that is worth a try and was not served for the longest time, None when there is none.

        Args:
            found: the narrowest level first. The amount of the result excludes what the needs before it take.
        """
        done = self._hopeless | self._held_back
        remaining = _without_overlap([need for need in found if _payment_of(need) not in done])
        return min(remaining, key=lambda need: self._last_batch.get(_payment_of(need), 0), default=None)

    def of(self, need: ReclaimNeed, now: float) -> NeedProgress:
        """Return the serving of a need; a new one when others pay than before."""
        uids = frozenset(holding.uid for holding in need.usages)
        serving = self._servings.get(_payment_of(need))
        if serving is None or serving.uids != uids:
            serving = self._servings[_payment_of(need)] = NeedProgress(uids, ShareOrder(need, now), ScanState())
        return serving

    def record(self, need: ReclaimNeed, blocks: int, *, is_held_back: bool) -> None:
        """Note what a batch gave. A walk that gave something and came to its end is made once more: blocks behind it
        have become ends of chains."""
        payment = _payment_of(need)
        self._batches += 1
        self._last_batch[payment] = self._batches
        if blocks:
            self._gave.add(payment)
        elif is_held_back:
            self._held_back.add(payment)
        elif payment in self._gave:
            self._gave.discard(payment)
            del self._servings[payment]
        else:
            self._hopeless.add(payment)


def _without_overlap(found: Sequence[ReclaimNeed]) -> Iterator[ReclaimNeed]:
    """Yield needs, each without what those before it may take of the same groups, or for the same watermark: up to a
    block more than their amounts, since they take whole blocks."""
    of_group: Counter[str] = Counter()
    of_mark: Counter[Label] = Counter()
    counting_blocks: set[str] = set()
    for need in found:
        groups = {holding.group.name for holding in need.usages}
        amount = need.amount - of_mark[need.label] - sum(of_group[name] for name in groups)
        # Blocks and bytes cannot be compared: a need in one unit waits for a need in the other.
        if need.counts_blocks:
            amount = 0 if any(of_group[name] for name in groups) else need.amount
        elif groups & counting_blocks:
            amount = 0
        if amount <= 0:
            continue
        if need.counts_blocks:
            counting_blocks |= groups
        else:
            most = amount + max(holding.instance.block_bytes for holding in need.usages)
            of_mark[need.label] += most
            of_group.update(dict.fromkeys(groups, most))
        yield replace(need, amount=amount)


def _payment_of(need: ReclaimNeed) -> Payment:
    """Return the identity of a need."""
    return need.label, need.payer


# Records of evictions: one per compare-and-set, and totals.


@dataclass(frozen=True, slots=True)
class EvictionRecord:
    """The blocks that one compare-and-set marked in one instance, for one reason.

    Attributes:
        instance: the instance.
        need: the need that they serve.
        policy: name of the policy that selected them.
        keys: of the blocks.
        locations: how many of their locations were marked.
        size_bytes: bytes of these.
        changes: of its index; they may be made only when they are asked for.
        delay_seconds: until the bytes may go.
    """

    instance: Instance
    need: ReclaimNeed
    policy: str
    keys: Sequence[int]
    locations: int
    size_bytes: int
    changes: Iterable[Change]
    delay_seconds: float

    @classmethod
    def of(cls, holding: InstanceUsage, need: ReclaimNeed, policy: str, changes: Sequence[Change]) -> EvictionRecord:
        """Return the record of blocks that changed one by one."""
        sizes = [each.size_bytes for change in changes for each in newly_deleting(change.old, change.new)]
        return cls(
            holding.instance,
            need,
            policy,
            keys=[change.key for change in changes],
            locations=len(sizes),
            size_bytes=sum(sizes),
            changes=changes,
            delay_seconds=_delay_seconds(holding.group),
        )

    @classmethod
    def of_runs(cls, holding: InstanceUsage, need: ReclaimNeed, policy: str, runs: _MarkedRuns) -> EvictionRecord:
        """Return the record of blocks that changed as runs."""
        counts = [(len(keys), run.locations) for keys, run in zip(runs.keys, runs.runs, strict=True)]
        return cls(
            holding.instance,
            need,
            policy,
            keys=[key for some in runs.keys for key in some],
            locations=sum(count * len(locations) for count, locations in counts),
            size_bytes=sum(count * each.size_bytes for count, locations in counts for each in locations),
            changes=runs,
            delay_seconds=_delay_seconds(holding.group),
        )


class _MarkedRuns:
    """The changes of blocks that were marked as runs.

    Args:
        changes: before and after.
        lost: blocks that are left as they were.

    Attributes:
        runs: before.
        keys: of each in the order in which they went, without those that are left.
    """

    def __init__(self, changes: Sequence[RunChange], lost: Collection[int]) -> None:
        self._changes = changes
        self._lost = lost
        self.runs = [run for run, _ in changes]
        self.keys = [[key for key in reversed(run.keys) if key not in lost] for run in self.runs]

    def __iter__(self) -> Iterator[Change]:
        for run, locations in self._changes:
            olds, news = (list(run.locations_by_block(each)) for each in (run.locations, locations))
            for key, old, new in zip(reversed(run.keys), reversed(olds), reversed(news), strict=True):
                if key not in self._lost:
                    yield Change(key, BlockRecord(None, 0, old), BlockRecord(None, 0, new))


@dataclass(slots=True)
class ReclaimStats:
    """Counts since the manager started; keys are (group, policy, reason).

    Attributes:
        unmet: bytes or blocks above a watermark after the last round, by reason: all that is left is pinned or in use.
        ages: seconds since some of the evicted blocks were read.
        rounds: durations of rounds, in seconds.
    """

    evicted_keys: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    evicted_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    submitted_blocks: int = 0
    submitted_locations: int = 0
    round_count: int = 0
    unmet: Counter[str] = field(default_factory=Counter)
    ages: Histogram = field(default_factory=lambda: Histogram(AGES))
    rounds: Histogram = field(default_factory=Histogram)

    def record(self, evicted: EvictionRecord) -> None:
        """Count marked blocks."""
        label = (evicted.instance.instance_group_name, evicted.policy, evicted.need.reason.value)
        self.evicted_keys[label] += len(evicted.keys)
        self.evicted_bytes[label] += evicted.size_bytes
        self.submitted_blocks += len(evicted.keys)
        self.submitted_locations += evicted.locations


# How a follower wakes the leader's reclaimer: over a document of the shared store. Any manager may serve the write that
# crosses a watermark, and the leader evicts. A follower changes the document; the leader looks twenty times a second
# whether the table changed, and starts a round then. It asks the store only while it is not notified of changes.
#
# A second document counts by storage the allocations that followers saw refused for lack of space. The leader's own
# probes may find space there: in a pool that is fragmented, for example.

_DOCUMENT = "wake"
_FULL_DOCUMENT = "full"
_SECONDS = 0.05


class WakeBroadcast:
    """Wakes the leader's reclaimer.

    Args:
        table: for this purpose alone.
        wake: wakes the reclaimer of this manager.
        is_leader: whether that is the one that evicts.
        on_full: called by the leader with a storage that another manager found full.
    """

    def __init__(
        self,
        table: Table,
        wake: Callable[[], None],
        is_leader: Callable[[], bool],
        on_full: Callable[[str], None] = lambda _storage: None,
    ) -> None:
        self._table = table
        self._wake = wake
        self._is_leader = is_leader
        self._on_full = on_full
        self._full: set[str] = set()
        self._full_counts: Mapping[str, int] | None = None
        self._is_requested = False
        self._version: int | None = None
        self._revision: Revision | None = None

    def request(self, _group_name: str = "") -> None:
        """Request a round: a write crossed a watermark or was rejected. Never waits; the leader is notified soon."""
        if self._is_leader():
            self._wake()
        else:
            self._is_requested = True

    def request_eviction(self, storage: str) -> None:
        """Request that blocks leave a storage that refused an allocation for lack of space. Never waits."""
        if self._is_leader():
            self._wake()
        else:
            self._full.add(storage)
            self._is_requested = True

    async def run(self) -> None:
        """Exchange requests until cancelled."""
        while True:
            await self.exchange()
            await asyncio.sleep(_SECONDS)

    async def exchange(self) -> None:
        """Send requests of this manager to the leader, or receive those of others.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if self._is_leader():
            await self._receive()
        elif self._is_requested:
            known = await self._table.get(_DOCUMENT)
            next_value = (int.from_bytes(known or b"") + 1) % (1 << 64)
            await self._table.replace(_DOCUMENT, known, next_value.to_bytes(8))
            await self._send_full()  # behind: a store that is full takes no new document
            self._is_requested = bool(self._full)  # if another manager was faster, its change counts for both

    async def _receive(self) -> None:
        revision = self._table.revision
        if revision is not None and revision == self._revision and not self._is_requested:
            return
        version = await self._table.version()
        if self._is_requested or version != self._version:
            await self._receive_full()
            self._is_requested, self._version = False, version
            self._wake()
        self._revision = revision

    async def _receive_full(self) -> None:
        """Pass on the storages whose count grew; at first those that were counted before are old."""
        counts = _decode_counts(await self._table.get(_FULL_DOCUMENT))
        known = counts if self._full_counts is None else self._full_counts
        self._full_counts = counts
        for storage, count in counts.items():
            if count != known.get(storage, 0):
                self._on_full(storage)

    async def _send_full(self) -> None:
        """Count the storages; if another manager was faster, again with the next exchange."""
        sent = frozenset(self._full)
        known = await self._table.get(_FULL_DOCUMENT) if sent else None
        counts = _decode_counts(known)
        if sent and await self._table.replace(
            _FULL_DOCUMENT, known, msgspec.json.encode(counts | {name: counts.get(name, 0) + 1 for name in sent})
        ):
            self._full -= sent


def _decode_counts(document: bytes | None) -> dict[str, int]:
    try:
        return msgspec.json.decode(document, type=dict[str, int]) if document else {}
    except msgspec.DecodeError:
        return {}


_STEP_SECONDS = 0.1  # between rounds of a group that a step limit holds back
_BETWEEN_ROUNDS_SECONDS = 0.01  # many writes that cross a watermark cause one round
_MOST_WINDOWS = 16  # of 1,024 blocks; the next round continues behind them
_REFRESH_SECONDS = 0.25
_EXPIRY_WINDOWS = 4
_ROUND_SECONDS = 1.0  # then a new round begins, with the current instances, ages and settings
_AGES_PER_BATCH = 16  # of evicted blocks
_LEAST_IN_RUN = 4  # blocks of a run, on average, for which a step per run is the faster way
_NO_LIMIT = 1 << 62  # of a medium that is not measured yet
_log = structlog.get_logger("kvcm.reclaim")


class Reclaimer:
    """Keeps all groups below their watermarks.

    Args:
        indexes: returns the index of every instance, also of those that are being removed.
        find_group: from a name to a group, None when it is gone.
        limits: returns the limits above the groups, as they are now.
        clock: time source.
        on_evicted: receives a record of all marked blocks.
        random: draws samples of shared indexes.
        turns: lets one slice of background work run at a time; deletions should share it.
        media: limits what remains on storages that are full.
    """

    def __init__(
        self,
        indexes: Callable[[], Iterable[IndexHandle]],
        find_group: Callable[[str], InstanceGroup | None],
        limits: Callable[[], Limits],
        clock: Clock,
        on_evicted: Callable[[EvictionRecord], None] = lambda _evicted: None,
        random: Random | None = None,
        turns: Pacer | None = None,
        media: MediaPressure | None = None,
    ) -> None:
        self._indexes = indexes
        self._find_group = find_group
        self._configured_limits = limits
        self._media = media
        self._media_limits: Mapping[str, int] = {}
        self._clock = clock
        self._on_evicted = on_evicted
        self._random = random if random is not None else Random()  # noqa: S311 - a sample, no secret
        self._turns = turns if turns is not None else Pacer()
        self._eviction_orders = EvictionOrders(find_group, partial(_window_order, clock, self._random))
        self._orders: Mapping[int, Order] = {}
        self._usage = UsageReader()
        self._needs_input: tuple[Sequence[InstanceUsage], Limits, Collection[Label]] | None = None
        self._known_needs: Sequence[ReclaimNeed] = ()
        self._wake = asyncio.Event()
        self._generation = -1
        self._expiry_windows: dict[int, int] = {}
        self._windows: defaultdict[Payment, WindowScan] = defaultdict(WindowScan)
        self._hopeless: set[Payment] = set()
        self._refreshed_at = 0.0
        self._is_leader: Callable[[], bool] = lambda: True
        self._marked_bytes: Counter[str] = Counter()
        self._active: set[Label] = set()
        self.is_held_back = False
        self.stats = ReclaimStats()

    def wake(self) -> None:
        """Start a round at once: a write crossed a watermark or was rejected, or settings changed."""
        self._wake.set()

    def on_settings_changed(self, generation: int) -> None:
        """Start a round at once if the configuration changed here or elsewhere: it may move a watermark."""
        if generation != self._generation:
            self._generation = generation
            self._hopeless.clear()
            self._wake.set()

    async def run(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Run rounds while this manager leads, until cancelled."""
        self._is_leader = is_leader
        loop, thorough_at = asyncio.get_running_loop(), 0.0
        while True:
            if is_leader():
                is_hasty = loop.time() < thorough_at
                if not is_hasty:
                    thorough_at = loop.time() + TRIGGER_SECONDS
                begin = time.perf_counter()
                try:
                    await self.reclaim(is_hasty=is_hasty)
                except KvcmError as error:  # the store failed: the next round tries again
                    _log.warning("reclaim_interrupted", reason=str(error))
                except Exception:
                    _log.exception("reclaim_failed")
                self.stats.rounds.observe(time.perf_counter() - begin)
            await asyncio.sleep(_BETWEEN_ROUNDS_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_seconds()):
                    await self._wake.wait()
            self._wake.clear()

    def _pause_seconds(self) -> float:
        if not self._is_leader():  # then it may lead at any moment
            return TRIGGER_SECONDS
        return _STEP_SECONDS if self.is_held_back else self._eviction_orders.round_seconds

    def update_orders(self) -> None:
        """Adapt the eviction orders to the current groups. A new policy reads the whole index once."""
        self._eviction_orders.update(self._indexes(), self._limits())
        self._orders = self._eviction_orders.by_uid

    async def begin(self) -> None:
        """Do `update_orders` at startup: it reads every block and lets probes run meanwhile. No index may change before
        this returns."""
        await self._eviction_orders.build(self._indexes(), self._limits())
        self._orders = self._eviction_orders.by_uid

    async def reclaim(self, *, is_hasty: bool = False) -> int:
        """Bring all usage below the watermarks; return the number of blocks that were marked.

        Args:
            is_hasty: skip needs that the last round could not serve: little will have changed.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self.stats.round_count += 1
        self.stats.unmet.clear()
        self._find_full_media()
        self.update_orders()
        self._marked_bytes.clear()
        for scan in self._windows.values():
            scan.start_round()
        self.is_held_back = False
        if not is_hasty:
            self._hopeless.clear()
        await self._refresh()
        self._limit_full_media()
        return await self._expire() + await self._serve_needs()

    def _limits(self) -> Limits:
        return self._configured_limits()._replace(media=self._media_limits)

    def _find_full_media(self) -> None:
        """Find the full storages: then every instance has an order, and is measured."""
        if self._media is not None:
            full = self._media.full(self._configured_limits().storages)
            self._media_limits = {name: self._media_limits.get(name, _NO_LIMIT) for name in full}

    def _limit_full_media(self) -> None:
        if self._media is not None:
            held = self._held_bytes() if self._media_limits else {}
            self._media_limits = self._media.limits(self._media_limits, held)

    def _held_bytes(self) -> dict[str, HeldBytes]:
        """Return what lies on each storage."""
        remaining: Counter[str] = Counter()
        deleting: Counter[str] = Counter()
        for holding in self._holdings():
            for place, size in holding.remaining.items():
                remaining[place.storage] += size
        for handle in self._indexes():
            for place, size in handle.meta_index.deleting_bytes.items():
                deleting[place.storage] += size
        return {name: HeldBytes(remaining[name], deleting[name]) for name in remaining.keys() | deleting.keys()}

    async def _refresh(self) -> None:
        """Read the usage of shared indexes that changed."""
        for handle in self._indexes():
            if handle.uid in self._orders and handle.meta_index.is_shared:
                await handle.meta_index.refresh(is_exact=False)
        self._refreshed_at = self._clock.now()

    async def _serve_needs(self) -> int:
        total, servings = 0, NeedQueue(self._hopeless)
        until = self._clock.now() + _ROUND_SECONDS
        while self._is_leader():
            if self._clock.now() >= until:
                self._wake.set()
                break
            found = self._needs()
            need = servings.next(found)
            if need is None:
                self._count_unmet(found)
                break
            blocks = await self._serve(need, servings.of(need, self._clock.now()))
            servings.record(need, blocks, is_held_back=self.is_held_back)
            total += blocks
            await self._turns.pause()
            if self._clock.now() >= self._refreshed_at + _REFRESH_SECONDS:  # others write and remove meanwhile
                await self._refresh()
        return total

    def _count_unmet(self, hopeless: Sequence[ReclaimNeed]) -> None:
        """Count the excess that is left, once per watermark. Excess that a step limit left is evicted later."""
        if self.is_held_back:
            return
        amounts: dict[Label, int] = {}
        for need in hopeless:
            amounts[need.label] = max(need.amount, amounts.get(need.label, 0))
        for (reason, _), amount in amounts.items():
            self.stats.unmet[reason.value] += amount

    def _holdings(self) -> list[InstanceUsage]:
        groups = ((each, self._find_group(each.instance.instance_group_name)) for each in self._indexes())
        return self._usage.of((each, group) for each, group in groups if group is not None and each.uid in self._orders)

    def _needs(self) -> Sequence[ReclaimNeed]:
        """Return the needs, recomputed only when an input changed."""
        needs_input = (self._holdings(), self._limits(), self._active)
        if needs_input != self._needs_input:
            self._needs_input, self._known_needs = needs_input, list(needs(*needs_input))
        self._active = {need.label for need in self._known_needs}
        return self._known_needs

    def indexes(self) -> dict[int, MetaIndex]:
        """Return the indexes by uid."""
        return {handle.uid: handle.meta_index for handle in self._indexes()}

    async def _serve(self, need: ReclaimNeed, serving: NeedProgress) -> int:
        """Mark a batch of victims for a need; return how many blocks were marked, 0 when no victim was found."""
        allowed = self._step_allowance(need)
        if allowed <= 0:
            self.is_held_back = True
            return 0
        batch = _VictimBatch(self, need)
        goal = Goal(need, amount=need.amount, most_bytes=allowed, most=batch.most, now=self._clock.now())
        try:
            if batch.is_shared:
                await self._choose_in_windows(goal, serving.shares, batch)
            else:
                sources = await self._sources(need.usages, batch, 0, batch.most)
                await select_victims(goal, sources, serving.shares, batch, serving.scan)
        except BaseException:
            batch.report()
            raise
        return await batch.finish()

    async def _choose_in_windows(self, goal: Goal, shares: ShareOrder, batch: _VictimBatch) -> None:
        """Select victims window by window, from where the last batch or round found some, round to where it began."""
        scan = self._windows[_payment_of(goal.need)]
        scan.start_batch()
        for _ in range(_MOST_WINDOWS):
            count = goal.most if scan.window else min(goal.most, goal.need.blocks)
            if await self._choose_runs(goal, shares, batch, scan.window, count):
                scan.found()
                break
            sources = await self._sources(goal.need.usages, batch, scan.window, count)
            if sources and await select_victims(goal, sources, shares, batch, ScanState()):
                scan.found()
                break
            if scan.passed(is_end=not sources):
                break

    async def _choose_runs(self, goal: Goal, shares: ShareOrder, batch: _VictimBatch, window: int, count: int) -> int:
        """Select and mark blocks of whole runs where that is what the policy would do; return how many were marked."""
        sources: list[ColdRuns] = []
        for holding in goal.need.usages:
            order, index = self._orders[holding.uid], batch.indexes[holding.uid]
            if not isinstance(order, WindowOrder) or not can_go_by_runs(goal.need, holding, index, order.plan):
                return 0
            sources.append(ColdRuns(goal.need, holding, index, order, goal.now))
        for source in sources:
            await source.read(count, window)
        await select_runs(goal, sources, shares)
        return await batch.mark_runs(sources)

    def _step_allowance(self, need: ReclaimNeed) -> int:
        """Return how many bytes this round may still mark."""
        allowances = [1 << 62]
        for name, group in {holding.group.name: holding.group for holding in need.usages}.items():
            strategy = group.cache_config.reclaim_strategy
            if strategy.reclaim_step_size:
                allowances.append(strategy.reclaim_step_size - self._marked_bytes[name])
            if strategy.reclaim_step_percentage:
                step = group.quota.capacity * strategy.reclaim_step_percentage // 100
                allowances.append(step - self._marked_bytes[name])
        return min(allowances)

    async def _sources(
        self, holdings: Sequence[InstanceUsage], batch: _VictimBatch, window: int, count: int
    ) -> list[Source]:
        sources = []
        for holding in holdings:
            order = self._orders[holding.uid]
            known = await order.prepare(count, window)
            if len(order):
                chains = Chains(batch.indexes[holding.uid], known)
                if known:
                    await chains.prefetch_families(known.keys())
                sources.append(Source(holding, order, chains, partial(self._is_over_budget, holding.group)))
        return sources

    def _is_over_budget(self, group: InstanceGroup, prefix_class: PrefixClass) -> bool:
        used = sum(
            self._orders[handle.uid].class_bytes(prefix_class.name)
            for handle in self._indexes()
            if handle.instance.instance_group_name == group.name and handle.uid in self._orders
        )
        return used > prefix_class.budget * group.quota.capacity

    async def _expire(self) -> int:
        """Mark blocks that have reached the age that their policy allows."""
        total, expiring = 0, self._eviction_orders.expiring
        for holding in self._holdings() if expiring else ():
            if holding.uid in expiring:
                while blocks := await self._expire_some(holding):
                    total += blocks
                    await self._turns.pause()
                total += await self._expire_windows(holding)
        return total

    async def _expire_windows(self, holding: InstanceUsage) -> int:
        """Over a shared store expired blocks may stand behind many that are pinned, or of a class with a longer TTL:
        continue where the last round stopped, some windows at a time."""
        order = self._orders.get(holding.uid)
        if not isinstance(order, WindowOrder):
            return 0
        if not order.plan.classes and next(order.expired(self._clock.now()), None) is None:
            return 0  # the coldest blocks are young enough
        total, window = 0, self._expiry_windows.get(holding.uid, 1)
        for _ in range(_EXPIRY_WINDOWS):
            blocks = await self._expire_some(holding, window)
            total += blocks
            window += not blocks
            if not len(order):
                window = 1
                break
        self._expiry_windows[holding.uid] = window
        return total

    async def _expire_some(self, holding: InstanceUsage, window: int = 0) -> int:
        if holding.uid not in self.indexes():
            return 0  # it was removed since the round began
        need = ReclaimNeed(
            Reason.TTL, amount=1 << 62, filter=lambda _place: True, usages=[holding], name=holding.instance.instance_id
        )
        batch = _VictimBatch(self, need)
        goal = Goal(need, amount=need.amount, most_bytes=need.amount, most=batch.most, now=self._clock.now())
        for source in await self._sources([holding], batch, window, batch.most):
            await select_expired(goal, source, batch)
        return await batch.finish()

    async def mark_runs(
        self, need: ReclaimNeed, source: ColdRuns, index: MetaIndex, runs: Collection[tuple[StoredRun, Access]]
    ) -> EvictionRecord:
        """Mark runs of one instance by compare-and-set."""
        now = self._clock.now()
        due = common_due(now, _delay_seconds(source.holding.group))
        changes = [(run, tuple([marked_location(each, due) for each in run.locations])) for run, _ in runs]
        lost = await index.change_runs(changes)
        for run, access in runs:
            if run.keys[-1] not in lost:
                self._note_age(access)
        return EvictionRecord.of_runs(source.holding, need, source.policy, _MarkedRuns(changes, lost))

    async def mark(
        self, need: ReclaimNeed, source: Source, index: MetaIndex, evictions: Mapping[int, Eviction]
    ) -> list[EvictionRecord]:
        """Mark victims of one instance by compare-and-set; return what changed, by the policy that chose it."""
        order = self._orders[source.holding.uid]
        order.is_evicting = True
        try:
            in_runs = await self._mark_in_runs(need, source, index, evictions)
            return [in_runs] if in_runs is not None else await self._mark_one_by_one(need, source, index, evictions)
        finally:
            order.is_evicting = False

    async def _mark_in_runs(
        self, need: ReclaimNeed, source: Source, index: MetaIndex, evictions: Mapping[int, Eviction]
    ) -> EvictionRecord | None:
        """Do `mark` in a step per run of blocks whose only locations are alike; None where there are others."""
        policies = {each.policy for each in evictions.values()}
        runs = sum(1 for _ in groupby(evictions.values(), key=attrgetter("location_ids")))
        if len(policies) > 1 or _LEAST_IN_RUN * runs > len(evictions) or any(each.thin for each in evictions.values()):
            return None
        now = self._clock.now()
        due = common_due(now, _delay_seconds(source.holding.group))
        changes: list[RunChange] = []

        def ending(run: UniformRun) -> UniformRun | None:
            going = frozenset((run.location.id,))
            if run.location.pinned_until > now or any(evictions[key].location_ids != going for key in run.keys):
                return None
            after = marked_location(run.location, due)
            locations, chunks = (run.location,), [run.chunks[::-1]]
            before = StoredRun(b"", run.keys[::-1], parent=None, depth=0, locations=locations, chunks=chunks)
            changes.append((before, (after,)))
            return run._replace(location=after)

        if index.retire(list(evictions), ending) is None:
            return None
        for access in await index.accesses([*evictions][:: max(1, len(evictions) // _AGES_PER_BATCH)]):
            self._note_age(access)
        (policy,) = policies
        return EvictionRecord.of_runs(source.holding, need, policy, _MarkedRuns(changes, ()))

    def _note_age(self, access: Access | None) -> None:
        """Note how old a block was that went."""
        if access is not None:
            self.stats.ages.observe(max(0.0, self._clock.now() - access.at))

    async def _mark_one_by_one(
        self, need: ReclaimNeed, source: Source, index: MetaIndex, evictions: Mapping[int, Eviction]
    ) -> list[EvictionRecord]:
        delay = _delay_seconds(source.holding.group)

        def mark(key: int, old: BlockRecord | None) -> BlockRecord | None:
            now = self._clock.now()  # per key: a slow store must not shorten the delay
            return marked(old, evictions[key], now, common_due(now, delay))

        # Read before: a shared store drops the access time of a block as soon as it is marked.
        sampled = [*evictions][:: max(1, len(evictions) // _AGES_PER_BATCH)]
        read_at = dict(zip(sampled, await index.accesses(sampled), strict=True))
        changes = await index.read_modify_write(evictions, mark)
        by_policy: defaultdict[str, list[Change]] = defaultdict(list)
        for change in changes:
            if change.new is change.old:
                continue
            by_policy[evictions[change.key].policy].append(change)
            self._note_age(read_at.get(change.key))
        return [EvictionRecord.of(source.holding, need, policy, some) for policy, some in by_policy.items()]

    def report(self, evicted: EvictionRecord) -> None:
        """Count and publish marked blocks."""
        self._marked_bytes[evicted.instance.instance_group_name] += evicted.size_bytes
        self.stats.record(evicted)
        self._on_evicted(evicted)


def _window_order(clock: Clock, random: Random, index: MetaIndex, plan: OrderPlan) -> WindowOrder:
    return WindowOrder(index, plan, clock, random)


def _delay_seconds(group: InstanceGroup) -> float:
    return group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000
