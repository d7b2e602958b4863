"""Which residency the settings name, how host memory is divided, and combinations that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
from layer_traffic import Shape
from retrieval_cases import PQ, WAVE

from gpu_tier.assembly import build
from gpu_tier.config import SparseConfig
from gpu_tier.errors import ConfigError
from gpu_tier.manager.block_residency import BlockResidency
from gpu_tier.manager.device_resident import DeviceResidentPolicy
from gpu_tier.manager.token_blocks import TokenBlockPolicy
from gpu_tier.residencies import host_split, resolved

SHAPE = Shape(max_requests=2, max_tokens=64)
PAGE_BYTES = SHAPE.geometry.page_bytes


def config_of(algorithm: str, **settings: Any) -> SparseConfig:
    algo = {"pqcache": PQ, "retroinfer": WAVE}.get(algorithm, {})
    algo = {**algo, **settings.pop("algo", {})}
    return SparseConfig.parse({"algorithm": algorithm, "page_size": SHAPE.page, "algo": algo, **settings})


def policy_of(config: SparseConfig, device_pages: int) -> object:
    coordinator = build(
        config, SHAPE.geometry, num_q_heads=SHAPE.q_heads, sm_scale=1.0, device_pages=device_pages,
        max_requests=SHAPE.max_requests, max_tokens=SHAPE.max_tokens,
    )  # fmt: skip
    assert (coordinator.manager.blocks is not None) is (coordinator.config.residency == "blocks")
    return coordinator.manager.policy


def test_auto_is_the_device_if_all_that_requests_may_need_fits() -> None:
    config = config_of("pqcache", residency="auto")
    assert isinstance(policy_of(config, 16), DeviceResidentPolicy)
    assert isinstance(policy_of(config, 15), TokenBlockPolicy)


REFUSED = [
    ("quest", {"residency": "blocks"}, "only retroinfer and pqcache"),
    ("dsa", {"residency": "auto"}, "only retroinfer and pqcache"),
    ("pqcache", {"residency": "static"}, "only snapkv"),
    ("pqcache", {"residency": "stream"}, "full_offload"),
    ("retroinfer", {"residency": "lru"}, "clusters differ in size"),
    ("retroinfer", {"residency": "blocks", "algo": {"mode": "gpu_only"}}, "mode='gpu_only' is residency device"),
]


@pytest.mark.parametrize(("algorithm", "settings", "message"), REFUSED)
def test_combinations_that_make_no_sense_are_refused(algorithm: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(config_of(algorithm, **settings), 64, 64)
    assert caught.value.field == "residency"


def test_the_mode_of_retroinfer_is_a_residency() -> None:
    for mode, expected in (("offload", "blocks"), ("gpu_only", "device"), ("auto", "blocks")):
        assert resolved(config_of("retroinfer", algo={"mode": mode}), 63, 64).residency == expected
    assert resolved(config_of("retroinfer", algo={"mode": "auto"}), 64, 64).residency == "device"


def test_host_memory_of_clusters_is_in_cluster_order() -> None:
    config = config_of("retroinfer", host_bytes=20 * PAGE_BYTES)
    split = host_split(config, SHAPE.geometry, 0, publishes=False)
    assert (split.pages, split.store_bytes, split.tokens) == (1, 19 * PAGE_BYTES, 20 * SHAPE.page)
    for changes, publishes in (({}, True), ({"prefill_window_tokens": 16}, False)):
        split = host_split(config.replaced(**changes), SHAPE.geometry, 0, publishes=publishes)
        assert (split.pages, split.store_bytes) == (10, 10 * PAGE_BYTES)


@pytest.mark.parametrize("settings", [{"algo": {"mode": "gpu_only"}}, {}])
def test_host_memory_of_others_is_in_token_order(settings: dict[str, Any]) -> None:
    algorithm = "retroinfer" if settings else "pqcache"
    split = host_split(config_of(algorithm, host_to_device_ratio=0.5, **settings), SHAPE.geometry, 40 * PAGE_BYTES,
                       publishes=False)  # fmt: skip
    assert (split.pages, split.store_bytes) == (20, 0)


def test_a_block_residency_counts_its_buffers() -> None:
    config = config_of("pqcache")
    coordinator = build(
        config, SHAPE.geometry, num_q_heads=SHAPE.q_heads, sm_scale=1.0, device_pages=20, max_requests=2, max_tokens=64
    )
    blocks = coordinator.manager.blocks
    assert isinstance(blocks, BlockResidency)
    tokens = blocks.execution.tokens_per_row
    assert tokens % SHAPE.page == 0
    assert tokens >= coordinator.algorithm.max_execution_tokens
    assert blocks.execution.rows == 2
