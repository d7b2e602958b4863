"""A `file` storage of the manager on a medium that fails: reasons or errors, never a claim that is not true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fault_mount import FaultMount
from storage_rig import FILE_1, FILE_8, Kind, Written, allocation, files_below, write

from kvcm.model.errors import StorageIOError
from kvcm.storage.backend import StorageBackend, StoredObject
from kvcm.storage.file_objects import NOTES_SUFFIX

KINDS = {"file-1": FILE_1, "file-8": FILE_8}
SIZE = 5000
ERRORS = ("EIO", "ESTALE")
TURN_SECONDS = 60.0


@pytest.fixture(params=KINDS)
async def written(request: pytest.FixtureRequest, fault_mount: FaultMount) -> Written:
    """Return parts that lie in a storage on the mount, packed or not."""
    return await written_to(fault_mount, KINDS[request.param])


async def written_to(mount: FaultMount, kind: Kind) -> Written:
    (mount.directory / "cluster").mkdir(exist_ok=True)
    return await Written.into(kind.open(mount.path), allocation({"kv": SIZE}, range(16)))


async def listed(backend: StorageBackend) -> tuple[list[StoredObject], int]:
    """Return all objects, and how many could not be looked at."""
    pages = [page async for page in backend.objects("cluster")]
    return [each for page in pages for each in page.objects], sum(page.failed for page in pages)


def kept(mount: FaultMount) -> list[Path]:
    """Return the files that hold blocks."""
    return [path for path in files_below(mount.directory) if path.suffix != NOTES_SUFFIX]


def kept_notes(mount: FaultMount) -> list[Path]:
    return [path for path in files_below(mount.directory) if path.suffix == NOTES_SUFFIX]


# Every operation of a deletion may fail: of whole files, and of slots.
DELETION_FAULTS = [
    *(pytest.param(FILE_1, "unlink", error, id=f"unlink-{error}") for error in (*ERRORS, "EROFS", "EACCES")),
    *(pytest.param(FILE_8, "fallocate", error, id=f"punch-{error}") for error in (*ERRORS, "ENOSPC")),
    *(pytest.param(FILE_8, "open", error, id=f"open-{error}") for error in (*ERRORS, "EACCES")),
    *(pytest.param(FILE_8, "getattr", error, id=f"getattr-{error}") for error in ERRORS),
    *(pytest.param(FILE_8, "create", error, id=f"note-{error}") for error in (*ERRORS, "ENOSPC", "EROFS")),
    *(pytest.param(FILE_8, "write", error, id=f"write-{error}") for error in (*ERRORS, "ENOSPC", "EDQUOT")),
    *(pytest.param(FILE_8, "flush", error, id=f"close-{error}") for error in (*ERRORS, "ENOSPC")),
    *(pytest.param(FILE_8, "read", error, id=f"read-{error}") for error in ERRORS),
]


@pytest.mark.parametrize(("kind", "operation", "error"), DELETION_FAULTS)
async def test_a_deletion_that_fails_says_why_and_succeeds_later(
    fault_mount: FaultMount, kind: Kind, operation: str, error: str
) -> None:
    written = await written_to(fault_mount, kind)
    some = [index for index in range(16) if index % 8 < 3]
    fault_mount.inject(operation, path="/cluster/inst/*", error=error)
    reasons = await written.backend.delete([written.uris[index] for index in some])
    assert all(reasons)
    fault_mount.clear()
    written.assert_intact([index for index in range(16) if index not in some])
    assert await written.backend.delete([written.uris[index] for index in some]) == [None] * len(some)
    left = [index not in some for index in range(16)]
    assert await written.backend.exists(written.uris) == left
    assert await written.backend.delete(written.uris) == [None] * 16
    assert kept(fault_mount) == []


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("error", ERRORS)
async def test_what_counts_as_deleted_is(fault_mount: FaultMount, error: str, after: int) -> None:
    """The fault begins somewhere in the work, and slot after slot goes: none is forgotten, and no file is left."""
    written = await written_to(fault_mount, FILE_8)
    for operation in ("unlink", "write", "fallocate", "create", "open"):
        fault_mount.inject(operation, path="/cluster/inst/*", error=error, after=after, times=2)
    waiting = list(written.uris)
    for _ in range(30):
        reasons = [(await written.backend.delete([uri]))[0] for uri in waiting]
        gone = [uri for uri, reason in zip(waiting, reasons, strict=True) if reason is None]
        assert not any(await written.backend.exists(gone))
        waiting = [uri for uri, reason in zip(waiting, reasons, strict=True) if reason is not None]
        if not waiting:
            break
    assert waiting == []
    assert kept(fault_mount) == []


async def test_notes_that_could_not_be_removed_go_with_the_next_try(fault_mount: FaultMount) -> None:
    written = await written_to(fault_mount, FILE_8)
    assert await written.backend.delete(written.uris[:7]) == [None] * 7
    fault_mount.inject("unlink", path=f"*{NOTES_SUFFIX}", error="EIO", times=1)
    assert all(await written.backend.delete(written.uris[7:8]))
    assert await written.backend.delete(written.uris[7:8]) == [None]
    assert kept_notes(fault_mount) == []


@pytest.mark.parametrize("error", ERRORS)
async def test_notes_of_deleted_slots_that_cannot_be_read_are_an_error(fault_mount: FaultMount, error: str) -> None:
    written = await written_to(fault_mount, FILE_8)
    assert await written.backend.delete(written.uris[:1]) == [None]
    fault_mount.inject("read", path="*.deleted", error=error)
    with pytest.raises(StorageIOError):
        await written.backend.exists(written.uris[:2])
    fault_mount.clear()
    assert await written.backend.exists(written.uris[:2]) == [False, True]


async def test_a_block_that_is_seen_late_is_missing_until_then(fault_mount: FaultMount, written: Written) -> None:
    fault_mount.hide("/cluster/inst/*")
    assert not any(await written.backend.exists(written.uris))
    fault_mount.clear()
    assert all(await written.backend.exists(written.uris))


@pytest.mark.parametrize("error", [*ERRORS, "ENOSPC"])
async def test_a_discard_that_fails_says_why(fault_mount: FaultMount, error: str) -> None:
    (fault_mount.directory / "cluster").mkdir()
    backend = FILE_8.open(fault_mount.path)
    uris = await backend.allocate(allocation({"kv": SIZE}, range(8)))
    fault_mount.inject("mkdir", "create", "write", error=error)
    assert all(await backend.discard(uris[:3]))
    fault_mount.clear()
    assert await backend.discard(uris[:3]) == [None] * 3
    for uri in uris[3:]:
        write(uri)
    assert await backend.exists(uris) == [False] * 3 + [True] * 5
    assert await backend.delete(uris[3:]) == [None] * 5
    assert kept(fault_mount) == kept_notes(fault_mount) == []


@pytest.mark.parametrize("error", ERRORS)
async def test_an_unlistable_storage_is_not_empty(fault_mount: FaultMount, written: Written, error: str) -> None:
    everything, _ = await listed(written.backend)
    for path in ("/cluster", "/cluster/inst", "/cluster/inst/kv"):
        fault_mount.inject("readdir", path=path, error=error)
        if path == "/cluster":
            with pytest.raises(StorageIOError):
                await listed(written.backend)
        else:
            assert await listed(written.backend) == ([], 1)
        fault_mount.clear()
    assert await listed(written.backend) == (everything, 0)


@pytest.mark.parametrize("error", ERRORS)
async def test_an_unreadable_object_is_counted_and_the_others_are_listed(fault_mount: FaultMount, error: str) -> None:
    written = await written_to(fault_mount, FILE_1)
    fault_mount.inject("getattr", path=f"*/{written.path(5).name}", error=error)
    objects, failed = await listed(written.backend)
    assert (len(objects), failed) == (15, 1)


@pytest.mark.parametrize("error", [*ERRORS, "EROFS"])
async def test_an_unremovable_object_stays_and_says_why(fault_mount: FaultMount, written: Written, error: str) -> None:
    objects, _ = await listed(written.backend)
    fault_mount.inject("unlink", error=error)
    assert all(await written.backend.remove_objects("cluster", objects))
    written.assert_intact(range(16))
    fault_mount.clear()
    assert await written.backend.remove_objects("cluster", objects) == [None] * len(objects)
    assert kept(fault_mount) == []


@pytest.mark.parametrize("error", ERRORS)
async def test_an_object_of_unknown_state_is_not_removed(fault_mount: FaultMount, written: Written, error: str) -> None:
    objects, _ = await listed(written.backend)
    fault_mount.inject("getattr", path="/cluster/inst/kv/*", error=error)
    assert all(await written.backend.remove_objects("cluster", objects))
    fault_mount.clear()
    written.assert_intact(range(16))


Question = Callable[[StorageBackend, list[str]], Awaitable[object]]


async def _remove(backend: StorageBackend, _uris: list[str]) -> object:
    return await backend.remove_objects("cluster", [StoredObject("inst/kv/1.a", 1, 0.0)])


QUESTIONS: dict[str, tuple[tuple[str, ...], Question]] = {
    "delete": (("getattr", "unlink"), lambda backend, uris: backend.delete(uris)),
    "exists": (("getattr",), lambda backend, uris: backend.exists(uris)),
    "objects": (("readdir",), lambda backend, _uris: listed(backend)),
    "remove": (("getattr",), _remove),
    "space": (("statfs",), lambda backend, _uris: backend.space()),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("name", "path"), [("exists", "/cluster/inst/*"), ("space", "*")])
async def test_what_cannot_be_looked_at_is_an_error(
    fault_mount: FaultMount, written: Written, name: str, path: str, error: str
) -> None:
    """A storage that fails must not cost the metadata of what it holds."""
    operations, ask = QUESTIONS[name]
    fault_mount.inject(*operations, path=path, error=error)
    with pytest.raises(StorageIOError):
        await ask(written.backend, written.uris)
    fault_mount.clear()
    assert all(await written.backend.exists(written.uris))
    assert (await written.backend.space()).capacity_bytes > 0


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_storage_that_hangs_blocks_only_its_callers(
    fault_mount: FaultMount, written: Written, tmp_path: Path, name: str
) -> None:
    """Neither the event loop nor another storage hangs; a caller may give up, or wait for its answer."""
    operations, ask = QUESTIONS[name]
    (tmp_path / "other" / "cluster").mkdir(parents=True)
    other = await Written.into(FILE_8.open(tmp_path / "other"), allocation({"kv": SIZE}, range(8)))
    fault_mount.inject(*operations, hang=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(written.backend, written.uris), 0.2)
    asked = asyncio.ensure_future(ask(written.backend, written.uris))
    await asyncio.to_thread(fault_mount.until_waiting)
    assert all(await asyncio.wait_for(other.backend.exists(other.uris), TURN_SECONDS))
    assert await asyncio.wait_for(other.backend.delete(other.uris), TURN_SECONDS) == [None] * 8
    assert not asked.done()
    await asyncio.to_thread(fault_mount.clear)
    await asyncio.wait_for(asked, TURN_SECONDS)


async def test_a_mount_whose_server_died_fails_until_it_is_back(fault_mount: FaultMount, written: Written) -> None:
    await asyncio.to_thread(fault_mount.die)
    assert all(await written.backend.delete(written.uris))
    for question in (written.backend.exists(written.uris), written.backend.space(), listed(written.backend)):
        with pytest.raises(StorageIOError):
            await question
    fault_mount.close()
    fault_mount.mount()
    written.assert_intact(range(16))
    assert await written.backend.delete(written.uris) == [None] * 16
    assert kept(fault_mount) == []
