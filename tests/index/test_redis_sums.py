"""Invariant 4 as one manager sees it: what it heard of the sums of a Redis and what it wrote since count once each."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from redis_servers import Standalone

from kvcm.index.backends.backend import Change
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.backends.redis_keys import ShardKeys
from kvcm.index.backends.redis_sums import SharedSums
from kvcm.index.backends.tally import Sum
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.script import ScriptCall
from kvcm.store.redis.uri import parse_redis_uri

PLACE = Place("nfs", StorageType.ST_NFS)
USED = Sum(PLACE, is_deleting=False)
SERVING = Location("a", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"chunk", 10, 1700000000.0)
SHARDS = [ShardKeys.of("p", 1, shard) for shard in range(2)]


class Server:
    """Two shards that take writes and are asked for their sums; answers arrive when the test lets them."""

    def __init__(self) -> None:
        self.turns = [0, 0]
        self.bytes = [0, 0]
        self.answers: list[tuple[asyncio.Future[list[Any]], list[Any]]] = []
        self.unheard: list[tuple[int, int, int]] = []

    def write(self, shard: int, size: int, *, is_ours: bool) -> None:
        self.turns[shard] += 1
        self.bytes[shard] += size
        if is_ours:
            self.unheard.append((shard, self.turns[shard], size))

    async def run(self, _calls: Sequence[ScriptCall]) -> list[Any]:
        now = [
            (0, [b"#", str(turn).encode(), USED.field.encode(), str(size).encode()])
            for turn, size in zip(self.turns, self.bytes, strict=True)
        ]
        arrival: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.answers.append((arrival, now))
        return await arrival

    def answer(self) -> None:
        """Let the earliest answer arrive."""
        if self.answers:
            arrival, now = self.answers.pop(0)
            arrival.set_result(now)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ours", "theirs"]), st.integers(0, 1), st.integers(1, 50)),
        st.tuples(st.sampled_from(["hear", "ask", "arrive"]), st.integers(0, 5), st.just(0)),
    ),
    max_size=40,
)


async def play(events: list[tuple[str, int, int]]) -> None:
    server, sums = Server(), SharedSums(SHARDS)
    asking: list[asyncio.Task[None]] = []
    for name, number, size in events:
        if name in {"ours", "theirs"}:
            server.write(number, size, is_ours=name == "ours")
        elif name == "hear" and server.unheard:  # answers to writes come in any order
            hear(server, sums, number % len(server.unheard))
        elif name == "ask":
            asking.append(asyncio.create_task(sums.refresh(server.run)))
        elif name == "arrive":
            server.answer()
        await settle()
        assert sums.usage[PLACE] <= sum(server.bytes), "something counts twice"
    while server.unheard:
        hear(server, sums, 0)
    asking.append(asyncio.create_task(sums.refresh(server.run)))
    while not all(task.done() for task in asking):
        await settle()
        server.answer()
    assert sums.usage[PLACE] == sum(server.bytes)


def hear(server: Server, sums: SharedSums, index: int) -> None:
    shard, turn, size = server.unheard.pop(index)
    sums.note(shard, turn, {USED: size}, 1)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@settings(deadline=None)
@given(events=EVENTS)
def test_nothing_counts_twice_whatever_overlaps(events: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(events))


async def test_a_write_that_ends_after_the_sums_were_heard_counts_once() -> None:
    server, sums = Server(), SharedSums(SHARDS)
    server.write(0, 10, is_ours=True)
    asking = asyncio.create_task(sums.refresh(server.run))
    await settle()
    server.write(1, 5, is_ours=True)
    sums.note(1, 1, {USED: 5}, 1)  # told while the answer, which is of before, is under way
    server.answer()
    await asking
    sums.note(0, 1, {USED: 10}, 1)
    assert sums.usage[PLACE] == 15


async def test_sums_of_a_real_store_agree_after_writes_and_questions_that_overlap(
    redis_standalone: Standalone,
) -> None:
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"test-{secrets.token_hex(8)}", timeout_ms=10_000)))
    backend, random = RedisBackend(client, 7, 4), Random(1)
    known: dict[int, BlockRecord] = {}

    async def write(keys: list[int]) -> None:
        olds = await backend.get_many(keys)
        new = BlockRecord(None, 0, (SERVING._replace(size_bytes=random.randrange(1, 99)),))
        outcome = await backend.write_many([Change(key, old, new) for key, old in zip(keys, olds, strict=True)])
        known.update({key: new for key in keys if key not in outcome.lost})

    for _ in range(60):
        keys = random.sample(range(400), 120)
        writes = [write(keys[start : start + 30]) for start in range(0, 120, 30)]
        await asyncio.gather(*writes, *(backend.refresh() for _ in range(random.randrange(4))))
        assert backend.usage_bytes == Counter({PLACE: sum(each.locations[0].size_bytes for each in known.values())})
        assert backend.key_count == len(known)
    await client.close()


async def test_a_call_that_changes_nothing_leaves_nothing_in_the_store(redis_standalone: Standalone) -> None:
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"test-{secrets.token_hex(8)}", timeout_ms=10_000)))
    backend, record = RedisBackend(client, 7, 1), BlockRecord(None, 0, (SERVING,))
    await backend.write_many([Change(1, None, record)])
    (stored,) = await backend.get_many([1])
    await backend.drop()
    outcome = await backend.write_many([Change(1, stored, record._replace(depth=3))])  # of a manager that comes late
    assert list(outcome.lost) == [1]
    assert await client.execute([(b"KEYS", client.prefix.encode() + b"*")]) == [[]]
    await client.close()


async def _turns() -> None:
    """Let what can go on go on."""
    for _ in range(8):
        await asyncio.sleep(0)


async def _refreshed(server: Server, sums: SharedSums, count: int) -> list[asyncio.Task[None]]:
    """Return so many refreshes that began while another one was under way."""
    tasks = [asyncio.create_task(sums.refresh(server.run))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(sums.refresh(server.run)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_who_comes_while_sums_are_asked_for_shares_what_is_asked_next() -> None:
    server, sums = Server(), SharedSums(SHARDS)
    tasks = await _refreshed(server, sums, 5)
    server.write(0, 7, is_ours=False)  # after what is under way, before the others hear
    server.answer()
    await tasks[0]
    assert sums.usage[PLACE] == 0
    await _turns()
    server.answer()
    await asyncio.gather(*tasks)
    assert (sums.usage[PLACE], server.answers) == (7, []), "asked twice, not six times"


async def test_who_waits_behind_a_store_that_does_not_answer_shares_its_failure() -> None:
    server, sums = Server(), SharedSums(SHARDS)
    tasks = await _refreshed(server, sums, 5)
    for _ in range(2):
        await _turns()
        server.answers.pop(0)[0].set_exception(StorageIOError("no answer"))
    assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [StorageIOError] * 6
    again = asyncio.create_task(sums.refresh(server.run))
    await asyncio.sleep(0)
    server.answer()
    await again


async def test_who_goes_away_leaves_the_others_their_answer() -> None:
    server, sums = Server(), SharedSums(SHARDS)
    tasks = await _refreshed(server, sums, 2)
    server.answer()
    await _turns()
    tasks[1].cancel()
    server.answers.clear()
    await _turns()
    server.answer()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in results] == [type(None), asyncio.CancelledError, type(None)]
