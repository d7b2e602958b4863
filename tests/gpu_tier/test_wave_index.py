"""The wave index: segments, clusters, zones and pages are what plain Python says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.index import meta_index, wave_index
from kvcm.gpu_tier.index.kmeans import spherical_kmeans


def config(**changes: Any) -> RetroInferConfig:
    return RetroInferConfig(**{"segment": 64, "update_segment": 32, "local": 8, "tokens_per_centroid": 8, **changes})


def rows(tokens: int, heads: int = 2, dims: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dims, generator=draw), torch.randn(tokens, heads, dims + 3, generator=draw)


SETTINGS = st.builds(
    lambda sink, local, unit, segments, updates: RetroInferConfig(
        sink=sink, local=local, tokens_per_centroid=unit, segment=unit * segments, update_segment=unit * updates
    ),
    st.integers(0, 5), st.integers(1, 20), st.integers(1, 16), st.integers(1, 8), st.integers(1, 8),
)  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(chosen=SETTINGS, n_prompt=st.integers(1, 400), decoded=st.integers(0, 120), data=st.data())
def test_segments_of_any_history(chosen: RetroInferConfig, n_prompt: int, decoded: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, n_prompt), max_size=6)))
    found: list[range] = []
    boundary = chosen.sink

    def take(segments: list[range]) -> None:
        nonlocal boundary
        for segment in segments:
            assert segment.start == boundary
            boundary = segment.stop
            found.append(segment)

    for seen in [*cuts, n_prompt]:
        take(wave_index.whole_segments(boundary, seen, chosen))
    take(wave_index.prompt_segments(boundary, n_prompt, chosen))
    # As if the prompt had come at once.
    assert found == wave_index.prompt_segments(chosen.sink, n_prompt, chosen)
    assert boundary == (n_prompt - chosen.local if n_prompt >= chosen.unindexed else chosen.sink)
    assert all(len(s) == chosen.segment and (s.start - chosen.sink) % chosen.segment == 0 for s in found[:-1])
    for n in range(n_prompt + 1, n_prompt + decoded + 1):
        segments = wave_index.due_updates(boundary, n, chosen)
        assert len(segments) <= 1
        assert all(len(segment) == chosen.update_segment for segment in segments)
        take(segments)
        assert n - boundary < chosen.local + chosen.update_segment
        assert boundary == chosen.sink or n - boundary >= chosen.local
        assert sum(wave_index.clusters_of(len(s), chosen) for s in found) <= wave_index.most_clusters(n, chosen)


def test_several_updates_are_due_at_once_after_a_break() -> None:
    assert wave_index.due_updates(4, 4 + 3 * 32 + 8 + 5, config()) == [range(4, 36), range(36, 68), range(68, 100)]
    assert wave_index.due_updates(4, 4 + 32 + 7, config()) == []


@pytest.mark.parametrize("center", ["segment", "none"])
@pytest.mark.parametrize("tokens", [5, 37, 64])
def test_clusters_are_means_sums_and_members(tokens: int, center: str) -> None:
    k, v = rows(tokens)
    centroids, sums, sizes, members = wave_index.build_segment(k, v, config(center=center))
    assert sizes.dtype == members.dtype == torch.int32
    for head in range(2):
        assert sorted(members[head].tolist()) == list(range(tokens))
        for c, part in enumerate(members[head].split(sizes[head].tolist())):
            tokens_of = part.tolist()
            assert tokens_of == sorted(tokens_of)
            if tokens_of:
                torch.testing.assert_close(centroids[head, c], k[part, head].mean(0))
                torch.testing.assert_close(sums[head, c], v[part, head].sum(0))
            else:
                assert not centroids[head, c].any()
                assert not sums[head, c].any()


@pytest.mark.parametrize(("tokens", "iterations"), [(9, 1), (40, 3), (61, 10)])
def test_labels_are_those_of_spherical_k_means_of_centred_keys(tokens: int, iterations: int) -> None:
    k, v = rows(tokens, seed=tokens)
    _, _, sizes, members = wave_index.build_segment(k + 3, v, config(iterations=iterations))
    centred = (k - k.mean(0)).transpose(0, 1)
    labels, _ = spherical_kmeans(centred, [tokens] * 2, [wave_index.clusters_of(tokens, config())] * 2, iterations)
    for head in range(2):
        for c, part in enumerate(members[head].split(sizes[head].tolist())):
            assert torch.equal(part, (labels[head] == c).nonzero()[:, 0].int())


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), offset=st.integers(-64, 64), tokens=st.sampled_from([16, 32, 64]))
def test_adding_a_constant_to_all_keys_changes_no_label(seed: int, offset: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    # Numbers whose sums and means are exact, so that centring takes the constant away to the last bit.
    k = torch.randint(-8, 9, (tokens, 2, 8), generator=draw).float()
    v = torch.randn(tokens, 2, 8, generator=draw)
    plain, moved = wave_index.build_segment(k, v, config()), wave_index.build_segment(k + offset, v, config())
    assert torch.equal(plain[3], moved[3])
    assert torch.equal(plain[2], moved[2])
    assert torch.equal(plain[1], moved[1])


def test_many_segments_at_once_are_the_same_bits_as_one_by_one() -> None:
    k, v = rows(5 * 96, heads=3)
    k, v = k.view(5, 96, 3, 16), v.view(5, 96, 3, 19)
    together = wave_index.build_segments(k, v, config())
    for i in range(5):
        alone = wave_index.build_segment(k[i], v[i], config())
        found = (together.centroids, together.value_sums, together.sizes, together.members)
        assert all(torch.equal(x[i], y) for x, y in zip(found, alone, strict=True))


def test_a_prompt_can_be_centred_as_a_whole() -> None:
    k, v = rows(128)
    k[64:] += 5
    mean = wave_index.prompt_mean(k)
    torch.testing.assert_close(mean, k.mean(0))
    of_prompt = wave_index.build_segments(k[None, :64], v[None, :64], config(center="prompt"), mean)
    uncentred = wave_index.build_segment((k - mean)[:64], v[:64], config(center="none"))
    assert torch.equal(of_prompt.members[0], uncentred[3])
    assert not torch.equal(of_prompt.members[0], wave_index.build_segment(k[:64], v[:64], config())[3])


@pytest.mark.parametrize("center", ["segment", "prompt", "none"])
def test_tokens_may_belong_to_clusters_of_other_segments(center: str) -> None:
    k, v = rows(150)
    chosen = config(center=center, final_assign="global")
    segments = [range(4, 68), range(68, 132), range(132, 154)]
    built = wave_index.build_global(k, v, segments, chosen)
    m = sum(wave_index.clusters_of(len(s), chosen) for s in segments)
    assert built.centroids.shape == (1, 2, m, 16)
    label = torch.arange(m)
    for head in range(2):
        assert sorted(built.members[0, head].tolist()) == list(range(150))
        of_token = torch.empty(150, dtype=torch.int64)
        of_token[built.members[0, head].long()] = label.repeat_interleave(built.sizes[0, head])
        # Clusters 0 to 7 began in the first segment: others' tokens are among their members.
        assert bool((of_token[64:] < 8).any())
        assert bool((of_token[:64] >= 8).any())
        for c in range(m):
            if built.sizes[0, head, c]:
                torch.testing.assert_close(built.centroids[0, head, c], k[of_token == c, head].mean(0))


def test_all_keys_the_same_make_one_cluster_and_no_nan() -> None:
    k, v = torch.ones(40, 2, 16), rows(40)[1]
    centroids, sums, sizes, members = wave_index.build_segment(k, v, config())
    assert torch.isfinite(centroids).all()
    assert sizes.tolist() == [[40, 0, 0, 0, 0]] * 2
    assert members.tolist() == [list(range(40))] * 2
    torch.testing.assert_close(sums[:, 0], v.sum(0))
    assert math.isclose(float(centroids[0, 0, 0]), 1)


Row = tuple[int, int, int, int]  # clusters, retrieved, ranked, free tokens


def asked(rows: list[Row]) -> meta_index.ZoneSizes:
    columns = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    most = columns.amax(1).tolist()
    return meta_index.ZoneSizes(columns[0], columns[1], columns[2], columns[3], most[0], most[1], most[2])


def pages_of(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Log sizes in pages of which those of a row are scattered, and the table; sizes ``[B, H, M]``."""
    rows, heads, clusters = sizes.shape
    pages = -(-clusters // meta_index.PAGE_CLUSTERS)
    padded = torch.nn.functional.pad(sizes, (0, pages * meta_index.PAGE_CLUSTERS - clusters)).float().log()
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(1)).view(rows, pages).int()
    log_size = torch.empty(rows * pages, heads, meta_index.PAGE_CLUSTERS)
    log_size[table.long()] = padded.unflatten(2, (pages, meta_index.PAGE_CLUSTERS)).transpose(1, 2)
    return log_size, table


def plain(ranks: list[float], sizes: list[int], row: Row) -> tuple[list[int], list[int], int]:
    clusters, most, ranked, space = row
    order = sorted((c for c in range(clusters) if ranks[c] > -math.inf), key=lambda c: (-ranks[c], c))
    retrieved, overflow, used = [], 0, 0
    for c in order[:most]:
        used += sizes[c] if sizes[c] <= space else 0
        if sizes[c] <= space and used <= space:
            retrieved.append(c)
        else:
            overflow += 1
    return sorted(retrieved), sorted(set(order[:ranked]) - set(retrieved)), overflow


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), heads=st.integers(1, 3), widest=st.integers(1, 150), seed=st.integers(0, 10**6))
def test_zones_are_those_of_plain_python(data: st.DataObject, heads: int, widest: int, seed: int) -> None:
    rows: list[Row] = []
    for _ in range(data.draw(st.integers(1, 4))):
        clusters = data.draw(st.integers(0, widest))
        most = data.draw(st.integers(min(1, clusters), clusters))
        rows.append((clusters, most, data.draw(st.integers(most, clusters)), data.draw(st.integers(0, 40))))
    if not any(row[1] for row in rows):
        rows.append((widest, widest, widest, 7))
    draw = torch.Generator().manual_seed(seed)
    shape = (len(rows), heads, max(row[0] for row in rows))
    sizes = torch.randint(0, 12, shape, generator=draw)
    ranks = torch.randint(0, 6, shape, generator=draw).float().masked_fill(sizes == 0, -torch.inf)
    log_size, table = pages_of(sizes)
    zones = meta_index.divide(ranks, log_size, table, asked(rows))
    overflow = 0
    for b, row in enumerate(rows):
        for h in range(heads):
            retrieved, estimated, over = plain(ranks[b, h].tolist(), sizes[b, h].tolist(), row)
            overflow += over
            for ids, length, expected in (
                (zones.retrieved, zones.retrieved_lengths, retrieved),
                (zones.estimated, zones.estimated_lengths, estimated),
            ):
                assert int(length[b, h]) == len(expected)
                assert ids[b, h].tolist() == expected + [-1] * (ids.shape[2] - len(expected))
    assert int(zones.overflow) == overflow


@pytest.mark.parametrize("size", [1, 2, 63, 1000, 8191, 8192, 32769, 131071])
def test_sizes_come_back_from_their_logarithms(size: int) -> None:
    log_size, table = pages_of(torch.full((1, 2, 3), size))
    ids = torch.tensor([[[0, 2], [1, -1]]], dtype=torch.int32)
    assert meta_index.cluster_sizes(log_size, table, ids).unique().tolist() == [size]


@pytest.mark.parametrize("group", [1, 4])
def test_ranks_are_sums_of_the_softmax_of_each_head(group: int) -> None:
    scores = torch.randn(2, 3 * group, 7)
    scores[:, :, 5:] = -torch.inf
    ranks = meta_index.rank(scores, 3, "sum_softmax")
    by_head = scores.view(2, 3, group, 7)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(ranks[b, h, :5], by_head[b, h, :, :5].softmax(-1).sum(0))
    assert bool((ranks[..., 5:] == -torch.inf).all())
    assert torch.equal(meta_index.rank(scores, 3, "max_ip"), by_head.amax(2))
    if group == 1:
        assert torch.equal(ranks.argsort(dim=-1, stable=True), scores.argsort(dim=-1, stable=True))


def test_a_row_without_clusters_has_no_ranks_and_no_nan() -> None:
    scores = torch.full((1, 4, 3), -torch.inf)
    for rule in ("sum_softmax", "max_ip"):
        assert bool((meta_index.rank(scores, 2, rule) == -torch.inf).all())


@pytest.mark.parametrize(("heads", "dims", "v_dims"), [(2, 16, 8), (1, 576, 512), (8, 3, 5)])
def test_views_tile_the_page(heads: int, dims: int, v_dims: int) -> None:
    pages = torch.randint(0, 256, (3, meta_index.meta_page_bytes(heads, dims, v_dims)), dtype=torch.uint8)
    views = meta_index.MetaViews.of(pages, heads, dims, v_dims)
    assert views.centroids.shape == (3, heads, meta_index.PAGE_CLUSTERS, dims)
    assert views.value_sums.shape == (3, heads, meta_index.PAGE_CLUSTERS, v_dims)
    assert views.log_size.shape == (3, heads, meta_index.PAGE_CLUSTERS)
    parts = [view.contiguous().view(torch.uint8).flatten(1) for view in (views.centroids, views.value_sums)]
    assert torch.equal(torch.cat([*parts, views.log_size.contiguous().view(torch.uint8).flatten(1)], dim=1), pages)


def test_an_empty_page_has_no_clusters() -> None:
    views = meta_index.MetaViews.of(meta_index.empty_meta_page(2, 8, 4)[None], 2, 8, 4)
    assert bool((views.log_size == -torch.inf).all())
    assert not views.centroids.any()
    assert not views.value_sums.any()


def test_pages_of_another_size_are_refused() -> None:
    pages = torch.zeros(2, meta_index.meta_page_bytes(2, 8, 4), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="pages"):
        meta_index.MetaViews.of(pages, 2, 8, 8)
    with pytest.raises(ConfigError, match="pages"):
        meta_index.MetaViews.of(pages.int(), 2, 8, 4)
