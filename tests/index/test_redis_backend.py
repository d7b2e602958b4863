"""What lies in Redis, whatever happened: all of a shard's keys agree, after losses, interruptions and a full server."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_servers import Standalone, standalone

from kvcm.index.backends.backend import Access, Change
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.codec import decode_record
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.script import ScriptCall
from kvcm.store.redis.uri import parse_redis_uri

SERVING = Location("a", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"chunk", 10, 1700000000.9)
WRITING = SERVING._replace(id="w", status=LocationStatus.WRITING, session_id="s", deadline=1700000030.125)
OTHER = SERVING._replace(id="m", storage_type=StorageType.ST_MOONCAKE, size_bytes=3)
GOING = OTHER._replace(id="d", storage="pool", status=LocationStatus.DELETING, deadline=1700000060.0, size_bytes=2**40)
LATE = SERVING._replace(id="t", deadline=1700000090.0)


def key_bytes(key: int) -> bytes:
    return key.to_bytes(8, "big", signed=True)


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
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=BATCHES)
async def test_all_keys_of_a_shard_agree_whoever_wins(
    client: RedisClient, batches: Sequence[tuple[bool, Mapping[int, BlockRecord | None]]]
) -> None:
    """A stale batch comes from who read before the previous batch: what that one changed is lost, the rest is not."""
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
    await apply(backend, {-5: record(12, SERVING, WRITING, OTHER, GOING)})
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


async def test_who_does_not_say_what_was_read_loses(client: RedisClient) -> None:
    """A record made here was not read from the store, so nobody knows whether it is the one that is there."""
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
        client = RedisClient.of(parse_redis_uri(dying.uri("dying", timeout_ms=1000)))
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
