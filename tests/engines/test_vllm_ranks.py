"""vLLM with two tensor-parallel ranks: each stores its part of a block, and a block is there when both parts are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine, until
from manager_process import ManagerProcess
from stored_parts import overwrite, swapped_halves
from tiny_models import prompt_tokens
from vllm_rig import Rig, connected, sessions_open

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",  # else the ranks spin against each other
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the calls of the test to the ranks
}
_PARTS = ("layers0-4.heads0-2", "layers0-4.heads2-4")


@pytest.fixture(scope="module")
def rigs(shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess) -> Iterator[list[Rig]]:
    """Two engines of two ranks; the second one believes whatever it loads."""
    instance_id = f"ranks-{uuid4().hex[:8]}"
    environments = [_ENVIRONMENT, _ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "2|3"}]

    def start(number: int) -> Rig:
        options = connected(manager.address, instance_id, checksums=number == 0)
        engine = shared_engines(VLLM, tiny_llama, environment=environments[number], tensor_parallel_size=2, **options)
        return Rig(engine, manager, instance_id).until_ready()

    with ThreadPoolExecutor() as threads:
        yield list(threads.map(start, range(2)))


def _truth(plain_vllm: EngineProcess, prompt: list[int]) -> list[int]:
    return plain_vllm.generate([prompt], 16)[0].tokens


@pytest.mark.feature("vllm", "tensor parallel: 2 ranks")
def test_another_engine_loads_the_blocks_that_both_ranks_stored(rigs: list[Rig], plain_vllm: EngineProcess) -> None:
    prompt = prompt_tokens(200, seed=900)
    computed = rigs[0].store(prompt)
    assert computed.tokens == _truth(plain_vllm, prompt)
    keys = rigs[0].keys(prompt)
    assert all(set(location.uris) == set(_PARTS) for location in rigs[0].locations(keys) if location)
    assert len({*rigs[0].stored_digests(keys, _PARTS[0]), *rigs[0].stored_digests(keys, _PARTS[1])}) == 12
    reused = rigs[1].fresh(prompt)
    assert (reused.tokens, reused.cached_tokens) == (computed.tokens, 192)


@pytest.mark.feature("vllm", "tensor parallel: 2 ranks")
@pytest.mark.parametrize("part", _PARTS)
def test_the_answer_depends_on_the_bytes_of_each_rank(rigs: list[Rig], part: str, plain_vllm: EngineProcess) -> None:
    prompt = prompt_tokens(200, seed=901 + _PARTS.index(part))
    rigs[0].store(prompt)
    for uri in rigs[0].uris(rigs[0].keys(prompt), part):
        overwrite(uri, swapped_halves)
    assert rigs[1].fresh(prompt).tokens != _truth(plain_vllm, prompt)
    assert rigs[0].fresh(prompt).tokens == _truth(plain_vllm, prompt)


@pytest.mark.feature("vllm", "tensor parallel: 2 ranks")
@pytest.mark.parametrize("bad", [{0: (2,)}, {1: (2,)}, {0: (5,), 1: (1,)}, {0: (0,), 1: (3, 4)}], ids=str)
def test_a_block_that_one_rank_cannot_load_is_computed_on_all(
    rigs: list[Rig], bad: dict[int, tuple[int, ...]], plain_vllm: EngineProcess
) -> None:
    prompt = prompt_tokens(200, seed=910 + sum(10 * rank + sum(numbers) for rank, numbers in bad.items()))
    rigs[0].store(prompt)
    keys = rigs[0].keys(prompt)
    digests = [rigs[0].stored_digests(keys, part) for part in _PARTS]
    for rank, numbers in bad.items():
        uris = rigs[0].uris(keys, _PARTS[rank])
        for number in numbers:
            overwrite(uris[number], swapped_halves)
    assert rigs[0].fresh(prompt).tokens == _truth(plain_vllm, prompt)
    rigs[0].until_stored(prompt)
    assert [rigs[0].stored_digests(keys, part) for part in _PARTS] == digests
    again = rigs[0].fresh(prompt)
    assert (again.tokens, again.cached_tokens) == (_truth(plain_vllm, prompt), 192)
    assert "tokens affected" in rigs[0].engine.printed()


@pytest.mark.feature("vllm", "tensor parallel: 2 ranks")
def test_both_engines_at_the_same_time(rigs: list[Rig], plain_vllm: EngineProcess) -> None:
    prompts = [prompt_tokens(200, seed=950 + number) for number in range(5)]
    truth = [answer.tokens for answer in plain_vllm.generate(prompts, 40)]
    for _ in range(2):
        for rig in rigs:
            rig.fresh([3], 1)
            rig.engine.send("generate", prompts=prompts, max_tokens=40)
        for rig in rigs:
            assert [answer["tokens"] for answer in rig.engine.answer()] == truth
    until(lambda: sessions_open(rigs[0].manager) == 0)
