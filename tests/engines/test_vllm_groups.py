"""Models whose layers vLLM keeps in several groups, each with blocks of its own: windows of two blocks, and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine, until
from manager_process import ManagerProcess
from stored_parts import overwrite, swapped_halves
from tiny_models import prompt_tokens
from vllm_rig import BLOCK_TOKENS, Rig, connected, forget, sessions_open, settle

from kvcm.connectors.results import Location


@pytest.fixture(scope="module")
def window(model_named: Callable[[str], Path]) -> Path:
    """Two of three layers see a sliding window."""
    return model_named("window")


@pytest.fixture(scope="module")
def engines(shared_engines: StartEngine, window: Path, manager: ManagerProcess) -> dict[str, Rig]:
    """Engines that share an instance, and one without us, all started at the same time; each test has its prompts."""
    name = f"groups-{uuid4().hex[:8]}"
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "rig": connected(manager.address, name),
        "other": connected(manager.address, name, checksums=False),  # believes whatever it loads
        "strict": connected(manager.address, name, policy="fail", load_async=False),  # async where there are groups
    }
    with ThreadPoolExecutor() as threads:
        started = threads.map(lambda each: shared_engines(VLLM, window, **each), options.values())
        return {which: Rig(engine, manager, name) for which, engine in zip(options, started, strict=True)}


@pytest.fixture(scope="module")
def plain(engines: dict[str, Rig]) -> EngineProcess:
    return engines["plain"].engine


@pytest.fixture(scope="module")
def rig(engines: dict[str, Rig]) -> Rig:
    return engines["rig"].until_ready()


@pytest.fixture(scope="module")
def other_rig(engines: dict[str, Rig]) -> Rig:
    return engines["other"].until_ready()


def _answer(plain: EngineProcess, prompt: list[int], tokens: int = 16) -> list[int]:
    return plain.generate([prompt], tokens)[0].tokens


def _parts(locations: list[Location | None], group: int) -> list[str]:
    """Return per block the name of a group's part, "" where it is not stored."""
    return [
        next((name for name in location.uris if name.startswith(f"g{group}.")), "") if location else ""
        for location in locations
    ]


@pytest.mark.feature("vllm", "sliding-window layers")
def test_another_process_loads_the_same_bytes(rig: Rig, other_rig: Rig, plain: EngineProcess, tmp_path: Path) -> None:
    assert len(rig.engine.ask("groups")) == 3
    prompt = prompt_tokens(300, seed=600)
    computed = rig.store(prompt)
    saved = [rig.engine_digests(prompt, tmp_path / "saved", group) for group in range(3)]
    reused = other_rig.fresh(prompt)
    assert reused.tokens == computed.tokens == _answer(plain, prompt)
    assert reused.cached_tokens == 288
    locations = rig.locations(rig.keys(prompt))
    for group in range(3):
        loaded = other_rig.engine_digests(prompt, tmp_path / "loaded", group)
        there = [number for number, digest in enumerate(loaded) if digest]
        assert there[-2:] == [7, 8]  # at least the blocks in a window of two
        for number in there:
            assert loaded[number] == saved[group][number]
            (part,) = {_parts(locations, group)[number]}
            assert rig.stored_digests([rig.keys(prompt)[number]], part) == [loaded[number]]


@pytest.mark.feature("vllm", "sliding-window layers")
def test_the_answer_depends_on_an_early_token_and_on_the_loaded_bytes(
    rig: Rig, other_rig: Rig, plain: EngineProcess
) -> None:
    prompt = prompt_tokens(200, seed=601)
    rig.store(prompt)
    changed = [prompt[0] ^ 1, *prompt[1:]]
    assert _answer(plain, changed) != _answer(plain, prompt)
    assert rig.fresh(changed).tokens == _answer(plain, changed)
    for group, first in ((0, 4), (1, 4), (2, 0)):
        prompt = prompt_tokens(200, seed=602 + group)
        rig.store(prompt)
        keys = rig.keys(prompt)
        parts = _parts(rig.locations(keys), group)
        for number in range(first, 6):
            overwrite(rig.uris([keys[number]], parts[number])[0], swapped_halves)
        misled = other_rig.fresh(prompt)
        assert misled.cached_tokens == 192
        assert misled.tokens != _answer(plain, prompt)
        assert rig.fresh(prompt).tokens == _answer(plain, prompt)  # it compares checksums


@pytest.mark.feature("vllm", "sliding-window layers")
def test_partial_hits_and_later_turns(rig: Rig, other_rig: Rig, plain: EngineProcess) -> None:
    """The blocks after a block can only be loaded with the windows that end there."""
    first = prompt_tokens(300, seed=610)
    rig.store(first)
    for cut in (290, 250, 200, 100, 64, 40):
        mixed = first[:cut] + prompt_tokens(60, seed=611 + cut)
        partly = rig.fresh(mixed)
        assert partly.tokens == _answer(plain, mixed)
        assert partly.cached_tokens == cut // BLOCK_TOKENS * BLOCK_TOKENS
        assert other_rig.fresh(mixed).tokens == partly.tokens
    conversation = prompt_tokens(100, seed=620)
    for turn in range(3):
        answer = rig.fresh(conversation, 40)
        assert answer.tokens == _answer(plain, conversation, 40)
        settle(rig.engine)
        conversation = conversation + answer.tokens + prompt_tokens(20, seed=621 + turn)
    keys = rig.keys(conversation[:-21])
    until(lambda: rig.stored_blocks(keys) == len(keys))
    last = other_rig.fresh(conversation)
    assert last.tokens == _answer(plain, conversation)
    assert last.cached_tokens > 0


@pytest.mark.feature("vllm", "sliding-window layers")
@pytest.mark.parametrize("bad", [(0,), (2,), (5,), (0, 3, 5)], ids=str)
@pytest.mark.parametrize("group", [0, 1, 2])
def test_blocks_that_cannot_be_loaded(rig: Rig, plain: EngineProcess, group: int, bad: tuple[int, ...]) -> None:
    prompt = prompt_tokens(200, seed=700 + 10 * group + sum(bad))
    truth = _answer(plain, prompt)
    rig.store(prompt)
    keys = rig.keys(prompt)
    parts = _parts(rig.locations(keys), group)
    for number in bad:
        overwrite(rig.uris([keys[number]], parts[number])[0], swapped_halves)
    loads = sum(rig.counts().get("load_seconds", [0])[:-1])
    assert rig.fresh(prompt).tokens == truth
    assert sum(rig.counts()["load_seconds"][:-1]) <= loads + 1
    rig.until_stored(prompt)
    again = rig.fresh(prompt)
    assert (again.tokens, again.cached_tokens) == (truth, 192)


def test_a_failed_load_fails_the_request_where_that_is_wanted(
    engines: dict[str, Rig], rig: Rig, plain: EngineProcess
) -> None:
    strict = engines["strict"].until_ready()
    forget(strict.engine)
    prompt, fine = prompt_tokens(200, seed=800), prompt_tokens(200, seed=801)
    rig.store(prompt)
    rig.store(fine)
    keys = rig.keys(prompt)
    overwrite(rig.uris([keys[5]], _parts(rig.locations(keys), 0)[5])[0], swapped_halves)
    answers = strict.engine.generate([prompt, fine], 16)
    assert (answers[0].tokens, answers[0].finish_reason) == ([], "error")
    assert (answers[1].tokens, answers[1].cached_tokens) == (_answer(plain, fine), 192)
    until(lambda: strict.fresh(prompt).tokens == _answer(plain, prompt))
    strict.until_stored(prompt)
    assert strict.fresh(prompt).cached_tokens == 192


@pytest.fixture(scope="module")
def small_rig(shared_engines: StartEngine, window: Path, manager: ManagerProcess) -> Iterator[Rig]:
    """So little memory that requests are preempted and prompts computed in pieces."""
    instance_id = f"small-groups-{uuid4().hex[:8]}"
    small = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 64, "max_model_len": 512}
    engine = shared_engines(VLLM, window, **small, **connected(manager.address, instance_id))
    yield Rig(engine, manager, instance_id).until_ready()
    engine.close()


@pytest.mark.feature("vllm", "sliding-window layers")
def test_preempted_requests_and_prompts_in_pieces(
    small_rig: Rig, engines: dict[str, Rig], plain: EngineProcess
) -> None:
    engine = small_rig.engine
    prompts = [prompt_tokens(150, seed=810 + number) for number in range(5)]
    truth = [answer.tokens for answer in plain.generate(prompts, 60)]
    for begins_empty in (False, True, False, True):
        if begins_empty:
            forget(engine)
        assert [answer.tokens for answer in engine.generate(prompts, 60)] == truth
        settle(engine)
    assert engine.ask("metrics")["vllm:num_preemptions"] > 0
    assert small_rig.count("loaded_blocks") > 0
    for prompt, answer in zip(prompts, truth, strict=True):
        later = [*prompt, *answer, 7]
        assert small_rig.fresh(later).tokens == _answer(plain, later)
    for each in (small_rig, *engines.values()):  # all engines that share the manager
        settle(each.engine)
    assert engine.ask("free_blocks") == 59
    until(lambda: sessions_open(small_rig.manager) == 0)
