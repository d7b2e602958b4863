"""Asks the managers as an engine's client does, at a fixed rate, and notes how each call ended.

    python game_prober.py <settings as JSON>

A round is a match of known blocks, a start, the bytes, and a finish. It begins when it is due, with any outcome of
those before it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

from game_lines import Lines

from kvcm.connectors.calls import RetrySettings
from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import Outcome, WriteGrant
from kvcm.connectors.transfer import TransferEngine, TransferItem
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

__all__ = ["PROBE_INSTANCE", "RAISED", "ProberSettings", "command_of"]

PROBE_INSTANCE = "probe"
RAISED = "raised"  # in place of the name of a call: the client raised, which it never may
_PART_BYTES = 512
_CHAIN = 4
_KNOWN_CHAINS = 50
_MOVE_SECONDS = 0.5
_WORKERS = 128  # a round that meets a storage that hangs and three dead managers takes 3.5 s, or four times that
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ProberSettings:
    """Settings of the prober.

    Attributes:
        managers: their addresses, separated by commas.
        group: of its instance.
        samples: file for its samples.
        rounds_per_second: how often it asks.
        deadline_seconds: of a call.
    """

    managers: str
    group: str
    samples: str
    rounds_per_second: float
    deadline_seconds: float


class Prober:
    """Begins rounds."""

    def __init__(self, settings: ProberSettings) -> None:
        self._settings = settings
        # a client that reached no manager for a while asks again after a second at the latest
        retry = RetrySettings(breaker_seconds=0.2, breaker_max_seconds=1.0)
        self._client = ManagerClient(
            settings.managers, PROBE_INSTANCE, ClientSettings(settings.deadline_seconds, retry)
        )
        specs = [LocationSpecInfo("kv", _PART_BYTES)]
        registration = self._client.register_instance(
            settings.group, 16, specs, ModelDeployment("probe", "bf16"), timeout_seconds=60
        )
        assert registration.ok, registration
        self._transfer = TransferEngine.for_storages(registration.storages, 2, checksums=True)
        self._samples = Lines(Path(settings.samples))
        self._rounds = count()
        self._reported_to_end = threading.Event()

    def run(self) -> None:
        """Begin rounds until the stop."""
        signal.signal(signal.SIGTERM, lambda *_: self._reported_to_end.set())
        period, due = 1.0 / self._settings.rounds_per_second, time.monotonic()
        with ThreadPoolExecutor(_WORKERS) as pool:
            while not self._reported_to_end.wait(max(0.0, due - time.monotonic())):
                pool.submit(self._round, next(self._rounds), due).add_done_callback(self._ended)
                due += period

    def _round(self, number: int, due: float) -> None:
        late = time.monotonic() - due
        if late > self._settings.deadline_seconds:  # every thread was busy: it counts as a call without an answer
            self._record("late", time.time() - late, late, is_good=False, reason="no thread was free")
            return
        first = (number % _KNOWN_CHAINS) * _CHAIN
        self._timed("match", lambda: self._match(range(first, first + _CHAIN)))
        first = (_KNOWN_CHAINS + number) * _CHAIN if number >= _KNOWN_CHAINS else first
        grant = self._timed("start", lambda: self._start(range(first, first + _CHAIN)))
        if grant is not None:
            flags, sums = self._moved(grant)
            self._timed("finish", lambda: self._finish(grant, flags, sums))

    def _ended(self, asked: Future[None]) -> None:
        error = asked.exception()
        if error is not None:
            self._record(RAISED, time.time(), 0.0, is_good=False, reason=repr(error))

    def _match(self, keys: range) -> tuple[bool, str, None]:
        found = self._client.match(keys)
        return found.outcome is Outcome.OK, found.reason, None

    def _start(self, keys: range) -> tuple[bool, str, WriteGrant | None]:
        grant = self._client.start_write(keys, session_seconds=10)
        return grant is not None, "", grant

    def _moved(self, grant: WriteGrant) -> tuple[list[bool], list[dict[str, int]]]:
        items = [TransferItem(place.uris["kv"], [memoryview(bytearray(_PART_BYTES))]) for place in grant.locations]
        results = self._transfer.save(items, _MOVE_SECONDS) if items else []
        return [each.ok for each in results], [{"kv": each.checksum} if each.ok else {} for each in results]

    def _finish(self, grant: WriteGrant, flags: list[bool], sums: list[dict[str, int]]) -> tuple[bool, str, None]:
        if any(flags):
            return self._client.finish_write(grant.session_id, flags, checksums=sums), "", None
        return self._client.abort_write(grant.session_id), "", None

    def _timed(self, call: str, ask: Callable[[], tuple[bool, str, _T]]) -> _T:
        at, began = time.time(), time.monotonic()
        is_good, reason, result = ask()
        self._record(call, at, time.monotonic() - began, is_good=is_good, reason=reason)
        return result

    def _record(self, call: str, at: float, seconds: float, *, is_good: bool, reason: str) -> None:
        self._samples.add({"call": call, "at": at, "seconds": seconds, "is_good": is_good, "reason": reason})


def command_of(settings: ProberSettings) -> list[str]:
    """Return the command line of the prober."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    Prober(ProberSettings(**json.loads(sys.argv[1]))).run()
