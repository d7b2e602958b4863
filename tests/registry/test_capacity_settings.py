"""Limits, marks and policies: what is accepted and refused, how a limit changes while the storage stays open, and what
documents say of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from registry_rig import GROUP, Opener

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.groups import (
    CacheReclaimStrategy,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    InstanceOverride,
    PrefixClass,
    ReclaimPolicy,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.reclaim.policies import POLICIES
from kvcm.registry.documents import parse_startup_document
from kvcm.registry.registry import Registry
from kvcm.registry.validation import POLICY_NAMES, check_global_quota, check_group, check_storage
from kvcm.store.memory import MemoryTable

NAN, INF = float("nan"), float("inf")
NFS = StorageConfig("nfs", NfsStorageSpec("/r"))


def strategy(**fields: Any) -> InstanceGroup:
    return replace(GROUP, cache_config=replace(GROUP.cache_config, reclaim_strategy=CacheReclaimStrategy(**fields)))


def policy(name: str = "", ttl_seconds: int = 0, number: int = 0) -> InstanceGroup:
    return strategy(policy=EvictionPolicy(name, ttl_seconds), reclaim_policy=ReclaimPolicy(number))


def classed(*classes: PrefixClass, **fields: Any) -> InstanceGroup:
    return strategy(prefix_classes=classes, **fields)


def one_class(**fields: Any) -> InstanceGroup:
    return classed(PrefixClass("c", **fields))


def overridden(*overrides: InstanceOverride, **fields: Any) -> InstanceGroup:
    return strategy(instance_overrides=overrides, **fields)


def guaranteed(*guarantees: tuple[str, int]) -> InstanceGroup:
    return replace(GROUP, storage_guarantees=tuple(StorageGuarantee(*each) for each in guarantees))


def test_the_names_that_are_accepted_are_those_of_the_policies() -> None:
    assert sorted(POLICY_NAMES) == sorted(POLICIES)


@pytest.mark.parametrize(
    "group",
    [
        strategy(trigger_strategy=TriggerStrategy(0, 0.8, 0.0)),
        strategy(trigger_strategy=TriggerStrategy(0, 0.8, 0.999)),
        *(strategy(share=share) for share in ("", "group_lru", "proportional", "fixed")),
        *(policy(name) for name in POLICY_NAMES if name != "ttl"),
        *(policy(name, 5) for name in ("ttl", "fifo", "lru", "leaf_lru")),
        policy("", 5),  # leaf_lru
        policy("", 5, ReclaimPolicy.POLICY_LRU),
        policy("", 0, ReclaimPolicy.POLICY_TTL),  # as clients of the original send it
        policy("lru", 5, ReclaimPolicy.POLICY_LFU),
        one_class(min_depth=3, end_depth=4, min_reads=2, instance_ids=("i", "j"), priority=-100, budget=1.0),
        classed(PrefixClass("c", priority=100), PrefixClass("d", end_depth=1)),
        one_class(policy=EvictionPolicy("ttl", 5)),
        overridden(InstanceOverride("i", EvictionPolicy("fifo"), 0.5), InstanceOverride("j", weight=1e9)),
        guaranteed(("nfs", 0)),
        guaranteed(("nfs", 1 << 62)),
        replace(GROUP, pin_budget_bytes=1 << 62),
    ],
)
def test_good_settings_pass(group: InstanceGroup) -> None:
    check_group(group)


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (strategy(trigger_strategy=TriggerStrategy(0, 0.8, -0.1)), ["hysteresis", "-0.1", ">= 0"]),
        (strategy(trigger_strategy=TriggerStrategy(0, 0.8, 1.0)), ["hysteresis", "1.0", "< 1"]),
        (strategy(trigger_strategy=TriggerStrategy(0, 0.8, NAN)), ["hysteresis", "nan"]),
        (strategy(share="equal"), ["share", "'equal'", "'group_lru', 'proportional' or 'fixed'"]),
        (policy("lur"), ["policy", "name", "'lur'", *map(repr, POLICY_NAMES)]),
        (policy("lru", -5), ["ttl_seconds", "-5", ">= 0"]),
        (policy("ttl"), ["ttl_seconds", "must be > 0 with policy 'ttl'"]),
        (policy("lfu", 5), ["ttl_seconds", "5", "'lfu'", "'ttl', 'fifo', 'lru' or 'leaf_lru'"]),
        (policy("", 5, ReclaimPolicy.POLICY_LFU), ["ttl_seconds", "'lfu'"]),
        (classed(PrefixClass("")), ["prefix_classes", "name", "required"]),
        (classed(PrefixClass("a\n")), ["prefix_classes.name", "control"]),
        (classed(PrefixClass("a"), PrefixClass("a")), ["prefix_classes", "'a'", "more than once"]),
        (one_class(min_depth=-1), ["min_depth", "-1", ">= 0"]),
        (one_class(min_depth=5, end_depth=5), ["end_depth", "5", "above min_depth, 5"]),
        (one_class(end_depth=-1), ["end_depth", "-1"]),
        (one_class(min_reads=-1), ["min_reads", "-1", ">= 0"]),
        (one_class(instance_ids=("",)), ["instance_ids", "0 bytes"]),
        (one_class(priority=101), ["priority", "101", "-100 to 100"]),
        (one_class(priority=-101), ["priority", "-101"]),
        (one_class(budget=1.1), ["budget", "1.1", "0 to 1"]),
        (one_class(budget=-0.1), ["budget", "-0.1"]),
        (one_class(budget=NAN), ["budget", "nan"]),
        (one_class(policy=EvictionPolicy("x")), ["prefix_classes", "policy", "'x'"]),
        (
            classed(PrefixClass("c", policy=EvictionPolicy("", 5)), policy=EvictionPolicy("sieve")),
            ["prefix_classes", "ttl_seconds", "'sieve'"],
        ),
        (overridden(InstanceOverride("")), ["instance_overrides", "instance_id", "required"]),
        (overridden(InstanceOverride("i"), InstanceOverride("i")), ["instance_overrides", "'i'", "more than once"]),
        (overridden(InstanceOverride("i", weight=-1.0)), ["weight", "-1.0", ">= 0"]),
        (overridden(InstanceOverride("i", weight=INF)), ["weight", "inf"]),
        (overridden(InstanceOverride("i", EvictionPolicy("ttl"))), ["instance_overrides", "ttl_seconds", "> 0"]),
        (guaranteed(("nfs", -1)), ["guaranteed_bytes", "-1", ">= 0"]),
        (guaranteed(("nfs", 1), ("nfs", 2)), ["storage_guarantees", "'nfs'", "more than once"]),
        (guaranteed(("other", 1)), ["storage_guarantees", "'other'", "storage_candidates", "'nfs'"]),
        (guaranteed(("", 1)), ["storage_guarantees", "''"]),
        (replace(GROUP, pin_budget_bytes=-1), ["pin_budget_bytes", "-1", ">= 0"]),
    ],
)
def test_bad_settings_are_refused(group: InstanceGroup, named: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        check_group(group)
    assert all(each in str(refusal.value) for each in named), str(refusal.value)


@pytest.mark.parametrize("ratio", [0.0, 0.8, 1.0, 7.0])
def test_good_limits_pass(ratio: float) -> None:
    check_storage(replace(NFS, capacity_bytes=1 << 62, used_percentage=ratio))
    check_global_quota(GlobalQuota("all", 0, ratio))


@pytest.mark.parametrize(
    ("capacity", "ratio", "named"),
    [
        (-1, 0.0, ["capacity_bytes", "-1", ">= 0"]),
        (1, -0.1, ["used_percentage", "-0.1"]),
        (1, NAN, ["nan"]),
        (1, INF, ["inf"]),
    ],
)
def test_bad_limits_are_refused(capacity: int, ratio: float, named: list[str]) -> None:
    for check in (
        lambda: check_storage(replace(NFS, capacity_bytes=capacity, used_percentage=ratio)),
        lambda: check_global_quota(GlobalQuota("all", capacity, ratio)),
    ):
        with pytest.raises(InvalidArgumentError) as refusal:
            check()
        assert all(each in str(refusal.value) for each in named), str(refusal.value)


@pytest.mark.parametrize("name", ["", "a\tb", "x" * 257])
async def test_malformed_quotas_are_not_stored(name: str) -> None:
    registry = Registry(Opener())
    with pytest.raises(InvalidArgumentError, match="name"):
        await registry.quotas.set(GlobalQuota(name, 1))
    assert registry.quotas.all() == []


async def test_global_quotas_are_set_replaced_and_forgotten_for_all_managers() -> None:
    table = MemoryTable()
    here, there = Registry(Opener(), table), Registry(Opener(), table)
    await here.quotas.set(GlobalQuota("b", 1))
    await here.quotas.set(GlobalQuota("a", 2))
    await there.load()
    await here.quotas.set(GlobalQuota("a", 3, 0.5))
    await there.refresh()
    assert there.quotas.all() == here.quotas.all() == [GlobalQuota("a", 3, 0.5), GlobalQuota("b", 1)]
    await there.quotas.remove("a")
    await here.refresh()
    assert (here.quotas.find("a"), here.quotas.find("b")) == (None, GlobalQuota("b", 1))
    with pytest.raises(InvalidArgumentError, match="global quota 'a' does not exist"):
        await here.quotas.remove("a")


async def test_a_limit_changes_without_opening_anything() -> None:
    """Not even where the medium is away; the switch stays, and other managers open nothing either."""
    table, opener, theirs = MemoryTable(), Opener(), Opener()
    registry, other = Registry(opener, table), Registry(theirs, table)
    await registry.storages.add(NFS)
    await other.load()
    await registry.storages.set_enabled("nfs", enabled=False)
    opened = len(opener.calls)
    opener.refusal = theirs.refusal = StorageIOError("the mount is away")
    for update in (registry.storages.update, registry.storages.update_while_serving):
        for capacity, ratio in ((100, 0.7), (100, 0.8), (0, 0.0)):
            await update(replace(NFS, capacity_bytes=capacity, used_percentage=ratio))
            await other.refresh()
            for each in (registry, other):
                (config,) = each.storages.all()
                assert (config.capacity_bytes, config.used_percentage, config.is_available) == (capacity, ratio, False)
    assert (len(opener.calls), theirs.calls) == (opened, [("open", "nfs"), ("disable", "nfs")])
    with pytest.raises(StorageIOError, match="away"):
        await registry.storages.update(replace(NFS, spec=NfsStorageSpec("/other"), capacity_bytes=5))


async def test_the_same_config_again_opens_the_medium_again() -> None:
    opener = Opener()
    registry = Registry(opener)
    await registry.storages.add(replace(NFS, capacity_bytes=5))
    await registry.storages.update(replace(NFS, capacity_bytes=5))
    assert opener.calls == [("open", "nfs")] * 2


def test_documents_say_everything() -> None:
    """With the names of the API."""
    reclaim: dict[str, Any] = {
        "trigger_strategy": {"used_percentage": 0.8, "hysteresis": 0.1},
        "policy": {"name": "lru", "ttl_seconds": 60, "ttl_sliding": True},
        "share": "fixed",
        "prefix_classes": [
            {
                "name": "head",
                "min_depth": 1,
                "end_depth": 4,
                "min_reads": 2,
                "instance_ids": ["i"],
                "priority": -5,
                "policy": {"name": "sieve"},
                "budget": 0.25,
            },
            {"name": "rest"},
        ],
        "instance_overrides": [{"instance_id": "i", "policy": {"name": "fifo"}, "weight": 2.5}],
    }
    document = {
        "storage_config": {
            "type": "file",
            "global_unique_name": "s",
            "storage_spec": {"root_path": "/r"},
            "capacity_bytes": 1 << 50,
            "used_percentage": 0.75,
        },
        "instance_group": {
            "name": "g",
            "storage_candidates": ["s"],
            "cache_config": {"reclaim_strategy": reclaim},
            "storage_guarantees": [{"storage_unique_name": "s", "guaranteed_bytes": 1 << 40}],
            "pin_budget_bytes": 1 << 41,
        },
    }
    storage, group = parse_startup_document(json.dumps(document))
    assert (storage.capacity_bytes, storage.used_percentage) == (1 << 50, 0.75)
    assert group.storage_guarantees == (StorageGuarantee("s", 1 << 40),)
    assert group.pin_budget_bytes == 1 << 41
    head = PrefixClass("head", 1, 4, 2, ("i",), -5, EvictionPolicy("sieve"), 0.25)
    assert group.cache_config.reclaim_strategy == CacheReclaimStrategy(
        storage_unique_name="s",
        trigger_strategy=TriggerStrategy(0, 0.8, 0.1),
        policy=EvictionPolicy("lru", 60, ttl_sliding=True),
        share="fixed",
        prefix_classes=(head, PrefixClass("rest")),
        instance_overrides=(InstanceOverride("i", EvictionPolicy("fifo"), 2.5),),
    )
    check_group(group)
    del reclaim["trigger_strategy"]["hysteresis"]
    _, group = parse_startup_document(json.dumps(document))
    assert group.cache_config.reclaim_strategy.trigger_strategy.hysteresis is None
    reclaim["prefix_classes"][0]["instance_ids"] = [5]
    with pytest.raises(
        InvalidArgumentError, match=r"prefix_classes\[0\].instance_ids is \[5\], allowed are lists of texts"
    ):
        parse_startup_document(json.dumps(document))
