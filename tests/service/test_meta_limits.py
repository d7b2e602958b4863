"""Limits, pins, checksums and memory pools, as engines meet them."""

from __future__ import annotations

from typing import Any

import pytest
from test_pool_cases import MIB, pool_spec
from test_transport_sites import Site, mask, masked, unique

from kvcm.model.uri import LocationUri

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


# ── Availability ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rpc", "fields"),
    [
        ("GetCacheLocation", {"query_type": "QT_PREFIX_MATCH"}),
        ("GetCacheLocationLen", {"query_type": "QT_BATCH_GET"}),
        ("StartWriteCache", {}),
    ],
)
def test_with_all_storages_disabled_the_service_is_not_ready(site: Site, rpc: str, fields: dict[str, str]) -> None:
    storage, other = site.storage(), site.storage()
    group = site.group(storage, other)
    instance = site.instance(group)
    site.write(instance, [1])
    for name in (storage, other):
        site.api.ok("AdminService.DisableStorage", storage_unique_name=name)
    code, message = site.api.refused(rpc, instance_id=instance, block_keys=[1], **fields)
    assert code == "SERVICE_NOT_READY"
    assert [text for text in (group, storage, other) if text not in message] == []


@pytest.mark.parametrize("strategy", ["CPS_ALWAYS_3FS", "CPS_ALWAYS_MOONCAKE"])
def test_a_strategy_for_writes_does_not_hide_readable_blocks_invariant_1(site: Site, strategy: str) -> None:
    storage = site.storage()
    group = site.group(storage)
    instance = site.instance(group)
    written = site.write(instance, [1])
    site.update_group(group, storage, strategy=strategy)
    assert site.api.refused("StartWriteCache", instance_id=instance, block_keys=[2]).code == "SERVICE_NOT_READY"
    assert site.match(instance, [1]) == written


@pytest.mark.parametrize(("hint", "value"), [("priority", 101), ("priority", -101), ("ttl_seconds", -1)])
def test_a_bad_hint_does_not_consume_the_session(site: Site, hint: str, value: int) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    code, message = site.api.refused("FinishWriteCache", retention={hint: value}, **fields)
    assert (code, f"retention.{hint} is {value}" in message) == ("INVALID_ARGUMENT", True), message
    assert site.statuses(instance, [1]) == ["CLS_WRITING"]
    site.api.ok("FinishWriteCache", retention={"priority": -100, "ttl_seconds": 3600}, **fields)
    assert site.hits(instance, [1]) == [1]


K_V = {
    "location_spec_infos": [{"name": "k", "size": 8}, {"name": "v", "size": 8}],
    "location_spec_groups": [{"name": "only k", "spec_names": ["k"]}, {"name": "only v", "spec_names": ["v"]}],
}
MOST = 2**64 - 1


def _checksums(**checksums: int) -> dict[str, Any]:
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


def test_checksums_of_a_finish_are_answered_with_the_uris(site: Site) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=[_checksums(v=MOST, k=1), _checksums(k=2**63)])
    assert _answered(site, instance, [1, 2]) == [{"k": 1, "v": MOST}, {"k": 2**63, "v": 0}]
    assert _answered(site, instance, [1], query_type="QT_PREFIX_MATCH") == [{"k": 1, "v": MOST}]
    assert _answered(site, instance, [1], location_spec_names=["v"]) == [{"v": MOST}]
    (found,) = site.metas(instance, [1], detail_level=1)
    assert [spec.get("checksum") for spec in found["locations"][0]["location_specs"]] == ["1", str(MOST)]


@pytest.mark.parametrize(("sent", "recorded"), [(5, 5), (-1, MOST), (-(2**63), 2**63), (0, 0)])
def test_the_checksum_of_a_location_with_one_part_is_that_of_the_part(site: Site, sent: int, recorded: int) -> None:
    """It has a sign on the wire, and 64 bits either way."""
    instance = site.instance()
    site.finish(instance, site.start(instance, [1]), locations=[{"checksum": sent}])
    assert _answered(site, instance, [1]) == [{"kv": recorded}]
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=[1], query_type="QT_BATCH_GET")
    assert [location.checksum for location in answer.locations] == [sent]


@pytest.mark.parametrize(
    ("locations", "texts"),
    [
        ([_checksums(k=1)], ["locations has 1 entries", "2"]),
        ([{}, {}, _checksums(k=1)], ["locations has 3 entries", "2"]),
        ([_checksums(k=1), _checksums(w=1)], ["locations[1]", "'w'"]),
        ([{}] * 65_537, ["locations has 65537 entries", "at most 65536"]),
        ([{"location_specs": [{}] * 1025}, {}], ["locations[0] has 1025 location_specs", "at most 1024"]),
        (
            [{"location_specs": [{"name": "k", "checksum": 1}, {"name": "k", "checksum": 2}]}, {}],
            ["locations[0]", "'k' twice"],
        ),
    ],
)
def test_unfitting_locations_keep_the_session(site: Site, locations: list[dict[str, Any]], texts: list[str]) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(2)}
    code, message = site.api.refused("FinishWriteCache", locations=locations, **fields)
    assert (code, [text for text in texts if text not in message]) == ("INVALID_ARGUMENT", []), message
    assert site.statuses(instance, [1, 2]) == ["CLS_WRITING"] * 2
    site.finish(instance, started, locations=[_checksums(k=1), _checksums(v=2)])
    assert _answered(site, instance, [1, 2]) == [{"k": 1, "v": 0}, {"k": 0, "v": 2}]


def test_a_corrupt_part_is_believed_with_its_checksum_only(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage)
    instance = site.instance(group)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=[_checksums(kv=MOST), _checksums(kv=7)])
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


def _length(site: Site, instance: str, **fields: Any) -> int:
    query = {"instance_id": instance, "block_keys": KEYS, "query_type": "QT_PREFIX_MATCH", **fields}
    return int(site.api.ok("GetCacheLocationLen", **query).cache_location_len)


def _storages(found: list[dict[str, str]]) -> list[str]:
    return [LocationUri.parse(uri).storage for entry in found for uri in entry.values()]


def test_memory_is_given_to_its_own_node_alone(site: Site) -> None:
    shared, nodes = site.storage(), (unique("node"), unique("node"))
    own, foreign = [site.storage(**pool_spec(node)) for node in nodes]
    for pool, node in zip((own, foreign), nodes, strict=True):
        report = {"storage_unique_name": pool, "node_id": node, "generation": 7, "capacity_bytes": MIB}
        site.api.ok("PoolService.ReportPool", **report)
    instance = site.instance(site.group(own, foreign, shared))
    first, second = nodes
    (uris,) = ([*entry.values()] for entry in site.write(instance, KEYS[:1], node_id=first))
    place = LocationUri.parse(uris[0])
    assert (place.scheme, place.storage, place.node_id, place.size) == ("pace", own, first, 64)
    site.write(instance, KEYS[1:], node_id=first)
    assert _storages(site.match(instance, KEYS, node_id=first)) == [own] * 3
    for other in (second, "", "elsewhere"):
        assert site.match(instance, KEYS, node_id=other) == []
        assert _length(site, instance, node_id=other) == 0
    assert _length(site, instance, node_id=first) == 3
    # For them the blocks are not there: they write them to where they can.
    assert _storages(site.write(instance, KEYS, node_id=second)) == [foreign] * 3
    assert _storages(site.write(instance, KEYS)) == [shared] * 3
    assert masked(site.start(instance, KEYS, node_id=first)) == 3
    assert _storages(site.match(instance, KEYS, node_id=second)) == [foreign] * 3
    assert _storages(site.match(instance, KEYS)) == [shared] * 3
    assert _storages(site.match(instance, KEYS, "QT_BATCH_GET", node_id=first)) == [own] * 3
