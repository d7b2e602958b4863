"""The choice of victims: what goes next to serve a need, as little as does.

For an instance with linear-attention state the states between go first: a match can end only at a block that has one,
so they are kept longest at branch points and at ends of chains. Then whole blocks go, the tail of a chain before its
head. A block that lies elsewhere, too, loses only what helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.reclaim.chains import Chains
from kvcm.reclaim.guard import MOST_FOLLOWERS, TailFirst
from kvcm.reclaim.lanes import Candidate, IsOverBudget
from kvcm.reclaim.marking import Eviction, locations_to_evict, thinned_size
from kvcm.reclaim.needs import Holding, Need
from kvcm.reclaim.shares import Shares

__all__ = ["Goal", "Order", "Reach", "Source", "Taker", "Victim", "Walk", "choose", "choose_expired"]

_LOOKS_WITHOUT_REST = 128
_NAMES_LEAVES = "leaf_lru"
_DELETING = LocationStatus.DELETING
_MOST_THINNING_LOOKS = 512  # candidates that are looked at for states between, before whole blocks go


class Order(Protocol):
    """The order of eviction of one instance."""

    def __len__(self) -> int:
        """Return the number of blocks that may be candidates."""

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        """Fetch what is needed to name so many candidates; if those were of no help, of the next window, and so on.
        Return the records that were read for that."""

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a prefix class."""

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks in the order in which they are to go."""

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks that have reached their age."""

    def took(self, key: int) -> None:
        """Nothing is left of a block that was chosen."""

    async def settle(self) -> None:
        """Write back what the choice changed in the order."""


class Source(NamedTuple):
    """An instance that can give up blocks.

    Attributes:
        holding: what it holds.
        order: of its blocks.
        chains: a look at its blocks that lasts as long as the choice.
        is_over_budget: about a prefix class of its group.
    """

    holding: Holding
    order: Order
    chains: Chains
    is_over_budget: IsOverBudget


class Goal(NamedTuple):
    """When to stop.

    Attributes:
        need: what victims are for.
        amount: stop when so much is chosen.
        most_bytes: stop when so many bytes are chosen, whether they help or not.
        most: stop when so many blocks are chosen.
        now: unix seconds; what is pinned longer is left alone.
    """

    need: Need
    amount: int
    most_bytes: int
    most: int
    now: float


class Victim(NamedTuple):
    """What goes of one block.

    Attributes:
        source: its instance.
        eviction: the parts.
        amount: how much of the need that serves.
    """

    source: Source
    eviction: Eviction
    amount: int


class Taker(Protocol):
    """Gathers victims and marks them."""

    def take(self, victim: Victim) -> None:
        """A victim was chosen. Whatever is chosen next is chosen as if it were gone."""

    async def rest(self) -> None:
        """Let requests run. What they could find half gone is marked before."""


class Reach(IntEnum):
    """How far the choice goes beyond the blocks that an order names; further only where nothing nearer helps."""

    AS_COLD = 0
    """Copies of the blocks before one that is named, which lie elsewhere too, as long as they are as cold."""
    ANY_COPY = 1
    """Such copies, however lately they were read."""
    DESCENDANTS = 2
    """What follows a block that is named, although it lies where it does not help: nobody could read it."""


class Walk:
    """How far a look has come through the orders for one need. It lasts from batch to batch: what was of no help once
    is not looked at again until the next look.

    Attributes:
        reach: how far the choice goes.
        climbed: blocks before which nothing is looked for any more.
    """

    def __init__(self) -> None:
        self.reach = Reach.AS_COLD
        self.climbed: set[tuple[int, int]] = set()
        self._walks: dict[int, Iterator[Candidate]] = {}
        self._heads: dict[int, Candidate | None] = {}

    def head(self, source: Source) -> Candidate | None:
        """Return the candidate of a source, None when it has no more."""
        uid = source.holding.uid
        if uid not in self._walks:
            self._walks[uid] = source.order.candidates(source.is_over_budget)
            self.advance(source)
        return self._heads[uid]

    def advance(self, source: Source) -> None:
        """Go on to the next candidate of a source."""
        uid = source.holding.uid
        self._heads[uid] = next(self._walks[uid], None)

    def reach_further(self) -> bool:
        """Begin again and go further; False when that is not possible."""
        if self.reach is Reach.DESCENDANTS:
            return False
        self.reach = Reach(self.reach + 1)
        self.climbed.clear()
        self._walks.clear()
        self._heads.clear()
        return True


async def choose(goal: Goal, sources: Sequence[Source], shares: Shares, taker: Taker, walk: Walk) -> list[Victim]:
    """Choose victims.

    Args:
        goal: what they are for.
        sources: where from.
        shares: whose turn it is.
        taker: told of each.
        walk: where the last batch of this look stopped.
    """
    choice = _Choice(goal, shares, taker, walk)
    for source in sources:
        if source.holding.instance.linear_spec_names and not goal.need.counts_blocks:
            await choice.thin(source)
    while not choice.victims:
        await choice.take(sources)
        if not choice.victims and not walk.reach_further():
            break
    return choice.victims


async def choose_expired(goal: Goal, source: Source, taker: Taker) -> list[Victim]:
    """Choose what has reached its age and is not followed by anything that has not."""
    choice = _Choice(goal, Shares(goal.need, goal.now), taker, Walk())
    await choice.expire(source)
    return choice.victims


class _Choice:
    """Victims as they are chosen."""

    def __init__(self, goal: Goal, shares: Shares, taker: Taker, walk: Walk) -> None:
        self.victims: list[Victim] = []
        self._walk = walk
        self._looks = 0
        self._need = goal.need
        self._left = goal.amount
        self._bytes_left = goal.most_bytes
        self._most = goal.most
        self._now = goal.now
        self._shares = shares
        self._taker = taker

    def is_enough(self) -> bool:
        return min(self._left, self._bytes_left) <= 0 or len(self.victims) >= self._most

    async def take(self, sources: Sequence[Source]) -> None:
        """Take whole blocks, each time from the source whose turn it is."""
        while not self.is_enough():
            await self._rest(sources)
            heads = [(source, head) for source in sources if (head := self._walk.head(source)) is not None]
            if not heads:
                return
            turn = self._shares.first([(source.holding.uid, head) for source, head in heads]) if len(heads) > 1 else 0
            source, head = heads[turn]
            await self._take_with_tail(source, head)
            if not self.is_enough():  # else this candidate may have more to give
                self._walk.advance(source)

    async def _rest(self, sources: Sequence[Source]) -> None:
        """Let requests run where many candidates are of no help, or one has many followers; what was read of them may
        be old then."""
        self._looks += 1 + sum([source.chains.looked() for source in sources])
        if self._looks >= _LOOKS_WITHOUT_REST:
            self._looks = 0
            await self._taker.rest()
            for source in sources:
                await source.chains.renew()

    async def _take_with_tail(self, source: Source, head: Candidate) -> None:
        record = await source.chains.record(head.key)
        if record is None:
            return
        is_leaf = await source.chains.is_leaf(head.key)
        if self._helping(source, head.key, record):
            if not is_leaf and not self._stays_readable(source, head.key, record):
                # Over a shared store it may take for a leaf what is none: then what follows goes if it is as cold.
                await self._take_tail(source, head, head.read_at if head.policy == _NAMES_LEAVES else None)
                return
            self._evict(source, head.key, record, head.policy)
        if head.policy != _NAMES_LEAVES:
            return
        if source.chains.is_living(head.key, record):
            await self._take_before(source, head, record)
        elif not source.chains.is_shared:
            await self._take_colder_ends(source, head, record)

    async def _take_colder_ends(self, source: Source, head: Candidate, record: BlockRecord) -> None:
        """The end of a chain went. If the block before it is the end now, and colder, it is the coldest of all ends,
        and the order has left it behind."""
        while record.parent is not None and not self.is_enough():
            key = record.parent
            if (await source.chains.read_at([key]))[key] >= head.read_at:
                return  # as for nearly all: whoever reads a block reads those before it
            parent = await source.chains.record(key)
            if parent is None or not self._helping(source, key, parent) or not await source.chains.is_leaf(key):
                return
            self._evict(source, key, parent, head.policy)
            record = parent

    async def _take_tail(self, source: Source, head: Candidate, as_cold_as: float | None = None) -> None:
        """Take what follows a block, and the block at last; only up to what was read later than some time, if any."""
        if self._walk.reach is Reach.DESCENDANTS and await self._spares(source, head.key):
            return
        tail = TailFirst(source.chains, head.key)
        leaf = await tail.next()
        read_at = await source.chains.read_at(list(tail.seen)) if leaf is not None and as_cold_as is not None else {}
        while leaf is not None and not self.is_enough():
            if as_cold_as is not None and read_at.get(leaf[0], 0.0) > as_cold_as:
                return
            self._evict(source, *leaf, head.policy)
            leaf = await tail.next()

    async def _take_before(self, source: Source, head: Candidate, record: BlockRecord) -> None:
        """A block has nothing more that helps, and an order that names ends of chains only names none before it."""
        climbed, uid = self._walk.climbed, source.holding.uid
        while record.parent is not None and (uid, record.parent) not in climbed and not self.is_enough():
            key, parent = record.parent, await source.chains.record(record.parent)
            if parent is None:
                return
            if self._stays_readable(source, key, parent):
                if not await self._is_in_reach(source, key, head):
                    return
                self._evict(source, key, parent, head.policy)
            elif self._walk.reach is Reach.DESCENDANTS and self._helping(source, key, parent):
                await self._take_tail(source, head._replace(key=key))
                return
            climbed.add((uid, key))  # writers can make two blocks each other's parents
            record = parent
            await self._rest([source])

    async def _spares(self, source: Source, key: int) -> bool:
        """Whether a block and what follows it is left alone: where something is pinned or being written nothing is won
        by taking the rest, and where more than one block helps the lower ones cost less, and have their own turn."""
        family = await source.chains.family(key, MOST_FOLLOWERS)
        if family is None:
            return True
        places = [[each for each in record.locations if each.status is not _DELETING] for record in family]
        if any(
            each.status is LocationStatus.WRITING or each.pinned_until > self._now for some in places for each in some
        ):
            return True
        return sum(any(self._need.wanted(each.place) for each in some) for some in places) > 1

    async def _is_in_reach(self, source: Source, key: int, head: Candidate) -> bool:
        return self._walk.reach > Reach.AS_COLD or (await source.chains.read_at([key]))[key] <= head.read_at

    async def expire(self, source: Source) -> None:
        """Take what has reached its age, the tail of a chain first; what others follow that have not stays for them."""
        for candidate in source.order.expired(self._now):
            await self._rest([source])
            record = await source.chains.record(candidate.key)
            if record is not None and await source.chains.is_leaf(candidate.key):
                self._evict(source, candidate.key, record, candidate.policy)
            if self.is_enough():
                return

    def _free(self, source: Source, key: int, record: BlockRecord) -> list[Location]:
        return [each for each in source.chains.serving(key, record) if each.pinned_until <= self._now]

    def _helping(self, source: Source, key: int, record: BlockRecord) -> list[Location]:
        return [each for each in self._free(source, key, record) if self._need.wanted(each.place)]

    def _stays_readable(self, source: Source, key: int, record: BlockRecord) -> bool:
        """Whether a block can be read without what helps, so that nothing behind it loses its prefix."""
        serving = source.chains.serving(key, record)
        going = {each.id for each in self._helping(source, key, record)}
        names = {name for each in serving if each.id not in going for name in each.spec_names}
        return bool(going) and bool(names) and source.holding.instance.is_readable_with(names)

    def _evict(self, source: Source, key: int, record: BlockRecord, policy: str) -> None:
        free = self._free(source, key, record)
        helping = [each for each in free if self._need.wanted(each.place)]
        if helping:
            going = locations_to_evict(source.holding.instance, free, helping)
        elif self._walk.reach is Reach.DESCENDANTS and free:
            going = free
        else:
            return
        if self._need.counts_blocks and source.chains.keeps_some(key, record, going):
            return  # the block would stay
        amount = 1 if self._need.counts_blocks else sum(map(self._need.size_of, going))
        ids = frozenset(each.id for each in going)
        source.chains.choose(key, ids)
        if not source.chains.is_living(key, record):
            source.order.took(key)
        self._add(source, Eviction(key, ids, policy), amount, sum(each.size_bytes for each in going))

    def _add(self, source: Source, eviction: Eviction, amount: int, size_bytes: int) -> None:
        victim = Victim(source, eviction, amount)
        self.victims.append(victim)
        self._taker.take(victim)
        self._shares.took(source.holding.uid, amount)
        self._left -= amount
        self._bytes_left -= size_bytes

    async def thin(self, source: Source) -> None:
        """Take linear-attention state of blocks that have exactly one follower: of candidates, and of the blocks that
        these follow, since some policies name ends of chains only."""
        seen: set[int] = set()
        for candidate in source.order.candidates(source.is_over_budget):
            key: int | None = candidate.key
            while key is not None and key not in seen:
                if self.is_enough() or len(seen) >= _MOST_THINNING_LOOKS:
                    return
                seen.add(key)
                await self._rest([source])
                record = await source.chains.record(key)
                if record is None:
                    break
                await self._thin_block(source, key, record, candidate.policy)
                key = record.parent

    async def _thin_block(self, source: Source, key: int, record: BlockRecord, policy: str) -> None:
        linear = source.holding.instance.linear_spec_names
        helping = [each for each in self._helping(source, key, record) if linear & set(each.spec_names)]
        if helping and await self._is_between(source, key, record, linear):
            amount = sum(thinned_size(each, linear) for each in helping)
            ids = frozenset(each.id for each in helping)
            self._add(source, Eviction(key, ids, policy, linear), amount, amount)

    async def _is_between(self, source: Source, key: int, record: BlockRecord, linear: frozenset[str]) -> bool:
        """Whether a block has state, could be read without it, and has exactly one follower."""
        names = {name for each in source.chains.serving(key, record) for name in each.spec_names}
        if not names & linear or not source.holding.instance.is_readable_with(names - linear):
            return False
        return len(await source.chains.living(await source.chains.children(key))) == 1
