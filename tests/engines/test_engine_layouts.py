"""Engines as they run in production, without us: in several processes, on two ranks, short of memory, step by step."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from engine_kinds import SGLANG, TRANSFORMERS, TWO_RANKS, VLLM, EngineKind
from engine_process import EngineProcess, StartEngine
from tiny_models import prompt_tokens

_PROMPTS = [prompt_tokens(150, seed) for seed in range(5)]
_NEW = 60
_END_SECONDS = 30.0
_SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def truth(shared_engines: StartEngine, tiny_llama: Path) -> list[list[int]]:
    """Return what transformers answers."""
    return tokens_of(shared_engines(TRANSFORMERS, tiny_llama))


def tokens_of(engine: EngineProcess) -> list[list[int]]:
    return [answer.tokens for answer in engine.generate(_PROMPTS, _NEW)]


def processes_of(engine: EngineProcess) -> list[str]:
    """Return the processes of an engine's group that still run."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [row[2] for row in rows if row[0] == str(engine.process.pid) and not row[1].startswith("Z")]


@pytest.mark.parametrize("kind", [VLLM, SGLANG], ids=lambda kind: kind.name)
def test_two_ranks_answer_the_same_and_die_together(
    kind: EngineKind, new_engine: StartEngine, tiny_llama: Path, truth: list[list[int]]
) -> None:
    options, environment = TWO_RANKS[kind.name]
    engine = new_engine(kind, tiny_llama, environment=environment, **options)
    assert tokens_of(engine) == truth
    assert len(processes_of(engine)) > 2
    engine.kill()
    deadline = time.monotonic() + _END_SECONDS
    while left := processes_of(engine):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_vllm_in_processes_of_its_own_answers_the_same(
    new_engine: StartEngine, tiny_llama: Path, truth: list[list[int]]
) -> None:
    engine = new_engine(VLLM, tiny_llama, environment=_SEVERAL_PROCESSES)
    assert tokens_of(engine) == truth
    assert len(processes_of(engine)) > 1
    engine.close()
    assert engine.process.returncode == 0
