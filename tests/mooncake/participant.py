"""One process that uses a Mooncake store, driven by lines of JSON: as the manager does, as an engine, or as an owner.

Bytes of a part follow from its uri, so that every process can check the parts that it loads.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvcm.connectors.transfer.engine import TransferEngine
from kvcm.connectors.transfer.mooncake import MooncakeSettings
from kvcm.connectors.transfer.mover import TransferItem, TransferResult
from kvcm.model.clock import SystemClock
from kvcm.model.keys import mixed
from kvcm.model.mooncake import MooncakeClient, open_client
from kvcm.model.storages import MooncakeStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.mooncake import MooncakeStorage
from kvcm.storage.prober import Prober

GAP_BYTES = 64  # between pieces, so that they are pieces
REGISTERED_BYTES = 48 << 20


def content(uri: str, size_bytes: int) -> bytes:
    return (blake2b(uri.encode()).digest() * (size_bytes // 64 + 1))[:size_bytes]


class Participant:
    """Answers one call after the other; each method is a call.

    Attributes:
        storage: once it is open.
        registered: memory, once there is some.
    """

    storage: MooncakeStorage
    registered: memoryview

    def __init__(self, spec: MooncakeStorageSpec) -> None:
        self.config = StorageConfig("mc", spec)
        self.spec = spec
        self.owned: MooncakeClient | None = None
        self.engine = TransferEngine.for_storages(
            [self.config], 4, checksums=True, mooncake=MooncakeSettings(staging_bytes=16 << 20)
        )
        self.kept: list[memoryview] = []  # of items that are pending: they may still change

    def own(self, size_bytes: int) -> str:
        if self.owned is None:
            self.owned = open_client(self.spec, segment_bytes=size_bytes, buffer_bytes=16 << 20)
        return "open"

    def open(self, cluster_id: str = "cluster") -> None:
        self.storage = MooncakeStorage.open(self.config, cluster_id)

    def allocate(self, keys: list[int], size_bytes: int, location_id: str, instance_id: str = "in/st") -> list[str]:
        parts = [Part("tp0", key, size_bytes) for key in mixed(keys)]
        return asyncio.run(self.storage.allocate(Allocation(instance_id, location_id, parts)))

    def delete(self, uris: list[str]) -> list[str | None]:
        return asyncio.run(self.storage.delete(uris))

    def exists(self, uris: list[str]) -> list[bool]:
        return asyncio.run(self.storage.exists(uris))

    def probe(self) -> None:
        asyncio.run(self.storage.probe())

    def state_after(self, probes: int) -> str:
        """Return what the manager makes of so many probes in a row."""
        storages = StorageDirectory("cluster")
        storages.install(self.config, self.storage)
        asyncio.run(self._watch(storages, probes))
        health = storages.health("mc")
        assert health is not None
        return health.state.label

    async def _watch(self, storages: StorageDirectory, probes: int) -> None:
        prober = Prober(storages, SystemClock(), interval_seconds=0.0, timeout_seconds=60.0)
        for _ in range(probes):
            before = storages.health("mc")
            prober.start_due()
            while storages.health("mc") is before:  # noqa: ASYNC110 - it is answered by another process
                await asyncio.sleep(0.01)

    def children(self) -> list[int]:
        tasks = Path("/proc/self/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def close_storage(self) -> None:
        self.storage.close()

    def register(self) -> None:
        self.registered = np.zeros(REGISTERED_BYTES, np.uint8).data
        self.engine.register_memory([self.registered])

    def save(self, uris: list[str], deadline: float = 20.0, **form: Any) -> dict[str, Any]:
        items = self._items(uris, **form)
        for item in items:
            fill(item, content(str(item.uri), item.uri.size))
        began = time.monotonic()
        results = self.engine.save(items, deadline)
        return {
            "seconds": time.monotonic() - began,
            **failures_of(results),
            "checksums": [result.checksum for result in results],
        }

    def load(
        self, uris: list[str], deadline: float = 20.0, checksums: list[int] | None = None, **form: Any
    ) -> dict[str, Any]:
        items = self._items(uris, **form)
        if checksums is not None:
            items = [replace(item, checksum=checksum) for item, checksum in zip(items, checksums, strict=True)]
        for item in items:
            fill(item, b"\xee" * item.uri.size)
        began = time.monotonic()
        results = self._loaded(items, deadline)
        pairs = list(zip(items, results, strict=True))
        return {
            "seconds": time.monotonic() - began,
            **failures_of(results),
            "equal": [bytes_of(item) == content(str(item.uri), item.uri.size) for item, _ in pairs],
        }

    def load_ranges(
        self, uris: list[str], ranges: list[list[int]], pieces: int = 1, registered: bool = False
    ) -> dict[str, Any]:
        """Load the same ranges of every part, each to memory of its own."""
        parsed = [LocationUri.parse(uri) for uri in uris]
        wanted = [(uri, start, count) for uri in parsed for start, count in ranges]
        memory = self._memory(sum(count + (pieces + 1) * GAP_BYTES for _, _, count in wanted), registered)
        items, place = [], 0
        for uri, start, count in wanted:
            buffers = cut(memory[place:], count, pieces)
            place += count + pieces * GAP_BYTES
            items.append(TransferItem(uri, buffers, start))
            fill(items[-1], b"\xee" * count)
        results = self._loaded(items, 20.0)
        contents = [content(str(uri), uri.size)[start : start + count] for uri, start, count in wanted]
        equal = [bytes_of(item) == expected for item, expected in zip(items, contents, strict=True)]
        return {**failures_of(results), "equal": equal, "moved_bytes": [result.moved_bytes for result in results]}

    def raw_put(self, name: str, size_bytes: int) -> int:
        """Store something of another size under a name, past everything of ours."""
        assert self.owned is not None
        return self.owned.put(name, b"?" * size_bytes)

    def raw_replace(self, name: str, data: str) -> int:
        """Put other bytes, in hex, in the place of an object, past everything of ours."""
        assert self.owned is not None
        code: int = self.owned.upsert(name, bytes.fromhex(data))  # type: ignore[attr-defined]
        return code

    def raw_begin(self, name: str, size_bytes: int) -> list[int]:
        """Begin to store something, as a writer that dies before it ends."""
        codes: list[int] = self.owned.batch_put_session_start([name], [size_bytes])  # type: ignore[union-attr]
        return codes

    def close_engine(self) -> None:
        self.engine.close()

    def _loaded(self, items: list[TransferItem], deadline: float) -> list[TransferResult]:
        """Load, and again when a busy machine stood still for longer than a read lease of this store."""
        results = self.engine.load(items, deadline)
        is_slow = any("longer than its lease" in result.reason for result in results)
        return self._loaded(items, deadline) if is_slow else results

    def _items(self, uris: list[str], pieces: int = 1, registered: bool = False) -> list[TransferItem]:
        parsed = [LocationUri.parse(uri) for uri in uris]
        memory = self._memory(sum(uri.size + (pieces + 1) * GAP_BYTES for uri in parsed), registered)
        items, place = [], 0
        for uri in parsed:
            items.append(TransferItem(uri, cut(memory[place:], uri.size, pieces)))
            place += uri.size + pieces * GAP_BYTES
        return items

    def _memory(self, size_bytes: int, registered: bool) -> memoryview:
        if registered:
            assert size_bytes <= REGISTERED_BYTES
            return self.registered
        memory = np.zeros(size_bytes, np.uint8).data
        self.kept.append(memory)
        return memory


def failures_of(results: Sequence[TransferResult]) -> dict[str, Any]:
    return {"failures": [result.failure for result in results], "reasons": [result.reason for result in results]}


def cut(memory: memoryview, size_bytes: int, pieces: int) -> list[memoryview]:
    """Return so many pieces of memory with gaps between them."""
    buffers, start = [], 0
    for length in lengths(size_bytes, pieces):
        buffers.append(memory[start : start + length])
        start += length + GAP_BYTES
    return buffers


def lengths(size_bytes: int, pieces: int) -> list[int]:
    return [size_bytes // pieces] * (pieces - 1) + [size_bytes - size_bytes // pieces * (pieces - 1)]


def fill(item: TransferItem, value: bytes) -> None:
    start = 0
    for buffer in item.buffers:
        buffer[:] = value[start : start + buffer.nbytes]
        start += buffer.nbytes


def bytes_of(item: TransferItem) -> bytes:
    return b"".join(bytes(buffer) for buffer in item.buffers)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the client prints is no answer
    participant = Participant(MooncakeStorageSpec(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"result": getattr(participant, question.pop("call"))(**question)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
