"""Without us, all engines answer alike: the answer of one is the reference for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kinds import SGLANG, TRANSFORMERS, VLLM, EngineKind
from engine_process import StartEngine
from tiny_models import prompt_tokens

_PROMPTS = [prompt_tokens(count, seed) for seed, count in enumerate((200, 33, 512, 7))]
_NEW = 24
_FEATURE = "without the connector: the same tokens as the other engines"


@pytest.fixture(scope="module")
def truth(shared_engines: StartEngine, tiny_llama: Path) -> list[list[int]]:
    """Return the answers of transformers."""
    engine = shared_engines(TRANSFORMERS, tiny_llama)
    return [generated.tokens for generated in engine.generate(_PROMPTS, _NEW)]


def test_answers_depend_on_every_part_of_the_prompt(shared_engines: StartEngine, tiny_llama: Path) -> None:
    prompt = _PROMPTS[0]
    changed = [[*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]] for at in (0, 100, 199)]
    engine = shared_engines(TRANSFORMERS, tiny_llama)
    answers = {tuple(generated.tokens) for generated in engine.generate([prompt, *changed], _NEW)}
    assert len(answers) == 4
    assert all(len(set(answer)) > _NEW // 2 for answer in answers)


@pytest.mark.feature("transformers", _FEATURE)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.feature(kind.name, _FEATURE), id=kind.name) for kind in (VLLM, SGLANG)],
)
def test_engines_print_the_same_tokens(
    kind: EngineKind, shared_engines: StartEngine, tiny_llama: Path, truth: list[list[int]]
) -> None:
    engine = shared_engines(kind, tiny_llama)
    assert [generated.tokens for generated in engine.generate(_PROMPTS, _NEW)] == truth
