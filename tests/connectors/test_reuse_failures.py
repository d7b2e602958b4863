"""Whatever fails, refuses or is missing: reuse costs time at most, and the tokens stay the same."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_process import ManagerProcess
from reuse_cases import PATIENT, Connect, Find, checked, files_of, make_model, plain, prompt, run
from stopping import stop_process
from transformers import DynamicCache
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import RegistrationState
from kvcm.connectors.transformers import ReuseSettings
from kvcm.connectors.transformers.prefix_load import PrefixLoad
from kvcm.model.errors import InvalidArgumentError


@pytest.mark.feature(
    "transformers", "blocks that fail to load: computed again", "block evicted between lookup and load"
)
@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_lost_blocks_are_stored_again(connect: Connect, find: Find, damage: str) -> None:
    reuse, ids = connect(), prompt(300)
    expected, report = run(reuse, ids)
    assert report.blocks_saved == 20
    path = Path(find(reuse, ids)[9].uris["tp0"].path)
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])
    report = checked(reuse, expected, ids)
    assert (report.matched_tokens, report.loaded_tokens) == (288, 128)  # files hold eight blocks
    assert report.reason.startswith("block 8: ")
    assert report.blocks_saved == 8
    report = checked(reuse, expected, ids)
    assert (report.loaded_tokens, report.reason) == (288, "")


@pytest.mark.ci
@pytest.mark.parametrize("missing", ["root", "cluster"])
def test_an_unmounted_storage_keeps_its_blocks(
    new_manager: Callable[..., ManagerProcess], connect: Connect, missing: str
) -> None:
    """The manager removes no blocks, and no save writes to the disk below, however often the engine tries."""
    manager = new_manager(settings=["kvcm.storage.probe_interval_ms=3600000"])  # it does not count as down meanwhile
    reuse, ids = connect(address=manager.address), prompt(100)
    expected, _ = run(reuse, ids)
    stored = manager.files
    root = manager.data_dir / "nfs"
    (cluster,) = {root / path.relative_to(root).parts[0] for path in stored}
    hidden = root if missing == "root" else cluster
    hidden.rename(manager.data_dir / "elsewhere")
    for _ in range(2):
        report = checked(reuse, expected, ids)
        assert (report.matched_tokens, report.loaded_tokens, report.blocks_saved) == (96, 0, 0)
        assert "not mounted" in report.reason
        assert run(reuse, prompt(100, seed=7))[1].blocks_saved == 0
    assert not cluster.exists()
    if hidden.exists():
        hidden.rmdir()
    (manager.data_dir / "elsewhere").rename(hidden)
    assert manager.files == stored
    assert run(reuse, ids)[1].loaded_tokens == 96


@pytest.mark.feature("transformers", "storage fails")
def test_a_storage_that_is_read_only_costs_saves(connect: Connect, manager: ManagerProcess, instance_id: str) -> None:
    reuse, ids = connect(), prompt(100)
    run(reuse, prompt(20, seed=8))
    (directory,) = {path.parents[1] for path in files_of(manager, instance_id)}
    directory.rename(directory.with_name("elsewhere"))
    directory.write_bytes(b"in the way")
    before = reuse.counters["start_write"].ok
    report = checked(reuse, plain(ids), ids)
    assert report.blocks_saved == 0
    assert report.reason
    assert reuse.counters["start_write"].ok == before + 1  # blocks behind a failure are not even begun
    counts = reuse.statistics.total()
    assert counts["unsaved_storage_blocks"] + counts.get("unsaved_gap_blocks", 0) == 7
    directory.unlink()
    directory.with_name("elsewhere").rename(directory)
    _, report = run(reuse, ids)  # the session was aborted, so the blocks can be written at once
    assert report.blocks_saved == 7


def test_a_model_of_another_shape_is_refused_and_computes(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(100)
    run(connect(), ids)
    for other in (make_model(rms_norm_eps=1e-5), make_model(dtype=torch.bfloat16)):
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            reuse = connect(other)
        assert reuse.registration.state is RegistrationState.REFUSED
        assert len(caplog.records) == 1
        report = checked(reuse, plain(ids, other), ids)
        assert (report.loaded_tokens, report.blocks_saved) == (0, 0)
        assert "not registered" in report.reason
    assert connect(block_tokens=32).registration.state is RegistrationState.REFUSED
    assert connect(make_model()).registration.ok


def test_settings_that_leave_kv_alone_may_differ(connect: Connect) -> None:
    run(connect(), prompt(40))
    assert connect(make_model(eos_token_id=7, use_cache=False)).registration.ok


@pytest.mark.ci
@pytest.mark.feature("transformers", "manager killed and restarted")
def test_the_manager_may_die_between_turns(new_manager: Callable[..., ManagerProcess], connect: Connect) -> None:
    manager = new_manager()
    reuse = connect(address=manager.address)
    ids = prompt(100)
    run(reuse, ids)
    manager.kill()
    for _ in range(4):
        report = checked(reuse, plain(ids), ids)
        assert (report.loaded_tokens, report.blocks_saved) == (0, 0)
        assert report.reason
    manager = new_manager(manager.ports)  # when its metadata is gone, registering again is ours to do

    def is_used() -> bool:
        report = checked(reuse, plain(ids), ids)
        return report.blocks_saved + report.loaded_tokens > 0

    until(is_used, "the manager is used again")  # the breaker lets a probe through after a while
    assert run(reuse, ids)[1].loaded_tokens == 96


@pytest.mark.ci
@pytest.mark.feature("transformers", "manager absent at start")
def test_the_manager_may_be_absent_at_the_start(
    new_manager: Callable[..., ManagerProcess], connect: Connect, closed_port: int, black_hole: int
) -> None:
    ids = prompt(100)
    for port in (closed_port, black_hole):
        settings = ReuseSettings(call_seconds=0.2, register_seconds=0.2, load_seconds=60.0)
        reuse = connect(address=f"127.0.0.1:{port}", settings=settings)
        assert reuse.registration.state is RegistrationState.UNREACHABLE
        for _ in range(3):
            report = checked(reuse, plain(ids), ids)
            assert report.load_seconds < 30.0  # less than `ReuseSettings.load_seconds`
    # The first of these addresses begins to serve.
    reuse = connect(address=f"127.0.0.1:{closed_port}")
    manager = new_manager()
    manager.stop()
    new_manager(manager.ports | {"rpc_port": closed_port})
    until(lambda: run(reuse, ids)[1].blocks_saved, "the manager is used")
    assert run(reuse, ids)[1].loaded_tokens == 96


@pytest.mark.feature("transformers", "refuses what it does not support")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": prompt(20)[0]}, r"input_ids has shape \(20,\)"),
        ({"attention_mask": torch.tensor([[1] * 19 + [0]])}, "attention_mask must be zeros and then ones"),
        ({"attention_mask": torch.tensor([[0, 1, 0] + [1] * 17])}, "attention_mask must be zeros and then ones"),
        ({"attention_mask": torch.zeros(1, 20)}, "attention_mask must be zeros and then ones"),
        ({"attention_mask": torch.ones(1, 19)}, r"attention_mask has shape \(1, 19\)"),
        ({"input_ids": torch.tensor([[5, 0, 5], [7, 5, 7]])}, "attention_mask is missing"),
        ({"num_beams": 2}, "beam_search"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"use_cache": False}, "use_cache"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
    ],
)
def test_what_cannot_be_reused_is_refused_clearly(connect: Connect, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        connect().generate(**{"input_ids": prompt(20), "max_new_tokens": 2} | arguments)


@pytest.mark.parametrize(
    ("load_seconds", "lease_ms", "loads_for"), [(60.0, 80_000, 60.0), (599.0, 600_000, 599.0), (1e9, 600_000, 600.0)]
)
def test_the_read_lease_outlasts_the_load(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, load_seconds: float, lease_ms: int, loads_for: float
) -> None:
    leases: list[int] = []
    deadlines: list[float] = []
    match, load = ManagerClient.match, PrefixLoad.run

    def spy_match(self: ManagerClient, keys: list[int], *, read_lease_ms: int, **options: Any) -> object:
        leases.append(read_lease_ms)
        return match(self, keys, read_lease_ms=read_lease_ms, **options)

    def spy_load(self: PrefixLoad, deadline_seconds: float) -> object:
        deadlines.append(deadline_seconds)
        return load(self, deadline_seconds)

    monkeypatch.setattr(ManagerClient, "match", spy_match)
    monkeypatch.setattr(PrefixLoad, "run", spy_load)
    ids = prompt(40)
    reuse = connect(settings=replace(PATIENT, load_seconds=load_seconds))
    run(reuse, ids)
    assert run(reuse, ids)[1].loaded_tokens == 32
    assert leases == [lease_ms] * 2
    assert all(loads_for - 30.0 < deadline <= loads_for for deadline in deadlines)


def test_a_late_lookup_costs_no_save(
    new_manager: Callable[..., ManagerProcess], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, match = new_manager(), ManagerClient.match

    def late_match(*arguments: Any, **options: Any) -> object:
        """Ask while the manager stands still."""
        stop_process(manager.process.pid)
        try:
            return match(*arguments, **options | {"timeout_seconds": 0.1})
        finally:
            manager.process.send_signal(signal.SIGCONT)

    reuse, ids = connect(address=manager.address), prompt(100)
    with monkeypatch.context() as patched:
        patched.setattr(ManagerClient, "match", late_match)
        report = checked(reuse, plain(ids), ids)
    assert (report.loaded_tokens, report.blocks_saved > 0) == (0, True)
    assert run(reuse, ids)[1].loaded_tokens == 96


class Counted(torch.nn.Module):
    """A module with a persistent buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), value))


def test_buffers_count(connect: Connect) -> None:
    def model(scale: float) -> Any:
        model = make_model()
        model.model.counted = Counted(scale)
        return model

    ids = prompt(100)
    loaded = [run(connect(model(scale)), ids)[1].loaded_tokens for scale in (1.0, 1.0, 2.0)]
    assert loaded == [0, 96, 0]


def test_an_engine_that_stores_nothing_says_why_once(
    connect: Connect, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(PATIENT, register_seconds=1.0, call_seconds=1.0)
    reuse, ids = connect(address=f"127.0.0.1:{closed_port}", settings=settings), prompt(100)
    for _ in range(3):
        checked(reuse, plain(ids), ids)
    assert reuse.statistics.total()["unsaved_unregistered_blocks"] == 3 * 7
    assert caplog.text.count("7 blocks were not saved: the manager has not accepted the registration") == 1
