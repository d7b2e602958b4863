"""The lease of managers on one host: one holder at a time, after crashes and with any contents of the file."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_clock import FakeClock

from kvcm.model.errors import StorageIOError
from kvcm.store.file_lease import FileLease, MonotonicClock, boot_id
from kvcm.store.store import LeaseState

CONTENDER = """
import asyncio, sys
from pathlib import Path
from kvcm.store.file_lease import FileLease

async def main():
    lease = FileLease(Path(sys.argv[1]), lock_tries=6000)
    print("ready", flush=True)
    sys.stdin.readline()
    print(*(await lease.acquire(sys.argv[2], 3600)), flush=True)

asyncio.run(main())
"""


def file_of(directory: Path) -> Path:
    return directory / "_TAIR_KVCM_LEADER_KEY.lock"


async def test_a_manager_that_starts_again_takes_its_own_lease_over(tmp_path: Path) -> None:
    await FileLease(tmp_path).acquire("a", 3600)
    assert await FileLease(tmp_path).acquire("a", 3600) == LeaseState("a", 1)


async def test_the_file_reads_as_documented(tmp_path: Path) -> None:
    await FileLease(tmp_path, FakeClock(12.5), boot="b1").acquire("node-1", 10)
    document = json.loads(file_of(tmp_path).read_text())
    assert document == {"value": "node-1", "expire_time_ms": 22500, "token": 1, "boot_id": "b1"}
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600


async def test_a_lease_of_an_earlier_boot_is_free(tmp_path: Path) -> None:
    """The monotonic clock started again from 0: the old end may be days ahead."""
    await FileLease(tmp_path, FakeClock(900_000), boot="before").acquire("a", 10)
    assert await FileLease(tmp_path, FakeClock(5), boot="after").acquire("b", 10) == LeaseState("b", 2)


DAMAGES = {
    "empty": b"",
    "cut off": b'{"value": "a", "expire_ti',
    "not text": b"\xff\xfe",
    "no object": b"[]",
    "fields missing": b'{"value": "a"}',
    "holder not a text": b'{"value": 1, "expire_time_ms": 9, "token": 1, "boot_id": ""}',
    "endless": b'{"value": "a", "expire_time_ms": Infinity, "token": 1, "boot_id": ""}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_file_is_free(tmp_path: Path, damage: bytes) -> None:
    lease = FileLease(tmp_path)
    await lease.acquire("a", 3600)
    file_of(tmp_path).write_bytes(damage)
    assert await lease.acquire("b", 3600) == LeaseState("b", 2)
    assert json.loads(file_of(tmp_path).read_text())["value"] == "b"


async def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    assert (await FileLease(tmp_path / "x" / "y").acquire("a", 10)).holder == "a"


async def test_what_cannot_be_used_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageIOError, match="file/_TAIR"):
        await FileLease(tmp_path / "file").acquire("a", 10)


async def test_it_waits_for_another_process_that_is_at_it(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    holding = asyncio.create_task(FileLease(tmp_path, lock_tries=6000).acquire("a", 10))
    await asyncio.wait({holding}, timeout=0.05)
    assert not holding.done()
    os.close(descriptor)
    assert (await holding).holder == "a"


async def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageIOError, match="locked"):
        await FileLease(tmp_path, lock_tries=2).acquire("a", 10)
    os.close(descriptor)


@pytest.mark.ci
def test_of_many_processes_one_wins(tmp_path: Path) -> None:
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path), f"n{number}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(6)
    ]  # fmt: skip
    for contender in contenders:
        assert contender.stdout is not None
        assert contender.stdout.readline() == "ready\n"
    for contender in contenders:
        assert contender.stdin is not None
        contender.stdin.write("\n")
        contender.stdin.flush()
    answers = {contender.communicate(timeout=60)[0] for contender in contenders}
    assert len(answers) == 1
    assert answers.pop() in {f"n{number} 1\n" for number in range(6)}


def test_the_monotonic_clock_and_the_boot_are_those_of_the_host() -> None:
    program = "from kvcm.store.file_lease import *; print(MonotonicClock().now(), boot_id())"
    before = MonotonicClock().now()
    seconds, boot = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()
    assert before <= float(seconds) <= MonotonicClock().now()
    assert boot == boot_id()
