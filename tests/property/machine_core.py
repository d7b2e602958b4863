"""What every CacheManager machine begins with: the world, the model beside it, and what holds after every step."""

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import client_bytes
from cache_model import CacheModel
from cache_world import World, decoded, group_of, instance
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from model_parts import SERVING, WRITING, Shelf

from kvcm.cache.match import Match, MatchMode, MatchQuery
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import KvcmError
from kvcm.model.groups import CachePreferStrategy, InstanceGroup, MetaIndexerConfig
from kvcm.model.locations import Location
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.model.storages import StorageConfig, StorageType

SPECS = {"tp0": 48, "tp1": 48, "state": 16}
INSTANCES = [
    instance("chat", SPECS, {"full": ("tp0", "tp1"), "all": ("tp0", "tp1", "state")}),
    instance("Qwen/../code", {"kv": 32, "kv2": 32}, {"half": ("kv2",)}),
]
OWNERS = st.sampled_from([each.instance_id for each in INSTANCES])
POOL = (0, 1, -1, 1 << 40, 2**63 - 1, -(2**63), 12345)
KEYS = st.sampled_from(POOL)
# Mostly prefixes and other pieces of one chain, so that writers and readers meet; sometimes anything.
CHAINS = st.one_of(
    st.integers(0, len(POOL)).map(lambda end: list(POOL[:end])),
    st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda piece: list(POOL[piece[0] : sum(piece)])),
    st.lists(KEYS, max_size=8),
)
PICKS = st.integers(0, 30)
MASKS = st.one_of(
    st.just(NO_MASK),
    st.builds(lambda n: BlockMask(offset=n), st.integers(-1, 9)),
    st.builds(lambda flags: BlockMask(flags=tuple(flags)), st.lists(st.booleans(), max_size=9)),
)
GROUPS = st.one_of(
    st.none(),
    st.none(),
    st.lists(st.sampled_from(["full", "all"]), min_size=8, max_size=8),
    st.just(["half"] * 8),
    st.lists(st.sampled_from(["full", "all", "half"]), min_size=8, max_size=8),
)
"""Of the first instance, of the second, of both and so unknown to either."""
STRATEGIES = [
    CachePreferStrategy.CPS_PREFER_3FS,
    CachePreferStrategy.CPS_PREFER_MOONCAKE,
    CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL,
    CachePreferStrategy.CPS_ALWAYS_TAIR_MEMPOOL,
]
RANKS = {StorageType.ST_TAIRMEMPOOL: 0, StorageType.ST_3FS: 2, StorageType.ST_NFS: 3, StorageType.ST_DUMMY: 3}


def random_quotas(kinds: Sequence[StorageType]) -> st.SearchStrategy[dict[StorageType, int]]:
    return st.dictionaries(st.sampled_from(kinds), st.sampled_from([0, 112, 400, 1 << 40]), max_size=2)


def random_group(draw: st.DrawFn, names: Sequence[str], kinds: Sequence[StorageType]) -> InstanceGroup:
    return group_of(
        draw(st.permutations(names)),
        capacity=draw(st.sampled_from([1 << 40, 1 << 40, 1 << 40, 700, 200])),
        quotas=draw(st.one_of(st.just({}), st.just({}), random_quotas(kinds))),
        strategy=draw(st.sampled_from(STRATEGIES)),
        delay_ms=draw(st.sampled_from([0, 1000, 2500])),
        indexer=MetaIndexerConfig(max_key_count=draw(st.sampled_from([0, 0, 0, 3, 5])), mutex_shard_num=2),
    )


class MachineCore(RuleBasedStateMachine):
    """Subclasses add the rules and choose the storages."""

    def configs(self) -> list[StorageConfig]:
        raise NotImplementedError

    @initialize(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.runner = asyncio.Runner()
        self.configured = {config.global_unique_name: config for config in self.configs()}
        kinds = sorted({config.storage_type for config in self.configured.values()})
        group = data.draw(st.composite(random_group)(list(self.configured), kinds))
        self.world = World(group, INSTANCES, list(self.configured.values()))
        self.manager = self.world.manager
        self.clock = self.world.clock
        shelves = {name: self.shelf(name) for name in self.configured}
        self.model = CacheModel(self.clock, group, INSTANCES, shelves)
        self.registrations: dict[int, tuple[str, int]] = {}
        for each in INSTANCES:
            self.note_registration(each.instance_id)
        self.uris_of: dict[str, list[list[str]]] = {}
        self.extents: set[tuple[str, str, int | None]] = set()
        self.ended: set[str] = set()
        self.readable_until: dict[str, float] = {}
        self.storages_always_up = True

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.check_bytes()
            self.world.close()
            self.runner.close()

    def shelf(self, name: str) -> Shelf:
        kind = self.configured[name].storage_type
        return Shelf(kind, RANKS[kind])

    def note_registration(self, owner: str) -> None:
        self.registrations[self.manager.cache(owner).placement.uid] = (owner, self.model.epochs[owner])

    def call(self, awaitable: Awaitable[Any]) -> Any:
        """Return what a call of the manager returns, or the class of its error."""

        async def run() -> Any:
            try:
                return await awaitable
            except KvcmError as error:
                return type(error)

        return self.runner.run(run())

    def switch(self, name: str, enabled: bool) -> None:
        """Enable or disable a configured storage."""
        self.model.shelves[name].enabled = enabled
        assert self.call(self.world.registry.storages.set_enabled(name, enabled=enabled)) is None
        self.storages_always_up &= enabled

    def any_session(self, pick: int) -> str | None:
        """One of the sessions that ever were, the open ones more often."""
        known = [*self.model.sessions, *self.model.sessions, *sorted(self.ended)]
        return known[pick % len(known)] if known else None

    # What holds after every step.

    @invariant()
    def records_are_those_of_the_model(self) -> None:
        """Those of removed instances too."""
        for custody in self.manager.indexes():
            blocks = self.model.resident(*self.registrations[custody.uid])
            assert self.runner.run(all_records(custody.meta_index)) == {
                key: (block.parent, block.depth, [vars(place) for place in block.places])
                for key, block in blocks.items()
            }
            due = self.runner.run(custody.meta_index.due(math.inf, len(POOL)))
            assert sorted(due) == sorted(
                key for key, block in blocks.items() if any(place.status is not SERVING for place in block.places)
            )

    @invariant()
    def invariant_1_answers_are_serving_and_available(self) -> None:
        for owner in self.model.instances:
            answers = self.runner.run(self.manager.cache(owner).index.answers(POOL))
            shown = [decoded([answer])[0] if answer is not None else None for answer in answers]
            assert shown == [self.model.answer(owner, key) for key in POOL]

    @invariant()
    def every_mode_matches_the_whole_chain(self) -> None:
        for owner in self.model.instances:
            for mode in MatchMode:
                self.check_match(owner, MatchQuery(mode, POOL, window=2))

    def check_match(self, owner: str, query: MatchQuery) -> Match | None:
        """Compare a match with what the model says; None when it is refused."""
        expected = self.model.match(owner, query)
        found = self.call(self.manager.match(owner, query))
        if isinstance(expected, type):
            assert found is expected
            return None
        assert (decoded(found.chunks), list(found.keys)) == expected
        assert isinstance(found, Match)
        return found

    @invariant()
    def invariant_2_one_writer_per_block_and_spec(self) -> None:
        """One at most; on one storage at most while storages come and go (decision 17 looks at available ones only)."""
        for block in self.model.blocks.values():
            writing = [
                (spec, "" if self.storages_always_up else place.storage)
                for place in block.places
                if place.status is WRITING
                for spec in place.uris
            ]
            assert len(writing) == len(set(writing))

    @invariant()
    def invariant_3_what_is_written_belongs_to_an_open_session(self) -> None:
        now = self.clock.now()
        assert self.manager.endings.open_count == sum(each.deadline > now for each in self.model.sessions.values())
        for owner in self.model.instances:
            for _, _, places in self.runner.run(all_records(self.manager.cache(owner).index)).values():
                assert all(p["session"] in self.model.sessions for p in places if p["status"] is WRITING)

    @invariant()
    def invariant_4_usage_is_the_recount(self) -> None:
        used = {place: size for place, size in self.manager.group_usage_bytes("group").items() if size}
        assert used == {place: size for place, size in self.model.usage().items() if size}

    def check_bytes(self) -> None:
        """Invariants 5 and 6: nothing that is served, or was handed out lately, is deleted or damaged."""
        for (owner, _, key), block in self.model.blocks.items():
            for place in block.places:
                leases = self.model.leases.values()
                leased = any(
                    (owner, key, place.id) in each.pins and each.deadline > self.clock.now() for each in leases
                )
                if place.status is SERVING or leased:
                    self.check_intact(place.uris.values())
        for uri, until in self.readable_until.items():
            if uri and until > self.clock.now():
                self.check_intact([uri])

    def check_intact(self, uris: Iterable[str]) -> None:
        for uri in uris:
            assert not uri.startswith("file:") or client_bytes.is_intact(uri), uri


async def all_records(index: MetaIndex) -> dict[int, tuple[int | None, int, list[dict[str, Any]]]]:
    keys = [key async for page in index.scan(5) for key in page]
    assert len(keys) == len(set(keys)) == index.key_count
    records = {}
    for key, record in zip(keys, await index.get(keys), strict=True):
        assert record is not None
        records[key] = (record.parent, record.depth, [as_place(location) for location in record.locations])
    return records


def as_place(location: Location) -> dict[str, Any]:
    """The same fields as the model's places. Once a session is over, its id and deadline are gone from the record."""
    ((kind, spec_size, specs),) = decoded([location.chunk])
    assert (kind, spec_size, tuple(name for name, _ in specs)) == (
        location.storage_type,
        len(location.spec_names),
        location.spec_names,
    )
    return {
        "id": location.id,
        "storage": location.storage,
        "kind": location.storage_type,
        "uris": dict(specs),
        "size": location.size_bytes,
        "written_at": location.written_at,
        "session": location.session_id,
        "deadline": location.deadline,
        "status": location.status,
    }
