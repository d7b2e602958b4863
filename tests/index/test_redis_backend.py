"""What lies in Redis, whatever happened: keys of a shard agree after losses, interruptions and on a full server."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from full_server import FULL, FullServer, full_server
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from index_rig import TableView
from redis_servers import Standalone, standalone
from thoroughness import examples

from kvcm.index.backends.backend import Access, Change, Sum
from kvcm.index.backends.redis import BlockKeys, RedisBackend, ShardKeys, SharedSums, totals_of
from kvcm.index.codec import decode_record
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed_key, pack_keys, unpack_keys
from kvcm.model.locations import BlockRecord, Location, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient, Script, ScriptCall
from kvcm.store.redis.store import RedisLease, RedisTable
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.telemetry.metrics import close_measures, open_measures

SERVING = Location("a", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"chunk", 10, 1700000000.9)
WRITING = SERVING._replace(id="w", status=LocationStatus.WRITING, session_id="s", deadline=1700000030.125)
OTHER = SERVING._replace(id="m", storage_type=StorageType.ST_MOONCAKE, size_bytes=3)
GOING = OTHER._replace(id="d", storage="pool", status=LocationStatus.DELETING, deadline=1700000060.0, size_bytes=2**40)
LATE = SERVING._replace(id="t", deadline=1700000090.0)


def key_bytes(key: int) -> bytes:
    """What Redis holds for a mixed key."""
    (packed,) = pack_keys((key,))
    return packed


def record(parent: int | None = None, *locations: Location) -> BlockRecord:
    return BlockRecord(parent, 0, locations or (SERVING,))


@pytest.fixture
async def client(redis_standalone: Standalone) -> AsyncIterator[RedisClient]:
    made = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"test-{secrets.token_hex(8)}", timeout_ms=10_000)))
    yield made
    await made.close()


async def apply(backend: RedisBackend, records: Mapping[int, BlockRecord | None]) -> list[int]:
    olds = await backend.get_many(list(records))
    changes = [Change(key, old, records[key]) for key, old in zip(records, olds, strict=True)]
    return list((await backend.write_many(changes)).lost)


async def ask(client: RedisClient, *command: Any) -> Any:
    return (await client.execute([command]))[0]


async def stored(client: RedisClient, uid: int, shard: int) -> dict[str, Any]:
    """What the five kinds of keys of a shard hold."""
    kinds = {kind: f"{client.prefix}:{kind}{{{uid}.{shard}}}".encode() for kind in "bzcpu"}
    scores = await ask(client, "ZRANGE", kinds["z"], 0, -1, "WITHSCORES")
    order = scores[::2]
    pending = await ask(client, "ZRANGE", kinds["p"], 0, -1, "WITHSCORES")
    children = await ask(client, "ZRANGE", kinds["c"], 0, -1)
    usage = await ask(client, "HGETALL", kinds["u"])
    (values,) = await client.mget([[kinds["b"] + member for member in order]])
    return {
        "records": dict(zip(order, values, strict=True)),
        "pending": {key: float(score) for key, score in zip(pending[::2], pending[1::2], strict=True)},
        "children": set(children),
        "usage": {k.decode(): int(v) for k, v in zip(usage[::2], usage[1::2], strict=True) if int(v) and k != b"#"},
        "scores": {key: float(score) for key, score in zip(scores[::2], scores[1::2], strict=True)},
    }


async def check_agreement(client: RedisClient, uid: int, shard_count: int, expected: Mapping[int, BlockRecord]) -> None:
    """All that is kept beside the records is what the records say (invariant 4)."""
    records: dict[bytes, BlockRecord] = {}
    for shard in range(shard_count):
        held = await stored(client, uid, shard)
        decoded = {member: decode_record(data) for member, data in held["records"].items()}
        usage: Counter[str] = Counter()
        for found in decoded.values():
            for location in found.locations:
                usage[f"{int(location.storage_type)}/{location.storage}"] += location.size_bytes
                if location.status is LocationStatus.DELETING:
                    usage[f"-{int(location.storage_type)}/{location.storage}"] += location.size_bytes
            usage["-"] += all(location.status is LocationStatus.DELETING for location in found.locations)
        assert held["usage"] == +usage
        assert {member for member, score in held["scores"].items() if score < 2**33} == {
            member
            for member, found in decoded.items()
            if any(location.status is LocationStatus.SERVING for location in found.locations)
        }
        assert held["pending"] == {member: found.due for member, found in decoded.items() if found.due is not None}
        assert held["children"] == {
            key_bytes(found.parent) + member for member, found in decoded.items() if found.parent is not None
        }
        records |= decoded
    assert records == {key_bytes(key): found for key, found in expected.items()}


PLACES = st.lists(st.sampled_from([SERVING, WRITING, OTHER, GOING, LATE]), min_size=1, max_size=3, unique=True)
STATES = st.none() | st.builds(lambda parent, places: record(parent, *places), st.none() | st.integers(-2, 4), PLACES)
BATCHES = st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(-2, 5), STATES, max_size=6)), max_size=10)


@settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches=BATCHES)
async def test_all_keys_of_a_shard_agree_after_conflicting_batches(
    client: RedisClient, batches: Sequence[tuple[bool, Mapping[int, BlockRecord | None]]]
) -> None:
    """A stale batch comes from a writer that read before the previous batch: its changes of records of that batch are
    lost, the others are not."""
    uid = secrets.randbits(40)
    backend = RedisBackend(client, uid, 2)
    expected: dict[int, BlockRecord] = {}
    previous: list[BlockRecord | None] = [None] * 8
    for is_stale, batch in batches:
        current = await backend.get_many(range(-2, 6))
        read = previous if is_stale else current
        written = await backend.write_many([Change(key, read[key + 2], new) for key, new in batch.items()])
        assert set(written.lost) == {
            key for key in batch if getattr(read[key + 2], "stamp", None) != getattr(current[key + 2], "stamp", None)
        }
        for key in batch.keys() - set(written.lost):
            new = batch[key]
            expected.pop(key, None)
            expected |= {key: new} if new is not None else {}
        previous = current
    await check_agreement(client, uid, 2, expected)
    for parent in range(-2, 5):
        family = sorted(key for key, found in expected.items() if found.parent == parent)
        assert await backend.children(parent) == family


async def test_keys_have_the_documented_names(client: RedisClient) -> None:
    backend = RedisBackend(client, 7, 1)
    await apply(backend, {mixed_key(-5): record(mixed_key(12), SERVING, WRITING, OTHER, GOING)})
    prefix, key = client.prefix.encode(), b"\xff" * 7 + b"\xfb"
    assert (await ask(client, "GET", prefix + b":b{7.0}" + key))[:1] == b"\x01"
    assert await ask(client, "ZRANGE", prefix + b":z{7.0}", 0, -1, "WITHSCORES") == [key, b"1700000000"]
    assert await ask(client, "ZRANGE", prefix + b":c{7.0}", 0, -1, "WITHSCORES") == [bytes(7) + b"\x0c" + key, b"0"]
    assert await ask(client, "ZRANGE", prefix + b":p{7.0}", 0, -1, "WITHSCORES") == [key, b"1700000030.125"]
    usage = await ask(client, "HGETALL", prefix + b":u{7.0}")
    going = str(2**40).encode()
    assert dict(zip(usage[::2], usage[1::2], strict=True)) == {
        b"4/nfs": b"20",
        b"2/nfs": b"3",
        b"2/pool": going,
        b"-2/pool": going,
        b"#": b"1",
    }


async def test_access_times_never_run_backwards_and_counts_saturate(client: RedisClient) -> None:
    backend = RedisBackend(client, 1, 4)
    await apply(backend, {1: record(), 2: record()})
    await backend.touch({1: 3}, 1700000100.0)
    await backend.touch({1: 4}, 1600000000.0)
    assert await backend.accesses([1]) == [Access(1700000100, 7)]
    await backend.touch({1: 4000, 2: 10**9}, 1700000100.0)
    await backend.touch({1: 4000}, 1700000100.0)
    assert await backend.accesses([1, 2]) == [Access(1700000100, 4095)] * 2


async def test_a_change_without_the_record_as_read_loses(client: RedisClient) -> None:
    """The test made these records and did not read them, so the backend cannot compare them with the stored ones."""
    backend = RedisBackend(client, 1, 1)
    await apply(backend, {1: record()})
    written = await backend.write_many([Change(1, record(), None), Change(2, record(), record(9))])
    assert sorted(written.lost) == [1, 2]
    assert await backend.get_many([1, 2]) == [record(), None]


async def test_a_record_of_another_release_is_refused(client: RedisClient) -> None:
    backend = RedisBackend(client, 1, 1)
    await ask(client, "SET", f"{client.prefix}:b{{1.0}}".encode() + key_bytes(5), b"\x02" + bytes(20))
    with pytest.raises(StorageIOError, match="version 2, this release reads version 1"):
        await backend.get_many([4, 5])


def calls_of(redis_standalone: Standalone, command: str) -> int:
    with redis_standalone.server.admin() as admin:
        return int(admin.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


async def test_a_batch_costs_few_calls(client: RedisClient, redis_standalone: Standalone) -> None:
    """A read is one MGET; no call of a script has more than 256 keys."""
    backend = RedisBackend(client, 1, 1)
    await apply(backend, {0: record()})
    before = calls_of(redis_standalone, "evalsha")
    await backend.write_many([Change(key, None, record(key - 1)) for key in range(1, 2001)])
    assert calls_of(redis_standalone, "evalsha") - before == 8
    before = calls_of(redis_standalone, "mget")
    assert await backend.get_many(range(1, 2001)) == [record(key - 1) for key in range(1, 2001)]
    assert calls_of(redis_standalone, "mget") - before == 1
    assert backend.key_count == 2001


async def test_a_change_costs_the_same_in_a_large_family(client: RedisClient, redis_standalone: Standalone) -> None:
    """However many siblings a block has, the same commands run, and none of them reads or writes the others."""
    backend = RedisBackend(client, 1, 1)
    families = {3: range(100, 102), -1: range(1000, 4000)}
    await apply(backend, {key: record(parent) for parent, family in families.items() for key in family})
    costs = []
    for parent, key in ((3, 1), (-1, 2)):
        before = all_calls(redis_standalone)
        await apply(backend, {key: record(parent)})
        await apply(backend, {key: record(parent - 1)})
        await apply(backend, {key: None})
        costs.append(all_calls(redis_standalone) - before)
    assert costs[0] == costs[1]
    assert costs[1]["zadd"] == 3  # access order, and twice the children
    assert costs[1].keys() <= {"evalsha", "mget", "mset", "unlink", "zadd", "zrem", "hincrby"}
    assert await backend.children(-1) == [*families[-1]]


def all_calls(redis_standalone: Standalone) -> Counter[str]:
    """Return how often each command ran, without those of a client that connects to ask this."""
    with redis_standalone.server.admin() as admin:
        stats = admin.info("commandstats").items()
    calls = {name.removeprefix("cmdstat_"): int(of["calls"]) for name, of in stats}
    return Counter({name: count for name, count in calls.items() if name != "info" and not name.startswith("client|")})


async def test_a_large_batch_is_like_many_small_ones(client: RedisClient) -> None:
    keys = [key * 0x9E3779B97F4A7C15 % 2**63 for key in range(10_000)]
    backend = RedisBackend(client, 1, 2)
    assert await apply(backend, {key: record(None, WRITING) for key in keys}) == []
    assert await backend.get_many([*keys, 1]) == [record(None, WRITING)] * 10_000 + [None]
    assert sorted(await backend.due(1.8e9, 20_000)) == sorted(keys)
    assert set(await backend.accesses(keys)) == {Access(1700000000, 0)}
    await backend.touch(dict.fromkeys(keys, 2), 1.8e9)
    assert set(await backend.accesses(keys)) == {Access(1_800_000_000, 2)}
    sample = await backend.random_sample(5000, Random(1))
    assert len(set(sample)) == len(sample) == 5000
    assert set(sample) <= set(keys)
    assert {key async for page in backend.scan(100) for key in page} == set(keys)


async def test_a_drop_is_continued_where_it_was_stopped(client: RedisClient) -> None:
    class Interrupted(RedisClient):
        """Its caller is cancelled after two scripts ran."""

        scripts_left = 2

        async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
            if not self.scripts_left:
                raise asyncio.CancelledError
            self.scripts_left -= 1
            return await super().run(calls)

    blocks = {key: record(key - 1, WRITING) for key in range(1000)}
    await apply(RedisBackend(client, 1, 1), blocks)
    stopping = Interrupted.of(client.settings)
    with pytest.raises(asyncio.CancelledError):
        await RedisBackend(stopping, 1, 1).drop()
    await stopping.close()
    left = await stored(client, 1, 0)
    assert len(left["records"]) == 1000 - 2 * 256
    assert None not in left["records"].values()
    await RedisBackend(client, 1, 1).drop()
    await RedisBackend(client, 1, 1).drop()
    assert await ask(client, "EXISTS", *(f"{client.prefix}:{kind}{{1.0}}".encode() for kind in "zcpu")) == 0
    assert await ask(client, "EXISTS", *(f"{client.prefix}:b{{1.0}}".encode() + key_bytes(k) for k in blocks)) == 0


async def test_a_dead_server_is_an_error_of_storage(tmp_path: Path) -> None:
    with standalone(tmp_path) as dying:
        client = RedisClient.of(parse_redis_uri(dying.uri("dying")))
        backend = RedisBackend(client, 1, 4)
        await apply(backend, {1: record()})
        dying.server.kill()
        calls = [backend.get_many([1]), backend.write_many([Change(2, None, record())]), backend.refresh()]
        calls += [backend.touch({1: 1}, 1.0), backend.children(1), backend.due(1.0, 1), backend.drop()]
        for call in calls:
            with pytest.raises(StorageIOError):
                await call
        assert backend.key_count == 1
        await client.close()


# ── A server at its `maxmemory` ──


DELETING = SERVING._replace(status=LocationStatus.DELETING, deadline=1700000060.0)
PLACE = StorageKey("nfs", StorageType.ST_NFS)


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullServer]:
    async with full_server(tmp_path) as made:
        yield made


async def write(backend: RedisBackend, keys: Iterable[int], new: BlockRecord | None) -> None:
    assert await apply(backend, dict.fromkeys(keys, new)) == []


async def test_blocks_are_decided_marked_and_removed_on_a_full_server(full: FullServer) -> None:
    """Invariant 4: a rejected script changes nothing, and a script that runs changes all related keys."""
    backend = RedisBackend(full.client, 1, 1)
    await write(backend, range(100), record(9, WRITING))
    await write(backend, range(100, 200), record(9))
    full.fill()
    with pytest.raises(StorageIOError, match=FULL):
        await write(backend, range(190, 210), record(8))
    assert await backend.get_many([190, 200]) == [record(9), None]
    await write(backend, range(100), record(9))
    await write(backend, range(100, 200), record(9, DELETING))
    assert sorted(await backend.due(1700000060.0, 1000)) == [*range(100, 200)]
    await write(backend, range(100, 200), None)
    assert await backend.children(9) == [*range(100)]
    assert await backend.due(1.8e9, 1000) == []
    await backend.refresh()
    assert (backend.key_count, backend.usage_bytes) == (100, {PLACE: 1000})
    full.free()
    await write(backend, range(200, 210), record(9, WRITING))
    assert await backend.get_many(range(200, 210)) == [record(9, WRITING)] * 10


async def test_blocks_of_a_removed_instance_go_on_a_full_server(full: FullServer) -> None:
    backend = RedisBackend(full.client, 1, 2)
    await write(backend, range(600), record(9))
    full.fill()
    await backend.drop()
    assert await RedisBackend(full.client, 1, 2).get_many(range(600)) == [None] * 600
    assert await backend.children(9) == []


async def test_documents_are_decided_and_ended_on_a_full_server(full: FullServer) -> None:
    table = RedisTable(full.client, "sessions", 4)
    assert await table.replace("open", None, b"open", 5.0)
    assert await table.replace("late", None, b"open", 6.0)
    full.fill()
    version = await table.version()
    with pytest.raises(StorageIOError, match=FULL):
        await table.replace("new", None, b"open", 7.0)
    assert await table.version() == version
    assert not await table.replace("open", b"other", b"decided", 8.0)
    assert await table.replace("open", b"open", b"decided", 8.0)
    assert await table.replace("late", b"open", None)
    assert (await table.all(), await table.due(9.0, 9)) == ({"open": b"decided"}, ["open"])
    assert await table.version() == version + 2
    full.free()
    assert await table.replace("new", None, b"open", 7.0)


async def test_leadership_changes_hands_on_a_full_server(full: FullServer) -> None:
    full.fill()
    lease = RedisLease(full.client)
    assert await lease.acquire("first", 60.0) == ("first", 1)
    assert await lease.acquire("first", 60.0) == ("first", 1)
    assert await lease.acquire("second", 60.0) == ("first", 1)
    await lease.release("first")
    assert await lease.acquire("second", 60.0) == ("second", 2)


async def test_only_scripts_that_say_so_run_on_a_full_server(full: FullServer) -> None:
    text = "return redis.call('SET', KEYS[1], ARGV[1])"
    full.fill()
    with pytest.raises(StorageIOError, match=FULL):
        await full.client.run([ScriptCall(Script(text), [b"full:x"], [b"value"])])
    await full.client.run([ScriptCall(Script(text, allow_oom=True), [b"full:x"], [b"value"])])
    assert await full.client.mget([[b"full:x"]]) == [[b"value"]]


# ── Invariant 4 as one manager sees it ──


USED = Sum(PLACE, is_deleting=False)
SHARDS = [ShardKeys.of("p", 1, shard) for shard in range(2)]


class Server:
    """Two shards that take writes and are asked for their sums; answers arrive when the test lets them."""

    def __init__(self) -> None:
        self.turns = [0, 0]
        self.bytes = [0, 0]
        self.answers: list[tuple[asyncio.Future[list[Any]], list[Any]]] = []
        self.unreceived: list[tuple[int, int, int]] = []

    def write(self, shard: int, size: int, *, is_ours: bool) -> None:
        self.turns[shard] += 1
        self.bytes[shard] += size
        if is_ours:
            self.unreceived.append((shard, self.turns[shard], size))

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
        st.tuples(st.sampled_from(["receive", "ask", "arrive"]), st.integers(0, 5), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(events=EVENTS)
async def test_nothing_counts_twice_whatever_overlaps(events: list[tuple[str, int, int]]) -> None:
    server, sums = Server(), SharedSums([totals_of(shard) for shard in SHARDS])
    asking: list[asyncio.Task[None]] = []
    for name, number, size in events:
        if name in {"ours", "theirs"}:
            server.write(number, size, is_ours=name == "ours")
        elif name == "receive" and server.unreceived:  # answers to writes come in any order
            receive(server, sums, number % len(server.unreceived))
        elif name == "ask":
            asking.append(asyncio.create_task(sums.refresh(server.run)))
        elif name == "arrive":
            server.answer()
        await settle()
        assert sums.usage[PLACE] <= sum(server.bytes), "something counts twice"
    while server.unreceived:
        receive(server, sums, 0)
    asking.append(asyncio.create_task(sums.refresh(server.run)))
    while not all(task.done() for task in asking):
        await settle()
        server.answer()
    assert sums.usage[PLACE] == sum(server.bytes)


def receive(server: Server, sums: SharedSums, index: int) -> None:
    shard, turn, size = server.unreceived.pop(index)
    sums.record(shard, turn, {USED: size}, 1)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_sums_of_a_real_store_agree_after_writes_and_questions_that_overlap(client: RedisClient) -> None:
    backend, random = RedisBackend(client, 7, 4), Random(1)
    known: dict[int, BlockRecord] = {}

    async def write(keys: list[int]) -> None:
        olds = await backend.get_many(keys)
        new = record(None, SERVING._replace(size_bytes=random.randrange(1, 99)))
        outcome = await backend.write_many([Change(key, old, new) for key, old in zip(keys, olds, strict=True)])
        known.update({key: new for key in keys if key not in outcome.lost})

    for _ in range(60):
        keys = random.sample(range(400), 120)
        writes = [write(keys[start : start + 30]) for start in range(0, 120, 30)]
        await asyncio.gather(*writes, *(backend.refresh() for _ in range(random.randrange(4))))
        assert backend.usage_bytes == Counter({PLACE: sum(each.locations[0].size_bytes for each in known.values())})
        assert backend.key_count == len(known)


async def test_a_change_that_another_manager_was_faster_with_is_counted_as_a_retry(client: RedisClient) -> None:
    indexes = [MetaIndex(RedisBackend(client, 7, 1), TableView(), shard_count=1) for _ in range(2)]
    await indexes[0].put({1: record()})
    measures: dict[str, float] = {}
    opened = open_measures(measures)
    try:
        for _ in range(50):
            grown = [index.read_modify_write([1], _deeper) for index in indexes]
            await asyncio.gather(*grown)
    finally:
        close_measures(opened)
    (stored_now,) = await indexes[0].get([1])
    assert stored_now is not None
    assert stored_now.depth == 100
    assert 1 <= measures["manager.lock_write_location_retry_times"] <= 50


def _deeper(_key: int, old: BlockRecord | None) -> BlockRecord | None:
    assert old is not None
    return old._replace(depth=old.depth + 1)


async def test_a_call_that_changes_nothing_leaves_nothing_in_the_store(client: RedisClient) -> None:
    backend = RedisBackend(client, 7, 1)
    await backend.write_many([Change(1, None, record())])
    (stored,) = await backend.get_many([1])
    await backend.drop()
    outcome = await backend.write_many([Change(1, stored, record()._replace(depth=3))])  # of a manager that comes late
    assert list(outcome.lost) == [1]
    assert await client.execute([(b"KEYS", client.prefix.encode() + b"*")]) == [[]]


async def _refreshed(server: Server, sums: SharedSums, count: int) -> list[asyncio.Task[None]]:
    """Return so many refreshes that began while another one was under way."""
    tasks = [asyncio.create_task(sums.refresh(server.run))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(sums.refresh(server.run)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_refreshes_during_a_request_share_the_next_request() -> None:
    server, sums = Server(), SharedSums([totals_of(shard) for shard in SHARDS])
    tasks = await _refreshed(server, sums, 5)
    server.write(0, 7, is_ours=False)  # after the request in flight, before the others get its answer
    server.answer()
    await tasks[0]
    assert sums.usage[PLACE] == 0
    await settle()
    server.answer()
    await asyncio.gather(*tasks)
    assert (sums.usage[PLACE], server.answers) == (7, []), "asked twice, not six times"


async def test_refreshes_that_wait_for_a_store_that_does_not_answer_share_its_failure() -> None:
    server, sums = Server(), SharedSums([totals_of(shard) for shard in SHARDS])
    tasks = await _refreshed(server, sums, 5)
    for _ in range(2):
        await settle()
        server.answers.pop(0)[0].set_exception(StorageIOError("no answer"))
    assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [StorageIOError] * 6
    again = asyncio.create_task(sums.refresh(server.run))
    await asyncio.sleep(0)
    server.answer()
    await again


async def test_a_cancelled_refresh_leaves_the_others_their_answer() -> None:
    server, sums = Server(), SharedSums([totals_of(shard) for shard in SHARDS])
    tasks = await _refreshed(server, sums, 2)
    server.answer()
    await settle()
    tasks[1].cancel()
    server.answers.clear()
    await settle()
    server.answer()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in results] == [type(None), asyncio.CancelledError, type(None)]


# ── Names of block records: those of the backend are understood, others are none ──


KEYS = BlockKeys("a.b(")


@given(uid=st.integers(0, 2**40), shard=st.integers(0, 4095), key=st.integers(-(2**63), 2**63 - 1))
@example(uid=1, shard=2, key=0x0A0A7D2E0A0A7D0A)  # newlines, brace and dot
def test_a_name_is_taken_apart(uid: int, shard: int, key: int) -> None:
    name = f"a.b(:b{{{uid}.{shard}}}".encode() + key.to_bytes(8, "big", signed=True)
    assert name.startswith(KEYS.prefix)
    found = KEYS.by_uid(KEYS.by_head([name]))
    assert found == {uid: [name[-8:]]}
    assert unpack_keys(found[uid]) == [mixed_key(key)]


FOREIGN = (
    *(b"", b"7", b"7.1", b"7.1}", b"7.1}1234567", b"7.1}123456789", b"7}12345678", b"x.1}12345678", b"7.x}12345678"),
    *(b"-7.1}12345678", b"7 .1}12345678", b"9" * 5000 + b".1}12345678", b"\xff\xfe.1}12345678"),
)


@pytest.mark.parametrize("rest", FOREIGN)
def test_a_foreign_name_below_the_prefix_is_none(rest: bytes) -> None:
    foreign = (KEYS.prefix + rest, b"another:b{7.1}12345678")
    assert KEYS.by_uid(KEYS.by_head(foreign)) == {}
    names = (*foreign, KEYS.prefix + b"7.1}12345678", KEYS.prefix + b"7.2}abcdefgh")
    assert KEYS.by_uid(KEYS.by_head(names)) == {7: [b"12345678", b"abcdefgh"]}
