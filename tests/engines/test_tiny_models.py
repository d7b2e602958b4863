"""The models of this room tell right KV from wrong: their answers depend on all of the prompt, and on their windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_kinds import TRANSFORMERS, VLLM
from engine_process import EngineProcess, StartEngine
from tiny_models import WINDOW_TOKENS, prompt_tokens, write_window

_NEW = 16
_PROMPT = prompt_tokens(700, 0)
_LINEAR_IN_VLLM = {"dtype": "bfloat16"}


def with_changed(position: int) -> list[int]:
    return [*_PROMPT[:position], _PROMPT[position] ^ 1, *_PROMPT[position + 1 :]]


def one_by_one(engine: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    """In bfloat16, what is computed together changes the last bits, and so now and then a token."""
    return [engine.generate([prompt], _NEW)[0].tokens for prompt in prompts]


# The first and the middle one are outside the window of the last token, the others inside.
_CHANGED = [with_changed(position) for position in (0, 350, len(_PROMPT) - WINDOW_TOKENS // 2, len(_PROMPT) - 1)]


@pytest.fixture(scope="module")
def window(shared_engines: StartEngine, model_named: Callable[[str], Path]) -> EngineProcess:
    return shared_engines(VLLM, model_named("window"))


@pytest.fixture(scope="module")
def linear(shared_engines: StartEngine, model_named: Callable[[str], Path]) -> EngineProcess:
    return shared_engines(VLLM, model_named("linear"), **_LINEAR_IN_VLLM)


def test_the_model_with_windows_has_groups_of_layers_and_answers_as_in_transformers(
    window: EngineProcess, shared_engines: StartEngine, model_named: Callable[[str], Path]
) -> None:
    kinds = [group["kind"] for group in window.ask("groups")]
    assert sorted(kinds) == ["FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowSpec"]
    plain = shared_engines(TRANSFORMERS, model_named("window"))
    assert one_by_one(window, _CHANGED) == one_by_one(plain, _CHANGED)


def test_the_answer_of_the_model_with_windows_depends_on_all_of_the_prompt(window: EngineProcess) -> None:
    answers = [tuple(answer) for answer in one_by_one(window, [_PROMPT, *_CHANGED])]
    assert len(set(answers)) == len(answers)


def test_the_answer_of_the_model_with_windows_depends_on_their_size(
    window: EngineProcess, shared_engines: StartEngine, tmp_path: Path
) -> None:
    write_window(tmp_path, window_tokens=WINDOW_TOKENS + 32)
    wider = shared_engines(TRANSFORMERS, tmp_path)
    assert one_by_one(wider, [_PROMPT]) != one_by_one(window, [_PROMPT])


def test_the_answer_of_the_model_with_states_depends_on_all_of_the_prompt(linear: EngineProcess) -> None:
    assert [group["kind"] for group in linear.ask("groups")].count("MambaSpec") == 3
    answers = [tuple(answer) for answer in one_by_one(linear, [_PROMPT, *_CHANGED])]
    assert len(set(answers)) == len(answers)


def test_the_model_with_states_answers_the_same_from_the_engines_own_cache(linear: EngineProcess) -> None:
    linear.ask("reset_prefix_cache")
    first, again = (linear.generate([_PROMPT], _NEW)[0] for _ in range(2))
    assert first.cached_tokens == 0
    assert again.cached_tokens >= 600
    assert first.tokens == again.tokens


def test_blocks_of_vllm_can_be_read(window: EngineProcess, tmp_path: Path) -> None:
    window.ask("reset_prefix_cache")
    window.generate([_PROMPT, _CHANGED[1]], 1)
    found, changed = (window.ask("cached_blocks", prompt=prompt) for prompt in (_PROMPT, _CHANGED[1]))
    full = next(at for at, group in enumerate(window.ask("groups")) if group["kind"] == "FullAttentionSpec")
    assert len(found[full]) == len(_PROMPT) // 32
    assert all(block is not None and len(block["layers"]) == 2 for block in found[full])
    first_changed = 350 // 32
    assert found[full][:first_changed] == changed[full][:first_changed]
    for block, other in zip(found[full][first_changed:], changed[full][first_changed:], strict=True):
        assert block["hash"] != other["hash"]
        assert block["layers"] != other["layers"]
    window.ask("cached_blocks", prompt=_PROMPT, directory=str(tmp_path))
    block_bytes = 2 * 4 * 32 * 2 * 32 * 4  # layers, heads, tokens, K and V, elements of 4 bytes
    assert {len((tmp_path / f"{full}-{index}").read_bytes()) for index in range(len(found[full]))} == {block_bytes}
