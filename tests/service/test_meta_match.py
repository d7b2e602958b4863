"""GetCacheLocation and GetCacheLocationLen on both transports: all match modes (wire.md 5.1-5.3, 14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_transport_sites import Site, mask, specs

from kvcm.protocol import meta_service_pb2 as meta

PREFIX, BATCH = "QT_PREFIX_MATCH", "QT_BATCH_GET"
WINDOW, MAMBA = "QT_REVERSE_ROLL_SW_MATCH", "QT_PREFIX_MATCH_WITH_MAMBA"


def _keys(entries: Sequence[dict[str, str]]) -> list[int | None]:
    """The block key of every entry as its uri tells it, None for a placeholder."""
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


def test_a_block_being_written_is_a_miss_for_readers_invariant_1(site: Site, instance: str) -> None:
    assert _keys(site.match(instance, [5, 6, 7, 8])) == [5, 6]


MASKS: list[tuple[dict[str, Any], list[int]]] = [
    (mask(0), [1, 2, 3]),
    (mask(1), [2, 3]),
    (mask(-1), []),
    ({}, [1, 2, 3]),
    (mask(flags=[False, True]), [1, 3]),
]


@pytest.mark.parametrize(("block_mask", "found"), MASKS)
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


@pytest.mark.parametrize(
    ("keys", "size", "found"),
    [
        ([1, 2, 3, 4, 5], 2, [None, 2, 3, None, None]),
        ([1, 4, 2], 2, [None, None, None]),
        ([5, 6, 7, 8], 2, [5, 6, None, None]),
    ],
)
def test_the_right_most_window_of_hits_is_filled(
    site: Site, instance: str, keys: list[int], size: int, found: list[int | None]
) -> None:
    assert _keys(site.match(instance, keys, WINDOW, sw_size=size)) == found
    assert _length(site, instance, keys, WINDOW, sw_size=size) == len([key for key in found if key])


# ── Specs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [PREFIX, BATCH, WINDOW, MAMBA])
def test_a_spec_filter_keeps_the_named_specs_and_spec_size(site: Site, mode: str) -> None:
    infos = [{"name": name, "size": 1} for name in ("a", "b", "c")]
    found = site.instance(location_spec_infos=infos)
    (written,) = site.write(found, [1])
    query = {"instance_id": found, "block_keys": [1], "query_type": mode, "sw_size": 1}
    answer = site.api.ok("GetCacheLocation", location_spec_names=["c", "a", "nope"], **query)
    assert [(entry.spec_size, specs(entry)) for entry in answer.locations] == [
        (3, {"a": written["a"], "c": written["c"]})
    ]
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


def test_without_linear_attention_a_mamba_match_is_a_prefix_match(site: Site, instance: str) -> None:
    assert _keys(site.match(instance, [1, 2, 4], MAMBA)) == [1, 2]


# ── Tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────

VECTORS = [
    (list(range(1, 10)), [455111481605203084, 6902853672176602142]),
    ([-5, 2**62, -(2**63), 2**63 - 1], [5066827860753437846]),
]


@pytest.mark.parametrize(("tokens", "keys"), VECTORS)
def test_tokens_mean_the_keys_of_the_specification_in_every_call(
    site: Site, tokens: list[int], keys: list[int]
) -> None:
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
