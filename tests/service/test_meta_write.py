"""StartWriteCache and FinishWriteCache on both transports: masks, specs, replicas (wire.md 5.5, decision 17)."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from test_transport_sites import Site, mask, masked, specs

from kvcm.protocol import meta_service_pb2 as meta

K_V = {
    "location_spec_infos": [{"name": "k", "size": 8}, {"name": "v", "size": 8}],
    "location_spec_groups": [{"name": "only k", "spec_names": ["k"]}, {"name": "only v", "spec_names": ["v"]}],
}


@pytest.mark.parametrize(
    ("written", "asked", "expected", "count"),
    [
        ([], [1, 2, 3], 0, 3),
        ([1], [1, 2, 3], 1, 2),
        ([1, 2, 3], [1, 2, 3], 3, 0),
        ([2], [1, 2, 3], [False, True, False], 2),
    ],
)
def test_known_blocks_are_masked_by_offset_if_they_are_a_prefix_and_else_by_flags(
    site: Site, written: list[int], asked: list[int], expected: int | list[bool], count: int
) -> None:
    instance = site.instance()
    site.write(instance, written or [99])
    started = site.start(instance, asked)
    assert masked(started) == expected
    assert len(started.locations) == count
    assert len(started.write_session_id) >= 32


def test_locations_come_in_request_order_with_a_name_of_their_own(site: Site) -> None:
    instance = site.instance()
    site.write(instance, [20])
    started = site.start(instance, [-1, 20, 0, 255])
    names = [urlsplit(specs(entry)["kv"]).path.rpartition("/")[2].partition(".") for entry in started.locations]
    assert [name for name, _, _ in names] == ["ffffffffffffffff", "0", "ff"]
    assert all(location_id for _, _, location_id in names)
    assert {entry.type for entry in started.locations} == {meta.ST_DUMMY}
    assert [parse_qs(urlsplit(specs(entry)["kv"]).query) for entry in started.locations] == [{"size": ["64"]}] * 3


@pytest.mark.parametrize(
    ("success", "served"),
    [
        (mask(0), []),
        (mask(2), [1, 2]),
        (mask(flags=[True, False, True]), [1, 3]),
    ],
)
def test_successful_blocks_become_readable_and_the_others_go_invariant_3(
    site: Site, success: dict[str, Any], served: list[int]
) -> None:
    instance = site.instance()
    site.finish(instance, site.start(instance, [1, 2, 3]), success)
    assert site.hits(instance, [1, 2, 3]) == served
    expected = ["CLS_SERVING" if key in served else "CLS_NOT_FOUND" for key in (1, 2, 3)]
    assert site.statuses(instance, [1, 2, 3]) == expected
    assert len(site.start(instance, [1, 2, 3]).locations) == 3 - len(served)


# ── Parts of a block ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_part_is_added_later_and_both_parts_come_in_one_answer(site: Site) -> None:
    instance = site.instance(**K_V)
    (k,) = site.write(instance, [1], location_spec_group_names=["only k"])
    assert set(k) == {"k"}
    assert masked(site.start(instance, [1], location_spec_group_names=["only k"])) == 1
    started = site.start(instance, [1])
    assert masked(started) == 0
    (v,) = [specs(entry) for entry in started.locations]
    assert (set(v), [entry.spec_size for entry in started.locations]) == ({"v"}, [1])
    assert site.match(instance, [1]) == [k]
    site.finish(instance, started)
    for mode in ("QT_PREFIX_MATCH", "QT_BATCH_GET", "QT_REVERSE_ROLL_SW_MATCH"):
        assert site.match(instance, [1], mode, sw_size=1) == [{**k, **v}]
    assert masked(site.start(instance, [1])) == 1


# ── Replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_min_replica_count_gives_addresses_until_there_are_so_many(site: Site) -> None:
    instance = site.instance()
    (first,) = site.write(instance, [1])
    for count in (-1, 0, 1):
        assert masked(site.start(instance, [1], min_replica_count=count)) == 1
    (second,) = site.write(instance, [1], min_replica_count=2)
    assert first != second
    assert masked(site.start(instance, [1], min_replica_count=2)) == 1
    assert len(site.start(instance, [1], min_replica_count=3).locations) == 1


def test_get_cache_meta_lists_every_location_of_a_block(site: Site) -> None:
    instance = site.instance()
    site.write(instance, [1])
    site.start(instance, [1], min_replica_count=2)
    answer = site.api.ok("GetCacheMeta", instance_id=instance, block_keys=[1])
    (found,) = site.metas(instance, [1])
    assert (found["status"], [entry["status"] for entry in found["locations"]]) == (
        "CLS_SERVING",
        ["CLS_SERVING", "CLS_WRITING"],
    )
    ids = [entry["id"] for entry in found["locations"]]
    assert (found["id"], len(set(ids))) == (ids[0], 2)
    (location,) = answer.locations
    assert found["locations"][0]["location_specs"] == [{"name": "kv", "uri": specs(location)["kv"]}]


# ── Chains ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chain(site: Site, instance: str, keys: list[int]) -> list[tuple[str | None, int]]:
    return [(found["parent"], found["depth"]) for found in site.metas(instance, keys, detail_level=1)]


def test_the_keys_of_a_request_are_a_chain_that_parent_block_key_continues(site: Site) -> None:
    instance = site.instance()
    site.write(instance, [10, 20])
    site.write(instance, [30, 40], parent_block_key=20)
    assert _chain(site, instance, [10, 20, 30, 40]) == [(None, 0), ("10", 1), ("20", 2), ("30", 3)]


def test_a_parent_key_of_0_is_a_parent(site: Site) -> None:
    instance = site.instance()
    site.write(instance, [0])
    site.write(instance, [-1], parent_block_key=0)
    assert _chain(site, instance, [0, -1]) == [(None, 0), ("0", 1)]
