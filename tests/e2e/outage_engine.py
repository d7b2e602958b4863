"""An engine that remembers its chains, and which storages have them: what it misses while a storage is away.

    python outage_engine.py <settings as JSON>

The storages of a block are those that the engine wrote it to, or found it in.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from asked_process import serve
from checked_engine import CHAIN_BLOCKS, Access, Engine, Operation, chain_from, register
from engine_figures import GROUPS

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import MatchMode
from kvcm.connectors.transfer import TransferEngine

_SPECS = {"tp0": 1 << 14, "tp1": 5_001}
_KEYS_PER_ENGINE = 1_000_000_000
_REQUEST_SECONDS = 20.0  # a storage that hangs would hold a manager for longer than any busy machine
_SESSION_SECONDS = 60
_AGAIN_EVERY = 4  # of its own chains that it misses, one in so many is written again, as by an engine that computed it
_NEWEST = 0.3  # of reads are of the newest chains


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine works.

    Attributes:
        address: of the manager.
        number: of the engine; others have other keys.
        deadline_seconds: of each load and save.
        read_pause_seconds: between two reads.
        write_pause_seconds: between two writes.
        seed: of what it reads.
    """

    address: str
    number: int
    deadline_seconds: float
    read_pause_seconds: float
    write_pause_seconds: float
    seed: int


@dataclass(slots=True, eq=False)
class _Chain:
    """Blocks that were written together.

    Attributes:
        instance: that they belong to.
        keys: of the blocks.
        copies: storages that have all of them.
        is_own: this engine wrote them.
    """

    instance: str
    keys: range
    copies: set[str]
    is_own: bool

    @property
    def home(self) -> str:
        return "+".join(sorted(self.copies))


class OutageEngine(Engine):
    """Two loops, one that reads and one that writes."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        client = ClientSettings(_REQUEST_SECONDS)
        self._clients = {
            f"{group}/chains": ManagerClient(settings.address, f"{group}/chains", client) for group in GROUPS
        }
        registrations = [
            register(each, group, _SPECS) for group, each in zip(GROUPS, self._clients.values(), strict=True)
        ]
        transfers = TransferEngine.for_storages(registrations[0].storages)  # both groups have the same
        super().__init__(Access(transfers, _SPECS, _REQUEST_SECONDS, settings.deadline_seconds, _SESSION_SECONDS))
        self._chains: list[_Chain] = []
        self._again: deque[_Chain] = deque(maxlen=8)
        self._next_key = settings.number * _KEYS_PER_ENGINE

    def seed(self, chains: int) -> list[list[Any]]:
        """Write so many chains of each instance; returns instance, first key and storages of all."""
        for _ in range(chains):
            for instance in self._clients:
                self._write_new(instance)
        return [[chain.instance, chain.keys[0], sorted(chain.copies)] for chain in self._chains]

    def know(self, chains: list[list[Any]]) -> None:
        """Learn of chains that others wrote."""
        self._chains += [_Chain(instance, chain_from(first), set(copies), False) for instance, first, copies in chains]

    def begin(self) -> None:
        """Read and write until the end."""
        random, pause = Random(self._settings.seed), self._settings
        for step, seconds in ((self._read_one, pause.read_pause_seconds), (self._write_one, pause.write_pause_seconds)):
            self._start(self._repeat, step, seconds, Random(random.random()))

    def has_worked(self) -> bool:
        """Return whether something was read and written in this phase."""
        with self._lock:
            seen = self._phases[self._phase]
            return bool(seen.asked and seen.offered)

    def is_answered(self) -> bool:
        """Return whether the manager answers the clients of all instances, which then no longer hold back requests."""
        return all(client.cluster_info() is not None for client in self._clients.values())

    def restore(self) -> None:
        """Write every own chain again that is not all there."""
        for chain in self._own():
            self._restore(chain)

    def audit(self) -> None:
        """Read every own chain once."""
        for chain in self._own():
            self._read(chain, MatchMode.BATCH)

    def _own(self) -> list[_Chain]:
        return [chain for chain in self._chains if chain.is_own]

    def _repeat(self, step: Callable[[Random], None], pause_seconds: float, random: Random) -> None:
        while not self._has_ended.wait(pause_seconds):
            step(random)

    def _operate(self, instance: str, act: Callable[[Operation], None]) -> None:
        with contextlib.suppress(Exception):  # it is counted
            self._operated(self._clients[instance], instance, act)

    def _read_one(self, random: Random) -> None:
        chain = random.choice(self._chains[-4:] if random.random() < _NEWEST else self._chains)
        is_whole = self._read(chain, random.choice((MatchMode.PREFIX, MatchMode.BATCH)))
        if not is_whole and chain.is_own and (chain.keys[0] // CHAIN_BLOCKS) % _AGAIN_EVERY == 0:
            self._again.append(chain)

    def _read(self, chain: _Chain, mode: MatchMode) -> bool:
        """Read a chain; returns whether all of it was found."""
        home, hits = chain.home, list[str | None]()

        def read(operation: Operation) -> None:
            hits[:] = operation.load(chain.keys, operation.find(chain.keys, mode))
            operation.seen.asked[home] = len(chain.keys)
            operation.seen.hit[home] = sum(storage is not None for storage in hits)

        self._operate(chain.instance, read)
        if len(set(hits)) == 1 and hits[0] is not None:
            chain.copies.add(hits[0])
        return None not in hits

    def _write_one(self, random: Random) -> None:
        if self._again:
            self._restore(self._again.popleft())
        else:
            self._write_new(random.choice(list(self._clients)))

    def _write_new(self, instance: str) -> None:
        """Write a new chain, which counts from now on when all of it was written."""
        keys = chain_from(self._next_key)
        self._next_key += CHAIN_BLOCKS
        for storage in self._written(instance, keys):
            self._chains.append(_Chain(instance, keys, {storage}, True))

    def _restore(self, chain: _Chain) -> None:
        chain.copies.update(self._written(chain.instance, chain.keys))

    def _written(self, instance: str, keys: range) -> set[str]:
        """Write the blocks of a chain that are missing; returns the storage that has all of it now, if one has."""
        written: list[str] = []
        self._operate(instance, lambda operation: written.extend(operation.write(keys)[1]))
        return set(written) if written == written[:1] * len(keys) else set()


def command_of(settings: EngineSettings) -> list[str]:
    """Return the command line of an engine."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    serve(OutageEngine(EngineSettings(**json.loads(sys.argv[1]))))
