"""Usage, limits above the group, garbage and scrubs through the admin calls on both transports."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from redis_servers import Standalone
from test_transport_drivers import Api, eventually
from test_transport_process import manager
from test_transport_sites import Site, unique

BLOCK = 64  # bytes of a block of an instance that a Site registers
OLD = time.time() - 7200
_RECLAIMER = ("block_submit", "location_submit", "block_del", "location_del")


def _usage(site: Site, group: str) -> Any:
    return site.api.ok("CapacityService.GetUsage", instance_group=group)


def _limits(usage: Any) -> tuple[int, ...]:
    return (
        usage.used_bytes,
        usage.deleting_bytes,
        usage.capacity_bytes,
        usage.high_mark_bytes,
        usage.low_mark_bytes,
    )


def _set_quota(site: Site, name: str, capacity: int, mark: float = 0.0) -> None:
    quota = {"name": name, "capacity_bytes": capacity, "used_percentage": mark}
    site.api.ok("CapacityService.SetGlobalQuota", global_quota=quota)


# ── Usage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_usage_is_told_by_group_type_storage_and_instance_invariant_4(site: Site) -> None:
    quota_name = unique("quota")
    storage, other = unique("storage"), site.storage()
    site.api.ok(
        "AdminService.AddStorage",
        storage={"global_unique_name": storage, "dummy": {}, "capacity_bytes": 4000, "used_percentage": 0.5},
    )
    guarantee = [{"storage_unique_name": storage, "guaranteed_bytes": 100}]
    group = site.group(
        storage, other, capacity=10_000, ratio=0.8, types={"ST_DUMMY": 5000}, max_keys=1000, pin_budget_bytes=7,
        storage_guarantees=guarantee, global_quota_group_name=quota_name,
    )  # fmt: skip
    _set_quota(site, quota_name, 20_000, 0.75)
    instance = site.instance(group)
    site.write(instance, range(3))
    answer = _usage(site, group)
    (found,) = answer.groups
    assert (found.name, _limits(found.total)) == (group, (3 * BLOCK, 0, 10_000, 8000, 7800))
    assert [(kind.storage_type, _limits(kind.usage)) for kind in found.types] == [(6, (3 * BLOCK, 0, 5000, 4000, 3900))]
    assert {each.storage_unique_name: (each.used_bytes, each.guaranteed_bytes) for each in found.storages} == {
        storage: (3 * BLOCK, 100),
        other: (0, 0),
    }
    (of_instance,) = found.instances
    assert (of_instance.instance_id, of_instance.used_bytes) == (instance, 3 * BLOCK)
    assert (of_instance.key_count, of_instance.max_key_count, of_instance.policy) == (3, 1000, "lru")
    assert (found.pinned_bytes, found.pin_budget_bytes, found.refused_writes) == (0, 7, 0)
    storages = {each.storage_unique_name: each for each in answer.storages}
    assert storages.keys() == {storage, other}
    assert _limits(storages[storage].usage) == (3 * BLOCK, 0, 4000, 2000, 1920)
    assert (storages[storage].guaranteed_bytes, storages[storage].oversubscription) == (100, 2.5)
    assert _limits(storages[other].usage) == (0, 0, -1, -1, -1)
    (quota,) = answer.global_quotas
    assert (quota.name, list(quota.groups)) == (quota_name, [group])
    assert _limits(quota.usage) == (3 * BLOCK, 0, 20_000, 15_000, 14_600)


def test_what_is_being_deleted_is_told_apart_until_it_is_gone_decision_15(site: Site) -> None:
    group = site.group(delay_ms=700)
    instance = site.instance(group)
    site.write(instance, range(5))
    site.api.ok("RemoveCache", instance_id=instance, block_keys=[3, 4])
    total = _usage(site, group).groups[0].total
    assert (total.used_bytes, total.deleting_bytes) == (5 * BLOCK, 2 * BLOCK)

    def is_freed() -> bool:
        total = _usage(site, group).groups[0].total
        return (total.used_bytes, total.deleting_bytes) == (3 * BLOCK, 0)

    eventually(is_freed)


def test_writes_refused_for_want_of_room_are_counted(site: Site) -> None:
    group = site.group(capacity=2 * BLOCK, ratio=2.0)
    instance = site.instance(group)
    site.write(instance, [1, 2])
    refusal = site.api.refused("StartWriteCache", instance_id=instance, block_keys=[3])
    assert (refusal.code, group in refusal.message) == ("REACH_MAX_ENTITY_CAPACITY", True)
    assert _usage(site, group).groups[0].refused_writes == 1


def test_usage_of_everything_has_every_group_and_storage_once_by_name(site: Site) -> None:
    group = site.group()
    answer = site.api.ok("CapacityService.GetUsage")
    for names in (
        [each.name for each in answer.groups],
        [each.storage_unique_name for each in answer.storages],
        [each.name for each in answer.global_quotas],
    ):
        assert names == sorted(set(names))
    assert {group, "default"} <= {each.name for each in answer.groups}
    configured = {each.global_unique_name for each in site.api.ok("AdminService.ListStorage").storage}
    assert configured <= {each.storage_unique_name for each in answer.storages}


# ── Global quotas ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_global_quota_is_set_listed_replaced_and_removed(site: Site) -> None:
    def listed() -> dict[str, tuple[int, float]]:
        quotas = site.api.ok("CapacityService.ListGlobalQuota").global_quotas
        assert [quota.name for quota in quotas] == sorted(quota.name for quota in quotas)
        return {quota.name: (quota.capacity_bytes, quota.used_percentage) for quota in quotas}

    name = unique("quota")
    _set_quota(site, name, 1 << 62, 0.5)
    assert listed()[name] == (1 << 62, 0.5)
    _set_quota(site, name, 7)
    assert listed()[name] == (7, 0.0)
    site.api.ok("CapacityService.RemoveGlobalQuota", name=name)
    assert name not in listed()


def test_a_global_quota_limits_all_its_groups_together_at_once(site: Site) -> None:
    name = unique("quota")
    first, second = (site.instance(site.group(global_quota_group_name=name, ratio=2.0)) for _ in range(2))
    site.write(first, range(3))
    _set_quota(site, name, 4 * BLOCK, 2.0)
    site.write(second, [1])
    refusal = site.api.refused("StartWriteCache", instance_id=second, block_keys=[2])
    assert (refusal.code, repr(name) in refusal.message) == ("REACH_MAX_ENTITY_CAPACITY", True)
    site.api.ok("CapacityService.RemoveGlobalQuota", name=name)
    site.write(second, [2])


def test_of_two_managers_of_one_store_each_tells_what_the_other_does(
    tmp_path: Path, redis_standalone: Standalone
) -> None:
    uri = f"kvcm.registry_storage.uri={redis_standalone.uri(f'test-{secrets.token_hex(8)}')}"
    with manager(tmp_path / "a", uri) as one, manager(tmp_path / "b", uri) as two, one.api() as a, two.api() as b:
        here, there = Site(a), Site(b)
        name = unique("quota")
        group = here.group(global_quota_group_name=name, delay_ms=60_000)
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


# ── Garbage and scrubs ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def files(site: Site, tmp_path: Path) -> tuple[str, str]:
    """A storage of files and an instance that writes to it."""
    storage = site.storage(nfs={"root_path": str(tmp_path), "key_count_per_file": 1})
    return storage, site.instance(site.group(storage))


def _write_files(uris: list[dict[str, str]]) -> list[Path]:
    """Do what an engine does: store the bytes. Returns their files, which are old enough to be judged."""
    paths = [
        Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])
        for each in uris
        for uri in each.values()
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(BLOCK))
        os.utime(path, (OLD, OLD))
    return paths


def test_blocks_without_bytes_are_counted_by_a_dry_run_and_freed_otherwise(site: Site, files: tuple[str, str]) -> None:
    _, instance = files
    paths = _write_files(site.write(instance, range(4)))
    paths[3].unlink()
    for fields, without in (({}, 0), ({"check_bytes": True}, 1)):
        found = site.api.ok("CapacityService.CollectGarbage", instance_id=instance, dry_run=True, **fields)
        assert (found.blocks, found.without_bytes) == (4, without)
    assert site.hits(instance, range(4)) == [0, 1, 2, 3]
    found = site.api.ok("CapacityService.CollectGarbage", instance_id=instance, check_bytes=True)
    assert (found.without_bytes, found.freed_bytes) == (1, BLOCK)
    assert site.hits(instance, range(4)) == [0, 1, 2]


def test_files_that_no_metadata_knows_are_counted_by_a_dry_run_and_deleted_otherwise(
    site: Site, files: tuple[str, str]
) -> None:
    storage, instance = files
    known = _write_files(site.write(instance, range(3)))
    orphan, young = (known[0].with_name(known[0].name + suffix) for suffix in ("x", "y"))
    orphan.write_bytes(bytes(10))
    young.write_bytes(bytes(10))
    os.utime(orphan, (OLD, OLD))
    scrub = {"storage_unique_name": storage}
    found = site.api.ok("CapacityService.ScrubStorage", dry_run=True, **scrub)
    assert (found.objects, found.orphans, found.too_young, found.deleted, found.failed) == (5, 1, 1, 0, 0)
    assert orphan.exists()
    found = site.api.ok("CapacityService.ScrubStorage", **scrub)
    assert (found.orphans, found.deleted, found.failed) == (1, 1, 0)
    assert [path.exists() for path in (*known, young, orphan)] == [True] * 4 + [False]


# ── Metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _metrics(api: Api) -> dict[tuple[str, frozenset[tuple[str, str]]], int | float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], int | float] = {}
    for series in api.ok("AdminService.GetMetrics").metrics:
        key = (series.metric_name, frozenset((tag.tag_key, tag.tag_value) for tag in series.metric_tags))
        assert key not in found, key
        found[key] = getattr(series.metric_value, series.metric_value.WhichOneof("value"))
    return found


def _key(name: str, **tags: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(tags.items())


def test_series_of_capacity_exist_from_the_start_with_0(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage, capacity=1000, types={"ST_DUMMY": 500})
    metrics = _metrics(site.api)
    expected: dict[tuple[str, frozenset[tuple[str, str]]], int | float] = {
        _key("kvcm_group_used_bytes", group=group, type="total"): 0.0,
        _key("kvcm_group_used_bytes", group=group, type="dummy"): 0.0,
        _key("kvcm_group_quota_bytes", group=group, type="total"): 1000.0,
        _key("kvcm_group_quota_bytes", group=group, type="dummy"): 500.0,
        _key("kvcm_pinned_bytes", group=group): 0.0,
        _key("kvcm_writes_refused_total", group=group): 0,
        _key("kvcm_evicted_keys_total", group=group, policy="lru", reason="group"): 0,
        _key("kvcm_evicted_bytes_total", group=group, policy="lru", reason="type"): 0,
        _key("kvcm_reclaim_pending_deletes", storage=storage): 0.0,
        _key("kvcm_delete_failures_total", storage=storage): 0,
        _key("data_storage.storage_usage_ratio", type="dummy", unique_name=storage): 0.0,
    }
    assert {key: metrics.get(key) for key in expected} == expected
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
