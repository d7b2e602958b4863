"""Free slots of packed files: which may be handed out again, and from when on (design.md decision 16).

A slot comes here in two steps, both taken by this very process: its bytes were deleted (`deleted`), and then its
metadata (`forgotten`). Only what had served gets to the second step: its writer said that it was done, so nobody writes
there any more. Slots of expired or aborted sessions stop after the first one, for ever. Then a grace has to pass, in
which deletions and readers that hang somewhere come to their end.

Between the two steps lies what it takes to drop metadata. A slot that stays there for more than a minute or two is
taken for lost. Until then it counts as one that will be free, and so does one that is taken out and not handed out yet:
those who write and evict at the same time must not take each other's slots for lost ones.

All of it is in memory, and only a hint: whoever hands a slot out looks beside the file whether it is deleted
(file_slots.py). So nothing is harmed when it is forgotten, which happens when the process ends, when it leads no more,
when there are too many, and when a file goes. What is forgotten stays deleted, and its file goes with its last slot.

Best fit: the fullest file that has room for all that is wanted, else the one with the most room. What is written
together lies together, and costs few notes; files with few free slots fill up, and those with many are left for large
writes, or to empty. Rejected: the fullest file first, which scatters a write over as many files as it has blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Final, NamedTuple

__all__ = ["FreeSlots", "InFile", "Pool", "SlotReuse"]

_MOST_SLOTS: Final = 1 << 20
_MOST_ENDED: Final = 1000  # in one call, which holds the event loop; a batch of deletions is told file by file
_MOST_ENDED_OF_A_FILE: Final = 10
_PENDING_SECONDS: Final = 60.0  # metadata goes right after the bytes, unless the store is away


def _nobody_leads() -> int | None:
    return None


def _no_time() -> float:
    return 0.0


@dataclass(slots=True)
class SlotReuse:
    """When slots may be handed out again.

    Attributes:
        grace_seconds: after their metadata is gone; 0 means never.
        now: seconds, never running backwards.
        term: number of the term for which this manager leads, None while it does not lead: then others delete.
    """

    grace_seconds: float = 0.0
    now: Callable[[], float] = _no_time
    term: Callable[[], int | None] = _nobody_leads


class Pool(NamedTuple):
    """What slots must have in common to stand in for each other.

    The spec is none of it: a packed file holds several where their sizes are equal (wire.md 8), and slots that could
    not change over from one spec to another would pile up with one and be missing with the other.

    Attributes:
        instance: owner of the blocks, as a path component: a scrub looks for those who know a file nowhere else.
        size_bytes: of a slot.
    """

    instance: str
    size_bytes: int


class InFile(NamedTuple):
    """Slots of one file."""

    path: str
    pool: Pool
    slots: Sequence[int]


class _File:
    """What is free in a file: sets of slots, as bits."""

    __slots__ = ("_older", "_turn_at", "_younger", "deleted", "path", "pool", "ready", "taken", "tickets", "waiting")

    def __init__(self, path: str, pool: Pool) -> None:
        self.path = path
        self.pool = pool
        self.deleted = 0
        self.waiting = 0
        self.ready = 0
        self.taken = 0
        self.tickets: tuple[int, ...] = ()  # its entries in the quarantine, in their order
        self._younger = 0  # deleted since the last turn, and in the one before that
        self._older = 0
        self._turn_at = 0.0

    @property
    def known(self) -> int:
        return self.deleted | self.waiting | self.ready | self.taken

    def is_young(self, slots: int, now: float) -> None:
        """Take note that slots were deleted just now."""
        self._turn(now)
        self._younger |= slots

    def pending(self, now: float) -> int:
        """Return the slots that were deleted not long ago, and whose metadata is still there."""
        self._turn(now)
        return self.deleted & (self._younger | self._older)

    def _turn(self, now: float) -> None:
        if now >= self._turn_at:
            is_next = now < self._turn_at + _PENDING_SECONDS
            self._older = self._younger if is_next else 0
            self._younger, self._turn_at = 0, (self._turn_at if is_next else now) + _PENDING_SECONDS


class FreeSlots:
    """The free slots of one storage. Safe in any thread, and never blocks.

    Args:
        reuse: when slots may be handed out again.
        most: slots that are remembered; what is more makes those of the file that came first forgotten.
    """

    def __init__(self, reuse: SlotReuse, most: int = _MOST_SLOTS) -> None:
        self._reuse = reuse
        self._most = most
        self._lock = Lock()
        self._term: int | None = None
        self._files: dict[str, _File] = {}
        self._pools: dict[Pool, dict[int, dict[str, _File]]] = {}  # those with ready slots, by their number
        # Those whose grace is not over, by a number, in the order in which it ends. What an entry speaks of is waiting,
        # so there are never more of them than slots: a file that goes takes its own along.
        self._quarantine: OrderedDict[int, tuple[float, _File, int]] = OrderedDict()
        self._tickets = count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def deleted(self, path: str, pool: Pool, slots: Iterable[int]) -> None:
        """Take note that the bytes of slots are deleted. Their metadata may still be there."""
        with self._lock:
            if not self._is_on():
                return
            file = self._files.setdefault(path, _File(path, pool))
            if file.pool == pool:
                fresh = _bits(slots) & ~file.known
                file.is_young(fresh, self._reuse.now())
                self._change(file, deleted=file.deleted | fresh)
            while self._count > self._most:
                self._forget(next(iter(self._files)))

    def forgotten(self, path: str, slots: Iterable[int]) -> None:
        """Take note that the metadata of slots is gone, of those that this process deleted."""
        with self._lock:
            file = self._files.get(path) if self._is_on() else None
            moved = file.deleted & _bits(slots) if file is not None else 0
            if file is not None and moved:
                self._change(file, deleted=file.deleted ^ moved, waiting=file.waiting | moved)
                self._wait(file, moved)
            self._end_quarantines(_MOST_ENDED_OF_A_FILE)

    def take(self, pool: Pool, count: int) -> list[InFile]:
        """Take out at most so many slots that may be handed out now. Who takes them says what became of them: they are
        `ended`, or given back."""
        taken: list[InFile] = []
        with self._lock:
            if not self._is_on():
                return taken
            self._end_quarantines(_MOST_ENDED)
            while count > 0 and (by_number := self._pools.get(pool)):
                number = min((each for each in by_number if each >= count), default=0) or max(by_number)
                file = next(iter(by_number[number].values()))
                slots = _lowest(file.ready, count)
                bits = _bits(slots)
                self._change(file, ready=file.ready ^ bits, taken=file.taken | bits)
                taken.append(InFile(file.path, pool, slots))
                count -= len(slots)
        return taken

    def give_back(self, untouched: InFile) -> None:
        """Put back slots that were taken out and not handed out."""
        with self._lock:
            if self._is_on():
                file = self._files.setdefault(untouched.path, _File(untouched.path, untouched.pool))
                bits = _bits(untouched.slots)
                self._change(file, ready=file.ready | bits, taken=file.taken & ~bits)

    def ended(self, taken: InFile) -> None:
        """Take note that slots which were taken out are somebody's, or nobody's for ever."""
        with self._lock:
            file = self._files.get(taken.path)
            if file is not None:
                self._change(file, taken=file.taken & ~_bits(taken.slots))

    def usable(self, path: str) -> int:
        """Return how many slots of a file are free or taken out, or will be free as far as anybody can tell: those
        whose grace is not over, and those that were deleted so lately that their metadata may still be going."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                return 0
            return (file.waiting | file.ready | file.taken | file.pending(self._reuse.now())).bit_count()

    def gone(self, path: str) -> None:
        """Forget a file that is removed, or not filled any more."""
        with self._lock:
            self._forget(path)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._files.clear()
        self._pools.clear()
        self._quarantine.clear()
        self._count = 0

    def _is_on(self) -> bool:
        """Return whether slots are handed out again at all; what was free in another term may not be any more."""
        term = self._reuse.term() if self._reuse.grace_seconds > 0 else None
        if term != self._term:
            self._clear()
            self._term = term
        return term is not None

    def _wait(self, file: _File, slots: int) -> None:
        ticket = next(self._tickets)
        self._quarantine[ticket] = self._reuse.now() + self._reuse.grace_seconds, file, slots
        file.tickets += (ticket,)

    def _end_quarantines(self, most: int) -> None:
        """Make slots ready whose grace is over, some at a time: more are ended than begun."""
        now = self._reuse.now()
        for _ in range(min(len(self._quarantine), most)):
            ticket, (until, file, slots) = next(iter(self._quarantine.items()))
            if until > now:
                return
            del self._quarantine[ticket]
            file.tickets = file.tickets[1:]
            self._change(file, waiting=file.waiting & ~slots, ready=file.ready | slots)

    def _forget(self, path: str) -> None:
        file = self._files.get(path)
        if file is not None:
            for ticket in file.tickets:
                del self._quarantine[ticket]
            self._change(file, deleted=0, waiting=0, ready=0, taken=0)

    def _change(
        self,
        file: _File,
        *,
        deleted: int | None = None,
        waiting: int | None = None,
        ready: int | None = None,
        taken: int | None = None,
    ) -> None:
        before, ready_before = file.known.bit_count(), file.ready.bit_count()
        file.deleted = file.deleted if deleted is None else deleted
        file.waiting = file.waiting if waiting is None else waiting
        file.ready = file.ready if ready is None else ready
        file.taken = file.taken if taken is None else taken
        self._count += file.known.bit_count() - before
        if file.ready.bit_count() != ready_before:
            self._move(file, ready_before, file.ready.bit_count())
        if not file.known:
            self._files.pop(file.path, None)

    def _move(self, file: _File, before: int, after: int) -> None:
        by_number = self._pools.setdefault(file.pool, {})
        if before:
            del by_number[before][file.path]
            if not by_number[before]:
                del by_number[before]
        if after:
            by_number.setdefault(after, {})[file.path] = file
        if not by_number:
            del self._pools[file.pool]


def _bits(slots: Iterable[int]) -> int:
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits


def _lowest(bits: int, count: int) -> list[int]:
    slots: list[int] = []
    while bits and len(slots) < count:
        slots.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return slots
