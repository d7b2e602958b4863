"""`kvcm index rebuild`: a data directory that is gone, and engines that find their blocks again."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_full_disk import instance, readable, save
from test_transport_drivers import Api, eventually
from test_transport_process import manager, run_kvcm

pytestmark = pytest.mark.ci  # processes that wait

NOTES = "kvcm.storage.finish_notes=true"


def _index(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = run_kvcm(tmp_path, "index", "rebuild", "--json", *words)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"stderr": done.stderr}


def _configure(api: Api, root: Path, keys_per_file: int) -> None:
    storage = {"global_unique_name": "blocks", "nfs": {"root_path": str(root), "key_count_per_file": keys_per_file}}
    api.ok("AdminService.AddStorage", storage=storage)
    group = api.ok("AdminService.GetInstanceGroup", name="default").instance_group
    version, group.version = group.version, group.version + 1
    group.storage_candidates[:] = ["blocks"]
    api.ok("AdminService.UpdateInstanceGroup", instance_group=group, current_version=version)
    api.ok("RegisterInstance", **instance("i", 4096))


def _found(api: Api, keys: Sequence[int]) -> list[int]:
    return [key for key in keys if readable(api, key)]


@pytest.mark.parametrize("keys_per_file", [1, 8])
def test_an_index_that_is_gone_is_made_again_from_the_storages(tmp_path: Path, keys_per_file: int) -> None:
    """The directory of a stopped manager is removed; finished blocks are read again, and no others."""
    root, data = tmp_path / "kv", tmp_path / "m" / "data"
    with manager(tmp_path / "m", NOTES) as process, process.api() as api:
        _configure(api, root, keys_per_file)
        assert not save(api, range(100))
        assert not save(api, range(100, 120))
        api.ok("StartWriteCache", instance_id="i", block_keys=range(200, 220))
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    shutil.rmtree(data)
    code, report = _index(tmp_path, str(root), "--data-dir", str(data), "--dry-run")
    assert (code, report.get("stored")) == (0, {"i": 120}), report
    assert not data.exists()
    code, report = _index(tmp_path, str(root), "--data-dir", str(data))
    assert (code, report["stored"]) == (0, {"i": 120}), report
    assert _index(tmp_path, str(root), "--data-dir", str(data))[1]["known"] == {"i": 120}
    with manager(tmp_path / "m", NOTES) as process, process.api() as api:
        eventually(lambda: readable(api, 0))  # a packed storage is verified first
        assert _found(api, range(220)) == [*range(120)], "engines need not register again"
        assert not save(api, range(300, 310))
        assert _found(api, range(300, 310)) == [*range(300, 310)]


def test_without_notes_a_rebuild_says_how_to_have_some(tmp_path: Path) -> None:
    root, data = tmp_path / "kv", tmp_path / "m" / "data"
    with manager(tmp_path / "m") as process, process.api() as api:
        _configure(api, root, 1)
        assert not save(api, range(10))
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    code, report = _index(tmp_path, str(root), "--data-dir", str(data))
    assert code == 2
    assert "managers write them with kvcm.storage.finish_notes=true" in report["stderr"]
