"""Whatever happens to the manager, SGLang starts, answers with the same tokens, and reuses again when it can."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_kinds import SGLANG
from engine_process import EngineDiedError, EngineRefusedError, StartEngine, until
from manager_process import ManagerProcess
from ports import free_port
from sglang_rig import Page, Rig, storage_config
from stopping import stop_process
from tiny_models import prompt_tokens

from kvcm.connectors.client import ManagerClient

NewManager = Callable[..., ManagerProcess]
_PROMPT = prompt_tokens(200, seed=1)
_ORIGINAL = "original_max_position_embeddings"


def _quick(address: str, instance_id: str, record: Path, **options: object) -> dict[str, object]:
    """Deadlines that tests can wait for."""
    return storage_config(address, instance_id, record, call_seconds=0.5, register_seconds=1.0, **options)


@pytest.fixture
def new_rig(
    new_engine: StartEngine, new_manager: NewManager, tiny_llama: Path, instance_id: str, tmp_path: Path
) -> Callable[..., Rig]:
    """Start an engine, with a manager that the test may kill unless one is given."""

    def start(
        manager: ManagerProcess | None = None,
        record: str = "record",
        environment: dict[str, str] | None = None,
        **options: object,
    ) -> Rig:
        running = manager or new_manager()
        config = _quick(running.address, instance_id, tmp_path / record, **options)
        engine = new_engine(SGLANG, tiny_llama, storage=config, environment=environment)
        return Rig(engine, tmp_path / record, running, instance_id)

    return start


@pytest.fixture
def rig(new_rig: Callable[..., Rig]) -> Rig:
    return new_rig()


@pytest.mark.feature("sglang", "manager killed and restarted")
def test_a_manager_that_dies_and_comes_back(rig: Rig, new_manager: NewManager) -> None:
    computed = rig.store(_PROMPT)
    rig.manager.kill()
    rig.forget()
    without = rig.generate(_PROMPT)
    assert (without.tokens, without.cached_tokens) == (computed.tokens, 0)
    rig.manager = new_manager(rig.manager.ports)
    until(lambda: _reused(rig, computed.tokens) == 192)


@pytest.mark.feature("sglang", "manager slow")
def test_a_manager_that_hangs_costs_its_deadline_a_few_times(rig: Rig) -> None:
    computed = rig.store(_PROMPT)
    stop_process(rig.manager.process.pid)
    try:
        begun = time.monotonic()
        for seed in range(2, 10):
            rig.generate(prompt_tokens(200, seed))
        seconds = time.monotonic() - begun
    finally:
        rig.manager.process.send_signal(signal.SIGCONT)
    assert seconds < 10
    until(lambda: _reused(rig, computed.tokens) == 192)


@pytest.mark.feature("sglang", "manager answers nonsense")
def test_another_server_answers_in_the_place_of_the_manager(
    new_engine: StartEngine, new_manager: NewManager, tiny_llama: Path, instance_id: str, tmp_path: Path
) -> None:
    web_port = new_manager().ports["http_port"]
    config = _quick(f"127.0.0.1:{web_port}", instance_id, tmp_path / "record")
    engine = new_engine(SGLANG, tiny_llama, storage=config)
    computed = engine.generate([_PROMPT], 16)[0]
    until(lambda: engine.ask("flush_cache"))
    again = engine.generate([_PROMPT], 16)[0]
    assert (again.tokens, again.cached_tokens) == (computed.tokens, 0)


@pytest.mark.feature("sglang", "manager absent at start")
def test_a_manager_that_comes_later(
    new_engine: StartEngine, new_manager: NewManager, tiny_llama: Path, instance_id: str, tmp_path: Path
) -> None:
    ports = {name: free_port() for name in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")}
    config = _quick(f"127.0.0.1:{ports['rpc_port']}", instance_id, tmp_path / "record")
    engine = new_engine(SGLANG, tiny_llama, storage=config)
    computed = engine.generate([_PROMPT], 16)[0]
    assert computed.cached_tokens == 0
    rig = Rig(engine, tmp_path / "record", new_manager(ports), instance_id)
    until(lambda: _reused(rig, computed.tokens) == 192)


@pytest.mark.feature("sglang", "engine killed while it saves")
def test_blocks_that_a_killed_engine_had_begun_to_save_can_be_saved_again(
    new_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    rig = new_rig(hold=str(hold), session_seconds=2)
    computed = rig.generate(_PROMPT)
    held = [int(key) for key in until(lambda: hold.read_text()).split()]
    assert not _may_write(rig, held)
    rig.engine.kill()
    until(lambda: _may_write(rig, held))
    heir = new_rig(rig.manager, "next")
    until(lambda: _reused(heir, computed.tokens) == 192)


@pytest.mark.feature("sglang", "storage fails")
def test_a_storage_that_hangs(new_rig: Callable[..., Rig], tmp_path: Path) -> None:
    """It costs deadlines, the cache can be flushed meanwhile, and a late read reaches no page."""
    hang = tmp_path / "hang"
    rig = new_rig(hang=str(hang), load_seconds=1, save_seconds=1)
    prompts = [_PROMPT, *(prompt_tokens(300, seed) for seed in range(2, 5))]
    computed = [rig.store(prompt).tokens for prompt in prompts]
    saved = {page.key: page.digest for page in _all_pages(rig) if page.what == "save"}
    hang.touch()
    for prompt, tokens in zip(prompts, computed, strict=True):
        rig.forget()
        begun = time.monotonic()
        answer = rig.generate(prompt)
        assert time.monotonic() - begun < 15
        assert (answer.tokens, answer.cached_tokens) == (tokens, 0)
    for seed in range(10, 14):  # their saves hang, too
        rig.generate(prompt_tokens(300, seed))
    hang.unlink()
    until(lambda: _reused(rig, computed[0]) == 192)
    for prompt, tokens in zip(prompts, computed, strict=True):
        rig.forget()
        assert rig.generate(prompt).tokens == tokens
    loaded = [page for page in _all_pages(rig) if page.what == "load" and page.ok]
    assert len(loaded) > 12
    assert all(page.digest == saved[page.key] for page in loaded)


def test_random_failures_and_delays_of_the_backend_change_no_token(new_rig: Callable[..., Rig]) -> None:
    faults = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3"}
    engine = new_rig(environment=faults).engine
    prompts = [prompt_tokens(150 + 10 * number, seed=number) for number in range(6)]
    computed = [answer.tokens for answer in engine.generate(prompts, 16)]
    reused = 0
    for _ in range(8):
        until(lambda: engine.ask("flush_cache"))
        answers = engine.generate(prompts, 16)
        assert [answer.tokens for answer in answers] == computed
        reused += sum(answer.details.get("storage", 0) for answer in answers)
    assert reused > 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"instance_idd": "x"}, "did you mean 'instance_id'?"),
        ({"other_pool": "mamba"}, "KV reuse does not support models with these host pools yet: mamba"),
    ],
)
@pytest.mark.feature("sglang", "refuses what it does not support")
def test_a_wrong_option_is_said_at_the_start(
    new_engine: StartEngine, tiny_llama: Path, tmp_path: Path, option: dict[str, object], message: str
) -> None:
    config = storage_config("127.0.0.1:1", "x", tmp_path / "record") | option
    with pytest.raises((EngineDiedError, EngineRefusedError)) as failed:
        new_engine(SGLANG, tiny_llama, storage=config)
    assert message in (tmp_path / "sglang-0.log").read_text() + str(failed.value)


@pytest.mark.feature("sglang", "refuses what it does not support")
def test_rotations_that_depend_on_batches_are_refused(
    new_engine: StartEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    options = {"json_model_override_args": json.dumps({"rope_scaling": rope | {_ORIGINAL: 64}}), "context_length": 4096}
    with pytest.raises((EngineDiedError, EngineRefusedError)) as failed:
        new_engine(SGLANG, tiny_llama, storage=storage_config("127.0.0.1:1", "x", tmp_path / "record"), **options)
    said = (tmp_path / "sglang-0.log").read_text() + str(failed.value)
    assert "context_length is 4096, must be <= 64 with LongRoPE" in said


def _reused(rig: Rig, expected: list[int]) -> int:
    """Answer the prompt with an empty cache, and return how many of its tokens came from the storage."""
    rig.forget()
    answer = rig.generate(_PROMPT)
    assert answer.tokens == expected
    return int(answer.details.get("storage", 0))


def _all_pages(rig: Rig) -> list[Page]:
    lines = rig.record.with_suffix(".0").read_text().splitlines()
    return [Page(**json.loads(line)) for line in lines]


def _may_write(rig: Rig, keys: list[int]) -> bool:
    """Return whether the manager grants all of these blocks: none is stored, and no write session holds one."""
    with ManagerClient(rig.manager.address, rig.instance_id) as client:
        grant = client.start_write(keys, timeout_seconds=20)
        assert grant is not None
        client.abort_write(grant.session_id)
        return not any(grant.mask)
