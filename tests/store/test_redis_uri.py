"""Redis uris: every form, every parameter, and messages that name what is wrong and never the password."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.store.redis.uri import Address, RedisSettings, TlsFiles, parse_redis_uri

PASSWORD = "s3cret/@:?"
ENCODED = "s3cret%2F%40%3A%3F"


def test_the_least_uri_gets_the_defaults() -> None:
    assert parse_redis_uri("redis://cache?cluster_name=prod") == RedisSettings(
        "standalone", (Address("cache", 6379),), "prod"
    )


def test_every_part_of_a_server_is_read() -> None:
    uri = (
        f"redis://us%40er:{ENCODED}@[::1]:7000/3?cluster_name=a.b-c_1&timeout_ms=250&connect_timeout_ms=100"
        "&retry_count=0&pool_size=7"
    )
    assert parse_redis_uri(uri) == RedisSettings(
        "standalone", (Address("::1", 7000),), "a.b-c_1", "us@er", PASSWORD, 3,
        timeout_seconds=0.25, connect_timeout_seconds=0.1, retry_count=0, pool_size=7,
    )  # fmt: skip


def test_a_password_needs_no_user() -> None:
    settings = parse_redis_uri(f"redis://:{ENCODED}@h/?cluster_name=c")
    assert (settings.user, settings.password) == ("", PASSWORD)


def test_connecting_may_take_as_long_as_an_answer_unless_told_otherwise() -> None:
    assert parse_redis_uri("redis://h?cluster_name=c&timeout_ms=50").connect_timeout_seconds == 0.05


def test_a_cluster_lists_nodes() -> None:
    settings = parse_redis_uri("redis+cluster://a:1,b,[fe80::2]:3/?cluster_name=c")
    assert settings.kind == "cluster"
    assert settings.addresses == (Address("a", 1), Address("b", 6379), Address("fe80::2", 3))


def test_sentinels_name_a_service_and_may_have_a_login_of_their_own() -> None:
    settings = parse_redis_uri(
        f"redis+sentinel://u:p@a,b:5/my-master/2?cluster_name=c&sentinel_user=su&sentinel_password={ENCODED}"
    )
    assert settings.kind == "sentinel"
    assert settings.addresses == (Address("a", 26379), Address("b", 5))
    assert (settings.service, settings.database) == ("my-master", 2)
    assert (settings.user, settings.password) == ("u", "p")
    assert (settings.sentinel_user, settings.sentinel_password) == ("su", PASSWORD)


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
        ("redis://h?cluster_name=c&timeout_ms=1e3", "timeout_ms '1e3'"),
        ("redis://h?cluster_name=c&pool_size=-1", "pool_size '-1'"),
        ("redis://h?cluster_name=c&time_ms=5", "'time_ms' is not known here; known are client_max_pool_size"),
        ("redis://h?cluster_name=c&ca_file=/x", "'ca_file' is not known"),
        ("redis://h?cluster_name=c&sentinel_password=x", "'sentinel_password' is not known"),
        ("rediss://h?cluster_name=c&check_hostname=no", "check_hostname 'no' is not true or false"),
        ("redis://h/x?cluster_name=c", "database 'x'"),
        ("redis+cluster://h/1?cluster_name=c", "database '1' is not a number from 0 to 0"),
        ("redis://a,b?cluster_name=c", "hosts 'a,b' are several"),
        ("redis://h:0?cluster_name=c", "port 0"),
        ("redis://h:70000?cluster_name=c", "port 70000"),
        ("redis://?cluster_name=c", "host ''"),
        ("redis://u@h:x?cluster_name=c", "host 'h:x'"),
        ("redis+sentinel://h/?cluster_name=c", "service ''"),
        ("valkey://h?cluster_name=c", "scheme 'valkey'"),
        ("redis+://h?cluster_name=c", "scheme 'redis+'"),
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
