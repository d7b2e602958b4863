"""Pools that refuse, and passes that are given up: nothing is left half done, and other requests do not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_traffic import Shape, Traffic
from refused_allocations import refuse_each_once

from gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from gpu_tier.trackers import RequestState

INDEXER = {"index_heads": 4, "index_dim": 16}
QUEST = {"page": 4, "token_budget": 24, "skip_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "oracle": {"algorithm": "oracle", "algo": {"k": 16}, "device_buffer_size": 20},
    "quest": {"algorithm": "quest", "algo": QUEST},
    "quest, a window": {"algorithm": "quest", "algo": QUEST, "prefill_window_tokens": 20},
    "quest device": {"algorithm": "quest", "algo": QUEST, "residency": "device"},
    "dsa": {"algorithm": "dsa", "top_k": 16, "device_buffer_size": 20, "algo": INDEXER},
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": 16, "kernel": 3}},
}
SHAPE = Shape(layers=2, max_requests=4)


@pytest.mark.parametrize(
    ("name", "has_prefix"),
    [
        ("full_offload", False),
        ("oracle", True),
        ("quest", True),
        ("quest, a window", False),
        ("quest device", True),
        ("snapkv", False),
    ],
)
def test_every_allocation_may_be_refused_once(name: str, has_prefix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_each_once(SHAPE, CASES[name], monkeypatch, has_prefix=has_prefix)


@pytest.mark.parametrize("name", ["quest", "dsa", "oracle", "full_offload"])
def test_what_staging_had_got_before_it_was_refused_is_given_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = {"device_buffer_size": 40} if name == "full_offload" else {}
    traffic = Traffic(SHAPE, {**CASES[name], **buffer, "min_sparse_prompt_len": 30})
    request = traffic.begin(28, seed=1)
    traffic.prompt([request])
    tracker, manager = traffic.coordinator.trackers[request], traffic.coordinator.manager
    limit = max(traffic.config.device_buffer_size, 30)
    while tracker.seq_len <= limit:
        traffic.decode([request])

    def refuse(*args: Any) -> None:
        raise PoolExhaustedError("refused by the test")

    for owner in (manager.host_tokens, manager.buffers):
        with monkeypatch.context() as refusing:
            refusing.setattr(owner, "cover", refuse)
            out = traffic.decode([request])
        assert tracker.state is RequestState.DENSE
        assert not manager.host_tokens.holds(request)
        assert request not in manager.buffers
        torch.testing.assert_close(out[:, 0], traffic.exact(request, tracker.seq_len - 1), rtol=1e-4, atol=1e-4)
    traffic.decode([request])
    assert tracker.state is RequestState.SPARSE
    traffic.end(request)
    traffic.assert_empty()


def test_pages_of_a_window_stay_with_their_prompt() -> None:
    """A prompt that was let in gets to its end, whoever takes the free pages meanwhile."""
    traffic = Traffic(SHAPE, {**CASES["quest, a window"], "min_sparse_prompt_len": 16})
    pages = traffic.coordinator.manager.device.allocator
    request = traffic.begin(120, seed=1)
    taken = pages.alloc(pages.available)
    left = 120
    for chunk in (5, 20, 13, 20, 20, 20, 20, 2):
        traffic.prefill([request], [chunk])
        left -= chunk
        taken += pages.alloc(pages.available)
    assert not left
    traffic.coordinator.prompt_finished(request)
    traffic.decode([request])
    pages.free(taken)
    traffic.end(request)
    traffic.assert_empty()


def test_a_pass_with_a_request_that_ends_is_given_up_and_planned_anew() -> None:
    undisturbed, traffic = (Traffic(SHAPE, {**CASES["quest"], "min_sparse_prompt_len": 16}) for _ in range(2))
    c = traffic.coordinator
    for each in (undisturbed, traffic):
        requests = [each.begin(n, seed=n) for n in (50, 40)]
        each.prompt(requests)
        each.decode(requests)
    batch = c.plan_decode(requests)
    c.forward_begin(batch)
    q, k, v, _ = traffic._inputs(batch, 0)
    c.write_kv(0, batch, k, v)
    c.attention_begin(q, k, v, 0, batch)
    traffic.end(requests[1], "aborted")
    taken = traffic.begin(30, seed=7)
    assert taken == requests[1]  # its row has another request now
    with pytest.raises(StateError, match="forward_begin"):
        c.attention_end(q, 0, batch)
    with pytest.raises(StateError, match="forward_begin"):
        c.forward_end(batch)
    assert c.trackers[taken].seq_len == 0
    for _ in range(3):
        expected = undisturbed.decode(requests)[:, 0]
        torch.testing.assert_close(traffic.decode(requests[:1])[:, 0], expected, rtol=1e-5, atol=1e-5)
    traffic.end(requests[0])
    traffic.end(taken)
    traffic.assert_empty()


def test_a_plan_that_is_out_of_date_is_refused() -> None:
    traffic = Traffic(SHAPE, CASES["full"])
    c = traffic.coordinator
    request = traffic.begin(50, seed=1)
    first = c.plan_prefill([request], [20])
    traffic.prefill([request], [10])
    with pytest.raises(StateError, match="plan it anew"):
        c.forward_begin(first)
    planned = c.plan_prefill([request], [10])
    traffic.end(request)
    with pytest.raises(StateError, match="not known"):
        c.forward_begin(planned)


def test_a_request_is_in_a_pass_once() -> None:
    traffic = Traffic(SHAPE, CASES["full"])
    c = traffic.coordinator
    request = traffic.begin(20, seed=1)
    with pytest.raises(ConfigError, match="name each request once"):
        c.plan_prefill([request, request], [5, 5])
    traffic.prompt([request])
    with pytest.raises(ConfigError, match="name each request once"):
        c.plan_decode([request, request])
