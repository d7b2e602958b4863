"""What a report of usage says, from plain values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    QuotaConfig,
    ReclaimPolicy,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.locations import Place
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as pb
from kvcm.reclaim.workers import Backlog
from kvcm.service.translate import fill, read
from kvcm.service.usage_report import IndexUsage, UsageSources, usage_report
from kvcm.service.usage_values import GlobalQuotaUsage, StorageUsage, Usage, UsageReport

NFS, MOONCAKE = StorageType.ST_NFS, StorageType.ST_MOONCAKE
A, B = Place("a", NFS), Place("b", MOONCAKE)


def _group(name: str, capacity: int = 1000, ratio: float = 0.0, **changes: Any) -> InstanceGroup:
    strategy = CacheReclaimStrategy(
        reclaim_policy=ReclaimPolicy.POLICY_LFU,
        trigger_strategy=TriggerStrategy(changes.pop("used_size", 0), ratio),
    )
    quota = InstanceGroupQuota(capacity, changes.pop("types", ()))
    changes = {"storage_candidates": ("a",), "global_quota_group_name": "all", **changes}
    return InstanceGroup(name, quota=quota, cache_config=CacheConfig(strategy), **changes)


def _storage(name: str, capacity: int = 0) -> StorageConfig:
    return StorageConfig(name, DummyStorageSpec(), capacity_bytes=capacity)


def _index(
    group: str,
    used: dict[Place, int],
    deleting: dict[Place, int] | None = None,
    *,
    instance_id: str = "i",
    block: int = 1,
    most: int = 1 << 62,
) -> IndexUsage:
    instance = Instance("", group, instance_id, 4, (LocationSpecInfo("kv", block),), ModelDeployment())
    return IndexUsage(instance, 7, most, used, deleting or {})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["x", "y", "gone"]),
            st.dictionaries(st.sampled_from([A, B, Place("a", MOONCAKE)]), st.integers(0, 1 << 60), max_size=3),
        ),
        max_size=6,
    )
)
def test_every_byte_is_in_each_breakdown_once_invariant_4(held: list[tuple[str, dict[Place, int]]]) -> None:
    indexes = [_index(name, used, used, instance_id=str(number)) for number, (name, used) in enumerate(held)]
    report = usage_report(UsageSources([_group("x"), _group("y")], [], [GlobalQuota("all", 1)], indexes))
    everything = sum(size for _, used in held for size in used.values())
    assert sum(group.total.used_bytes for group in report.groups) == everything
    assert sum(storage.usage.used_bytes for storage in report.storages) == everything
    for group in report.groups:
        mine = sum(size for name, used in held if name == group.name for size in used.values())
        assert group.total.used_bytes == group.total.deleting_bytes == mine
        assert sum(kind.usage.used_bytes for kind in group.types) == mine
        assert sum(storage.used_bytes for storage in group.storages) == mine
        assert sum(instance.used_bytes for instance in group.instances) == mine
    drawn = sum(size for name, used in held if name != "gone" for size in used.values())
    assert report.global_quotas[0].usage.used_bytes == drawn


def test_limits_and_marks_are_those_of_reclaiming() -> None:
    types = (QuotaConfig(NFS, 500),)
    group = _group("x", ratio=0.8, types=types, storage_guarantees=(StorageGuarantee("a", 40),), pin_budget_bytes=9)
    sources = UsageSources(
        [group],
        [_storage("a", 2000), _storage("b")],
        [GlobalQuota("all", 4000, 0.5)],
        [_index("x", {A: 300, B: 5}, {A: 20}, most=50)],
        {"x": 3},
        {"x": 2},
        {"a": Backlog(3, 1, 1)},
    )
    report = usage_report(sources)
    (found,) = report.groups
    assert found.total == Usage(305, 20, 1000, 800, 780)
    assert [(kind.storage_type, kind.usage) for kind in found.types] == [
        (MOONCAKE, Usage(5, 0)),
        (NFS, Usage(300, 20, 500, 400, 390)),
    ]
    assert [(each.storage_unique_name, each.used_bytes, each.guaranteed_bytes) for each in found.storages] == [
        ("a", 300, 40),
        ("b", 5, 0),
    ]
    (instance,) = found.instances
    assert (instance.key_count, instance.max_key_count, instance.used_bytes, instance.policy) == (7, 50, 305, "lfu")
    assert (found.pinned_bytes, found.pin_budget_bytes, found.refused_writes) == (3, 9, 2)
    assert report.storages == (
        StorageUsage("a", Usage(300, 20, 2000, 1800, 1760), 40, 0.5, 4, 1),
        StorageUsage("b", Usage(5, 0), 0, 0.0, 0, 0),
    )
    assert report.global_quotas == (GlobalQuotaUsage("all", Usage(305, 20, 4000, 2000, 1920), ("x",)),)


def test_a_mark_leaves_room_for_the_largest_block_of_those_who_use_the_limit() -> None:
    sources = UsageSources(
        [_group("x", ratio=1.0), _group("y")],
        [_storage("a", 1000)],
        [],
        [
            _index("x", {A: 1}, block=300),
            _index("x", {A: 1}, block=200, instance_id="j"),
            _index("y", {B: 1}, block=900),
        ],
    )
    report = usage_report(sources)
    assert report.groups[0].total.high_mark_bytes == 700
    assert report.storages[0].usage.high_mark_bytes == 700


def test_of_two_marks_of_a_group_the_lower_one_is_told() -> None:
    for used_size, high in ((300, 300), (900, 800), (0, 800)):
        report = usage_report(UsageSources([_group("x", ratio=0.8, used_size=used_size)], [], [], []))
        assert report.groups[0].total.high_mark_bytes == high


def test_oversubscription_counts_the_quotas_of_groups_that_may_use_the_storage() -> None:
    groups = [
        _group("x", 700),
        _group("y", 900, storage_candidates=("b", "a")),
        _group("z", 500, storage_candidates=()),
    ]
    report = usage_report(UsageSources(groups, [_storage("a", 800), _storage("b")], [], []))
    assert [storage.oversubscription for storage in report.storages] == [2.0, 0.0]


def test_what_is_gone_while_bytes_still_count_is_told_without_limits() -> None:
    report = usage_report(UsageSources([], [], [], [_index("gone", {A: 5})]))
    (group,), (storage,) = report.groups, report.storages
    assert (group.name, group.total) == ("gone", Usage(5, 0, 0))
    assert [instance.policy for instance in group.instances] == [""]
    assert (storage.storage_unique_name, storage.usage) == ("a", Usage(5, 0))


def test_one_group_is_told_with_the_storages_and_quotas_that_it_draws_from() -> None:
    groups = [_group("x"), _group("y", storage_candidates=("b",), global_quota_group_name="other")]
    quotas = [GlobalQuota("other", 1), GlobalQuota("all", 1)]
    indexes = [_index("x", {A: 5, Place("old", NFS): 1}), _index("y", {B: 7, A: 2})]
    sources = UsageSources(groups, [_storage("a"), _storage("b"), _storage("c")], quotas, indexes)
    report = usage_report(sources, "x")
    assert [group.name for group in report.groups] == ["x"]
    assert {each.storage_unique_name: each.usage.used_bytes for each in report.storages} == {"a": 7, "old": 1}
    assert [quota.name for quota in report.global_quotas] == ["all"]
    whole = usage_report(sources)
    assert [group.name for group in whole.groups] == ["x", "y"]
    assert [each.storage_unique_name for each in whole.storages] == ["a", "b", "c", "old"]
    assert [quota.name for quota in whole.global_quotas] == ["all", "other"]


def test_a_report_goes_over_the_wire_and_back() -> None:
    group = _group("x", ratio=0.8, types=(QuotaConfig(NFS, 500),))
    sources = UsageSources(
        [group], [_storage("a", 2000)], [GlobalQuota("all", 4000)], [_index("x", Counter({A: 2**62, B: 5}))]
    )
    report = usage_report(sources)
    message = pb.GetUsageResponse()
    fill(message, report)
    assert read(UsageReport, pb.GetUsageResponse.FromString(message.SerializeToString())) == report
    without_header = {field.name for field in message.DESCRIPTOR.fields} - {"header"}
    assert {field.name for field, _ in message.ListFields()} == without_header


def test_a_guarantee_is_shown_as_far_as_the_quota_lets_a_group_use_it() -> None:
    kept = (StorageGuarantee("a", 40), StorageGuarantee("removed", 40))
    group = _group("x", types=(QuotaConfig(StorageType.ST_DUMMY, 30),), storage_guarantees=kept)
    report = usage_report(UsageSources([group], [_storage("a", 2000)], [], [_index("x", {Place("removed", NFS): 1})]))
    assert {each.storage_unique_name: each.guaranteed_bytes for each in report.groups[0].storages} == {
        "a": 30,
        "removed": 0,
    }
    assert {each.storage_unique_name: each.guaranteed_bytes for each in report.storages} == {"a": 30, "removed": 0}
