"""vLLM goes on, with the same tokens, whatever happens to the manager; and it uses KV again when that is over."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine
from manager_process import ManagerProcess, start_manager
from ports import free_port
from stopping import stop_process
from vllm_rig import FaultySite, Rig, connected, forget, new_prompt

_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")


class _Site(FaultySite):
    """An engine and its manager."""

    def serves(self) -> None:
        """New requests, a known one, and several at once are answered right."""
        for _ in range(3):
            prompt = new_prompt(100)
            assert self.is_right(prompt, self.rig.fresh(prompt))
            assert self.is_right(prompt, self.rig.generate(prompt))
        prompts = [new_prompt(100) for _ in range(4)]
        for prompt, answer in zip(prompts, self.rig.engine.generate(prompts, 16), strict=True):
            assert self.is_right(prompt, answer)


@pytest.fixture(scope="module")
def site(
    shared_engines: StartEngine, tiny_llama: Path, plain_vllm: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Site]:
    manager = start_manager(tmp_path_factory.mktemp("outages") / "manager")
    instance_id = f"outages-{uuid4().hex[:8]}"
    engine = shared_engines(VLLM, tiny_llama, **connected(manager.address, instance_id, lookup_seconds=0.25))
    yield _Site(Rig(engine, manager, instance_id), plain_vllm)
    engine.close()
    manager.stop()


@pytest.mark.feature("vllm", "manager slow")
def test_a_manager_that_hangs_while_blocks_are_saved(site: _Site) -> None:
    known, prompt = site.known_prompt(), new_prompt(300)
    forget(site.rig.engine)
    site.rig.engine.ask("add_request", request_id="hangs", prompt=prompt, max_tokens=100)
    site.rig.engine.ask("step_until", request_ids=["hangs"], tokens=40)
    stop_process(site.rig.manager.process.pid)
    try:
        (answer,) = site.rig.engine.ask("step_until", request_ids=["hangs"]).values()
        assert answer["tokens"] == site.plain.generate([prompt], 100)[0].tokens
        assert site.is_right(known, site.rig.fresh(known))
        site.serves()
    finally:
        site.rig.manager.process.send_signal(signal.SIGCONT)
    site.recovers(known)


@pytest.mark.feature("vllm", "manager answers nonsense")
def test_another_server_answers_in_the_place_of_the_manager(
    site: _Site, new_engine: StartEngine, tiny_llama: Path, instance_id: str
) -> None:
    web = f"127.0.0.1:{site.rig.manager.ports['http_port']}"
    engine = new_engine(VLLM, tiny_llama, **connected(web, instance_id, lookup_seconds=0.25))
    _Site(Rig(engine, site.rig.manager, instance_id), site.plain).serves()


@pytest.mark.feature("vllm", "manager killed and restarted")
@pytest.mark.feature("vllm", "manager absent at start")
def test_a_manager_that_is_killed_and_started_again(
    site: _Site, new_engine: StartEngine, tiny_llama: Path, new_manager: Callable[..., ManagerProcess], instance_id: str
) -> None:
    """It is absent when the engine starts, comes, is killed, comes again, and comes with nothing that it knew."""
    ports = {name: free_port() for name in _PORTS}
    engine = new_engine(
        VLLM, tiny_llama, **connected(f"127.0.0.1:{ports['rpc_port']}", instance_id, lookup_seconds=0.25)
    )
    absent = ManagerProcess(Path("/nowhere"), ports, engine.process)
    mine = _Site(Rig(engine, absent, instance_id), site.plain)
    mine.serves()
    manager = mine.rig.manager = new_manager(ports)
    known = mine.known_prompt()
    mine.recovers(known)
    manager.kill()
    assert mine.is_right(known, mine.rig.fresh(known))
    mine.serves()
    mine.rig.manager = new_manager(ports)
    mine.recovers(known)
    mine.rig.manager.kill()
    shutil.rmtree(manager.data_dir)
    mine.rig.manager = new_manager(ports)
    mine.recovers(mine.known_prompt())
