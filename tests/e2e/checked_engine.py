"""An engine as a process of its own: threads read and write blocks all the time, and every byte is checked.

`Operation` is one read or write: it times its requests and transfers, and judges and counts their outcomes. `Engine`
runs operations, and counts each in the phase in which it began. `outage_engine.py` and `host_engine.py` choose the
blocks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import shake_128
from typing import Any, TypeVar

from engine_figures import EngineFigures, added

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import Location, MatchMode, Outcome, WriteGrant
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri

CHAIN_BLOCKS = 8
_PATIENCE_SECONDS = 30.0  # with what must end by itself
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Access:
    """How operations reach the manager and the bytes.

    Attributes:
        transfers: of the process.
        specs: parts of a block, and their bytes.
        request_seconds: deadline of a request.
        transfer_seconds: deadline of a load or save.
        session_seconds: of each write session.
        node_id: that the engine names; "" for none.
        has_checksums: parts are stored with checksums.
    """

    transfers: TransferEngine
    specs: Mapping[str, int]
    request_seconds: float
    transfer_seconds: float
    session_seconds: int
    node_id: str = ""
    has_checksums: bool = False


def register(client: ManagerClient, group: str, specs: Mapping[str, int]) -> Any:
    """Register the client's instance; returns the manager's answer."""
    infos = [LocationSpecInfo(name, size) for name, size in specs.items()]
    registration = client.register_instance(group, 4, infos, ModelDeployment("model", "bf16"), timeout_seconds=20)
    assert registration.ok, registration
    return registration


def chain_from(first: int) -> range:
    """Return the keys of a chain."""
    return range(first, first + CHAIN_BLOCKS)


class Operation:
    """One operation on blocks of one instance.

    Args:
        client: of the instance.
        instance: that the blocks belong to.
        access: how to reach the bytes.
    """

    def __init__(self, client: ManagerClient, instance: str, access: Access) -> None:
        self._client = client
        self._instance = instance
        self._access = access
        self.seen = EngineFigures()

    def find(self, keys: Sequence[int], mode: MatchMode, lease_ms: int = 0) -> list[Location | None]:
        """Return where each block can be read."""
        window = len(keys) // 2 if mode is MatchMode.SLIDING_WINDOW else 0
        found = self._timed(lambda: self._client.match(keys, mode, window=window, read_lease_ms=lease_ms))
        self._judge(found.outcome is Outcome.OK, f"match: {found.reason}")
        if found.lease_id:
            self._timed(lambda: self._client.release_lease(found.lease_id))
        places = [*found.locations, *(None for _ in keys[len(found.locations) :])]
        self._check_nodes([each for each in places if each is not None])
        return places

    def load(self, keys: Sequence[int], places: Sequence[Location | None]) -> list[str | None]:
        """Load blocks; returns for each the storage that it came from, None for a miss."""
        parts = [
            (key, spec, place.uris[spec], place.checksums.get(spec, 0))
            for key, place in zip(keys, places, strict=True)
            if place is not None
            for spec in self._access.specs
        ]
        buffers = [bytearray(uri.size) for _, _, uri, _ in parts]
        items = [
            TransferItem(uri, [memoryview(buffer)], checksum=checksum)
            for (_, _, uri, checksum), buffer in zip(parts, buffers, strict=True)
        ]
        results = self._moved(self._access.transfers.load, items)
        self._check_refused(items, results)
        good: Counter[int] = Counter()
        for (key, spec, uri, checksum), buffer, result in zip(parts, buffers, results, strict=True):
            self._compare(key, spec, uri, checksum, buffer, result)
            good[key] += result.ok
        lost = [
            (key, uri) for (key, _, uri, _), each in zip(parts, results, strict=True) if each.failure is Failure.LOST
        ]
        if lost:
            self._report(lost)
        storages = {key: uri.storage for key, _, uri, _ in parts}
        hits = [storages[key] if good[key] == len(self._access.specs) else None for key in keys]
        self.seen.served = dict(Counter(hit for hit in hits if hit) + Counter(self.seen.served))
        return hits

    def write(self, keys: Sequence[int]) -> tuple[list[bool], list[str]]:
        """Write the missing blocks of a chain; returns its mask, and the storages of the written blocks."""
        grant = self._timed(lambda: self._client.start_write(keys, session_seconds=self._access.session_seconds))
        self._judge(grant is not None, f"start_write: {self._client.counters()['start_write']}")
        if grant is None:
            return [], []
        self._check_nodes(grant.locations)
        fresh = [key for key, is_masked in zip(keys, grant.mask, strict=True) if not is_masked]
        flags, checksums = self._save(fresh, grant)
        self.seen.offered = len(flags)
        sums = checksums if self._access.has_checksums else ()
        is_done = self._timed(lambda: self._client.finish_write(grant.session_id, flags, checksums=sums))
        self._judge(is_done, "finish_write")
        storages = [next(iter(place.uris.values())).storage for place in grant.locations]
        written = [storage for storage, ok in zip(storages, flags, strict=True) if ok and is_done]
        self.seen.accepted = dict(Counter(written))
        return list(grant.mask), written

    def remove(self, keys: Sequence[int]) -> None:
        """Remove a chain from every storage."""
        self._judge(self._timed(lambda: self._client.remove(keys)), "remove")

    def _save(self, keys: Sequence[int], grant: WriteGrant) -> tuple[list[bool], list[dict[str, int]]]:
        specs = self._access.specs
        items = [
            TransferItem(place.uris[spec], [memoryview(bytearray(self._content(key, spec)))])
            for key, place in zip(keys, grant.locations, strict=True)
            for spec in specs
        ]
        results = self._moved(self._access.transfers.save, items)
        if not self._access.node_id:  # memory of the node may be deleted under the engine, and is then refused
            self._check_refused(items, results)
        parts = iter(results)
        blocks = [{spec: next(parts) for spec in specs} for _ in keys]
        flags = [all(part.ok for part in block.values()) for block in blocks]
        return flags, [{spec: part.checksum for spec, part in block.items()} for block in blocks]

    def _content(self, key: int, spec: str) -> bytes:
        """Return the bytes of a part: they follow from its instance, key and spec, whichever engine writes them."""
        return shake_128(f"{self._instance}\n{key}\n{spec}".encode()).digest(self._access.specs[spec])

    def _compare(
        self, key: int, spec: str, uri: LocationUri, checksum: int, buffer: bytearray, result: TransferResult
    ) -> None:
        checks = self._access.has_checksums
        if (result.ok and buffer != self._content(key, spec)) or (checks and result.failure is Failure.CORRUPT):
            self.seen.wrong.append(f"{uri}, key {key}, {result.failure or 'served'}")
        if result.ok and checks and not checksum:
            self.seen.errors.append(f"{uri} has no checksum")

    def _check_refused(self, items: Sequence[TransferItem], results: Sequence[TransferResult]) -> None:
        pairs = zip(items, results, strict=True)
        self.seen.errors += [f"{item.uri}: {each.reason}" for item, each in pairs if each.failure is Failure.REFUSED]

    def _report(self, lost: Sequence[tuple[int, LocationUri]]) -> None:
        report = self._timed(lambda: self._client.report_missing(lost))
        self._judge(report is not None, "report_missing")
        self.seen.lost_parts += len(lost)
        self.seen.removed_locations += report.removed_locations if report else 0

    def _check_nodes(self, places: Sequence[Location]) -> None:
        """No engine is given memory but that of the node that it named."""
        uris, node_id = [uri for place in places for uri in place.uris.values()], self._access.node_id
        self.seen.lookups += 1
        self.seen.places += len(uris)
        self.seen.foreign += [
            str(uri)
            for uri in uris
            if (uri.scheme == "pace" or uri.node_id) and (not node_id or uri.node_id != node_id)
        ]

    def _moved(
        self, move: Callable[[Sequence[TransferItem], float], list[TransferResult]], items: Sequence[TransferItem]
    ) -> list[TransferResult]:
        begin, deadline = time.monotonic(), self._access.transfer_seconds
        results = move(items, deadline)
        self.seen.overrun_seconds = max(self.seen.overrun_seconds, time.monotonic() - begin - deadline)
        unmoved = Counter(
            f"{item.uri.storage} {each.failure}" for item, each in zip(items, results, strict=True) if not each.ok
        )
        self.seen.unmoved = dict(Counter(self.seen.unmoved) + unmoved)
        return results

    def _timed(self, request: Callable[[], _T]) -> _T:
        begin = time.monotonic()
        result = request()
        seconds, seen = time.monotonic() - begin, self.seen
        seen.requests += 1
        seen.slowest_request_seconds = max(seen.slowest_request_seconds, seconds)
        seen.overrun_seconds = max(seen.overrun_seconds, seconds - self._access.request_seconds)
        return result

    def _judge(self, is_ok: bool, text: str) -> None:
        if not is_ok:
            self.seen.failed_requests.append(text)


class Engine:
    """Threads that work; each method without an underscore is a call from outside."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Condition()
        self._busy: Counter[int] = Counter()  # operations under way, by the turn in which they began
        self._phase = "seed"
        self._turn = 0  # grows with every phase and every question: an operation that began earlier does not count now
        self._recently = EngineFigures()
        self._phases: defaultdict[str, EngineFigures] = defaultdict(EngineFigures)
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def enter(self, phase: str) -> None:
        """Count requests from now on in this phase."""
        with self._lock:
            self._phase = phase
            self._next_turn()

    def turn(self) -> None:
        """Let `works_with` and `finish_earlier` be about requests from now on."""
        with self._lock:
            self._next_turn()

    def finish_earlier(self) -> None:
        """Return when everything has ended that began before this turn."""
        with self._lock:
            has_ended = self._lock.wait_for(self._has_turned, _PATIENCE_SECONDS)
            assert has_ended, "an operation does not come back"

    def works_with(self, storage: str) -> bool:
        """Return whether the storage was read and written in this turn since the last failed request, and nothing is
        in flight that began before."""
        with self._lock:
            seen = self._recently
            return bool(seen.served.get(storage) and seen.accepted.get(storage)) and self._has_turned()

    def end(self) -> None:
        """Stop working."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)
            assert not thread.is_alive(), "an operation does not come back"

    def report(self) -> dict[str, Any]:
        """Return the figures of every phase."""
        with self._lock:
            return {phase: asdict(seen) for phase, seen in self._phases.items()}

    def _start(self, loop: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=loop, args=arguments, daemon=True))
        self._threads[-1].start()

    def _next_turn(self) -> None:
        self._turn += 1
        self._recently = EngineFigures()

    def _has_turned(self) -> bool:
        return self._busy.total() == self._busy[self._turn]

    def _operated(self, client: ManagerClient, instance: str, act: Callable[[Operation], _T]) -> _T:
        """Carry out an operation and count it in the phase in which it began.

        Raises:
            Exception: the operation's own, which is counted, too.
        """
        operation = Operation(client, instance, self._access)
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
                seen = operation.seen
                self._phases[phase] = added(self._phases[phase], seen)
                if turn == self._turn:
                    self._recently = EngineFigures() if seen.failed_requests else added(self._recently, seen)
                self._busy[turn] -= 1
                self._lock.notify_all()
