"""The subscriber beside real engines: what it reports is what they hold, under the keys of their own hashes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from engine_kinds import SGLANG, VLLM
from engine_process import EngineProcess, StartEngine, until
from event_sockets import ServedManager, served_manager
from ports import free_port
from tiny_models import prompt_tokens

from kvcm.connectors.events.options import EngineOptions, SubscriberOptions
from kvcm.connectors.events.subscriber import Subscriber
from kvcm.connectors.sglang import page_store
from kvcm.model.key_schemes import (
    SGLANG_SHA256,
    VLLM_SHA256,
    VLLM_SHA256_CBOR,
    KeyScheme,
    block_hashes,
    block_keys,
    vllm_root,
)

_ENGINE = "127.0.0.1:8000"
_BLOCK_TOKENS, _BLOCKS = 32, 24  # so few that most prompts evict others


@pytest.fixture
def reports() -> Iterator[ServedManager]:
    with served_manager() as manager:
        yield manager


@pytest.mark.parametrize(
    ("algorithm", "name", "is_full"),
    [(VLLM_SHA256, "sha256", False), (VLLM_SHA256_CBOR, "sha256_cbor", False), (VLLM_SHA256, "sha256", True)],
)
@pytest.mark.feature("vllm", "KV events")
def test_vllms_blocks_are_reported(
    new_engine: StartEngine, tiny_llama: object, reports: ServedManager, algorithm: str, name: str, is_full: bool
) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": replay.replace("127.0.0.1", "*"),
    }
    engine = new_engine(
        VLLM,
        tiny_llama,  # type: ignore[arg-type]
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"} if is_full else None,
        kv_events_config=events,
        prefix_caching_hash_algo=name,
        num_gpu_blocks_override=_BLOCKS,
        max_model_len=512,
    )
    scheme = KeyScheme(algorithm, vllm_root(algorithm), 0, _BLOCK_TOKENS)
    options = EngineOptions(
        "vllm",
        _ENGINE,
        "instance",
        endpoint=endpoint,
        replay_endpoint=replay,
        algorithm=algorithm,
        block_tokens=_BLOCK_TOKENS,
    )

    def agrees() -> bool:
        held = {scheme.key(bytes.fromhex(text)) for text in engine.ask("cached_hashes")}
        return reports.keys(_ENGINE) == held

    prompts = [prompt_tokens(200, seed=7000 + number) for number in range(8)]
    engine.generate(prompts[:2], 40)
    subscriber = Subscriber(SubscriberOptions((reports.address,), (options,), "127.0.0.1:0"))
    try:
        until(agrees)  # of before the subscriber started
        assert reports.keys(_ENGINE) >= set(block_keys(scheme, prompts[1]))
        _answer_prompts(engine, prompts)
        until(agrees)
        salted = prompt_tokens(100, seed=7100)
        engine.generate([salted], 4, cache_salt="salt")
        engine.generate([salted], 4, cache_salt="salt")
        until(agrees)
        assert reports.keys(_ENGINE) >= set(block_keys(scheme, salted, "salt"))
        (rank,) = subscriber.engines[0].ranks
        assert rank.stream.is_complete
        assert not rank.blocks.unmapped
        assert rank.stream.counters.events["BlockRemoved"] > _BLOCKS
        assert engine.ask("reset_prefix_cache")
        engine.generate([[3]], 1)  # vLLM publishes with its steps
        until(agrees)
        engine.kill()
        until(lambda: reports.model.requests[-1].stopped)
    finally:
        subscriber.close()


def _answer_prompts(engine: EngineProcess, prompts: list[list[int]]) -> None:
    """Compute, evict, repeat whole prompts, and continue some."""
    engine.generate(prompts[:3] * 2, 16)
    for prompt in prompts[3:]:
        engine.generate([prompt], 8)
        engine.generate([prompt], 8)
        engine.generate([prompt[:96] + prompts[0][:64]], 8)


@pytest.mark.feature("sglang", "KV events")
def test_sglangs_page_hashes_are_ours() -> None:
    if SGLANG.missing:
        pytest.skip(SGLANG.missing)
    tokens = prompt_tokens(64, seed=7200)
    program = (
        "import json, sys\n"
        "from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64, storage_namespace_seed\n"
        "tokens = json.loads(sys.argv[1])\n"
        "found = [get_hash_str(tokens, storage_namespace_seed(None, salt), page_size=16) for salt in (None, 's')]\n"
        "print(json.dumps([found, [hash_str_to_int64(text) for text in found[0]]]))\n"
    )
    done = subprocess.run(
        [SGLANG.python, "-c", program, json.dumps(tokens)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (plain, salted), numbers = json.loads(done.stdout.splitlines()[-1])
    scheme = KeyScheme(SGLANG_SHA256, b"", 0, 16)
    assert [digest.hex() for digest in block_hashes(scheme, tokens)] == plain
    assert [digest.hex() for digest in block_hashes(scheme, tokens, "s")] == salted
    assert block_keys(scheme, tokens) == page_store.event_hashes(plain) == numbers
