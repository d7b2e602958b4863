"""The objects of a path storage as they lie on the disk: listing them, and removing those that nobody knows.

Everything is opened from the deployment's directory downwards (folders.py), so nothing outside can be listed or
removed. What does not lie where an object lies, two directories deep, is not ours and is left alone, and so is what is
not named like one.

What is noted beside a packed file (file.py) belongs to it: both are one object, also while only one of them is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from stat import S_ISREG
from typing import Final

from kvcm.storage.backend import ObjectPage, StoredObject
from kvcm.storage.folders import NoFolderError, opened_folder
from kvcm.storage.packing import owner_of, slot_count

__all__ = ["BESIDE_SUFFIX", "NEW_SUFFIX", "object_pages", "remove_objects"]

BESIDE_SUFFIX: Final = ".deleted"
NEW_SUFFIX: Final = ".new"
"""Of notes that are being written anew: what a process leaves behind that ends meanwhile goes with its object."""

_PAGE_OBJECTS: Final = 1000
_BLOCK_BYTES: Final = 512


def object_pages(directory: str, page_size: int = _PAGE_OBJECTS) -> Iterator[ObjectPage]:
    """Yield the objects below a deployment's directory, which may be missing. Blocks; memory does not grow with their
    number.

    Raises:
        OSError: the directory cannot be read.
    """
    page, failed = list[StoredObject](), 0
    for found in _all_objects(directory):
        if found is None:
            failed += 1
            continue
        page.append(found)
        if len(page) == page_size:
            yield ObjectPage(page, failed)
            page, failed = [], 0
    if page or failed:
        yield ObjectPage(page, failed)


def remove_objects(directory: str, objects: Sequence[StoredObject]) -> list[str | None]:
    """Remove objects as they were listed; one that changed since stays. Blocks.

    Returns:
        Per object None, or the reason why it is still there; what is gone already counts as removed.

    Raises:
        OSError: the directory cannot be read.
    """
    reasons: dict[str, str | None] = {}
    for place, group in groupby(objects, lambda each: each.name.rpartition("/")[0]):
        members, folders = list(group), place.split("/")
        reasons |= dict.fromkeys((each.name for each in members), None)
        if len(folders) != 2 or {"", ".", ".."} & {*folders}:
            reasons |= dict.fromkeys((each.name for each in members), "it is not the name of an object")
            continue
        with suppress(NoFolderError), opened_folder(directory) as top:
            with opened_folder(folders[0], top) as instance, opened_folder(folders[1], instance) as spec:
                reasons |= {each.name: _remove(spec, each) for each in members}
    return [reasons[each.name] for each in objects]


def _all_objects(directory: str) -> Iterator[StoredObject | None]:
    """Yield every object, None for what could not be looked at."""
    with suppress(NoFolderError), opened_folder(directory) as top:
        for instance in _folder_names(top):
            try:
                with suppress(NoFolderError), opened_folder(instance, top) as inside:
                    for spec in _folder_names(inside):
                        yield from _objects_of(inside, spec, f"{instance}/{spec}/")
            except OSError:
                yield None


def _objects_of(instance: int, spec: str, place: str) -> Iterator[StoredObject | None]:
    try:
        with suppress(NoFolderError), opened_folder(spec, instance) as inside:
            yield from _objects_in(inside, place)
    except OSError:
        yield None


def _folder_names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _objects_in(folder: int, place: str) -> Iterator[StoredObject | None]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(BESIDE_SUFFIX)
            if owner_of(place + name) is None:
                continue
            try:
                if not entry.is_file(follow_symlinks=False):  # which asks the medium, on some
                    continue
                if name != entry.name and _status(folder, name) is not None:
                    continue  # counted with its file
                found = _look_at(folder, name)
            except OSError:
                yield None
                continue
            if found is not None:  # else it went while it was being listed
                yield found._replace(name=place + name)


def _look_at(folder: int, name: str) -> StoredObject | None:
    parts = [status for _, status in _parts(folder, name)]
    if not parts:
        return None
    # Of a file with holes only what it takes up is there to be gained.
    has_holes = slot_count(name) > 1
    sizes = [min(each.st_size, each.st_blocks * _BLOCK_BYTES) if has_holes else each.st_size for each in parts]
    return StoredObject(name, sum(sizes), max(each.st_mtime for each in parts))


def _remove(folder: int, listed: StoredObject) -> str | None:
    name = listed.name.rpartition("/")[2]
    try:
        found = _look_at(folder, name)
        if found is not None and found.modified_at != listed.modified_at:
            return "it changed since it was listed"
        # What is listed goes last, so that what is left of an attempt that was cut off is found again.
        for part in (name + BESIDE_SUFFIX + NEW_SUFFIX, name, name + BESIDE_SUFFIX):
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
    except OSError as error:
        return error.strerror
    return None


def _parts(folder: int, name: str) -> list[tuple[str, os.stat_result]]:
    """Return the files that an object consists of, by name."""
    found = ((part, _status(folder, part)) for part in (name, name + BESIDE_SUFFIX))
    return [(part, status) for part, status in found if status is not None]


def _status(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a file, None where there is none."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if S_ISREG(status.st_mode) else None
