"""Storages in memory whose accesses can be held, and items for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvcm.connectors.transfer import Failure, TransferItem, TransferResult
from kvcm.connectors.transfer.mover import moved, not_moved
from kvcm.model.uri import LocationUri

SCHEME = "held"
WAIT = 20.0
DEADLINE = 30.0


class HeldStorage:
    """A storage whose accesses to chosen paths wait until they are let go; others end at once.

    A load fills memory with the number that ends the path. Everything that begins is recorded.

    Attributes:
        begun: direction and path of each access, in order.
        most_bytes: most bytes that were moving at once.
        fails: what accesses end with instead of moving, by path.
        always: what all accesses end with.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.fails: dict[str, Failure] = {}
        self.always: Failure | None = None
        self.meter = Meter()
        self._held: set[str] = set()
        self._released = threading.Condition()

    def hold(self, *paths: str) -> None:
        """Make later accesses to these paths wait."""
        with self._released:
            self._held.update(paths)

    def let_go(self, *paths: str) -> None:
        """End the waiting: of these paths, or of all."""
        with self._released:
            self._held = self._held - set(paths) if paths else set()
            self._released.notify_all()

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        return self._access("load", items)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        return self._access("save", items)

    def close(self) -> None:
        self.let_go()

    def _access(self, direction: str, items: Sequence[TransferItem]) -> list[TransferResult]:
        path = items[0].uri.path
        assert {item.uri.path for item in items} == {path}
        with self.meter.counting([item.uri.size for item in items]), self._released:
            self.begun.append(f"{direction} {path}")
            assert self._released.wait_for(lambda: path not in self._held, timeout=60.0)
            return [self._result(item) for item in items]

    def _result(self, item: TransferItem) -> TransferResult:
        failure = self.always or self.fails.get(item.uri.path)
        if failure is not None:
            return not_moved(failure, "as scripted")
        for buffer in item.buffers:
            if not buffer.readonly:
                buffer[:] = bytes([int(item.uri.path.rpartition("/")[2] or 0) % 256]) * len(buffer)
        return moved(item.uri.size)


class Meter:
    """Counts the bytes that are moving, over all storages that share it."""

    def __init__(self) -> None:
        self.most: list[list[int]] = []  # sizes of the accesses under way, after each begin
        self._lock = threading.Lock()
        self._now: list[list[int]] = []

    @contextmanager
    def counting(self, sizes: list[int]) -> Iterator[None]:
        with self._lock:
            self._now.append(sizes)
            self.most.append([size for access in self._now for size in access])
        try:
            yield
        finally:
            with self._lock:
                self._now.remove(sizes)


class Background:
    """Runs one call in a thread and hands out what it returned."""

    def __init__(self, call: Callable[[], list[TransferResult]]) -> None:
        self._results: list[TransferResult] | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def results(self) -> list[TransferResult]:
        self._thread.join(WAIT)
        assert self._results is not None, "the call has not returned"
        return self._results

    def _run(self) -> None:
        self._results = self._call()


def item(path: str, size: int = 8, storage: str = "s", slot: int | None = None, scheme: str = SCHEME) -> TransferItem:
    return TransferItem(LocationUri(scheme, storage, path, size, slot), [memoryview(bytearray(size))])


def failures(results: Sequence[TransferResult]) -> list[Failure | None]:
    return [result.failure for result in results]
