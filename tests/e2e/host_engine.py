"""An engine on one of several hosts: threads that look up, load, compare and write the same few chains all the time.

    python host_engine.py <settings as JSON>

The engine takes its node from the host's name, as every engine does; one that is given an empty node names none.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, TypeVar

from asked_process import serve
from checked_engine import CHAIN_BLOCKS, Access, Engine, Operation, chain_from, register
from engine_figures import GROUP, INSTANCE

from kvcm.connectors.calls import RetrySettings
from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.results import Location, MatchMode
from kvcm.connectors.transfer import TransferEngine, TransferItem

_SPECS = {"tp0": 1 << 14, "tp1": 15_001}  # as many memory pages each, so that a pool is full at its mark and not before
_THREADS = 3
_CHAINS = 60  # of each engine, and as many that all of them write
_KEYS_PER_ENGINE = 1_000_000
_SESSION_SECONDS = 5
_LEASE_MS = 2_000
_PAUSES_AFTER_A_FAILURE = 10  # an engine whose requests fail at once would slow the machine down otherwise
_REMOVED = 0.05  # of the chains that an engine may write, so many are removed instead of written or read
_MODES = (MatchMode.PREFIX, MatchMode.BATCH, MatchMode.SLIDING_WINDOW)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine works.

    Attributes:
        address: of the manager.
        number: of the engine, from 1 on; others have other keys.
        engines: how many there are.
        node_id: that it names; None for the host's name.
        deadline_seconds: of each request, load and save.
        pause_seconds: between two operations of a thread.
        seed: of its requests.
    """

    address: str
    number: int
    engines: int
    node_id: str | None
    deadline_seconds: float
    pause_seconds: float
    seed: int


class HostEngine(Engine):
    """Threads that work on chains of its own and on those of all engines."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        node = NodeSettings.from_environment().node_id if settings.node_id is None else settings.node_id
        # a client that was cut off asks again after a second at the latest
        retry = RetrySettings(breaker_seconds=0.2, breaker_max_seconds=1.0)
        deadline = settings.deadline_seconds
        self._client = ManagerClient(settings.address, INSTANCE, ClientSettings(deadline, retry, node_id=node))
        transfers = TransferEngine.for_storages(register(self._client, GROUP, _SPECS).storages, 2, checksums=True)
        super().__init__(Access(transfers, _SPECS, deadline, deadline, _SESSION_SECONDS, node, has_checksums=True))
        self._phase = "alone"

    def pools(self) -> list[str]:
        """Return the pools that are mapped."""
        return [pool.storage for pool in self._access.transfers.pools()]

    def write(self, first: int) -> list[Any]:
        """Write a chain; returns the mask of the answer, and the storages of the written blocks."""
        return list(self._operate(lambda operation: operation.write(chain_from(first))))

    def read(self, first: int) -> list[str | None]:
        """Look a chain up and load it; returns the storage of each block."""
        keys = chain_from(first)
        return self._operate(lambda operation: operation.load(keys, operation.find(keys, MatchMode.BATCH)))

    def length(self, first: int) -> int | None:
        """Return how much of a chain there is."""
        return self._client.match_length(chain_from(first))

    def load_foreign(self, first: int) -> list[str | None]:
        """Load a chain by the addresses that the manager gives an engine of another node; returns the failures."""
        found = self._client.match(chain_from(first), MatchMode.BATCH).locations
        items = [
            TransferItem(uri, [memoryview(bytearray(uri.size))])
            for place in found
            if place is not None
            for uri in place.uris.values()
        ]
        return [each.failure for each in self._access.transfers.load(items, self._settings.deadline_seconds)]

    def begin(self) -> None:
        """Work until the end."""
        random = Random(self._settings.seed)
        for _ in range(_THREADS):
            self._start(self._repeat, Random(random.random()))

    def audit(self) -> list[list[Any]]:
        """Read every chain of all; returns storage, offset and size of every part that is promised."""
        promised = []
        for chain in range((self._settings.engines + 1) * _CHAINS):
            keys = _chain_number(chain)

            def read(operation: Operation, keys: range = keys) -> list[Location | None]:
                places = operation.find(keys, MatchMode.BATCH)
                operation.load(keys, places)
                return places

            places = [place for place in self._operate(read) if place is not None]
            uris = [uri for place in places for uri in place.uris.values()]
            promised += [[uri.storage, uri.path, uri.size] for uri in uris]
        return promised

    def _operate(self, act: Callable[[Operation], _T]) -> _T:
        return self._operated(self._client, INSTANCE, act)

    def _repeat(self, random: Random) -> None:
        pauses = 1
        while not self._has_ended.wait(pauses * self._settings.pause_seconds):
            with contextlib.suppress(Exception):  # it is counted
                is_good = self._operate(lambda operation: self._step(operation, random))
                pauses = 1 if is_good else _PAUSES_AFTER_A_FAILURE

    def _step(self, operation: Operation, random: Random) -> bool:
        """Look a chain up, load the hits, and write the chain when a block is missing; returns whether no request
        failed."""
        chain = random.randrange((self._settings.engines + 1) * _CHAINS)
        keys, mode = _chain_number(chain), random.choice(_MODES)
        is_others = chain // _CHAINS not in {0, self._settings.number}
        if not is_others and random.random() < _REMOVED:
            operation.remove(keys)
            return not operation.seen.failed_requests
        places = operation.find(keys, mode, random.choice((0, 0, _LEASE_MS)))
        hits = operation.load(keys, places)
        if None in hits and mode is not MatchMode.SLIDING_WINDOW and not is_others:
            operation.write(keys)
        return not operation.seen.failed_requests


def _chain_number(chain: int) -> range:
    """Return the keys of a chain; the first ones are everybody's, then come those of each engine."""
    owner, number = divmod(chain, _CHAINS)
    return chain_from(owner * _KEYS_PER_ENGINE + number * CHAIN_BLOCKS)


def command_of(settings: EngineSettings) -> list[str]:
    """Return the command line of an engine."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    serve(HostEngine(EngineSettings(**json.loads(sys.argv[1]))))
