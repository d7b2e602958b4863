"""Files of lines, plain or gzip, as a stream: a line that is too long is no line, and memory is bounded by one."""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.trace import BadLine

__all__ = ["BadLines", "LineError", "LineFile", "Progress", "digest_of", "open_lines"]

Progress = Callable[[int, int], None]
"""Is told the bytes read so far, and the size of the file (of the compressed one, where it is compressed)."""

_MOST_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MOST_BAD_LINES = 100
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineError(Exception):
    """A line is no request; the message names the field, the value and what is allowed."""


class BadLines:
    """Lines that are left out: the first of them, and how many there are."""

    def __init__(self) -> None:
        self.first: list[BadLine] = []
        self.count = 0

    def add(self, number: int, reason: str) -> None:
        """Remember one."""
        self.count += 1
        if len(self.first) < _MOST_BAD_LINES:
            self.first.append(BadLine(number, reason))

    def nothing_in(self, name: str) -> str:
        """Return what to say where no line of a file is a good one."""
        if not self.count:
            return f"{name}: holds no request"
        first = self.first[0]
        return f"{name}: holds no request; {self.count} bad lines, the first is line {first.number}: {first.reason}"


class _Source(io.RawIOBase):
    """The bytes of a file as they are on disk: counted and hashed as they pass."""

    def __init__(self, file: BinaryIO, size: int, progress: Progress | None) -> None:
        self._file = file
        self._size = size
        self._progress = progress
        self._hash = hashlib.blake2b(digest_size=32)
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer)  # type: ignore[attr-defined] # a file has it
        self._hash.update(buffer[:count])
        self._done += count
        if self._progress is not None and count:
            self._progress(self._done, max(self._size, self._done))
        return int(count)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class LineFile:
    """Lines of an open file, each with its number, from 1 on; empty ones are passed over.

    Args:
        path: for messages.
        source: what is on disk.
        bad: is told of lines that are none.
    """

    def __init__(self, path: Path, source: _Source, bad: BadLines) -> None:
        self._path = path
        self._source = source
        self._bad = bad

    @property
    def digest(self) -> str:
        """Return a hash of what was read from the file, in hex: of all of it once its lines are at their end."""
        return self._source.digest

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines.

        Raises:
            TraceError: the file is damaged, or cannot be read any further.
        """
        number = 0
        try:
            for line in self._lines(_decompressed(self._source)):
                number += 1
                if line is None:
                    self._bad.add(number, f"is longer than {_MOST_LINE_BYTES >> 20} MiB")
                elif stripped := line.strip():
                    yield number, stripped
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{self._path}: the gzip file is damaged after line {number}: {error}") from None
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read after line {number}: {error.strerror or error}") from None

    def _lines(self, file: io.BufferedReader) -> Iterator[bytes | None]:
        is_first = True
        while line := file.readline(_MOST_LINE_BYTES):
            if len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
                _pass_over(file)
                yield None
            else:
                yield line.removeprefix(_BYTE_ORDER_MARK) if is_first else line
            is_first = False


def _pass_over(file: io.BufferedReader) -> None:
    while (part := file.readline(_CHUNK_BYTES)) and not part.endswith(b"\n"):
        pass


def _decompressed(source: io.RawIOBase) -> io.BufferedReader:
    file: io.BufferedReader = io.BufferedReader(source, _CHUNK_BYTES)
    if file.peek(2)[:2] != _GZIP:
        return file
    return io.BufferedReader(gzip.GzipFile(fileobj=file), _CHUNK_BYTES)


def digest_of(path: Path, progress: Progress | None = None) -> str:
    """Return the hash of a file that reading its lines would give.

    Raises:
        TraceError: there is no such file, or it cannot be read.
    """
    with _opened(path, progress) as source:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        try:
            while source.readinto(buffer):
                pass
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
        return source.digest


@contextmanager
def open_lines(path: Path, progress: Progress | None, bad: BadLines) -> Iterator[LineFile]:
    """Yield the lines of a file; `bad` is told of those that are too long.

    Raises:
        TraceError: there is no such file, or it cannot be read.
    """
    with _opened(path, progress) as source:
        yield LineFile(path, source, bad)


@contextmanager
def _opened(path: Path, progress: Progress | None) -> Iterator[_Source]:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            file = path.open("rb", buffering=0)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise TraceError(f"{path}: is {'a directory' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
    with file:
        if not found.st_size:
            raise TraceError(f"{path}: is empty")
        yield _Source(file, found.st_size, progress)
