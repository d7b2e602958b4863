"""Which hosts storages may name: in every way of writing them, and the dangerous ones only when they are meant."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.mooncake import AllowedHosts, HostPort, HostRule, mooncake_hosts
from kvcm.model.storages import MooncakeStorageSpec

METADATA = [
    "169.254.169.254",
    "169.254.169.254:80",
    "169.254.0.1",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "[::ffff:169.254.169.254]:80",
    "::ffff:a9fe:a9fe",
    "fe80::1",
    "[fe80::1%eth0]:80",
    "fd00:ec2::254",
    "100.100.100.200",
    "168.63.129.16",
    "metadata.google.internal",
    "Metadata.Google.Internal.:80",
    "[::169.254.169.254]:80",
    "::a9fe:a9fe",
    "::ffff:0:169.254.169.254",
    "[64:ff9b::169.254.169.254]:80",
    "64:ff9b:1::a9fe:a9fe",
    "64:ff9b::100.100.100.200",
    "[2002:a9fe:a9fe::1]:80",
    "2002:a83f:8110::",
]
IN_IPV6 = ["::{}", "::ffff:{}", "::ffff:0:{}", "64:ff9b::{}", "64:ff9b:1::{}"]


def allowed(rules: list[str] | None, host: str) -> bool:
    hosts = AllowedHosts(None if rules is None else [HostRule.parse(rule) for rule in rules])
    try:
        hosts.check("master_service_entry", HostPort.parse(host))
    except InvalidArgumentError:
        return False
    return True


@pytest.mark.parametrize("host", METADATA)
@pytest.mark.parametrize(
    "rules",
    [
        None,
        ["0.0.0.0/0", "::/0"],
        ["169.0.0.0/8", "fe00::/7", "fd00::/8", "100.64.0.0/10", "::/32", "64:ff9b::/96", "2002:a800::/21"],
    ],
)
def test_metadata_services_are_refused_also_where_any_host_or_a_large_network_is_allowed(
    host: str, rules: list[str] | None
) -> None:
    assert not allowed(rules, host)


@pytest.mark.parametrize(
    ("rule", "host"),
    [
        ("169.254.169.254", "169.254.169.254:80"),
        ("169.254.169.254:80", "2852039166:80"),
        ("169.254.0.0/16", "169.254.7.7"),
        ("fe80::/64", "fe80::1"),
        ("metadata.google.internal", "metadata.google.internal:80"),
        ("64:ff9b::a9fe:a9fe", "[64:ff9b::169.254.169.254]:80"),
        ("2002:a9fe:a9fe::/48", "2002:a9fe:a9fe::1"),
    ],
)
def test_an_exact_rule_allows_a_link_local_host(rule: str, host: str) -> None:
    assert allowed([rule], host)


@pytest.mark.parametrize(
    ("rule", "host", "is_allowed"),
    [
        ("master", "master:50051", True),
        ("Master.", "mASTER", True),
        ("master", "master.example", False),
        ("master:50051", "master:50051", True),
        ("master:50051", "master:50052", False),
        ("master:50051", "master", False),
        ("10.0.0.0/8", "10.200.3.4:1", True),
        ("10.0.0.0/8", "11.0.0.1:1", False),
        ("10.0.0.0/8", "0xa.1", True),
        ("10.0.0.0/8", "ten.example", False),
        ("10.1.2.3", "::ffff:10.1.2.3", True),
        ("2001:db8::/32", "[2001:DB8::1]:50051", True),
        ("[2001:db8::1]:50051", "[2001:db8:0::1]:50051", True),
        ("[2001:db8::1]:50051", "[2001:db8::1]:1", False),
        ("10.0.0.0/8", "2001:db8::1", False),
    ],
)
def test_rules_name_hosts_addresses_ports_and_networks(rule: str, host: str, is_allowed: bool) -> None:
    assert allowed([rule], host) is is_allowed
    assert allowed(["other", rule], host) is is_allowed


def test_no_rule_allows_nothing_and_no_list_allows_anything_else() -> None:
    assert not allowed([], "127.0.0.1:50051")
    assert not allowed([], "master")
    assert allowed(None, "127.0.0.1:50051")
    assert allowed(None, "master:50051")


def test_a_refusal_names_field_host_and_allowed_values() -> None:
    hosts = AllowedHosts([HostRule.parse("10.0.0.0/8"), HostRule.parse("master:50051")])
    with pytest.raises(InvalidArgumentError, match=r"metadata_connstring names 'evil:1'.*10\.0\.0\.0/8, master:50051"):
        hosts.check("metadata_connstring", HostPort.parse("evil:1"))


@given(
    address=st.ip_addresses(v=4), form=st.sampled_from(["{}", "{:d}", "0x{:x}", "0{:o}"]), port=st.integers(1, 65535)
)
def test_however_an_address_is_written_the_answer_is_the_same(address: IPv4Address, form: str, port: int) -> None:
    number = int(address)
    text = str(address) if form == "{}" else form.format(number)
    rules = ["10.0.0.0/8", "192.0.2.7"]
    assert allowed(rules, f"{text}:{port}") == allowed(rules, str(address))
    assert allowed(None, f"{text}:{port}") == allowed(None, str(address))


@given(address=st.ip_addresses(v=4) | st.ip_addresses(network="169.254.0.0/16"), form=st.sampled_from(IN_IPV6))
def test_hosts_that_need_an_exact_rule_need_one_within_ipv6_too(address: IPv4Address, form: str) -> None:
    is_allowed = allowed(None, str(address))
    assert allowed(None, form.format(address)) is is_allowed
    number = int(address)
    assert allowed(None, f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1") is is_allowed


@pytest.mark.parametrize(
    "bad",
    ["", ":", "a b", "host:0", "host:65536", "host:x", "[::1", "[::1]x", "a/b", "10.0.0.1/8", "-x", "ü", " a", "a "],
)
def test_an_invalid_host_is_no_rule_either(bad: str) -> None:
    with pytest.raises(ValueError, match="<host>"):
        HostRule.parse(bad)


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "10.0.0.1 evil.example",
            "10.0.0.1\tevil.example",
            "10.0.0.1\n",
            "10.0.0.1\x00",
            "10.0.0.1\x7f",
            "\u212aelvin",
        ),
        *("10.0.0.1%eth0", "10.0.0.1%2eevil.example", "127%2e0.0.1", "0xa%2e1", "host%41", "host%", "10.0.0.1%"),
        *("::1%", "::1%a%b", "[::1%a b]", "[::1%/]", "[10.0.0.1%a]:1"),
    ],
)
def test_characters_that_clients_decode_drop_or_ignore_are_no_part_of_a_host(bad: str) -> None:
    with pytest.raises(InvalidArgumentError, match="host"):
        HostPort.parse(bad)
    with pytest.raises(ValueError, match="<host>"):
        HostRule.parse(bad)


def test_a_zone_of_an_ipv6_address_is_no_part_of_its_number() -> None:
    assert allowed(["2001:db8::/32"], "[2001:db8::1%eth0]:1")
    assert not allowed(["2001:db8::/32"], "[2001:db9::1%eth0]:1")


@pytest.mark.parametrize(
    ("metadata", "master", "hosts"),
    [
        ("P2PHANDSHAKE", "10.0.0.1:50051", ["10.0.0.1:50051"]),
        ("http://meta:8080/metadata", "m:1", ["m:1", "meta:8080"]),
        ("etcd://a:2379;b:2379", "etcd://c:1;[::1]:2", ["c:1", "[::1]:2", "a:2379", "b:2379"]),
        ("a:2379, b:2379", "m:1", ["m:1", "a:2379", "b:2379"]),
        ("redis://user:secret@cache:6379/0", "m:1", ["m:1", "cache:6379"]),
        ("http://allowed@169.254.169.254/x", "m:1", ["m:1", "169.254.169.254"]),
        ("", "", []),
    ],
)
def test_all_hosts_of_a_mooncake_storage_are_found(metadata: str, master: str, hosts: list[str]) -> None:
    spec = MooncakeStorageSpec(metadata_connstring=metadata, master_service_entry=master)
    assert [str(host) for _, host in mooncake_hosts(spec)] == hosts


@pytest.mark.parametrize(
    "master", ["http://a#@b:1", "http://a?@b:1", "etcd://a:1;b\\@c:1", "etcd://a://b:1", "a\\b:1", "a?x:1", "a b:1"]
)
def test_ambiguous_hosts_are_refused(master: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"master_service_entry: (host|port)"):
        mooncake_hosts(MooncakeStorageSpec(master_service_entry=master))


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "http:///169.254.169.254/x",
            "HTTP:///a:1/x",
            "etcd:///a:1",
            "redis:///a:1",
            "http://",
            "http://@/a:1",
            " ",
            ";",
        ),
        *("http://;/a:1", "http://,/a:1", "http:// /a:1", "http:// a:1/x", "a:1;;b:1", "a:1;", "/a:1", "://a:1"),
        *(
            "http://10.0.0.1%2eevil.example/",
            "http://127%2e0.0.1:80/",
            "10.0.0.1%eth0:80",
            "http://10.0.0.1 evil.example/",
        ),
        *("x/://10.0.0.1", "evil.example;x://10.0.0.1", "http://a:1/x\r\nHost: b", "http://a\x00/", "a:1\n"),
        *("fd00:ec2::254:80", "::ffff:a9fe:a9fe:80", "http://::1/"),
    ],
)
@pytest.mark.parametrize("field", ["master_service_entry", "metadata_connstring"])
def test_no_host_of_a_mooncake_storage_goes_unchecked(field: str, entry: str) -> None:
    """Clients look behind an empty host for another one, decode it, end it early, or take its last group for a port."""
    with pytest.raises(InvalidArgumentError, match=field):
        mooncake_hosts(MooncakeStorageSpec(**{field: entry}))
