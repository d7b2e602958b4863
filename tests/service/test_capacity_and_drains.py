"""Usage, limits above the group, garbage, scrubs, drains and the status of storages."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from redis_servers import Standalone
from test_transport_drivers import Api, eventually
from test_transport_process import manager
from test_transport_sites import Site, instance_fields, unique

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.removal import Remover
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
from kvcm.model.locations import StorageKey
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig, StorageType
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as report_pb
from kvcm.reclaim.deletion_executor import Backlog, DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service import usage_values
from kvcm.service.storage_api import DrainView
from kvcm.service.translate import fill, read
from kvcm.service.usage_report import IndexUsage, UsageSources, usage_report
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.store.memory import MemoryLease, MemoryTable

BLOCK = 64  # bytes of a block of an instance that a Site registers
_RECLAIMER = ("block_submit", "location_submit", "block_del", "location_del")


def _usage(site: Site, group: str) -> Any:
    return site.api.ok("CapacityService.GetUsage", instance_group=group)


def _set_quota(site: Site, name: str, capacity: int, mark: float = 0.0) -> None:
    quota = {"name": name, "capacity_bytes": capacity, "used_percentage": mark}
    site.api.ok("CapacityService.SetGlobalQuota", global_quota=quota)


# ── Usage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_usage_is_reported_by_group_type_storage_and_instance_invariant_4(site: Site) -> None:
    quota_name, storage, used = unique("quota"), unique("storage"), 3 * BLOCK
    limited = {"global_unique_name": storage, "dummy": {}, "capacity_bytes": 4000, "used_percentage": 0.5}
    site.api.ok("AdminService.AddStorage", storage=limited)
    limits = {"types": {"ST_DUMMY": 5000}, "max_keys": 1000, "pin_budget_bytes": 7}
    group = site.group(storage, capacity=10_000, ratio=0.8, global_quota_group_name=quota_name, **limits)
    _set_quota(site, quota_name, 20_000, 0.75)
    instance = site.instance(group)
    site.write(instance, range(3))
    expected = usage_values.GroupUsage(
        group,
        usage_values.Usage(used, 0, 10_000, 8000, 7800),
        (usage_values.TypeUsage(StorageType.ST_DUMMY, usage_values.Usage(used, 0, 5000, 4000, 3900)),),
        (usage_values.GroupStorageUsage(storage, used, 0),),
        (usage_values.InstanceUsage(instance, 3, 1000, used, "lru"),),
        pinned_bytes=0,
        pin_budget_bytes=7,
        refused_writes=0,
    )
    report = read(usage_values.UsageReport, _usage(site, group))
    assert report.groups == (expected,)
    assert [each.usage for each in report.storages] == [usage_values.Usage(used, 0, 4000, 2000, 1920)]
    assert report.global_quotas == (
        usage_values.GlobalQuotaUsage(quota_name, usage_values.Usage(used, 0, 20_000, 15_000, 14_600), (group,)),
    )


def test_writes_refused_for_want_of_space_are_counted(site: Site) -> None:
    group = site.group(capacity=2 * BLOCK, ratio=2.0)
    instance = site.instance(group)
    site.write(instance, [1, 2])
    refusal = site.api.refused("StartWriteCache", instance_id=instance, block_keys=[3])
    assert (refusal.code, group in refusal.message) == ("REACH_MAX_ENTITY_CAPACITY", True)
    assert _usage(site, group).groups[0].refused_writes == 1


# ── Global quotas ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_two_managers_each_reports_the_drains_of_the_other(tmp_path: Path, redis_standalone: Standalone) -> None:
    uri = f"kvcm.registry_storage.uri={redis_standalone.uri(f'test-{secrets.token_hex(8)}')}"
    with manager(tmp_path / "a", uri) as one, manager(tmp_path / "b", uri) as two, one.api() as a, two.api() as b:
        here, there = Site(a), Site(b)
        name = unique("quota")
        group = here.group(global_quota_group_name=name, delay_ms=3_600_000)
        instance = here.instance(group)
        here.write(instance, range(10))
        eventually(lambda: group in {each.name for each in b.ok("CapacityService.GetUsage").groups})
        there.api.ok("RemoveCache", instance_id=instance, block_keys=[8, 9])
        _set_quota(there, name, 1 << 30)
        for site in (here, there):
            total = _usage(site, group).groups[0].total
            assert (total.used_bytes, total.deleting_bytes) == (10 * BLOCK, 2 * BLOCK)
            eventually(lambda site=site: [each.name for each in _usage(site, group).global_quotas] == [name])
            assert _metrics(site.api)[_key("kvcm_group_used_bytes", group=group, type="total")] == 10 * BLOCK


# ── Metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


_Series = tuple[str, frozenset[tuple[str, str]]]


def _metrics(api: Api) -> dict[_Series, int | float]:
    found: dict[_Series, int | float] = {}
    for series in api.ok("AdminService.GetMetrics").metrics:
        key = (series.metric_name, frozenset((tag.tag_key, tag.tag_value) for tag in series.metric_tags))
        assert key not in found, key
        found[key] = getattr(series.metric_value, series.metric_value.WhichOneof("value"))
    return found


def _key(name: str, **tags: str) -> _Series:
    return name, frozenset(tags.items())


def test_an_instance_that_is_registered_again_is_reported_once(site: Site) -> None:
    """While blocks of its removal are still there: Prometheus takes no page that has a series twice."""
    group = site.group(delay_ms=3_600_000)
    instance = site.instance(group)
    site.write(instance, [1, 2])
    site.api.ok("AdminService.RemoveInstance", instance_group=group, instance_id=instance)
    site.api.ok("RegisterInstance", **instance_fields(instance, group))
    site.write(instance, [1])
    assert _metrics(site.api)[_key("cache_manager_instance.key_count", instance_group=group, instance_id=instance)] >= 1
    (usage,) = site.api.ok("CapacityService.GetUsage", instance_group=group).groups
    assert [each.instance_id for each in usage.instances] == [instance]


def test_series_of_capacity_exist_from_the_start_with_0(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage, capacity=1000, types={"ST_DUMMY": 500})
    metrics = _metrics(site.api)
    of_group, evicted = {"group": group}, {"group": group, "policy": "lru"}
    expected: dict[_Series, int | float] = {
        _key("kvcm_group_used_bytes", **of_group, type="dummy"): 0.0,
        _key("kvcm_group_quota_bytes", **of_group, type="total"): 1000.0,
        _key("kvcm_group_quota_bytes", **of_group, type="dummy"): 500.0,
        _key("kvcm_pinned_bytes", **of_group): 0.0,
        _key("kvcm_writes_refused_total", **of_group): 0,
        _key("kvcm_evicted_keys_total", **evicted, reason="group"): 0,
        _key("kvcm_evicted_bytes_total", **evicted, reason="type"): 0,
        _key("kvcm_reclaim_pending_deletes", storage=storage): 0.0,
        _key("kvcm_delete_failures_total", storage=storage): 0,
        _key("data_storage.storage_usage_ratio", type="dummy", unique_name=storage): 0.0,
    }
    assert expected.items() <= metrics.items()
    whole = [f"cache_reclaimer.{name}_count" for name in _RECLAIMER]
    whole += [f"schedule_plan_executor.{name}_task_count" for name in ("waiting", "executing")]
    assert all(isinstance(metrics[_key(name)], int) for name in whole)
    kinds = {dict(tags)["kind"] for name, tags in metrics if name == "kvcm_orphans_total"}
    assert kinds == {"without_bytes", "without_prefix", "without_metadata"}


def test_evictions_and_deletions_are_counted_by_group_policy_and_reason(site: Site) -> None:
    group = site.group(capacity=10 * BLOCK, ratio=0.5)
    instance = site.instance(group)
    before = _metrics(site.api)
    site.write(instance, range(10))
    evicted = _key("kvcm_evicted_keys_total", group=group, policy="lru", reason="group")

    def is_below_the_mark() -> bool:
        total = _usage(site, group).groups[0].total
        return bool(total.used_bytes <= total.high_mark_bytes and not total.deleting_bytes)

    eventually(is_below_the_mark)
    after = _metrics(site.api)
    gone = 10 - len(site.hits(instance, range(10)))
    assert gone >= 5
    assert after[evicted] == gone
    assert after[_key("kvcm_evicted_bytes_total", group=group, policy="lru", reason="group")] == gone * BLOCK
    assert after[_key("kvcm_group_used_bytes", group=group, type="total")] == (10 - gone) * BLOCK
    for name in _RECLAIMER:
        key = _key(f"cache_reclaimer.{name}_count")
        assert after[key] - before[key] >= gone


KEYS = [1, 2, 3]


def _drain(site: Site, name: str) -> dict[str, Any] | None:
    drains = {each.storage_unique_name: each for each in site.api.ok("StorageService.ListDrain").drains}
    found = drains.get(name)
    if found is None:
        return None
    return {"state": found.state, "left": found.left_bytes, "removal": found.is_removal, "reason": found.reason}


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and ".kvcm-" not in path.name]


def _write(site: Site, instance: str, keys: list[int]) -> list[str]:
    """Write blocks with their bytes; return the addresses."""
    uris = [uris["kv"] for uris in site.write(instance, keys)]
    for uri in uris:
        path = Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(BLOCK))
    return uris


def _status(api: Api, name: str) -> Any:
    (found,) = [s for s in api.ok("AdminService.ListStorage").storage_status if s.storage_unique_name == name]
    return found


def _file_storage(api: Api, root: Path) -> str:
    return Site(api).storage(nfs={"root_path": str(root), "key_count_per_file": 1})


def _of_files(api: Api, metric: str, storage: str) -> float:
    return _metrics(api)[_key(metric, storage=storage, type="file")]


def _draining(site: Site, storage: str) -> tuple[bool, float]:
    """Return whether a storage is draining, by its status and by its metric."""
    return _status(site.api, storage).is_draining, _of_files(site.api, "kvcm_storage_draining", storage)


def test_a_drained_storage_takes_no_writes_and_is_emptied(site: Site, tmp_path: Path) -> None:
    first, second = (_file_storage(site.api, tmp_path / name) for name in ("first", "second"))
    instance = site.instance(site.group(first, second))
    _write(site, instance, KEYS)
    assert _draining(site, first) == (False, 0.0)
    site.api.ok("StorageService.DrainStorage", storage_unique_name=first)
    assert _draining(site, first) == (True, 1.0)
    (uri,) = _write(site, instance, [4])
    assert uri.startswith(f"file://{second}/")
    eventually(lambda: _drain(site, first) == {"state": 2, "left": 0, "removal": False, "reason": ""})
    assert site.hits(instance, [4]) == [4]
    assert (_files(tmp_path / "first"), len(_files(tmp_path / "second"))) == ([], 1)
    site.api.ok("StorageService.CancelDrain", storage_unique_name=first)
    assert _drain(site, first) is None
    (uri,) = _write(site, instance, [5])
    assert uri.startswith(f"file://{first}/")


def test_the_reason_that_delays_a_drain_is_reported(site: Site) -> None:
    storage = site.storage()
    instance = site.instance(site.group(storage, pin_budget_bytes=1 << 20))
    site.write(instance, KEYS)
    pin = site.api.ok("PinService.PinPrefix", instance_id=instance, block_keys=KEYS[:2], owner="o", ttl_seconds=600)
    started = site.start(instance, [9])
    site.api.ok("StorageService.DrainStorage", storage_unique_name=storage)
    reason = "2 locations are pinned (kvcm pin list); 1 locations are being written"
    eventually(lambda: _drain(site, storage) == {"state": 1, "left": 3 * BLOCK, "removal": False, "reason": reason})
    site.finish(instance, started)
    site.api.ok("PinService.UnpinPrefix", instance_id=instance, pin_id=pin.pin_id)
    eventually(lambda: (_drain(site, storage) or {})["state"] == 2)


class Draining(NamedTuple):
    """Parts of a manager, and the view of its drains."""

    storages: StorageDirectory
    registry: Registry
    drains: StorageDrains
    leadership: Leadership
    view: DrainView

    async def reason(self) -> str:
        (only,) = await self.view.list_drains()
        return only.reason


@pytest.fixture
async def draining() -> AsyncIterator[Draining]:
    """A leader with one storage that is drained, of which it is not certain yet that nothing lies on it."""
    clock, storages = FakeClock(), StorageDirectory("cluster")
    registry = Registry(storages)
    cache = CacheManager(registry, storages, clock)
    remover = Remover(clock, registry.groups.find)
    drains = StorageDrains(registry, cache.open_caches, remover, clock, is_shared=True)
    leadership = Leadership("me", clock, 10.0, MemoryLease(clock), MemoryTable())
    await leadership.tick()
    await registry.storages.add(StorageConfig("s", DummyStorageSpec()))
    await drains.drain("s")
    view = DrainView(drains, storages, DeletionExecutor(storages, clock), leadership)
    yield Draining(storages, registry, drains, leadership, view)
    storages.close_all()


async def test_one_that_goes_on_has_no_reason(draining: Draining) -> None:
    (status,) = await draining.view.list_drains()
    assert (status.storage_unique_name, status.state, status.reason) == ("s", usage_values.DrainState.DRAIN_RUNNING, "")
    assert status.state.label == "running"


async def test_a_storage_that_is_down_is_the_reason(draining: Draining) -> None:
    draining.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "no mount"))
    assert await draining.reason() == "the storage is down: no mount"


async def test_an_instance_that_cannot_be_read_is_the_reason(draining: Draining) -> None:
    assert await draining.registry._table.replace("instance/old", None, b"garbage")
    await draining.registry.refresh()
    assert await draining.reason() == (
        "1 stored instances cannot be read, 'old' for one, so that nobody knows what they have there: run `kvcm index "
        "verify`"
    )


async def test_a_storage_that_is_not_open_is_the_reason(draining: Draining, tmp_path: Path) -> None:
    await draining.registry.storages.add(StorageConfig("t", NfsStorageSpec(str(tmp_path))))
    await draining.registry.storages.cancel_drain("s")
    await draining.drains.drain("t")
    draining.storages.close("t")
    assert await draining.reason() == "the storage is not open on this manager, which leads: nothing can be deleted"


async def test_a_manager_that_does_not_lead_names_the_leader(draining: Draining) -> None:
    await draining.leadership.demote()
    assert await draining.reason() == "no manager leads at the moment"


async def test_a_removal_says_that_it_can_be_taken_back(draining: Draining) -> None:
    await draining.registry.storages.retire("s", FakeClock().now())
    assert await draining.reason() == "it begins 10 s after the removal, so that it can be added again as it was"


def test_the_status_of_a_storage_is_shown_and_counted(tmp_path: Path) -> None:
    root, aside = tmp_path / "root", tmp_path / "aside"
    with manager(tmp_path, "kvcm.storage.probe_interval_ms=50") as process, process.api() as api:
        name = _file_storage(api, root)
        health = partial(_of_files, api, "kvcm_storage_health", name)
        status = eventually(lambda: _status(api, name).since_ms and _status(api, name))
        assert (status.is_enabled, status.health, status.reason, health()) == (True, pb.SH_UP, "", 1.0)
        assert 0 < status.medium_free_bytes <= status.medium_bytes
        assert 0 < status.probe_seconds < 60
        root.rename(aside)
        eventually(lambda: _status(api, name).health == pb.SH_DOWN)
        status = _status(api, name)
        assert (bool(status.reason), status.failed_probes >= 3, health()) == (True, True, 0.0)
        assert _of_files(api, "kvcm_storage_probe_failures_total", name) >= 3
        aside.rename(root)
        eventually(lambda: _status(api, name).health == pb.SH_UP)
        assert (_status(api, name).reason, health()) == ("", 1.0)
        assert 0 < _of_files(api, "kvcm_storage_probe_seconds", name) < 60


NFS, MOONCAKE = StorageType.ST_NFS, StorageType.ST_MOONCAKE
A, B = StorageKey("a", NFS), StorageKey("b", MOONCAKE)


def _group(name: str, capacity: int = 1000, ratio: float = 0.0, **changes: Any) -> InstanceGroup:
    strategy = CacheReclaimStrategy(
        reclaim_policy=ReclaimPolicy.POLICY_LFU, trigger_strategy=TriggerStrategy(changes.pop("used_size", 0), ratio)
    )
    quota = InstanceGroupQuota(capacity, changes.pop("types", ()))
    changes = {"storage_candidates": ("a",), "global_quota_group_name": "all", **changes}
    return InstanceGroup(name, quota=quota, cache_config=CacheConfig(strategy), **changes)


def _limited(name: str, capacity: int = 0) -> StorageConfig:
    return StorageConfig(name, DummyStorageSpec(), capacity_bytes=capacity)


def _index(
    group: str,
    used: dict[StorageKey, int],
    deleting: dict[StorageKey, int] | None = None,
    *,
    instance_id: str = "i",
    block: int = 1,
    most: int = 1 << 62,
) -> IndexUsage:
    instance = Instance("", group, instance_id, 4, (LocationSpecInfo("kv", block),), ModelDeployment())
    return IndexUsage(instance, 7, most, used, deleting or {})


_BYTES = st.dictionaries(st.sampled_from([A, B, StorageKey("a", MOONCAKE)]), st.integers(0, 1 << 60), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["x", "y", "gone"]), _BYTES), max_size=6))
def test_every_byte_is_in_each_breakdown_once_invariant_4(held: list[tuple[str, dict[StorageKey, int]]]) -> None:
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
    limits = ([_limited("a", 2000), _limited("b")], [GlobalQuota("all", 4000, 0.5)])
    held = ([_index("x", {A: 300, B: 5}, {A: 20}, most=50)], {"x": 3}, {"x": 2}, {"a": Backlog(3, 1, 1)})
    report = usage_report(UsageSources([group], *limits, *held))
    (found,) = report.groups
    assert found.total == usage_values.Usage(305, 20, 1000, 800, 780)
    assert [(kind.storage_type, kind.usage) for kind in found.types] == [
        (MOONCAKE, usage_values.Usage(5, 0)),
        (NFS, usage_values.Usage(300, 20, 500, 400, 390)),
    ]
    assert [(each.storage_unique_name, each.used_bytes, each.guaranteed_bytes) for each in found.storages] == [
        ("a", 300, 40),
        ("b", 5, 0),
    ]
    (instance,) = found.instances
    assert (instance.key_count, instance.max_key_count, instance.used_bytes, instance.policy) == (7, 50, 305, "lfu")
    assert (found.pinned_bytes, found.pin_budget_bytes, found.refused_writes) == (3, 9, 2)
    assert report.storages == (
        usage_values.StorageUsage("a", usage_values.Usage(300, 20, 2000, 1800, 1760), 40, 0.5, 4, 1),
        usage_values.StorageUsage("b", usage_values.Usage(5, 0), 0, 0.0, 0, 0),
    )
    assert report.global_quotas == (
        usage_values.GlobalQuotaUsage("all", usage_values.Usage(305, 20, 4000, 2000, 1920), ("x",)),
    )


def test_a_mark_leaves_space_for_the_largest_block_under_the_limit() -> None:
    of_x = [_index("x", {A: 1}, block=300), _index("x", {A: 1}, block=200, instance_id="j")]
    indexes = [*of_x, _index("y", {B: 1}, block=900)]
    report = usage_report(UsageSources([_group("x", ratio=1.0), _group("y")], [_limited("a", 1000)], [], indexes))
    assert report.groups[0].total.high_mark_bytes == 700
    assert report.storages[0].usage.high_mark_bytes == 700


def test_of_two_marks_of_a_group_the_lower_one_is_reported() -> None:
    for used_size, high in ((300, 300), (900, 800), (0, 800)):
        report = usage_report(UsageSources([_group("x", ratio=0.8, used_size=used_size)], [], [], []))
        assert report.groups[0].total.high_mark_bytes == high


def test_oversubscription_counts_the_quotas_of_groups_that_may_use_the_storage() -> None:
    others = [_group("y", 900, storage_candidates=("b", "a")), _group("z", 500, storage_candidates=())]
    groups = [_group("x", 700), *others]
    report = usage_report(UsageSources(groups, [_limited("a", 800), _limited("b")], [], []))
    assert [storage.oversubscription for storage in report.storages] == [2.0, 0.0]


def test_removed_groups_and_storages_that_still_have_bytes_are_reported_without_limits() -> None:
    report = usage_report(UsageSources([], [], [], [_index("gone", {A: 5})]))
    (group,), (storage,) = report.groups, report.storages
    assert (group.name, group.total) == ("gone", usage_values.Usage(5, 0, 0))
    assert [instance.policy for instance in group.instances] == [""]
    assert (storage.storage_unique_name, storage.usage) == ("a", usage_values.Usage(5, 0))


def test_one_group_is_reported_with_the_storages_and_quotas_that_it_draws_from() -> None:
    groups = [_group("x"), _group("y", storage_candidates=("b",), global_quota_group_name="other")]
    quotas = [GlobalQuota("other", 1), GlobalQuota("all", 1)]
    indexes = [_index("x", {A: 5, StorageKey("old", NFS): 1}), _index("y", {B: 7, A: 2})]
    sources = UsageSources(groups, [_limited("a"), _limited("b"), _limited("c")], quotas, indexes)
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
        [group], [_limited("a", 2000)], [GlobalQuota("all", 4000)], [_index("x", Counter({A: 2**62, B: 5}))]
    )
    report = usage_report(sources)
    message = report_pb.GetUsageResponse()
    fill(message, report)
    assert read(usage_values.UsageReport, report_pb.GetUsageResponse.FromString(message.SerializeToString())) == report
    without_header = {field.name for field in message.DESCRIPTOR.fields} - {"header"}
    assert {field.name for field, _ in message.ListFields()} == without_header


def test_a_guarantee_is_shown_as_far_as_the_quota_lets_a_group_use_it() -> None:
    kept = (StorageGuarantee("a", 40), StorageGuarantee("removed", 40))
    group = _group("x", types=(QuotaConfig(StorageType.ST_DUMMY, 30),), storage_guarantees=kept)
    report = usage_report(
        UsageSources([group], [_limited("a", 2000)], [], [_index("x", {StorageKey("removed", NFS): 1})])
    )
    assert {each.storage_unique_name: each.guaranteed_bytes for each in report.groups[0].storages} == {
        "a": 30,
        "removed": 0,
    }
    assert {each.storage_unique_name: each.guaranteed_bytes for each in report.storages} == {"a": 30, "removed": 0}
