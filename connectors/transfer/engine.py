"""Transfers to all storages of an engine: every item goes to the lane of its storage, with one deadline for all.

* Storages move at the same time and independently: each has threads, a queue and a breaker of its own (`StorageLane`).
* Bytes in flight are bounded over all of them, and loads go first (`TransferAdmission`).
* A caller is never held beyond its deadline or its cancellation: items in flight then come back as
  pending, and items that have not started never start.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import cast

from kvcm.connectors.transfer.file import FileMover
from kvcm.connectors.transfer.lanes import ByteBudget, StorageLane, StorageTransfer, TransferAdmission, TransferCall
from kvcm.connectors.transfer.mempool import AttachedPool, MemPoolMover
from kvcm.connectors.transfer.mooncake import MooncakeMover, MooncakeSettings
from kvcm.connectors.transfer.mover import (
    BoundedMover,
    Direction,
    Failure,
    Mover,
    RegisteringMover,
    TransferItem,
    TransferResult,
    not_moved,
)
from kvcm.connectors.transfer.statistics import OK, EngineStatistics
from kvcm.model.storages import StorageConfig

__all__ = ["MOVERS", "CancelToken", "TransferEngine"]

# A token with which one thread ends the transfers of another.


class CancelToken:
    """Handed to calls of the transfer engine; once cancelled it stays so. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._is_cancelled

    def cancel(self) -> None:
        """End all calls that were given this token, now and later ones."""
        with self._lock:
            self._is_cancelled = True
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    @contextmanager
    def on_cancel(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` when the token is cancelled while the context lasts, at once when it already is."""
        with self._lock:
            self._listeners.append(listener)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            listener()
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)


# Scheme → what makes the mover of a storage, None when it cannot be reached from this node. A new type of storage is a
# new line.
MOVERS: dict[str, Callable[[Sequence[StorageConfig]], Mover | None]] = {
    "file": FileMover.for_storages,
    "hf3fs": FileMover.for_storages,
    "mooncake": MooncakeMover.for_storages,
    "pace": MemPoolMover.for_storages,
}
_DEFAULT_BUDGET_BYTES = 256 << 20
_CLOSE_SECONDS = 5.0
_StorageTransfers = Sequence[tuple[StorageLane, StorageTransfer]]


class TransferEngine:
    """Moves items of all its storages; safe to use from several threads.

    Args:
        movers: by scheme and name of the storage.
        threads: most groups of items at once per storage; default is the number of cores, at most 4.
        budget_bytes: most bytes in flight over all storages; a storage holds at most an equal share of them. A larger
            item moves alone.
        checksums: whether saves return checksums. Loads always compare with those of their items. Without checksums a
            block that loads may hold bytes that were not saved for it, see "Which bytes are served" in
            docs/storages.md.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        movers: Mapping[tuple[str, str], Mover],
        threads: int | None = None,
        *,
        budget_bytes: int = _DEFAULT_BUDGET_BYTES,
        checksums: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._gate = TransferAdmission(ByteBudget(budget_bytes, [storage for _, storage in movers]))
        threads = threads or min(4, os.cpu_count() or 1)
        self._lanes = {
            address: StorageLane(
                address[1],
                mover=mover,
                threads=_threads_of(mover, threads),
                gate=self._gate,
                clock=clock,
                checksums=checksums,
            )
            for address, mover in movers.items()
        }
        self._misaddressed_items = 0
        self._registering = [mover for mover in movers.values() if isinstance(mover, RegisteringMover)]
        self._pools = [mover for mover in movers.values() if isinstance(mover, MemPoolMover)]

    @classmethod
    def for_storages(
        cls,
        storages: Sequence[StorageConfig],
        threads: int | None = None,
        *,
        budget_bytes: int = _DEFAULT_BUDGET_BYTES,
        checksums: bool = True,
        mooncake: MooncakeSettings | None = None,
    ) -> TransferEngine:
        """Return an engine for the storages that the manager named at registration.

        Args:
            storages: candidates of the instance's group; those without a mover here are left out.
            threads: as for the engine.
            budget_bytes: as for the engine.
            checksums: as for the engine.
            mooncake: what this engine brings to Mooncake stores; None for the usual, and for what `MOVERS` says.
        """
        makers = dict(MOVERS)
        if mooncake is not None:
            makers["mooncake"] = partial(MooncakeMover.for_storages, settings=mooncake)
        movers: dict[tuple[str, str], Mover] = {}
        for storage in storages:
            scheme = storage.storage_type.scheme
            mover = makers[scheme]([storage]) if scheme in makers else None
            if mover is not None:
                movers[scheme, storage.global_unique_name] = mover
        return cls(movers, threads, budget_bytes=budget_bytes, checksums=checksums)

    def register_memory(self, buffers: Sequence[memoryview]) -> None:
        """Let items in this memory, the KV caches for example, move without a copy where a storage can do that.

        That is Mooncake; for others nothing is done. Called once, before the first transfer: what overlaps with memory
        that was registered before is refused.

        Args:
            buffers: contiguous; they must outlive this engine.

        Raises:
            InvalidArgumentError: one is not contiguous, or overlaps another; a storage refuses it. Those before it stay
                registered.
        """
        for mover in self._registering:
            for buffer in buffers:
                mover.register(buffer)

    def load(
        self, items: Sequence[TransferItem], deadline_seconds: float, cancel: CancelToken | None = None
    ) -> list[TransferResult]:
        """Fill the buffers of each item from its uri.

        Args:
            items: what to load; buffers must be writable. Those of an item that comes back as `Failure.CORRUPT` hold
                bytes that are not those of its checksum, and must not be used.
            deadline_seconds: time from now after which nothing more is begun. Items that the storage is busy with at
                that moment come back as `Failure.PENDING`: their buffers may still change and must not be used again.
            cancel: ends the call as its deadline does.

        Returns:
            One result per item, in order; never raises for an item.
        """
        return self._transfer(Direction.LOAD, items, deadline_seconds, cancel)

    def save(
        self, items: Sequence[TransferItem], deadline_seconds: float, cancel: CancelToken | None = None
    ) -> list[TransferResult]:
        """Write the buffers of each item to its uri; arguments and results as for `load`.

        Saves give way to loads; those that could not begin until the deadline come back as `Failure.CANCELLED`. Items
        that come back as pending are still being read: their buffers must stay as they are.
        """
        return self._transfer(Direction.SAVE, items, deadline_seconds, cancel)

    def statistics(self) -> EngineStatistics:
        """Return counts of the bytes moved so far and in flight."""
        with self._gate.lock:
            storages = {storage: lane.statistics() for (_, storage), lane in self._lanes.items()}
            return EngineStatistics(storages, self._misaddressed_items)

    @property
    def hung_accesses(self) -> int:
        """Storage calls whose callers have left; as long as there are any, memory of pending items may change."""
        return sum(storage.hung_accesses for storage in self.statistics().storages.values())

    @property
    def has_pools(self) -> bool:
        """Whether a memory pool of this node is among the storages, be its memory there or not."""
        return bool(self._pools)

    def pools(self) -> list[AttachedPool]:
        """Return the memory pools that are mapped here, for reports to the manager.

        Finds or creates the others, which takes seconds per 10 GiB: call it in the background. Nothing is saved to a
        pool without a report, so a lost pool comes back by this call alone.
        """
        return [pool for pool in (mover.attach() for mover in self._pools) if pool is not None]

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Start no more transfers, and end the threads; transfers in flight end first, within the timeout."""
        with self._gate.lock:
            for lane in self._lanes.values():
                lane.close()
        deadline = time.monotonic() + timeout_seconds
        for lane in self._lanes.values():
            lane.join(deadline)

    def _transfer(
        self,
        direction: Direction,
        items: Sequence[TransferItem],
        deadline_seconds: float,
        cancel: CancelToken | None,
    ) -> list[TransferResult]:
        transfer = TransferCall(direction, len(items), self._clock() + deadline_seconds)
        visits = [(lane, lane.create_visit(transfer, items, places)) for lane, places in self._by_lane(transfer, items)]
        try:
            self._start(transfer, visits, cancel)
        finally:  # also when a signal interrupts the wait: nothing may be begun for a caller that has gone
            results = self._finish(transfer, visits, cancel)
            for lane, visit in visits:
                outcomes = _outcomes(items, results, visit)
                with self._gate.lock:
                    lane.record_outcomes(visit, outcomes, _is_set(cancel))
        return results

    def _start(self, transfer: TransferCall, visits: _StorageTransfers, cancel: CancelToken | None) -> None:
        """Queue everything and wait."""
        with cancel.on_cancel(transfer.wake) if cancel else nullcontext():
            if _is_set(cancel):
                return
            with self._gate.lock:
                for lane, visit in visits:
                    lane.submit(visit)
            transfer.wait(transfer.deadline - self._clock())

    def _finish(
        self, transfer: TransferCall, visits: _StorageTransfers, cancel: CancelToken | None
    ) -> list[TransferResult]:
        """Answer for what has not ended, and return all results: no thread writes to this list."""
        why = "the call was cancelled" if _is_set(cancel) else "the deadline passed"
        with self._gate.lock:
            unfinished = [lane.cancel(visit, why) for lane, visit in visits]
            results = cast("list[TransferResult]", list(transfer.results))
        for positions, result in chain.from_iterable(unfinished):
            for position in positions:
                results[position] = result
        return results

    def _by_lane(
        self, transfer: TransferCall, items: Sequence[TransferItem]
    ) -> list[tuple[StorageLane, Sequence[int]]]:
        """Sort the positions of items by lane; those that have none are refused."""
        by_address = _by_address(items)
        known = [(self._lanes[address], by_address.pop(address)) for address in self._lanes if address in by_address]
        for (scheme, storage), positions in by_address.items():
            names = sorted(f"{scheme}://{storage}" for scheme, storage in self._lanes)
            refused = not_moved(Failure.REFUSED, f"no storage {scheme}://{storage} here, there are {names}")
            with self._gate.lock:
                self._misaddressed_items += len(positions)
                transfer.fill(positions, refused)
        return known


def _threads_of(mover: Mover, threads: int) -> int:
    return min(threads, mover.most_threads) if isinstance(mover, BoundedMover) else threads


def _is_set(cancel: CancelToken | None) -> bool:
    return cancel is not None and cancel.is_cancelled


def _by_address(items: Sequence[TransferItem]) -> dict[tuple[str, str], Sequence[int]]:
    """Return the positions of items by scheme and storage."""
    addresses = [item.uri[:2] for item in items]
    if addresses and addresses.count(addresses[0]) == len(addresses):  # as most calls are
        return {addresses[0]: range(len(addresses))}
    positions: dict[tuple[str, str], list[int]] = {}
    for position, address in enumerate(addresses):
        positions.setdefault(address, []).append(position)
    return dict(positions)


def _outcomes(
    items: Sequence[TransferItem], results: Sequence[TransferResult], visit: StorageTransfer
) -> dict[str, tuple[int, int]]:
    """Return the number of items of a visit and their bytes by outcome."""
    outcomes: dict[str, tuple[int, int]] = {}
    left, left_bytes = len(visit.positions), visit.size_bytes
    for position in visit.positions:
        failure = results[position].failure
        if failure is None:
            continue
        item_bytes = items[position].size_bytes
        count, size_bytes = outcomes.get(failure, (0, 0))
        outcomes[failure] = (count + 1, size_bytes + item_bytes)
        left, left_bytes = left - 1, left_bytes - item_bytes
    return outcomes | {OK: (left, left_bytes)} if left else outcomes
