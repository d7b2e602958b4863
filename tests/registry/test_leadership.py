"""Leadership: the lease of one manager, and several that compete for it."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from election_rig import ENDPOINT, LEASE_SECONDS, UnreliableLease, elector, endpoint_of
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.errors import NotLeaderError, StorageIOError
from kvcm.model.nodes import Endpoint
from kvcm.registry.leadership import Leadership, NodeTable
from kvcm.service.admission import refuse_unless_leading
from kvcm.service.calls import Plane
from kvcm.store.memory import MemoryLease, MemoryTable


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def lease(clock: FakeClock) -> UnreliableLease:
    return UnreliableLease(MemoryLease(clock))


@pytest.fixture
def leadership(clock: FakeClock, lease: UnreliableLease) -> Leadership:
    return elector("node-1", clock, lease, MemoryTable())


def holder(leadership: Leadership) -> tuple[bool, str, float | None]:
    return leadership.is_leader, leadership.leader_node_id, leadership.expires


async def test_ticks_renew_it(leadership: Leadership, clock: FakeClock) -> None:
    for _ in range(5):
        await leadership.tick()
        clock.time += 8.999
        assert leadership.is_leader
    assert (leadership.last_tick, leadership.token) == (clock.time - 8.999, 1)


async def test_the_term_begins_before_the_store_was_asked(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    """Invariant 1: from the store's view the lease may have begun as early as that."""
    seconds = 4

    def pass_time() -> None:
        clock.time += seconds

    lease.on_answer = pass_time
    await leadership.tick()
    assert leadership.expires == 109.0
    seconds = 9
    await leadership.tick()  # four seconds have passed: it is renewed
    assert not leadership.is_leader


@pytest.mark.parametrize("answers", ["no call", "no answer"])
async def test_silence_of_the_store_ends_no_term_early_and_none_late(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease, answers: str
) -> None:
    """Invariant 2."""
    await leadership.tick()
    lease.outage = StorageIOError("refused") if answers == "no call" else None
    lease.lost_answer = StorageIOError("timed out") if answers == "no answer" else None
    for _ in range(89):
        clock.time += 0.1
        await leadership.tick()
        assert leadership.is_leader
    clock.time += 0.2
    assert not leadership.is_leader
    await leadership.tick()
    assert holder(leadership) == (False, "", None)
    lease.outage = lease.lost_answer = None
    await leadership.tick()
    assert leadership.is_leader


@pytest.mark.parametrize(("delay_ms", "retaken_after"), [(0, 0.0), (1, 0.001), (5000, 5.0), (60_000, 60.0)])
async def test_after_a_demotion_it_is_taken_again_after_the_campaign_delay(
    leadership: Leadership, clock: FakeClock, delay_ms: int, retaken_after: float
) -> None:
    leadership.campaign_delay_ms = delay_ms
    await leadership.tick()
    await leadership.demote()
    assert holder(leadership) == (False, "", None)
    demoted_at = clock.time
    if retaken_after:
        clock.time = demoted_at + retaken_after * 0.99
        await leadership.tick()
        assert not leadership.is_leader
        assert leadership.last_tick == clock.time
    clock.time = demoted_at + retaken_after
    await leadership.tick()
    assert holder(leadership) == (True, "node-1", clock.time + 9.0)
    assert leadership.token == 2


async def test_only_the_leader_can_be_demoted(leadership: Leadership, clock: FakeClock) -> None:
    with pytest.raises(NotLeaderError, match="node-1"):
        await leadership.demote()
    await leadership.tick()
    clock.time += 10
    with pytest.raises(NotLeaderError):
        await leadership.demote()
    await leadership.tick()
    await leadership.demote()
    with pytest.raises(NotLeaderError):
        await leadership.demote()


@pytest.mark.parametrize("verb", ["demote", "withdraw"])
async def test_an_answer_under_way_does_not_undo_a_resignation(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease, verb: str
) -> None:
    """Invariant 3, and the lease is free afterwards although the renewal came after the resignation began."""
    leadership.campaign_delay_ms = 60_000
    await leadership.tick()
    clock.time += 1
    lease.gate.clear()
    lease.asked.clear()
    tick = asyncio.create_task(leadership.tick())
    await lease.asked.wait()
    resignation = asyncio.create_task(getattr(leadership, verb)())
    await asyncio.sleep(0)
    assert not leadership.is_leader
    lease.gate.set()
    await asyncio.gather(tick, resignation)
    assert not leadership.is_leader
    assert (await lease.acquire("node-2", 1)).holder == "node-2"


async def test_a_demotion_counts_even_when_the_store_does_not_receive_of_it(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    leadership.campaign_delay_ms = 3000
    await leadership.tick()
    lease.outage = StorageIOError("refused")
    await leadership.demote()
    await leadership.tick()
    assert not leadership.is_leader


async def test_after_a_withdrawal_it_never_leads_again(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    await leadership.publish(ENDPOINT)
    await leadership.tick()
    await leadership.withdraw()
    for _ in range(3):
        clock.time += 1000
        await leadership.tick()
        assert not leadership.is_leader


@pytest.mark.parametrize(("margin", "term"), [(0.0, 10.0), (0.1, 9.9), (5.0, 5.0), (60.0, 5.0)])
async def test_a_margin_never_eats_the_whole_lease(clock: FakeClock, margin: float, term: float) -> None:
    leadership = Leadership("n", clock, 10.0, MemoryLease(clock), MemoryTable(), margin)
    await leadership.tick()
    assert leadership.expires == 100.0 + term


# ── Several managers and one lease ──


NAMES = ("node-a", "node-b", "node-c")


class Cluster(NamedTuple):
    """Managers, their ways to the lease, and what they share."""

    clock: FakeClock
    nodes: list[Leadership]
    ways: list[UnreliableLease]
    table: MemoryTable

    @classmethod
    def of(cls, count: int) -> "Cluster":
        clock, table = FakeClock(100.0), MemoryTable()
        lease = MemoryLease(clock)
        ways = [UnreliableLease(lease) for _ in range(count)]
        return cls(clock, [elector(NAMES[n], clock, ways[n], table) for n in range(count)], ways, table)

    @property
    def leaders(self) -> list[str]:
        return [node.node_id for node in self.nodes if node.is_leader]

    async def tick(self, nodes: Sequence[Leadership] | None = None) -> None:
        for node in nodes if nodes is not None else self.nodes:
            await node.tick()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.of(2)


async def test_the_first_one_leads_and_all_know_it_and_where_it_is(cluster: Cluster) -> None:
    for node in cluster.nodes:
        await node.publish(endpoint_of(node.node_id))
    await cluster.tick()
    for node in cluster.nodes:
        assert (node.leader_node_id, node.leader_endpoint) == ("node-a", endpoint_of("node-a"))
    assert cluster.leaders == ["node-a"]


async def test_a_follower_without_the_store_forgets_the_leader_after_its_lease(cluster: Cluster) -> None:
    await cluster.tick()
    cluster.ways[1].outage = StorageIOError("refused")
    cluster.clock.time += LEASE_SECONDS - 0.1
    await cluster.nodes[1].tick()
    assert cluster.nodes[1].leader_node_id == "node-a"
    cluster.clock.time += 0.2
    await cluster.nodes[1].tick()
    assert cluster.nodes[1].leader_node_id == ""


async def test_a_demoted_leader_stays_out_and_the_other_takes_over_at_once(cluster: Cluster) -> None:
    first, second = cluster.nodes
    await cluster.tick()
    first.campaign_delay_ms = 60_000
    await first.demote()
    await cluster.tick()
    assert cluster.leaders == ["node-b"]
    cluster.clock.time += 5
    await cluster.tick()
    assert cluster.leaders == ["node-b"]
    assert second.token == 2
    assert [node.leader_node_id for node in cluster.nodes] == ["node-b", "node-b"], "it knows the leader while it waits"


async def test_a_leader_that_stops_hands_over_at_once(cluster: Cluster) -> None:
    for node in cluster.nodes:
        await node.publish(endpoint_of(node.node_id))
    await cluster.tick()
    await cluster.nodes[0].withdraw()
    await cluster.nodes[1].tick()
    assert cluster.leaders == ["node-b"]
    assert set(await cluster.table.all()) == {"node-b"}


async def test_a_leader_cut_off_from_the_store_ends_before_another_begins(cluster: Cluster) -> None:
    """Invariant 1, at every tenth of a second."""
    await cluster.tick()
    cluster.ways[0].outage = StorageIOError("refused")
    seen = set()
    for _ in range(120):
        cluster.clock.time += 0.1
        await cluster.tick()
        assert len(cluster.leaders) <= 1
        seen.add(tuple(cluster.leaders))
    assert seen == {("node-a",), (), ("node-b",)}


@pytest.mark.parametrize("revision", [None, (1,)])
async def test_a_leader_that_dies_is_replaced_when_its_lease_ends(
    cluster: Cluster, revision: tuple[int, ...] | None
) -> None:
    """Also where nothing reports the end."""
    for way in cluster.ways:
        way.revision = revision
    for _ in range(30):
        cluster.clock.time += 0.1
        await cluster.tick()
    died_at = cluster.clock.time
    while cluster.leaders != ["node-b"]:
        cluster.clock.time += 0.1
        await cluster.tick(cluster.nodes[1:])
        assert cluster.clock.time < died_at + LEASE_SECONDS + 0.15
    assert cluster.nodes[1].token == 2


async def test_a_lease_that_is_known_to_be_as_it_was_is_renewed_each_second_and_asked_for_by_others(
    cluster: Cluster,
) -> None:
    for way in cluster.ways:
        way.revision = (1,)
    await cluster.tick()
    for way in cluster.ways:
        way.calls = 0
    for _ in range(100):
        cluster.clock.time += 0.1
        await cluster.tick()
    assert cluster.leaders == ["node-a"]
    assert all(9 <= way.calls <= 25 for way in cluster.ways), [way.calls for way in cluster.ways]


async def test_a_renewal_that_fails_is_tried_again_at_the_next_tick(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    lease.revision = (1,)
    await leadership.tick()
    clock.time += 1
    lease.outage = StorageIOError("refused")
    await leadership.tick()
    lease.outage = None
    clock.time += 0.1
    await leadership.tick()
    assert leadership.expires == clock.time + LEASE_SECONDS - 1.0


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["tick"] * 4 + ["wait"] * 2 + ["demote", "cut", "abandon", "slow"])),
    max_size=80,
)


async def act(cluster: Cluster, which: int, action: str, slowly: Callable[[], None]) -> None:
    node, way = cluster.nodes[which], cluster.ways[which]
    if action == "tick":
        await node.tick()
    elif action == "wait":
        cluster.clock.time += (0.1, 2.9, 9.5)[which]
    elif action == "demote":
        with contextlib.suppress(NotLeaderError):
            await node.demote()
    elif action == "cut":
        way.outage = None if way.outage else StorageIOError("refused")
    elif action == "abandon":
        way.lost_answer = None if way.lost_answer else StorageIOError("timed out")
    else:
        way.on_answer = slowly


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    actions=ACTIONS,
    delay_ms=st.sampled_from([0, 500, 20_000]),
    revisions=st.lists(st.none() | st.just((1,)), min_size=3),
)
async def test_never_two_lead_at_once(
    actions: list[tuple[int, str]], delay_ms: int, revisions: list[tuple[int, ...] | None]
) -> None:
    """Invariant 1, with ways that are cut off, lose answers or take seconds; checked while answers are under way too,
    and where reports of changes are lost. Tokens grow from leader to leader."""
    terms: list[tuple[int, str]] = []

    cluster = Cluster.of(3)
    for node, way, revision in zip(cluster.nodes, cluster.ways, revisions, strict=False):
        node.campaign_delay_ms, way.revision = delay_ms, revision

    def check() -> None:
        assert len(cluster.leaders) <= 1
        terms.extend((node.token, node.node_id) for node in cluster.nodes if node.is_leader)

    def slowly() -> None:
        check()
        cluster.clock.time += 3.7
        check()

    for which, action in actions:
        await act(cluster, which, action, slowly)
        check()
    tokens = [token for token, _ in terms]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == len(set(terms)), "one holder per token"


# Where nodes are.


async def test_nodes_that_were_killed_vanish_and_living_ones_stay(cluster: Cluster) -> None:
    dead = NodeTable("dead", cluster.clock, cluster.table)
    await dead.publish(endpoint_of("dead"))
    for node in cluster.nodes:
        await node.publish(endpoint_of(node.node_id))
    for _ in range(70):
        cluster.clock.time += 1
        await cluster.tick()
    assert set(await cluster.table.all()) == {"node-a", "node-b"}


async def test_live_managers_are_listed_with_their_last_report_and_silent_ones_are_not(cluster: Cluster) -> None:
    first, second = cluster.nodes
    await first.publish(endpoint_of("node-a"))
    cluster.clock.time += 30
    await second.publish(endpoint_of("node-b"))
    reported_at = cluster.clock.now()
    assert await first.nodes() == [(endpoint_of("node-a"), reported_at - 30), (endpoint_of("node-b"), reported_at)]
    cluster.clock.time += 31  # no manager ticks, so none removes the entry of the first
    assert await second.nodes() == [(endpoint_of("node-b"), reported_at)]


async def test_a_leader_that_comes_back_elsewhere_under_its_id_is_found(cluster: Cluster) -> None:
    first, second = cluster.nodes
    await first.publish(endpoint_of("node-a"))
    await cluster.tick()
    moved = Endpoint("node-a", "elsewhere", 5, 6, 7, 8)
    again = elector("node-a", cluster.clock, cluster.ways[0], cluster.table)
    await again.publish(moved)
    cluster.clock.time += 1
    await cluster.tick([again, second])
    assert (second.leader_node_id, second.leader_endpoint) == ("node-a", moved)


async def test_the_message_of_a_refusal_says_whom_to_call(cluster: Cluster) -> None:
    first, second = cluster.nodes
    with pytest.raises(NotLeaderError, match="node-b does not lead and no other node does"):
        refuse_unless_leading(second, Plane.DATA)
    await cluster.tick()
    refuse_unless_leading(first, Plane.DATA)
    with pytest.raises(NotLeaderError, match="node-a does, whose address is not known"):
        refuse_unless_leading(second, Plane.DATA)
    await first.publish(endpoint_of("node-a"))
    await cluster.tick()
    for plane, ports in ((Plane.DATA, (1, 2)), (Plane.ADMIN, (3, 4))):
        with pytest.raises(NotLeaderError) as refusal:
            refuse_unless_leading(second, plane)
        for port in ports:
            assert f"node-a.example:{port} " in str(refusal.value)
