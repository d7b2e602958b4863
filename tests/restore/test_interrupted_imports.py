"""An import that is killed anywhere is run again: what it stored is kept, what it did not is added, nothing twice."""

from __future__ import annotations

import array
import fcntl
import json
import os
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from drill_stores import DrillStore, kvcm
from manager_site import running
from redis_servers import Standalone
from waiting import until
from world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_BLOCKS = 5000
_THOROUGH = os.environ.get("KVCM_TESTS") == "thorough"
_PLACES = (0.05, 0.3, 0.6, 0.9, 1.0) if _THOROUGH else (0.3, 1.0)
"""How much of the backup an import has read when it is killed; at 1.0 it may be done, or about to pin."""


@pytest.mark.parametrize(
    ("from_kind", "to_kind"), [("rocksdb", "redis"), *([("redis", "rocksdb")] if _THOROUGH else [])]
)
def test_an_import_that_is_killed_is_run_again(
    from_kind: str, to_kind: str, tmp_path: Path, redis_standalone: Standalone
) -> None:
    source, target = (DrillStore(kind, tmp_path, redis_standalone) for kind in (from_kind, to_kind))
    world, backup = World(tmp_path / "storages"), tmp_path / "backup.kvcm"
    with running(source.manager):
        world.set_up(source.manager, is_draining=False)
        world.write(source.manager, range(41, _BLOCKS + 1))
        before = world.seen(source.manager)
        assert source.manager.stop() == 0
    exported = kvcm("index", "export", str(backup), "--with-accounts", *source.options)
    assert exported.returncode == 0, exported.stderr
    for place in _PLACES:
        _killed_import(backup.read_bytes(), place, target)
    _imported(backup, target)
    assert _imported(backup, target, "--dry-run")["is_all_there"]
    verified = kvcm("index", "verify", *target.options)
    assert verified.returncode == 0, verified.stdout
    source.wipe()
    with running(target.manager):
        until(lambda: len(world.places(target.manager)) == len(world.written), "blocks are verified after an import")
        assert world.seen(target.manager) == before


def _imported(backup: Path, target: DrillStore, *options: str) -> dict[str, Any]:
    done = kvcm("index", "import", str(backup), "--json", *options, *target.options)
    assert done.returncode == 0, done.stderr
    reported: dict[str, Any] = json.loads(done.stdout)
    return reported


def _killed_import(archive: bytes, place: float, target: DrillStore) -> None:
    """Begin an import, and kill it when it has read so much of the archive."""
    words = [sys.executable, "-m", "kvcm", "index", "import", "-", *target.options]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        process.stdin.write(archive[: int(len(archive) * place)])
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while _waiting(process.stdin.fileno()):
            assert time.monotonic() < deadline, "it does not read"
            time.sleep(0.001)
        process.kill()


def _waiting(pipe: int) -> int:
    """Return how many bytes lie in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]
