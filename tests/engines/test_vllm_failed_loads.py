"""Blocks that the manager knows and that cannot be loaded: the request is computed, or fails as it is configured."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, Generated, StartEngine, until
from manager_process import ManagerProcess
from stored_parts import overwrite, swapped_halves
from tiny_models import prompt_tokens
from vllm_rig import Rig, connected, sessions_open, settle

_WAYS: dict[str, dict[str, Any]] = {
    "recompute-async": {"policy": "recompute", "load_async": True},
    "recompute-sync": {"policy": "recompute", "load_async": False},
    "recompute-layerwise": {"policy": "recompute", "load_async": False, "layerwise": True},
    "fail-async": {"policy": "fail", "load_async": True},
    "fail-sync": {"policy": "fail", "load_async": False},
    "fail-layerwise": {"policy": "fail", "load_async": False, "layerwise": True},
}
_SEEDS = iter(range(400, 500))


@pytest.fixture(scope="module")
def rigs(shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess) -> dict[str, Rig]:
    """One engine for each way, all started at the same time."""

    def start(way: str) -> Rig:
        instance_id = f"{way}-{uuid4().hex[:8]}"
        engine = shared_engines(VLLM, tiny_llama, **connected(manager.address, instance_id, **_WAYS[way]))
        return Rig(engine, manager, instance_id).until_ready()

    with ThreadPoolExecutor() as threads:
        return dict(zip(_WAYS, threads.map(start, _WAYS), strict=True))


def _shown(way: str) -> pytest.MarkDecorator:
    effect = "computed again" if _WAYS[way]["policy"] == "recompute" else "the request ends, where configured"
    return pytest.mark.feature("vllm", f"blocks that fail to load: {effect}")


@pytest.fixture(params=[pytest.param(way, marks=_shown(way)) for way in _WAYS])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(rigs: dict[str, Rig], way: str) -> Rig:
    return rigs[way]


@pytest.fixture
def recomputes(way: str) -> bool:
    """Whether the engine computes what it cannot load."""
    return _WAYS[way]["policy"] == "recompute"


def _loads(rig: Rig) -> int:
    return int(sum(rig.counts().get("load_seconds", [0])[:-1]))


def _is_as_configured(answer: Generated, recomputes: bool, truth: list[int]) -> bool:
    expected = (truth, "length") if recomputes else ([], "error")
    return (answer.tokens, answer.finish_reason) == expected


@pytest.mark.feature("vllm", "changed bytes are found")
@pytest.mark.parametrize("bad", [(0,), (3,), (5,), (1, 4), (0, 1, 2, 3, 4, 5)], ids=str)
def test_blocks_with_other_bytes(rig: Rig, recomputes: bool, bad: tuple[int, ...], plain_vllm: EngineProcess) -> None:
    prompt = prompt_tokens(200, seed=next(_SEEDS))
    truth = plain_vllm.generate([prompt], 16)[0].tokens
    rig.store(prompt)
    keys = rig.keys(prompt)
    before, loads, corrupt = rig.stored_digests(keys), _loads(rig), rig.count("corrupt_parts")
    for uri in [rig.uris(keys)[number] for number in bad]:
        overwrite(uri, swapped_halves)
    assert _is_as_configured(rig.fresh(prompt), recomputes, truth)
    assert _loads(rig) == loads + 1  # it does not try again
    assert rig.count("corrupt_parts") == corrupt + len(bad)
    _heals(rig, prompt, truth, before)


def test_blocks_whose_files_are_gone(rig: Rig, recomputes: bool, plain_vllm: EngineProcess) -> None:
    prompt = prompt_tokens(300, seed=next(_SEEDS))
    truth = plain_vllm.generate([prompt], 16)[0].tokens
    rig.store(prompt[:130])
    rig.store(prompt)
    keys = rig.keys(prompt)
    before, loads = rig.stored_digests(keys), _loads(rig)
    gone = rig.uris(keys)[6].path
    Path(gone).unlink()
    assert _is_as_configured(rig.fresh(prompt), recomputes, truth)
    assert _loads(rig) == loads + 1
    assert rig.count("lost_parts") > 0
    _heals(rig, prompt, truth, before)


def _heals(rig: Rig, prompt: list[int], truth: list[int], digests: list[str]) -> None:
    """The manager forgets the reported blocks; the next engine that computes them stores them again."""
    keys = rig.keys(prompt)
    if rig.stored_blocks(keys) < len(keys):  # the request failed: the next one computes
        until(lambda: rig.fresh(prompt).tokens == truth)
    rig.until_stored(prompt)
    assert rig.stored_digests(keys) == digests
    bad = sum(rig.count(name) for name in ("lost_parts", "corrupt_parts", "failed_parts"))
    again = rig.fresh(prompt)
    assert (again.tokens, again.finish_reason) == (truth, "length")
    assert again.cached_tokens == len(keys) * 32
    assert sum(rig.count(name) for name in ("lost_parts", "corrupt_parts", "failed_parts")) == bad


@pytest.mark.feature("vllm", "several requests at once")
def test_requests_at_the_same_time(rig: Rig, recomputes: bool, plain_vllm: EngineProcess) -> None:
    """Those that share the bad blocks, or only their prefix, or nothing."""
    base = prompt_tokens(160, seed=next(_SEEDS))
    prompts = [base + prompt_tokens(40, seed=500 + number) for number in range(3)]
    prompts += [base[:64] + prompt_tokens(100, seed=510), prompt_tokens(200, seed=next(_SEEDS))]
    truth = [answer.tokens for answer in plain_vllm.generate(prompts, 16)]
    for prompt in prompts:
        rig.store(prompt)
    overwrite(rig.uris(rig.keys(base))[2], swapped_halves)
    rig.fresh([3], 1)
    answers = rig.engine.generate(prompts, 16)
    assert [answer.tokens for answer in answers[3:]] == truth[3:]
    for answer, right in zip(answers[:3], truth, strict=False):
        assert (answer.tokens, answer.finish_reason) in (
            [(right, "length")] if recomputes else [(right, "length"), ([], "error")]
        )
    until(lambda: [answer.tokens for answer in rig.engine.generate(prompts, 16)] == truth)
    for prompt in prompts:
        rig.fresh(prompt)
        rig.until_stored(prompt)
    for prompt, right in zip(prompts, truth, strict=True):
        assert rig.fresh(prompt).tokens == right
    settle(rig.engine)
    until(lambda: sessions_open(rig.manager) == 0)
