"""Files that hold secrets, or what nobody else is to read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvcm.model.errors import InvalidArgumentError

__all__ = ["private_file"]

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextlib.contextmanager
def private_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a file to write, which appears under its name when it is complete, readable by its owner only.

    Args:
        path: its name.
        force: whether to replace what has the name.

    Raises:
        InvalidArgumentError: the name is taken.
        OSError: it cannot be written.
    """
    if path.exists() and not force:
        raise InvalidArgumentError(f"{path} exists: choose another name, or give --force to replace it")
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = _new_file(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _new_file(path: Path) -> int:
    """Make a file that nobody else has open or can point elsewhere; what an interrupted command left there goes."""
    with contextlib.suppress(FileNotFoundError):
        left = path.lstat()
        if stat.S_ISREG(left.st_mode) and left.st_uid == os.geteuid():
            path.unlink()
    return os.open(path, _NEW_FILE, 0o600)
