"""A model of which three of four layers keep a state instead of KV: reuse of a prefix needs the state at its end.

vLLM keeps such states where a step ends with a block. The state is a part of that block; a prompt goes on from the last
block that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine
from manager_process import ManagerProcess
from stored_parts import overwrite
from tiny_models import prompt_tokens
from vllm_rig import Rig, connected

BLOCK = 128  # tokens: vLLM makes blocks of KV as large as a state
_OPTIONS = {
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "num_gpu_blocks_override": 80,
    "block_size": None,
}
_FULL, _STATES = "g3.layers0-1.heads0-4", [f"g{group}.layers0-1.heads0-1" for group in range(3)]


@pytest.fixture(scope="module")
def model(model_named: Callable[[str], Path]) -> Path:
    return model_named("linear")


@pytest.fixture(scope="module")
def alone(shared_engines: StartEngine, model: Path) -> EngineProcess:
    """An engine without us."""
    return shared_engines(VLLM, model, **_OPTIONS)


@pytest.fixture(scope="module")
def rigs(shared_engines: StartEngine, model: Path, manager: ManagerProcess) -> tuple[Rig, Rig]:
    """Two engines that share an instance."""
    name = f"states-{uuid4().hex[:8]}"
    first, second = (shared_engines(VLLM, model, **_OPTIONS, **connected(manager.address, name)) for _ in range(2))
    return Rig(first, manager, name), Rig(second, manager, name)


def answer(engine: EngineProcess, prompt: list[int]) -> list[int]:
    assert engine.ask("reset_prefix_cache")
    return engine.generate([prompt], 12)[0].tokens


@pytest.mark.feature("vllm", "linear-attention layers")
def test_another_process_goes_on_from_the_last_state(rigs: tuple[Rig, Rig], alone: EngineProcess) -> None:
    saver, loader = rigs
    prompt = prompt_tokens(300, seed=1)
    truth = answer(alone, prompt)
    assert saver.store(prompt, 12).tokens == truth
    keys = saver.keys(prompt)
    assert len(keys) == 2
    parts = [set(location.uris) for location in saver.locations(keys) if location]
    # The prefill made one step of both blocks: there is a state behind the second one only.
    assert parts == [{_FULL}, {_FULL, *_STATES}]
    reused = loader.fresh(prompt, 12)
    assert (reused.tokens, reused.cached_tokens) == (truth, 2 * BLOCK)


def test_an_early_token_changes_the_answer(alone: EngineProcess) -> None:
    """Else a wrong state would not be noticed."""
    prompt = prompt_tokens(300, seed=1)
    assert answer(alone, [prompt[0] + 1, *prompt[1:]]) != answer(alone, prompt)


@pytest.mark.feature("vllm", "linear-attention layers")
def test_a_conversation_goes_on(rigs: tuple[Rig, Rig], alone: EngineProcess) -> None:
    saver, loader = rigs
    prompt = prompt_tokens(200, seed=2)
    for turn in range(3):
        rig = (saver, loader)[turn % 2]
        truth = answer(alone, prompt)
        # The answer fills blocks, too: a state behind them is kept as the tokens come one by one.
        reported = rig.store(prompt, 12)
        assert reported.tokens == truth
        if turn:
            assert reported.cached_tokens >= BLOCK
        prompt = [*prompt, *truth, *prompt_tokens(90, seed=20 + turn)]


def test_a_shorter_prompt_has_no_state_of_its_own(rigs: tuple[Rig, Rig], alone: EngineProcess) -> None:
    saver, loader = rigs
    prompt = prompt_tokens(300, seed=3)
    saver.store(prompt, 12)
    shorter = prompt[: BLOCK + 20]  # its only full block has KV, and no state
    truth = answer(alone, shorter)
    reported = loader.fresh(shorter, 12)
    assert (reported.tokens, reported.cached_tokens) == (truth, 0)
    loader.until_stored(shorter)
    again = saver.fresh(shorter, 12)  # computing it has left a state there
    assert (again.tokens, again.cached_tokens) == (truth, BLOCK)


@pytest.mark.feature("vllm", "linear-attention layers")
def test_a_damaged_state_is_computed_and_stored_again(rigs: tuple[Rig, Rig], alone: EngineProcess) -> None:
    saver, loader = rigs
    prompt = prompt_tokens(300, seed=4)
    truth = answer(alone, prompt)
    saver.store(prompt, 12)
    (uri,) = saver.uris(saver.keys(prompt)[1:2], _STATES[1])
    overwrite(uri, lambda stored: stored[::-1])
    reported = loader.fresh(prompt, 12)
    assert reported.tokens == truth
    assert loader.count("corrupt_parts") == 1
    loader.until_stored(prompt)
    again = saver.fresh(prompt, 12)
    assert (again.tokens, again.cached_tokens) == (truth, 2 * BLOCK)


@pytest.mark.feature("vllm", "linear-attention layers")
def test_a_wrong_state_changes_the_answer(
    rigs: tuple[Rig, Rig], new_engine: StartEngine, model: Path, alone: EngineProcess
) -> None:
    """The control: a process that does not compare checksums uses what it loads."""
    saver, _ = rigs
    prompt = prompt_tokens(300, seed=5)
    truth = answer(alone, prompt)
    saver.store(prompt, 12)
    for part in _STATES:
        (uri,) = saver.uris(saver.keys(prompt)[1:2], part)
        overwrite(uri, lambda stored: bytes(len(stored)))
    options = connected(saver.manager.address, saver.instance_id, checksums=False)
    reported = Rig(new_engine(VLLM, model, **_OPTIONS, **options), saver.manager, saver.instance_id).generate(
        prompt, 12
    )
    assert reported.cached_tokens == 2 * BLOCK
    assert reported.tokens != truth


@pytest.mark.feature("vllm", "linear-attention layers")
def test_blocks_saved_from_many_prompts_at_once_are_right(rigs: tuple[Rig, Rig], alone: EngineProcess) -> None:
    """One at a time again: in bfloat16 the answers of vLLM itself depend on the other prompts of the step."""
    saver, loader = rigs
    head = prompt_tokens(2 * BLOCK, seed=6)
    prompts = [head + prompt_tokens(30 + 40 * number, seed=60 + number) for number in range(4)]
    saver.engine.generate(prompts, 20)
    saver.engine.ask("settle")
    for prompt in prompts:
        reported = loader.fresh(prompt, 12)
        assert (reported.tokens, reported.cached_tokens) == (answer(alone, prompt), len(prompt) // BLOCK * BLOCK)
