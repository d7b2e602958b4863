"""Secrets leave the manager with no snapshot, and come back from what is configured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_rig import CONFIG, GROUPS, MOONCAKE, SECRET, loaded, refused_without_a_trace, registry_over

from kvcm.model.errors import (
    InvalidArgumentError,
)
from kvcm.model.instances import ModelDeployment
from kvcm.model.storages import MooncakeStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.registry.audit_trail import described
from kvcm.registry.configuration import ConfigChange, Configuration
from kvcm.registry.secrets import HIDDEN, redacted, redacted_text
from kvcm.store.memory import MemoryTable


def acts(changes: list[ConfigChange]) -> list[tuple[str, str, str]]:
    return [(change.action, change.kind, change.name) for change in changes]


PLANTED = "hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://:{PLANTED}@h:1/0?cluster_name=a", f"redis://{HIDDEN}@h:1/0?cluster_name=a"),
        (f"redis://h/?password={PLANTED}&cluster_name=a", f"redis://h/?password={HIDDEN}&cluster_name=a"),
        (f"etcd://a:{PLANTED}@h1,etcd://b:{PLANTED}@h2", f"etcd://{HIDDEN}@h2"),
        (f"redis://u:a/b<{PLANTED} c@h", f"redis://{HIDDEN}@h"),
        (f"redis://{PLANTED}@h", f"redis://{HIDDEN}@h"),
        (f"root:{PLANTED}@tcp(h)/db", f"{HIDDEN}@tcp(h)/db"),
        (f"redis://u:a/{PLANTED}/b@h:6379/0", f"redis://{HIDDEN}@h:6379/0"),
        (f"corp/u:{PLANTED}@h:6379", f"{HIDDEN}@h:6379"),
        (f"{PLANTED}@h:6379", f"{HIDDEN}@h:6379"),
        (
            f"http://h/?access_key={PLANTED}&a=1&api_key={PLANTED}",
            f"http://h/?access_key={HIDDEN}&a=1&api_key={HIDDEN}",
        ),
        ("http://10.0.0.1:8080/metadata", "http://10.0.0.1:8080/metadata"),
        ("P2PHANDSHAKE", "P2PHANDSHAKE"),
    ],
)
def test_addresses_lose_their_logins_and_nothing_else(text: str, shown: str) -> None:
    config = replace(MOONCAKE, spec=MooncakeStorageSpec("h", text, "tcp", "", "m"))
    expected = replace(config, spec=MooncakeStorageSpec("h", shown, "tcp", "", "m"))
    assert redacted(config) == expected == redacted(expected)
    assert PLANTED not in str(described(config))


@pytest.mark.parametrize(
    "text",
    [
        f'{{"password": "{PLANTED} and more {PLANTED}", "owner": "me@example.org"}}',
        f"see redis://u:{PLANTED}@h, api-key={PLANTED}; Authorization: Bearer {PLANTED}",
        f"DB_PASSWD='{PLANTED}' token: {PLANTED}",
        f"dsn u:{PLANTED}@h:5432 then {PLANTED}@h:22",
        f"redis://u:{PLANTED}/x@h, secret={PLANTED}, REDIS_PASS={PLANTED} token%3D{PLANTED}",
        f'{{"tokens": ["{PLANTED}", "{PLANTED}"], "secret": {{"a": "{PLANTED}"}}, "password": "{PLANTED}',
        f'{{\\"password\\": \\"a b {PLANTED}\\"}}',
    ],
)
def test_free_texts_lose_what_is_called_a_secret(text: str) -> None:
    group = redacted(replace(GROUPS[0], user_data=text))
    assert PLANTED not in group.user_data
    assert redacted(group) == group
    deployment = ModelDeployment("m", "bf16", extra=text, user_data=text)
    assert PLANTED not in repr(redacted(replace(CONFIG.instances[0], model_deployment=deployment)))


@given(st.text(max_size=60), st.sampled_from(["", "a:b@c", "x://u:p@h", "password=", "token: "]))
def test_leaving_out_twice_is_leaving_out_once(text: str, more: str) -> None:
    group = redacted(replace(GROUPS[0], user_data=text + more + text))
    assert redacted(group) == group
    storage = redacted(replace(MOONCAKE, spec=MooncakeStorageSpec(text + more, more + text, "tcp", "", more)))
    assert redacted(storage) == storage


_IN_LOGIN = st.text("abcXYZ059/:@=&?;,-_.~%", max_size=12)
_IN_VALUE = st.text("abcXYZ059/:@=-_.~%+", max_size=12)
_NAMES = st.sampled_from(["password", "token", "access_key", "secret", "api_key", "apiKey", "DB_PASS", "SecretKey"])


@given(_IN_LOGIN, _IN_LOGIN, st.sampled_from(["redis://u:", "u:", "//u:", "x=etcd://"]), st.booleans())
def test_no_login_is_left_whatever_is_in_it(before: str, after: str, start: str, is_audited: bool) -> None:
    login = f"{start}{before}{PLANTED}{after}@h:1"
    text = f"see '{login}' and {login}"
    assert PLANTED not in (described(text) if is_audited else redacted_text(text))
    spec = MooncakeStorageSpec(metadata_connstring=login)
    config = replace(MOONCAKE, spec=spec)
    assert PLANTED not in (str(described(config)) if is_audited else repr(redacted(config)))


@given(_NAMES, st.sampled_from(["=", ": ", " = ", '":"']), _IN_VALUE, _IN_VALUE, st.sampled_from(["?", "&", " ", "{"]))
def test_no_value_of_a_name_is_left(name: str, sign: str, before: str, after: str, start: str) -> None:
    closing = '"' if sign.endswith('"') else ""
    text = f"a=1{start}{name}{sign}{before}{PLANTED}{after}{closing}&b=2 c=3"
    assert PLANTED not in redacted_text(text)
    assert redacted_text(text).endswith("&b=2 c=3")
    assert PLANTED not in str(described(replace(GROUPS[0], user_data=text)))


def test_what_is_audited_is_cut_after_secrets_are_left_out() -> None:
    """Its end may be what says that it is a login."""
    text = f"redis://u:{PLANTED}{'x' * 2000}@h"
    assert described(text) == described(replace(GROUPS[0], user_data=text))["user_data"] == f"redis://{HIDDEN}@h"


@pytest.mark.parametrize("unit", ["/", "//", "token", "token ", "a:", '"', 'token="', "\\", "token=[", "bearer ", "a-"])
def test_a_text_made_to_be_slow_is_not(unit: str) -> None:
    """With patterns that try again, this would take hours."""
    text = unit * (200_000 // len(unit))
    assert redacted_text(text).startswith(unit[:1])
    assert redacted(replace(MOONCAKE, spec=MooncakeStorageSpec(metadata_connstring=text)))


def test_names_and_paths_are_left_as_they_are() -> None:
    config = StorageConfig("a.b", NfsStorageSpec("/mnt//token=1/u:p@h/"))
    assert redacted(config) == config


# ── secrets ──


async def test_secrets_that_were_left_out_are_those_that_are_configured() -> None:
    config = replace(CONFIG, storages=(MOONCAKE,))
    registry = await loaded(config)
    hidden = redacted(MOONCAKE)
    assert SECRET not in repr(hidden)
    assert await registry.snapshots.load(replace(config, storages=(hidden,))) == []
    limited = replace(hidden, capacity_bytes=9)
    await registry.snapshots.load(replace(config, storages=(limited,)))
    assert registry.storages.all() == [replace(MOONCAKE, capacity_bytes=9)]


async def test_a_secret_that_is_nowhere_refuses_the_load() -> None:
    table = MemoryTable()
    wanted = Configuration(storages=(redacted(MOONCAKE),))
    text = rf"storages\[0\].mooncake.metadata_connstring lacks a secret, {HIDDEN}"
    with pytest.raises(InvalidArgumentError, match=text):
        await refused_without_a_trace(registry_over(table), table, wanted)
    other = replace(MOONCAKE, spec=replace(MOONCAKE.spec, metadata_connstring="etcd://kvcm:x@another"))  # type: ignore[type-var]
    registry = await loaded(Configuration(storages=(other,)), table)
    with pytest.raises(InvalidArgumentError, match=text):
        await refused_without_a_trace(registry, table, wanted)


async def test_a_new_secret_replaces_the_old_one() -> None:
    registry = await loaded(Configuration(storages=(MOONCAKE,)))
    assert isinstance(MOONCAKE.spec, MooncakeStorageSpec)
    other = replace(MOONCAKE, spec=replace(MOONCAKE.spec, metadata_connstring="etcd://kvcm:new@meta:2379"))
    assert acts(await registry.snapshots.load(Configuration(storages=(other,)))) == [("change", "storage", "mc")]
    assert registry.storages.all() == [other]
