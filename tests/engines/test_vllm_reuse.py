"""vLLM reuses what it, or another of its processes, stored: the same tokens, and the same bytes block by block.

Whole blocks that are swapped do not change the answer, since positions are in K already. So tokens alone prove little,
and the tests compare every loaded block with the bytes stored under its key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine, until
from manager_process import ManagerProcess
from stored_parts import overwrite
from tiny_models import prompt_tokens
from vllm_rig import BLOCK_TOKENS, Rig, connected, sessions_open, settle

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.protocol.meta_service_pb2 import CacheLocation

_SHAPE = (4, 4, BLOCK_TOKENS, 2, 32)  # of a stored block: layers, heads, tokens, K and V, elements


@pytest.fixture(scope="module")
def rig(shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess) -> Rig:
    """One engine for the tests that leave it alive; each has a prompt of its own."""
    instance_id = f"reuse-{uuid4().hex[:8]}"
    engine = shared_engines(VLLM, tiny_llama, **connected(manager.address, instance_id))
    return Rig(engine, manager, instance_id).until_ready()


@pytest.fixture(scope="module")
def other_rig(rig: Rig, shared_engines: StartEngine, tiny_llama: Path) -> Rig:
    """Another process that shares the instance, and believes whatever it loads."""
    options = connected(rig.manager.address, rig.instance_id, checksums=False)
    return Rig(shared_engines(VLLM, tiny_llama, **options), rig.manager, rig.instance_id).until_ready()


@pytest.mark.feature("vllm", "saves, and another process loads")
@pytest.mark.feature("vllm", "the same bytes per block")
@pytest.mark.engines_smoke
def test_another_process_loads_the_same_bytes(
    rig: Rig, other_rig: Rig, plain_vllm: EngineProcess, tmp_path: Path
) -> None:
    prompt = prompt_tokens(333, seed=1)
    (truth,) = plain_vllm.generate([prompt], 40)
    computed = rig.store(prompt, 40)
    tokens = [*prompt, *computed.tokens[:-1]]
    keys, saved = rig.keys(tokens), rig.engine_digests(tokens, tmp_path / "saved")
    assert len(set(saved)) == len(keys) == 11
    assert rig.stored_digests(keys) == saved
    reused = other_rig.fresh(prompt, 40)
    assert reused.tokens == computed.tokens == truth.tokens
    assert (computed.cached_tokens, reused.cached_tokens) == (0, 320)
    loaded = other_rig.engine_digests(prompt, tmp_path / "loaded")
    assert loaded == saved[:10]


@pytest.mark.feature("vllm", "KV events")
def test_blocks_are_stored_with_the_numbers_of_the_engines_events(rig: Rig) -> None:
    """Though this engine publishes none: the last 8 bytes of its hashes."""
    prompt = prompt_tokens(5 * BLOCK_TOKENS, seed=13)
    rig.store(prompt, 1)
    keys = rig.keys(prompt)
    with ManagerClient(rig.manager.address, rig.instance_id, ClientSettings(timeout_seconds=60.0)) as client:
        found = [CacheLocation.FromString(each).event_hash for each in client.match_encoded(keys).locations]
    held = {int.from_bytes(bytes.fromhex(text)[-8:], "big", signed=True) for text in rig.engine.ask("cached_hashes")}
    assert len(set(found)) == len(keys) == 5
    assert set(found) <= held


def test_a_prompt_of_full_blocks_leaves_one_token_to_compute(rig: Rig, plain_vllm: EngineProcess) -> None:
    prompt = prompt_tokens(6 * BLOCK_TOKENS, seed=3)
    (truth,) = plain_vllm.generate([prompt], 16)
    assert rig.store(prompt).tokens == truth.tokens
    reused = rig.fresh(prompt)
    assert reused.tokens == truth.tokens
    assert reused.cached_tokens == 5 * BLOCK_TOKENS


def test_a_prompt_shorter_than_a_block_is_answered(rig: Rig, plain_vllm: EngineProcess) -> None:
    for count in (1, BLOCK_TOKENS - 1, BLOCK_TOKENS):
        prompt = prompt_tokens(count, seed=4)
        assert rig.fresh(prompt).tokens == plain_vllm.generate([prompt], 16)[0].tokens


@pytest.mark.feature("vllm", "partial hit")
def test_only_the_common_beginning_is_loaded(rig: Rig, plain_vllm: EngineProcess) -> None:
    first, second = prompt_tokens(200, seed=5), prompt_tokens(200, seed=6)
    rig.store(first)
    mixed = first[:100] + second[100:]
    partly = rig.fresh(mixed)
    assert partly.cached_tokens == 96
    assert partly.tokens == plain_vllm.generate([mixed], 16)[0].tokens


@pytest.mark.feature("vllm", "partial hit")
def test_blocks_after_those_in_the_engines_own_cache_are_loaded(rig: Rig, plain_vllm: EngineProcess) -> None:
    """The engine has the first blocks itself, others have stored the rest."""
    prompt = prompt_tokens(300, seed=7)
    rig.store(prompt)
    rig.fresh(prompt[:140], 1)  # 4 blocks
    before = rig.count("loaded_blocks")
    reused = rig.generate(prompt)
    assert reused.tokens == plain_vllm.generate([prompt], 16)[0].tokens
    assert reused.cached_tokens == 288
    assert rig.count("loaded_blocks") - before == 5


@pytest.mark.feature("vllm", "conversation of several turns")
def test_a_later_turn_loads_the_answers_before_it(rig: Rig, other_rig: Rig, plain_vllm: EngineProcess) -> None:
    conversation = prompt_tokens(100, seed=8)
    for turn in range(3):
        answer = rig.store(conversation, 40)
        assert answer.tokens == plain_vllm.generate([conversation], 40)[0].tokens
        conversation = conversation + answer.tokens + prompt_tokens(20, seed=80 + turn)
    last = other_rig.fresh(conversation)
    assert last.tokens == plain_vllm.generate([conversation], 16)[0].tokens
    assert last.cached_tokens == (len(conversation) - 21) // BLOCK_TOKENS * BLOCK_TOKENS  # but for the end


@pytest.mark.feature("vllm", "several requests at once")
def test_two_engines_store_the_same_at_the_same_time(
    rig: Rig, other_rig: Rig, plain_vllm: EngineProcess, tmp_path: Path
) -> None:
    prompts = [prompt_tokens(300, seed=100 + number) for number in range(4)]
    truth = [answer.tokens for answer in plain_vllm.generate(prompts, 16)]
    engines = [rig.engine, other_rig.engine]
    for each in (rig, other_rig):
        each.fresh([3], 1)
    for engine in engines:
        engine.send("generate", prompts=prompts, max_tokens=16)
    answers = [[answer["tokens"] for answer in engine.answer()] for engine in engines]
    assert answers == [truth, truth]
    for each in (rig, other_rig):
        settle(each.engine)
    for number, prompt in enumerate(prompts):
        keys = rig.keys(prompt)
        until(lambda keys=keys: rig.stored_blocks(keys) == 9)
        assert rig.stored_digests(keys) == rig.engine_digests(prompt, tmp_path / f"{number}")
    for each in (rig, other_rig):
        each.fresh([3], 1)
        assert [answer.tokens for answer in each.engine.generate(prompts, 16)] == truth
    until(lambda: sessions_open(rig.manager) == 0)


def test_stored_blocks_are_not_stored_again(rig: Rig, other_rig: Rig) -> None:
    """The last block of the prompt is not looked for, since a token is to be computed: the manager says that it is."""
    prompt = prompt_tokens(6 * BLOCK_TOKENS, seed=11)
    rig.store(prompt, 4)
    files = {path: path.stat().st_mtime_ns for path in rig.manager.files}
    before = other_rig.counts()
    other_rig.fresh(prompt, 40)
    settle(other_rig.engine)
    until(lambda: other_rig.count("saved_blocks") == before.get("saved_blocks", 0) + 1)  # that of the longer answer
    assert other_rig.count("known_blocks") == before.get("known_blocks", 0) + 1
    assert {path: path.stat().st_mtime_ns for path in rig.manager.files if path in files} == files


def test_requests_of_another_salt_share_nothing(rig: Rig, plain_vllm: EngineProcess) -> None:
    prompt = prompt_tokens(200, seed=12)
    (truth,) = plain_vllm.generate([prompt], 16)
    rig.store(prompt)
    salted = rig.fresh(prompt, cache_salt="tenant")
    assert (salted.cached_tokens, salted.tokens) == (0, truth.tokens)
    settle(rig.engine)
    keys = rig.engine.ask("block_keys", tokens=prompt, cache_salt="tenant")
    assert not set(keys) & set(rig.keys(prompt))
    until(lambda: rig.stored_blocks(keys) == 6)
    again = rig.fresh(prompt, cache_salt="tenant")
    assert (again.cached_tokens, again.tokens) == (192, truth.tokens)
    assert rig.fresh(prompt, cache_salt="other").cached_tokens == 0


def _other_heads(stored: bytes) -> bytes:
    return np.frombuffer(stored, np.float32).reshape(_SHAPE)[:, ::-1].tobytes()


def _k_as_v(stored: bytes) -> bytes:
    return np.frombuffer(stored, np.float32).reshape(_SHAPE)[:, :, :, ::-1].tobytes()


@pytest.mark.feature("vllm", "changed bytes, when not looked for, change the tokens")
@pytest.mark.parametrize("change", [_other_heads, _k_as_v])
def test_the_answer_depends_on_the_loaded_bytes(
    rig: Rig, other_rig: Rig, plain_vllm: EngineProcess, change: Callable[[bytes], bytes]
) -> None:
    """If it did not, equal tokens would prove nothing. With checksums such blocks are misses, and are stored again."""
    prompt = prompt_tokens(200, seed=13 if change is _k_as_v else 14)
    (truth,) = plain_vllm.generate([prompt], 16)
    rig.store(prompt)
    keys = rig.keys(prompt)
    before, corrupt = rig.stored_digests(keys), rig.count("corrupt_parts")
    for uri in rig.uris(keys):
        overwrite(uri, change)
    misled = other_rig.fresh(prompt)
    assert misled.cached_tokens == 192
    assert misled.tokens != truth.tokens
    assert rig.fresh(prompt).tokens == truth.tokens
    assert rig.count("corrupt_parts") == corrupt + 6
    rig.until_stored(prompt)
    assert rig.stored_digests(keys) == before
    until(lambda: other_rig.fresh(prompt).tokens == truth.tokens)  # an answer of the manager is used for a moment
