"""An engine as a process of its own: it reads and writes blocks all the time, and checks every byte that it loads.

    python outage_engine.py <settings as JSON>

Bytes of a part follow from its instance, key and spec. Which storages have a block is what this engine was told when it
wrote the block or found it there.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import shake_128
from random import Random
from typing import Any, TypeVar

from asked_process import serve
from outage_figures import GROUPS, EngineFigures, added

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import Location, MatchMode, Outcome, WriteGrant
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri

__all__ = ["EngineSettings", "command_of"]

_SPECS = (LocationSpecInfo("tp0", 1 << 14), LocationSpecInfo("tp1", 5_001))
_CHAIN_BLOCKS = 8
_KEYS_PER_ENGINE = 1_000_000_000
_REQUEST_SECONDS = 5.0  # a storage that hangs would hold a manager for longer than any busy machine
_SESSION_SECONDS = 60
_AGAIN_EVERY = 4  # of its own chains that it misses, one in so many is written again, as by an engine that computed it
_NEWEST = 0.3  # of reads are of the newest chains
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is told.

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


class _Manager:
    """The manager as one operation sees it: every request is timed, and judged.

    Args:
        client: of the operation's instance.
        seen: figures of the operation.
    """

    def __init__(self, client: ManagerClient, seen: EngineFigures) -> None:
        self._client = client
        self._seen = seen

    def find(self, keys: Sequence[int], mode: MatchMode) -> list[Location | None]:
        """Return where each block can be read."""
        found = self._timed(lambda: self._client.match(keys, mode, timeout_seconds=_REQUEST_SECONDS))
        self._judge(found.outcome is Outcome.OK, f"match: {found.reason}")
        return [*found.locations, *(None for _ in keys[len(found.locations) :])]

    def start(self, keys: Sequence[int]) -> WriteGrant | None:
        """Ask where blocks can be written."""
        grant = self._timed(
            lambda: self._client.start_write(keys, session_seconds=_SESSION_SECONDS, timeout_seconds=_REQUEST_SECONDS)
        )
        self._judge(grant is not None, "start_write")
        return grant

    def finish(self, grant: WriteGrant, flags: Sequence[bool]) -> bool:
        """Publish what was written."""
        is_confirmed = self._timed(
            lambda: self._client.finish_write(grant.session_id, flags, timeout_seconds=_REQUEST_SECONDS)
        )
        self._judge(is_confirmed, "finish_write")
        return is_confirmed

    def report(self, parts: Sequence[tuple[int, LocationUri]]) -> None:
        """Tell of bytes that are not there."""
        report = self._timed(lambda: self._client.report_missing(parts, timeout_seconds=_REQUEST_SECONDS))
        self._judge(report is not None, "report_missing")
        self._seen.lost_parts += len(parts)
        self._seen.removed_locations += report.removed_locations if report else 0

    def _timed(self, request: Callable[[], _T]) -> _T:
        begin = time.monotonic()
        result = request()
        seconds, seen = time.monotonic() - begin, self._seen
        seen.requests += 1
        seen.slowest_request_seconds = max(seen.slowest_request_seconds, seconds)
        seen.overrun_seconds = max(seen.overrun_seconds, seconds - _REQUEST_SECONDS)
        return result

    def _judge(self, is_ok: bool, text: str) -> None:
        if not is_ok:
            self._seen.failed_requests.append(text)


class Engine:
    """Two loops, one that reads and one that writes; each method without an underscore is a call from outside."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._clients = {f"{group}/chains": ManagerClient(settings.address, f"{group}/chains") for group in GROUPS}
        self._engine = self._registered()
        self._lock = threading.Condition()
        self._busy: Counter[str] = Counter()  # operations under way, by the phase in which they began
        self._chains: list[_Chain] = []
        self._again: deque[_Chain] = deque(maxlen=8)
        self._next_key = settings.number * _KEYS_PER_ENGINE
        self._phase = "seed"
        self._phases: defaultdict[str, EngineFigures] = defaultdict(EngineFigures)
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def seed(self, chains: int) -> list[list[Any]]:
        """Write so many chains of each instance; returns instance, first key and storages of all."""
        for _ in range(chains):
            for instance in self._clients:
                self._operate(self._write, instance, self._new_keys())
        return [[chain.instance, chain.keys[0], sorted(chain.copies)] for chain in self._chains]

    def know(self, chains: list[list[Any]]) -> None:
        """Learn of chains that others wrote."""
        for instance, first, copies in chains:
            self._chains.append(_Chain(instance, range(first, first + _CHAIN_BLOCKS), set(copies), False))

    def begin(self) -> None:
        """Read and write until the end."""
        random, pause = Random(self._settings.seed), self._settings
        loops = ((self._read_one, pause.read_pause_seconds), (self._write_one, pause.write_pause_seconds))
        for step, seconds in loops:
            arguments = (step, seconds, Random(random.random()))
            self._threads.append(threading.Thread(target=self._repeat, args=arguments, daemon=True))
            self._threads[-1].start()

    def enter(self, phase: str) -> None:
        """Count what begins from now on in this phase."""
        with self._lock:
            self._phase = phase

    def finish_earlier(self) -> None:
        """Return when everything has ended that began in other phases."""
        with self._lock:
            has_ended = self._lock.wait_for(lambda: self._busy.total() == self._busy[self._phase], 20)
            assert has_ended, "an operation does not come back"

    def has_worked(self) -> bool:
        """Return whether something was read and written in this phase."""
        with self._lock:
            seen = self._phases[self._phase]
            return bool(seen.asked and seen.offered)

    def works_with(self, storage: str) -> bool:
        """Return whether the storage was read and written in this phase."""
        with self._lock:
            seen = self._phases[self._phase]
            return bool(seen.served.get(storage) and seen.accepted.get(storage))

    def is_answered(self) -> bool:
        """Return whether the manager answers the clients of all instances, which then no longer hold back requests."""
        return all(
            client.cluster_info(timeout_seconds=_REQUEST_SECONDS) is not None for client in self._clients.values()
        )

    def end(self) -> None:
        """Stop reading and writing."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "an operation does not come back"

    def restore(self) -> None:
        """Write every own chain again that is not all there."""
        for chain in [chain for chain in self._chains if chain.is_own]:
            self._operate(self._restore, chain)

    def audit(self) -> None:
        """Read every own chain once."""
        for chain in [chain for chain in self._chains if chain.is_own]:
            self._operate(self._read, chain, MatchMode.BATCH)

    def report(self) -> dict[str, Any]:
        """Return the figures of every phase."""
        with self._lock:
            return {phase: asdict(seen) for phase, seen in self._phases.items()}

    def _registered(self) -> TransferEngine:
        deployment = ModelDeployment("model", "bf16")
        for group, client in zip(GROUPS, self._clients.values(), strict=True):
            registration = client.register_instance(group, 4, _SPECS, deployment, timeout_seconds=20)
            assert registration.ok, registration
        return TransferEngine.for_storages(registration.storages)  # both groups have the same

    def _repeat(self, step: Callable[[EngineFigures, Random], None], pause_seconds: float, random: Random) -> None:
        while not self._has_ended.wait(pause_seconds):
            self._operate(step, random)

    def _operate(self, operation: Callable[..., object], *arguments: object) -> None:
        """Do something and count it in the phase in which it began: the operation is given figures of its own."""
        seen = EngineFigures()
        with self._lock:
            phase = self._phase
            self._busy[phase] += 1
        try:
            operation(seen, *arguments)
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
        with self._lock:
            self._phases[phase] = added(self._phases[phase], seen)
            self._busy[phase] -= 1
            self._lock.notify_all()

    # ── reading ──

    def _read_one(self, seen: EngineFigures, random: Random) -> None:
        chains = self._chains[-4:] if random.random() < _NEWEST else self._chains
        chain = random.choice(chains)
        is_whole = self._read(seen, chain, random.choice((MatchMode.PREFIX, MatchMode.BATCH)))
        if not is_whole and chain.is_own and (chain.keys[0] // _CHAIN_BLOCKS) % _AGAIN_EVERY == 0:
            self._again.append(chain)

    def _read(self, seen: EngineFigures, chain: _Chain, mode: MatchMode) -> bool:
        """Read a chain; returns whether all of it was found."""
        home, manager = chain.home, _Manager(self._clients[chain.instance], seen)
        found = manager.find(chain.keys, mode)
        hits = self._load(seen, manager, chain, found)
        seen.asked[home] = len(chain.keys)
        seen.hit[home] = sum(storage is not None for storage in hits)
        seen.served = dict(Counter(storage for storage in hits if storage is not None))
        if len(set(hits)) == 1 and hits[0] is not None:
            chain.copies.add(hits[0])
        return None not in hits

    def _load(
        self, seen: EngineFigures, manager: _Manager, chain: _Chain, found: Sequence[Location | None]
    ) -> list[str | None]:
        """Load blocks; returns for each the storage that it came from, None for a miss."""
        parts = [
            (key, spec.name, location.uris[spec.name])
            for key, location in zip(chain.keys, found, strict=True)
            if location is not None
            for spec in _SPECS
        ]
        buffers = [bytearray(uri.size) for _, _, uri in parts]
        results = self._moved(seen, self._engine.load, [uri for *_, uri in parts], buffers)
        lost = [
            (key, uri) for (key, _, uri), result in zip(parts, results, strict=True) if result.failure is Failure.LOST
        ]
        if lost:
            manager.report(lost)
        good: Counter[int] = Counter()
        for (key, spec, uri), buffer, result in zip(parts, buffers, results, strict=True):
            if result.ok and buffer != _content(chain.instance, key, spec):
                seen.wrong.append(f"{uri} of {chain.instance}, key {key}")
            good[key] += result.ok
        storages = {key: uri.storage for key, _, uri in parts}
        return [storages[key] if good[key] == len(_SPECS) else None for key in chain.keys]

    # ── writing ──

    def _write_one(self, seen: EngineFigures, random: Random) -> None:
        if self._again:
            self._restore(seen, self._again.popleft())
        else:
            self._write(seen, random.choice(list(self._clients)), self._new_keys())

    def _write(self, seen: EngineFigures, instance: str, keys: range) -> None:
        """Write a new chain, which counts from now on when all of it was written."""
        storage = self._stored(seen, instance, keys)
        if storage is not None:
            self._chains.append(_Chain(instance, keys, {storage}, True))

    def _restore(self, seen: EngineFigures, chain: _Chain) -> None:
        storage = self._stored(seen, chain.instance, chain.keys)
        if storage is not None:
            chain.copies.add(storage)

    def _stored(self, seen: EngineFigures, instance: str, keys: range) -> str | None:
        """Write what is missing of a chain; returns the storage that has all of it now, None if none is known to."""
        manager = _Manager(self._clients[instance], seen)
        grant = manager.start(keys)
        if grant is None:
            return None
        if not grant.locations:
            manager.finish(grant, [])
            return None
        fresh = [key for key, is_masked in zip(keys, grant.mask, strict=True) if not is_masked]
        flags = self._save(seen, instance, fresh, grant.locations)
        storages = [location.uris[_SPECS[0].name].storage for location in grant.locations]
        seen.offered = len(flags)
        if not manager.finish(grant, flags):
            return None
        seen.accepted = dict(Counter(storage for storage, ok in zip(storages, flags, strict=True) if ok))
        return storages[0] if seen.accepted.get(storages[0]) == len(keys) else None

    def _save(
        self, seen: EngineFigures, instance: str, keys: Sequence[int], locations: Sequence[Location]
    ) -> list[bool]:
        parts = [
            (location.uris[spec.name], bytearray(_content(instance, key, spec.name)))
            for key, location in zip(keys, locations, strict=True)
            for spec in _SPECS
        ]
        uris, buffers = [uri for uri, _ in parts], [buffer for _, buffer in parts]
        results = self._moved(seen, self._engine.save, uris, buffers)
        return [all(result.ok for result in block) for block in zip(*(iter(results),) * len(_SPECS), strict=True)]

    def _new_keys(self) -> range:
        first = self._next_key
        self._next_key += _CHAIN_BLOCKS
        return range(first, first + _CHAIN_BLOCKS)

    def _moved(
        self,
        seen: EngineFigures,
        move: Callable[[Sequence[TransferItem], float], list[TransferResult]],
        uris: Sequence[LocationUri],
        buffers: Sequence[bytearray],
    ) -> list[TransferResult]:
        items = [TransferItem(uri, [memoryview(buffer)]) for uri, buffer in zip(uris, buffers, strict=True)]
        begin = time.monotonic()
        results = move(items, self._settings.deadline_seconds)
        held = time.monotonic() - begin - self._settings.deadline_seconds
        seen.overrun_seconds = max(seen.overrun_seconds, held)
        pairs = list(zip(uris, results, strict=True))
        unmoved = Counter(f"{uri.storage} {result.failure}" for uri, result in pairs if not result.ok)
        seen.unmoved = dict(Counter(seen.unmoved) + unmoved)
        seen.errors += [f"{uri}: {each.reason}" for uri, each in pairs if each.failure is Failure.REFUSED]
        return results


def _content(instance: str, key: int, spec: str) -> bytes:
    size = next(each.size for each in _SPECS if each.name == spec)
    return shake_128(f"{instance}\n{key}\n{spec}".encode()).digest(size)


def command_of(settings: EngineSettings) -> list[str]:
    """Return the command line of an engine."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    serve(Engine(EngineSettings(**json.loads(sys.argv[1]))))
