"""Which slots of a packed file are deleted, noted beside it in `<file>.deleted`.

A note is a line break, the number of the slot and a full stop, and counts only as a whole: where a write was cut off
and repeated, or another host wrote over a part of it, a note is lost, and never read as another slot's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvcm.storage.file_listing import BESIDE_SUFFIX
from kvcm.storage.file_writes import write_all
from kvcm.storage.packing import slot_count

__all__ = ["beside", "note_slots", "noted_slots"]

_NOTE: Final = re.compile(rb"\n([0-9]{1,9})\.")
_FILE: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def beside(path: str) -> str:
    """Return where the notes of a file are."""
    return path + BESIDE_SUFFIX


def note_slots(path: str, slots: Iterable[int]) -> None:
    """Note slots, by one write as a rule: on one host that is atomic for so few bytes. Blocks.

    Raises:
        OSError: the storage failed.
    """
    descriptor = os.open(beside(path), _FILE, 0o600)
    try:
        write_all(descriptor, "".join(f"\n{slot}." for slot in slots).encode())
    finally:
        os.close(descriptor)


def noted_slots(path: str) -> set[int]:
    """Return the slots of a file that are noted. Blocks.

    Raises:
        OSError: the storage failed.
    """
    try:
        notes = Path(beside(path)).read_bytes()
    except FileNotFoundError:
        return set()
    return {int(slot) for slot in _NOTE.findall(notes) if int(slot) < slot_count(path)}
