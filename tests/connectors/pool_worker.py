"""A process that saves to a memory pool and loads from it: by commands of stdin, or on its own as fast as it can.

    pool_worker.py scripted DIRECTORY CAPACITY   lines of stdin: save|load OFFSET SIZE STAMP; one result each
    pool_worker.py hammer DIRECTORY ME           saves and loads until stdin ends, then prints what came of it as JSON

Allocations of the hammer are those that a manager could make: each with a larger stamp than all before, over whatever
was there. They are published to all in the file `published`, one record per slot.
"""

from __future__ import annotations

import json
import os
import random
import select
import struct
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

from pool_parts import CAPACITY, DEADLINE, bytes_of, content, load_item, mover_at, save_item

from kvcm.model.storages import PAGE_BYTES

PUBLISHED = "published"
SLOTS = 8
CHUNK_PAGES = 256
MOST_PAGES = 96
RECORD = struct.Struct("<QQQI")
MOST_WORKERS = 8
ENOUGH = ("save ok", "load ok", "load lost")


def obey(directory: Path, capacity: int) -> None:
    """Run the commands of stdin."""
    mover = mover_at(directory, capacity)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        offset, size, stamp = map(int, numbers)
        item = save_item(offset, size, stamp) if kind == "save" else load_item(offset, size, stamp)
        (result,) = (mover.save if kind == "save" else mover.load)([item], DEADLINE)
        is_right = bytes_of(item) == content(stamp, offset, size)
        print(result.failure or ("ok" if is_right else "WRONG"), flush=True)


def new_stamp(me: int) -> int:
    """Return a number that is larger than all that any worker was given before."""
    return time.monotonic_ns() * MOST_WORKERS + me


def publish(file: int, slot: int, offset: int, size: int, stamp: int) -> None:
    fields = RECORD.pack(offset, size, stamp, 0)[:-4]
    os.pwrite(file, fields + struct.pack("<I", zlib.crc32(fields)), slot * RECORD.size)


def published(file: int, slot: int) -> tuple[int, int, int] | None:
    record = os.pread(file, RECORD.size, slot * RECORD.size)
    if len(record) < RECORD.size or RECORD.unpack(record)[3] != zlib.crc32(record[:-4]):
        return None
    offset, size, stamp, _ = RECORD.unpack(record)
    return offset, size, stamp


def hammer(directory: Path, me: int) -> None:
    """Save and load until stdin ends, and it has seen enough of everything, however busy the machine is."""
    mover = mover_at(directory, CAPACITY)
    draw = random.Random(os.urandom(8))
    file = os.open(directory / PUBLISHED, os.O_RDWR | os.O_CREAT, 0o600)
    seen = Counter[str]()
    print("ready", flush=True)
    while min(seen[each] for each in ENOUGH) <= 20 or not select.select([sys.stdin], [], [], 0)[0]:
        pages = draw.randint(1, MOST_PAGES)
        offset = draw.randint(0, CHUNK_PAGES - pages) * PAGE_BYTES
        size = pages * PAGE_BYTES - draw.randrange(PAGE_BYTES)
        stamp = new_stamp(me)
        (result,) = mover.save([save_item(offset, size, stamp)], DEADLINE)
        seen[f"save {result.failure or 'ok'}"] += 1
        if result.ok:
            publish(file, draw.randrange(SLOTS), offset, size, stamp)
        for _ in range(8):
            found = published(file, draw.randrange(SLOTS))
            if found is not None:
                item = load_item(*found)
                (result,) = mover.load([item], DEADLINE)
                is_right = result.failure or bytes_of(item) == content(found[2], found[0], found[1])
                seen[f"load {result.failure or ('ok' if is_right else 'WRONG')}"] += 1
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "scripted":
        obey(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        hammer(Path(sys.argv[2]), int(sys.argv[3]))
