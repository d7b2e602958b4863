"""Full, streaming and oracle select what plain Python selects."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_rig import Rig, ids, mha, mla, top
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.algorithms import registry
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.types import Unit


@pytest.mark.parametrize("name", ["full", "full_offload"])
def test_dense_attention_selects_nothing_and_needs_no_memory(name: str) -> None:
    rig = Rig(mha(), name)
    rig.add({0: 40, 1: 3}, spare=1)
    selection = rig.step([0, 1], padding=2)[0]
    assert selection.indices.shape == (4, 1, 0)
    assert not selection.lengths.any()
    assert not rig.algorithm.selects
    assert rig.algorithm.max_items == rig.algorithm.representation_bytes(40) == 0


def kept_by_streaming(n: int, sink: int, window: int, page: int) -> list[int]:
    tokens = [t for t in range(n) if t < -(-sink // page) * page or t >= n - window]
    return sorted({t // page for t in tokens})


@settings(max_examples=examples(300), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    sink=st.integers(0, 9),
    window=st.integers(1, 40),
    page=st.sampled_from([1, 4, 16]),
)
def test_streaming_keeps_the_pages_of_sinks_and_window(lengths: list[int], sink: int, window: int, page: int) -> None:
    rig = Rig(mha(1, 2, layers=1), "streaming_llm", algo={"sink": sink, "window": window, "page": page})
    rig.add(dict(enumerate(lengths)), spare=1)
    selection = rig.step(range(len(lengths)), padding=1)[0]
    assert selection.unit is Unit.PAGE
    assert selection.unit_tokens == page
    for row, n in enumerate(lengths):
        assert ids(selection, row) == kept_by_streaming(n + 1, sink, window, page)
    assert ids(selection, len(lengths)) == []


def weights(rig: Rig, layer: int, request: int, head: int) -> list[float]:
    keys, query = rig.all_keys(layer, request), rig.query(layer, request)
    scores = torch.einsum("gd,nd->gn", query[head].double(), keys[:, head].double()) * rig.context.sm_scale
    return scores.softmax(-1).sum(0).tolist()


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("geometry", [mha(), mha(1), mla(), mha(start=5)], ids=["mha", "one head", "mla", "stage"])
def test_the_oracle_is_the_exact_top_k(geometry: KVGeometry, group: int) -> None:
    k = 7
    rig = Rig(geometry, "oracle", group, {"k": k})
    rig.add({0: 1, 1: k - 2, 2: k - 1, 3: k, 4: 100}, spare=2)
    rig.step([0, 1, 2, 3, 4])
    for layer, selection in rig.step([3, 1, 0, 2, 4], padding=2).items():
        for row, request in enumerate([3, 1, 0, 2, 4]):
            for head in range(geometry.num_kv_heads):
                assert ids(selection, row, head) == top(weights(rig, layer, request, head), k)
        assert not selection.lengths[5:].any()


def test_the_oracle_takes_a_share_of_each_request() -> None:
    rig = Rig(mha(), "oracle", 2, {"ratio": 0.1, "k": 20})
    rig.add({0: 9, 1: 99, 2: 254}, spare=1)
    for layer, selection in rig.step([0, 1, 2]).items():
        for request in range(3):
            k = min(20, math.ceil(0.1 * rig.n[request]))
            assert ids(selection, request, 1) == top(weights(rig, layer, request, 1), k)


def test_query_heads_must_share_the_kv_heads_evenly() -> None:
    rig = Rig(mha(2), "oracle")
    with pytest.raises(ConfigError, match="num_q_heads=3"):
        registry.make(replace(rig.context, num_q_heads=3))
