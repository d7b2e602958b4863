"""The calls of engines: matches, writes, sessions, removal (wire.md 5, decisions 13 to 17)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from test_transport_sites import Site, instance_fields, mask, masked, specs, unique

from kvcm.protocol import meta_service_pb2 as meta

PREFIX, BATCH = "QT_PREFIX_MATCH", "QT_BATCH_GET"
WINDOW, MAMBA = "QT_REVERSE_ROLL_SW_MATCH", "QT_PREFIX_MATCH_WITH_MAMBA"


def _keys(entries: Sequence[dict[str, str]]) -> list[int | None]:
    """The block key of every entry, from its uri; None for a placeholder."""
    uris = [entry["kv"] for entry in entries]
    return [int(uri.rpartition("/")[2].partition(".")[0], 16) if uri else None for uri in uris]


def _length(site: Site, instance: str, keys: Sequence[int], mode: str, **fields: Any) -> int:
    query = {"instance_id": instance, "block_keys": keys, "query_type": mode, **fields}
    return int(site.api.ok("GetCacheLocationLen", **query).cache_location_len)


@pytest.fixture
def instance(site: Site) -> str:
    """An instance that holds the blocks 1, 2, 3, 5, 6 and 8; block 7 is being written."""
    found = site.instance()
    site.write(found, [1, 2, 3, 5, 6, 8])
    site.start(found, [7])
    return found


# ── Prefix ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("keys", "found"),
    [([1, 2, 3], [1, 2, 3]), ([1, 2, 4, 3], [1, 2]), ([4, 1], []), ([3, 1, 2], [3, 1, 2]), ([1, 1], [1, 1])],
)
def test_a_prefix_match_ends_at_the_first_miss(site: Site, instance: str, keys: list[int], found: list[int]) -> None:
    assert _keys(site.match(instance, keys)) == found
    assert _length(site, instance, keys, PREFIX) == len(found)


@pytest.mark.parametrize(
    ("block_mask", "found"), [(mask(1), [2, 3]), (mask(-1), []), ({}, [1, 2, 3]), (mask(flags=[False, True]), [1, 3])]
)
def test_masked_keys_of_a_prefix_match_have_no_entry(
    site: Site, instance: str, block_mask: dict[str, Any], found: list[int]
) -> None:
    assert _keys(site.match(instance, [1, 2, 3], block_mask=block_mask)) == found


# ── Batch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_get_has_one_entry_per_key_and_placeholders_for_misses(site: Site) -> None:
    found = site.instance(location_spec_infos=[{"name": "k", "size": 1}, {"name": "v", "size": 1}])
    site.write(found, [1])
    answer = site.api.ok("GetCacheLocation", instance_id=found, block_keys=[2, 1, 2], query_type=BATCH)
    miss, hit, again = answer.locations
    assert (miss.type, miss.spec_size, specs(miss)) == (meta.ST_UNSPECIFIED, 2, {"k": "", "v": ""})
    assert again == miss
    assert (hit.type, hit.spec_size, all(specs(hit).values())) == (meta.ST_DUMMY, 2, True)
    assert _length(site, found, [2, 1, 2], BATCH) == 1


# ── Sliding window ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("keys", "filled"), [([1, 2, 3, 4, 5], {2, 3}), ([1, 4, 2], set()), ([5, 6, 7, 8], {5, 6})])
def test_the_right_most_window_of_hits_is_filled(site: Site, instance: str, keys: list[int], filled: set[int]) -> None:
    found = [key if key in filled else None for key in keys]
    assert _keys(site.match(instance, keys, WINDOW, sw_size=2)) == found
    assert _length(site, instance, keys, WINDOW, sw_size=2) == len(filled)


# ── Specs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [PREFIX, BATCH, WINDOW, MAMBA])
def test_a_spec_filter_keeps_the_named_specs_and_spec_size(site: Site, mode: str) -> None:
    infos = [{"name": name, "size": 1} for name in ("a", "b", "c")]
    found = site.instance(location_spec_infos=infos)
    (written,) = site.write(found, [1])
    query = {"instance_id": found, "block_keys": [1], "query_type": mode, "sw_size": 1}
    answer = site.api.ok("GetCacheLocation", location_spec_names=["c", "a", "nope"], **query)
    named = {name: written[name] for name in "ac"}
    assert [(entry.spec_size, specs(entry)) for entry in answer.locations] == [(3, named)]
    unknown = site.api.ok("GetCacheLocation", location_spec_names=["nope"], **query)
    assert [(entry.spec_size, specs(entry)) for entry in unknown.locations] == [(3, {})]


def _hybrid(site: Site, *, by_kind: bool) -> str:
    """A hybrid model: blocks 1-4 hold the full-attention part, 2 the Mamba state too, 4 the state alone."""
    if by_kind:
        infos = [{"name": "full", "size": 8, "kind": 1}, {"name": "state", "size": 4, "kind": 2}]
    else:
        infos = [{"name": "full", "size": 8}, {"name": "state", "size": 4}]
    groups = [{"name": "f", "spec_names": ["full"]}, {"name": "fs", "spec_names": ["full", "state"]}]
    if by_kind:
        groups.append({"name": "s", "spec_names": ["state"]})
    found = site.instance(location_spec_infos=infos, location_spec_groups=groups)
    site.write(found, [1, 2, 3], location_spec_group_names=["f", "fs", "f"])
    return found


@pytest.mark.parametrize("by_kind", [True, False], ids=["LocationSpecInfo.kind", "spec groups"])
def test_a_mamba_match_ends_at_the_last_block_with_the_state(site: Site, *, by_kind: bool) -> None:
    found = _hybrid(site, by_kind=by_kind)
    assert [set(entry) for entry in site.match(found, [1, 2, 3], MAMBA)] == [{"full"}, {"full", "state"}]
    assert _length(site, found, [1, 2, 3], MAMBA) == 2
    assert len(site.match(found, [1, 2, 3], PREFIX)) == 3
    assert site.match(found, [1, 3], MAMBA) == []
    site.write(found, [4], location_spec_group_names=["fs"])
    assert len(site.match(found, [1, 2, 3, 4], MAMBA)) == 4
    assert len(site.match(found, [1, 9, 4], MAMBA)) == 0


# ── Tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [
        (list(range(1, 10)), [455111481605203084, 6902853672176602142]),
        ([-5, 2**62, -(2**63), 2**63 - 1], [5066827860753437846]),
    ],
)
def test_tokens_mean_the_specified_keys_in_every_call(site: Site, tokens: list[int], keys: list[int]) -> None:
    found = site.instance(block_size=4)
    site.write(found, keys)
    by_tokens = {"instance_id": found, "token_ids": tokens}
    answer = site.api.ok("GetCacheLocation", query_type=PREFIX, **by_tokens)
    assert [specs(entry) for entry in answer.locations] == site.match(found, keys)
    assert site.api.ok("GetCacheLocationLen", query_type=PREFIX, **by_tokens).cache_location_len == len(keys)
    assert len(site.api.ok("GetCacheMeta", **by_tokens).metas) == len(keys)
    assert site.api.ok("StartWriteCache", **by_tokens).block_mask.offset == len(keys)
    site.api.ok("RemoveCache", **by_tokens)
    assert site.hits(found, keys) == []


def test_block_keys_win_over_token_ids(site: Site, instance: str) -> None:
    assert _keys(site.match(instance, [1, 2], token_ids=[9, 9, 9, 9, 9, 9, 9, 9])) == [1, 2]


def test_fewer_tokens_than_one_block_are_an_empty_success(site: Site) -> None:
    found = {"instance_id": site.instance(block_size=4), "token_ids": [1, 2, 3]}
    for mode in (PREFIX, BATCH, MAMBA):
        assert not site.api.ok("GetCacheLocation", query_type=mode, **found).locations
    started = site.api.ok("StartWriteCache", **found)
    assert (started.block_mask.WhichOneof("info"), started.block_mask.offset) == ("offset", 0)
    assert (len(started.locations), bool(started.write_session_id)) == (0, True)
    site.finish(found["instance_id"], started)
    assert site.api.refused("GetCacheLocation", query_type=WINDOW, sw_size=1, **found).code == "INVALID_ARGUMENT"


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


@pytest.mark.parametrize(("success", "served"), [(mask(0), []), (mask(flags=[True, False, True]), [1, 3])])
def test_only_successful_blocks_remain_invariant_3(site: Site, success: dict[str, Any], served: list[int]) -> None:
    instance = site.instance()
    site.finish(instance, site.start(instance, [1, 2, 3]), success)
    assert site.hits(instance, [1, 2, 3]) == served
    expected = ["CLS_SERVING" if key in served else "CLS_NOT_FOUND" for key in (1, 2, 3)]
    assert site.statuses(instance, [1, 2, 3]) == expected


# ── Parts of a block ─────────────────────────────────────────────────────────────────────────────────────────────────


# ── Replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_a_parent_key_of_0_is_a_parent(site: Site) -> None:
    instance = site.instance()
    site.write(instance, [0])
    site.write(instance, [-1], parent_block_key=0)
    metas = site.metas(instance, [0, -1], detail_level=1)
    assert [(found["parent"], found["depth"]) for found in metas] == [(None, 0), ("0", 1)]


@pytest.mark.parametrize(("asked", "granted"), [(0, 30), (70, 70), (2**31 - 1, 3600)])
def test_a_timeout_is_30_s_by_default_and_one_hour_at_most(site: Site, asked: int, granted: int) -> None:
    instance = site.instance()
    started = site.start(instance, [1], write_timeout_seconds=asked)
    fields = {"instance_id": instance, "write_session_id": started.write_session_id}
    begin = time.time()
    answer = site.api.ok("LeaseService.RenewWriteSession", write_timeout_seconds=asked, **fields)
    assert begin - 0.01 <= answer.write_session_deadline_ms / 1000 - granted <= time.time() + 0.01


def test_locations_in_a_finish_are_ignored(site: Site) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    (written,) = started.locations
    elsewhere = [{"type": "ST_NFS", "location_specs": [{"name": "kv", "uri": "file://evil/etc/passwd?size=1"}]}]
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    site.api.ok("FinishWriteCache", locations=elsewhere, **fields)
    assert site.match(instance, [1]) == [{"kv": written.location_specs[0].uri}]


BOTH = pytest.mark.parametrize("plane", ["", "AdminService."], ids=["meta", "admin"])


@BOTH
@pytest.mark.parametrize(("block_mask", "left"), [({}, []), (mask(1), [1]), (mask(flags=[False, True]), [2])])
def test_remove_cache_removes_the_unmasked_keys_at_once(
    site: Site, plane: str, block_mask: dict[str, Any], left: list[int]
) -> None:
    instance = site.instance(site.group(site.storage(), delay_ms=60_000))
    site.write(instance, [1, 2, 3])
    site.api.ok(f"{plane}RemoveCache", instance_id=instance, block_keys=[1, 2, 3], block_mask=block_mask)
    assert site.hits(instance, [1, 2, 3]) == left


# ── TrimCache ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", ["TS_REMOVE_ALL_CACHE", "TS_REMOVE_ALL_META"])
def test_trim_removes_every_block_of_the_instance_and_of_no_other(site: Site, strategy: str) -> None:
    group = site.group()
    instance, other = site.instance(group), site.instance(group)
    keys = list(range(3000))
    site.write(instance, keys)
    site.write(other, [1])
    site.api.ok("TrimCache", instance_id=instance, strategy=strategy)
    assert site.hits(instance, keys) == []
    assert site.hits(other, [1]) == [1]
    site.api.ok("TrimCache", instance_id=instance, strategy=strategy)


# ── GetCacheMeta ─────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_get_cache_meta_has_one_entry_per_key_and_no_id_of_another_for_a_miss(site: Site, plane: str) -> None:
    instance = site.instance()
    (written,) = site.write(instance, [1])
    site.start(instance, [2])
    answer = site.api.ok(f"{plane}GetCacheMeta", instance_id=instance, block_keys=[1, 404, 2])
    served, missing, writing = answer.locations
    assert (specs(served), served.spec_size) == (written, 1)
    assert (missing.type, missing.spec_size, specs(missing)) == (0, 0, {})
    assert set(specs(writing)) == {"kv"}
    assert answer.metas[1] == '{"status":"CLS_NOT_FOUND"}'
    assert site.statuses(instance, [1, 404, 2]) == ["CLS_SERVING", "CLS_NOT_FOUND", "CLS_WRITING"]


@BOTH
@pytest.mark.parametrize(
    ("block_mask", "count"), [(mask(1), 2), (mask(-1), 0), (mask(3), 0), (mask(flags=[False, True]), 2)]
)
def test_get_cache_meta_leaves_out_masked_keys(site: Site, plane: str, block_mask: dict[str, Any], count: int) -> None:
    instance = site.instance()
    site.write(instance, [1, 2, 3])
    fields = {"instance_id": instance, "block_keys": [1, 2, 3], "block_mask": block_mask}
    answer = site.api.ok(f"{plane}GetCacheMeta", **fields)
    assert (len(answer.locations), len(answer.metas)) == (count, count)


def test_the_uri_names_kind_storage_cluster_instance_spec_and_key(site: Site) -> None:
    storage = site.storage(dummy={"root_path": "/root/", "key_count_per_file": 1})
    instance = unique("a b")
    group = site.group(storage)
    fields = {"instance_id": instance, "instance_group": group, "model_deployment": {"model_name": "m", "dtype": "d"}}
    site.api.ok("RegisterInstance", location_spec_infos=[{"name": "k/v", "size": 2**40}], **fields)
    (uris,) = site.write(instance, [255])
    assert uris["k/v"].startswith(f"dummy://{storage}/root/")
    uri = urlsplit(uris["k/v"])
    cluster, encoded, spec, name = uri.path.removeprefix("/root/").split("/")
    assert (bool(cluster), encoded, spec, name.partition(".")[0]) == (True, instance.replace(" ", "%20"), "k%2Fv", "ff")
    assert parse_qs(uri.query) == {"size": [str(2**40)]}


GROUPS = [{"name": "full", "spec_names": ["v", "k"]}, {"name": "all", "spec_names": ["s", "v", "k"]}]
SPECS = [{"name": "k", "size": 8}, {"name": "v", "size": 8}, {"name": "s", "size": 4}]
MODEL = {"model_name": "m", "dtype": "bf16", "tp_size": 2, "user_data": "u", "extra": "e"}


def _registration(site: Site, **changes: Any) -> dict[str, Any]:
    whole = instance_fields(unique("instance"), site.group(), location_spec_infos=SPECS, model_deployment=MODEL)
    return {**whole, "location_spec_groups": GROUPS, **changes}


def test_the_same_registration_again_is_ok_and_answers_the_same_storages(site: Site) -> None:
    registration = _registration(site)
    first = site.api.ok("RegisterInstance", **registration)
    again = registration | {"location_spec_groups": GROUPS[::-1], "model_deployment": {**MODEL, "user_data": "other"}}
    assert site.api.ok("RegisterInstance", **again).storage_configs == first.storage_configs


def test_a_registration_comes_back_complete_and_sorted(site: Site) -> None:
    registration = _registration(site)
    site.api.ok("RegisterInstance", **registration)
    answer = site.api.ok("GetInstanceInfo", instance_id=registration["instance_id"])
    by_admin = site.api.ok("AdminService.GetInstanceInfo", instance_id=registration["instance_id"])
    for info in (answer.instance_info, by_admin.instance_info):
        assert info.instance_id == registration["instance_id"]
        assert info.instance_group_name == registration["instance_group"]
        assert info.quota_group_name == "quota"
        assert info.block_size == 4
        assert [(spec.name, spec.size) for spec in info.location_spec_infos] == [("k", 8), ("v", 8), ("s", 4)]
        groups = [(group.name, list(group.spec_names)) for group in info.location_spec_groups]
        assert groups == [("all", ["k", "s", "v"]), ("full", ["k", "v"])]
        deployment = info.model_deployment
        assert (deployment.model_name, deployment.tp_size, deployment.extra) == ("m", 2, "e")
    assert answer.instance_group == registration["instance_group"]


def test_storage_configs_lists_existing_candidates_by_name_with_their_availability(site: Site, tmp_path: Path) -> None:
    later = site.storage(nfs={"root_path": f"{tmp_path}/", "key_count_per_file": 8})
    sooner = site.storage(dummy={"root_path": "d", "key_count_per_file": 1})
    first, second = sorted((later, sooner))
    group = site.group(second, "missing", first)
    site.api.ok("AdminService.DisableStorage", storage_unique_name=sooner)
    answer = site.api.ok("RegisterInstance", **instance_fields(unique("instance"), group))
    assert [
        (config["global_unique_name"], config["is_available"]) for config in json.loads(answer.storage_configs)
    ] == [(name, name == later) for name in (first, second)]


def test_storage_configs_is_an_empty_list_when_no_candidate_exists(site: Site) -> None:
    answer = site.api.ok("RegisterInstance", **instance_fields(unique("instance"), site.group("missing")))
    assert answer.storage_configs == "[]"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "..", "ä ö/ü", "x" * 256, "a%2Fb?c=d#e"])
def test_any_printable_name_of_256_bytes_keeps_its_files_in_its_storage(site: Site, tmp_path: Path, name: str) -> None:
    storage = site.storage(nfs={"root_path": str(tmp_path), "key_count_per_file": 1})
    group = site.group(storage)
    instance = name if len(name) == 256 else name + unique("")
    site.api.ok("RegisterInstance", **instance_fields(instance, group))
    try:
        (uris,) = site.write(instance, [-1])
        path = uris["kv"].removeprefix(f"file://{storage}").rpartition("?")[0]
        assert Path(path).resolve().is_relative_to(tmp_path.resolve())
        assert uris["kv"].startswith(f"file://{storage}/")
        assert len(Path(path).relative_to(tmp_path).parts) == 4  # cluster / instance / spec / object
        assert "/ffffffffffffffff." in path
        assert site.match(instance, [-1]) == [uris]
    finally:
        site.api.ok("AdminService.RemoveInstance", instance_id=instance)


def test_a_removed_instance_is_unknown_and_its_id_starts_empty_with_any_layout(site: Site) -> None:
    group = site.group()
    instance = site.instance(group)
    site.write(instance, [1, 2])
    open_session = site.start(instance, [3]).write_session_id
    site.api.ok("AdminService.RemoveInstance", instance_id=instance, instance_group="ignored")
    for rpc in ("GetCacheLocation", "StartWriteCache", "GetCacheMeta", "AdminService.GetInstanceInfo"):
        assert site.api.refused(rpc, instance_id=instance).code == "INSTANCE_NOT_EXIST"
    other = instance_fields(instance, group, location_spec_infos=[{"name": "other", "size": 1}])
    site.api.ok("RegisterInstance", **other)
    assert site.hits(instance, [1, 2, 3]) == []
    finish = {"write_session_id": open_session, "success_blocks": {"offset": 1}}
    assert site.api.refused("FinishWriteCache", instance_id=instance, **finish).code == "INVALID_ARGUMENT"
    assert [set(specs(entry)) for entry in site.start(instance, [1]).locations] == [{"other"}]
