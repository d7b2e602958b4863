"""Several managers and one lease: never two lead at once, and somebody leads soon after the leader is gone."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from election_rig import LEASE_SECONDS, FakeClock, UnreliableLease, elector, endpoint_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.errors import NotLeaderError, StorageIOError
from kvcm.model.nodes import Endpoint
from kvcm.registry.leadership import Leadership
from kvcm.registry.nodes import Nodes
from kvcm.service.calls import Plane
from kvcm.service.node import refuse_unless_leading
from kvcm.store.memory import MemoryLease, MemoryTable

NAMES = ("node-a", "node-b", "node-c")


class Cluster(NamedTuple):
    """Managers, their ways to the lease, and what they share."""

    clock: FakeClock
    nodes: list[Leadership]
    ways: list[UnreliableLease]
    table: MemoryTable

    @classmethod
    def of(cls, count: int) -> "Cluster":
        clock, table = FakeClock(), MemoryTable()
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


async def test_when_the_leader_dies_another_leads_within_one_lease(cluster: Cluster) -> None:
    await cluster.tick()
    first, second = cluster.nodes
    token = first.token
    died_at = cluster.clock.time
    while not second.is_leader:
        cluster.clock.time += 0.1
        await second.tick()
    assert cluster.clock.time - died_at <= LEASE_SECONDS + 0.1
    assert second.token > token
    assert cluster.leaders == ["node-b"]


async def test_a_follower_forgets_a_leader_that_nobody_sees_any_more(cluster: Cluster) -> None:
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
    assert [node.leader_node_id for node in cluster.nodes] == ["node-b", "node-b"], "it knows who leads while it waits"


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


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["tick"] * 4 + ["wait"] * 2 + ["demote", "cut", "lose", "slow"])),
    max_size=80,
)


async def act(cluster: Cluster, which: int, action: str, slowly: Callable[[], None]) -> None:
    node, way = cluster.nodes[which], cluster.ways[which]
    if action == "tick":
        await node.tick()
    elif action == "wait":
        cluster.clock.advance((0.1, 2.9, 9.5)[which])
    elif action == "demote":
        with contextlib.suppress(NotLeaderError):
            await node.demote()
    elif action == "cut":
        way.outage = None if way.outage else StorageIOError("refused")
    elif action == "lose":
        way.lost_answer = None if way.lost_answer else StorageIOError("timed out")
    else:
        way.on_answer = slowly


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions=ACTIONS, delay_ms=st.sampled_from([0, 500, 20_000]))
def test_never_two_lead_at_once(actions: list[tuple[int, str]], delay_ms: int) -> None:
    """Invariant 1, with ways that are cut off, lose answers or take seconds; checked while answers are under way too.
    Tokens grow from leader to leader."""
    terms: list[tuple[int, str]] = []

    async def run() -> None:
        cluster = Cluster.of(3)
        for node in cluster.nodes:
            node.campaign_delay_ms = delay_ms

        def check() -> None:
            assert len(cluster.leaders) <= 1
            terms.extend((node.token, node.node_id) for node in cluster.nodes if node.is_leader)

        def slowly() -> None:
            check()
            cluster.clock.advance(3.7)
            check()

        for which, action in actions:
            await act(cluster, which, action, slowly)
            check()

    asyncio.run(run())
    tokens = [token for token, _ in terms]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == len(set(terms)), "one holder per token"


# Where nodes are.


async def test_nodes_that_were_killed_vanish_and_living_ones_stay(cluster: Cluster) -> None:
    dead = Nodes("dead", cluster.clock, cluster.table)
    await dead.publish(endpoint_of("dead"))
    for node in cluster.nodes:
        await node.publish(endpoint_of(node.node_id))
    for _ in range(70):
        cluster.clock.time += 1
        await cluster.tick()
    assert set(await cluster.table.all()) == {"node-a", "node-b"}


async def test_who_lives_is_listed_with_when_he_said_so_and_who_is_silent_is_not(cluster: Cluster) -> None:
    first, second = cluster.nodes
    await first.publish(endpoint_of("node-a"))
    cluster.clock.time += 30
    await second.publish(endpoint_of("node-b"))
    told_at = cluster.clock.now()
    assert await first.nodes() == [(endpoint_of("node-a"), told_at - 30), (endpoint_of("node-b"), told_at)]
    cluster.clock.time += 31  # nobody ticks, so nobody removes the entry of the first
    assert await second.nodes() == [(endpoint_of("node-b"), told_at)]


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
