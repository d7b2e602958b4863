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
from kvcm.reclaim.guard import TailFirst
from kvcm.reclaim.lanes import Candidate, IsOverBudget
from kvcm.reclaim.marking import Eviction, locations_to_evict, thinned_size
from kvcm.reclaim.needs import Holding, Need, Reason
from kvcm.reclaim.shares import Shares

__all__ = ["Goal", "Order", "Reach", "Source", "Taker", "Victim", "choose", "choose_expired"]

_LOOKS_WITHOUT_REST = 128
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


async def choose(goal: Goal, sources: Sequence[Source], shares: Shares, taker: Taker) -> list[Victim]:
    """Choose victims.

    Args:
        goal: what they are for.
        sources: where from.
        shares: whose turn it is.
        taker: told of each.
    """
    choice = _Choice(goal, shares, taker)
    for source in sources:
        if source.holding.instance.linear_spec_names and not goal.need.counts_blocks:
            await choice.thin(source)
    for reach in (Reach.AS_COLD, Reach.ANY_COPY, Reach.DESCENDANTS):
        if not choice.victims:
            choice.reach = reach
            await choice.take(sources)
    return choice.victims


async def choose_expired(goal: Goal, source: Source, taker: Taker) -> list[Victim]:
    """Choose what has reached its age."""
    choice = _Choice(goal, Shares(goal.need, goal.now), taker)
    await choice.expire(source)
    return choice.victims


class Reach(IntEnum):
    """How far the choice goes beyond the blocks that an order names; further only where nothing nearer helps."""

    AS_COLD = 0
    """Copies of the blocks before one that is named, which lie elsewhere too, as long as they are as cold."""
    ANY_COPY = 1
    """Such copies, however lately they were read."""
    DESCENDANTS = 2
    """What follows a block that is named, although it lies where it does not help: nobody could read it."""


class _Choice:
    """Victims as they are chosen."""

    def __init__(self, goal: Goal, shares: Shares, taker: Taker) -> None:
        self.victims: list[Victim] = []
        self.reach = Reach.AS_COLD
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
        walks = [source.order.candidates(source.is_over_budget) for source in sources]
        heads = [
            (source, walk, head) for source, walk in zip(sources, walks, strict=True) if (head := next(walk, None))
        ]
        while heads and not self.is_enough():
            await self._rest(sources)
            turn = (
                self._shares.first([(source.holding.uid, head) for source, _, head in heads]) if len(heads) > 1 else 0
            )
            source, walk, head = heads[turn]
            await self._take_with_tail(source, head)
            if self.is_enough():
                break  # the order stands where it was: this candidate may have more to give
            following = next(walk, None)
            heads[turn : turn + 1] = [(source, walk, following)] if following is not None else []

    async def _rest(self, sources: Sequence[Source]) -> None:
        """Let requests run where many candidates are of no help; what was read of them may be old then."""
        self._looks += 1
        if self._looks % _LOOKS_WITHOUT_REST == 0:
            await self._taker.rest()
            for source in sources:
                await source.chains.renew()

    async def _take_with_tail(self, source: Source, head: Candidate) -> None:
        record = await source.chains.record(head.key)
        if record is None:
            return
        if self._helping(source, head.key, record):
            if not await source.chains.is_leaf(head.key) and not self._stays_readable(source, head.key, record):
                await self._take_tail(source, head.key, head.policy)
                return
            self._evict(source, head.key, record, head.policy)
        if source.chains.is_living(head.key, record):
            await self._take_before(source, head, record)

    async def _take_tail(self, source: Source, key: int, policy: str) -> None:
        """Take what follows a block, and the block at last."""
        if self.reach is Reach.DESCENDANTS and await self._spares(source, key):
            return
        tail = TailFirst(source.chains, key)
        while not self.is_enough() and (leaf := await tail.next()) is not None:
            self._evict(source, *leaf, policy)

    async def _take_before(self, source: Source, head: Candidate, record: BlockRecord) -> None:
        """A block has nothing more that helps, and an order that names ends of chains only names none before it."""
        seen = {head.key}  # writers can make two blocks each other's parents
        while record.parent is not None and record.parent not in seen and not self.is_enough():
            seen.add(record.parent)
            key, parent = record.parent, await source.chains.record(record.parent)
            if parent is None:
                return
            if self._stays_readable(source, key, parent):
                if not await self._is_in_reach(source, key, head):
                    return
                self._evict(source, key, parent, head.policy)
            elif self.reach is Reach.DESCENDANTS and self._helping(source, key, parent):
                await self._take_tail(source, key, head.policy)
                return
            record = parent

    async def _spares(self, source: Source, key: int) -> bool:
        """Whether a block and what follows it is left alone: where something is pinned or being written nothing is won
        by taking the rest, and where more than one block helps the lower ones cost less, and have their own turn."""
        places = [
            [place for place in record.locations if place.status is not LocationStatus.DELETING]
            for record in await source.chains.family(key)
        ]
        if any(
            each.status is LocationStatus.WRITING or each.pinned_until > self._now for some in places for each in some
        ):
            return True
        helping = sum(any(self._need.wanted(each.place) for each in some) for some in places)
        return helping > 1 and self._need.reason is not Reason.TTL

    async def _is_in_reach(self, source: Source, key: int, head: Candidate) -> bool:
        return self.reach > Reach.AS_COLD or (await source.chains.read_at([key]))[key] <= head.read_at

    async def expire(self, source: Source) -> None:
        """Take what has reached its age, and what follows it: nobody could read that."""
        self.reach = Reach.DESCENDANTS
        for candidate in source.order.expired(self._now):
            await self._take_with_tail(source, candidate)
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
        elif self.reach is Reach.DESCENDANTS and free:
            going = free
        else:
            return
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
