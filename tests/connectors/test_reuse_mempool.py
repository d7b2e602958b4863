"""Reuse through a memory pool: the connector maps it, tells the manager, and is found nothing on other nodes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from manager_process import ManagerProcess
from pool_parts import CAPACITY, NODE
from reuse_cases import MODEL, PATIENT, plain, prompt, run

from connectors.transformers import KVReuse

SECONDS = 30.0


def connected(manager: ManagerProcess, group: str, instance_id: str) -> KVReuse:
    return KVReuse.connect(MODEL, manager.address, group, instance_id, block_tokens=16, settings=PATIENT)


def test_tokens_are_reused_on_the_node_and_computed_elsewhere(
    manager: ManagerProcess, instance_id: str, pool_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = f"pool-{uuid4().hex[:8]}"
    manager.add_pool(pool, NODE, CAPACITY)
    monkeypatch.setenv("KVCM_POOL_DIRECTORY", str(pool_directory))
    monkeypatch.setenv("KVCM_NODE_ID", NODE)
    ids = prompt(100)
    expected = plain(ids)
    with connected(manager, pool, instance_id) as reuse:
        deadline = time.monotonic() + SECONDS
        saved = 0
        while not saved:  # the manager has yet to look at the pool that it was told of
            assert time.monotonic() < deadline, reuse.last_report
            output, report = run(reuse, ids)
            assert torch.equal(output, expected)
            saved = report.blocks_saved
    with connected(manager, pool, instance_id) as reuse:
        output, report = run(reuse, ids)
        assert torch.equal(output, expected)
        assert report.loaded_tokens == 96
        assert report.reason == ""
    monkeypatch.setenv("KVCM_NODE_ID", "node-b")
    with connected(manager, pool, instance_id) as reuse:
        output, report = run(reuse, ids)
        assert torch.equal(output, expected)
        assert (report.matched_tokens, report.blocks_saved) == (0, 0)


def test_a_manager_that_lost_its_state_is_told_of_the_pool_again(
    new_manager: Callable[..., ManagerProcess],
    instance_id: str,
    pool_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCM_POOL_DIRECTORY", str(pool_directory))
    monkeypatch.setenv("KVCM_NODE_ID", NODE)
    manager = new_manager()
    manager.add_pool("pool", NODE, CAPACITY)
    ids = prompt(100)
    with connected(manager, "pool", instance_id) as reuse:

        def publish() -> None:
            deadline = time.monotonic() + SECONDS
            while not run(reuse, ids)[1].blocks_saved:
                assert time.monotonic() < deadline, reuse.last_report

        publish()
        manager.kill()
        shutil.rmtree(manager.data_dir)
        new_manager(manager.ports).add_pool("pool", NODE, CAPACITY)
        publish()
