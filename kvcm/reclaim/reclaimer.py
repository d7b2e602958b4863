"""The reclaimer: keeps usage below the soft marks by marking blocks as deleting, as few as does.

A look compares usage with every mark (`needs`), chooses victims a few at a time (`victims`), marks them by
compare-and-set, and compares again, until nothing is above its mark. What is marked counts as gone at once, so the
delay before a deletion changes nothing. Bytes are freed by the deletion executor.

It looks once per trigger period, and at once when a write crosses a mark or is refused, or settings change. A step
limit of a group bounds what one look marks; then the next look follows after a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random

import structlog

from kvcm.index.meta_index import Change, MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.groups import InstanceGroup, PrefixClass
from kvcm.model.locations import BlockRecord
from kvcm.reclaim.batch import Batch
from kvcm.reclaim.chains import Chains
from kvcm.reclaim.custody import IndexInCustody
from kvcm.reclaim.evicted import Evicted, ReclaimStats
from kvcm.reclaim.holdings import Holding, Holdings
from kvcm.reclaim.lanes import OrderPlan
from kvcm.reclaim.marking import Eviction, marked
from kvcm.reclaim.needs import Label, Limits, Need, Reason, needs
from kvcm.reclaim.orders import TRIGGER_SECONDS, Order, Orders
from kvcm.reclaim.servings import Payment, Serving, Servings, payment_of
from kvcm.reclaim.shares import Shares
from kvcm.reclaim.turns import Turns
from kvcm.reclaim.victims import Goal, Source, Walk, choose, choose_expired
from kvcm.reclaim.window_order import WindowOrder
from kvcm.reclaim.windows import WindowWalk

__all__ = ["Reclaimer"]

_STEP_SECONDS = 0.1  # between looks of a group that a step limit holds back
_BETWEEN_LOOKS_SECONDS = 0.01  # many writes that cross a mark are one reason to look
_MOST_WINDOWS = 16  # of 1,024 blocks; the next look goes on behind them
_REFRESH_SECONDS = 0.25
_EXPIRY_WINDOWS = 4
_LOOK_SECONDS = 1.0  # then it begins anew, with instances, ages and settings as they are now
_AGES_PER_BATCH = 16  # of evicted blocks

_log = structlog.get_logger("kvcm.reclaim")


class Reclaimer:
    """Keeps all groups below their marks.

    Args:
        indexes: returns the index of every instance, also of those that are being removed.
        find_group: from a name to a group, None when it is gone.
        limits: returns the limits above the groups, as they are now.
        clock: time source.
        on_evicted: told of everything that is marked.
        random: draws samples of shared indexes.
        turns: lets one slice of background work run at a time; deletions should share it.
    """

    def __init__(
        self,
        indexes: Callable[[], Iterable[IndexInCustody]],
        find_group: Callable[[str], InstanceGroup | None],
        limits: Callable[[], Limits],
        clock: Clock,
        on_evicted: Callable[[Evicted], None] = lambda _evicted: None,
        random: Random | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._indexes = indexes
        self._find_group = find_group
        self._limits = limits
        self._clock = clock
        self._on_evicted = on_evicted
        self._random = random if random is not None else Random()  # noqa: S311 - a sample, no secret
        self._turns = turns if turns is not None else Turns()
        self._following = Orders(find_group, partial(_window_order, clock, self._random))
        self._orders: Mapping[int, Order] = {}
        self._held = Holdings()
        self._asked: tuple[Sequence[Holding], Limits, Collection[Label]] | None = None
        self._found: Sequence[Need] = ()
        self._wake = asyncio.Event()
        self._generation = -1
        self._expiry_windows: dict[int, int] = {}
        self._windows: defaultdict[Payment, WindowWalk] = defaultdict(WindowWalk)
        self._hopeless: set[Payment] = set()
        self._refreshed_at = 0.0
        self._is_leader: Callable[[], bool] = lambda: True
        self._stepped: Counter[str] = Counter()
        self._active: set[Label] = set()
        self.is_held_back = False
        self.stats = ReclaimStats()

    def wake(self) -> None:
        """Look at once: a write crossed a mark or was refused, or settings changed."""
        self._wake.set()

    def note_settings(self, generation: int) -> None:
        """Look at once if what is configured has changed, whoever did that: it may move a mark."""
        if generation != self._generation:
            self._generation = generation
            self._hopeless.clear()
            self._wake.set()

    async def run(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Look again and again while this manager leads, until cancelled."""
        self._is_leader = is_leader
        loop, thorough_at = asyncio.get_running_loop(), 0.0
        while True:
            if is_leader():
                is_hasty = loop.time() < thorough_at
                if not is_hasty:
                    thorough_at = loop.time() + TRIGGER_SECONDS
                begin = time.perf_counter()
                try:
                    await self.look(is_hasty=is_hasty)
                except KvcmError as error:  # the store cannot be asked: the next look tries again
                    _log.warning("reclaim_interrupted", reason=str(error))
                except Exception:
                    _log.exception("reclaim_failed")
                self.stats.rounds.observe(time.perf_counter() - begin)
            await asyncio.sleep(_BETWEEN_LOOKS_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_seconds()):
                    await self._wake.wait()
            self._wake.clear()

    def _pause_seconds(self) -> float:
        if not self._is_leader():  # then it may lead at any moment
            return TRIGGER_SECONDS
        return _STEP_SECONDS if self.is_held_back else self._following.seconds_between_looks

    def follow(self) -> None:
        """Keep an order of what can be evicted, as the groups say now. A new policy reads the whole index once."""
        self._following.follow(self._indexes(), self._limits())
        self._orders = self._following.by_uid

    async def begin(self) -> None:
        """Do `follow` before anything is served: every block is read, and probes are answered meanwhile. Until this
        returns nobody may change an index."""
        await self._following.begin(self._indexes(), self._limits())
        self._orders = self._following.by_uid

    async def look(self, *, is_hasty: bool = False) -> int:
        """Bring everything below its mark; return the number of blocks that were marked.

        Args:
            is_hasty: leave out what the last look could not serve: little will have changed.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self.stats.looks += 1
        self.stats.unmet.clear()
        self.follow()
        self._stepped.clear()
        for walk in self._windows.values():
            walk.begin_look()
        self.is_held_back = False
        if not is_hasty:
            self._hopeless.clear()
        await self._refresh()
        return await self._expire() + await self._serve_needs()

    async def _refresh(self) -> None:
        """Hear what shared indexes hold."""
        for custody in self._indexes():
            if custody.uid in self._orders and custody.meta_index.is_shared:
                await custody.meta_index.refresh()
        self._refreshed_at = self._clock.now()

    async def _serve_needs(self) -> int:
        total, servings = 0, Servings(self._hopeless)
        until = self._clock.now() + _LOOK_SECONDS
        while self._is_leader():
            if self._clock.now() >= until:
                self._wake.set()
                break
            found = self._needs()
            need = servings.next(found)
            if need is None:
                self._note_unmet(found)
                break
            blocks = await self._serve(need, servings.of(need, self._clock.now()))
            servings.note(need, blocks, is_held_back=self.is_held_back)
            total += blocks
            await self._turns.give_way()
            if self._clock.now() >= self._refreshed_at + _REFRESH_SECONDS:  # others write and remove meanwhile
                await self._refresh()
        return total

    def _note_unmet(self, hopeless: Sequence[Need]) -> None:
        """Count what is left to do, once per mark whoever could have paid; what a step limit left is done later."""
        if self.is_held_back:
            return
        amounts: dict[Label, int] = {}
        for need in hopeless:
            amounts[need.label] = max(need.amount, amounts.get(need.label, 0))
        for (reason, _), amount in amounts.items():
            self.stats.unmet[reason.value] += amount

    def _holdings(self) -> list[Holding]:
        groups = ((each, self._find_group(each.instance.instance_group_name)) for each in self._indexes())
        return self._held.of((each, group) for each, group in groups if group is not None and each.uid in self._orders)

    def _needs(self) -> Sequence[Need]:
        """Return what has to go; found out anew only when something it depends on has changed."""
        asked = (self._holdings(), self._limits(), self._active)
        if asked != self._asked:
            self._asked, self._found = asked, list(needs(*asked))
        self._active = {need.label for need in self._found}
        return self._found

    def indexes(self) -> dict[int, MetaIndex]:
        """Return the indexes by uid."""
        return {custody.uid: custody.meta_index for custody in self._indexes()}

    async def _serve(self, need: Need, serving: Serving) -> int:
        """Mark a batch of victims for a need; return how many blocks were marked, 0 when there are none to be had."""
        allowed = self._step_allowance(need)
        if allowed <= 0:
            self.is_held_back = True
            return 0
        batch = Batch(self, need)
        goal = Goal(need, need.amount, allowed, batch.most, self._clock.now())
        if batch.is_shared:
            await self._choose_in_windows(goal, serving.shares, batch)
        else:
            await choose(goal, await self._sources(need.holdings, batch, 0), serving.shares, batch, serving.walk)
        return await batch.end()

    async def _choose_in_windows(self, goal: Goal, shares: Shares, batch: Batch) -> None:
        """Look for victims window by window, from where the last batch or look found some, round to where it began."""
        walk = self._windows[payment_of(goal.need)]
        walk.begin_batch()
        for _ in range(_MOST_WINDOWS):
            sources = await self._sources(goal.need.holdings, batch, walk.window)
            if sources and await choose(goal, sources, shares, batch, Walk()):
                walk.found()
                break
            if walk.passed(is_end=not sources):
                break

    def _step_allowance(self, need: Need) -> int:
        """Return how many bytes this look may still mark."""
        allowances = [1 << 62]
        for name, group in {holding.group.name: holding.group for holding in need.holdings}.items():
            strategy = group.cache_config.reclaim_strategy
            if strategy.reclaim_step_size:
                allowances.append(strategy.reclaim_step_size - self._stepped[name])
            if strategy.reclaim_step_percentage:
                step = group.quota.capacity * strategy.reclaim_step_percentage // 100
                allowances.append(step - self._stepped[name])
        return min(allowances)

    async def _sources(self, holdings: Sequence[Holding], batch: Batch, window: int) -> list[Source]:
        sources = []
        for holding in holdings:
            order = self._orders[holding.uid]
            known = await order.prepare(batch.most, window)
            if len(order):
                chains = Chains(batch.indexes[holding.uid], known)
                if known:
                    await chains.look_around(known.keys())
                sources.append(Source(holding, order, chains, partial(self._is_over_budget, holding.group)))
        return sources

    def _is_over_budget(self, group: InstanceGroup, prefix_class: PrefixClass) -> bool:
        used = sum(
            self._orders[custody.uid].class_bytes(prefix_class.name)
            for custody in self._indexes()
            if custody.instance.instance_group_name == group.name and custody.uid in self._orders
        )
        return used > prefix_class.budget * group.quota.capacity

    async def _expire(self) -> int:
        """Mark what has reached the age that its policy allows."""
        total, expiring = 0, self._following.expiring
        for holding in self._holdings() if expiring else ():
            if holding.uid in expiring:
                while blocks := await self._expire_some(holding):
                    total += blocks
                    await self._turns.give_way()
                total += await self._expire_behind(holding)
        return total

    async def _expire_behind(self, holding: Holding) -> int:
        """Over a shared store what has reached its age may stand behind many blocks that are pinned, or of a class that
        grows older: walk on from where the last look stopped, some windows at a time."""
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

    async def _expire_some(self, holding: Holding, window: int = 0) -> int:
        if holding.uid not in self.indexes():
            return 0  # it was removed since the look began
        need = Need(Reason.TTL, 1 << 62, lambda _place: True, [holding], holding.instance.instance_id)
        batch = Batch(self, need)
        goal = Goal(need, need.amount, need.amount, batch.most, self._clock.now())
        for source in await self._sources([holding], batch, window):
            await choose_expired(goal, source, batch)
        return await batch.end()

    async def mark(
        self, source: Source, index: MetaIndex, evictions: Mapping[int, Eviction]
    ) -> list[tuple[str, Change]]:
        """Mark victims of one instance by compare-and-set; return what changed, each with the policy that chose it."""
        delay = _delay_seconds(source.holding.group)

        def mark(key: int, old: BlockRecord | None) -> BlockRecord | None:
            now = self._clock.now()  # a store that takes its time must not eat up the delay
            return marked(old, evictions[key], now, now + delay)

        # Asked before: a shared store forgets when a block was read as soon as it is marked.
        sampled = [*evictions][:: max(1, len(evictions) // _AGES_PER_BATCH)]
        read_at = dict(zip(sampled, await index.accesses(sampled), strict=True))
        order = self._orders[source.holding.uid]
        order.is_evicting = True
        try:
            changes = await index.read_modify_write(evictions, mark)
        finally:
            order.is_evicting = False
        marked_blocks = [(evictions[change.key].policy, change) for change in changes if change.new is not change.old]
        for _, change in marked_blocks:
            if (access := read_at.get(change.key)) is not None:
                self.stats.ages.observe(max(0.0, self._clock.now() - access.at))
        return marked_blocks

    def tell(self, need: Need, holding: Holding, marked_blocks: Sequence[tuple[str, Change]]) -> int:
        """Count and publish what was marked; return the number of blocks."""
        by_policy: defaultdict[str, list[Change]] = defaultdict(list)
        for policy, change in marked_blocks:
            by_policy[policy].append(change)
        for policy, changes in by_policy.items():
            evicted = Evicted(holding.instance, need, policy, changes, _delay_seconds(holding.group))
            self._stepped[holding.group.name] += sum(location.size_bytes for location in evicted.locations)
            self.stats.note(evicted)
            self._on_evicted(evicted)
        return len(marked_blocks)


def _window_order(clock: Clock, random: Random, index: MetaIndex, plan: OrderPlan) -> WindowOrder:
    return WindowOrder(index, plan, clock, random)


def _delay_seconds(group: InstanceGroup) -> float:
    return group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000
