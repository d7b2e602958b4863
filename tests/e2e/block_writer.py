"""A process that saves blocks as an engine does, one write session after the other, until it is killed.

    python block_writer.py <settings as JSON>

Before and after every step that matters it appends a line to a journal, so its state is known whenever it is
killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.pool_reports import PoolReports
from kvcm.connectors.results import Location, WriteGrant
from kvcm.connectors.transfer import TransferEngine, TransferItem
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri

# Long enough to be killed in the middle of a write.
SPECS = (LocationSpecInfo("tp0", 1 << 20), LocationSpecInfo("tp1", 300_001))
_BLOCKS_PER_SESSION = 12
_SAVE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Settings of a writer.

    Attributes:
        address: of the manager.
        group: of the instance.
        instance: that the blocks belong to.
        first_key: of its first session; the next ones count on from there.
        journal: file that it appends to.
        session_seconds: of each session.
        seed: of how many blocks are saved at a time.
    """

    address: str
    group: str
    instance: str
    first_key: int
    journal: str
    session_seconds: int
    seed: int


def content(uri: LocationUri) -> bytes:
    """Return the bytes of a location: different for every location there ever is."""
    return (blake2b(str(uri).encode()).digest() * (uri.size // 64 + 1))[: uri.size]


def connected(address: str, instance: str) -> ManagerClient:
    """Return a client that may be given memory of its node."""
    return ManagerClient(address, instance, ClientSettings(20.0, node_id=NodeSettings.from_environment().node_id))


def registered(client: ManagerClient, group: str) -> TransferEngine:
    """Register the client's instance and return what moves its bytes."""
    registration = client.register_instance(group, 4, SPECS, ModelDeployment("model", "bf16"), timeout_seconds=20)
    assert registration.ok, registration
    engine = TransferEngine.for_storages(registration.storages)
    PoolReports(client).report(engine.pools(), 20)
    return engine


class _Writer:
    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings
        self._client = connected(settings.address, settings.instance)
        self._engine = registered(self._client, settings.group)
        self._random = Random(settings.seed)
        self._journal = os.open(settings.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def run(self) -> None:
        key = self._settings.first_key
        while True:
            self._session(range(key, key + _BLOCKS_PER_SESSION))
            key += _BLOCKS_PER_SESSION

    def _session(self, keys: range) -> None:
        grant = self._client.start_write(keys, session_seconds=self._settings.session_seconds, timeout_seconds=20)
        assert grant is not None
        fresh = [key for key, is_masked in zip(keys, grant.mask, strict=True) if not is_masked]
        self._note("begun", session=grant.session_id, keys=fresh)
        succeeded = self._save(grant)
        # Recorded before the manager can know: blocks without this record must never be served.
        finished = [location for location, ok in zip(grant.locations, succeeded, strict=True) if ok]
        self._note("finishing", session=grant.session_id, uris=[list(map(str, _uris(each))) for each in finished])
        confirmed = self._client.finish_write(grant.session_id, succeeded, timeout_seconds=20)
        self._note("ended", session=grant.session_id, confirmed=confirmed)

    def _save(self, grant: WriteGrant) -> list[bool]:
        succeeded: list[bool] = []
        while len(succeeded) < len(grant.locations):
            start = len(succeeded)
            succeeded += self._saved(grant.locations[start : start + self._random.randint(1, _BLOCKS_PER_SESSION)])
            self._note("saved", session=grant.session_id, is_last=len(succeeded) == len(grant.locations))
        return succeeded

    def _saved(self, locations: Sequence[Location]) -> list[bool]:
        uris = [uri for location in locations for uri in _uris(location)]
        results = self._engine.save([TransferItem(uri, [memoryview(content(uri))]) for uri in uris], _SAVE_SECONDS)
        per_block = zip(*(iter(result.ok for result in results),) * len(SPECS), strict=True)
        return [all(parts) for parts in per_block]

    def _note(self, event: str, **fields: Any) -> None:
        os.write(self._journal, json.dumps({"event": event, **fields}).encode() + b"\n")


def _uris(location: Location) -> list[LocationUri]:
    return [location.uris[spec.name] for spec in SPECS]


def command_of(settings: WriterSettings) -> list[str]:
    """Return the command line of a writer."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    _Writer(WriterSettings(**json.loads(sys.argv[1]))).run()
