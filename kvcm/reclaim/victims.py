"""Selection of victims: which locations are evicted next to serve a need, as few as possible.

The path of one victim, all in this file; the policies that rank blocks are in `policies/`. Over a shared store
`run_victims` selects before that what goes in whole runs.

1. `select_victims` asks each source (an instance) for its candidate: the first block of its eviction order.
2. Of several sources `ShareOrder` decides which one gives a block.
3. The candidate's locations that help the need are selected. While other blocks follow it in its prefix chain, the
   coldest leaf behind it goes first (`_TailFirst`, invariant 7). Pinned locations and blocks being written stay.
4. The sink gathers the victims and marks them by compare-and-set (`marked`).

For an instance with linear-attention state, states between branch points go first: a match can end only at a block that
has one, so they are kept longest at branch points and at ends of chains. A block with copies on other storages loses
only the copies that help.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from kvcm.index.meta_index import MetaIndex
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk, encode_chunk
from kvcm.model.uri import LocationUri
from kvcm.reclaim.eviction_order import Candidate, IsOverBudget
from kvcm.reclaim.needs import InstanceUsage, ReclaimNeed
from kvcm.reclaim.policies.sharing import Sharing

__all__ = [
    "MOST_DESCENDANTS",
    "Chains",
    "Eviction",
    "EvictionOrder",
    "Goal",
    "ScanState",
    "Scope",
    "ShareOrder",
    "Source",
    "Victim",
    "VictimSink",
    "marked",
    "marked_location",
    "newly_deleting",
    "select_expired",
    "select_victims",
]

# Evictions: which locations and specs of a block go, and how they are marked.

_THINNED = "-s"  # ends the id of a location that was split off another


class Eviction(NamedTuple):
    """The evicted part of a block.

    Attributes:
        key: of the block.
        location_ids: locations that go.
        policy: name of the policy that chose the block.
        thin: specs that go from these locations, which keep the rest; empty when they go as a whole.
    """

    key: int
    location_ids: frozenset[str]
    policy: str = ""
    thin: frozenset[str] = frozenset()


def _locations_to_evict(instance: Instance, serving: list[Location], wanted: Iterable[Location]) -> list[Location]:
    """Return the locations to evict so that the wanted ones go: these, and the others if the block could not be read
    without them. Specs of one spec group are evicted together."""
    going = list(wanted)
    ids = {location.id for location in going}
    left = [location for location in serving if location.id not in ids]
    names = {name for location in left for name in location.spec_names}
    return going if not left or instance.is_readable_with(names) else [*going, *left]


def marked(old: BlockRecord | None, eviction: Eviction, now: float, due: float) -> BlockRecord | None:
    """Return the record with evicted locations marked as deleting; those pinned or changed meanwhile stay."""
    if old is None:
        return None
    locations: list[Location] = []
    for location in old.locations:
        locations += _parts(location, eviction, now, due)
    new = tuple(locations)
    return old if new == old.locations else old._replace(locations=new)


def _parts(location: Location, eviction: Eviction, now: float, due: float) -> Iterable[Location]:
    if location.id not in eviction.location_ids:
        return (location,)
    if location.status is not LocationStatus.SERVING or location.pinned_until > now:
        return (location,)
    if not eviction.thin or eviction.thin >= set(location.spec_names):
        return (marked_location(location, due),)
    return _split(location, eviction.thin, due) if eviction.thin & set(location.spec_names) else (location,)


def marked_location(location: Location, due: float) -> Location:
    """Return a location that is deleting, and whose bytes may go from some unix time on."""
    return location._replace(status=LocationStatus.DELETING, deadline=due)


def _split(location: Location, names: frozenset[str], due: float) -> tuple[Location, Location]:
    """Return a location without some specs, and one of those specs that is deleting."""
    decoded = decode_chunk(location.chunk)
    kept = [spec for spec in decoded.specs if spec.name not in names]
    going = [spec for spec in decoded.specs if spec.name in names]
    going_bytes = _thinned_size(location, names)
    return (
        location._replace(
            chunk=encode_chunk(decoded.storage_type, len(kept), kept, decoded.event_hash),
            spec_names=tuple(spec.name for spec in kept),
            size_bytes=location.size_bytes - going_bytes,
        ),
        location._replace(
            id=location.id + _THINNED,
            status=LocationStatus.DELETING,
            chunk=encode_chunk(decoded.storage_type, len(going), going, decoded.event_hash),
            spec_names=tuple(spec.name for spec in going),
            size_bytes=going_bytes,
            deadline=due,
        ),
    )


def _thinned_size(location: Location, names: frozenset[str]) -> int:
    """Return the bytes of some specs of a location."""
    if names >= set(location.spec_names):
        return location.size_bytes
    return sum(LocationUri.parse(spec.uri).size for spec in decode_chunk(location.chunk).specs if spec.name in names)


def newly_deleting(old: BlockRecord | None, new: BlockRecord | None) -> list[Location]:
    """Return the locations of a block that a change marked as deleting."""
    before = {each.id for each in old.locations if each.status is LocationStatus.DELETING} if old is not None else set()
    after = new.locations if new is not None else ()
    return [each for each in after if each.status is LocationStatus.DELETING and each.id not in before]


# Prefix chains of one index as the selection sees them: records and families, without the victims selected so far.
#
# On an index in this process nothing here suspends, so records stay current until the caller awaits. On a shared store
# they are recent; the compare-and-set that marks victims decides.

_NOTHING: frozenset[str] = frozenset()
_MOST_CHILDREN_READ = 4096  # with their parents: a block may have a million
_SHARED_BLOCKS_WITHOUT_YIELD = 256  # a millisecond


class Chains:
    """A view of one index.

    Args:
        index: the index.
        known: records that were read a moment ago, for an index over the network.
    """

    def __init__(self, index: MetaIndex, known: Mapping[int, BlockRecord] | None = None) -> None:
        self._index = index
        self._records: dict[int, BlockRecord | None] = dict(known or {})
        self._families: dict[int, Sequence[int]] = {}
        self._chosen: dict[int, frozenset[str]] = {}
        self._around: Collection[int] = ()
        self._blocks_read = 0

    def take_read_count(self) -> int:
        """Return how many blocks were checked for being alive since the last call."""
        blocks_read, self._blocks_read = self._blocks_read, 0
        return blocks_read

    @property
    def is_shared(self) -> bool:
        """Whether the index is read over the network."""
        return self._index.is_shared

    @property
    def most_descendants(self) -> int:
        """How many blocks behind a candidate are searched."""
        return _MOST_SHARED_DESCENDANTS if self.is_shared else MOST_DESCENDANTS

    async def prefetch_families(self, keys: Collection[int]) -> None:
        """Read blocks and their children in a few calls: one by one over the network, each costs a round trip to every
        shard of the store."""
        self._around = keys
        await self.records(list(keys))
        await self.families(keys)
        followers = [child for key in keys for child in self._families[key]]
        await self.records(followers[:_MOST_CHILDREN_READ])

    async def read_ahead(self, key: int, most: int) -> None:
        """Read what follows a block of a shared store, about so many blocks: level by level each block of a chain would
        cost two round trips."""
        if not self.is_shared:
            return
        known, seen, unread, read = [key], {key}, list[int](), 0
        while True:
            while known:
                parent = known.pop()
                if parent in self._families:
                    known += (children := [child for child in self._families[parent] if child not in seen])
                    seen.update(children)
                else:
                    unread.append(parent)
            if not unread or read >= most:
                return
            around = await self._index.get_around(unread[: most - read], most - read)
            read += len(around)
            self._records.update(around)
            await self.families(around)
            known, unread = [each for each in unread if each in around], []

    async def renew(self) -> None:
        """Read again: other managers may have changed the records."""
        self._records.clear()
        self._families.clear()
        if self._around:
            await self.prefetch_families(self._around)

    async def record(self, key: int) -> BlockRecord | None:
        """Return the record of a block."""
        if key not in self._records:
            await self.records((key,))
        return self._records[key]

    async def records(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of blocks."""
        missing = [key for key in keys if key not in self._records]
        if missing:
            self._records.update(zip(missing, await self._index.get(missing), strict=True))
        return [self._records[key] for key in keys]

    async def families(self, keys: Collection[int]) -> None:
        """Fetch the children of blocks at once."""
        missing = [key for key in keys if key not in self._families]
        if missing:
            self._families.update(zip(missing, await self._index.families(missing), strict=True))

    async def children(self, key: int) -> Sequence[int]:
        """Return the keys of the blocks that directly follow."""
        if key not in self._families:
            await self.families((key,))
        return self._families[key]

    async def is_leaf(self, key: int) -> bool:
        """Return whether no living block directly follows."""
        children = await self.children(key)
        return not children or not await self.living(children)

    async def living(self, keys: Sequence[int]) -> list[tuple[int, BlockRecord]]:
        """Return the blocks that readers or writers still use."""
        self._blocks_read += len(keys)
        if self.is_shared and self._blocks_read % _SHARED_BLOCKS_WITHOUT_YIELD < len(keys):
            await asyncio.sleep(0)  # blocks read ahead are gone through without asking the store
        records = zip(keys, await self.records(keys), strict=True)
        return [(key, record) for key, record in records if record is not None and self.is_living(key, record)]

    async def family(self, key: int) -> dict[int, BlockRecord] | None:
        """Return a block and all living descendants with their records, None where there are too many."""
        await self.read_ahead(key, self.most_descendants)
        found: dict[int, BlockRecord] = {}
        level, seen = await self.living([key]), {key}
        while level:
            found.update(level)
            await self.families([parent for parent, _ in level])
            below = [child for parent, _ in level for child in await self.children(parent) if child not in seen]
            seen.update(below)
            if len(seen) > self.most_descendants:
                return None
            level = await self.living(below)
        return found

    def is_living(self, key: int, record: BlockRecord) -> bool:
        """Return whether a location of a block is serving or being written and was not selected."""
        chosen = self._chosen.get(key, _NOTHING)
        for each in record.locations:
            if each.status is LocationStatus.WRITING:
                return True
            if each.status is LocationStatus.SERVING and each.id not in chosen:
                return True
        return False

    def keeps_a_location(self, key: int, record: BlockRecord, going: Collection[Location]) -> bool:
        """Return whether a location of a block stays when some go."""
        going_ids = {each.id for each in going} | self._chosen.get(key, _NOTHING)
        return any(each.status is not LocationStatus.DELETING and each.id not in going_ids for each in record.locations)

    def serving(self, key: int, record: BlockRecord) -> list[Location]:
        """Return the locations of a block that can be read and were not selected."""
        chosen = self._chosen.get(key, _NOTHING)
        return [each for each in record.locations if each.status is LocationStatus.SERVING and each.id not in chosen]

    def choose(self, key: int, location_ids: Iterable[str]) -> None:
        """Count these locations of a block as gone from now on."""
        self._chosen[key] = self._chosen.get(key, _NOTHING) | frozenset(location_ids)

    async def read_at(self, keys: Sequence[int]) -> dict[int, float]:
        """Return when blocks were last read, 0 for those that are gone."""
        accesses = zip(keys, await self._index.accesses(keys), strict=True)
        return {key: access.at if access is not None else 0.0 for key, access in accesses}


# Invariant 7: the tail of a prefix chain is evicted before its head.
#
# While other blocks follow a candidate, its coldest descendant leaf goes in its place (design.md decision 18).
# *Coldest* is the leaf that was not read for the longest time; of equals the deepest, then the one of the smallest key:
# the same for every policy and every store.

MOST_DESCENDANTS = 1024
"""Blocks behind a candidate that are searched for the coldest leaf: some milliseconds. A system prompt with more
descendants is skipped: they have their own turn."""
_MOST_SHARED_DESCENDANTS = 16 * MOST_DESCENDANTS
"""The same over a shared store, where the order names the heads of chains and requests run meanwhile: a chain of 16,384
blocks, half a million tokens of blocks of 32, has its tail found from its head."""
_Leaf = tuple[float, int, int]
"""When it was read, its depth with the sign turned, its key."""


class _TailFirst:
    """The living descendants of a block in the order in which they are to go, and the block itself at last.

    None where more than `Chains.most_descendants` blocks follow.

    The caller selects a block (`Chains.choose`) before the next call, or does not: then no block before it in its
    chain is returned either, since that block would lose its prefix.

    Args:
        chains: the blocks.
        key: of the block.
        is_barren: whether nothing can go at and below a block, so that it is not searched.

    Attributes:
        seen: the block and its descendants, after the first call.
        crowded: those of `seen` that half as many blocks follow, where too many follow the block itself.
    """

    def __init__(self, chains: Chains, key: int, is_barren: Callable[[int], bool]) -> None:
        self._chains = chains
        self._root = key
        self._is_barren = is_barren
        self._leaves: list[_Leaf] = []
        self._open: dict[int, int] = {}  # living children that are left, of blocks that are no leaves
        self.seen: set[int] = set()
        self.crowded: list[int] = []
        self._named: tuple[int, BlockRecord] | None = None

    async def next(self) -> tuple[int, BlockRecord] | None:
        """Return the next block, None when there is none."""
        if not self.seen:
            await self._grow_from(self._root)
        if self._named is not None:
            await self._shrink(*self._named)
        self._named = await self._pop()
        return self._named

    async def _grow_from(self, key: int) -> None:
        """Find the leaves at and below a block, level by level."""
        most, parents = self._chains.most_descendants, dict[int, int]()
        await self._chains.read_ahead(key, most)
        self.seen.add(key)
        leaves: list[tuple[int, BlockRecord]] = []
        level = await self._chains.living([key])
        while level:
            await self._chains.families([key for key, _ in level])
            below: list[tuple[int, BlockRecord]] = []
            for parent, record in level:
                self.seen.add(parent)
                followers = await self._chains.children(parent)
                if len(followers) > most:
                    self.crowded = [parent, *_with_many_followers(parents, most // 2)]
                    return
                children = await self._chains.living([child for child in followers if child not in self.seen])
                if children:
                    self._open[parent] = len(children)
                    parents.update((child, parent) for child, _ in children)
                    below += [child for child in children if not self._is_barren(child[0])]
                else:
                    leaves.append((parent, record))
            level = below
            if len(self.seen) + len(below) > most:
                self.crowded = _with_many_followers(parents, most // 2)
                return
        await self._push(leaves)

    async def _push(self, leaves: list[tuple[int, BlockRecord]]) -> None:
        # A single leaf is the coldest whenever it was read, and most victims are just that.
        read_at = await self._chains.read_at([key for key, _ in leaves]) if len(leaves) > 1 or self._leaves else {}
        for key, record in leaves:
            heappush(self._leaves, (read_at.get(key, 0.0), -record.depth, key))

    async def _pop(self) -> tuple[int, BlockRecord] | None:
        while self._leaves:
            _, _, key = heappop(self._leaves)
            record = await self._chains.record(key)
            if record is not None and self._chains.is_living(key, record):
                return key, record
        return None

    async def _shrink(self, key: int, record: BlockRecord) -> None:
        """A leaf was named: if it was chosen, its parent may be a leaf now."""
        if self._chains.is_living(key, record) or key == self._root or record.parent is None:
            return
        parent = record.parent
        if parent not in self._open:
            return
        self._open[parent] -= 1
        if not self._open[parent]:
            del self._open[parent]
            await self._push(await self._chains.living([parent]))


def _with_many_followers(parents: dict[int, int], least: int) -> list[int]:
    """Return the blocks that so many follow, of those that were found level by level."""
    followers: dict[int, int] = {}
    for child, parent in reversed(parents.items()):
        followers[parent] = followers.get(parent, 0) + followers.get(child, 0) + 1
    return [key for key, count in followers.items() if count >= least]


# Which of several instances gives the next victim.
#
# Blocks of classes over their budget go first, then those of the lowest priority, then whose turn it is by the group's
# `share` (`kvcm.reclaim.policies.sharing`).


class ShareOrder:
    """Decides for one need, as long as it is being served.

    Args:
        need: whose holdings compete.
        now: unix seconds.
    """

    def __init__(self, need: ReclaimNeed, now: float) -> None:
        self._now = now
        used = {holding.uid: self._amount(need, holding) for holding in need.usages}
        weights = {
            holding.uid: holding.group.override_of(holding.instance.instance_id).weight or 1.0
            for holding in need.usages
        }
        strategies = {holding.group.cache_config.reclaim_strategy.share for holding in need.usages}
        # Instances of several groups compete only where guarantees exceed a watermark: then by age.
        self._sharing = Sharing(strategies.pop() if len(strategies) == 1 else "", used, weights, need.amount)

    @staticmethod
    def _amount(need: ReclaimNeed, holding: InstanceUsage) -> int:
        return holding.keys if need.counts_blocks else holding.bytes(need.filter)

    def record(self, uid: int, amount: int) -> None:
        """Note what an instance gave."""
        self._sharing.record(uid, amount)

    def first(self, heads: Sequence[tuple[int, Candidate]]) -> int:
        """Return the position of the one to be taken.

        Args:
            heads: number of an instance and its candidate.
        """
        return min(range(len(heads)), key=lambda position: self._order(*heads[position]))

    def _order(self, uid: int, head: Candidate) -> tuple[bool, int, float, float]:
        return (*head.urgency, *self._sharing.priority(uid, self._now - head.read_at))


_CANDIDATES_WITHOUT_YIELD = 128
_SHARED_CANDIDATES_KNOWN = 8192  # then they are read again
_NAMES_LEAVES = "leaf_lru"
_DELETING = LocationStatus.DELETING
_MOST_THINNING_CANDIDATES = 512  # candidates that are checked for states between, before whole blocks go


class EvictionOrder(Protocol):
    """The order of eviction of one instance."""

    def __len__(self) -> int:
        """Return the number of blocks that may be candidates."""

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        """Prepare so many candidates; if they did not help, those of the next window, and so on. Return the records
        that were read for that."""

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a prefix class."""

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks in the order in which they are to go."""

    def line(self, key: int, most: int) -> Sequence[int]:
        """Return the blocks that come next if a leaf goes, and then each of them, as far as that is known at once, and
        they have locations like its."""

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks that have reached their age."""

    def discard(self, key: int) -> None:
        """Remove a block: all of it was selected."""

    async def settle(self) -> None:
        """Write changes of the order back to the store."""


class Source(NamedTuple):
    """An instance that can give up blocks.

    Attributes:
        holding: what it holds.
        order: of its blocks.
        chains: a look at its blocks that lasts as long as the choice.
        is_over_budget: about a prefix class of its group.
    """

    holding: InstanceUsage
    order: EvictionOrder
    chains: Chains
    is_over_budget: IsOverBudget


class Goal(NamedTuple):
    """When to stop.

    Attributes:
        need: what victims are for.
        amount: stop when so much is chosen.
        most_bytes: stop when so many bytes are chosen, whether they help or not.
        most: stop when so many blocks are chosen.
        now: unix seconds; locations pinned longer stay.
    """

    need: ReclaimNeed
    amount: int
    most_bytes: int
    most: int
    now: float


class Victim(NamedTuple):
    """The selected part of one block.

    Attributes:
        source: its instance.
        eviction: the locations.
        amount: how much of the need they serve.
    """

    source: Source
    eviction: Eviction
    amount: int


class VictimSink(Protocol):
    """Gathers victims and marks them."""

    def add(self, victim: Victim) -> None:
        """Add a victim. The rest of the selection counts it as gone."""

    async def yield_to_requests(self) -> None:
        """Let requests run, after marking victims that they could find half gone."""


class Scope(IntEnum):
    """How far the selection goes beyond the candidates; further only where nothing nearer helps."""

    AS_COLD = 0
    """Redundant copies of the blocks before a candidate, and the tail behind it, as long as they are as cold."""
    ANY_COPY = 1
    """Such copies and tails, however lately they were read."""
    DESCENDANTS = 2
    """The descendants of a candidate, although their eviction does not help: they could not be read without it."""


class ScanState:
    """The position of a round in the orders for one need. It lasts from batch to batch: a candidate that did not help
    is not tried again in the same round.

    Attributes:
        reach: how far the selection goes.
        climbed: blocks whose ancestors were searched.
        barren: per instance, blocks at and below which nothing was found, or that too many follow. Else a chain of n
            blocks whose end is pinned would be searched n times.
        coldest_leaf: per instance, when the leaf below a block was last read that was not read for the longest time, or
            before that.
    """

    def __init__(self) -> None:
        self.reach = Scope.AS_COLD
        self.climbed: set[tuple[int, int]] = set()
        self.barren: defaultdict[int, set[int]] = defaultdict(set)
        self.coldest_leaf: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._iterators: dict[int, Iterator[Candidate]] = {}
        self._heads: dict[int, Candidate | None] = {}

    def head(self, source: Source) -> Candidate | None:
        """Return the candidate of a source, None when it has no more."""
        uid = source.holding.uid
        if uid not in self._iterators:
            self._iterators[uid] = source.order.candidates(source.is_over_budget)
            self.advance(source)
        return self._heads[uid]

    def advance(self, source: Source) -> None:
        """Go on to the next candidate of a source."""
        uid = source.holding.uid
        self._heads[uid] = next(self._iterators[uid], None)

    def widen(self) -> bool:
        """Start again with a wider reach; False when it is the widest."""
        if self.reach is Scope.DESCENDANTS:
            return False
        self.reach = Scope(self.reach + 1)
        self.climbed.clear()
        self.barren.clear()
        self.coldest_leaf.clear()
        self._iterators.clear()
        self._heads.clear()
        return True


async def select_victims(
    goal: Goal, sources: Sequence[Source], shares: ShareOrder, sink: VictimSink, scan: ScanState
) -> list[Victim]:
    """Select victims.

    Args:
        goal: the need and its limits.
        sources: the instances.
        shares: decides between instances.
        sink: receives each victim.
        scan: where the last batch of this round stopped.
    """
    choice = _Selection(goal, shares, sink, scan)
    for source in sources:
        if source.holding.instance.linear_spec_names and not goal.need.counts_blocks:
            await choice.thin(source)
    while not choice.victims:
        await choice.select(sources)
        if not choice.victims and not scan.widen():
            break
    return choice.victims


async def select_expired(goal: Goal, source: Source, sink: VictimSink) -> list[Victim]:
    """Select expired blocks that no unexpired block follows."""
    choice = _Selection(goal, ShareOrder(goal.need, goal.now), sink, ScanState())
    await choice.expire(source)
    return choice.victims


class _Selection:
    """One selection in progress."""

    def __init__(self, goal: Goal, shares: ShareOrder, sink: VictimSink, scan: ScanState) -> None:
        self.victims: list[Victim] = []
        self._scan = scan
        self._candidates_seen = 0  # since requests ran
        self._candidates_known = 0  # since they were read
        self._need = goal.need
        self._left = goal.amount
        self._bytes_left = goal.most_bytes
        self._most = goal.most
        self._now = goal.now
        self._shares = shares
        self._sink = sink

    def is_enough(self) -> bool:
        return min(self._left, self._bytes_left) <= 0 or len(self.victims) >= self._most

    async def select(self, sources: Sequence[Source]) -> None:
        """Select whole blocks, each from the source whose turn it is."""
        while not self.is_enough():
            await self._yield_to_requests(sources)
            heads = [(source, head) for source in sources if (head := self._scan.head(source)) is not None]
            if not heads:
                return
            turn = self._shares.first([(source.holding.uid, head) for source, head in heads]) if len(heads) > 1 else 0
            source, head = heads[turn]
            line = source.order.line(head.key, self._most) if len(heads) == 1 else ()
            await self._select_with_tail(source, head)
            if line and self.victims and self.victims[-1].eviction.key == head.key:
                await self._select_line(source, head, line)
            if not self.is_enough():  # else this candidate may have more to give
                self._scan.advance(source)

    async def _yield_to_requests(self, sources: Sequence[Source]) -> None:
        """Let requests run where many candidates do not help, or one has many descendants; records are stale then."""
        self._candidates_seen += 1 + sum([source.chains.take_read_count() for source in sources])
        if self._candidates_seen < _CANDIDATES_WITHOUT_YIELD:
            return
        self._candidates_known += self._candidates_seen
        self._candidates_seen = 0
        await self._sink.yield_to_requests()
        is_shared = any(source.chains.is_shared for source in sources)
        if not is_shared or self._candidates_known >= _SHARED_CANDIDATES_KNOWN:
            self._candidates_known = 0
            for source in sources:
                await source.chains.renew()

    async def _select_with_tail(self, source: Source, head: Candidate) -> None:
        record = await source.chains.record(head.key)
        if record is None:
            return
        is_leaf = await source.chains.is_leaf(head.key)
        if self._useful_locations(source, head.key, record):
            if not is_leaf and not self._stays_readable(source, head.key, record):
                # Over a shared store the order may name a block that is no leaf: its tail goes if it is as cold, or if
                # nothing else in the window helps. Reads of the tail would have read this block, too.
                is_limited = head.policy == _NAMES_LEAVES and self._scan.reach is Scope.AS_COLD
                await self._select_tail(source, head, head.read_at if is_limited else None)
                return
            self._evict(source, head.key, record, head.policy)
        if head.policy != _NAMES_LEAVES:
            return
        if source.chains.is_living(head.key, record):
            await self._select_parent(source, head, record)
        elif not source.chains.is_shared:
            await self._select_colder_tails(source, head, record)

    async def _select_line(self, source: Source, leaf: Candidate, line: Sequence[int]) -> None:
        """Select the blocks before a leaf that was selected, each of which is the next candidate when the one behind it
        goes: what went of the leaf goes of them, which have the same locations."""
        end = await source.chains.record(leaf.key)
        if end is None or source.chains.is_living(leaf.key, end):
            return
        gone = self.victims[-1]
        size_bytes = sum(each.size_bytes for each in end.locations if each.id in gone.eviction.location_ids)
        for key in line:
            if self.is_enough():
                return
            source.chains.choose(key, gone.eviction.location_ids)
            source.order.discard(key)
            self._add(source, gone.eviction._replace(key=key), gone.amount, size_bytes)
        record = await source.chains.record(line[-1])
        if record is not None:
            read_at = (await source.chains.read_at([line[-1]]))[line[-1]]
            await self._select_colder_tails(source, leaf._replace(key=line[-1], read_at=read_at), record)

    async def _select_colder_tails(self, source: Source, head: Candidate, record: BlockRecord) -> None:
        """The end of a chain was selected. If the block before it is the end now, and colder, it is the coldest of all
        ends, and the order has passed it already."""
        while record.parent is not None and not self.is_enough():
            key = record.parent
            if (await source.chains.read_at([key]))[key] >= head.read_at:
                return  # nearly always: a match reads the blocks before it, too
            parent = await source.chains.record(key)
            if (
                parent is None
                or not self._useful_locations(source, key, parent)
                or not await source.chains.is_leaf(key)
            ):
                return
            self._evict(source, key, parent, head.policy)
            record = parent

    async def _select_tail(self, source: Source, head: Candidate, as_cold_as: float | None = None) -> None:
        """Select the descendants of a block, then the block; stop at one that was read after some time, if any."""
        barren, victims = self._scan.barren[source.holding.uid], len(self.victims)
        coldest = self._scan.coldest_leaf[source.holding.uid]
        if head.key in barren or (as_cold_as is not None and coldest.get(head.key, 0.0) > as_cold_as):
            return
        tail = _TailFirst(source.chains, head.key, barren.__contains__)
        leaf = await tail.next()
        barren.update(tail.crowded)
        if self._scan.reach is Scope.DESCENDANTS and await self._is_protected(source, head.key, barren):
            return
        read_at: dict[int, float] = {}
        if leaf is not None and as_cold_as is not None:
            read_at = await source.chains.read_at([leaf[0]])
            if read_at[leaf[0]] > as_cold_as:
                coldest.update(dict.fromkeys(tail.seen, read_at[leaf[0]]))
                return
            read_at = await source.chains.read_at(list(tail.seen))
        while leaf is not None and not self.is_enough():
            if as_cold_as is not None and read_at.get(leaf[0], 0.0) > as_cold_as:
                return
            self._evict(source, *leaf, head.policy)
            leaf = await tail.next()
        if leaf is None and len(self.victims) == victims and not tail.crowded:
            barren.update(tail.seen)

    async def _select_parent(self, source: Source, head: Candidate, record: BlockRecord) -> None:
        """Select the ancestors of a candidate that does not help any more: an order of leaves does not contain them."""
        climbed, uid = self._scan.climbed, source.holding.uid
        while record.parent is not None and (uid, record.parent) not in climbed and not self.is_enough():
            key, parent = record.parent, await source.chains.record(record.parent)
            if parent is None:
                return
            if self._stays_readable(source, key, parent):
                if not await self._is_in_scope(source, key, head):
                    return
                self._evict(source, key, parent, head.policy)
            elif self._scan.reach is Scope.DESCENDANTS and self._useful_locations(source, key, parent):
                await self._select_tail(source, head._replace(key=key))
                return
            climbed.add((uid, key))  # writers can make two blocks each other's parents
            record = parent
            await self._yield_to_requests([source])

    async def _is_protected(self, source: Source, key: int, barren: set[int]) -> bool:
        """Whether a block and its descendants stay: where a location is pinned or being written, evicting the rest
        gains nothing; where more than one block helps, the lower ones cost less, and have their own turn."""
        if key in barren or not barren.isdisjoint(await source.chains.children(key)):
            barren.add(key)
            return True
        family = await source.chains.family(key)
        if family is None:
            return True
        places = {
            key: [each for each in record.locations if each.status is not _DELETING] for key, record in family.items()
        }
        held = [key for key, some in places.items() if any(map(self._is_held, some))]
        for block in held:
            above: int | None = block
            while above in family and above not in barren:
                barren.add(above)
                above = family[above].parent
        return bool(held) or sum(any(self._need.filter(each.place) for each in some) for some in places.values()) > 1

    def _is_held(self, location: Location) -> bool:
        return location.status is LocationStatus.WRITING or location.pinned_until > self._now

    async def _is_in_scope(self, source: Source, key: int, head: Candidate) -> bool:
        return self._scan.reach > Scope.AS_COLD or (await source.chains.read_at([key]))[key] <= head.read_at

    async def expire(self, source: Source) -> None:
        """Select expired blocks, the tail of a chain first; a block that unexpired ones follow stays for them."""
        for candidate in source.order.expired(self._now):
            await self._yield_to_requests([source])
            record = await source.chains.record(candidate.key)
            if record is not None and await source.chains.is_leaf(candidate.key):
                self._evict(source, candidate.key, record, candidate.policy)
            if self.is_enough():
                return

    def _free(self, source: Source, key: int, record: BlockRecord) -> list[Location]:
        return [each for each in source.chains.serving(key, record) if each.pinned_until <= self._now]

    def _useful_locations(self, source: Source, key: int, record: BlockRecord) -> list[Location]:
        return [each for each in self._free(source, key, record) if self._need.filter(each.place)]

    def _stays_readable(self, source: Source, key: int, record: BlockRecord) -> bool:
        """Whether a block can be read without the locations that help, so that its descendants keep their prefix."""
        serving = source.chains.serving(key, record)
        going = {each.id for each in self._useful_locations(source, key, record)}
        names = {name for each in serving if each.id not in going for name in each.spec_names}
        return bool(going) and bool(names) and source.holding.instance.is_readable_with(names)

    def _evict(self, source: Source, key: int, record: BlockRecord, policy: str) -> None:
        free = self._free(source, key, record)
        helping = [each for each in free if self._need.filter(each.place)]
        if helping:
            going = _locations_to_evict(source.holding.instance, free, helping)
        elif self._scan.reach is Scope.DESCENDANTS and free:
            going = free
        else:
            return
        if self._need.counts_blocks and source.chains.keeps_a_location(key, record, going):
            return  # the block would remain
        amount = 1 if self._need.counts_blocks else sum(map(self._need.size_of, going))
        ids = frozenset(each.id for each in going)
        source.chains.choose(key, ids)
        if not source.chains.is_living(key, record):
            source.order.discard(key)
        self._add(source, Eviction(key, ids, policy), amount, sum(each.size_bytes for each in going))

    def _add(self, source: Source, eviction: Eviction, amount: int, size_bytes: int) -> None:
        victim = Victim(source, eviction, amount)
        self.victims.append(victim)
        self._sink.add(victim)
        self._shares.record(source.holding.uid, amount)
        self._left -= amount
        self._bytes_left -= size_bytes

    async def thin(self, source: Source) -> None:
        """Select the linear-attention state of blocks with exactly one child: of candidates and of their ancestors,
        since some policies order ends of chains only."""
        seen: set[int] = set()
        for candidate in source.order.candidates(source.is_over_budget):
            key: int | None = candidate.key
            while key is not None and key not in seen:
                if self.is_enough() or len(seen) >= _MOST_THINNING_CANDIDATES:
                    return
                seen.add(key)
                await self._yield_to_requests([source])
                record = await source.chains.record(key)
                if record is None:
                    break
                await self._thin_block(source, key, record, candidate.policy)
                key = record.parent

    async def _thin_block(self, source: Source, key: int, record: BlockRecord, policy: str) -> None:
        linear = source.holding.instance.linear_spec_names
        helping = [each for each in self._useful_locations(source, key, record) if linear & set(each.spec_names)]
        if helping and await self._is_between(source, key, record, linear):
            amount = sum(_thinned_size(each, linear) for each in helping)
            ids = frozenset(each.id for each in helping)
            self._add(source, Eviction(key, ids, policy, linear), amount, amount)

    async def _is_between(self, source: Source, key: int, record: BlockRecord, linear: frozenset[str]) -> bool:
        """Whether a block has state, could be read without it, and has exactly one follower."""
        names = {name for each in source.chains.serving(key, record) for name in each.spec_names}
        if not names & linear or not source.holding.instance.is_readable_with(names - linear):
            return False
        return len(await source.chains.living(await source.chains.children(key))) == 1
