"""The engine over the coordinator against one over plain tensors, and buffers of any size against KV on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coordinator_rig import MODELS, config_of, coordinator_of, nothing_is_held, prompt
from engine_rig import SelectingHooks
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.engine.decode_engine import DecodeEngine
from kvcm.gpu_tier.errors import PoolExhaustedError
from kvcm.gpu_tier.geometry import KVDtype
from kvcm.gpu_tier.request_lifecycle import RequestState

pytestmark = pytest.mark.ci

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 120)

# Settings under which far less than a request is attended to, or moved, at a time.
FEW_TOKENS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("algorithm", sorted(FEW_TOKENS))
@settings(max_examples=examples(60), deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=25),
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
        algorithm, FEW_TOKENS[algorithm], host_layout=layout, promote_newest=promote, min_sparse_prompt_len=17
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


# Settings that select much less than the prompts have.
SMALL: dict[str, dict[str, Any]] = {
    "oracle": {"top_k": 16, "algo": {"k": 16}},
    "streaming_llm": {"top_k": 48, "algo": {"sink": 4, "window": 20, "page": 8}},
    "quest": {"top_k": 48, "algo": {"token_budget": 48, "page": 8, "recent_pages": 2, "skip_layers": 1}},
    "dsa": {"top_k": 16, "algo": {"index_heads": 4, "index_dim": 32}},
}
PER_HEAD = {"top_k": 48, "algo": {**SMALL["quest"]["algo"], "heads": "per_head", "skip_layers": 0}}
BUFFERS: list[dict[str, Any]] = [
    {"device_buffer_size": 48},
    {"device_buffer_size": 96, "loads_hottest": True},
    {"device_buffer_size": 64, "promote_newest": False, "host_layout": "page_head"},
    {"device_buffer_size": 256, "host_layout": "layer_first"},
]


def run(model: Any, algorithm: str, settings: dict[str, Any], dtype: KVDtype) -> tuple[list[list[int]], list[Any]]:
    """Return the tokens of some requests and their logits in every step."""
    coordinator = coordinator_of(model, config_of(algorithm, settings), pages=220, dtype=dtype)
    engine = DecodeEngine(model, coordinator, chunk_tokens=50, pad_to=4)
    requests = [engine.add(prompt(length, length)) for length in (47, 100, 150)]
    logits = []
    for _ in range(18):
        engine.step()
        logits.append([engine.logits[request] for request in requests if request in engine.logits])
    return [engine.tokens(request) for request in requests], logits


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("algorithm", [*sorted(SMALL), "quest per head"])
def test_buffers_give_what_kv_on_the_device_gives(algorithm: str, name: str) -> None:
    dtype = KVDtype.FP8 if name == "latent" else KVDtype.F32
    model = MODELS[name]
    settings = SMALL.get(algorithm, PER_HEAD)
    algorithm = algorithm.split()[0]
    if algorithm == "dsa" and name == "llama":
        settings = settings | {"algo": {"index_source": "proxy"}}
    tokens, logits = run(model, algorithm, settings | {"residency": "device"}, dtype)
    exact, _ = run(model, "full", {}, dtype)
    assert tokens != exact  # otherwise nothing was left out
    for buffer in BUFFERS:
        again, again_logits = run(model, algorithm, settings | buffer, dtype)
        assert again == tokens, buffer
        torch.testing.assert_close(again_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_snapkv_keeps_is_the_same_whether_the_rest_is_dropped_or_not(name: str) -> None:
    model = MODELS[name]
    runs = [
        run(model, "snapkv", {"algo": {"cap": 24, "w_obs": 4, "mode": mode}} | extra, KVDtype.F32)
        for mode, extra in (("drop", {}), ("retrievable", {}), ("retrievable", {"residency": "device"}))
    ]
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert runs[0][0] != run(model, "full", {}, KVDtype.F32)[0]
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runs[2][1], runs[0][1], rtol=1e-4, atol=1e-4)
