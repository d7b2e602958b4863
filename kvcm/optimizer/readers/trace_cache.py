"""Keeps the trace of a file beside it, in binary: the next reading takes a tenth of the time.

What is kept is used only while the file still has the very content that was read: both are compared by their hashes,
since times of files lie. It is replaced as a whole, so nobody finds half of it. Where it cannot be kept, reading goes
on without, and the log says so once per directory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvcm.optimizer.readers.trace_file import Origin, packed, unpacked
from kvcm.optimizer.trace import Trace

__all__ = ["cache_path", "keep_trace", "kept_trace"]

_log = logging.getLogger("kvcm.optimizer")


def cache_path(path: Path) -> Path:
    """Return where the trace of a file is kept."""
    return path.with_name(f"{path.name}.kvtrace")


def kept_trace(path: Path, origin: Callable[[], Origin]) -> Trace | None:
    """Return the trace that is kept for a file; None where there is none, or it was made from something else.

    Args:
        path: of the file that it is a trace of.
        origin: tells what the file holds now, and how it is to be read; asked only where something is kept.

    Raises:
        TraceError: the file cannot be read.
    """
    kept = cache_path(path)
    with contextlib.suppress(OSError):
        # Another user could have put a trace there that this file does not hold.
        if kept.is_file() and kept.stat().st_uid in {os.geteuid(), path.stat().st_uid}:
            with kept.open("rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                del data[file.readinto(data) :]
            return unpacked(data, origin(), path.name)
    return None


def keep_trace(path: Path, origin: Origin, trace: Trace) -> None:
    """Keep the trace of a file, readable by whoever can read the file."""
    kept = cache_path(path)
    try:
        _check_is_for_writing(kept.parent)
        mode = path.stat().st_mode & 0o666
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=f".{kept.name}.", delete=False) as file:
            try:
                file.writelines(packed(trace, origin))
                os.fchmod(file.fileno(), mode)
                file.close()
                Path(file.name).replace(kept)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _tell(kept.parent, error.strerror or str(error))


def _check_is_for_writing(directory: Path) -> None:
    """Raise PermissionError where nobody may write: the superuser could, and has no reason to."""
    if not directory.stat().st_mode & 0o222:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@functools.cache
def _tell(directory: Path, reason: str) -> None:
    _log.warning("traces are read anew each time: none can be kept in %s: %s", directory, reason)
