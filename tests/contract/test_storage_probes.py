"""A probe says whether a storage can be used: it writes, reads back and deletes, and leaves nothing."""

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from storage_rig import FILE_1, KINDS, PATH_KINDS, Kind, Written, allocation

from kvcm.model.errors import StorageIOError
from kvcm.storage.backend import StorageBackend
from kvcm.storage.file_probe import PROBE_PREFIX


@pytest.fixture(params=PATH_KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return PATH_KINDS[request.param]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free block, with a storage in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system to be filled")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def of_probes(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "cluster").iterdir() if path.name.startswith(PROBE_PREFIX))


def leave(root: Path, name: str, age_seconds: float) -> None:
    path = root / "cluster" / f"{PROBE_PREFIX}{name}"
    path.write_bytes(b"left")
    then = time.time() - age_seconds
    os.utime(path, (then, then))


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def wait_until_gone(root: Path) -> None:
    deadline = time.monotonic() + 30
    while of_probes(root):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def objects(storage: StorageBackend) -> set[str]:
    return {each.name async for page in storage.objects("cluster") for each in page.objects}


@pytest.mark.parametrize("name", KINDS)
async def test_a_storage_that_can_be_used_passes_again_and_again(tmp_path: Path, name: str) -> None:
    storage = KINDS[name].open(tmp_path)
    for _ in range(3):
        await storage.probe()
    await asyncio.gather(*(storage.probe() for _ in range(20)))
    if name in PATH_KINDS:
        assert list((tmp_path / "cluster").iterdir()) == []


async def test_a_storage_that_is_not_mounted_fails(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path / "root")
    (tmp_path / "root").rename(tmp_path / "away")
    with pytest.raises(StorageIOError, match=r"storage s-1.*is it mounted on this host"):
        await storage.probe()
    assert not (tmp_path / "root").exists()
    (tmp_path / "away").rename(tmp_path / "root")
    await storage.probe()


async def test_a_link_in_place_of_the_directory_is_not_followed(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path / "root")
    (tmp_path / "root" / "cluster").rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "cluster").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageIOError, match="s-1"):
        await storage.probe()
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_a_full_storage_fails_until_there_is_room(kind: Kind, full: Path) -> None:
    storage = kind.open(full / "root")
    filling = full / "filling"
    fill(filling)
    with pytest.raises(StorageIOError, match=r"storage s-1: probe failed: writing .*No space left on device"):
        await storage.probe()
    assert of_probes(full / "root") == []
    filling.unlink()
    await storage.probe()


async def test_bytes_that_come_back_changed_fail(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are spoilt after the file was written and closed, and before it is read."""
    storage = kind.open(tmp_path)

    def spoil(*_args: object) -> None:
        (name,) = of_probes(tmp_path)
        with (tmp_path / "cluster" / name).open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", spoil)
        with pytest.raises(StorageIOError, match=r"storage s-1: probe failed: what was read back .*is not what"):
            await storage.probe()
    assert of_probes(tmp_path) == []
    await storage.probe()


async def test_a_read_that_is_short_fails(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = kind.open(tmp_path)
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *_args: os.truncate(f"/proc/self/fd/{descriptor}", 99))
    with pytest.raises(StorageIOError, match=r"\(99 bytes\) is not what was written"):
        await storage.probe()
    assert of_probes(tmp_path) == []


async def test_a_file_that_cannot_be_deleted_fails(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = kind.open(tmp_path)

    def refuse(*_args: object, **_fields: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(StorageIOError, match=r"deleting .*Read-only file system"):
            await storage.probe()
    assert len(of_probes(tmp_path)) == 1
    await storage.probe()


async def test_what_a_probe_left_behind_is_no_object_and_not_in_the_way(kind: Kind, tmp_path: Path) -> None:
    written = await Written.into(kind.open(tmp_path), allocation({"tp0": 64}, range(3)))
    before = await objects(written.backend)
    leave(tmp_path, "dead", 10.0)
    assert await objects(written.backend) == before
    await written.backend.probe()
    await kind.reopen(tmp_path).probe()
    assert of_probes(tmp_path) == [f"{PROBE_PREFIX}dead"]
    written.assert_intact(range(3))


async def test_leftovers_go_after_an_hour_with_a_probe_that_passes(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = kind.open(tmp_path)
    leave(tmp_path, "old", 3700.0)
    leave(tmp_path, "young", 3500.0)
    (tmp_path / "cluster" / f"{PROBE_PREFIX}folder").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", lambda descriptor, *_: os.truncate(f"/proc/self/fd/{descriptor}", 0))
        with pytest.raises(StorageIOError):
            await storage.probe()
    assert f"{PROBE_PREFIX}old" in of_probes(tmp_path)
    await storage.probe()
    assert of_probes(tmp_path) == [f"{PROBE_PREFIX}folder", f"{PROBE_PREFIX}young"]


async def test_probes_that_hang_hold_up_no_deletion_and_end_with_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are threads, all given up by their callers, as on a mount that does not answer."""
    written = await Written.into(FILE_1.open(tmp_path), allocation({"tp0": 64}, range(2)))
    gate = os.pipe()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", lambda *_args: os.read(gate[0], 1))
        for _ in range(100):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(written.backend.probe(), 0.001)
        assert await written.backend.delete(written.uris[:1]) == [None]
        assert await written.backend.exists(written.uris) == [False, True]
        os.write(gate[1], b"x" * 100)
        os.close(gate[1])
        async with asyncio.timeout(30):
            await written.backend.probe()
        await asyncio.to_thread(wait_until_gone, tmp_path)
    os.close(gate[0])
