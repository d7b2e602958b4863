"""Documents read back as they were printed; what cannot be read is refused with what is wrong."""

import json
from dataclasses import replace
from enum import IntEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_rig import GROUP, INSTANCE

from kvcm.model.accounts import Account, AccountRole, PasswordHash
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.groups import CacheConfig, GlobalQuota, InstanceGroup, MetaCachePolicyConfig, TriggerStrategy
from kvcm.model.instances import Instance, Placement, Registration
from kvcm.model.nodes import Endpoint
from kvcm.model.storages import NfsStorageSpec, StorageConfig, StorageSpec
from kvcm.registry.codec import decode_document, encode_document
from kvcm.registry.seats import SeatsTaken

PLAIN: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=6),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Draw values of a class of the model, all fields at random."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, UnionType):
        return st.one_of(*map(values, get_args(kind)))
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if issubclass(kind, IntEnum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})


VALUES = st.one_of(
    *map(values, (StorageConfig, InstanceGroup, GlobalQuota, Registration, Account, Endpoint, int, str)),
    st.builds(SeatsTaken, st.dictionaries(values(int), values(str), max_size=3), values(tuple[Registration, ...])),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(value=VALUES)
def test_every_value_reads_back_and_prints_the_same_again(value: Any) -> None:
    document = encode_document(value)
    again = decode_document(type(value), document)
    assert (again, type(again)) == (value, type(value))
    assert encode_document(again) == document


def test_the_values_hold_every_kind_of_storage() -> None:
    """The test above draws from all members of the union, so that none lacks its printed form."""
    for spec in StorageSpec.__args__:
        config = StorageConfig("s", spec(), check_storage_available_when_open=True, is_available=False)
        assert decode_document(StorageConfig, encode_document(config)) == config


def test_documents_look_as_other_releases_find_them() -> None:
    assert json.loads(encode_document(StorageConfig("s", NfsStorageSpec("/r é", 8)))) == {
        "version": 1,
        "value": {
            "global_unique_name": "s",
            "spec_type": "NfsStorageSpec",
            "spec": {"root_path": "/r é", "key_count_per_file": 8},
            "check_storage_available_when_open": False,
            "is_available": True,
            "capacity_bytes": 0,
            "used_percentage": 0.0,
        },
    }
    account = Account("ann", AccountRole.ROLE_ADMIN, PasswordHash(b"\x00\xff", b"\x01"))
    assert json.loads(encode_document(account))["value"] == {
        "user_name": "ann",
        "role": 1,
        "password": {"salt": "AP8=", "digest": "AQ=="},
    }
    registration = json.loads(encode_document(Registration(INSTANCE, Placement(7, 16))))["value"]
    assert registration["placement"] == [7, 16]
    assert registration["instance"]["location_spec_infos"][0] == {"name": "tp0", "size": 64, "kind": 0}


def test_what_an_older_release_did_not_write_has_its_default() -> None:
    storage = (
        b'{"version":1,"value":{"global_unique_name":"s","spec_type":"NfsStorageSpec","spec":{"root_path":"/r"},'
        b'"check_storage_available_when_open":true,"is_available":false}}'
    )
    assert decode_document(StorageConfig, storage) == StorageConfig(
        "s", NfsStorageSpec("/r"), check_storage_available_when_open=True, is_available=False
    )
    assert decode_document(InstanceGroup, b'{"version":1,"value":{"name":"g"}}') == InstanceGroup("g")


def test_a_document_of_another_version_says_so() -> None:
    with pytest.raises(StorageIOError, match=r"version 2.*reads version 1.*another release"):
        decode_document(InstanceGroup, b'{"version":2,"value":{"anything":[]}}')


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (InstanceGroup, b""),
        (InstanceGroup, b"\xff\xfe"),
        (InstanceGroup, b"[]"),
        (InstanceGroup, b'{"version":1}'),
        (InstanceGroup, b'{"version":1,"value":{}}'),
        (InstanceGroup, b'{"version":1,"value":{"name":5}}'),
        (InstanceGroup, b'{"version":1,"value":{"name":"\xff"}}'),
        (Account, b'{"version":1,"value":{"user_name":"a","role":77,"password":{"salt":"","digest":""}}}'),
        (StorageConfig, b'{"version":1,"value":{"global_unique_name":"s"}}'),
    ],
)
def test_a_damaged_document_is_refused(kind: type[Any], document: bytes) -> None:
    with pytest.raises(StorageIOError, match="damaged"):
        decode_document(kind, document)


def test_an_unknown_storage_spec_is_named() -> None:
    document = encode_document(StorageConfig("s", NfsStorageSpec("/r"))).replace(b"NfsStorageSpec", b"TapeStorageSpec")
    with pytest.raises(StorageIOError, match=r"'TapeStorageSpec'.*NfsStorageSpec"):
        decode_document(StorageConfig, document)


@pytest.mark.parametrize(
    "value",
    [
        replace(GROUP, user_data="\ud800"),
        replace(INSTANCE, instance_id="\udfff"),
        StorageConfig("s", NfsStorageSpec("/\ud800")),
    ],
)
def test_texts_that_are_not_utf8_are_refused(value: InstanceGroup | Instance | StorageConfig) -> None:
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        encode_document(value)


def test_numbers_keep_their_precision() -> None:
    policy = MetaCachePolicyConfig(high_pri_pool_ratio=0.1)
    assert decode_document(MetaCachePolicyConfig, encode_document(policy)) == policy
    trigger = TriggerStrategy((1 << 63) - 1, 1e-300)
    config = CacheConfig(replace(GROUP.cache_config.reclaim_strategy, trigger_strategy=trigger))
    assert decode_document(CacheConfig, encode_document(config)) == config


def test_an_account_without_a_password_is_nothing_that_an_older_release_takes_for_one_with() -> None:
    locked = Account("ann", AccountRole.ROLE_ADMIN, None)
    assert json.loads(encode_document(locked))["version"] == 2
    assert decode_document(Account, encode_document(locked)) == locked
    stored = b'{"version":1,"value":{"user_name":"ann","role":1,"password":{"salt":"AAE=","digest":"/w=="}}}'
    assert decode_document(Account, stored) == replace(locked, password=PasswordHash(b"\x00\x01", b"\xff"))
    assert encode_document(decode_document(Account, stored)) == stored
