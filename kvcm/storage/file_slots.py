"""Files of a path storage that hold parts: deleting them slot by slot, and handing deleted slots out again.

Deleting a part punches its slot out of the file, so that the space returns at once and no neighbour is touched, and
notes it beside the file (slot_notes.py). The file goes with its last slot.

A slot that is handed out again is noted with its new location before anybody hears of it, and from then on:

1. It counts as there: the file is not removed because all *others* are deleted.
2. Who comes to delete or asks for it must name that location. The uri of the former one names another, or none, so a
   deletion that was repeated, or hung somewhere for hours, touches no newer bytes (design.md decision 1, invariant 5).
   Only one that had looked at the notes already and is stopped between that and the punch could: within this process a
   lock keeps them apart, and another one would have to be stopped for longer than the grace of slots.py.
3. Notes that are missing altogether fit everybody: the file was made anew by its last writer.

In this process one thread at a time works on a file. Managers that work on one file at the same time are kept apart by
leading: only the leader deletes and hands out again. Where that is crossed, by a leader that was stopped and goes on
after its term, the file may be removed while a slot is handed out. Then its writer makes the file anew, or its bytes
are a miss, and what is left of the file is left to the scrub. So are slots whose location was never stored, because the
manager died or its client went away at that moment: their file stays until no block knows it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from threading import Lock
from typing import Final, NamedTuple

from kvcm.model.uri import LocationUri
from kvcm.storage.backend import StoredObject
from kvcm.storage.file_listing import remove_objects
from kvcm.storage.file_making import make_folders
from kvcm.storage.packing import slot_count
from kvcm.storage.slot_notes import (
    DELETED,
    beside,
    note_owner,
    note_slots,
    noted_slots,
    remove_notes,
    shorten,
    slot_owners,
)
from kvcm.storage.slots import FreeSlots, InFile, Pool

__all__ = ["PackedFiles", "SlotsOfFile", "is_complete", "slots_by_file"]

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
        if not was_there and not _is_there(beside(path)):
            return
        for slot in slots:
            _punch(path, slot * wanted.size_bytes, wanted.size_bytes)
        noted = self._note_deleted(path, slots)
        # Whoever deletes the last slot removes both. If that was done meanwhile, these slots had been noted before, and
        # now they are noted once more: nobody would come for that.
        if _is_there(path):
            self._free(wanted, slots)
        elif was_there or noted == slots:
            self._remove(path)

    def discard(self, wanted: SlotsOfFile) -> None:
        """Note slots that nobody will ever write, of a file that others are still to be written to: it may not be there
        yet.

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
                self._note_deleted(wanted.path, {slot for slot, _ in wanted.slots})

    def hand_out(self, wanted: InFile, location_id: str) -> Sequence[int]:
        """Give free slots of a file to a location. Returns which are its own now.

        A file many of whose slots are nobody's ever again is not filled any more, so that it empties and goes: where
        holes cannot be punched they would take up their space for as long as others in it change hands.

        Raises:
            OSError: the storage failed; none is handed out.
        """
        with self._lock_of(wanted.path):
            try:
                return self._hand_out(wanted, location_id)
            finally:
                self.free.ended(wanted)

    def _hand_out(self, wanted: InFile, location_id: str) -> Sequence[int]:
        path, owners = wanted.path, slot_owners(wanted.path)
        slots = [slot for slot in wanted.slots if owners.get(slot) == DELETED]
        if not slots or not _is_file(path):
            return ()
        lost = len(_deleted(owners)) - self.free.usable(path)
        if lost * _MOST_LOST > slot_count(path):
            self.free.gone(path)
            return ()
        shorten(path)
        return slots if note_owner(path, slots, location_id) and _is_file(path) else ()

    def remove_objects(self, objects: Sequence[StoredObject]) -> list[str | None]:
        """Remove whole objects as they were listed, while nobody hands out slots of them.

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
                        self.free.gone(self._directory + each.name)
        return [reasons[each.name] for each in objects]

    def _lock_of(self, path: str) -> Lock:
        return self._locks[hash(path) % _LOCKS]

    def _note_deleted(self, path: str, slots: set[int]) -> set[int]:
        """Note slots, and remove the file with the last of them; return what is noted now."""
        note_slots(path, slots)
        noted = noted_slots(path)
        if len(noted) >= slot_count(path):
            self._remove(path)
        else:
            shorten(path)
        return noted

    def _free(self, wanted: SlotsOfFile, slots: set[int]) -> None:
        """Tell which slots are deleted. An import may have brought files of another deployment, which is not asked."""
        if wanted.path.startswith(self._directory) and wanted.size_bytes > 0:
            instance = wanted.path.removeprefix(self._directory).partition("/")[0]
            self.free.deleted(wanted.path, Pool(instance, wanted.size_bytes), slots)

    def _remove(self, path: str) -> None:
        self.free.gone(path)
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


def _is_owner(owners: Mapping[int, str], slot: int, location_id: str | None) -> bool:
    return slot not in owners or (owners[slot] == location_id != DELETED)


def _may_delete(owners: Mapping[int, str], slot: int, location_id: str | None) -> bool:
    return _is_owner(owners, slot, location_id) or owners[slot] == DELETED


def _deleted(owners: Mapping[int, str]) -> set[int]:
    return {slot for slot, owner in owners.items() if owner == DELETED}


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
