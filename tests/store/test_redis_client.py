"""The client of Redis and Valkey: uris, logins, tracking, and servers that fail."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest
import redis
import structlog
from hypothesis import given
from hypothesis import strategies as st
from index_backends import connected
from ports import free_port
from redis.crc import key_slot
from redis_servers import Cluster, RedisServer, Sentinels, Servers, Standalone, cluster, sentinel, standalone
from waiting import until

from kvcm.model.errors import StorageIOError
from kvcm.store.redis import tracking
from kvcm.store.redis.client import Exchange, RedisClient, Script, ScriptCall, slot_of
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.tracking import Invalidations
from kvcm.store.redis.uri import Address, RedisSettings, TlsFiles, parse_redis_uri

KINDS = ["standalone", "cluster", "sentinel"]
NAMED = "cluster_name=c&timeout_ms=20000"
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


PASS = Script("redis.call('APPEND', KEYS[1], ARGV[1]) return {tonumber(ARGV[2]), ARGV[1]}", guards=True)
ECHO = Script("redis.call('APPEND', KEYS[1], ARGV[1]) return ARGV[1]")
QUIET = Script("redis.call('APPEND', KEYS[1], ARGV[1])")


@pytest.mark.parametrize("goes_on", [0, 1])
async def test_a_stage_runs_only_where_no_guard_before_it_answered_0(client: RedisClient, goes_on: int) -> None:
    first, second, third = (keys(client, 1, tag)[0] for tag in range(3))
    stages = [
        [ScriptCall(ECHO, [first], ["a"]), ScriptCall(PASS, [second], ["b", goes_on])],
        [ScriptCall(QUIET, [third], ["c"]), ScriptCall(ECHO, [first], ["d"])],
    ]
    answers = await client.run_in_turn(stages)
    assert answers == [[b"a", [goes_on, b"b"]], *([[None, b"d"]] if goes_on else [])]
    held = await client.mget([[first], [second], [third]])
    assert held == [[b"ad" if goes_on else b"a"], [b"b"], [b"c" if goes_on else None]]


@pytest.mark.parametrize("goes_on", [0, 1])
async def test_a_long_last_stage_is_cut_and_rechecked(client: RedisClient, goes_on: int) -> None:
    """Each part is a script of its own on one server, and no part runs where an earlier stage did not succeed."""
    several = Script("for i, key in ipairs(KEYS) do redis.call('SET', key, i) end return #KEYS")
    names = keys(client, 900)
    mark = keys(client, 1, 5)[0]
    guard = ScriptCall(Script("return tonumber(redis.call('GET', KEYS[1]) or '0')", guards=True), [mark])
    calls = [ScriptCall(several, names[at : at + 150]) for at in range(0, 900, 150)]
    mark_it = ScriptCall(Script("redis.call('SET', KEYS[1], ARGV[1]) return {tonumber(ARGV[1])}", guards=True), [mark])
    answers = await client.run_in_turn([[mark_it._replace(args=[goes_on])], calls], recheck=guard)
    assert answers == [[[goes_on]], *([[150] * 6] if goes_on else [])]
    assert [value is not None for value in (await client.mget([names]))[0]] == [bool(goes_on)] * 900


async def test_stages_are_one_round_trip_on_one_server(lone: Standalone) -> None:
    made = RedisClient.of(parse_redis_uri(lone.uri("t")))
    calls = [ScriptCall(SET, [key], [b"1"]) for key in keys(made, 40)]
    await made.run_in_turn([calls[:20], calls[20:]])
    with lone.server.admin() as admin:
        before = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
        await made.run_in_turn([calls[:20], calls[20:]])
        assert admin.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1
    await made.close()


async def test_joined_scripts_run_on_a_full_server_if_all_of_them_may(lone: Standalone) -> None:
    made = RedisClient.of(parse_redis_uri(lone.uri("t")))
    held, key = keys(made, 2)
    await made.run([ScriptCall(SET, [held], [b"v"])])
    change = Script("return redis.call('SET', KEYS[1], ARGV[1])", allow_oom=True)
    with lone.server.admin() as admin:
        admin.config_set("maxmemory", 1)
        assert await made.run_in_turn([[ScriptCall(change, [held], [b"w"])], [ScriptCall(change, [held], [b"x"])]])
        with pytest.raises(StorageIOError, match="the memory of the server is full"):
            await made.run_in_turn([[ScriptCall(change, [held], [b"y"])], [ScriptCall(SET, [key], [b"v"])]])
        admin.config_set("maxmemory", 0)
    await made.close()


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
    client = RedisClient.of(parse_redis_uri(f"redis://127.0.0.1:{port}/?{NAMED}"))
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


# ── Users, passwords, databases and encryption ──


PASSWORD = "pa$$"
ENCODED = "pa%24%24"


def connected_to(servers: Servers, **parameters: object) -> AbstractAsyncContextManager[RedisClient]:
    return connected(servers.uri(uuid4().hex, **parameters))


async def test_a_password_alone_is_of_the_default_user(tmp_path: Path) -> None:
    with standalone(tmp_path, password=PASSWORD) as made:
        port = made.server.port
        async with connected(f"redis://:{ENCODED}@127.0.0.1:{port}/?{NAMED}") as client:
            await client.check()
        async with connected(f"redis://127.0.0.1:{port}/?{NAMED}") as client:
            with pytest.raises(StorageIOError, match=r"Authentication required.*check user and password"):
                await client.mget([[b"k"]])


async def test_an_acl_user_may_do_what_it_was_allowed(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    with redis_standalone.server.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", f">{PASSWORD}", "~mine:*", "+@all")
    async with connected(f"redis://app:{ENCODED}@127.0.0.1:{port}/?{NAMED}") as client:
        await client.check()
        assert await client.execute([(b"SET", b"mine:k", b"v"), (b"GET", b"mine:k")]) == [b"OK", b"v"]
        with pytest.raises(StorageIOError, match="NOPERM"):
            await client.mget([[b"other:k"]])


async def test_a_wrong_password_is_refused_without_being_shown(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    async with connected(f"redis://nobody:wr0ng@127.0.0.1:{port}/?{NAMED}") as client:
        with pytest.raises(StorageIOError, match="invalid username-password") as caught:
            await client.mget([[b"k"]])
    assert "wr0ng" not in str(caught.value)


async def test_databases_are_apart(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    async with (
        connected(f"redis://127.0.0.1:{port}/4?{NAMED}") as four,
        connected(f"redis://127.0.0.1:{port}/5?{NAMED}") as five,
    ):
        await four.execute([(b"SET", b"only-in-4", b"x")])
        assert await four.mget([[b"only-in-4"]]) == [[b"x"]]
        assert await five.mget([[b"only-in-4"]]) == [[None]]


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for a host name, and its key."""
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


async def test_encryption_checks_both_sides(tmp_path: Path) -> None:
    server_certificate, server_key = certificate(tmp_path, "localhost")
    stranger, _ = certificate(tmp_path, "stranger")
    tls_port = free_port()
    options = ["--tls-port", str(tls_port), "--tls-cert-file", str(server_certificate), "--tls-key-file",
               str(server_key), "--tls-ca-cert-file", str(server_certificate), "--tls-auth-clients", "yes"]  # fmt: skip
    own = f"cert_file={server_certificate}&key_file={server_key}"
    with standalone(tmp_path, extra=options):
        base = f"rediss://localhost:{tls_port}/?{NAMED}"
        async with connected(f"{base}&ca_file={server_certificate}&{own}") as client:
            await client.check()
        for wrong in (f"&ca_file={stranger}&{own}", f"&{own}"):
            async with connected(base + wrong) as client:
                with pytest.raises(StorageIOError, match=r"(?i)certificate"):
                    await client.mget([[b"k"]])
        async with connected(f"{base}&ca_file={server_certificate}") as client:
            with pytest.raises(StorageIOError):
                await client.mget([[b"k"]])
        by_number = base.replace("localhost", "127.0.0.1") + f"&ca_file={server_certificate}&{own}"
        async with connected(by_number) as client:
            with pytest.raises(StorageIOError, match=r"(?i)certificate"):
                await client.mget([[b"k"]])
        async with connected(by_number + "&check_hostname=false") as client:
            await client.check()


async def test_a_file_that_is_not_there_is_named(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    async with connected(f"rediss://127.0.0.1:{port}/?{NAMED}&ca_file=/nowhere/ca.pem") as client:
        with pytest.raises(StorageIOError, match=r"/nowhere/ca\.pem is not a file"):
            await client.mget([[b"k"]])


# ── Redis uris: every form ──


URI_PASSWORD = "s3cret/@:?"
URI_ENCODED = "s3cret%2F%40%3A%3F"


def test_the_least_uri_gets_the_defaults() -> None:
    assert parse_redis_uri("redis://cache?cluster_name=prod") == RedisSettings(
        "standalone", (Address("cache", 6379),), "prod"
    )


def test_every_part_of_a_server_is_read() -> None:
    uri = (
        f"redis://us%40er:{URI_ENCODED}@[::1]:7000/3?cluster_name=a.b-c_1&timeout_ms=250&connect_timeout_ms=100"
        "&retry_count=0&pool_size=7"
    )
    assert parse_redis_uri(uri) == RedisSettings(
        "standalone", (Address("::1", 7000),), "a.b-c_1", "us@er", URI_PASSWORD, 3,
        timeout_seconds=0.25, connect_timeout_seconds=0.1, retry_count=0, pool_size=7,
    )  # fmt: skip


def test_connecting_may_take_as_long_as_an_answer_unless_reported_otherwise() -> None:
    assert parse_redis_uri("redis://h?cluster_name=c&timeout_ms=50").connect_timeout_seconds == 0.05


def test_a_cluster_lists_nodes() -> None:
    settings = parse_redis_uri("redis+cluster://a:1,b,[fe80::2]:3/?cluster_name=c")
    assert settings.kind == "cluster"
    assert settings.addresses == (Address("a", 1), Address("b", 6379), Address("fe80::2", 3))


def test_sentinels_name_a_service_and_may_have_a_login_of_their_own() -> None:
    settings = parse_redis_uri(
        f"redis+sentinel://u:p@a,b:5/my-master/2?cluster_name=c&sentinel_user=su&sentinel_password={URI_ENCODED}"
    )
    assert settings.kind == "sentinel"
    assert settings.addresses == (Address("a", 26379), Address("b", 5))
    assert (settings.service, settings.database) == ("my-master", 2)
    assert (settings.user, settings.password) == ("u", "p")
    assert (settings.sentinel_user, settings.sentinel_password) == ("su", URI_PASSWORD)


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster", "rediss+sentinel"])
def test_encryption_names_files(scheme: str) -> None:
    settings = parse_redis_uri(
        f"{scheme}://h{'/service' if 'sentinel' in scheme else '/'}?cluster_name=c&ca_file=/a%20b"
        "&cert_file=/c&key_file=/k&check_hostname=false"
    )
    assert settings.tls == TlsFiles("/a b", "/c", "/k", check_hostname=False)


def test_plain_text_has_no_tls() -> None:
    assert parse_redis_uri("redis://h?cluster_name=c").tls is None
    assert parse_redis_uri("rediss://h?cluster_name=c").tls == TlsFiles()


def test_names_of_the_original_s_pool_are_understood() -> None:
    settings = parse_redis_uri("redis://h/?client_max_pool_size=9&client_min_pool_size=2", cluster_name="given")
    assert (settings.pool_size, settings.cluster_name) == (9, "given")


def test_a_name_in_the_uri_wins_over_the_given_one() -> None:
    assert parse_redis_uri("redis://h/?cluster_name=mine", cluster_name="given").cluster_name == "mine"


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("redis://h", "cluster_name is missing"),
        ("redis://h?cluster_name=", "cluster_name ''"),
        ("redis://h?cluster_name=a%7Bb", "cluster_name 'a{b'"),
        ("redis://h?cluster_name=" + "x" * 65, "1 to 64"),
        ("redis://h?cluster_name=c&timeout_ms=0", "timeout_ms '0' is not a number from 1 to 600000"),
        ("redis://h?cluster_name=c&time_ms=5", "'time_ms' is not known here; known are client_max_pool_size"),
        ("redis://h?cluster_name=c&ca_file=/x", "'ca_file' is not known"),
        ("redis://h?cluster_name=c&sentinel_password=x", "'sentinel_password' is not known"),
        ("rediss://h?cluster_name=c&check_hostname=no", "check_hostname 'no' is not true or false"),
        ("redis+cluster://h/1?cluster_name=c", "database '1' is not a number from 0 to 0"),
        ("redis://a,b?cluster_name=c", "hosts 'a,b' are several"),
        ("redis://h:0?cluster_name=c", "port 0"),
        ("redis://?cluster_name=c", "host ''"),
        ("redis://u@h:x?cluster_name=c", "host 'h:x'"),
        ("redis+sentinel://h/?cluster_name=c", "service ''"),
        ("valkey://h?cluster_name=c", "scheme 'valkey'"),
        ("redis+ring://h?cluster_name=c", "scheme 'redis+ring'"),
        ("localhost:6379", "what was given is not one of redis://"),
    ],
)
def test_a_mistake_is_named(uri: str, named: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_redis_uri(uri)
    assert named in str(caught.value)


def test_neither_messages_nor_repr_show_a_password() -> None:
    for broken in ("nothing", "h:x/?cluster_name=c", "h/?cluster_name=c&x=1", "h/y?cluster_name=c"):
        with pytest.raises(ValueError) as caught:
            parse_redis_uri(f"redis://u:hidden1@{broken}")
        assert "hidden1" not in str(caught.value)
    with pytest.raises(ValueError) as caught:
        parse_redis_uri("redis+sentinel://h/?cluster_name=c&sentinel_password=hidden2")
    assert "hidden2" not in str(caught.value)
    settings = parse_redis_uri("redis+sentinel://u:hidden1@h/s?cluster_name=c&sentinel_password=hidden2")
    assert "hidden" not in repr(settings)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for uri in (text, f"redis://{text}", f"redis+sentinel://h/{text}", f"rediss://h?cluster_name=c&{text}"):
        try:
            settings = parse_redis_uri(uri)
        except ValueError:
            continue
        assert settings.addresses
        assert settings.cluster_name


# ── Invalidations: one for every change ──


WAIT_SECONDS = 40.0
SPARE_SECONDS = 8.0  # that a busy machine may add
SILENCE_SECONDS = 0.5 + 0.5 + SPARE_SECONDS  # from ping to ping, and for an answer


class Listener:
    """The invalidations that a cache would receive."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.prefix = f"{client.prefix}:b{{".encode()
        self.keys: set[bytes] = set()
        self.resets = 0
        self.reset_while_live = False
        self.notices: list[bytes] = []
        self.invalidations = Invalidations(
            client,
            [self.prefix],
            self._on_keys,
            self._on_reset,
            channel=self.prefix + b"notices",
            on_notice=self.notices.append,
        )

    def _on_keys(self, keys: Sequence[bytes]) -> None:
        self.keys.update(keys)

    def _on_reset(self) -> None:
        self.resets += 1
        self.reset_while_live = self.invalidations.is_live

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition holds and return the seconds it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < WAIT_SECONDS
            await asyncio.sleep(0.002)
        return time.monotonic() - began

    async def live(self) -> None:
        await self.until(lambda: self.invalidations.is_live)


@asynccontextmanager
async def listening(servers: Servers) -> AsyncIterator[Listener]:
    async with connected_to(servers) as client:
        listener = Listener(client)
        running = asyncio.create_task(listener.invalidations.run())
        try:
            await listener.live()
            yield listener
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled(), running
    assert not listener.invalidations.is_live


@pytest.fixture
def no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the connections themselves to say that they are lost: an answer may be late on a busy machine."""
    monkeypatch.setattr(tracking, "_PING_SECONDS", 600.0)
    monkeypatch.setattr(tracking, "_PONG_SECONDS", 600.0)


@pytest.mark.usefixtures("no_pings")
@pytest.mark.parametrize("kind", KINDS)
async def test_changes_by_others_arrive_by_themselves(kind: str, request: pytest.FixtureRequest) -> None:
    servers = request.getfixturevalue(f"redis_{kind}")
    async with listening(servers) as listener:
        other = RedisClient.of(listener.client.settings)
        keys = {listener.prefix + b"%d}\r\n\x00\xff" % tag for tag in range(50)}
        await other.execute([(b"SET", key, b"1") for key in keys])
        await listener.until(lambda: listener.keys >= keys)
        listener.keys.clear()
        await other.execute([(b"DEL", key) for key in keys])
        await listener.until(lambda: listener.keys >= keys)
        await other.close()
        assert listener.keys == keys
        assert listener.resets == 1, "once, before it went live"


@pytest.mark.usefixtures("no_pings")
@pytest.mark.parametrize("kind", KINDS)
async def test_notices_arrive_whichever_server_publishes_them(kind: str, request: pytest.FixtureRequest) -> None:
    async with listening(request.getfixturevalue(f"redis_{kind}")) as listener:
        channel = listener.prefix + b"notices"
        tags = [b"{%d}" % tag for tag in range(20)]  # of all masters of a cluster
        publish = Script("return redis.call('PUBLISH', ARGV[1], ARGV[2])")
        await listener.client.run([ScriptCall(publish, [tag], [channel, tag]) for tag in tags])
        await listener.until(lambda: set(listener.notices) == set(tags))
        assert (listener.keys, listener.resets) == (set(), 1)


async def test_an_error_while_following_ends_what_follows_on_a_condition(redis_standalone: Standalone) -> None:
    """It is restarted and logged then; otherwise nothing would be followed any more."""

    def broken() -> None:
        raise ValueError("broken")

    async with connected(redis_standalone.uri(uuid4().hex)) as client:
        invalidations = Invalidations(client, [b"p:"], lambda _keys: None, broken)
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(ValueError, match="broken"):
                await invalidations.run_while(lambda: True, 0.01)


@pytest.mark.usefixtures("no_pings")
async def test_a_user_that_may_not_subscribe_is_named_the_channels_that_it_needs(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        with servers.server.admin() as admin:
            rules = ("on", ">secret", "~*", "+@all", "resetchannels", "&__redis__:invalidate")
            admin.execute_command("ACL", "SETUSER", "limited", *rules)
        uri = servers.uri("acl").replace("redis://", "redis://limited:secret@")
        client = RedisClient.of(parse_redis_uri(uri))
        listener = Listener(client)
        with structlog.testing.capture_logs() as logs:
            running = asyncio.create_task(listener.invalidations.run())
            await listener.until(lambda: bool(logs))
            assert "permission" in logs[0]["reason"]
            assert logs[0]["reason"].endswith("needs the channels &__redis__:invalidate and &acl:b{notices")
            assert not listener.invalidations.is_live
            with servers.server.admin() as admin:
                admin.execute_command("ACL", "SETUSER", "limited", "&acl:*")
            await listener.live()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


@pytest.mark.usefixtures("no_pings")
async def test_only_keys_below_the_prefix_are_reported(redis_standalone: Standalone) -> None:
    async with listening(redis_standalone) as listener:
        last = listener.prefix + b"last"
        names = [listener.client.prefix.encode() + b":z{1}", b"foreign:b{1}", last]
        await listener.client.execute([(b"SET", name, b"1") for name in names])
        await listener.until(lambda: last in listener.keys)
        assert listener.keys == {last}


@pytest.mark.usefixtures("no_pings")
async def test_a_flushed_server_resets(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            with servers.server.admin() as admin:
                admin.flushall()
            await listener.until(lambda: listener.resets == 2)
            assert listener.invalidations.is_live


@pytest.mark.usefixtures("no_pings")
async def test_a_lost_connection_resets_and_comes_back(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            with servers.server.admin() as admin:
                admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await listener.until(lambda: listener.resets == 2)
            assert not listener.invalidations.is_live
            await listener.live()
            assert listener.resets == 3
            assert not listener.reset_while_live, "the cache drops missed keys before it is live again"
            key = listener.prefix + b"1}"
            await listener.client.execute([(b"SET", key, b"1")])
            await listener.until(lambda: key in listener.keys)


@pytest.mark.usefixtures("no_pings")
async def test_a_killed_server_is_noticed_at_once(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            servers.server.kill()
            await listener.until(lambda: not listener.invalidations.is_live)
            assert listener.resets == 2
            servers.server.restart()
            await listener.live()


async def test_silence_is_noticed_within_about_a_second(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            servers.server.pause()
            try:
                assert await listener.until(lambda: not listener.invalidations.is_live) < SILENCE_SECONDS
                assert listener.resets % 2 == 0, "once each time it went live, once each time it was lost"
            finally:
                servers.server.resume()
            await listener.live()


async def test_every_master_of_a_cluster_has_to_be_received(redis_cluster: Cluster) -> None:
    async with listening(redis_cluster) as listener:
        redis_cluster.nodes[2].pause()
        try:
            assert await listener.until(lambda: not listener.invalidations.is_live) < SILENCE_SECONDS
        finally:
            redis_cluster.nodes[2].resume()
        await listener.until(redis_cluster.is_whole)
        await listener.live()


@pytest.mark.ci
async def test_another_master_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handover in which no process dies: the old master stays and would go on answering pings."""
    monkeypatch.setattr(tracking, "_PONG_SECONDS", 60.0)
    with sentinel(tmp_path) as servers:
        async with listening(servers) as listener:
            old = servers.master
            with servers.sentinels[0].admin() as admin:
                admin.execute_command("SENTINEL", "FAILOVER", "mymaster")
            await listener.until(lambda: servers.master is not old and listener.resets > 2)
            await listener.live()
            key = listener.prefix + b"1}"
            await listener.client.execute([(b"SET", key, b"1")])
            await listener.until(lambda: key in listener.keys)


# ── Servers that hang, die, come back or hand over ──


INCREMENT = Script("return redis.call('INCR', KEYS[1])")
TIMEOUT_SECONDS = 1.0  # of clients whose servers fall silent
TIMEOUT_MS = 1000
SOON_SECONDS = 10.0
RECOVERY_SECONDS = 40.0


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Standalone]:
    """A durable server that the test may kill."""
    with standalone(tmp_path, appendonly=True) as made:
        yield made


def key_of(client: RedisClient, tag: int = 0) -> bytes:
    return f"{client.prefix}:b{{{tag}}}".encode()


async def increment(client: RedisClient, tag: int = 0) -> int:
    (count,) = await client.run([ScriptCall(INCREMENT, [key_of(client, tag)])])
    assert isinstance(count, int)
    return count


async def refused_after(call: Awaitable[object]) -> float:
    """Return after how many seconds a call ended with an error that says to try again."""
    began = time.monotonic()
    with pytest.raises(StorageIOError, match="try again"):
        await call
    return time.monotonic() - began


async def recovered(call: Callable[[], Awaitable[object]]) -> None:
    """Wait until a call succeeds; each that fails must do so in time."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        began = time.monotonic()
        if await is_done(call()):
            return
        assert time.monotonic() - began < 2 * TIMEOUT_SECONDS + SPARE_SECONDS
        await asyncio.sleep(0.02)
    raise AssertionError(f"not recovered after {RECOVERY_SECONDS} s")


async def is_done(call: Awaitable[object]) -> bool:
    try:
        await call
    except StorageIOError:
        return False
    return True


async def test_a_server_that_hangs_is_given_up_in_time(lone: Standalone) -> None:
    async with connected_to(lone, timeout_ms=2500) as client:
        await recovered(lambda: increment(client))
        with lone.server.admin() as admin:
            admin.set(key_of(client), 1)
        lone.server.pause()
        seconds = await asyncio.gather(
            refused_after(increment(client)),
            refused_after(client.mget([[key_of(client)]])),
            refused_after(client.execute([(b"GET", key_of(client))])),
            refused_after(client.ping()),
        )
        assert min(seconds) >= 2.5 - 0.01  # by default they would be over
        assert max(seconds) < 2 * 2.5 + SPARE_SECONDS
        lone.server.resume()
        await recovered(lambda: client.mget([[key_of(client)]]))
        with lone.server.admin() as admin:
            assert admin.get(key_of(client)) == b"2"  # the refused write ran once the server went on


@pytest.mark.ci
async def test_a_dry_pool_waits_and_then_refuses(lone: Standalone) -> None:
    """A silent server fills the pool; nothing crashes, and what waited briefly is served."""
    async with connected_to(lone, pool_size=4, timeout_ms=TIMEOUT_MS) as client:

        async def all_served() -> None:
            assert len(set(await asyncio.gather(*(increment(client) for _ in range(100))))) == 100

        lone.server.pause()
        seconds = await asyncio.gather(*(refused_after(increment(client)) for _ in range(100)))
        lone.server.resume()
        assert max(seconds) < 2 * TIMEOUT_SECONDS + SPARE_SECONDS
        with lone.server.admin() as admin:
            until(lambda: int(admin.info("clients")["connected_clients"]) <= 4 + 1)
        await recovered(all_served)


async def test_a_killed_server_is_refused_at_once_and_found_again(lone: Standalone) -> None:
    async with connected_to(lone) as client:
        await asyncio.gather(*(increment(client) for _ in range(10)))
        lone.server.kill()
        assert await refused_after(increment(client)) < SOON_SECONDS
        assert await refused_after(client.mget([[key_of(client)]])) < SOON_SECONDS
        lone.server.restart()
        assert await client.mget([[key_of(client)]]) == [[b"10"]]  # the very next call, with nothing left broken
        counts = await asyncio.gather(*(increment(client) for _ in range(10)))
        assert sorted(counts) == list(range(11, 21))  # each ran once, in any order: they go over several connections


async def test_a_read_survives_connections_that_the_server_closed(redis_standalone: Standalone) -> None:
    async with connected_to(redis_standalone) as client:
        await asyncio.gather(*(increment(client) for _ in range(5)))
        with redis_standalone.server.admin() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await client.mget([[key_of(client)]]) == [[b"5"]]


async def test_a_cancelled_call_leaves_no_answer_behind_for_the_next(redis_standalone: Standalone) -> None:
    async with connected_to(redis_standalone, pool_size=1) as client:
        await client.execute([(b"SET", key_of(client), b"right")])
        for turns in range(12):
            call = asyncio.create_task(client.execute([(b"ECHO", b"wrong")]))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await client.mget([[key_of(client)]]) == [[b"right"]]


async def test_a_server_that_became_a_replica_refuses_writes(lone: Standalone, tmp_path: Path) -> None:
    """It is greeted again afterwards: it has taken over the data of another one."""
    greetings = list[object]()

    async def greet(send: Exchange) -> None:
        greetings.append(await send([(b"PING",)]))

    with standalone(tmp_path / "other") as other:
        async with connected_to(lone) as client:
            client.on_new_server = greet
            await increment(client)
            with lone.server.admin() as admin:
                admin.execute_command("REPLICAOF", "127.0.0.1", other.server.port)
            await refused_after(increment(client))
            with lone.server.admin() as admin:
                admin.execute_command("REPLICAOF", "NO", "ONE")
            before = len(greetings)
            await increment(client)
            assert len(greetings) > before


async def test_a_process_is_greeted_once_before_it_gets_a_command(lone: Standalone) -> None:
    greetings = list[object]()
    is_accepted = True

    async def greet(send: Exchange) -> None:
        greetings.append(await send([(b"PING",)]))
        if not is_accepted:
            raise StorageIOError("not accepted; try again")

    async with connected_to(lone) as client:
        client.on_new_server = greet
        assert await increment(client) == 1
        with lone.server.admin() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await recovered(lambda: increment(client))
        assert greetings == [[b"PONG"]]
        is_accepted = False
        lone.server.restart()
        for _ in range(3):
            await refused_after(increment(client))
        is_accepted = True
        assert await increment(client) == 3
        assert len(greetings) >= 3


async def test_each_master_has_a_part(redis_cluster: Cluster) -> None:
    async with connected_to(redis_cluster) as client:
        parts = await RedisStore(client).parts()
        slots = [slot_of(f"{{{part}.0}}".encode()) for part in parts]
        assert len({(await client._topology.node_of(slot)).address for slot in slots}) == len(parts) == 3


@pytest.mark.ci
async def test_the_replica_takes_over_when_the_master_dies(tmp_path: Path) -> None:
    with sentinel(tmp_path) as servers:
        async with connected_to(servers) as client:
            assert await increment(client) == 1
            old = servers.master
            replicate(old, key_of(client))
            old.kill()
            await refused_after(increment(client))
            servers.give_up_soon()
            await recovered(lambda: increment(client))
            assert await increment(client) == 3
            assert (await client.masters())[0].port != old.port


def replicate(server: RedisServer, key: bytes) -> None:
    """Return when the replica has every write of the master so far."""
    with server.admin() as admin:
        admin.set(key + b"-last", b"")
        assert admin.wait(1, 20_000) == 1


async def changed(client: RedisClient, old: list[Address]) -> list[Address]:
    """Wait for other masters and return them."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while (new := await client.masters()) == old:
        assert time.monotonic() < deadline
    return new


async def forgotten(client: RedisClient, port: int) -> None:
    """Wait until a port is no master's: other nodes may not know of the promotion yet."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while port in {address.port for address in await client.masters()}:
        assert time.monotonic() < deadline


@pytest.mark.ci
async def test_a_sentinel_that_missed_a_failover_is_not_believed(tmp_path: Path) -> None:
    """Old news do not lead back to the old master."""
    with sentinel(tmp_path) as servers:
        async with connected_to(servers) as client:
            before = await client.masters()
            behind = servers.sentinels[2]
            behind.pause()
            with servers.sentinels[0].admin() as admin:
                admin.execute_command("SENTINEL", "FAILOVER", "mymaster")
            new = await changed(client, before)
            behind.resume()
            assert [await client.masters() for _ in range(200)] == [new] * 200


async def test_one_sentinel_is_enough(redis_sentinel: Sentinels) -> None:
    async with connected_to(redis_sentinel) as client:
        for paused in redis_sentinel.sentinels[:2]:
            paused.pause()
        try:
            began = time.monotonic()
            await increment(client)
            assert time.monotonic() - began < SOON_SECONDS
        finally:
            for paused in redis_sentinel.sentinels[:2]:
                paused.resume()


@pytest.mark.ci
async def test_a_cluster_node_that_restarts_is_found_again(redis_cluster: Cluster) -> None:
    async with connected_to(redis_cluster) as client:
        await asyncio.gather(*(increment(client, tag) for tag in range(100)))
        redis_cluster.nodes[1].kill()
        calls = [is_done(increment(client, tag)) for tag in range(100)]
        done = await asyncio.gather(*calls)
        assert any(done), "the other nodes go on"
        assert not all(done)
        redis_cluster.nodes[1].restart()
        until(redis_cluster.is_whole)
        await recovered(lambda: asyncio.gather(*(increment(client, tag) for tag in range(100))))


@pytest.mark.ci
async def test_the_replica_of_a_dead_cluster_node_takes_over(tmp_path: Path) -> None:
    with cluster(tmp_path, replicas=1) as servers:
        async with connected_to(servers) as client:
            assert set(await asyncio.gather(*(increment(client, tag) for tag in range(50)))) == {1}
            dead = owner(servers, slot_of(key_of(client)))
            replicate(dead, key_of(client))
            dead.kill()
            servers.give_up_soon()
            await recovered(lambda: increment(client))
            assert await increment(client) >= 3, "nothing was forgotten"
            await forgotten(client, dead.port)


async def test_keys_are_found_while_and_after_their_slot_moves(redis_cluster: Cluster) -> None:
    """ASK for keys that are gone, TRYAGAIN for groups that are torn, MOVED at the end."""
    async with connected_to(redis_cluster) as client:
        keys = [f"{{{client.prefix}}}{at}".encode() for at in range(4)]
        await client.execute([(b"SET", key, key) for key in keys])
        slot = slot_of(keys[0])
        source = owner(redis_cluster, slot)
        target = next(node for node in redis_cluster.nodes if node is not source)
        with source.admin() as old, target.admin() as new:
            new_id, old_id = node_id(new), node_id(old)
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 20_000, "KEYS", *keys[:2])
            assert await client.execute([(b"GET", key) for key in keys]) == keys
            assert await client.mget([keys[:2], keys[2:]]) == [keys[:2], keys[2:]]
            torn = asyncio.create_task(client.mget([keys]))
            await asyncio.sleep(0.05)
            assert not torn.done()
            # All of the slot: keys that other tests left in this cluster may lie there too.
            rest = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100_000)
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 20_000, "KEYS", *rest)
            for admin in (new, old):
                admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
            assert await torn == [keys]
        assert await client.run([ScriptCall(Script("return redis.call('GET', KEYS[1])"), [keys[0]])]) == [keys[0]]


def node_id(admin: redis.Redis) -> bytes:
    answer: bytes = admin.execute_command("CLUSTER", "MYID")
    return answer


def owner(servers: Cluster, slot: int) -> RedisServer:
    with servers.nodes[0].admin() as admin:
        ranges = admin.execute_command("CLUSTER", "SLOTS")
    (port,) = {master[1] for first, last, master, *_ in ranges if first <= slot <= last}
    return next(server for server in servers.nodes if server.port == port)
