"""Damage to files: flipped bits, cut and missing files, older copies; and what of a RocksDB can still be read after it.

What can be read is found out without the manager's code: RocksDB itself opens copies of the damaged directory in two
lenient ways, and a row counts as readable if one of them has it as it was before.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Final

from rocksdict import DBRecoveryMode, Options, Rdict

_STEP: Final = 4096
Damage = Callable[[Path, Random], str]
"""Damages a file, and returns in words what it did."""


def flip(file: Path, random: Random) -> str:
    """Flip one bit of a file."""
    size = file.stat().st_size
    if not size:
        return f"{file.name} is empty and stays as it is"
    at, bit = random.randrange(size), random.randrange(8)
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes((byte ^ 1 << bit,)))
    return f"bit {bit} of byte {at} of {size} of {file.name} is flipped"


def cut(file: Path, random: Random) -> str:
    """Cut the end of a file off, a little or much of it."""
    size = file.stat().st_size
    left = random.choice((random.randrange(size + 1), max(0, size - random.randrange(1, 64))))
    with file.open("r+b") as opened:
        opened.truncate(left)
    return f"{file.name} of {size} bytes is cut to {left}"


def zero(file: Path, random: Random) -> str:
    """Fill a sector with zeros, as a file system leaves one that it lost."""
    size = file.stat().st_size
    if not size:
        return f"{file.name} is empty and stays as it is"
    at = random.randrange(size) // 512 * 512
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes(min(512, size - at)))
    return f"512 bytes of {file.name} from {at} of {size} on are zeros"


def remove(file: Path, _random: Random) -> str:
    """Remove a file."""
    size = file.stat().st_size
    file.unlink()
    return f"{file.name} of {size} bytes is gone"


FILE_DAMAGES: Final[Mapping[str, Damage]] = {"bit": flip, "cut": cut, "zeros": zero, "gone": remove}
ROCKS_FILES: Final[Mapping[str, str]] = {
    "log": "*.log", "table": "*.sst", "manifest": "MANIFEST-*", "current": "CURRENT", "options": "OPTIONS-*",
    "identity": "IDENTITY", "mark": "kvcm.*",
}  # fmt: skip
"""Kinds of files of a RocksDB, and their names."""


def files_of(directory: Path, kind: str) -> list[Path]:
    """Return the files of a kind, those with content first."""
    found = sorted(directory.glob(ROCKS_FILES[kind]), key=lambda file: (-file.stat().st_size, file.name))
    return [file for file in found if file.stat().st_size] or found


def put_back(copy: Path, directory: Path) -> None:
    """Put an older copy in the place of a directory."""
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)


def rows_of(directory: Path) -> dict[bytes, bytes]:
    """Return the rows of a RocksDB that is whole; read from a copy."""
    with _copied(directory) as copy, _opened(copy, Options(raw_mode=True)) as database:
        return {key: value for key, value in database.items() if isinstance(key, bytes) and isinstance(value, bytes)}


def readable_rows(directory: Path, rows: Mapping[bytes, bytes]) -> set[bytes]:
    """Return the keys of the rows that a damaged RocksDB has as they were."""
    found: set[bytes] = set()
    for repairs in (False, True):
        with contextlib.suppress(Exception), _copied(directory) as copy:
            if repairs:
                Rdict.repair(str(copy), Options(raw_mode=True))
            with _opened(copy, _lenient()) as database:
                found |= set(_unchanged(database, rows))
    return found


def _unchanged(database: Rdict, rows: Mapping[bytes, bytes]) -> Iterator[bytes]:
    for key, value in rows.items():
        with contextlib.suppress(Exception):  # a damaged row has an error of its own
            if database.get(key) == value:
                yield key


def _lenient() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(False)
    options.set_paranoid_checks(False)
    options.set_wal_recovery_mode(DBRecoveryMode.skip_any_corrupted_record())
    return options


@contextlib.contextmanager
def _copied(directory: Path) -> Iterator[Path]:
    copy = directory.with_name(f"{directory.name}-looked-at")
    shutil.copytree(directory, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


@contextlib.contextmanager
def _opened(directory: Path, options: Options) -> Iterator[Rdict]:
    database = Rdict(str(directory), options)
    try:
        yield database
    finally:
        database.close()


def files_below(root: Path, names: Callable[[Path], bool]) -> list[Path]:
    """Return the files below a directory that are wanted, in an order that does not change."""
    return sorted(path for path in root.rglob("*") if path.is_file() and names(path))


@contextlib.contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[Path]:
    """Mount a file system of so many MiB, in memory, for the time of the block. Needs root."""
    directory.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(directory)]
    subprocess.run(["mount", *options], check=True, capture_output=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, capture_output=True)


def fill(directory: Path, left_bytes: int) -> Path:
    """Fill the disk of a directory with a file of another program, but for so many bytes; returns the file."""
    junk = directory / "another-program's-file"
    size = max(0, shutil.disk_usage(directory).free - left_bytes)
    with junk.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # others write, too
        for _ in range(size // _STEP):
            file.write(bytes(_STEP))
    return junk
