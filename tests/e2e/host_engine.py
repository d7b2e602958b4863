"""An engine on one of several hosts: threads that ask, load, compare and write all the time.

    python host_engine.py <settings as JSON>

The bytes of a part follow from its key and spec, whoever writes it. Which node the engine is on is told by the host's
name, as for any engine; one that is given no node names none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import shake_128
from random import Random
from typing import Any, TypeVar

from asked_process import serve
from host_figures import GROUP, INSTANCE, SPECS, HostFigures, added

from kvcm.connectors.calls import RetrySettings
from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.results import Location, MatchMode, Outcome, WriteGrant
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri

__all__ = ["CHAIN_BLOCKS", "EngineSettings", "command_of"]

CHAIN_BLOCKS = 8
_THREADS = 3
_CHAINS = 60  # of each engine, and as many that all of them write
_KEYS_PER_ENGINE = 1_000_000
_SESSION_SECONDS = 5
_LEASE_MS = 2_000
_PAUSES_OF_THE_REFUSED = 10  # who is refused at once would ask all the time otherwise, and slow the machine down
_PATIENCE_SECONDS = 30.0  # with what must end by itself
_REMOVED = 0.05  # of the chains that an engine may write, so many are removed instead of written or read
_MODES = (MatchMode.PREFIX, MatchMode.BATCH, MatchMode.SLIDING_WINDOW)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is told.

    Attributes:
        address: of the manager.
        number: of the engine, from 1 on; others have other keys.
        engines: how many there are.
        node_id: that it names; None for the host's name.
        deadline_seconds: of each request, load and save.
        pause_seconds: between two operations of a thread.
        seed: of what it does.
    """

    address: str
    number: int
    engines: int
    node_id: str | None
    deadline_seconds: float
    pause_seconds: float
    seed: int


class _Operation:
    """One operation: its requests and transfers are timed, judged and counted."""

    def __init__(self, client: ManagerClient, engine: TransferEngine, node_id: str, deadline_seconds: float) -> None:
        self._client = client
        self._engine = engine
        self._node_id = node_id
        self._deadline = deadline_seconds
        self.seen = HostFigures()

    def find(self, keys: Sequence[int], mode: MatchMode, lease_ms: int = 0) -> list[Location | None]:
        """Return where each block can be read."""
        window = len(keys) // 2 if mode is MatchMode.SLIDING_WINDOW else 0
        found = self._timed(lambda: self._client.match(keys, mode, window=window, read_lease_ms=lease_ms))
        self._judge(found.outcome is Outcome.OK, f"match: {found.reason}")
        if found.lease_id:
            self._timed(lambda: self._client.release_lease(found.lease_id))
        places = [*found.locations, *(None for _ in keys[len(found.locations) :])]
        self._look([each for each in places if each is not None])
        return places

    def load(self, keys: Sequence[int], places: Sequence[Location | None]) -> list[str | None]:
        """Load blocks; returns for each the storage that it came from, None for a miss."""
        parts = [
            (key, spec, place.uris[spec], place.checksums.get(spec, 0))
            for key, place in zip(keys, places, strict=True)
            if place is not None
            for spec in SPECS
        ]
        buffers = [bytearray(uri.size) for _, _, uri, _ in parts]
        items = [
            TransferItem(uri, [memoryview(buffer)], checksum=checksum)
            for (_, _, uri, checksum), buffer in zip(parts, buffers, strict=True)
        ]
        results = self._moved(self._engine.load, items)
        good: Counter[int] = Counter()
        lost: list[tuple[int, LocationUri]] = []
        for (key, spec, uri, checksum), buffer, result in zip(parts, buffers, results, strict=True):
            self._compare(key, spec, uri, checksum, buffer, result)
            good[key] += result.ok
            if result.failure is Failure.LOST:
                lost.append((key, uri))
        if lost:
            self._report(lost)
        storages = {key: uri.storage for key, _, uri, _ in parts}
        hits = [storages[key] if good[key] == len(SPECS) else None for key in keys]
        self.seen.served = dict(Counter(Counter(hit for hit in hits if hit)) + Counter(self.seen.served))
        return hits

    def write(self, keys: Sequence[int]) -> tuple[list[bool], list[str]]:
        """Write what the manager wants of a chain; returns what it does not, and where the rest was written."""
        grant = self._timed(lambda: self._client.start_write(keys, session_seconds=_SESSION_SECONDS))
        self._judge(grant is not None, f"start_write: {self._client.counters()['start_write']}")
        if grant is None:
            return [], []
        self._look(grant.locations)
        fresh = [key for key, is_masked in zip(keys, grant.mask, strict=True) if not is_masked]
        storages = [next(iter(place.uris.values())).storage for place in grant.locations]
        flags, checksums = self._save(fresh, grant)
        is_done = self._timed(lambda: self._client.finish_write(grant.session_id, flags, checksums=checksums))
        self._judge(is_done, "finish_write")
        written = [storage for storage, ok in zip(storages, flags, strict=True) if ok and is_done]
        self.seen.accepted = dict(Counter(written))
        return list(grant.mask), written

    def remove(self, keys: Sequence[int]) -> None:
        """Have a chain removed wherever it is, so that memory is handed out again and again."""
        self._judge(self._timed(lambda: self._client.remove(keys)), "remove")

    def _save(self, keys: Sequence[int], grant: WriteGrant) -> tuple[list[bool], list[dict[str, int]]]:
        items = [
            TransferItem(place.uris[spec], [memoryview(bytearray(_content(key, spec)))])
            for key, place in zip(keys, grant.locations, strict=True)
            for spec in SPECS
        ]
        results = iter(self._moved(self._engine.save, items))
        blocks = [{spec: next(results) for spec in SPECS} for _ in keys]
        flags = [all(part.ok for part in block.values()) for block in blocks]
        return flags, [{spec: part.checksum for spec, part in block.items()} for block in blocks]

    def _compare(
        self, key: int, spec: str, uri: LocationUri, checksum: int, buffer: bytearray, result: TransferResult
    ) -> None:
        if (result.ok and buffer != _content(key, spec)) or result.failure is Failure.CORRUPT:
            self.seen.wrong.append(f"{uri}, key {key}, {result.failure or 'served'}")
        if result.ok and not checksum:
            self.seen.errors.append(f"{uri} has no checksum")
        if result.failure is Failure.REFUSED:
            self.seen.errors.append(f"{uri}: {result.reason}")

    def _report(self, lost: Sequence[tuple[int, LocationUri]]) -> None:
        report = self._timed(lambda: self._client.report_missing(lost))
        self._judge(report is not None, "report_missing")
        self.seen.lost_parts += len(lost)

    def _look(self, places: Sequence[Location]) -> None:
        """Nobody is given memory but that of the node that they named."""
        uris = [uri for place in places for uri in place.uris.values()]
        self.seen.lookups += 1
        self.seen.places += len(uris)
        self.seen.foreign += [
            str(uri)
            for uri in uris
            if (uri.scheme == "pace" or uri.node_id) and (not self._node_id or uri.node_id != self._node_id)
        ]

    def _moved(
        self, move: Callable[[Sequence[TransferItem], float], list[TransferResult]], items: Sequence[TransferItem]
    ) -> list[TransferResult]:
        begin = time.monotonic()
        results = move(items, self._deadline)
        self.seen.overrun_seconds = max(self.seen.overrun_seconds, time.monotonic() - begin - self._deadline)
        unmoved = Counter(
            f"{item.uri.storage} {each.failure}" for item, each in zip(items, results, strict=True) if not each.ok
        )
        self.seen.unmoved = dict(Counter(self.seen.unmoved) + unmoved)
        return results

    def _timed(self, request: Callable[[], _T]) -> _T:
        begin = time.monotonic()
        result = request()
        seconds = time.monotonic() - begin
        self.seen.slowest_seconds = max(self.seen.slowest_seconds, seconds)
        self.seen.overrun_seconds = max(self.seen.overrun_seconds, seconds - self._deadline)
        return result

    def _judge(self, is_ok: bool, text: str) -> None:
        if not is_ok:
            self.seen.failed_requests.append(text)


class Engine:
    """Threads that work; each method without an underscore is a call from outside."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        node = NodeSettings.from_environment().node_id if settings.node_id is None else settings.node_id
        self._node_id = node
        # a client that was cut off asks again after a second at the latest
        retry = RetrySettings(breaker_seconds=0.2, breaker_max_seconds=1.0)
        self._client = ManagerClient(
            settings.address, INSTANCE, ClientSettings(settings.deadline_seconds, retry, node_id=node)
        )
        specs = [LocationSpecInfo(name, size) for name, size in SPECS.items()]
        registration = self._client.register_instance(
            GROUP, 4, specs, ModelDeployment("model", "bf16"), timeout_seconds=20
        )
        assert registration.ok, registration
        self._engine = TransferEngine.for_storages(registration.storages, 2, checksums=True)
        self._lock = threading.Condition()
        self._busy: Counter[int] = Counter()
        self._phase = "alone"
        self._turn = 0  # grows with every phase and every question: what began earlier says nothing of now
        self._lately = HostFigures()
        self._phases: defaultdict[str, HostFigures] = defaultdict(HostFigures)
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def pools(self) -> list[str]:
        """Return the pools that are mapped."""
        return [pool.storage for pool in self._engine.pools()]

    def write(self, first: int) -> list[Any]:
        """Write a chain; returns the mask of the answer, and the storages of what was written."""
        return list(self._operated(lambda operation: operation.write(_chain(first))))

    def read(self, first: int) -> list[str | None]:
        """Ask for a chain and load it; returns the storage of each block."""
        keys = _chain(first)
        return self._operated(lambda operation: operation.load(keys, operation.find(keys, MatchMode.BATCH)))

    def length(self, first: int) -> int | None:
        """Return how much of a chain there is."""
        return self._client.match_length(_chain(first))

    def take(self, first: int) -> list[str | None]:
        """Load a chain by whatever addresses the manager gives who names another node; returns what became of it."""
        keys = _chain(first)
        found = self._client.match(keys, MatchMode.BATCH).locations
        items = [
            TransferItem(uri, [memoryview(bytearray(uri.size))])
            for place in found
            if place is not None
            for uri in place.uris.values()
        ]
        return [each.failure for each in self._engine.load(items, self._settings.deadline_seconds)]

    def begin(self) -> None:
        """Work until the end."""
        random = Random(self._settings.seed)
        for _ in range(_THREADS):
            thread = threading.Thread(target=self._repeat, args=(Random(random.random()),), daemon=True)
            thread.start()
            self._threads.append(thread)

    def enter(self, phase: str) -> None:
        """Count what begins from now on in this phase."""
        with self._lock:
            self._phase = phase
            self._next_turn()

    def turn(self) -> None:
        """Let `works_with` and `finish_earlier` be about what begins from now on."""
        with self._lock:
            self._next_turn()

    def _next_turn(self) -> None:
        self._turn += 1
        self._lately = HostFigures()

    def finish_earlier(self) -> None:
        """Return when everything has ended that began before this turn."""
        with self._lock:
            has_ended = self._lock.wait_for(self._has_turned, _PATIENCE_SECONDS)
            assert has_ended, "an operation does not come back"

    def _has_turned(self) -> bool:
        return self._busy.total() == self._busy[self._turn]

    def works_with(self, storage: str) -> bool:
        """Return whether the storage was read and written in this turn since a request failed last, and nothing is
        under way that began before."""
        with self._lock:
            seen = self._lately
            return bool(seen.served.get(storage) and seen.accepted.get(storage)) and self._has_turned()

    def end(self) -> None:
        """Stop working."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)
            assert not thread.is_alive(), "an operation does not come back"

    def audit(self) -> list[list[Any]]:
        """Read every chain of all; returns storage, offset and size of every part that is promised."""
        promised = []
        for chain in range((self._settings.engines + 1) * _CHAINS):
            keys = _chain_number(chain)

            def look(operation: _Operation, keys: range = keys) -> list[Location | None]:
                places = operation.find(keys, MatchMode.BATCH)
                operation.load(keys, places)
                return places

            places = [place for place in self._operated(look) if place is not None]
            uris = [uri for place in places for uri in place.uris.values()]
            promised += [[uri.storage, uri.path, uri.size] for uri in uris]
        return promised

    def report(self) -> dict[str, Any]:
        """Return the figures of every phase."""
        with self._lock:
            return {phase: asdict(seen) for phase, seen in self._phases.items()}

    def _repeat(self, random: Random) -> None:
        pauses = 1
        while not self._has_ended.wait(pauses * self._settings.pause_seconds):
            try:
                is_good = self._operated(lambda operation: self._step(operation, random))
            except Exception as error:  # it is counted
                del error
            else:
                pauses = 1 if is_good else _PAUSES_OF_THE_REFUSED

    def _step(self, operation: _Operation, random: Random) -> bool:
        """Ask for a chain, load what is there, and write it when something is missing; returns whether no request
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

    def _operated(self, act: Callable[[_Operation], _T]) -> _T:
        operation = _Operation(self._client, self._engine, self._node_id, self._settings.deadline_seconds)
        with self._lock:
            phase, turn = self._phase, self._turn
            self._busy[turn] += 1
        try:
            return act(operation)
        except Exception as error:
            operation.seen.errors.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._phases[phase] = added(self._phases[phase], operation.seen)
                if turn == self._turn:
                    self._lately = (
                        HostFigures() if operation.seen.failed_requests else added(self._lately, operation.seen)
                    )
                self._busy[turn] -= 1
                self._lock.notify_all()


def _chain(first: int) -> range:
    return range(first, first + CHAIN_BLOCKS)


def _chain_number(chain: int) -> range:
    """Return the keys of a chain; the first ones are everybody's, then come those of each engine."""
    owner, number = divmod(chain, _CHAINS)
    return _chain(owner * _KEYS_PER_ENGINE + number * CHAIN_BLOCKS)


def _content(key: int, spec: str) -> bytes:
    return shake_128(f"{key}\n{spec}".encode()).digest(SPECS[spec])


def command_of(settings: EngineSettings) -> list[str]:
    """Return the command line of an engine."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    serve(Engine(EngineSettings(**json.loads(sys.argv[1]))))
