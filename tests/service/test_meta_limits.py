"""Limits, pins, checksums and memory pools, as engines meet them."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from test_pool_cases import MIB, pool_spec
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess
from test_transport_sites import Site, mask, masked, unique

from kvcm.model.uri import LocationUri
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


def _budgeted(site: Site, blocks: int = 10) -> str:
    return site.instance(site.group(pin_budget_bytes=blocks * BLOCK))


def _pin(site: Site, instance: str, keys: list[int], seconds: int = 60, owner: str = "me") -> Any:
    return site.api.ok("PinService.PinPrefix", instance_id=instance, block_keys=keys, owner=owner, ttl_seconds=seconds)


def _pins(site: Site, instance: str) -> list[Any]:
    return list(site.api.ok("PinService.ListPins", instance_id=instance).pins)


def _unpin(site: Site, instance: str, pin_id: str) -> None:
    site.api.ok("PinService.UnpinPrefix", instance_id=instance, pin_id=pin_id)


def test_a_pin_says_what_it_holds_and_is_listed(site: Site) -> None:
    instance = _budgeted(site)
    site.write(instance, [1, 2, 3])
    before = time.time()
    pin = _pin(site, instance, [1, 2, 9, 3], 60, "ops:ü")
    assert (pin.pinned_blocks, pin.pinned_bytes) == (2, 2 * BLOCK)
    assert before + 60 <= pin.deadline_ms / 1000 + 0.001 <= time.time() + 60.001
    (listed,) = _pins(site, instance)
    assert (listed.pin_id, listed.owner, listed.blocks, listed.bytes) == (pin.pin_id, "ops:ü", 2, 2 * BLOCK)
    assert (listed.deadline_ms, listed.last_block_key) == (pin.deadline_ms, 2)
    for _ in range(2):
        _unpin(site, instance, pin.pin_id)
    assert _pins(site, instance) == []


@pytest.mark.parametrize(
    ("retention", "text"),
    [
        ({"priority": 101}, "retention.priority is 101"),
        ({"priority": -101}, "retention.priority is -101"),
        ({"ttl_seconds": -1}, "retention.ttl_seconds is -1"),
    ],
)
def test_a_bad_hint_does_not_consume_the_session(site: Site, retention: dict[str, int], text: str) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    code, message = site.api.refused("FinishWriteCache", retention=retention, **fields)
    assert (code, text in message) == ("INVALID_ARGUMENT", True), message
    assert site.statuses(instance, [1]) == ["CLS_WRITING"]
    site.api.ok("FinishWriteCache", retention={"priority": -100, "ttl_seconds": 3600}, **fields)
    assert site.hits(instance, [1]) == [1]


def test_missing_files_are_confirmed_and_forgotten(site: Site, server: ManagerProcess) -> None:
    root = server.data_dir / unique("files")
    group = site.group(site.storage(nfs={"root_path": str(root), "key_count_per_file": 1}))
    instance = site.instance(group)
    written = [location["kv"] for location in site.write(instance, [1, 2, 3])]
    for uri in map(LocationUri.parse, written[1:]):
        Path(uri.path).parent.mkdir(parents=True, exist_ok=True)
        Path(uri.path).write_bytes(bytes(uri.size))
    parts = [{"block_key": key, "uri": uri} for key, uri in zip([1, 2, 3], written, strict=True)]
    stranger = {"block_key": 1, "uri": "file://elsewhere/x?size=64"}
    report = site.api.ok("PinService.ReportMissing", instance_id=instance, parts=[*parts[:2], stranger])
    assert (report.removed_locations, report.unconfirmed_parts) == (1, 2)
    assert site.hits(instance, [1, 2, 3]) == [2, 3]
    root.rename(server.data_dir / unique("unmounted"))
    code, message = site.api.refused("PinService.ReportMissing", instance_id=instance, parts=parts[1:])
    assert code == "IO_ERROR", message
    assert site.hits(instance, [1, 2, 3]) == [2, 3]


K_V = {
    "location_spec_infos": [{"name": "k", "size": 8}, {"name": "v", "size": 8}],
    "location_spec_groups": [{"name": "only k", "spec_names": ["k"]}, {"name": "only v", "spec_names": ["v"]}],
}
MOST = 2**64 - 1


def _told(**checksums: int) -> dict[str, Any]:
    return {"location_specs": [{"name": name, "checksum": checksum} for name, checksum in checksums.items()]}


def _answered(site: Site, instance: str, keys: list[int], **fields: Any) -> list[dict[str, int]]:
    fields = {"query_type": "QT_BATCH_GET"} | fields
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=keys, **fields)
    return [{spec.name: spec.checksum for spec in location.location_specs} for location in answer.locations]


def _mismatches(site: Site, group: str) -> dict[str, int]:
    """The counter of corrupt parts of a group by storage."""
    return {
        tags["storage"]: series.metric_value.int_value
        for series in site.api.ok("AdminService.GetMetrics").metrics
        if series.metric_name == "kvcm_checksum_mismatch_total"
        and (tags := {tag.tag_key: tag.tag_value for tag in series.metric_tags})["group"] == group
    }


def test_what_is_told_at_the_finish_is_answered_with_the_uris(site: Site) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=[_told(v=MOST, k=1), _told(k=2**63)])
    assert _answered(site, instance, [1, 2]) == [{"k": 1, "v": MOST}, {"k": 2**63, "v": 0}]
    assert _answered(site, instance, [1], query_type="QT_PREFIX_MATCH") == [{"k": 1, "v": MOST}]
    assert _answered(site, instance, [1], location_spec_names=["v"]) == [{"v": MOST}]
    (found,) = site.metas(instance, [1], detail_level=1)
    assert [spec.get("checksum") for spec in found["locations"][0]["location_specs"]] == ["1", str(MOST)]


@pytest.mark.parametrize(("told", "recorded"), [(5, 5), (-1, MOST), (-(2**63), 2**63), (0, 0)])
def test_the_checksum_of_a_location_with_one_part_is_that_of_the_part(site: Site, told: int, recorded: int) -> None:
    """It has a sign on the wire, and 64 bits either way."""
    instance = site.instance()
    site.finish(instance, site.start(instance, [1]), locations=[{"checksum": told}])
    assert _answered(site, instance, [1]) == [{"kv": recorded}]
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=[1], query_type="QT_BATCH_GET")
    assert [location.checksum for location in answer.locations] == [told]


@pytest.mark.parametrize(
    ("locations", "texts"),
    [
        ([_told(k=1)], ["locations has 1 entries", "2"]),
        ([{}, {}, _told(k=1)], ["locations has 3 entries", "2"]),
        ([_told(k=1), _told(w=1)], ["locations[1]", "'w'"]),
        ([{}] * 65_537, ["locations has 65537 entries", "at most 65536"]),
        ([{"location_specs": [{}] * 1025}, {}], ["locations[0] has 1025 location_specs", "at most 1024"]),
        (
            [{"location_specs": [{"name": "k", "checksum": 1}, {"name": "k", "checksum": 2}]}, {}],
            ["locations[0]", "'k' twice"],
        ),
    ],
)
def test_locations_that_do_not_fit_do_not_consume_the_session(
    site: Site, locations: list[dict[str, Any]], texts: list[str]
) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(2)}
    code, message = site.api.refused("FinishWriteCache", locations=locations, **fields)
    assert (code, [text for text in texts if text not in message]) == ("INVALID_ARGUMENT", []), message
    assert site.statuses(instance, [1, 2]) == ["CLS_WRITING"] * 2
    site.finish(instance, started, locations=[_told(k=1), _told(v=2)])
    assert _answered(site, instance, [1, 2]) == [{"k": 1, "v": 0}, {"k": 0, "v": 2}]


def test_a_corrupt_part_is_believed_with_its_checksum_only(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage)
    instance = site.instance(group)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=[_told(kv=MOST), _told(kv=7)])
    uris = [location.location_specs[0].uri for location in started.locations]
    assert _mismatches(site, group) == {storage: 0}

    def report(checksum: int) -> tuple[int, int]:
        part = {"block_key": 1, "uri": uris[0], "mismatched_checksum": checksum}
        answer = site.api.ok("PinService.ReportMissing", instance_id=instance, parts=[part])
        return answer.removed_locations, answer.unconfirmed_parts

    assert report(7) == (0, 1)
    assert site.hits(instance, [1, 2]) == [1, 2]
    assert report(MOST) == (1, 0)
    assert site.hits(instance, [1, 2]) == [2]
    assert report(MOST) == (0, 1)
    assert _mismatches(site, group) == {storage: 1}
    assert len(site.start(instance, [1]).locations) == 1


KEYS = [1, 2, 3]


class PoolSite:
    """A group on pools of two nodes, each told of, and an instance in it."""

    def __init__(self, site: Site, *more: str) -> None:
        self.site = site
        self.nodes = unique("node"), unique("node")
        self.pools = [site.storage(**pool_spec(node)) for node in self.nodes]
        for pool in range(2):
            self.report(pool)
        self.instance = site.instance(site.group(*self.pools, *more))

    def report(self, pool: int, generation: int = 7, **fields: Any) -> Any:
        return self.site.api.ok(
            "PoolService.ReportPool",
            storage_unique_name=self.pools[pool],
            node_id=self.nodes[pool],
            generation=generation,
            capacity_bytes=MIB,
            **fields,
        )

    def storages(self, found: list[dict[str, str]]) -> list[str]:
        return [LocationUri.parse(uri).storage for entry in found for uri in entry.values()]

    def length(self, **fields: Any) -> int:
        query = {"block_keys": KEYS, "query_type": "QT_PREFIX_MATCH", **fields}
        answer = self.site.api.ok("GetCacheLocationLen", instance_id=self.instance, **query)
        return int(answer.cache_location_len)


def test_memory_is_given_to_its_own_node_alone(site: Site) -> None:
    shared = site.storage()
    pools = PoolSite(site, shared)
    first, second = pools.nodes
    (uris,) = ([*entry.values()] for entry in site.write(pools.instance, KEYS[:1], node_id=first))
    place = LocationUri.parse(uris[0])
    assert (place.scheme, place.storage, place.node_id, place.size) == ("pace", pools.pools[0], first, 64)
    site.write(pools.instance, KEYS[1:], node_id=first)
    assert pools.storages(site.match(pools.instance, KEYS, node_id=first)) == [pools.pools[0]] * 3
    for other in (second, "", "elsewhere"):
        assert site.match(pools.instance, KEYS, node_id=other) == []
        assert pools.length(node_id=other) == 0
    assert pools.length(node_id=first) == 3
    # For them the blocks are not there: they write them to where they can.
    assert pools.storages(site.write(pools.instance, KEYS, node_id=second)) == [pools.pools[1]] * 3
    assert pools.storages(site.write(pools.instance, KEYS)) == [shared] * 3
    assert masked(site.start(pools.instance, KEYS, node_id=first)) == 3
    assert pools.storages(site.match(pools.instance, KEYS, node_id=second)) == [pools.pools[1]] * 3
    assert pools.storages(site.match(pools.instance, KEYS)) == [shared] * 3
    assert pools.storages(site.match(pools.instance, KEYS, "QT_BATCH_GET", node_id=first)) == [pools.pools[0]] * 3


def test_a_new_generation_forgets_what_was_there_and_its_space_comes_back(site: Site) -> None:
    pools = PoolSite(site)
    node = pools.nodes[0]
    site.write(pools.instance, KEYS, node_id=node)
    site.write(pools.instance, KEYS, node_id=pools.nodes[1])
    assert not pools.report(0).is_new_generation
    assert pools.report(0, 8).is_new_generation
    assert eventually(lambda: not site.match(pools.instance, KEYS, node_id=node) or None)
    assert len(site.match(pools.instance, KEYS, node_id=pools.nodes[1])) == 3
    site.write(pools.instance, KEYS, node_id=node)
    assert len(site.match(pools.instance, KEYS, node_id=node)) == 3


def test_memory_that_is_as_it_was_handed_out_is_not_given_up(site: Site) -> None:
    pools = PoolSite(site)
    site.write(pools.instance, KEYS, node_id=pools.nodes[0])
    (entry, *_) = site.match(pools.instance, KEYS, node_id=pools.nodes[0])
    part = {"block_key": KEYS[0], "uri": entry["kv"]}
    answer = site.api.ok("PinService.ReportMissing", instance_id=pools.instance, parts=[part])
    assert (answer.removed_locations, answer.unconfirmed_parts) == (0, 1)


def test_a_pool_that_is_full_makes_way_for_the_next_candidate_in_the_same_call(site: Site) -> None:
    shared = site.storage()
    pools = PoolSite(site, shared)
    node = pools.nodes[0]
    keys = list(range(1, 1 + MIB // 4096))
    assert set(pools.storages(site.write(pools.instance, keys, node_id=node))) == {pools.pools[0]}
    assert pools.storages(site.write(pools.instance, [10_000, 10_001], node_id=node)) == [shared] * 2
    site.api.ok("RemoveCache", instance_id=pools.instance, block_keys=keys[:10])
    numbers = count(20_000)
    assert eventually(
        lambda: pools.storages(site.write(pools.instance, [next(numbers)], node_id=node)) == [pools.pools[0]] or None
    ), "it is not passed over for good"


def test_a_pool_is_listed_and_told_to_engines_with_its_node_and_size(site: Site) -> None:
    name = site.storage(**pool_spec("n.1"))
    (listed,) = [s for s in site.api.ok("AdminService.ListStorage").storage if s.global_unique_name == name]
    assert (listed.tair_mem_pool.node_id, listed.tair_mem_pool.capacity_bytes) == ("n.1", MIB)
    fields = {"instance_id": unique("instance"), "instance_group": site.group(name), "block_size": 4}
    specs = {"location_spec_infos": [{"name": "kv", "size": 64}]}
    model = {"model_deployment": {"model_name": "m", "dtype": "bf16"}}
    configs = site.api.ok("RegisterInstance", **fields, **specs, **model).storage_configs
    assert configs == (
        f'[{{"type":"pace","is_available":true,"global_unique_name":"{name}","storage_spec":'
        f'{{"enable_vipserver":false,"domain":"","timeout":0,"node_id":"n.1","capacity_bytes":{MIB}}}}}]'
    )
