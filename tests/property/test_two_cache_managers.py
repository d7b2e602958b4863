"""Two managers on one store, both at work on the same blocks, either of which may crash at any moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from cache_world import CountingIds, decoded, dummy, group_of, instance
from fake_clock import FakeClock
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shared_store import Node, SharedStore, begin_two
from thoroughness import is_thorough

from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.write_sessions import REPEAT_SECONDS, FinishedWrite, StartedWrite, WriteRequest, WriteSession
from kvcm.index.backends.backend import Change
from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import LocationStatus, decode_chunk

# ── Two managers parts ──


POOL = tuple(range(6))


class Op(NamedTuple):
    """What a client asks of a manager, or a duty of it."""

    node: int
    verb: str
    keys: list[int]
    pick: int
    flag: bool


WRITES = ("start", "start", "write", "write", "insist", "insist", "finish", "repeat", "repeat", "contest", "contest")
VERBS = (*WRITES, "renew", "remove", "trim", "read", "lease")
DUTIES = ("expire", "expire", "delete", "delete", "purge")
OPS = st.builds(
    Op,
    st.integers(0, 1),
    st.sampled_from([*VERBS, *DUTIES, "reinstall", "tick"]),
    st.one_of(
        st.integers(1, len(POOL)).map(lambda end: list(POOL[:end])),
        st.lists(st.sampled_from(POOL), min_size=1, max_size=4),
    ),
    st.integers(0, 30),
    st.booleans(),
)
CRASHES = st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 1), st.integers(0, 40)))
"""(which node, after how many turns of the loop)"""


@dataclass
class Written:
    """A session as its client knows it.

    Attributes:
        since: step at which it was asked for.
        decisions: what accepted finishes asked for.
        reported: their results.
        known_until: unix time until which a finish may be repeated, at least.
    """

    session: WriteSession
    since: int
    decisions: set[tuple[bool, ...]] = field(default_factory=set)
    reported: set[FinishedWrite] = field(default_factory=set)
    known_until: float = 0.0


# ── Two cache managers ──


pytestmark = pytest.mark.timeout(400)  # seconds to make a failure small; a pass takes ten

WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING
DELAY_SECONDS = 1.0
INSTANCE = instance("i", {"tp0": 10, "tp1": 10}, {"half": ("tp0",), "all": ("tp0", "tp1")})
GROUP = group_of(["d"], delay_ms=1000, indexer=MetaIndexerConfig(mutex_shard_num=2, batch_key_size=1))

Place = tuple[int, int, str]
"""Uid, key, location id."""


class TwoManagers(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 32))
    def open(self, seed: int) -> None:
        self.runner = asyncio.Runner()
        self.seed, self.step = seed, 0
        self.clock, self.ids = FakeClock(), CountingIds()
        self.store = SharedStore(self.on_change)
        self.violations: list[str] = []
        self.statuses: dict[Place, LocationStatus] = {}
        self.place_of: dict[str, Place] = {}
        self.writer_of: dict[Place, str] = {}
        self.served: set[Place] = set()
        self.known: list[Written] = []
        self.reinstalled_at = -1.0
        self.removed_at: dict[int, float] = dict.fromkeys(POOL, -1.0)
        self.readable_until: dict[Place, float] = {}
        self.crashed: list[Node] = []
        self.nodes: list[Node] = []
        self.runner.run(self.found())

    async def found(self) -> None:
        self.nodes = [self.new_node(), self.new_node()]
        await begin_two(*self.nodes, dummy("d"), GROUP, INSTANCE)

    def new_node(self) -> Node:
        self.seed += 1
        return Node(self.store, self.clock, self.ids, self.seed, self.on_delete)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            try:
                self.runner.run(self.come_to_rest())
            finally:
                self.runner.run(self.bury())
                self.runner.close()

    async def bury(self) -> None:
        for node in (*self.crashed, *self.nodes):
            await node.close()

    # Forbidden states, seen in the store and on the storage. Noted, since the code under test may catch an error.

    def note(self, is_right: bool, rule_: str) -> None:
        if not is_right:
            self.violations.append(rule_)

    @invariant()
    def nothing_forbidden_happened(self) -> None:
        assert self.violations == []

    def on_change(self, uid: int, change: Change) -> None:
        places = change.new.locations if change.new is not None else ()
        writing = Counter(name for place in places if place.status is WRITING for name in place.spec_names)
        self.note(all(count == 1 for count in writing.values()), "invariant 2: two writers")
        for place in places:
            at = (uid, change.key, place.id)
            before = self.statuses.get(at, WRITING)
            self.note(place.status >= before, f"{before.name} became {place.status.name}")
            self.statuses[at] = place.status
            self.writer_of.setdefault(at, place.session_id)
            self.served |= {at} if place.status is SERVING else set()
            self.place_of |= {spec.uri: at for spec in decode_chunk(place.chunk).specs}
        left = {place.id for place in places}
        for place in change.old.locations if change.old is not None else ():
            self.note(place.id in left or place.status is DELETING, "a location vanished that was not deleting")

    def on_delete(self, uris: Sequence[str]) -> None:
        now = self.clock.now()
        for at in {self.place_of[uri] for uri in uris if uri in self.place_of}:
            self.note(self.statuses[at] is DELETING, "bytes deleted before the mark")
            self.note(self.readable_until.get(at, 0.0) <= now, "invariant 6: a reader may still use the bytes")
            document = self.store.table("sessions")._documents.get(self.writer_of[at])
            if document is not None:
                session = WriteSession.decoded("", document)
                self.note(session.decision is not None or session.deadline <= now, "a writer may still use the bytes")

    # What clients and managers do.

    @rule(ops=st.lists(OPS, min_size=1, max_size=8), crash=CRASHES)
    def run_at_once(self, ops: list[Op], crash: tuple[int, int] | None) -> None:
        self.runner.run(self.gather(ops, crash))

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 5.0, 6.0, 31.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule(
        giver=st.integers(0, 1), deleter=st.integers(0, 1), keys=st.sampled_from([POOL, POOL[:2]]), flag=st.booleans()
    )
    def remove_under_the_eyes_of_a_reader(self, giver: int, deleter: int, keys: Sequence[int], flag: bool) -> None:
        """One manager gives a lease, another deletes."""
        everything = list(keys)
        for op in (
            Op(giver, "write", everything, 0, False),
            Op(giver, "lease", everything, 0, flag),
            Op(deleter, "remove", everything, 0, False),
        ):
            self.runner.run(self.gather([op], None))
        for seconds in (2.0, 1.0, 3.0):
            self.clock.time += seconds
            self.runner.run(self.gather([Op(deleter, "delete", everything, 0, False)], None))

    async def gather(self, ops: Sequence[Op], crash: tuple[int, int] | None) -> None:
        tasks = [asyncio.create_task(self.perform(op)) for op in ops]
        if crash is not None:
            crashing, turns = crash
            for _ in range(turns):
                await asyncio.sleep(0)
            self.nodes[crashing].crash()
        await asyncio.gather(*tasks)
        if crash is not None:
            self.crashed.append(self.nodes[crashing])
            self.nodes[crashing] = self.new_node()
            await self.nodes[crashing].begin()
        for node in self.nodes:
            await node.registry.refresh()

    async def perform(self, op: Op) -> None:
        """A refused call is fine as long as it leaves a valid state behind."""
        self.step += 1
        try:
            await getattr(self, op.verb)(self.nodes[op.node], op)
        except KvcmError:
            return

    async def start(self, node: Node, op: Op, *, is_known: bool = True) -> Written:
        since = self.step
        groups = ("half",) * len(op.keys) if op.flag else ()
        timeout = (2, 5, 20)[op.pick % 3]
        request = WriteRequest(op.keys, groups, timeout_seconds=timeout)
        started = await node.ask(node.manager.start_write(node.manager.cache("i"), request))
        assert isinstance(started, StartedWrite)
        written = Written(started.session, since)
        self.known += [written] if is_known else []
        return written

    async def write(self, node: Node, op: Op) -> None:
        written = await self.start(node, op)
        await self.end(self.nodes[op.pick % 2], written, op)

    async def finish(self, node: Node, op: Op) -> None:
        if self.known:
            await self.end(node, self.known[-1 - op.pick % min(4, len(self.known))], op)

    async def repeat(self, node: Node, op: Op) -> None:
        """Repeat an acknowledged finish: refused only when that is long ago, or its instance was removed."""
        ended = [written for written in self.known if written.decisions]
        if not ended:
            return
        written = ended[-1 - op.pick % len(ended)]
        (flags,) = written.decisions
        try:
            await self.finished(node, written, flags)
        except InvalidArgumentError:
            assert self.clock.now() >= written.known_until or self.reinstalled_at >= written.since
        if op.flag and flags:
            contrary = (not flags[0], *flags[1:])
            with pytest.raises(KvcmError):
                await self.finished(node, written, contrary)

    async def insist(self, node: Node, op: Op) -> None:
        """A client whose manager dies asks the other one, as does one that waits no longer: whatever became of the
        first finish, the second is refused only when the session's time was over, or its instance was removed."""
        written = await self.start(node, op, is_known=False)
        flags = tuple(op.flag or (op.pick >> n) % 2 == 0 for n in range(len(written.session.keys)))
        asked = asyncio.ensure_future(self.finished(node, written, flags))
        await asyncio.wait({asked}, timeout=None if op.flag else 0)
        try:
            await self.finished(self.nodes[1 - op.node], written, flags)
        except InvalidArgumentError:
            is_over = self.clock.now() >= written.session.deadline
            assert is_over or self.reinstalled_at >= written.since
        finally:
            await asyncio.gather(asked, return_exceptions=True)
            self.known.append(written)

    async def contest(self, node: Node, op: Op) -> None:
        """Both managers are asked to end a session at the same time, each with what the other is not asked for."""
        written = await self.start(node, op)
        flags = tuple((op.pick >> position) % 2 == 0 for position in range(len(written.session.keys)))
        contrary = tuple(not flag for flag in flags)
        ends = (self.finished(self.nodes[0], written, flags), self.finished(self.nodes[1], written, contrary))
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        unexpected = [each for each in outcomes if isinstance(each, Exception) and not isinstance(each, KvcmError)]
        assert unexpected == []

    async def tick(self, node: Node, op: Op) -> None:
        """Time passes in the middle of what the others do."""
        for _ in range(op.pick):
            await asyncio.sleep(0)
        self.clock.time += 6.0 if op.flag else 1.0

    async def end(self, node: Node, written: Written, op: Op) -> None:
        count = len(written.session.keys)
        await self.finished(node, written, tuple(op.flag or (op.pick >> n) % 2 == 0 for n in range(count)))

    async def finished(self, node: Node, written: Written, flags: tuple[bool, ...]) -> None:
        until = self.clock.now() + REPEAT_SECONDS
        finished = await node.ask(
            node.manager.finish_write(node.manager.cache("i"), written.session.id, BlockMask(flags=flags))
        )
        assert isinstance(finished, FinishedWrite)
        assert finished.served + finished.vanished == sum(flags)
        assert finished.dropped == len(flags) - sum(flags)
        written.decisions.add(flags)
        written.reported.add(finished)
        written.known_until = written.known_until or until

    async def renew(self, node: Node, op: Op) -> None:
        if self.known:
            session = self.known[-1 - op.pick % len(self.known)].session
            await node.ask(node.manager.renew_write(node.manager.cache("i"), session.id, 3 + op.pick))

    async def remove(self, node: Node, op: Op) -> None:
        await self.removing(op.keys, node.ask(node.manager.remove(node.manager.cache("i"), op.keys, NO_MASK)))

    async def trim(self, node: Node, op: Op) -> None:
        await self.removing(POOL, node.ask(node.manager.trim(node.manager.cache("i"))))

    async def reinstall(self, node: Node, op: Op) -> None:
        self.reinstalled_at = float("inf")
        try:
            await self.removing(POOL, node.ask(node.manager.remove_instance("i")))
            await node.ask(node.manager.register_instance(INSTANCE))
        finally:
            self.step += 1
            self.reinstalled_at = self.step

    async def removing(self, keys: Sequence[int], removal: Awaitable[Any]) -> None:
        self.note_removal(keys, float("inf"))
        try:
            await removal
        finally:
            self.step += 1
            self.note_removal(keys, self.step)

    def note_removal(self, keys: Sequence[int], until: float) -> None:
        self.removed_at |= dict.fromkeys(keys, until)

    async def read(self, node: Node, op: Op) -> None:
        until = self.clock.now() + DELAY_SECONDS
        found = await node.ask(node.manager.match(node.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, op.keys)))
        for _, _, specs in decoded(found.chunks):
            for _, uri in specs:
                if uri:
                    self.keep_readable(self.place_of[uri], until)

    async def lease(self, node: Node, op: Op) -> None:
        found = await node.ask(node.manager.match(node.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, op.keys)))
        lease = await node.ask(node.manager.lease(node.manager.cache("i"), found, 4000))
        for pin in lease.locations:
            self.keep_readable(pin, lease.deadline)
        if op.flag:
            other = self.nodes[1 - op.node]
            renewed = await other.ask(other.manager.renew_lease(other.manager.cache("i"), lease.id, 8000))
            for pin in renewed.locations:
                self.keep_readable(pin, renewed.deadline)

    def keep_readable(self, place: Place, until: float) -> None:
        self.readable_until[place] = max(until, self.readable_until.get(place, 0.0))

    async def expire(self, node: Node, op: Op) -> None:
        await node.ask(node.manager.expire())

    async def delete(self, node: Node, op: Op) -> None:
        await node.ask(node.executor.run_due())

    async def purge(self, node: Node, op: Op) -> None:
        await node.ask(node.manager.purge_removed())

    # Between rounds, and at rest.

    @invariant()
    def invariant_3_a_session_has_one_end(self) -> None:
        for written in self.known:
            assert len(written.decisions) <= 1
            assert len(written.reported) <= 1, "a repeated finish had another result"
            for key, success in zip(written.session.keys, next(iter(written.decisions), ()), strict=False):
                assert success or (written.session.uid, key, written.session.location_id) not in self.served

    @invariant()
    def invariant_3_acknowledged_blocks_serve(self) -> None:
        self.check_acknowledged()

    @invariant()
    def invariant_4_usage_is_the_recount(self) -> None:
        for backend in self.store.backends().values():
            records = self.runner.run(backend.get_many(POOL))
            places = [place for record in records if record is not None for place in record.locations]
            assert sum(backend.usage_bytes.values()) == sum(place.size_bytes for place in places)
            assert backend.key_count == sum(record is not None for record in records)
        if not self.crashed:
            reported = sum(sum(node.manager.group_usage_bytes("group").values()) for node in self.nodes)
            assert reported == sum(sum(backend.usage_bytes.values()) for backend in self.store.backends().values())

    def check_acknowledged(self) -> None:
        for written in self.known:
            session = written.session
            for key, success in zip(session.keys, next(iter(written.decisions), ()), strict=False):
                if success and self.removed_at[key] < written.since:
                    assert self.statuses[session.uid, key, session.location_id] is SERVING

    async def come_to_rest(self) -> None:
        """Let every session, delay and lease pass; one of the two managers looks after everything."""
        leader = self.nodes[0]
        for _ in range(5):
            self.clock.time += 4000
            await leader.manager.expire()
            await leader.manager.purge_removed()
            await leader.executor.run_due()
        for node in self.nodes:
            await node.registry.refresh()
        assert await leader.executor.run_due() == 0
        self.nothing_forbidden_happened()
        assert self.store.table("sessions")._documents == {}
        assert self.store.table("leases")._documents == {}
        assert not leader.registry.instances.removals()
        await self.check_records()
        self.check_acknowledged()

    async def check_records(self) -> None:
        current = self.nodes[0].registry.instances
        uid = current.placement("i").uid if current.all() else 0
        for owner, backend in self.store.backends().items():
            records = await backend.get_many(POOL)
            places = [place for record in records if record is not None for place in record.locations]
            assert {place.status for place in places} <= {SERVING}
            assert not places or owner == uid
            assert await backend.due(float("inf"), 100) == []
        if uid:
            records = await self.store.backend(uid).get_many(POOL)
            for node in self.nodes:
                found = await node.manager.match(node.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, POOL))
                assert list(found.keys) == [key for key, record in zip(POOL, records, strict=True) if record]


class TestInvariants1To4And6OnASharedStore(TwoManagers.TestCase):
    settings = settings(
        max_examples=150 if is_thorough() else 20, stateful_step_count=15, phases=[Phase.generate, Phase.shrink]
    )
