"""A process that writes through a commit log until it is killed, and prints the batches that the log confirmed.

Usage: python rocks_writer.py DIRECTORY FSYNC [MOST_FILE_BYTES]. Each of four tasks writes batches of rows that all hold
the number of the batch; a line "task number" on stdout is printed once the batch is flushed, "failed" when it cannot.
"""

import asyncio
import os
import resource
import sys
from pathlib import Path

from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks import CommitLog, Fsync

TASKS = 4
ROWS = 64


def row_key(task: int, row: int) -> bytes:
    """Key of one of the rows that a task writes."""
    return b"b" + bytes((task, row))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def write_forever(log: CommitLog, task: int) -> None:
    number = 0
    while True:
        number += 1
        value = number.to_bytes(8) + os.urandom(100)
        log.append([(row_key(task, row), value) for row in range(ROWS)])
        await log.flush()
        say(task, number)


async def main(directory: Path, fsync: Fsync) -> None:
    log = CommitLog(directory, fsync, SystemClock())
    await asyncio.gather(*(write_forever(log, task) for task in range(TASKS)))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
    try:
        asyncio.run(main(Path(sys.argv[1]), Fsync(sys.argv[2])))
    except StorageIOError as error:
        say("failed", error)
