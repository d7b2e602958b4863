"""The client over a lone server, a cluster and a master behind sentinels."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot
from redis_servers import Cluster, Standalone

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import RedisClient, Script, ScriptCall, slot_of
from kvcm.store.redis.uri import parse_redis_uri

KINDS = ["standalone", "cluster", "sentinel"]
SET = Script("return redis.call('SET', KEYS[1], ARGV[1])")


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest) -> AsyncIterator[RedisClient]:
    """A client of each kind of deployment, under a name of the test's own."""
    servers = request.getfixturevalue(f"redis_{request.param}")
    made = RedisClient.of(parse_redis_uri(servers.uri(uuid4().hex)))
    yield made
    await made.close()


def keys(client: RedisClient, count: int, tag: int = 0) -> list[bytes]:
    """Keys of one hash tag, with bytes that are no text."""
    return [
        f"{client.prefix}:b{{7.{tag}}}".encode() + at.to_bytes(8, "big", signed=True) for at in range(-1, count - 1)
    ]


def stores(keys: list[bytes]) -> list[ScriptCall]:
    return [ScriptCall(SET, [key], [b"value of " + key]) for key in keys]


@given(st.binary(max_size=30), st.binary(max_size=8), st.binary(max_size=8))
def test_slots_are_those_of_the_servers(key: bytes, before: bytes, tag: bytes) -> None:
    for one in (key, before + b"{" + tag + b"}" + key, before + b"{" + key, before + b"}" + tag + b"{" + key + b"}"):
        assert slot_of(one) == key_slot(one)


async def test_values_come_back_in_the_order_of_groups_and_keys(client: RedisClient) -> None:
    groups = [keys(client, 5, tag) for tag in range(20)]
    await client.run(stores([key for group in groups for key in group]))
    asked = [*groups[::-1], [], [groups[3][1], groups[3][0], groups[3][1]], [groups[0][0] + b"?"]]
    expected = [[b"value of " + key for key in group] for group in asked[:-1]]
    assert await client.mget(asked) == [*expected, [None]]


async def test_nothing_asked_is_nothing_answered(client: RedisClient) -> None:
    assert await client.mget([]) == []
    assert await client.mget([[], []]) == [[], []]
    assert await client.run([]) == []
    assert await client.execute([]) == []


async def test_answers_are_plain_values_in_the_order_of_the_commands(client: RedisClient) -> None:
    first, second = keys(client, 1, 1)[0], keys(client, 1, 2)[0]
    commands = [(b"HSET", first, b"f", 1.5), (b"ZADD", second, 2, "m"), (b"HGETALL", first), (b"GET", first + b"-")]
    assert await client.execute(commands) == [1, 1, [b"f", b"1.5"], None]


async def test_scripts_run_also_after_the_servers_forgot_them(client: RedisClient) -> None:
    script = Script("return {KEYS[1], ARGV[1], redis.call('INCR', KEYS[1])}")
    calls = [ScriptCall(script, [keys(client, 1, tag)[0]], [tag]) for tag in range(10)]
    for count in (1, 2):
        answers = await client.run(calls)
        assert answers == [[call.keys[0], str(tag).encode(), count] for tag, call in enumerate(calls)]
        await flush_scripts(client)


async def flush_scripts(client: RedisClient) -> None:
    for address in await client.masters():
        connection = await client.connect(address)
        await connection.send_command("SCRIPT", "FLUSH")
        await connection.read_response()
        await connection.disconnect()


async def test_an_error_answer_raises_after_all_have_run(client: RedisClient) -> None:
    wrong, right = keys(client, 1, 1)[0], keys(client, 1, 2)[0]
    await client.execute([(b"SADD", wrong, b"member")])
    with pytest.raises(StorageIOError, match="WRONGTYPE"):
        await client.execute([(b"GET", wrong), (b"SET", right, b"done")])
    assert await client.mget([[right]]) == [[b"done"]]
    with pytest.raises(StorageIOError, match="my own words"):
        await client.run([ScriptCall(Script("return redis.error_reply('my own words')"), [wrong])])


async def test_the_version_of_the_servers_is_checked(client: RedisClient) -> None:
    assert await client.info_version() >= (7, 0)
    await client.check()
    await client.ping()


async def test_masters_are_all_masters(client: RedisClient) -> None:
    masters = await client.masters()
    assert len(masters) == (3 if client.is_cluster else 1)
    assert masters == sorted(masters) == await client.masters()


async def test_large_values_and_many_commands_pass(client: RedisClient) -> None:
    places = keys(client, 1000)
    large = Random(1).randbytes(200_000)
    await client.execute([(b"SET", key, large if at % 100 == 0 else b"small") for at, key in enumerate(places)])
    (values,) = await client.mget([places])
    assert values == [large if at % 100 == 0 else b"small" for at in range(1000)]


async def test_a_lone_client_of_a_cluster_says_which_uri_to_use(redis_cluster: Cluster) -> None:
    port = redis_cluster.nodes[0].port
    client = RedisClient.of(parse_redis_uri(f"redis://127.0.0.1:{port}/?cluster_name=c"))
    with pytest.raises(StorageIOError, match=r"use redis\+cluster://"):
        await client.execute([(b"GET", f"{{{at}}}".encode()) for at in range(100)])
    await client.close()


async def test_a_cluster_client_of_a_lone_server_says_so(redis_standalone: Standalone) -> None:
    uri = redis_standalone.uri("c").replace("redis://", "redis+cluster://")
    client = RedisClient.of(parse_redis_uri(uri))
    with pytest.raises(StorageIOError, match="is no node of a cluster"):
        await client.mget([[b"k"]])
    await client.close()


async def test_operations_are_timed_by_kind(client: RedisClient) -> None:
    key = keys(client, 1)
    await client.mget([key])
    await client.mget([key])
    await client.run(stores(key))
    await client.execute([(b"GET", key[0])])
    await client.ping()
    counts = {op: times.read().counts[-1] for op, times in client.times.items()}
    assert counts == {"read": 2, "script": 1, "command": 1, "other": 1}
