"""CacheManager against a model in plain dicts: every answer is predicted, every record and every byte compared.

Many sessions are open at once and overlap; the memory backend never suspends, so that the order of the rules is every
order there is. Numbers are those of the invariants in design.md 5.
"""

import tempfile
from pathlib import Path

import pytest
from cache_world import decoded, dummy, hf3fs, mempool, nfs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machine_core import CHAINS, MASKS, OWNERS, PICKS
from machine_writers import WriterRules
from model_parts import DELETING
from thoroughness import examples

from kvcm.cache.match import Match, MatchMode, MatchQuery
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.model.storages import StorageConfig

pytestmark = pytest.mark.timeout(400)  # seconds to make a failure small; a pass takes ten


class CacheMachine(WriterRules):
    """The rules of time, operators and readers; the classes below choose the storages."""

    # Time, removal, storages.

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 10.0, 31.0, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        self.model.expire()
        self.call(self.manager.expire())
        self.note_ended()

    def note_ended(self) -> None:
        self.ended = set(self.uris_of) - set(self.model.sessions)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.5, 31.0]))
    def delete_due(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.check_bytes()
        self.model.delete_due()
        self.runner.run(self.world.executor.run_due())
        self.check_bytes()
        self.note_ended()

    @rule()
    def purge_removed(self) -> None:
        """A removed instance is forgotten when its last block is gone, and not before."""
        self.call(self.manager.purge_removed())
        removed = {custody.uid for custody in self.manager.indexes()}
        for uid, (owner, epoch) in self.registrations.items():
            is_current = epoch == self.model.epochs[owner]
            assert (uid in removed) == (is_current or bool(self.model.resident(owner, epoch)))

    @rule(owner=OWNERS, keys=CHAINS, mask=MASKS)
    def remove(self, owner: str, keys: list[int], mask: BlockMask) -> None:
        unmasked = [keys[i] for i in mask.unmasked(len(keys))]
        assert self.call(self.manager.remove(owner, keys, mask)) == self.model.remove(owner, unmasked)

    @rule(owner=OWNERS)
    def trim_all(self, owner: str) -> None:
        expected = self.model.remove(owner, list(self.model.resident(owner)))
        assert self.call(self.manager.trim(owner)) == expected

    @rule(owner=OWNERS)
    def trim_meta(self, owner: str) -> None:
        assert self.call(self.manager.trim_meta(owner)) == self.model.forget_all(owner)

    @rule(
        owner=OWNERS, begin=st.sampled_from([-40.0, -10.0, -1.0, 0.0]), length=st.sampled_from([-1, 0, 1.0, 12.5, 60])
    )
    def trim_written_between(self, owner: str, begin: float, length: float) -> None:
        """Half open: begin ≤ t < end; an empty range is refused."""
        begin += self.clock.now()
        end = begin + length
        removed = self.call(self.manager.trim_written_between(owner, begin, end))
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
            self.model.shelves[name] = self.shelf(name)
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
        """What somebody was just given is removed and everything due is deleted."""
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
        lease = self.call(self.manager.lease(owner, found, lease_ms))
        self.model.lease(owner, lease.id, found.keys, lease_ms / 1000)
        assert lease.deadline == self.model.leases[lease.id].deadline
        uid = self.manager.cache(owner).placement.uid
        assert set(lease.pins) == {(uid, key, place) for _, key, place in self.model.leases[lease.id].pins}

    @rule(pick=PICKS, owner=OWNERS, lease_ms=st.sampled_from([-1, 0, 1000, 600_000, 600_001]))
    def renew_lease(self, pick: int, owner: str, lease_ms: int) -> None:
        lease_id = self.any_lease(pick)
        known = self.model.open_lease(owner, lease_id)
        renewed = self.call(self.manager.renew_lease(owner, lease_id, lease_ms))
        if isinstance(renewed, type):
            assert known is None or not 1 <= lease_ms <= 600_000
            return
        assert known is not None
        known.deadline = self.clock.now() + lease_ms / 1000
        assert renewed.deadline == known.deadline

    @rule(pick=PICKS, owner=OWNERS)
    def release_lease(self, pick: int, owner: str) -> None:
        """Fine for a lease that has ended; refused while it is open for somebody else."""
        lease_id = self.any_lease(pick)
        lease = self.model.leases.get(lease_id)
        is_open = lease is not None and lease.deadline > self.clock.now()
        others = is_open and self.model.open_lease(owner, lease_id) is None
        refused = self.call(self.manager.release_lease(owner, lease_id)) is not None
        assert refused == others
        if not refused:
            self.model.leases.pop(lease_id, None)

    def any_lease(self, pick: int) -> str:
        leases = list(self.model.leases)
        return leases[pick % len(leases)] if leases else "d" * 32

    @rule(owner=OWNERS, keys=CHAINS, mask=MASKS)
    def metas(self, owner: str, keys: list[int], mask: BlockMask) -> None:
        wanted = [keys[i] for i in mask.unmasked(len(keys))]
        metas = self.call(self.manager.metas(owner, keys, mask))
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


class TestInvariants1To5WithAddresses(AddressMachine.TestCase):
    settings = settings(
        max_examples=examples(200),
        stateful_step_count=45,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class TestInvariants1To6WithFiles(FileMachine.TestCase):
    settings = settings(
        max_examples=examples(120),
        stateful_step_count=45,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
