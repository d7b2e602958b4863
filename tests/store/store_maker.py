"""A process that fills an embedded store, and ends as a killed one does, or after it closed the store.

Usage: python store_maker.py DIRECTORY END. END is `killed` (everything of the last session is in the log), `flushed`
(in tables and the log) or `closed`. All acknowledged is written to DIRECTORY.json: records of blocks by key, and
documents of the registry by name, both as hexadecimal text.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from random import Random

from kvcm.index.backends.backend import Change
from kvcm.index.backends.rocks import RocksBackend, load_index
from kvcm.index.codec import encode_payload
from kvcm.model.clock import SystemClock
from kvcm.model.keys import unmixed_key
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.rocks import RocksStore

UID = 7
SESSIONS = 3
ROUNDS = 25


def record(name: str) -> BlockRecord:
    """A readable block at a place of that name."""
    uri = f"file://nfs/cluster/instance/kv/{name}?size=10"
    chunk = encode_chunk(StorageType.ST_NFS, 1, [SpecUri("kv", uri)])
    place = Location(name, "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), chunk, 10, 0.0)
    return BlockRecord(None, 0, (place,))


class Filler:
    """Writes to one store, and knows all that was acknowledged."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.blocks: dict[int, BlockRecord] = {}
        self.documents: dict[str, bytes] = {}
        self.names = 0

    async def fill(self, store: RocksStore, backend: RocksBackend, rounds: int) -> None:
        """Write, change and delete blocks and documents; each round is acknowledged."""
        for _ in range(rounds):
            await self._change_blocks(backend)
            await self._change_documents(store)
            await store.flush()

    async def _change_blocks(self, backend: RocksBackend) -> None:
        fresh = [self.random.getrandbits(63) for _ in range(self.random.randrange(1, 60))]
        old = self.random.sample(sorted(self.blocks), min(4, len(self.blocks)))
        changes = [Change(key, None, self._record()) for key in fresh]
        changes += [Change(key, self.blocks[key], self._record()) for key in old[:2]]
        changes += [Change(key, self.blocks[key], None) for key in old[2:]]
        assert not (await backend.write_many(changes)).lost
        for change in changes:
            if change.new is None:
                self.blocks.pop(change.key)
            else:
                self.blocks[change.key] = change.new

    def _record(self) -> BlockRecord:
        self.names += 1
        return record(f"{self.names:08x}{self.random.getrandbits(200):050x}")

    async def _change_documents(self, store: RocksStore) -> None:
        name = f"group/{self.random.randrange(40)}"
        old = self.documents.pop(name, None)
        new = None if old is not None and self.random.random() < 0.5 else self.random.randbytes(30)
        assert await store.table("registry").replace(name, old, new)
        if new is not None:
            self.documents[name] = new


async def main(directory: Path, end: str) -> Filler:
    """Fill a store in several sessions."""
    filler = Filler(Random(5))
    for session in range(SESSIONS):
        store = RocksStore(directory, "everysec", SystemClock())
        backend = load_index(store).backend(UID)
        await filler.fill(store, backend, ROUNDS)
        if end == "flushed":
            store.log._database.flush()
            await filler.fill(store, backend, ROUNDS)
        if session < SESSIONS - 1 or end == "closed":
            await store.close()
    return filler


def write_acknowledged(directory: Path, filler: Filler) -> None:
    """Write what the store is bound to hold."""
    acknowledged = {
        "blocks": {unmixed_key(key): encode_payload(each).hex() for key, each in filler.blocks.items()},
        "documents": {name: document.hex() for name, document in filler.documents.items()},
    }
    Path(f"{directory}.json").write_text(json.dumps(acknowledged))


if __name__ == "__main__":
    write_acknowledged(Path(sys.argv[1]), asyncio.run(main(Path(sys.argv[1]), sys.argv[2])))
    os._exit(0)  # without closing the store
