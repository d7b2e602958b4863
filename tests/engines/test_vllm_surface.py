"""The visible side of our connector in vLLM: its counters, its events, its refusals, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from engine_kinds import TRANSFORMERS, VLLM
from engine_process import EngineProcess, EngineRefusedError, StartEngine, until
from fault_mount import FaultMount, why_no_mounts
from manager_process import ManagerProcess, start_manager
from ports import free_port
from tiny_models import prompt_tokens
from vllm_rig import BLOCK_TOKENS, Rig, connected, forget, manager_metric, sessions_open, settle

from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

_BLOCK_BYTES = 4 * 4 * BLOCK_TOKENS * 64 * 4  # layers, heads, tokens, K and V, bytes
_SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@pytest.fixture(scope="module")
def rig(shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess) -> Rig:
    """One engine that publishes events, and whose weights never change; each test has a prompt of its own."""
    instance_id = f"surface-{uuid4().hex[:8]}"
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    options = connected(manager.address, instance_id, keep_on_reset=True)
    engine = shared_engines(VLLM, tiny_llama, kv_events_config=events, **options)
    return Rig(engine, manager, instance_id).until_ready()


def _ours(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("vllm:kvcm_"): value for name, value in metrics.items() if ":kvcm_" in name}


def _grown(rig: Rig, before: dict[str, float], *names: str) -> list[float]:
    metrics = rig.engine.ask("metrics")
    return [metrics[name] - before[name] for name in names]


@pytest.mark.feature("vllm", "metrics")
def test_metrics_count_saved_and_loaded_blocks(rig: Rig) -> None:
    rig.fresh([3], 1)
    before = rig.engine.ask("metrics")
    prompt = prompt_tokens(200, seed=3000)
    rig.store(prompt)
    rig.fresh(prompt)
    rig.fresh([3], 1)  # vLLM reports counters with the next step
    names = ("lookups", "hit_blocks", "saved_blocks", "saved_bytes", "loaded_blocks", "loaded_bytes")
    expected = [3, 6, 6, 6 * _BLOCK_BYTES, 6, 6 * _BLOCK_BYTES]
    grown = _grown(rig, before, *(f"vllm:kvcm_{name}" for name in names))
    assert grown[1:] == expected[1:]
    assert grown[0] >= 2
    assert _grown(rig, before, "vllm:external_prefix_cache_hits") == [192]
    assert _grown(rig, before, 'vllm:prompt_tokens_cached_by_source{source="disk"}') == [192]
    after = rig.engine.ask("metrics")
    for name in ("lookup_seconds", "load_seconds", "save_seconds"):
        grown_count = after[f"vllm:kvcm_{name}"]["count"] - before[f"vllm:kvcm_{name}"]["count"]
        assert grown_count >= 1
        assert after[f"vllm:kvcm_{name}"]["sum"] > before[f"vllm:kvcm_{name}"]["sum"]
    failed = ("lost_parts", "corrupt_parts", "failed_parts", "failed_save_blocks", "dropped_save_blocks")
    assert _grown(rig, before, *(f"vllm:kvcm_{name}" for name in failed)) == [0] * 5


@pytest.mark.feature("vllm", "metrics")
def test_all_that_is_counted_is_shown(rig: Rig) -> None:
    from kvcm.connectors.reuse.statistics import COUNTERS, TIMES

    assert set(_ours(rig.engine.ask("metrics"))) == {*COUNTERS, *TIMES}


@pytest.mark.feature("vllm", "KV events")
def test_events_report_stored_blocks(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=3001)
    forget(rig.engine)
    rig.engine.ask("collect_events")
    rig.store(prompt)
    rig.fresh([3], 1)  # vLLM publishes the events since then with the next step
    stored = [event for event in rig.engine.ask("events") if event["medium"] == "STORAGE"]
    tokens = [event["token_ids"] for event in stored]
    assert tokens[:6] == [prompt[start : start + BLOCK_TOKENS] for start in range(0, 192, BLOCK_TOKENS)]
    assert stored[0]["parent_block_hash"] is None
    for one, following in pairwise(stored):
        assert [following["parent_block_hash"]] == one["block_hashes"]
    assert all(event["block_size"] == BLOCK_TOKENS for event in stored)


@pytest.mark.feature("vllm", "KV events")
def test_events_report_what_the_manager_removes(
    new_engine: StartEngine, tiny_llama: Path, new_manager: Callable[..., ManagerProcess]
) -> None:
    instance_id = f"removals-{uuid4().hex[:8]}"
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    socket = {"instance": instance_id, "endpoint": endpoint, "replay_endpoint": replay}
    manager = new_manager(settings=[f"kvcm.storage_events.sockets={json.dumps([socket])}"])
    options = connected(
        manager.address, instance_id, keep_on_reset=True, storage_events=endpoint, storage_replay=replay
    )
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    engine = new_engine(VLLM, tiny_llama, kv_events_config=events, **options)
    rig = Rig(engine, manager, instance_id).until_ready()
    engine.ask("collect_events")
    prompt = prompt_tokens(200, seed=3002)
    rig.store(prompt)
    rig.fresh([3], 1)
    stored = [event["block_hashes"] for event in engine.ask("events") if event["medium"] == "STORAGE"][-6:]
    removed = rig.keys(prompt)[3:6]
    with grpc.insecure_channel(manager.address) as channel:
        request = meta.RemoveCacheRequest(instance_id=instance_id, block_keys=removed)
        assert MetaServiceStub(channel).RemoveCache(request).header.status.code == meta.OK

    def published() -> bool:
        rig.fresh([3], 1)  # vLLM publishes with its steps
        gone = [event["block_hashes"] for event in engine.ask("removals") if event["medium"] == "STORAGE"]
        assert all(each in stored for each in gone)
        return sorted(gone) == sorted(stored[3:6])

    until(published)
    rig.store(prompt)
    rig.fresh([3], 1)
    again = [event["block_hashes"] for event in engine.ask("events") if event["medium"] == "STORAGE"]
    assert again[-3:] == stored[3:6], "stored once more"


def test_prompts_are_saved_at_once_and_new_tokens_in_batches(rig: Rig) -> None:
    prompt = prompt_tokens(2 * BLOCK_TOKENS, seed=3010)
    forget(rig.engine)
    before = rig.count("sessions_finished")
    rig.engine.ask("add_request", request_id="long", prompt=prompt, max_tokens=10 * BLOCK_TOKENS)
    (answer,) = rig.engine.ask("step_until", request_ids=["long"], tokens=7 * BLOCK_TOKENS).values()
    so_far = [*prompt, *answer["tokens"]]
    until(lambda: rig.stored_blocks(rig.keys(so_far)) == 2)  # of 8 that are computed
    (answer,) = rig.engine.ask("step_until", request_ids=["long"]).values()
    rig.until_stored([*prompt, *answer["tokens"][:-1]])
    assert rig.count("sessions_finished") - before == 3  # 2 blocks of the prompt, 8 new ones, and the last one


@pytest.mark.feature("vllm", "refuses what it does not support")
def test_a_misspelt_option_ends_the_start(new_engine: StartEngine, tiny_llama: Path, manager: ManagerProcess) -> None:
    with pytest.raises(EngineRefusedError, match="option 'load_asinc' is unknown; did you mean 'load_async'"):
        new_engine(VLLM, tiny_llama, **connected(manager.address, "misspelt", load_asinc=True))


@pytest.mark.feature("vllm", "refuses what it does not support")
def test_an_engine_with_other_weights_never_loads_blocks_of_these(
    rig: Rig, new_engine: StartEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.neg_()
    model.save_pretrained(tmp_path / "other")
    prompt = prompt_tokens(200, seed=3002)
    right = rig.store(prompt).tokens
    options = connected(rig.manager.address, rig.instance_id, model_name=tiny_llama.name)
    engine = new_engine(VLLM, tmp_path / "other", **options)
    stranger = Rig(engine, rig.manager, rig.instance_id).until_ready()
    truth = new_engine(TRANSFORMERS, tmp_path / "other").generate([prompt], 16)[0].tokens
    assert truth != right
    for known in (False, True):
        answer = stranger.fresh(prompt)
        assert (answer.tokens, answer.cached_tokens) == (truth, 192 * known)
    again = rig.fresh(prompt)
    assert (again.tokens, again.cached_tokens) == (right, 192)


def test_after_a_reset_of_the_connector_equal_weights_go_on_sharing(
    rig: Rig, new_engine: StartEngine, tiny_llama: Path, plain_vllm: EngineProcess
) -> None:
    reset = Rig(
        new_engine(VLLM, tiny_llama, **connected(rig.manager.address, rig.instance_id)), rig.manager, rig.instance_id
    ).until_ready()
    known, new = prompt_tokens(200, seed=3003), prompt_tokens(200, seed=3004)
    rig.store(known)
    assert reset.fresh(known).cached_tokens == 192
    reset.engine.ask("add_request", request_id="running", prompt=new, max_tokens=100)
    reset.engine.ask("step_until", request_ids=["running"], tokens=20)
    assert reset.engine.ask("reset_prefix_cache", reset_running_requests=True, reset_connector=True)
    (answer,) = reset.engine.ask("step_until", request_ids=["running"]).values()
    assert answer["tokens"] == plain_vllm.generate([new], 100)[0].tokens
    answer = reset.fresh(known)
    assert (answer.tokens, answer.cached_tokens) == (plain_vllm.generate([known], 16)[0].tokens, 192)
    until(lambda: sessions_open(rig.manager) == 0)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
def test_a_reset_while_requests_run_and_blocks_are_saved(rig: Rig, plain_vllm: EngineProcess, steps: int) -> None:
    """As when weights change: vLLM preempts its requests, and wants all blocks back at once."""
    engine = rig.engine
    prompts = [prompt_tokens(170, seed=3100 + 20 * steps + number) for number in range(3)]
    truth = [answer.tokens for answer in plain_vllm.generate(prompts, 70)]
    forget(engine)
    names = [f"reset-{steps}-{number}" for number in range(3)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.ask("add_request", request_id=name, prompt=prompt, max_tokens=70)
    engine.ask("step", count=steps)
    assert engine.ask("reset_prefix_cache", reset_running_requests=True)
    engine.ask("step", count=20)
    assert engine.ask("reset_prefix_cache", reset_running_requests=True)
    answers = engine.ask("step_until", request_ids=names)
    assert [answers[name]["tokens"] for name in names] == truth
    settle(engine)
    assert engine.ask("free_blocks") == engine.ask("all_blocks") - 1
    until(lambda: sessions_open(rig.manager) == 0)
    for prompt, right in zip(prompts, truth, strict=True):
        later = [*prompt, *right, 9]
        assert rig.fresh(later).tokens == rig.fresh(later).tokens == plain_vllm.generate([later], 16)[0].tokens


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        pytest.param({}, {"hang": True}, id="one-process-hanging"),
        # vLLM goes on until nothing is on its way, and is killed where a storage hangs: then sessions expire.
        pytest.param(_SEVERAL_PROCESSES, {"delay_seconds": 0.3}, id="several-processes-slow"),
    ],
)
def test_the_end_of_an_engine_that_saves_leaves_no_session_open(
    environment: dict[str, str],
    fault: dict[str, Any],
    new_engine: StartEngine,
    tiny_llama: Path,
    instance_id: str,
    tmp_path: Path,
) -> None:
    if why_no_mounts():
        pytest.skip(why_no_mounts())
    (tmp_path / "medium").mkdir()
    mount = FaultMount(tmp_path / "medium", tmp_path / "manager" / "nfs")
    manager = start_manager(tmp_path / "manager")
    try:
        options = connected(manager.address, instance_id, session_seconds=90)
        engine = new_engine(VLLM, tiny_llama, environment=environment, **options)
        Rig(engine, manager, instance_id).until_ready()
        forget(engine)
        until(lambda: sessions_open(manager) == 0)
        mount.inject("write", path="*/layers*", **fault)
        engine.generate([prompt_tokens(300, seed=3004)], 40)
        engine.generate([prompt_tokens(30, seed=3006)], 8)
        until(lambda: sessions_open(manager) > 0)
        begun = time.monotonic()
        closing = _closes_in_background(engine)
        until(lambda: sessions_open(manager) == 0)
        if "hang" in fault:
            assert time.monotonic() - begun < 45
            assert manager_metric(manager, "kvcm_write_sessions_total", outcome="aborted") > 0
        mount.clear()
        closing()
    finally:
        mount.clear()
        manager.stop()
        mount.close()


def _closes_in_background(engine: EngineProcess) -> Callable[[], None]:
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    return engine.close
