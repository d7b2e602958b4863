"""What became of the slots of a packed file, noted beside it in `<file>.deleted`.

A note is a line break, the number of the slot and what happened: a full stop where the slot was deleted; `+`, the id of
a location and a full stop where it was handed out again, to that location. The last note of a slot counts, and a slot
without any is still its first owner's. A note counts only as a whole: where a write was cut off and repeated, or
another host wrote over a part of it, a note is lost, and never read as another slot's.

Notes are appended. Where slots change hands often they are written anew, one for each slot, into a file that takes the
place of the old one; whoever does that, and whoever hands out a slot, must be alone with the file in this process. What
another process appends to the old one at that moment is lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvcm.storage.file_listing import BESIDE_SUFFIX, NEW_SUFFIX
from kvcm.storage.file_writes import write_all
from kvcm.storage.packing import slot_count

__all__ = ["DELETED", "beside", "note_owner", "note_slots", "noted_slots", "remove_notes", "shorten", "slot_owners"]

DELETED: Final = ""
"""Owner of a slot that is deleted."""

_NOTE: Final = re.compile(rb"\n([0-9]{1,9})(?:\+([0-9A-Za-z]{1,64}))?\.")
_APPENDED: Final = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITTEN: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_SHORT_BYTES: Final = 3072  # so that they stay within one page of the medium
_WORTH_IT: Final = 2  # times as long as they have to be


def beside(path: str) -> str:
    """Return where the notes of a file are."""
    return path + BESIDE_SUFFIX


def note_slots(path: str, slots: Iterable[int]) -> None:
    """Note slots as deleted, by one write as a rule: on one host that is atomic for so few bytes. Blocks.

    Raises:
        OSError: the storage failed.
    """
    descriptor = os.open(beside(path), _APPENDED | os.O_CREAT, 0o600)
    try:
        write_all(descriptor, _notes(dict.fromkeys(slots, DELETED)))
    finally:
        os.close(descriptor)


def note_owner(path: str, slots: Iterable[int], location_id: str) -> bool:
    """Note that slots were handed out again. Blocks.

    Returns:
        Whether that stands beside the file now; it does not where the notes were removed meanwhile, and the file with
        them.

    Raises:
        OSError: the storage failed.
    """
    with suppress(FileNotFoundError):
        descriptor = os.open(beside(path), _APPENDED)
        try:
            write_all(descriptor, _notes(dict.fromkeys(slots, location_id)))
            return os.path.samestat(os.fstat(descriptor), os.lstat(beside(path)))
        finally:
            os.close(descriptor)
    return False


def slot_owners(path: str) -> dict[int, str]:
    """Return the slots of a file that something is noted of: to whom they were handed out again, or `DELETED`. Blocks.

    Raises:
        OSError: the storage failed.
    """
    try:
        notes = Path(beside(path)).read_bytes()
    except FileNotFoundError:
        return {}
    count = slot_count(path)
    return {int(slot): owner.decode() for slot, owner in _NOTE.findall(notes) if int(slot) < count}


def noted_slots(path: str) -> set[int]:
    """Return the slots of a file that are deleted. Blocks.

    Raises:
        OSError: the storage failed.
    """
    return {slot for slot, owner in slot_owners(path).items() if owner == DELETED}


def shorten(path: str) -> None:
    """Write long notes anew, one for each slot, where that makes them much shorter. Blocks.

    It only tidies up: where the storage is full, or fails otherwise, the notes stay as they were, and nobody need know.
    """
    with suppress(OSError):
        size = os.lstat(beside(path)).st_size
        if size <= _SHORT_BYTES:
            return
        notes = _notes(slot_owners(path))
        if size > _WORTH_IT * len(notes):
            _replace(beside(path), notes)


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
    """Remove the notes of a file, and what is left of an attempt to shorten them. Blocks.

    Raises:
        OSError: the storage failed.
    """
    for name in (beside(path) + NEW_SUFFIX, beside(path)):  # what a scrub finds goes last
        Path(name).unlink(missing_ok=True)


def _notes(owners: Mapping[int, str]) -> bytes:
    return "".join(f"\n{slot}+{owner}." if owner else f"\n{slot}." for slot, owner in owners.items()).encode()
