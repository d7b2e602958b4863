"""What one engine computed, another goes on from: the same tokens, for every algorithm and state of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import retrieval_cases
import torch
from coordinator_rig import PAGE, config_of
from layer_traffic import Shape, Traffic, diverging, host_rows_are_right, prefix_of, publishing
from memory_connector import MemoryConnector, MemoryStorage
from prefix_cases import page_keys
from retrieval_cases import BLOCKS, INDEXER, SNAPKV
from sharing_rig import ALGORITHMS, NEW, OTHER_RESIDENCIES, SHORT, Rig, continued, prompt_of

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.connector import KV_SPEC, KVFormat
from kvcm.gpu_tier.engine.decoder_models import LatentDecoder, LatentShape, LlamaDecoder, LlamaShape
from kvcm.gpu_tier.engine.sharing_engine import sidecar_of
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.request_lifecycle import RequestState

QUEST = {"page": 4, "token_budget": 24}


# By default a prompt that continues a prefix keeps the prefix's centroids, which are not those of the whole prompt.
RETRIEVAL = {
    name: {**case, "algo": {**case["algo"], "turns": "rebuild"}} if case["algorithm"] == "pqcache" else case
    for name, case in retrieval_cases.CASES.items()
}


CASES: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full", "host_layout": "layer_first"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "oracle lru": {"algorithm": "oracle", "algo": {"k": 16}, "device_buffer_size": 20},
    "oracle device": {"algorithm": "oracle", "algo": {"k": 16}, "residency": "device"},
    "streaming_llm": {"algorithm": "streaming_llm", "algo": {"page": 4, "window": 16}, "host_layout": "page_head"},
    "quest lru": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 0}},
    "quest lru, layers skipped": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 4}},
    "quest device, layers skipped": {
        "algorithm": "quest", "algo": {**QUEST, "skip_layers": 4}, "residency": "device"
    },
    "quest lru, all layers skipped": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 9}},
    "quest, a window": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 4}, "prefill_window_tokens": 12},
    "dsa lru": {"algorithm": "dsa", "top_k": 16, "algo": INDEXER, "device_buffer_size": 20},
    "dsa device": {"algorithm": "dsa", "top_k": 16, "algo": INDEXER, "residency": "device"},
    "snapkv static": {"algorithm": "snapkv", "algo": SNAPKV},
    "snapkv lru": {"algorithm": "snapkv", "algo": {**SNAPKV, "mode": "retrievable", "reselect_every": 5}},
    "snapkv device": {"algorithm": "snapkv", "algo": SNAPKV, "residency": "device"},
    **RETRIEVAL,
    **{f"{name}, a window": {**RETRIEVAL[name], "prefill_window_tokens": 12} for name in BLOCKS},
}  # fmt: skip


CASES |= {f"{name}, dense": {**CASES[name], "min_sparse_prompt_len": 200} for name in ("quest lru", "dsa lru", "full")}


SHAPE = Shape(start_layer=3, max_requests=6)  # a later stage; `skip_layers` 4 leaves one of its layers dense


PROMPT, PREFIX, STEPS = 77, 64, 12


def decoded(traffic: Traffic, request: int, steps: int = STEPS) -> torch.Tensor:
    traffic.prompt([request], chunk=9)
    return torch.stack([traffic.decode([request]) for _ in range(steps)])


@pytest.mark.parametrize("name", CASES)
def test_a_request_with_a_prefix_decodes_the_same_bits_and_its_host_pages_hold_its_kv(name: str) -> None:
    traffic = publishing(SHAPE, CASES[name])
    whole = traffic.begin(PROMPT, seed=1)
    expected = decoded(traffic, whole)
    assert host_rows_are_right(traffic, whole) == PROMPT + STEPS
    attached = traffic.begin(PROMPT, 1, prefix_of(traffic, 1, PREFIX))
    assert traffic.coordinator.trackers[attached].cached_tokens == PREFIX
    assert torch.equal(decoded(traffic, attached), expected)
    assert host_rows_are_right(traffic, attached) == PROMPT + STEPS
    for request in (whole, attached):
        traffic.end(request)
    traffic.assert_empty()


@pytest.mark.parametrize("name", list(CASES)[::3])
def test_two_requests_share_a_prefix_and_diverge(name: str) -> None:
    traffic = publishing(SHAPE, CASES[name])
    prefix = prefix_of(traffic, 1, PREFIX)
    traffic.coordinator.manager.host.allocator.share(prefix.pages)
    shared = [traffic.begin(PROMPT, seed, prefix) for seed in (1, 2)]
    traffic.sequences[shared[1]] = diverging(traffic, 1, 2, PREFIX)
    traffic.prompt(shared, chunk=9)
    together = torch.stack([traffic.decode(shared) for _ in range(STEPS)])
    for request in shared:
        assert host_rows_are_right(traffic, request) == PROMPT + STEPS
        traffic.end(request)
    for row, seed in enumerate((1, 2)):
        alone = traffic.begin(PROMPT, seed)
        traffic.sequences[alone] = diverging(traffic, 1, seed, PREFIX)
        torch.testing.assert_close(together[:, :, row], decoded(traffic, alone)[:, :, 0], rtol=1e-5, atol=1e-5)
        traffic.end(alone)
    traffic.assert_empty()


@pytest.mark.parametrize("dtype", [KVDtype.F32, KVDtype.FP8])
@pytest.mark.parametrize("name", ["quest lru, layers skipped", "quest device, layers skipped", "quest, a window"])
def test_bounds_that_are_attached_and_bounds_that_are_rebuilt_select_the_same(name: str, dtype: KVDtype) -> None:
    """Rebuilt bounds come from stored keys, so bounds computed before must come from stored keys, too."""
    traffic = publishing(replace(SHAPE, dtype=dtype), CASES[name])
    outputs, sidecars = [], []
    for has_sidecar in (True, False):
        request = traffic.begin(PROMPT, 1, prefix_of(traffic, 1, PREFIX, has_sidecar=has_sidecar))
        outputs.append(decoded(traffic, request))
        sidecar = traffic.coordinator.algorithm.export_sidecar(request, 0, PREFIX)
        assert sidecar is not None
        sidecars.append(sidecar.data)
        traffic.end(request)
    assert torch.equal(*outputs)
    assert torch.equal(*sidecars)


@pytest.mark.parametrize(
    ("name", "has_sidecar", "n_tokens", "n_prompt", "message"),
    [
        ("dsa lru", False, PREFIX, PROMPT, "must cover 64"),
        ("quest lru", True, PREFIX + 8, PROMPT, "whole pages of 8 tokens"),
        ("quest lru", True, PREFIX, PREFIX, "prefix.n_tokens=64"),
        *(("quest lru", True, PREFIX, n_prompt, f"n_prompt={n_prompt}") for n_prompt in (0, 1000)),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused_and_released(
    name: str, has_sidecar: bool, n_tokens: int, n_prompt: int, message: str
) -> None:
    traffic = publishing(SHAPE, CASES[name])
    prefix = prefix_of(traffic, 1, PREFIX, has_sidecar=has_sidecar)
    with pytest.raises(ConfigError, match=message):
        traffic.coordinator.on_request_begin(n_prompt, replace(prefix, n_tokens=n_tokens))
    traffic.assert_empty()


@pytest.mark.parametrize("name", ["oracle lru", "streaming_llm", "snapkv static"])
def test_what_an_algorithm_does_not_represent_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = publishing(SHAPE, CASES[name])
    prefix = prefix_of(traffic, 1, PREFIX)

    def read(*args: Any) -> Any:
        raise AssertionError("all keys of the prefix are read for nothing")

    monkeypatch.setattr(traffic.coordinator.manager.host, "read", read)
    traffic.begin(PROMPT, 1, prefix)


@pytest.mark.parametrize("name", [name for name in CASES if "dense" in name])
def test_a_dense_request_with_a_prefix_becomes_sparse_when_it_has_grown(name: str) -> None:
    traffic = publishing(SHAPE, {**CASES[name], "min_sparse_prompt_len": 90})
    request = traffic.begin(PROMPT, 1, prefix_of(traffic, 1, PREFIX))
    traffic.prompt([request])
    tracker = traffic.coordinator.trackers[request]
    assert tracker.state is RequestState.DENSE
    for _ in range(30):
        traffic.decode([request])
    assert tracker.state is (RequestState.DENSE if name.startswith("full") else RequestState.SPARSE)
    assert host_rows_are_right(traffic, request) == PROMPT + 30
    assert tracker.exact_tokens == (PROMPT + 30 if name.startswith("full") else 91)


KEYS = partial(page_keys, page=PAGE)


TOKENS = prompt_of(200)


SHARED = 192  # full pages that leave a token of the prompt


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def rig_of(storage: MemoryStorage, model: str, algorithm: str, **options: Any) -> Rig:
    return Rig(model, algorithm, lambda *_: MemoryConnector(storage), KEYS, **options)


MODELS_OF = [("llama", "quest"), ("llama", "oracle"), ("latent", "dsa")]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "algorithm", "options"),
    [
        *((model, algorithm, {}) for model, algorithm in ALGORITHMS),
        *((model, algorithm, {"min_sparse_prompt_len": 300}) for model, algorithm in MODELS_OF),  # decoded densely
        *(("latent" if name == "dsa" else "llama", name, case) for name, case in OTHER_RESIDENCIES.items()),
        ("llama", "quest", {"host_layout": Layout.LAYER_FIRST, "dtype": KVDtype.FP8}),
        ("llama", "quest", {"host_layout": Layout.PAGE_HEAD, "dtype": KVDtype.BF16}),
        ("latent", "dsa", {"host_layout": Layout.PAGE_HEAD, "dtype": KVDtype.FP8}),
    ],
)
def test_another_engine_decodes_the_same_tokens_without_prefill(
    storage: MemoryStorage, model: str, algorithm: str, options: dict[str, Any]
) -> None:
    expected = continued(model, algorithm, TOKENS, **options)
    first, second = (rig_of(storage, model, algorithm, **options) for _ in range(2))
    assert first.run(TOKENS) == (expected, 0, -(-200 // 32))
    assert second.run(TOKENS) == (expected, SHARED, 1)
    assert first.is_empty()
    assert second.is_empty()


def forget_sidecar(storage: MemoryStorage, *pages: int) -> None:
    for page in pages:
        parts = storage.blocks[KEYS(TOKENS)[page]]
        for name in parts.keys() - {KV_SPEC}:
            del parts[name]


def test_dsa_without_its_index_keys_computes_the_prompt(storage: MemoryStorage) -> None:
    expected = continued("latent", "dsa", TOKENS)
    rig_of(storage, "latent", "dsa").run(TOKENS)
    forget_sidecar(storage, *range(12))
    tokens, attached, steps = rig_of(storage, "latent", "dsa").run(TOKENS)
    assert (tokens, attached) == (expected, 0)
    assert steps > 1


def test_quest_without_its_bounds_computes_them_from_the_keys(storage: MemoryStorage) -> None:
    expected = continued("llama", "quest", TOKENS)
    rig_of(storage, "llama", "full").run(TOKENS)
    assert all(parts.keys() == {KV_SPEC} for parts in storage.blocks.values())
    assert rig_of(storage, "llama", "quest").run(TOKENS) == (expected, SHARED, 1)


def test_a_storage_that_is_down_costs_nothing_but_time(storage: MemoryStorage) -> None:
    expected = continued("llama", "quest", TOKENS)
    rig = rig_of(storage, "llama", "quest")
    assert isinstance(rig.connector, MemoryConnector)
    rig.connector.is_down = True
    assert rig.run(TOKENS)[0] == expected
    assert rig.is_empty()


def test_what_the_storage_did_not_take_is_offered_again_at_the_end(storage: MemoryStorage) -> None:
    rig = rig_of(storage, "latent", "dsa")
    assert isinstance(rig.connector, MemoryConnector)
    rig.connector.is_down = True
    number = rig.engine.submit(TOKENS)
    while len(rig.engine.tokens(number)) < len(TOKENS) + 3:
        rig.engine.step()
    rig.store.step()
    assert rig.store.counters.failed_pages == 12
    rig.connector.is_down = False
    rig.engine.finish(number)
    assert rig.store.flush(10)
    assert rig_of(storage, "latent", "dsa").run(TOKENS)[1] == SHARED
    assert rig.is_empty()


def test_a_prompt_that_waits_for_its_prefix_does_not_stop_the_others(storage: MemoryStorage) -> None:
    rig_of(storage, "llama", "quest").run(TOKENS)
    rig = rig_of(storage, "llama", "quest")
    other = rig.engine.submit(prompt_of(20, 5))
    rig.engine.step()
    assert isinstance(rig.connector, MemoryConnector)
    rig.connector.is_manual = True
    waiting = rig.engine.submit(TOKENS)
    for _ in range(5):
        assert set(rig.engine.step()) == {other}
    assert rig.engine.running == (other,)
    assert rig.engine.tokens(waiting) == TOKENS
    assert rig.engine.attached_tokens(waiting) == 0
    rig.connector.is_manual = False
    while waiting not in rig.engine.step():
        assert len(rig.engine.tokens(other)) < 100
    assert rig.engine.attached_tokens(waiting) == SHARED
    rig.engine.finish(waiting)
    rig.engine.finish(other)
    assert rig.store.flush(10)
    assert rig.is_empty()


@pytest.mark.parametrize("how", ["abort", "finish"])
@pytest.mark.parametrize("steps", [0, 2, 12])
def test_prompts_may_end_at_any_time(storage: MemoryStorage, steps: int, how: str) -> None:
    rig_of(storage, "latent", "dsa").run(TOKENS)
    rig = rig_of(storage, "latent", "dsa")
    prompts = [TOKENS, prompt_of(100, 3)]
    numbers = [rig.engine.submit(prompt) for prompt in prompts]
    for _ in range(steps):
        rig.engine.step()
    for number in numbers:
        getattr(rig.engine, how)(number)
    rig.engine.abort(numbers[0])  # once more is fine
    with pytest.raises(StateError, match="no such prompt"):
        rig.engine.tokens(numbers[0])
    assert rig.store.flush(10)
    assert rig.is_empty()


def test_prompts_wait_for_free_pages(storage: MemoryStorage) -> None:
    prompts = [prompt_of(150, seed) for seed in range(4)]
    rig = rig_of(storage, "llama", "full", pages=25)
    waiting = {rig.engine.submit(prompt): continued("llama", "full", prompt) for prompt in prompts}
    while waiting:
        rig.engine.step()
        for number, expected in list(waiting.items()):
            if len(rig.engine.tokens(number)) == 150 + NEW:
                assert rig.engine.tokens(number) == expected
                rig.engine.finish(number)
                del waiting[number]
    assert rig.store.flush(60)
    assert isinstance(rig.connector, MemoryConnector)
    assert rig.connector.questions <= 2 * len(prompts)  # and not one in every step
    assert rig.is_empty()


def test_a_prompt_that_never_fits_is_an_error_and_leaves_nothing(storage: MemoryStorage) -> None:
    rig_of(storage, "llama", "full").run(TOKENS)
    rig = rig_of(storage, "llama", "full", pages=8, host_bytes=1 << 20)
    rig.engine.submit(TOKENS)
    assert rig.engine.step() == {}  # the prefix is not there yet
    with pytest.raises(PoolExhaustedError):
        rig.engine.step()
    assert rig.engine.step() == {}
    assert rig.is_empty()


@pytest.mark.parametrize(("model", "algorithm"), MODELS_OF)
def test_only_densely_decoded_tokens_are_published(storage: MemoryStorage, model: str, algorithm: str) -> None:
    options = {"min_sparse_prompt_len": 230, "publish_every": 1}
    rig = rig_of(storage, model, algorithm, **options)
    number = rig.engine.submit(TOKENS)
    states = set[RequestState]()
    while len(rig.engine.tokens(number)) < len(TOKENS) + 60:
        rig.engine.step()
        states |= {tracker.state for tracker in rig.coordinator.trackers}
    answer = rig.engine.tokens(number)
    rig.engine.finish(number)
    assert rig.store.flush(10)
    assert {RequestState.DENSE, RequestState.SPARSE} <= states
    assert set(storage.blocks) == set(KEYS(answer[:230]))
    # A conversation goes on: the engine computes sparsely decoded tokens again, exactly.
    expected = continued(model, algorithm, answer, 6, **options)
    assert rig_of(storage, model, algorithm, **options).run(answer, 6)[:2] == (expected, 224)


@pytest.mark.parametrize(("model", "algorithm"), MODELS_OF)
def test_prompts_longer_than_their_window_on_the_device(storage: MemoryStorage, model: str, algorithm: str) -> None:
    tokens = TOKENS + prompt_of(90, 7)
    expected = continued(model, algorithm, tokens, 6)
    rig_of(storage, model, algorithm, prefill_window_tokens=48).run(TOKENS, 2)
    rig = rig_of(storage, model, algorithm, prefill_window_tokens=48)
    assert rig.run(tokens, 6)[:2] == (expected, SHARED)
    assert rig.is_empty()
    assert rig_of(storage, model, algorithm).run(tokens, 6) == (expected, 288, 1)


@pytest.mark.parametrize(("steps", "has_storage"), [(1, True), (3, False), (15, True)])
@pytest.mark.parametrize(("model", "algorithm"), [("llama", "quest"), ("latent", "dsa")])
def test_a_retracted_prompt_goes_on_from_the_pool(
    storage: MemoryStorage, steps: int, has_storage: bool, model: str, algorithm: str
) -> None:
    options = {"min_sparse_prompt_len": 300}  # so that all of it is exact
    expected = continued(model, algorithm, TOKENS, 40, **options)
    connect = (lambda *_: MemoryConnector(storage)) if has_storage else None
    rig = Rig(model, algorithm, connect, KEYS, **options)
    number = rig.engine.submit(TOKENS)
    while not rig.engine.running:
        rig.engine.step()
    for _ in range(steps - 1):
        rig.engine.step()
    before = len(rig.engine.tokens(number))
    rig.engine.retract(number)
    rig.engine.retract(number)  # it is off already
    assert rig.engine.running == ()
    assert rig.coordinator.manager.device.allocator.in_use == 0
    while len(rig.engine.tokens(number)) < 240:
        rig.engine.step()
    assert rig.engine.tokens(number) == expected
    computed = min(before - 1, steps * 32)  # tokens that had KV
    assert rig.engine.attached_tokens(number) == computed // PAGE * PAGE
    rig.engine.finish(number)
    assert rig.store.flush(10)
    assert rig.is_empty()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("model", "algorithm"), [*MODELS_OF, ("llama", "full_offload"), ("llama", "snapkv")])
def test_a_gpu_goes_on_from_its_own_prefix(
    storage: MemoryStorage, model: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_TIER_KERNELS", "auto")
    decoder: Any = LlamaDecoder.random(LlamaShape(), device="cuda")
    if model == "latent":
        decoder = LatentDecoder.random(LatentShape(), device="cuda")
    options = {"decoder": decoder, "device": "cuda"}
    tokens, attached, _ = rig_of(storage, model, algorithm, **options).run(TOKENS)
    assert attached == 0
    rig = rig_of(storage, model, algorithm, **options)
    assert rig.run(TOKENS) == (tokens, SHARED, 1)
    assert rig.is_empty()


LAYERS = 3


SEGMENTS = 5  # whole ones of RetroInfer in 200 tokens; number i lies beside pages 1 + 2i and 2 + 2i


def indexed_rig(storage: MemoryStorage, algorithm: str, **algo: Any) -> Rig:
    settings = {**SHORT[algorithm]["algo"], **algo}
    return Rig("llama", algorithm, lambda *_: MemoryConnector(storage), KEYS, algo=settings)


def counted(rig: Rig) -> tuple[int, int]:
    """Return the indexes that were built and taken over, of one layer."""
    algorithm = rig.coordinator.algorithm
    assert algorithm.built % LAYERS == algorithm.imported % LAYERS == 0
    return algorithm.built // LAYERS, algorithm.imported // LAYERS


@pytest.mark.ci
@pytest.mark.parametrize(
    ("algorithm", "page", "taken_over"),
    [
        ("retroinfer", 0, 0),  # sidecars are those of leading pages
        ("retroinfer", 1, 0), ("retroinfer", 2, 0), ("retroinfer", 3, 1), ("retroinfer", 8, 3), ("retroinfer", 11, 5),
        ("pqcache", 0, 0), ("pqcache", 1, 1), ("pqcache", 11, 1),
        ("retroinfer", None, SEGMENTS), ("pqcache", None, 1),  # none is missing
    ],
)  # fmt: skip
def test_only_a_sidecar_that_is_missing_is_built(
    storage: MemoryStorage, algorithm: str, page: int | None, taken_over: int
) -> None:
    first, second = indexed_rig(storage, algorithm), indexed_rig(storage, algorithm)
    expected = first.run(TOKENS)[0]
    assert expected == continued("llama", algorithm, TOKENS)
    assert counted(first)[1] == 0
    forget_sidecar(storage, *([] if page is None else [page]))
    assert second.run(TOKENS) == (expected, 192, 1)
    assert counted(second) == (counted(first)[0] - taken_over, taken_over)
    assert second.is_empty()


@pytest.mark.parametrize(("algorithm", "other"), [("retroinfer", {"iterations": 1}), ("pqcache", {"seed": 1})])
def test_other_index_settings_are_another_index(storage: MemoryStorage, algorithm: str, other: dict[str, int]) -> None:
    indexed_rig(storage, algorithm, **other).run(TOKENS)
    second = indexed_rig(storage, algorithm)
    assert second.run(TOKENS) == (continued("llama", algorithm, TOKENS), 192, 1)
    assert counted(second)[1] == 0


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        ("retroinfer", {"control": "cpu"}), ("retroinfer", {"mode": "gpu_only"}),
        ("retroinfer", {"retrieval": 0.4, "cache_ratio": 0.5, "local": 9}),
        ("pqcache", {"token_budget": 40}), ("pqcache", {"cache_tokens": 0, "kmeans_threads": 2}),
        ("pqcache", {"policy": "lfu"}),
    ],
)  # fmt: skip
def test_an_engines_own_settings_change_no_index(storage: MemoryStorage, algorithm: str, own: dict[str, Any]) -> None:
    indexed_rig(storage, algorithm).run(TOKENS)
    second = indexed_rig(storage, algorithm, **own)
    assert second.run(TOKENS)[1:] == (192, 1)
    assert counted(second)[1] == {"retroinfer": SEGMENTS, "pqcache": 1}[algorithm]
    assert second.is_empty()


@pytest.mark.parametrize("how", ["given", "automatic"])
def test_codes_of_another_quantisation_have_another_name(how: str) -> None:
    """Which of them is automatic follows from the longest request of an engine."""
    names = set()
    for max_tokens in (256, 16384, 32768):
        geometry = KVGeometry(KVKind.MHA, 1, 1, 16, 16, KVDtype.F32, PAGE)
        algo = {"m": 2, "b": 6} if how == "given" else {}
        coordinator = build(
            config_of("pqcache", {"algo": {**algo, "iterations": 3}}), geometry, num_q_heads=1, sm_scale=1.0,
            device_pages=20, max_requests=1, max_tokens=max_tokens, publishes=True,
        )  # fmt: skip
        kv = KVFormat.of(geometry, Layout.PAGE_FIRST, model="m", weights="0", rope={})
        spec = sidecar_of(coordinator, kv)
        assert spec is not None
        names.add((spec.name, spec.page_bytes))
    assert len(names) == len({name for name, _ in names}) == (1 if how == "given" else 2)


# Conversations.
QUESTIONS = (195, 45, 35)  # tokens of each turn


ANSWER = 12


def conversation(rig_of_turn: Callable[[], Rig]) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """Return the tokens after each turn, counts of segments built and imported, and of tokens attached."""
    tokens: list[int] = []
    found, counts, attached = [], [], []
    for seed, length in enumerate(QUESTIONS):
        rig = rig_of_turn()
        built, imported = counted(rig)
        tokens, cached, _ = rig.run(tokens + prompt_of(length, 20 + seed), ANSWER)
        found.append(tokens)
        now = counted(rig)
        counts.append((now[0] - built, now[1] - imported))
        attached.append(cached)
        assert rig.is_empty()
    return found, counts, attached


def test_turns_of_retroinfer_are_those_of_one_prompt(storage: MemoryStorage) -> None:
    """Each turn builds the segments that two turns share, and still imports the segments behind them."""
    found, counts, attached = conversation(lambda: indexed_rig(storage, "retroinfer"))
    start = 0
    for turn, length in zip(found, QUESTIONS, strict=True):
        assert turn == continued("llama", "retroinfer", turn[: start + length], ANSWER)
        start = len(turn)
    assert attached == [0, 192, 240]
    # Segment 5 ends with token 195, and turn 1 stored its first page before it was whole. Turn 3 has it between others.
    assert [imported for _, imported in counts] == [0, 5, 6]
    one = indexed_rig(storage, "retroinfer")
    assert conversation(lambda: one)[0] == found


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("extend", [(1, 0), (0, 1), (0, 1)]),
        # Of the codebooks of turns only that of the first comes with later prompts' leading pages.
        ("per_turn", [(1, 0), (1, 1), (1, 1)]),
        ("rebuild", [(1, 0), (1, 0), (1, 0)]),
    ],
)
def test_turns_of_pqcache(storage: MemoryStorage, turns: str, expected: list[tuple[int, int]]) -> None:
    found, counts, attached = conversation(lambda: indexed_rig(storage, "pqcache", turns=turns))
    assert attached == [0, 192, 240]
    assert counts == expected
    if turns == "rebuild":
        assert all(parts.keys() == {KV_SPEC} for parts in storage.blocks.values())
        assert found[-1] == continued("llama", "pqcache", found[-1][:-ANSWER], ANSWER, algo=SHORT["pqcache"]["algo"])
    # Whether pages come from a storage or lie in the pool makes no difference.
    one = indexed_rig(MemoryStorage(), "pqcache", turns=turns)
    assert conversation(lambda: one) == (found, counts, attached)
