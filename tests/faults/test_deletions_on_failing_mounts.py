"""Deletions of the manager while a storage fails: put off, never claimed, and done when the fault is over."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_mount import FaultMount
from reclaim_rig import Rig
from storage_rig import FILE_1, FILE_8, Kind, files_below, write

from kvcm.reclaim.deletion_executor import DeletionExecutor

STORAGE = "s-1"  # as storage_rig calls it
KEYS = range(12)
LONGEST_PAUSE_SECONDS = 61.0
TURN_SECONDS = 60.0
KINDS = {"file-1": FILE_1, "file-8": FILE_8}

_SINGLE = itertools.product(("unlink", "getattr"), ("EIO", "ESTALE", "EACCES"))
FAULTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{f"{operation}-{error}": ((operation,), {"error": error}) for operation, error in _SINGLE},
    "read-only": (("unlink", "write", "create", "fallocate"), {"error": "EROFS"}),
    "everything": (("unlink", "getattr", "open", "create", "write", "fallocate", "readdir"), {"error": "EIO"}),
    "half": (("unlink",), {"error": "EIO", "after": 5}),
}
HANGS = [("unlink",), ("getattr",), ("unlink", "getattr", "open")]


class Deletions(Rig):
    """Blocks in a `file` storage on a mount, and one in another storage."""

    def __init__(self, mount: FaultMount, other: Path, kind: Kind) -> None:
        super().__init__(())
        (mount.directory / "cluster").mkdir()
        (other / "cluster").mkdir(parents=True)
        self.mount = mount
        self.directory.open(kind.config(mount.path))
        self.directory.open(FILE_1.config(other, "other"))
        self.executor = DeletionExecutor(self.directory, self.clock, events=self.events, is_configured=lambda _: True)
        self.executor.serve(self)

    async def fill(self) -> None:
        for key in KEYS:
            for uri in await self.block(key, STORAGE, location_id=f"l{key}"):
                write(uri)

    async def turn(self) -> None:
        """Let the longest pause pass, and everything that is due then be tried."""
        self.clock.time += LONGEST_PAUSE_SECONDS
        await asyncio.wait_for(self.executor.run_due(), TURN_SECONDS)

    @property
    def files(self) -> list[Path]:
        return files_below(self.mount.directory)

    @property
    def used_bytes(self) -> int:
        return sum(self.index.usage_bytes.values())


@pytest.fixture(params=KINDS)
def deletions(request: pytest.FixtureRequest, fault_mount: FaultMount, tmp_path: Path) -> Deletions:
    return Deletions(fault_mount, tmp_path / "other", KINDS[request.param])


@pytest.mark.parametrize("name", FAULTS)
async def test_deletions_that_fail_are_put_off_and_done_later(deletions: Deletions, name: str) -> None:
    """While bytes are there, the metadata is and counts."""
    operations, fault = FAULTS[name]
    await deletions.fill()
    deletions.mount.inject(*operations, path="/cluster/*", **fault)
    for _ in range(3):
        await deletions.turn()
    left = await deletions.left()
    assert left
    assert deletions.used_bytes == 16 * len(left)
    assert deletions.executor.backlog(STORAGE).failures > 0
    deletions.mount.clear()
    await deletions.turn()
    assert (await deletions.left(), deletions.used_bytes, deletions.files) == ([], 0, [])


@pytest.mark.parametrize("operations", HANGS, ids=" ".join)
async def test_deletions_that_hang_keep_no_other_storage(deletions: Deletions, operations: tuple[str, ...]) -> None:
    await deletions.fill()
    deletions.mount.inject(*operations, path="/cluster/*", hang=True)
    running = asyncio.create_task(deletions.executor.run(0.01))
    try:
        await asyncio.to_thread(deletions.mount.until_waiting)
        (uri,) = await deletions.block(100, "other", specs=("tp0",))
        write(uri)
        await _until(lambda: not Path(uri.partition("://other")[2].partition("?")[0]).exists())
        deletions.clock.time += LONGEST_PAUSE_SECONDS
        await _until(lambda: deletions.executor.backlog(STORAGE).failures > 0)
        assert set(await deletions.left()) & {*KEYS}
        await asyncio.to_thread(deletions.mount.clear)
        async with asyncio.timeout(TURN_SECONDS):
            while await deletions.left():
                deletions.clock.time += 1.0
                await asyncio.sleep(0.01)
    finally:
        deletions.mount.clear()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert (deletions.used_bytes, deletions.files) == (0, [])


async def test_a_mount_that_went_away_frees_nothing(deletions: Deletions) -> None:
    """An empty mount point is no storage whose bytes are gone."""
    await deletions.fill()
    await asyncio.to_thread(deletions.mount.die)
    await deletions.turn()
    deletions.mount.close()
    for _ in range(2):
        await deletions.turn()
    assert await deletions.left() == list(KEYS)
    assert list(deletions.mount.path.iterdir()) == []
    deletions.mount.mount()
    await deletions.turn()
    assert (await deletions.left(), deletions.used_bytes, deletions.files) == ([], 0, [])


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TURN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
