"""Between wire messages and values: nothing is lost, and what is unset stays unset."""

from __future__ import annotations

from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.groups import GlobalQuota, InstanceGroup, TriggerStrategy
from kvcm.model.storages import NfsStorageSpec, StorageConfig, StorageSpec
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity
from kvcm.service.json_codec import parse_request, print_response
from kvcm.service.translate import fill, read, read_storage, write_storage

_PLAIN: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    int: st.integers(-(1 << 31), (1 << 31) - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Draw values of a class of the model, all fields at random."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, UnionType):
        return st.one_of(*map(values, get_args(kind)))
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=2).map(tuple)
    if issubclass(kind, IntEnum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})


@settings(max_examples=200, deadline=None, derandomize=True)
@given(group=values(InstanceGroup))
def test_a_group_reads_back_from_both_forms_of_the_wire(group: InstanceGroup) -> None:
    message = admin.InstanceGroup()
    fill(message, group)
    assert read(InstanceGroup, admin.InstanceGroup.FromString(message.SerializeToString())) == group
    assert read(InstanceGroup, parse_request(print_response(message), admin.InstanceGroup)) == group


@settings(max_examples=50, deadline=None, derandomize=True)
@given(quota=values(GlobalQuota))
def test_a_global_quota_reads_back(quota: GlobalQuota) -> None:
    message = capacity.GlobalQuota()
    fill(message, quota)
    assert read(GlobalQuota, message) == quota


@pytest.mark.parametrize("hysteresis", [None, 0.0, 0.1])
def test_an_unset_hysteresis_is_another_thing_than_none_at_all(hysteresis: float | None) -> None:
    message = admin.TriggerStrategy()
    fill(message, TriggerStrategy(1, 0.5, hysteresis))
    assert message.HasField("hysteresis") == (hysteresis is not None)
    assert read(TriggerStrategy, message).hysteresis == hysteresis


@pytest.mark.parametrize("spec", [each() for each in get_args(StorageSpec)])
def test_a_storage_reads_back_with_its_limit(spec: StorageSpec) -> None:
    """But for the switch, which has calls of its own."""
    config = StorageConfig("s", spec, True, capacity_bytes=1 << 62, used_percentage=0.75)
    request = admin.AddStorageRequest()
    write_storage(request.storage, config)
    assert read_storage("AddStorage", request) == config


def test_a_storage_of_an_older_client_has_no_limit() -> None:
    request = admin.AddStorageRequest()
    request.storage.global_unique_name = "s"
    request.storage.nfs.root_path = "/r"
    assert read_storage("AddStorage", request) == StorageConfig("s", NfsStorageSpec("/r", 0))
