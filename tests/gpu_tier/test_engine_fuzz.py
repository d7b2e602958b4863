"""Requests that come, decode, end and come back in any order get what they would get alone."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import pytest
import torch
from coordinator_rig import MODELS, config_of, coordinator_of, nothing_is_held, prompt
from engine_rig import SelectingHooks
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.config import SparseConfig
from gpu_tier.coordinator import SparseCoordinator
from gpu_tier.engine.decode_engine import DecodeEngine
from gpu_tier.errors import PoolExhaustedError
from gpu_tier.trackers import RequestState

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 120)

# Settings under which far less than a request is attended to, or moved, at a time.
SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "full_offload": {"algo": {"chunk_tokens": 32}},
    "oracle": {"top_k": 12, "device_buffer_size": 20, "algo": {"k": 12}},
    "streaming_llm": {"top_k": 48, "device_buffer_size": 64, "algo": {"sink": 4, "window": 20, "page": 8}},
}


def selector(algorithm: str, sm_scale: float) -> Any:
    """What each algorithm selects, from its definition."""

    def best(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.T * sm_scale).softmax(-1).sum(0).topk(min(12, len(k))).indices

    def ends(q: Tensor, k: Tensor) -> Tensor:
        ids = torch.arange(len(k))
        return ids[(ids < 8) | (ids >= max(0, len(k) - 20) // 8 * 8)]

    def everything(q: Tensor, k: Tensor) -> Tensor:
        return torch.arange(len(k))

    return {"oracle": best, "streaming_llm": ends}.get(algorithm, everything)


class Pair:
    """An engine over the coordinator and one over plain tensors, which get the same requests."""

    def __init__(self, coordinator: SparseCoordinator, model: Any, algorithm: str, chunk: int, pad_to: int) -> None:
        self.coordinator = coordinator
        hooks = SelectingHooks(model.v_head_dim, model.sm_scale, selector(algorithm, model.sm_scale))
        hooks.is_sparse = self.is_sparse
        self.ours = DecodeEngine(model, coordinator, chunk_tokens=chunk, pad_to=pad_to)
        self.plain = DecodeEngine(model, hooks, chunk_tokens=chunk)
        self.requests: dict[int, int] = {}

    def is_sparse(self, theirs: int) -> bool:
        """Whether the coordinator decoded a request of the plain engine sparsely."""
        mine = next(mine for mine, request in self.requests.items() if request == theirs)
        return self.coordinator.trackers[mine].state is RequestState.SPARSE

    def add(self, tokens: list[int]) -> None:
        try:
            mine = self.ours.add(tokens)
        except PoolExhaustedError:
            return
        self.requests[mine] = self.plain.add(tokens)

    def end(self, index: int, how: str) -> None:
        if not self.requests:
            return
        mine = sorted(self.requests)[index % len(self.requests)]
        theirs = self.requests.pop(mine)
        for engine, request in ((self.ours, mine), (self.plain, theirs)):
            getattr(engine, how)(request)

    def step(self) -> None:
        mine = self.ours.step()
        assert {self.requests[request]: token for request, token in mine.items()} == self.plain.step()
        for request in mine:
            logits = self.plain.logits[self.requests[request]]
            torch.testing.assert_close(self.ours.logits[request], logits, rtol=1e-4, atol=1e-4)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(LENGTHS)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["abort", "finish", "retract"]), st.integers(0, 7)),
)


@pytest.mark.parametrize("algorithm", sorted(SMALL))
@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    actions=st.lists(ACTIONS, min_size=5, max_size=15),
    chunk=st.sampled_from([7, 16, 64, 200]),
    pad_to=st.sampled_from([0, 9]),
    layout=st.sampled_from(["layer_first", "page_first", "page_head"]),
    promote=st.booleans(),
)
def test_any_order_of_requests_gives_what_plain_tensors_give(
    algorithm: str, name: str, actions: list[tuple[str, int]], chunk: int, pad_to: int, layout: str, promote: bool
) -> None:
    model = MODELS[name]
    config = config_of(
        algorithm, SMALL[algorithm], host_layout=layout, promote_newest=promote, min_sparse_prompt_len=17
    )
    coordinator = coordinator_of(model, config, pages=140)
    pair = Pair(coordinator, model, algorithm, chunk, pad_to)
    for action, value in actions:
        if action == "add":
            pair.add(prompt(value, len(pair.requests)))
        elif action == "step":
            for _ in range(value):
                pair.step()
        else:
            pair.end(value, action)
    while pair.requests:
        pair.step()
        pair.end(0, "finish")
    assert nothing_is_held(coordinator)


# Settings of algorithms whose representations outlive a step; each selects much less than a request has.
REPRESENTED: dict[str, dict[str, Any]] = {
    "quest": {"top_k": 48, "algo": {"token_budget": 48, "page": 8, "recent_pages": 2, "skip_layers": 1}},
    "quest per head": {"top_k": 48, "algo": {"token_budget": 48, "page": 8, "skip_layers": 0, "heads": "per_head"}},
    "dsa": {"top_k": 16, "algo": {"index_heads": 4, "index_dim": 32}},
    "snapkv": {"algo": {"cap": 24, "w_obs": 4}},
    "snapkv anew": {
        "residency": "lru",
        "device_buffer_size": 256,
        "algo": {"cap": 24, "w_obs": 4, "mode": "retrievable", "reselect_every": 5},
    },
}
STEPS = 30


@cache
def alone(algorithm: str, name: str, length: int, seed: int) -> list[int]:
    """What a request gets in an engine of its own."""
    engine = DecodeEngine(MODELS[name], coordinator_of(MODELS[name], represented(algorithm, name)))
    request = engine.add(prompt(length, seed))
    for _ in range(STEPS):
        engine.step()
    return engine.tokens(request)


def represented(algorithm: str, name: str) -> SparseConfig:
    settings = REPRESENTED[algorithm]
    if algorithm == "dsa" and name == "llama":
        settings = settings | {"algo": {"index_source": "proxy"}}
    return config_of(algorithm.split()[0], settings, min_sparse_prompt_len=17)


@pytest.mark.parametrize("algorithm", sorted(REPRESENTED))
@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    actions=st.lists(ACTIONS, min_size=5, max_size=12),
    chunk=st.sampled_from([7, 16, 64, 200]),
)
def test_requests_get_what_they_get_alone(
    algorithm: str, name: str, actions: list[tuple[str, int]], chunk: int
) -> None:
    coordinator = coordinator_of(MODELS[name], represented(algorithm, name), pages=140)
    engine = DecodeEngine(MODELS[name], coordinator, chunk_tokens=chunk)
    lengths: dict[int, int] = {}
    for action, value in actions:
        if action == "add":
            with contextlib.suppress(PoolExhaustedError):
                lengths[engine.add(prompt(value, value))] = value
        elif action == "step":
            for _ in range(value):
                engine.step()
        elif lengths:
            request = sorted(lengths)[value % len(lengths)]
            check_alone(engine.tokens(request), alone(algorithm, name, lengths[request], lengths.pop(request)))
            engine.abort(request)
    for request, length in lengths.items():
        check_alone(engine.tokens(request), alone(algorithm, name, length, length))
        engine.abort(request)
    assert nothing_is_held(coordinator)


def check_alone(tokens: list[int], expected: list[int]) -> None:
    assert tokens[: len(expected)] == expected[: len(tokens)]
