"""vLLM goes on, with the same tokens, whatever happens to the storage; and it uses KV again when that is over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine, until
from fault_mount import FaultMount, why_no_mounts
from manager_process import ManagerProcess, start_manager
from vllm_rig import FaultySite, Rig, connected, forget, manager_metric, new_prompt, sessions_open, settle

from kvcm.connectors.client import ManagerClient

_LOAD_SECONDS, _SAVE_SECONDS = 2.0, 2.0
_KV = "*/layers*"  # files of KV, not those of the probes of the manager


@dataclass
class _Site(FaultySite):
    """An engine whose storage fails on command."""

    mount: FaultMount

    def recovers(self, known: list[int]) -> None:
        super().recovers(known)
        assert self.rig.engine.ask("free_blocks") == self.rig.engine.ask("all_blocks") - 1


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ManagerProcess, FaultMount]]:
    if why_no_mounts():
        pytest.skip(why_no_mounts())
    folder = tmp_path_factory.mktemp("storage")
    (folder / "medium").mkdir()
    (folder / "manager").mkdir()
    mount = FaultMount(folder / "medium", folder / "manager" / "nfs")
    manager = start_manager(folder / "manager")
    yield manager, mount
    mount.clear()
    manager.stop()
    mount.close()


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def shared_site(
    request: pytest.FixtureRequest,
    started: tuple[ManagerProcess, FaultMount],
    shared_engines: StartEngine,
    tiny_llama: Path,
    plain_vllm: EngineProcess,
) -> Iterator[_Site]:
    manager, mount = started
    instance_id = f"storage-{uuid4().hex[:8]}"
    patience = {"load_seconds": _LOAD_SECONDS, "save_seconds": _SAVE_SECONDS, "load_async": request.param}
    engine = shared_engines(VLLM, tiny_llama, **connected(manager.address, instance_id, **patience))
    yield _Site(Rig(engine, manager, instance_id).until_ready(), plain_vllm, mount)
    mount.clear()
    engine.close()


@pytest.fixture
def site(shared_site: _Site) -> Iterator[_Site]:
    yield shared_site
    shared_site.mount.clear()


@pytest.mark.feature("vllm", "storage fails")
@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_reads_that_fail(site: _Site, error: str) -> None:
    known = site.known_prompt()
    site.mount.inject("open", "read", path=_KV, error=error)
    for _ in range(3):
        assert site.is_right(known, site.rig.fresh(known))
    assert site.rig.count("failed_parts") > 0
    site.mount.clear()
    site.recovers(known)


@pytest.mark.feature("vllm", "storage fails")
@pytest.mark.parametrize("error", ["ENOSPC", "EROFS"])
def test_writes_that_fail(site: _Site, error: str) -> None:
    known = site.known_prompt()
    site.mount.inject("create", "write", path=_KV, error=error)
    for _ in range(3):
        prompt = new_prompt()
        assert site.is_right(prompt, site.rig.fresh(prompt))
        settle(site.rig.engine)
        assert site.rig.stored_blocks(site.rig.keys(prompt)) == 0
    assert site.rig.count("failed_save_blocks") > 0
    assert site.is_right(known, site.rig.fresh(known))
    site.mount.clear()
    site.recovers(known)


@pytest.mark.feature("vllm", "storage fails")
@pytest.mark.parametrize("operation", ["read", "open"])
def test_reads_that_hang(site: _Site, operation: str) -> None:
    """The request is computed after the time that a load may take, and nothing is ever written to its blocks."""
    known = [site.known_prompt() for _ in range(3)]
    site.mount.inject(operation, path=_KV, hang=True)
    for prompt in known:
        begun = time.monotonic()
        assert site.is_right(prompt, site.rig.fresh(prompt))
        assert time.monotonic() - begun < 30
    site.mount.clear()
    site.recovers(known[0])


@pytest.mark.feature("vllm", "storage fails")
def test_writes_that_hang(site: _Site) -> None:
    """Their blocks come back after the time that a save may take, although a writer hangs."""
    known = site.known_prompt()
    site.mount.inject("write", path=_KV, hang=True)
    prompts = [new_prompt() for _ in range(4)]
    for prompt in prompts:
        assert site.is_right(prompt, site.rig.fresh(prompt))
    settle(site.rig.engine)
    assert site.rig.engine.ask("free_blocks") == site.rig.engine.ask("all_blocks") - 1
    until(lambda: sessions_open(site.rig.manager) == 0)
    for prompt in prompts:
        assert site.rig.stored_blocks(site.rig.keys(prompt)) == 0
    site.mount.clear()
    site.recovers(known)


@pytest.mark.feature("vllm", "request aborted while it loads")
def test_a_request_that_is_dropped_while_it_loads(site: _Site) -> None:
    """Its blocks come back at once, not when the storage answers; other requests do not notice."""
    engine = site.rig.engine
    known = site.known_prompt()
    other = new_prompt(100)
    forget(engine)
    site.mount.inject("read", path=_KV, hang=True)
    engine.ask("add_request", request_id="dropped", prompt=known, max_tokens=16)
    engine.send("step", count=50)
    site.mount.until_waiting()
    engine.answer()
    engine.ask("add_request", request_id="other", prompt=other, max_tokens=16)
    engine.ask("abort", request_ids=["dropped"])
    answer = engine.ask("step_until", request_ids=["other"])["other"]
    assert answer["tokens"] == site.plain.generate([other], 16)[0].tokens
    settle(engine)
    until(lambda: engine.ask("step") == {} and engine.ask("unfinished") == 0)
    until(lambda: engine.ask("free_blocks") == engine.ask("all_blocks") - 1)
    engine.ask("add_request", request_id="dropped", prompt=known, max_tokens=16)  # and again under the same name
    answer = engine.ask("step_until", request_ids=["dropped"])["dropped"]
    assert answer["tokens"] == site.plain.generate([known], 16)[0].tokens
    site.mount.clear()
    site.recovers(known)


@pytest.mark.feature("vllm", "storage fails")
def test_a_storage_that_is_gone_and_comes_back(site: _Site) -> None:
    known = site.known_prompt()
    site.mount.die()
    try:
        for _ in range(2):
            assert site.is_right(known, site.rig.fresh(known))
            new = new_prompt()
            assert site.is_right(new, site.rig.fresh(new))
    finally:
        site.mount.close()
        site.mount.mount()
    # The manager may have forgotten unreadable blocks meanwhile.
    until(lambda: site.rig.fresh(known).cached_tokens > 0, 60)
    site.recovers(known)


@pytest.mark.feature("vllm", "block evicted between lookup and load")
def test_blocks_that_go_between_lookup_and_load(site: _Site) -> None:
    """Evicted, or lost: the lookup has been answered, the blocks are not there any more."""
    engine = site.rig.engine
    for removes in (True, False):
        known = site.known_prompt()
        keys, paths = site.rig.keys(known), {Path(uri.path) for uri in site.rig.uris(site.rig.keys(known))}
        forget(engine)
        lookups = site.rig.count("lookups")
        engine.ask("add_request", request_id=f"late-{removes}", prompt=known, max_tokens=16)
        until(lambda lookups=lookups: site.rig.count("lookups") > lookups)
        if removes:
            with ManagerClient(site.rig.manager.address, site.rig.instance_id) as client:
                assert client.remove(keys, timeout_seconds=20)
        for path in paths:
            path.unlink()
        (answer,) = engine.ask("step_until", request_ids=[f"late-{removes}"]).values()
        assert answer["tokens"] == site.plain.generate([known], 16)[0].tokens
        site.rig.until_stored(known)
        site.recovers(known)


@pytest.mark.feature("vllm", "engine killed while it saves")
def test_an_engine_that_is_killed_while_it_saves(
    started: tuple[ManagerProcess, FaultMount],
    new_engine: Callable[..., EngineProcess],
    tiny_llama: Path,
    instance_id: str,
    plain_vllm: EngineProcess,
) -> None:
    """Its blocks were never readable, and can be written by others after the time of its write session."""
    manager, mount = started
    prompt = new_prompt(300)
    options = connected(manager.address, instance_id, session_seconds=5)
    killed = Rig(new_engine(VLLM, tiny_llama, **options), manager, instance_id).until_ready()
    keys = killed.keys(prompt)
    settle(killed.engine)
    until(lambda: sessions_open(manager) == 0)
    mount.inject("write", path=_KV, hang=True)
    killed.engine.ask("add_request", request_id="last", prompt=prompt, max_tokens=200)
    killed.engine.ask("step_until", request_ids=["last"], tokens=20)
    mount.until_waiting()
    assert sessions_open(manager) > 0
    expired = manager_metric(manager, "kvcm_write_sessions_total", outcome="expired")
    os.killpg(killed.engine.process.pid, signal.SIGKILL)
    mount.clear()  # a process that hangs in a file system cannot die
    killed.engine.kill()
    assert killed.stored_blocks(keys) == 0
    until(lambda: manager_metric(manager, "kvcm_write_sessions_total", outcome="expired") > expired)
    assert sessions_open(manager) == 0
    assert killed.stored_blocks(keys) == 0
    heir = Rig(new_engine(VLLM, tiny_llama, **options), manager, instance_id).until_ready()
    truth = plain_vllm.generate([prompt], 16)[0].tokens
    assert heir.store(prompt).tokens == truth
    again = heir.fresh(prompt)
    assert (again.tokens, again.cached_tokens) == (truth, 288)
