"""The zones of a step are those that plain Python finds, whatever the sizes and the room."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.index.meta_pages import PAGE_CLUSTERS
from gpu_tier.index.wave_zones import Asked, cluster_sizes, divide, rank

Row = tuple[int, int, int, int]  # clusters, retrieved, ranked, room


def asked(rows: list[Row]) -> Asked:
    columns = [torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)]
    most = [max(column) for column in zip(*rows, strict=True)]
    return Asked(columns[0], columns[1], columns[2], columns[3], most[0], most[1], most[2])


def pages_of(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Log sizes in pages of which those of a row are scattered, and the table; sizes ``[B, H, M]``."""
    rows, heads, clusters = sizes.shape
    pages = -(-clusters // PAGE_CLUSTERS)
    padded = torch.nn.functional.pad(sizes, (0, pages * PAGE_CLUSTERS - clusters)).float().log()
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(1)).view(rows, pages).int()
    log_size = torch.empty(rows * pages, heads, PAGE_CLUSTERS)
    log_size[table.long()] = padded.unflatten(2, (pages, PAGE_CLUSTERS)).transpose(1, 2)
    return log_size, table


def plain(ranks: list[float], sizes: list[int], row: Row) -> tuple[list[int], list[int], int]:
    clusters, most, ranked, room = row
    order = sorted((c for c in range(clusters) if ranks[c] > -math.inf), key=lambda c: (-ranks[c], c))
    retrieved, overflow, used = [], 0, 0
    for c in order[:most]:
        used += sizes[c] if sizes[c] <= room else 0
        if sizes[c] <= room and used <= room:
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
    zones = divide(ranks, log_size, table, asked(rows))
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
    assert cluster_sizes(log_size, table, torch.tensor([[[0, 2], [1, -1]]], dtype=torch.int32)).unique().tolist() == [
        size
    ]


@pytest.mark.parametrize("group", [1, 4])
def test_ranks_are_sums_of_the_softmax_of_each_head(group: int) -> None:
    scores = torch.randn(2, 3 * group, 7)
    scores[:, :, 5:] = -torch.inf
    ranks = rank(scores, 3, "sum_softmax")
    by_head = scores.view(2, 3, group, 7)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(ranks[b, h, :5], by_head[b, h, :, :5].softmax(-1).sum(0))
    assert bool((ranks[..., 5:] == -torch.inf).all())
    assert torch.equal(rank(scores, 3, "max_ip"), by_head.amax(2))
    if group == 1:
        assert torch.equal(ranks.argsort(dim=-1, stable=True), scores.argsort(dim=-1, stable=True))


def test_a_row_without_clusters_has_no_ranks_and_no_nan() -> None:
    scores = torch.full((1, 4, 3), -torch.inf)
    for rule in ("sum_softmax", "max_ip"):
        assert bool((rank(scores, 2, rule) == -torch.inf).all())
