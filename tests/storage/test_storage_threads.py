"""Threads of one storage: a medium that hangs takes none of the loop's own, and does not keep the process alive."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.threads import StorageThreads

HANGS_AT_ITS_END = """
import asyncio, threading
from kvcm.storage.threads import StorageThreads

async def main():
    hanging = asyncio.create_task(StorageThreads("s", 1).run(threading.Event().wait))
    await asyncio.sleep(0)
    hanging.cancel()

asyncio.run(main())
"""


async def test_work_is_done_in_threads_of_its_own_name_and_its_outcome_returned() -> None:
    threads = StorageThreads("storage-a", 2)
    assert await threads.run(lambda: threading.current_thread().name) == "storage-a"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 7) == 7


async def test_there_are_never_more_threads_than_allowed_and_all_work_is_done() -> None:
    threads, now, most, lock = StorageThreads("s", 3), 0, 0, threading.Lock()
    gate = threading.Barrier(3)  # of the first three, each waits for the two others

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        gate.wait(60)
        with lock:
            now -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(30)))
    assert (most, now) == (3, 0)


async def test_a_hanging_storage_takes_no_thread_of_the_loop_or_of_another_storage() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    gate, hanging, other = threading.Event(), StorageThreads("hanging", 8), StorageThreads("other", 1)
    stuck = [asyncio.create_task(hanging.run(gate.wait)) for _ in range(20)]
    await asyncio.sleep(0)
    assert (await asyncio.to_thread(int), await other.run(int)) == (0, 0)
    gate.set()
    assert await asyncio.gather(*stuck) == [True] * 20


async def test_file_deletions_need_no_thread_of_the_loop(tmp_path: Path) -> None:
    """The only one is taken by something that hangs."""
    gate, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    taken = loop.run_in_executor(None, gate.wait)
    storage = StorageDirectory("cluster").prepare(StorageConfig("s", NfsStorageSpec(str(tmp_path))), is_new=True)
    uris = await storage.allocate(Allocation("i", "aa", [Part("tp0", 1, 8)]))
    try:
        async with asyncio.timeout(30):
            assert await storage.delete(uris) == [None]
            assert await storage.discard(uris) == [None]
            assert await storage.exists(uris) == [False]
            assert (await storage.space()).capacity_bytes > 0
    finally:
        gate.set()
        await taken


async def test_cancelled_work_that_has_not_begun_is_not_begun() -> None:
    threads, gate, done = StorageThreads("s", 1), threading.Event(), list[int]()
    first = asyncio.create_task(threads.run(gate.wait))
    second = asyncio.create_task(threads.run(lambda: done.append(2)))
    third = asyncio.create_task(threads.run(lambda: done.append(3)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await asyncio.gather(first, third)
    assert done == [3]


def test_a_process_ends_though_a_storage_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGS_AT_ITS_END], check=True, timeout=60)
