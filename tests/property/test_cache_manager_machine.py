"""CacheManager against a model in plain dicts: every answer is predicted, every record and every byte compared."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cache_model import DELETING, SERVING, WRITING, Cabinet, CacheModel, Plan
from cache_world import World, decoded, dummy, group_of, hf3fs, instance, mempool, nfs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from storage_rig import is_intact, write
from thoroughness import is_thorough

from kvcm.cache.prefix_match import Match, MatchMode, MatchQuery
from kvcm.cache.write_sessions import WriteRequest
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import KvcmError
from kvcm.model.groups import CachePreferStrategy, InstanceGroup, MetaIndexerConfig
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import Location
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.model.uri import LocationUri

# ── Machine core ──


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
        shelves = {name: self.cabinet(name) for name in self.configured}
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

    def cabinet(self, name: str) -> Cabinet:
        kind = self.configured[name].storage_type
        return Cabinet(kind, RANKS[kind])

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
        for ownership in self.manager.indexes():
            blocks = self.model.resident(*self.registrations[ownership.uid])
            assert self.runner.run(all_records(ownership.meta_index)) == {
                key: (block.parent, block.depth, [vars(place) for place in block.places])
                for key, block in blocks.items()
            }
            due = self.runner.run(ownership.meta_index.due(math.inf, len(POOL)))
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
        found = self.call(self.manager.match(self.manager.cache(owner), query))
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
    def invariant_3_writing_locations_belong_to_an_open_session(self) -> None:
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
            assert not uri.startswith("file:") or is_intact(uri), uri


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


# ── Machine writers ──


class WriterRules(MachineCore):
    @rule(
        owner=OWNERS,
        keys=CHAINS,
        groups=GROUPS,
        timeout=st.sampled_from([0, -1, 1, 5, 40, 9999]),
        replicas=st.sampled_from([0, 1, 2]),
        parent=st.one_of(st.none(), KEYS),
    )
    def start(
        self, owner: str, keys: list[int], groups: list[str] | None, timeout: int, replicas: int, parent: int | None
    ) -> None:
        names = () if groups is None else tuple(groups[: len(keys)])
        request = WriteRequest(tuple(keys), names, timeout, replicas, parent)
        expected = self.model.start(owner, request)
        started = self.call(self.manager.start_write(self.manager.cache(owner), request))
        if not isinstance(expected, Plan):
            assert started is expected
            return
        session, count = started.session, len(keys)
        assert started.mask == canonical_mask(expected.flags)
        assert [i not in started.mask.unmasked(count) for i in range(count)] == expected.flags
        assert (started.rejected, bool(started.rejection)) == (expected.refused, expected.refused > 0)
        assert session.deadline == self.clock.now() + expected.seconds
        assert session.id not in self.ended | set(self.model.sessions)
        chunks = decoded(started.chunks)
        assert [(kind, size) for kind, size, _ in chunks] == [(w.kind, len(w.specs)) for w in expected.blocks]
        for wanted, (_, _, specs) in zip(expected.blocks, chunks, strict=True):
            assert [name for name, _ in specs] == [name for name, _ in wanted.specs]
            for (_, uri), (_, size) in zip(specs, wanted.specs, strict=True):
                self.check_new_address(uri, wanted.storage, size)
        self.uris_of[session.id] = [[uri for _, uri in specs] for _, _, specs in chunks]
        addresses = [dict(specs) for _, _, specs in chunks]
        self.model.started(owner, expected, session.id, session.location_id, addresses)

    @rule(owner=OWNERS, keys=CHAINS, groups=GROUPS, replicas=st.sampled_from([1, 1, 2, 3]))
    def write_everything(self, owner: str, keys: list[int], groups: list[str] | None, replicas: int) -> None:
        """The usual case: a writer that does what it came for."""
        known = set(self.uris_of)
        self.start(owner, keys, groups, 0, replicas, None)
        for session_id in set(self.uris_of) - known:
            for uris in self.uris_of[session_id]:
                self.put_bytes(uris)
            self.finish_call(owner, session_id, BlockMask(offset=len(self.uris_of[session_id])))

    @rule(owner=OWNERS, end=st.integers(1, 7), replicas=st.sampled_from([1, 2]))
    def write_a_prefix(self, owner: str, end: int, replicas: int) -> None:
        self.write_everything(owner, list(POOL[:end]), None, replicas)

    @rule(owner=OWNERS, keys=CHAINS, pick=PICKS, groups=GROUPS)
    def write_copies_on_one_storage(self, owner: str, keys: list[int], pick: int, groups: list[str] | None) -> None:
        """While the other storages are down, so that blocks come to lie on several of different speeds."""
        up = [name for name in self.model.shelves if self.model.rank(name) is not None]
        others = [name for name in up if name != up[pick % len(up)]]
        for name in others:
            self.switch(name, enabled=False)
        self.write_everything(owner, keys, groups, 3)
        for name in others:
            self.switch(name, enabled=True)

    def check_new_address(self, uri: str, storage: str, size: int) -> None:
        """Invariant 5: no extent is ever handed out twice."""
        address = LocationUri.parse(uri)
        assert (address.storage, address.size, str(address)) == (storage, size, uri)
        extent = (storage, address.path, address.blkid)
        assert extent not in self.extents
        self.extents.add(extent)

    @rule(pick=PICKS, offset=st.integers(0, 8))
    def finish_with_offset(self, pick: int, offset: int) -> None:
        self.finish(pick, lambda count: BlockMask(offset=min(offset, count)))

    @rule(pick=PICKS, bits=st.integers(0, 255))
    def finish_with_flags(self, pick: int, bits: int) -> None:
        self.finish(pick, lambda count: BlockMask(flags=tuple(bool(bits >> i & 1) for i in range(count))))

    @rule(pick=PICKS, wrong=st.sampled_from(["offset", "negative", "long", "short", "unset"]))
    def finish_with_a_wrong_mask(self, pick: int, wrong: str) -> None:
        masks: dict[str, Callable[[int], BlockMask]] = {
            "offset": lambda count: BlockMask(offset=count + 1),
            "negative": lambda count: BlockMask(offset=-1),
            "long": lambda count: BlockMask(flags=(True,) * (count + 1)),
            "short": lambda count: BlockMask(flags=(True,) * max(0, count - 1)),
            "unset": lambda count: NO_MASK,
        }
        self.finish(pick, masks[wrong])

    @rule(pick=PICKS, owner=OWNERS)
    def finish_of_another_instance(self, pick: int, owner: str) -> None:
        session_id = self.any_session(pick) or "f" * 32
        session = self.model.sessions.get(session_id)
        if session is None or session.instance_id != owner:
            self.finish_call(owner, session_id, BlockMask(offset=0))
        self.finish_call(owner, "0" * 32, BlockMask(offset=0))

    def finish(self, pick: int, mask: Callable[[int], BlockMask]) -> None:
        session_id = self.any_session(pick)
        if session_id is None:
            return
        session = self.model.sessions.get(session_id)
        if session is None:
            count = len(self.uris_of[session_id])
            self.finish_call(INSTANCES[pick % 2].instance_id, session_id, mask(count))
            return
        success = mask(len(session.keys))
        for position, uris in enumerate(self.uris_of[session_id]):
            if success.offset is None or position < success.offset:
                self.put_bytes(uris)
        self.finish_call(session.instance_id, session_id, success)

    @rule(pick=PICKS, owner=st.none() | OWNERS)
    def repeat_a_finish(self, pick: int, owner: str | None) -> None:
        """Whatever was removed, evicted or written since: the answer is the first one."""
        finished = list(self.model.finished.values())
        if finished:
            before = finished[pick % len(finished)]
            self.finish_call(owner or before.session.instance_id, before.session.id, BlockMask(flags=before.flags))

    def finish_call(self, owner: str, session_id: str, success: BlockMask) -> None:
        """Invariant 3: a refused finish does not end the session, an accepted one ends it for good."""
        expected = self.model.finish(owner, session_id, success)
        assert self.call(self.manager.finish_write(self.manager.cache(owner), session_id, success)) == expected
        self.note_ended()

    @rule(pick=PICKS, owner=OWNERS, timeout=st.sampled_from([-3, 0, 2, 50, 9999]))
    def renew_write(self, pick: int, owner: str, timeout: int) -> None:
        session_id = self.any_session(pick) or "e" * 32
        expected = self.model.renew(owner, session_id, timeout)
        renewed = self.call(self.manager.renew_write(self.manager.cache(owner), session_id, timeout))
        assert (renewed if isinstance(renewed, type) else renewed.deadline) == expected

    @rule(pick=PICKS)
    def write_early_or_late(self, pick: int) -> None:
        """A writer that is ahead of its finish, or was stopped and comes back after the end of its session."""
        known = [*self.model.sessions, *sorted(self.ended)]
        if known:
            for uris in self.uris_of[known[pick % len(known)]]:
                self.put_bytes(uris)

    def put_bytes(self, uris: Sequence[str]) -> None:
        for uri in uris:
            if uri.startswith("file:"):
                write(uri)


def canonical_mask(flags: list[bool]) -> BlockMask:
    """An offset when the masked positions are a prefix, flags otherwise (wire.md 5.5)."""
    first = flags.index(False) if False in flags else len(flags)
    return BlockMask(flags=tuple(flags)) if True in flags[first:] else BlockMask(offset=first)


# ── Cache manager machine ──


pytestmark = pytest.mark.timeout(400)  # seconds to make a failure small; a pass takes ten


class CacheMachine(WriterRules):
    """The rules of time, operators and readers; the classes below choose the storages."""

    # Time, removal, storages.

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 10.0, 31.0, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule()
    def expire(self) -> None:
        self.model.expire()
        self.call(self.manager.expire())
        self.note_ended()

    def note_ended(self) -> None:
        self.ended = set(self.uris_of) - set(self.model.sessions)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.5, 31.0]))
    def delete_due(self, seconds: float) -> None:
        self.clock.time += seconds
        self.check_bytes()
        self.model.delete_due()
        self.runner.run(self.world.executor.run_due())
        self.check_bytes()
        self.note_ended()

    @rule()
    def purge_removed(self) -> None:
        """A removed instance is forgotten when its last block is gone, and not before."""
        self.call(self.manager.purge_removed())
        removed = {ownership.uid for ownership in self.manager.indexes()}
        for uid, (owner, epoch) in self.registrations.items():
            is_current = epoch == self.model.epochs[owner]
            assert (uid in removed) == (is_current or bool(self.model.resident(owner, epoch)))

    @rule(owner=OWNERS, keys=CHAINS, mask=MASKS)
    def remove(self, owner: str, keys: list[int], mask: BlockMask) -> None:
        unmasked = [keys[i] for i in mask.unmasked(len(keys))]
        assert self.call(self.manager.remove(self.manager.cache(owner), keys, mask)) == self.model.remove(
            owner, unmasked
        )

    @rule(owner=OWNERS)
    def trim_all(self, owner: str) -> None:
        expected = self.model.remove(owner, list(self.model.resident(owner)))
        assert self.call(self.manager.trim(self.manager.cache(owner))) == expected

    @rule(owner=OWNERS)
    def trim_meta(self, owner: str) -> None:
        assert self.call(self.manager.trim_meta(self.manager.cache(owner))) == self.model.forget_all(owner)

    @rule(
        owner=OWNERS, begin=st.sampled_from([-40.0, -10.0, -1.0, 0.0]), length=st.sampled_from([-1, 0, 1.0, 12.5, 60])
    )
    def trim_written_between(self, owner: str, begin: float, length: float) -> None:
        """Half open: begin ≤ t < end; an empty range is refused."""
        begin += self.clock.now()
        end = begin + length
        removed = self.call(self.manager.trim_written_between(self.manager.cache(owner), begin, end))
        if length <= 0:
            assert isinstance(removed, type)
            return
        keys = list(self.model.resident(owner))
        assert removed == self.model.remove(owner, keys, lambda place: begin <= place.written_at < end)

    @rule(owner=OWNERS)
    def remove_instance(self, owner: str) -> None:
        self.model.remove_instance(owner)
        self.call(self.manager.remove_instance(owner))
        assert not isinstance(self.call(self.manager.register_instance(self.model.instances[owner])), type)
        self.note_registration(owner)
        self.note_ended()

    @rule(pick=PICKS, what=st.sampled_from(["disable", "enable", "enable", "remove", "add", "add"]))
    def change_storage(self, pick: int, what: str) -> None:
        name = sorted(self.configured)[pick % len(self.configured)]
        known = self.model.shelves.get(name)
        if what in {"disable", "enable"} and known is not None:
            self.switch(name, enabled=what == "enable")
        elif what == "remove" and known is not None:
            del self.model.shelves[name]
            assert self.call(self.world.registry.storages.retire(name, self.world.clock.now())) is None
        elif what == "add" and known is None:
            self.model.shelves[name] = self.cabinet(name)
            assert self.call(self.world.registry.storages.add(self.configured[name])) is None
        self.storages_always_up &= what != "remove"

    # Readers.

    @rule(
        owner=OWNERS,
        keys=CHAINS,
        mask=MASKS,
        mode=st.sampled_from(list(MatchMode)),
        window=st.integers(-1, 4),
        specs=st.sampled_from([(), (), ("tp0",), ("kv2", "state"), ("nothing",)]),
        lease=st.sampled_from([None, None, 500, 4000, 600_000]),
    )
    def match(
        self,
        owner: str,
        keys: list[int],
        mask: BlockMask,
        mode: MatchMode,
        window: int,
        specs: tuple[str, ...],
        lease: int | None,
    ) -> None:
        found = self.check_match(owner, MatchQuery(mode, tuple(keys), mask, window, frozenset(specs)))
        if found is not None:
            self.note_handed_out(found)
        if found is not None and lease is not None:
            self.acquire(owner, found, lease)

    @rule(owner=OWNERS, keys=CHAINS, leases=st.lists(st.sampled_from([500, 4000, 60_000]), max_size=2))
    def remove_under_the_eyes_of_readers(self, owner: str, keys: list[int], leases: list[int]) -> None:
        """Remove the blocks that a reader just got, and delete everything due."""
        for lease in leases:
            self.match(owner, keys, NO_MASK, MatchMode.BATCH_GET, 0, (), lease)
        self.remove(owner, keys, NO_MASK)
        self.delete_due(2.5)

    def note_handed_out(self, found: Match) -> None:
        """Invariant 6: from now on these must stay readable for the group's delay."""
        delay = self.model.group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000
        until = self.clock.now() + delay
        for _, _, specs in decoded(found.chunks):
            for _, uri in specs:
                self.readable_until[uri] = max(until, self.readable_until.get(uri, 0.0))

    def acquire(self, owner: str, found: Match, lease_ms: int) -> None:
        lease = self.call(self.manager.lease(self.manager.cache(owner), found, lease_ms))
        self.model.lease(owner, lease.id, found.keys, lease_ms / 1000)
        assert lease.deadline == self.model.leases[lease.id].deadline
        uid = self.manager.cache(owner).placement.uid
        assert set(lease.locations) == {(uid, key, place) for _, key, place in self.model.leases[lease.id].pins}

    @rule(pick=PICKS, owner=OWNERS, lease_ms=st.sampled_from([-1, 0, 1000, 600_000, 600_001]))
    def renew_lease(self, pick: int, owner: str, lease_ms: int) -> None:
        lease_id = self.any_lease(pick)
        known = self.model.open_lease(owner, lease_id)
        renewed = self.call(self.manager.renew_lease(self.manager.cache(owner), lease_id, lease_ms))
        if isinstance(renewed, type):
            assert known is None or not 1 <= lease_ms <= 600_000
            return
        assert known is not None
        known.deadline = self.clock.now() + lease_ms / 1000
        assert renewed.deadline == known.deadline

    @rule(pick=PICKS, owner=OWNERS)
    def release_lease(self, pick: int, owner: str) -> None:
        """Succeed for a lease that has ended; refuse while it is open for another instance."""
        lease_id = self.any_lease(pick)
        lease = self.model.leases.get(lease_id)
        is_open = lease is not None and lease.deadline > self.clock.now()
        others = is_open and self.model.open_lease(owner, lease_id) is None
        refused = self.call(self.manager.release_lease(self.manager.cache(owner), lease_id)) is not None
        assert refused == others
        if not refused:
            self.model.leases.pop(lease_id, None)

    def any_lease(self, pick: int) -> str:
        leases = list(self.model.leases)
        return leases[pick % len(leases)] if leases else "d" * 32

    @rule(owner=OWNERS, keys=CHAINS, mask=MASKS)
    def metas(self, owner: str, keys: list[int], mask: BlockMask) -> None:
        wanted = [keys[i] for i in mask.unmasked(len(keys))]
        metas = self.call(self.manager.metas(self.manager.cache(owner), keys, mask))
        assert [meta.key for meta in metas] == wanted
        for meta in metas:
            block = self.model.block(owner, meta.key)
            assert {(location.id, location.status) for location in meta.locations} == {
                (place.id, place.status) for place in (block.places if block else ()) if place.status is not DELETING
            }
            badness = [(location.status, self.model.rank(location.storage) or 0) for location in meta.locations]
            assert [status for status, _ in badness] == sorted((status for status, _ in badness), reverse=True)


class AddressMachine(CacheMachine):
    """Storages of three speeds that move no bytes."""

    def configs(self) -> list[StorageConfig]:
        return [dummy("dum", keys_per_object=3), mempool("pool"), hf3fs("fs")]


class FileMachine(CacheMachine):
    """Real files, one and four parts to a file, beside a faster storage."""

    def configs(self) -> list[StorageConfig]:
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        return [nfs("one", root, 1), nfs("four", root, 4), mempool("pool")]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.folder.cleanup()


def machine_settings(thorough: int, otherwise: int, steps: int) -> settings:
    """Return settings: examples of a thorough run, examples of any other run, and steps of each of these."""
    return settings(
        max_examples=thorough if is_thorough() else otherwise,
        stateful_step_count=45 if is_thorough() else steps,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class TestInvariants1To5WithAddresses(AddressMachine.TestCase):
    settings = machine_settings(200, 25, 35)


class TestInvariants1To6WithFiles(FileMachine.TestCase):
    settings = machine_settings(120, 15, 30)
