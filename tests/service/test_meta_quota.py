"""Limits of StartWriteCache on both transports: group, storage type, keys, availability (decisions 2, 9, 17)."""

from __future__ import annotations

import pytest
from test_transport_drivers import eventually
from test_transport_sites import Site, masked

from kvcm.protocol import meta_service_pb2 as meta

BLOCK = 64  # bytes of a block of Site.instance


def test_a_prefix_that_fits_is_granted_and_the_rest_is_masked_with_the_reason(site: Site) -> None:
    group = site.group(capacity=2 * BLOCK)
    instance = site.instance(group)
    started = site.start(instance, [1, 2, 3, 4])
    assert masked(started) == [False, False, True, True]
    assert len(started.locations) == 2
    message = started.header.status.message
    assert [text for text in ("2 blocks", "quota.capacity", "128", group) if text not in message] == [], message
    site.finish(instance, started)
    assert site.hits(instance, [1, 2, 3, 4]) == [1, 2]


def test_a_type_limit_holds_and_another_type_takes_the_rest(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = site.storage(nfs={"root_path": str(tmp_path_factory.mktemp("files")), "key_count_per_file": 1})
    dummy = site.storage()
    instance = site.instance(site.group(files, dummy, types={"ST_NFS": BLOCK}))
    started = site.start(instance, [1, 2])
    assert [location.type for location in started.locations] == [meta.ST_NFS, meta.ST_DUMMY]


def test_max_key_count_grants_a_prefix_and_then_refuses(site: Site) -> None:
    instance = site.instance(site.group(max_keys=3))
    site.write(instance, [1, 2])
    started = site.start(instance, [3, 4])
    assert masked(started) == [False, True]
    assert "max_key_count" in started.header.status.message
    code, message = site.api.refused("StartWriteCache", instance_id=instance, block_keys=[5])
    assert (code, "max_key_count" in message) == ("REACH_MAX_ENTITY_CAPACITY", True)


def test_a_changed_key_limit_holds_for_the_next_write(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage, max_keys=2)
    instance = site.instance(group)
    assert len(site.write(instance, [1, 2, 3])) == 2
    site.update_group(group, storage, max_keys=3)
    assert len(site.write(instance, [1, 2, 3, 4])) == 1


def test_a_capacity_that_a_storage_is_given_holds_for_the_next_write_of_any_group(site: Site) -> None:
    storage = site.storage()
    first, second = (site.instance(site.group(storage)) for _ in range(2))
    site.write(first, [1, 2])
    limited = site.limit_storage(storage, 3 * BLOCK)
    assert len(site.write(second, [1, 2])) == 1
    code, message = site.api.refused("StartWriteCache", instance_id=first, block_keys=[3])
    assert code == "REACH_MAX_ENTITY_CAPACITY"
    assert f"storage {storage!r} is full" in message
    assert "capacity_bytes of 192" in message
    assert limited in site.api.ok("AdminService.ListStorage").storage


def test_removed_blocks_count_until_their_bytes_are_gone_decision_15(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage, capacity=BLOCK, delay_ms=600)
    instance = site.instance(group)
    site.write(instance, [1])
    site.api.ok("RemoveCache", instance_id=instance, block_keys=[1])
    assert site.api.refused("StartWriteCache", instance_id=instance, block_keys=[2]).code == "REACH_MAX_ENTITY_CAPACITY"
    eventually(lambda: _fits(site, instance, [2]))


def _fits(site: Site, instance: str, keys: list[int]) -> bool:
    """Whether all of these blocks get addresses."""
    return len(site.api.call("StartWriteCache", instance_id=instance, block_keys=keys).locations) == len(keys)


def test_a_changed_quota_is_in_force_at_once(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage, capacity=0)
    instance = site.instance(group)
    assert site.api.refused("StartWriteCache", instance_id=instance, block_keys=[1]).code == "REACH_MAX_ENTITY_CAPACITY"
    site.update_group(group, storage, capacity=BLOCK)
    assert len(site.write(instance, [1])) == 1


# ── Availability ─────────────────────────────────────────────────────────────────────────────────────────────────────

READS_AND_WRITES = {
    "GetCacheLocation": {"query_type": "QT_PREFIX_MATCH"},
    "GetCacheLocationLen": {"query_type": "QT_BATCH_GET"},
    "StartWriteCache": {},
}


@pytest.mark.parametrize("rpc", READS_AND_WRITES)
def test_with_all_storages_disabled_the_service_is_not_ready(site: Site, rpc: str) -> None:
    storage, other = site.storage(), site.storage()
    group = site.group(storage, other)
    instance = site.instance(group)
    site.write(instance, [1])
    for name in (storage, other):
        site.api.ok("AdminService.DisableStorage", storage_unique_name=name)
    code, message = site.api.refused(rpc, instance_id=instance, block_keys=[1], **READS_AND_WRITES[rpc])
    assert code == "SERVICE_NOT_READY"
    assert [text for text in (group, storage, other) if text not in message] == []


def test_blocks_on_a_disabled_storage_are_missing_and_visible_again_when_it_is_enabled_invariant_1(site: Site) -> None:
    first, second = site.storage(), site.storage()
    instance = site.instance(site.group(first, second))
    written = site.write(instance, [1, 2])
    site.api.ok("AdminService.DisableStorage", storage_unique_name=first)
    assert site.match(instance, [1, 2]) == []
    (rewritten,) = site.write(instance, [1])
    assert rewritten["kv"].startswith(f"dummy://{second}/")
    assert site.match(instance, [1, 2]) == [rewritten]
    site.api.ok("AdminService.EnableStorage", storage_unique_name=first)
    assert site.match(instance, [1, 2]) == written
    site.api.ok("AdminService.DisableStorage", storage_unique_name=second)
    assert site.match(instance, [1, 2]) == written


@pytest.mark.parametrize("strategy", ["CPS_ALWAYS_3FS", "CPS_ALWAYS_MOONCAKE"])
def test_a_strategy_for_writes_does_not_hide_what_can_be_read_invariant_1(site: Site, strategy: str) -> None:
    storage = site.storage()
    group = site.group(storage)
    instance = site.instance(group)
    written = site.write(instance, [1])
    site.update_group(group, storage, strategy=strategy)
    assert site.api.refused("StartWriteCache", instance_id=instance, block_keys=[2]).code == "SERVICE_NOT_READY"
    assert site.match(instance, [1]) == written


def test_a_removed_group_keeps_its_instances_readable_and_refuses_writes(site: Site) -> None:
    group = site.group()
    instance = site.instance(group)
    written = site.write(instance, [1])
    site.api.ok("AdminService.RemoveInstanceGroup", name=group)
    assert site.match(instance, [1]) == written
    code, message = site.api.refused("StartWriteCache", instance_id=instance, block_keys=[2])
    assert (code, group in message) == ("INSTANCE_NOT_EXIST", True)
