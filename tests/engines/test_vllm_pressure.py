"""vLLM with so little memory that it preempts requests and computes prompts in pieces: the same tokens, ours or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine, until
from manager_process import ManagerProcess
from stored_parts import overwrite, swapped_halves
from tiny_models import prompt_tokens
from vllm_rig import Rig, connected, forget, sessions_open, settle

_NEW = 60
_SMALL = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64, "max_model_len": 512}
_BETWEEN = pytest.mark.feature("vllm", "loads between steps")
_BEFORE = pytest.mark.feature("vllm", "loads before the step")
_WAYS = [
    pytest.param({"load_async": True}, id="async", marks=_BETWEEN),
    pytest.param({"load_async": False}, id="sync", marks=_BEFORE),
    pytest.param({"load_async": False, "layerwise": True}, id="layerwise", marks=_BEFORE),
]


def _preemptions(engine: EngineProcess) -> int:
    return int(engine.ask("metrics")["vllm:num_preemptions"])


@pytest.fixture(scope="module", params=_WAYS)
def rig(
    request: pytest.FixtureRequest, shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess
) -> Iterator[Rig]:
    """One engine for the tests of a way to run it."""
    instance_id = f"small-{uuid4().hex[:8]}"
    connection = connected(manager.address, instance_id, **request.param)
    engine = shared_engines(VLLM, tiny_llama, **_SMALL, **connection)
    yield Rig(engine, manager, instance_id).until_ready()
    engine.close()


@pytest.mark.feature("vllm", "preemption")
@pytest.mark.feature("vllm", "chunked prefill")
def test_preempted_requests_and_prompts_in_pieces(rig: Rig, plain_vllm: EngineProcess) -> None:
    engine = rig.engine
    prompts = [prompt_tokens(150, seed=200 + number) for number in range(5)]
    truth = [answer.tokens for answer in plain_vllm.generate(prompts, _NEW)]
    preempted = [_preemptions(engine)]
    for begins_empty in (False, True, False, True):  # computed, then with stored blocks, and blocks still in the engine
        if begins_empty:
            forget(engine)
        assert [answer.tokens for answer in engine.generate(prompts, _NEW)] == truth
        settle(engine)
        preempted.append(_preemptions(engine))
    assert all(before < after for before, after in pairwise(preempted))
    assert rig.count("loaded_blocks") > 10
    for prompt, answer in zip(prompts, truth, strict=True):  # the stored blocks of answers are right, too
        rig.until_stored([*prompt, *answer[:-1]])
        later = [*prompt, *answer, 7]
        again = rig.fresh(later)
        assert again.cached_tokens >= 192
        assert again.tokens == plain_vllm.generate([later], 16)[0].tokens
    assert rig.count("failed_parts") == rig.count("lost_parts") == rig.count("corrupt_parts") == 0
    _ends_with_all_free(rig)


def _ends_with_all_free(rig: Rig) -> None:
    settle(rig.engine)
    assert rig.engine.ask("free_blocks") == _SMALL["num_gpu_blocks_override"] - 1  # one stands for dropped ones
    until(lambda: sessions_open(rig.manager) == 0)


@dataclass
class _Traffic:
    """Random requests that share beginnings; some are dropped, and blocks go missing and bad meanwhile."""

    rig: Rig
    random: Random
    prompts: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    @property
    def open(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name in self.prompts if name not in self.answers and name not in self.dropped]

    def arrive(self, bases: list[list[int]]) -> None:
        base = self.random.choice(bases)
        cut = self.random.randrange(len(base)) + 1
        tail = prompt_tokens(self.random.randrange(1, 60), self.random.randrange(3))
        name = f"request-{len(self.prompts)}"
        self.prompts[name] = base[:cut] + tail
        self.rig.engine.ask("add_request", request_id=name, prompt=self.prompts[name], max_tokens=40)

    def drop(self) -> None:
        if self.open:
            name = self.random.choice(self.open)
            self.dropped.add(name)
            self.rig.engine.ask("abort", request_ids=[name])

    def step(self, count: int) -> None:
        for name, answer in self.rig.engine.ask("step", count=count).items():
            if answer["finished"] and name not in self.dropped:
                assert answer["finish_reason"] == "length"
                self.answers[name] = answer["tokens"]

    def harm(self, bases: list[list[int]]) -> None:
        """Take a file of blocks away, or change what a block holds."""
        keys = self.rig.keys(self.random.choice(bases))
        found = [location for location in self.rig.locations(keys) if location]
        if not found:
            return
        (uri,) = self.random.choice(found).uris.values()
        if not Path(uri.path).exists():
            return
        if self.random.random() < 0.5:
            Path(uri.path).unlink()
        else:
            overwrite(uri, swapped_halves)


def test_random_requests_while_blocks_go_missing(rig: Rig, plain_vllm: EngineProcess) -> None:
    random = Random(8)
    bases = [prompt_tokens(250, seed=300 + number) for number in range(3)]
    traffic = _Traffic(rig, random)
    for _ in range(300):
        chance = random.random()
        if chance < 0.25 and len(traffic.open) < 7:
            traffic.arrive(bases)
        elif chance < 0.28:
            traffic.drop()
        elif chance < 0.36:
            traffic.harm(bases)
        elif chance < 0.39:
            rig.engine.ask("reset_prefix_cache")
        else:
            traffic.step(random.randrange(1, 12))
    until(lambda: traffic.step(10) or not traffic.open, 60)
    truth = plain_vllm.generate([traffic.prompts[name] for name in traffic.answers], 40)
    wrong = [name for name, right in zip(traffic.answers, truth, strict=True) if traffic.answers[name] != right.tokens]
    counts = rig.counts()
    assert not wrong
    assert counts["lost_parts"] + counts["corrupt_parts"] > 0
    _ends_with_all_free(rig)
