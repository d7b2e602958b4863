"""Media that hang while they are opened: they take no thread of the loop's own, and the process can end."""

import subprocess
import sys

PROGRAM = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.store.memory import MemoryTable

HEALTHY = StorageConfig("here", DummyStorageSpec("/here"))
HANGING = StorageConfig("here", DummyStorageSpec("/hangs"))
hangs, begun, table = threading.Event(), threading.Semaphore(0), MemoryTable()

def open_or_hang(config, cluster_id):
    if config.spec.root_path == "/hangs":
        begun.release()
        hangs.wait()
    return DummyStorage.open(config, cluster_id)

def registry(opener):
    return Registry(StorageDirectory("c", openers={StorageType.ST_DUMMY: opener}), table)

async def check():
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    storages = registry(open_or_hang).storages
    await storages.add_while_serving(HEALTHY)
    await registry(DummyStorage.open).storages.add(replace(HANGING, global_unique_name="away"))
    waiting = [
        asyncio.create_task(storages.update_while_serving(HANGING)),
        asyncio.create_task(storages.add_while_serving(replace(HANGING, global_unique_name="new"))),
        asyncio.create_task(registry(open_or_hang).refresh()),
    ]
    for _ in waiting:
        while not begun.acquire(blocking=False):
            await asyncio.sleep(0.01)
    await asyncio.to_thread(int)
    corrected = replace(HANGING, spec=DummyStorageSpec("/corrected"))
    await storages.update_while_serving(corrected)
    assert storages.existing(["here"]) == [corrected]

async def main():
    async with asyncio.timeout(60):
        await check()

asyncio.run(main())
"""


def test_media_that_hang_hold_up_neither_the_manager_nor_its_end() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=90)
