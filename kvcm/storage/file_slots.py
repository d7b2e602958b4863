"""Files of a path storage that hold parts: deleting them slot by slot, and handing deleted slots out again.

Deleting a part punches its slot out of the file, so that the space returns at once and no neighbour is touched, and
records it beside the file. The file goes with its last slot.

A slot that is handed out again is recorded with its new location before a client gets it, and from then on:

1. It counts as there: the file is not removed because all *others* are deleted.
2. A deletion or query of it must name that location. The uri of the former one names another, or none, so a
   deletion that was repeated, or hung somewhere for hours, touches no newer bytes (design.md decision 1, invariant 5).
   Only one that had looked at the notes already and is stopped between that and the punch could: within this process a
   lock keeps them apart, and another one would have to be stopped for longer than the grace of `SlotReuse`.
3. Missing records fit every location: the file was created again by its last writer.

In this process one thread at a time works on a file. Managers that work on one file at the same time are kept apart by
leading: only the leader deletes and hands out again. Where that is crossed, by a leader that was stopped and goes on
after its term, the file may be removed while a slot is handed out. Then its writer creates the file again, or its
bytes are a miss, and the rest of the file is left to the scrub. So are slots whose location was never stored, because
the
manager died or its client went away at that moment: their file stays until no block knows it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from stat import S_ISREG
from threading import Lock
from typing import Final, NamedTuple

import structlog

from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Parts, StoredObject, slot_count
from kvcm.storage.file_objects import NEW_SUFFIX, NOTES_SUFFIX, make_folders, remove_objects, write_all
from kvcm.storage.threads import StorageThreads
from kvcm.store.numbers import DeletionNumbers

__all__ = [
    "FreeSlots",
    "InFile",
    "PackedFiles",
    "Pool",
    "SlotAllocator",
    "SlotReuse",
    "SlotsOfFile",
    "deleted_slots",
    "is_certain",
    "is_complete",
    "notes_path",
    "record_deleted_slots",
    "record_owner",
    "remove_notes",
    "shorten",
    "slot_owners",
    "slots_by_file",
]

# Free slots of packed files: which may be handed out again, and from when on (design.md decision 16).
#
# A slot comes here in two steps, both taken by this very process: its bytes were deleted (`deleted`), and then its
# metadata (`forgotten`). Only locations that had served get to the second step: their writer finished, so no write can
# follow. Slots of expired or aborted sessions stop after the first one, for ever. Then a grace has to
# pass, in which deletions and readers that hang somewhere come to their end.
#
# Between the two steps lies what it takes to drop metadata. A slot that stays there for more than a minute or two is
# taken for lost. Until then it counts as one that will be free, and so does one that is taken out and not handed out
# yet: writes and evictions at the same time must not count each other's slots as lost.
#
# All of it is in memory, and only a hint: before a slot is handed out, the records beside the file must say that it is
# deleted. So nothing is harmed when it is forgotten, which happens when the process ends, when it leads no
# more, when there are too many, and when a file goes. A forgotten slot stays deleted, and its file goes with its last
# slot.
#
# Best fit: the fullest file with space for all wanted slots, else the one with the most space. Blocks that are written
# together lie together, and cost few records; files with few free slots fill up, and those with many are left for
# large writes, or to empty. Rejected: the fullest file first, which scatters a write over as many files as it has
# blocks.

_MOST_SLOTS: Final = 1 << 20
_MOST_ENDED: Final = 1000  # in one call, which holds the event loop; a batch of deletions is reported file by file
_MOST_ENDED_OF_A_FILE: Final = 10
_PENDING_SECONDS: Final = 60.0  # metadata goes right after the bytes, unless the store is away


def _no_term() -> int | None:
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
        numbers: of the metadata store, for the witnesses of deletions; None is without.
    """

    grace_seconds: float = 0.0
    now: Callable[[], float] = _no_time
    term: Callable[[], int | None] = _no_term
    numbers: DeletionNumbers | None = None


class Pool(NamedTuple):
    """What slots must have in common to stand in for each other.

    The spec is none of it: a packed file holds several where their sizes are equal (wire.md 8), and slots that could
    not change over from one spec to another would pile up with one and be missing with the other.

    Attributes:
        instance: owner of the blocks, as a path component: a scrub searches the references to a file nowhere else.
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
    """The free slots of a file: sets of slots, as bits."""

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

    def mark_deleted(self, slots: int, now: float) -> None:
        """Take note that slots were deleted just now."""
        self._advance(now)
        self._younger |= slots

    def pending(self, now: float) -> int:
        """Return the slots that were deleted not long ago, and whose metadata is still there."""
        self._advance(now)
        return self.deleted & (self._younger | self._older)

    def _advance(self, now: float) -> None:
        if now >= self._turn_at:
            is_next = now < self._turn_at + _PENDING_SECONDS
            self._older = self._younger if is_next else 0
            self._younger, self._turn_at = 0, (self._turn_at if is_next else now) + _PENDING_SECONDS


class FreeSlots:
    """The free slots of one storage. Safe in any thread, and never blocks.

    Args:
        reuse: when slots may be handed out again.
        most: slots that are remembered; beyond that, the slots of the oldest file are forgotten.

    Attributes:
        count: slots that are remembered.
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
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def deleted(self, path: str, pool: Pool, slots: Iterable[int]) -> None:
        """Take note that the bytes of slots are deleted. Their metadata may still be there."""
        with self._lock:
            if not self._is_on():
                return
            file = self._files.setdefault(path, _File(path, pool))
            if file.pool == pool:
                fresh = _bits(slots) & ~file.known
                file.mark_deleted(fresh, self._reuse.now())
                self._change(file, deleted=file.deleted | fresh)
            while self.count > self._most:
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

    def acquire(self, pool: Pool, count: int) -> list[InFile]:
        """Take out at most so many slots that may be handed out now. The caller ends them with `ended`, or releases
        them."""
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

    def release(self, untouched: InFile) -> None:
        """Put back slots that were taken out and not handed out."""
        with self._lock:
            if self._is_on():
                file = self._files.setdefault(untouched.path, _File(untouched.path, untouched.pool))
                bits = _bits(untouched.slots)
                self._change(file, ready=file.ready | bits, taken=file.taken & ~bits)

    def settle(self, taken: InFile) -> None:
        """Note that acquired slots now belong to a location, or are lost."""
        with self._lock:
            file = self._files.get(taken.path)
            if file is not None:
                self._change(file, taken=file.taken & ~_bits(taken.slots))

    def usable(self, path: str) -> int:
        """Return how many slots of a file are free or taken out, or will probably be free: those
        whose grace is not over, and those that were deleted so lately that their metadata may still be going."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                return 0
            return (file.waiting | file.ready | file.taken | file.pending(self._reuse.now())).bit_count()

    def discard_file(self, path: str) -> None:
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
        self.count = 0

    def _is_on(self) -> bool:
        """Return whether slots are handed out again at all; free slots of another term are forgotten."""
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
        self.count += file.known.bit_count() - before
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


# The records of the slots of a packed file, beside it in `<file>.deleted`.
#
# A record is a line break, the number of the slot and what happened: a full stop where the slot was deleted; `+`, the
# id of a location and a full stop where it was handed out again, to that location. The last note of a slot counts, and
# a slot without any is still its first owner's. A note counts only as a whole: where a write was cut off and repeated,
# or another host wrote over a part of it, a note is lost, and never read as another slot's.
#
# Records are appended. Where slots change hands often they are compacted, one for each slot, into a file that replaces
# the old one. Compaction and handing out need the lock of the file in this process. A record that another process
# appends to the old one at that moment is lost.

_DELETED: Final = ""
"""Owner of a slot that is deleted."""
_RECORD: Final = re.compile(rb"\n([0-9]{1,9})(?:\+([0-9A-Za-z]{1,64}))?\.")
_APPENDED: Final = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITTEN: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_SHORT_BYTES: Final = 3072  # so that they stay within one page of the medium
_COMPACTION_FACTOR: Final = 2  # times as long as they have to be


def notes_path(path: str) -> str:
    """Return where the notes of a file are."""
    return path + NOTES_SUFFIX


def record_deleted_slots(path: str, slots: Iterable[int]) -> None:
    """Note slots as deleted, by one write as a rule: on one host that is atomic for so few bytes. Blocks.

    Raises:
        OSError: the storage failed.
    """
    descriptor = os.open(notes_path(path), _APPENDED | os.O_CREAT, 0o600)
    try:
        write_all(descriptor, _notes(dict.fromkeys(slots, _DELETED)))
    finally:
        os.close(descriptor)


def record_owner(path: str, slots: Iterable[int], location_id: str) -> bool:
    """Note that slots were handed out again. Blocks.

    Returns:
        Whether that stands beside the file now; it does not where the notes were removed meanwhile, and the file with
        them.

    Raises:
        OSError: the storage failed.
    """
    with suppress(FileNotFoundError):
        descriptor = os.open(notes_path(path), _APPENDED)
        try:
            write_all(descriptor, _notes(dict.fromkeys(slots, location_id)))
            return os.path.samestat(os.fstat(descriptor), os.lstat(notes_path(path)))
        finally:
            os.close(descriptor)
    return False


def slot_owners(path: str) -> dict[int, str]:
    """Return the slots of a file that something is noted of: to whom they were handed out again, or `_DELETED`. Blocks.

    Raises:
        OSError: the storage failed.
    """
    try:
        notes = Path(notes_path(path)).read_bytes()
    except FileNotFoundError:
        return {}
    count = slot_count(path)
    return {int(slot): owner.decode() for slot, owner in _RECORD.findall(notes) if int(slot) < count}


def deleted_slots(path: str) -> set[int]:
    """Return the slots of a file that are deleted. Blocks.

    Raises:
        OSError: the storage failed.
    """
    return {slot for slot, owner in slot_owners(path).items() if owner == _DELETED}


def shorten(path: str) -> None:
    """Compact long records, one for each slot, where that makes them much shorter. Blocks.

    It only tidies up: where the storage is full or fails, the records stay as they were, without an error.
    """
    with suppress(OSError):
        size = os.lstat(notes_path(path)).st_size
        if size <= _SHORT_BYTES:
            return
        notes = _notes(slot_owners(path))
        if size > _COMPACTION_FACTOR * len(notes):
            _replace(notes_path(path), notes)


def _replace(name: str, notes: bytes) -> None:
    new = name + NEW_SUFFIX
    try:
        descriptor = os.open(new, _WRITTEN, 0o600)
        try:
            write_all(descriptor, notes)
        finally:
            os.close(descriptor)
        Path(new).replace(name)
    except OSError:
        Path(new).unlink(missing_ok=True)
        raise


def remove_notes(path: str) -> None:
    """Remove the records of a file, and the remainder of an interrupted compaction. Blocks.

    Raises:
        OSError: the storage failed.
    """
    for name in (notes_path(path) + NEW_SUFFIX, notes_path(path)):  # what a scrub finds goes last
        Path(name).unlink(missing_ok=True)


def _notes(owners: Mapping[int, str]) -> bytes:
    return "".join(f"\n{slot}+{owner}." if owner else f"\n{slot}." for slot, owner in owners.items()).encode()


_PUNCH_HOLE_KEEP_SIZE: Final = 0x03  # fallocate(2): FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_CANNOT_PUNCH: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_LOCKS: Final = 256
_MOST_LOST: Final = 8  # one in so many slots
_libc = ctypes.CDLL(None, use_errno=True)


class SlotsOfFile(NamedTuple):
    """Slots of one file.

    Attributes:
        path: of the file.
        size_bytes: of each slot.
        slots: number and the location that it was handed out to, None for the file's first owner; no slots at all for a
            file that is one part as a whole.
    """

    path: str
    size_bytes: int
    slots: set[tuple[int, str | None]]


class PackedFiles:
    """The files of a deployment's directory. Everything here blocks.

    Args:
        directory: of the deployment, with a slash at its end.
        free: learns which slots are free.
    """

    def __init__(self, directory: str, free: FreeSlots) -> None:
        self._directory = directory
        self._locks = [Lock() for _ in range(_LOCKS)]
        self.free = free

    def delete(self, wanted: SlotsOfFile) -> None:
        """Delete slots, and the file with the last of them. Those that are another location's by now stay as they are.

        Raises:
            OSError: the storage failed.
        """
        with self._lock_of(wanted.path):
            self._delete(wanted)

    def _delete(self, wanted: SlotsOfFile) -> None:
        path, count = wanted.path, slot_count(wanted.path)
        owners = slot_owners(path) if count > 1 else {}
        slots = {slot for slot, location_id in wanted.slots if _may_delete(owners, slot, location_id)}
        if wanted.slots and not slots:
            return
        if not wanted.slots or len(_deleted(owners) | slots) >= count:
            self._remove(path)
            return
        was_there = _is_there(path)
        if not was_there and not _is_there(notes_path(path)):
            return
        for slot in slots:
            _punch(path, slot * wanted.size_bytes, wanted.size_bytes)
        recorded = self._record_deleted(path, slots)
        # The deletion of the last slot removes both. If that happened meanwhile, these slots had been recorded before,
        # and the new record would stay for ever.
        if _is_there(path):
            self._free(wanted, slots)
        elif was_there or recorded == slots:
            self._remove(path)

    def discard(self, wanted: SlotsOfFile) -> None:
        """Record slots that are never written, of a file with other slots still to be written: it may not exist yet.

        Raises:
            OSError: the storage failed.
            NoFolderError: the deployment's directory is not there.
            StorageIOError: the path does not lie where objects lie.
        """
        if any(location_id is not None for _, location_id in wanted.slots):
            self.delete(wanted)
        elif 0 < len(wanted.slots) < slot_count(wanted.path):
            with self._lock_of(wanted.path):
                make_folders(self._directory, wanted.path)
                self._record_deleted(wanted.path, {slot for slot, _ in wanted.slots})

    def hand_out(self, wanted: InFile, location_id: str) -> Sequence[int]:
        """Give free slots of a file to a location. Returns which are its own now.

        A file with many lost slots is not filled any more, so that it empties and goes: where
        holes cannot be punched they would take up their space for as long as others in it change hands.

        Raises:
            OSError: the storage failed; none is handed out.
        """
        with self._lock_of(wanted.path):
            try:
                return self._hand_out(wanted, location_id)
            finally:
                self.free.settle(wanted)

    def _hand_out(self, wanted: InFile, location_id: str) -> Sequence[int]:
        path, owners = wanted.path, slot_owners(wanted.path)
        slots = [slot for slot in wanted.slots if owners.get(slot) == _DELETED]
        if not slots or not _is_file(path):
            return ()
        lost = len(_deleted(owners)) - self.free.usable(path)
        if lost * _MOST_LOST > slot_count(path):
            self.free.discard_file(path)
            return ()
        shorten(path)
        return slots if record_owner(path, slots, location_id) and _is_file(path) else ()

    def remove_objects(self, objects: Sequence[StoredObject]) -> list[str | None]:
        """Remove whole objects as they were listed, while no slots of them are handed out.

        Raises:
            OSError: the deployment's directory cannot be read.
        """
        alone = [each for each in objects if slot_count(each.name) <= 1]
        reasons = dict(zip((each.name for each in alone), remove_objects(self._directory, alone), strict=True))
        for each in objects:
            if each.name not in reasons:
                with self._lock_of(self._directory + each.name):
                    (reasons[each.name],) = remove_objects(self._directory, [each])
                    if reasons[each.name] is None:
                        self.free.discard_file(self._directory + each.name)
        return [reasons[each.name] for each in objects]

    def _lock_of(self, path: str) -> Lock:
        return self._locks[hash(path) % _LOCKS]

    def _record_deleted(self, path: str, slots: set[int]) -> set[int]:
        """Record deleted slots, and remove the file with the last of them; return the recorded slots."""
        record_deleted_slots(path, slots)
        recorded = deleted_slots(path)
        if len(recorded) >= slot_count(path):
            self._remove(path)
        else:
            shorten(path)
        return recorded

    def _free(self, wanted: SlotsOfFile, slots: set[int]) -> None:
        """Report deleted slots as free, unless the file is of another deployment, as after an import."""
        if wanted.path.startswith(self._directory) and wanted.size_bytes > 0:
            instance = wanted.path.removeprefix(self._directory).partition("/")[0]
            self.free.deleted(wanted.path, Pool(instance, wanted.size_bytes), slots)

    def _remove(self, path: str) -> None:
        self.free.discard_file(path)
        _unlink(path)


def slots_by_file(uris: Iterable[LocationUri]) -> dict[str, SlotsOfFile]:
    """Return the slots of uris, by the path of their file."""
    files: dict[str, SlotsOfFile] = {}
    for uri in uris:
        slots = files.setdefault(uri.path, SlotsOfFile(uri.path, uri.size, set())).slots
        if uri.blkid is not None:
            slots.add((uri.blkid, uri.location_id))
    return files


def is_complete(uri: LocationUri) -> bool:
    """Return whether all bytes of a part are there; in a slot that was handed out again they count as there at once.

    Blocks.

    Raises:
        OSError: the storage failed.
    """
    try:
        if Path(uri.path).lstat().st_size < uri.offset + uri.size:
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    # A slot that was punched out still lies inside its file.
    return uri.blkid is None or _is_owner(slot_owners(uri.path), uri.blkid, uri.location_id)


def is_certain(uri: LocationUri) -> bool:
    """Return whether a slot is still its location's, by notes that may be older or newer than the metadata.

    One that was handed out again has a note of that. Without one the storage was put back, and the slot is that of
    another location, unless its file was made again by a late writer: then its bytes are given up for nothing. Blocks.

    Raises:
        OSError: the storage failed.
    """
    if uri.blkid is None:
        return True
    owners = slot_owners(uri.path)
    return _is_owner(owners, uri.blkid, uri.location_id) and (uri.location_id is None or uri.blkid in owners)


def _is_owner(owners: Mapping[int, str], slot: int, location_id: str | None) -> bool:
    return slot not in owners or (owners[slot] == location_id != _DELETED)


def _may_delete(owners: Mapping[int, str], slot: int, location_id: str | None) -> bool:
    return _is_owner(owners, slot, location_id) or owners[slot] == _DELETED


def _deleted(owners: Mapping[int, str]) -> set[int]:
    return {slot for slot, owner in owners.items() if owner == _DELETED}


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)
    if slot_count(path) > 1:
        remove_notes(path)


def _is_there(path: str) -> bool:
    """Return whether there is anything; a storage that does not say raises its error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_file(path: str) -> bool:
    try:
        return S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _punch(path: str, offset: int, size: int) -> None:
    """Give a slot's blocks back to the file system. Where it cannot punch, the space returns with the whole file."""
    if size <= 0:
        return
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            punched = _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size))
            code = ctypes.get_errno()
        finally:
            os.close(descriptor)
        if punched != 0 and code not in _CANNOT_PUNCH:
            raise OSError(code, os.strerror(code))


# Handing out free slots of packed files while a writer waits for its addresses.
#
# Every file that slots are taken from is read and written on the medium, so the time is bounded: slots not reached in
# time are put back, and the writer gets fresh files. A medium that hangs delays one writer for a moment; the others
# skip it until it answers.

_WORK_SECONDS: Final = 0.25  # then no further file is begun
_WAIT_SECONDS: Final = 0.5
_log = structlog.get_logger("kvcm.storage")


class SlotAllocator:
    """Gives the free slots of one storage away.

    Args:
        name: of the storage.
        files: its files.
        threads: where the medium is asked.
        seconds: time source of the bounds; a medium's time is real.
    """

    def __init__(
        self, name: str, files: PackedFiles, threads: StorageThreads, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._files = files
        self._threads = threads
        self._seconds = seconds
        self._hanging: _Handout | None = None

    async def allocate(self, instance: str, parts: Parts, location_id: str) -> dict[int, tuple[str, int]]:
        """Return path and slot of parts by their index; those that are left out need fresh ones.

        Args:
            instance: owner of the blocks, as a path component.
            parts: what needs a place.
            location_id: whose the slots will be.
        """
        taken = self._acquire(instance, parts)
        if not taken:
            return {}
        given = await self._run(_Handout(self._files, taken, location_id, self._seconds))
        slots: dict[int, list[tuple[str, int]]] = {}
        for path, pool, numbers in given:
            slots.setdefault(pool.size_bytes, []).extend((path, number) for number in numbers)
        ways = {size: iter(found) for size, found in slots.items()}
        found = ((index, next(ways.get(size, iter(())), None)) for index, size in enumerate(parts.sizes))
        return {index: place for index, place in found if place is not None}

    def _acquire(self, instance: str, parts: Parts) -> list[InFile]:
        if not len(self._files.free) or (self._hanging is not None and not self._hanging.is_over):
            return []
        wanted = Counter(parts.sizes)
        return [
            each for size, count in wanted.items() for each in self._files.free.acquire(Pool(instance, size), count)
        ]

    async def _run(self, handout: _Handout) -> Sequence[InFile]:
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                # Abandoned work gets a thread, too: it reports that threads are free again.
                return await asyncio.shield(self._threads.run(handout.work))
        except TimeoutError:
            self._hanging = handout
            _log.warning("free_slots_not_asked", storage=self._name, reason="no answer")
        except BaseException:  # the writer is gone
            handout.abandon()
            raise
        return handout.abandon()


class _Handout:
    """Slots being given to a location, by a thread that its client may leave behind."""

    def __init__(
        self, files: PackedFiles, taken: Sequence[InFile], location_id: str, seconds: Callable[[], float]
    ) -> None:
        self._files = files
        self._taken = taken
        self._location_id = location_id
        self._seconds = seconds
        self._until = seconds() + _WORK_SECONDS
        self._lock = Lock()
        self._given: list[InFile] = []
        self._is_left = False
        self._has_begun = False
        self.is_over = False

    def work(self) -> Sequence[InFile]:
        """Give what can be given in time. Blocks."""
        try:
            return self._work()
        finally:
            self.is_over = True

    def _work(self) -> Sequence[InFile]:
        if not self._start():
            return ()
        given = [given for each in self._taken if (given := self._allocated(each)).slots]
        if self._finish(given):
            return given
        for each in given:
            self._undo(each)
        return ()

    def _start(self) -> bool:
        with self._lock:
            self._has_begun = not self._is_left
            return self._has_begun

    def _finish(self, given: list[InFile]) -> bool:
        with self._lock:
            self._given = [] if self._is_left else given
            return not self._is_left

    def abandon(self) -> Sequence[InFile]:
        """Stop waiting. Return the slots that were given just now; the thread takes back the ones that it gives
        later."""
        with self._lock:
            if not self._has_begun:
                for each in self._taken:
                    self._files.free.release(each)
            self._is_left = True
            return self._given

    def _allocated(self, each: InFile) -> InFile:
        if self._seconds() >= self._until:
            self._files.free.release(each)
            return each._replace(slots=())
        try:
            return each._replace(slots=self._files.hand_out(each, self._location_id))
        except OSError as error:
            _log.warning("free_slots_not_asked", path=each.path, reason=error.strerror)
            return each._replace(slots=())

    def _undo(self, each: InFile) -> None:
        slots: set[tuple[int, str | None]] = {(slot, self._location_id) for slot in each.slots}
        try:
            self._files.delete(SlotsOfFile(each.path, each.pool.size_bytes, slots))
        except OSError as error:
            _log.warning("free_slots_lost", path=each.path, reason=error.strerror)
            return
        self._files.free.forgotten(each.path, each.slots)
