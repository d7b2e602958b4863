"""What one engine computed, another goes on from: the same tokens, without the prefill, for every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from coordinator_rig import PAGE
from memory_connector import MemoryConnector, MemoryStorage
from prefix_cases import page_keys
from sharing_rig import ALGORITHMS, NEW, OTHER_RESIDENCIES, Rig, continued, prompt_of

from gpu_tier.connector import KV_SPEC
from gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from gpu_tier.geometry import Layout
from gpu_tier.rows import KVDtype

KEYS = partial(page_keys, page=PAGE)
TOKENS = prompt_of(200)
PREFIX = 192  # full pages that leave a token of the prompt


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def rig_of(storage: MemoryStorage, model: str, algorithm: str, **options: Any) -> Rig:
    return Rig(model, algorithm, lambda *_: MemoryConnector(storage), KEYS, **options)


@pytest.mark.parametrize(("model", "algorithm"), ALGORITHMS)
def test_another_engine_decodes_the_same_tokens_without_prefill(
    storage: MemoryStorage, model: str, algorithm: str
) -> None:
    expected = continued(model, algorithm, TOKENS)
    first, second = rig_of(storage, model, algorithm), rig_of(storage, model, algorithm)
    tokens, attached, steps = first.run(TOKENS)
    assert (tokens, attached) == (expected, 0)
    assert steps == -(-200 // 32)
    tokens, attached, steps = second.run(TOKENS)
    assert (tokens, attached, steps) == (expected, PREFIX, 1)
    assert first.is_empty()
    assert second.is_empty()


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [("llama", "quest"), ("latent", "dsa"), ("llama", "snapkv"), ("llama", "pqcache"), ("llama", "retroinfer")],
)
def test_residencies_that_need_no_host_copy(storage: MemoryStorage, model: str, algorithm: str) -> None:
    options = OTHER_RESIDENCIES[algorithm]
    expected = continued(model, algorithm, TOKENS, 6, **options)
    assert rig_of(storage, model, algorithm, **options).run(TOKENS, 6)[0] == expected
    assert rig_of(storage, model, algorithm, **options).run(TOKENS, 6) == (expected, PREFIX, 1)


@pytest.mark.parametrize(
    ("model", "algorithm", "layout", "dtype"),
    [
        ("llama", "quest", Layout.LAYER_FIRST, KVDtype.FP8),
        ("llama", "quest", Layout.PAGE_HEAD, KVDtype.BF16),
        ("latent", "dsa", Layout.PAGE_HEAD, KVDtype.FP8),
    ],
)
def test_layouts_and_dtypes(storage: MemoryStorage, model: str, algorithm: str, layout: Layout, dtype: KVDtype) -> None:
    options: dict[str, Any] = {"host_layout": layout, "dtype": dtype}
    expected = continued(model, algorithm, TOKENS, 6, **options)
    assert rig_of(storage, model, algorithm, **options).run(TOKENS, 6)[0] == expected
    assert rig_of(storage, model, algorithm, **options).run(TOKENS, 6) == (expected, PREFIX, 1)


@pytest.mark.parametrize(("model", "algorithm"), [("llama", "quest"), ("latent", "dsa")])
def test_sidecars_select_what_the_original_selects(storage: MemoryStorage, model: str, algorithm: str) -> None:
    """The representations that were attached are those that were computed, bit for bit."""
    rigs = [rig_of(storage, model, algorithm) for _ in range(2)]
    exported = []
    for rig in rigs:
        number = rig.engine.submit(TOKENS)
        while len(rig.engine.tokens(number)) == len(TOKENS):
            rig.engine.step()
        sidecar = rig.coordinator.algorithm.export_sidecar(0, 0, PREFIX)
        assert sidecar is not None
        exported.append(sidecar.data)
        rig.engine.finish(number)
    assert torch.equal(exported[0], exported[1])


def test_dsa_without_its_index_keys_computes_the_prompt(storage: MemoryStorage) -> None:
    expected = continued("latent", "dsa", TOKENS)
    rig_of(storage, "latent", "dsa").run(TOKENS)
    for parts in storage.blocks.values():
        for name in parts.keys() - {KV_SPEC}:
            del parts[name]
    tokens, attached, steps = rig_of(storage, "latent", "dsa").run(TOKENS)
    assert (tokens, attached) == (expected, 0)
    assert steps > 1


def test_quest_without_its_bounds_computes_them_from_the_keys(storage: MemoryStorage) -> None:
    expected = continued("llama", "quest", TOKENS)
    rig_of(storage, "llama", "full").run(TOKENS)
    assert all(parts.keys() == {KV_SPEC} for parts in storage.blocks.values())
    assert rig_of(storage, "llama", "quest").run(TOKENS) == (expected, PREFIX, 1)


@pytest.mark.parametrize(("model", "algorithm"), [("llama", "oracle"), ("latent", "dsa")])
def test_prompts_that_diverge_behind_the_same_prefix(storage: MemoryStorage, model: str, algorithm: str) -> None:
    prompts = [TOKENS[:130] + prompt_of(60, seed) for seed in (1, 2, 3)]
    expected = [continued(model, algorithm, prompt) for prompt in prompts]
    rig_of(storage, model, algorithm).run(TOKENS[:130])
    rig = rig_of(storage, model, algorithm)
    assert answers_of(rig, prompts) == expected
    assert rig.store.counters.storage_tokens == 128
    assert rig.store.counters.host_tokens == 2 * 128  # loaded once for the three
    assert rig.is_empty()
    assert [rig_of(storage, model, algorithm).run(prompt)[:2] for prompt in prompts] == [
        (tokens, 176) for tokens in expected
    ]


def answers_of(rig: Rig, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    """Run prompts at once."""
    numbers = [rig.engine.submit(prompt) for prompt in prompts]
    found: dict[int, list[int]] = {}
    while len(found) < len(numbers):
        rig.engine.step()
        for number, prompt in zip(numbers, prompts, strict=True):
            if number not in found and len(rig.engine.tokens(number)) == len(prompt) + new:
                found[number] = rig.engine.tokens(number)
                rig.engine.finish(number)
    assert rig.store.flush(60)
    return [found[number] for number in numbers]


def test_a_conversation_goes_on_from_its_own_answer(storage: MemoryStorage) -> None:
    """Blocks decoded with full attention are exact, and shared."""
    first = rig_of(storage, "llama", "full", publish_every=1)
    answer, _, _ = first.run(TOKENS, new=40)
    assert len(storage.blocks) == 239 // PAGE
    question = answer + prompt_of(10, 9)
    tokens, attached, _ = rig_of(storage, "llama", "full").run(question)
    assert attached == 224
    assert tokens == continued("llama", "full", question)


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
    assert rig_of(storage, "latent", "dsa").run(TOKENS)[1] == PREFIX
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
    assert rig.engine.attached_tokens(waiting) == PREFIX
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


def test_prompts_wait_for_room(storage: MemoryStorage) -> None:
    prompts = [prompt_of(150, seed) for seed in range(4)]
    expected = [continued("llama", "full", prompt) for prompt in prompts]
    rig = rig_of(storage, "llama", "full", pages=25)
    assert answers_of(rig, prompts) == expected
    assert isinstance(rig.connector, MemoryConnector)
    assert rig.connector.questions <= 2 * len(prompts)  # and not one in every step
    assert rig.is_empty()


def test_more_prompts_than_the_tables_have_rows(storage: MemoryStorage) -> None:
    rig_of(storage, "llama", "quest").run(TOKENS[:50])
    prompts = [TOKENS[:49] + prompt_of(5, seed) for seed in range(10)]
    rig = rig_of(storage, "llama", "quest")
    assert [len(tokens) for tokens in answers_of(rig, prompts, new=3)] == [57] * 10
    assert rig.store.counters.host_tokens + rig.store.counters.storage_tokens >= 10 * 48
    assert rig.is_empty()


@pytest.mark.parametrize("length", [0, 192, 1000])
def test_a_refused_request_releases_its_prefix(storage: MemoryStorage, length: int) -> None:
    rig_of(storage, "llama", "quest").run(TOKENS)
    rig = rig_of(storage, "llama", "quest")
    prefix = rig.store.attach(TOKENS, 10)
    assert prefix.n_tokens == PREFIX
    with pytest.raises(ConfigError):
        rig.coordinator.on_request_begin(length, prefix)
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
