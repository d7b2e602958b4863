"""An engine that knows what it was promised: every acknowledged block, since when, and what its bytes are.

The bytes of a block follow from the deployment, the instance and the key, so any byte that is read says whose it is.
Parts are saved and loaded as engines do, with checksums, and failed loads are reported.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import shake_128
from pathlib import Path

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import Location, MatchMode, Outcome, Registration
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem
from kvcm.model.errors import ErrorCode
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.storages import StorageConfig
from kvcm.model.uri import LocationUri

Block = tuple[str, int]
"""Instance and key."""

_Lost = tuple[int, LocationUri]
_Corrupt = tuple[int, LocationUri, int]
_SPEC = "kv"
_REQUEST_SECONDS = 8.0
_TRANSFER_SECONDS = 20.0
_STORAGES_SECONDS = 5.0
_BATCH = 64


@dataclass(slots=True)
class Reading:
    """What one look at some blocks found.

    Attributes:
        hits: blocks whose bytes are right.
        failed: blocks that are answered and cannot be loaded, with the reason: misses.
        unanswered: the manager could not be asked about these.
    """

    hits: set[Block] = field(default_factory=set)
    failed: dict[Block, Failure] = field(default_factory=dict)
    unanswered: set[Block] = field(default_factory=set)


class KnowingClient:
    """All engines of one deployment.

    Args:
        deployment: that the bytes follow from.
        group: of its instances.
        block_bytes: of each block.

    Attributes:
        files: where blocks were written to last.
        acknowledged: blocks that were confirmed and not removed since, with the unix seconds of the confirmation.
        wrong: blocks that were served with bytes of others.
        lost_bytes: acknowledged blocks whose load failed since their bytes are gone or changed, and was reported.
        answers: calls by outcome.
    """

    def __init__(self, deployment: str, group: str, block_bytes: int) -> None:
        self._deployment, self._group, self._block_bytes = deployment, group, block_bytes
        self._clients: dict[tuple[str, str], ManagerClient] = {}
        self._storages: tuple[StorageConfig, ...] = ()
        self._transfers: TransferEngine | None = None
        self.instances: list[str] = []
        self.acknowledged: dict[Block, float] = {}
        self._parents: dict[Block, int | None] = {}
        self.wrong: list[str] = []
        self.files: dict[Block, Path] = {}
        self.lost_bytes: dict[Block, Failure] = {}
        self.answers: Counter[str] = Counter()

    def register(self, instance: str, address: str) -> str:
        """Register an instance at a manager; returns why that failed, "" if it did not."""
        answer = self._registration(instance, address)
        deadline = time.monotonic() + _STORAGES_SECONDS
        while answer.ok and not answer.storages and time.monotonic() < deadline:  # added at another manager just now
            time.sleep(0.2)
            answer = self._registration(instance, address)
        self.answers[f"register: {answer.state}"] += 1
        if not answer.ok:
            return f"{answer.code}: {answer.message}"
        if instance not in self.instances:
            self.instances.append(instance)
        if answer.storages and answer.storages != self._storages:
            if self._transfers is not None:
                self._transfers.close()
            self._storages = answer.storages
            self._transfers = TransferEngine.for_storages(answer.storages, 2)
        return ""

    def write(self, instance: str, keys: Sequence[int], address: str) -> bool:
        """Write the missing parts of some blocks; returns whether all of them are there now, as far as is known."""
        client = self._client(instance, address)
        grant = client.start_write(keys)
        self.answers[f"start_write: {'ok' if grant else 'failed'}"] += 1
        if grant is None or self._transfers is None:
            return False
        missing = [key for key, is_there in zip(keys, grant.mask, strict=True) if not is_there]
        missing = missing[: len(grant.locations)]
        before = dict(zip(keys[1:], keys, strict=False))
        self.files |= {
            (instance, key): Path(location.uris[_SPEC].path)
            for key, location in zip(missing, grant.locations, strict=True)
        }
        self._parents |= {(instance, key): before.get(key) for key in missing}
        items = [
            TransferItem(location.uris[_SPEC], [memoryview(self.content(instance, key))])
            for key, location in zip(missing, grant.locations, strict=True)
        ]
        results = self._transfers.save(items, _TRANSFER_SECONDS)
        flags = [each.ok for each in results]
        is_done = client.finish_write(
            grant.session_id, flags, checksums=[{_SPEC: each.checksum} if each.ok else {} for each in results]
        )
        self.answers[f"finish_write: {'ok' if is_done else 'failed'}"] += 1
        if is_done:
            now = time.time()
            for key, is_saved in zip(missing, flags, strict=True):
                if is_saved:
                    self.acknowledged[instance, key] = now
                    self.lost_bytes.pop((instance, key), None)
        return is_done and all(flags)

    def remove(self, instance: str, keys: Sequence[int], address: str) -> bool:
        """Remove blocks; they are owed no more, whether or not the manager answers."""
        for key in keys:
            self.acknowledged.pop((instance, key), None)
        is_done = self._client(instance, address).remove(keys)
        self.answers[f"remove: {'ok' if is_done else 'failed'}"] += 1
        return is_done

    def prefix_of(self, block: Block) -> Iterator[Block]:
        """Yield the blocks that a block follows in its chain, the nearest first: without them it is garbage."""
        parent = self._parents.get(block)
        while parent is not None:
            yield block[0], parent
            parent = self._parents.get((block[0], parent))

    def tail_of(self, block: Block) -> list[int]:
        """Return the keys of a block and of the acknowledged ones that follow it in its chain."""
        name, key = block
        tail = [key]
        while self._parents.get((name, tail[-1] + 1)) == tail[-1] and (name, tail[-1] + 1) in self.acknowledged:
            tail.append(tail[-1] + 1)
        return tail

    def read(self, instance: str, keys: Sequence[int], address: str) -> Reading:
        """Match and load blocks; failed loads are reported, wrong bytes kept in `wrong`."""
        reading = Reading()
        for first in range(0, len(keys), _BATCH):
            self._read(instance, keys[first : first + _BATCH], address, reading)
        return reading

    def read_all(self, address: str, keys: Sequence[int]) -> Reading:
        """Read these keys of every instance, acknowledged or not."""
        reading = Reading()
        for instance in self.instances:
            more = self.read(instance, keys, address)
            reading.hits |= more.hits
            reading.failed |= more.failed
            reading.unanswered |= more.unanswered
        return reading

    def reconnect(self) -> None:
        """Forget connections, and the managers that do not answer."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def close(self) -> None:
        """Close connections and files."""
        self.reconnect()
        if self._transfers is not None:
            self._transfers.close()

    def content(self, instance: str, key: int) -> bytearray:
        """Return the bytes of a block."""
        seed = f"{self._deployment}\n{instance}\n{key}".encode()
        return bytearray(shake_128(seed).digest(self._block_bytes))

    def _registration(self, instance: str, address: str) -> Registration:
        infos = [LocationSpecInfo(_SPEC, self._block_bytes)]
        model = ModelDeployment("model", "bf16")
        return self._client(instance, address).register_instance(self._group, 4, infos, model)

    def _read(self, instance: str, keys: Sequence[int], address: str, reading: Reading) -> None:
        found = self._client(instance, address).match(keys, MatchMode.BATCH)
        self.answers[f"match: {found.outcome}"] += 1
        if found.code is ErrorCode.INSTANCE_NOT_EXIST:
            return  # misses, each of them
        if found.outcome is not Outcome.OK or self._transfers is None:
            reading.unanswered |= {(instance, key) for key in keys}
            return
        answered = [(key, each) for key, each in zip(keys, found.locations, strict=True) if each is not None]
        buffers = [bytearray(self._block_bytes) for _ in answered]
        items = [_load_of(location, buffer) for (_, location), buffer in zip(answered, buffers, strict=True)]
        results = self._transfers.load(items, _TRANSFER_SECONDS)
        lost: list[_Lost] = []
        corrupt: list[_Corrupt] = []
        for (key, location), buffer, result in zip(answered, buffers, results, strict=True):
            uri = location.uris[_SPEC]
            if not result.ok:
                reading.failed[instance, key] = result.failure or Failure.ERROR
                if result.failure is Failure.LOST:
                    lost.append((key, uri))
                elif result.failure is Failure.CORRUPT:
                    corrupt.append((key, uri, location.checksums[_SPEC]))
            elif buffer != self.content(instance, key):
                self.wrong.append(f"{instance}, key {key} at {address}: {uri}")
            else:
                reading.hits.add((instance, key))
        if lost or corrupt:
            self._report(instance, lost, corrupt, address)

    def _report(self, instance: str, lost: list[_Lost], corrupt: list[_Corrupt], address: str) -> None:
        report = self._client(instance, address).report_missing(lost, corrupt=corrupt)
        self.answers[f"report_missing: {'ok' if report else 'failed'}"] += 1
        for key, _ in lost:
            self.lost_bytes[instance, key] = Failure.LOST
        for key, _, _ in corrupt:
            self.lost_bytes[instance, key] = Failure.CORRUPT

    def _client(self, instance: str, address: str) -> ManagerClient:
        at = (instance, address)
        if at not in self._clients:
            self._clients[at] = ManagerClient(
                address, instance, ClientSettings(_REQUEST_SECONDS, follow_assignment=False)
            )
        return self._clients[at]


def _load_of(location: Location, buffer: bytearray) -> TransferItem:
    return TransferItem(location.uris[_SPEC], [memoryview(buffer)], checksum=location.checksums.get(_SPEC, 0))


@contextmanager
def knowing_client(deployment: str, group: str, block_bytes: int) -> Iterator[KnowingClient]:
    """Use a client inside the block."""
    client = KnowingClient(deployment, group, block_bytes)
    try:
        yield client
    finally:
        client.close()
