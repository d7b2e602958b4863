"""Formats of trace files: their lines, and the fields of each format, for readers and writers."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.trace import BadLine

__all__ = [
    "BLOCK_TOKENS",
    "FINISHED",
    "FORMATS",
    "LOOKUP",
    "MOST_MICROS",
    "NO_PARENT",
    "STARTED",
    "AnyEvent",
    "BadLines",
    "BailianLine",
    "Finished",
    "Key",
    "Length",
    "LineError",
    "LineFile",
    "Lookup",
    "Mask",
    "Micros",
    "MooncakeLine",
    "Progress",
    "SchemaLine",
    "Started",
    "check_format",
    "decoder",
    "digest_of",
    "format_of",
    "open_lines",
    "signed_keys",
]

# Files of lines, plain or gzip, as a stream: a line that is too long is no line, and memory is bounded by one.

Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and the size of the file (of the compressed one, where it is compressed)."""
_MOST_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MOST_BAD_LINES = 100
_GZIP = b"\x1f\x8b"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineError(Exception):
    """A line is no request; the message names the field, the value and the allowed ones."""


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
        source: the bytes on disk.
        bad: called with each line that is no request.
    """

    def __init__(self, path: Path, source: _Source, bad: BadLines) -> None:
        self._path = path
        self._source = source
        self._bad = bad

    @property
    def digest(self) -> str:
        """Return a hash of the bytes read from the file, in hex: of all of it once its lines are at their end."""
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
                _skip_rest_of_line(file)
                yield None
            else:
                yield line.removeprefix(_BYTE_ORDER_MARK) if is_first else line
            is_first = False


def _skip_rest_of_line(file: io.BufferedReader) -> None:
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
    """Yield the lines of a file; `bad` is called with those that are too long.

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
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise TraceError(f"{path}: is a git-LFS pointer, and not the trace: `git lfs pull` brings that")
        file.seek(0)
        yield _Source(file, found.st_size, progress)


# Decodes lines into typed values; an error names the field, its value and the allowed ones.

Key = int | str
"""A block key: any 64 bits, as a number or a text; those above 2^63 - 1 are taken for the signed number of the same
bits. Other texts stand for a hash of theirs."""
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,19})")
MOST_MICROS = 1 << 60
_MOST_LENGTH = (1 << 31) - 1
Length = Annotated[int, msgspec.Meta(ge=0, le=_MOST_LENGTH)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=MOST_MICROS)]
_PATH = re.compile(r"^(?P<wanted>.*) - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_MOST_SHOWN = 60
_WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
Line = TypeVar("Line")


def decoder(kind: type[Line]) -> Callable[[bytes], Line]:
    """Return what decodes a line into a value of this kind, and raises `LineError` where it is none."""
    decode = msgspec.json.Decoder(kind).decode

    def decoded(line: bytes) -> Line:
        try:
            return decode(line)
        except _WRONG as error:
            raise LineError(_reason(error, line)) from None

    return decoded


def signed_keys(keys: Sequence[Key], name: str) -> list[int]:
    """Return keys as signed 64-bit numbers.

    Raises:
        LineError: one of them has more bits.
    """
    numbers = [key if isinstance(key, int) else _number_of(key) for key in keys]
    if not numbers or (min(numbers) >= -(1 << 63) and max(numbers) < 1 << 63):
        return numbers
    for place, number in enumerate(numbers):
        if not -(1 << 63) <= number < 1 << 64:
            raise LineError(f"{name}[{place}]: {_quoted(number)} has more than 64 bits")
    return [number - (1 << 64) if number >> 63 > 0 else number for number in numbers]


def _number_of(text: str) -> int:
    if _DECIMAL.fullmatch(text):
        return int(text)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _reason(error: Exception, line: bytes) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"is no UTF-8: {error.reason}"
    found = _PATH.match(str(error))
    if found is None:
        return str(error).replace("`", "")
    try:
        value = _quoted(_at(msgspec.json.decode(line), found["path"]))
    except (*_WRONG, LookupError, TypeError):  # the rest behind the field may be damaged as well
        value = "the value"
    return f"{found['path']}: {value} does not fit: {found['wanted'].replace('`', '')}"


def _at(value: Any, path: str) -> Any:
    for index, name in _STEP.findall(path):
        value = value[int(index)] if index else value[name]
    return value


def _quoted(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 512:
        return "a number of many digits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


# Lines of the Mooncake format: a turn of a dialogue each, with one id per block of its prompt.


class MooncakeLine(msgspec.Struct, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: milliseconds.
        input_length: tokens of the prompt.
        hash_ids: of its blocks; each names the whole prefix up to and including its block.
        output_length: tokens generated.
        session, session_id: of the conversation, under either name.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOST_MICROS / 1000)]
    input_length: Length
    hash_ids: list[Key]
    output_length: Length = 0
    session: int | str | None = None
    session_id: int | str | None = None

    @property
    def conversation(self) -> int | str | None:
        """Return what names the conversation, None where nothing does."""
        return self.session_id if self.session is None else self.session


# Lines of `event_publisher.log`, the original's, and of our own manager's events (wire.md 10.3).
#
# Only lookups and write sessions are requests. Events of other types, of which ours has more than the original, say
# what became of blocks; they are no bad lines.

LOOKUP = "GetCacheLocation"
STARTED = "StartWriteCache"
FINISHED = "FinishWriteCache"
Mask = int | list[bool]
"""The first so many positions, or those whose flag is true."""


class AnyEvent(msgspec.Struct):
    """What every event has.

    Attributes:
        type: what happened.
    """

    type: str


class Lookup(msgspec.Struct, kw_only=True):
    """Blocks were looked up.

    Attributes:
        source: the instance.
        trigger_time_us: unix time.
        query_type: how keys were matched.
        keys: of the blocks.
        tokens: of the prompt, where the keys were computed from them.
        block_mask: positions that the caller has itself.
        sw_size: blocks per window.
        location_spec_names: specs that were asked for; empty: all.
    """

    source: str
    trigger_time_us: Micros
    query_type: str = "prefix_match"
    keys: list[Key] = []
    tokens: list[int] = []
    block_mask: Mask | None = None
    sw_size: int = 0
    location_spec_names: list[str] = []


class Started(msgspec.Struct, kw_only=True):
    """A write session began.

    Attributes:
        source, trigger_time_us, keys, tokens: as of a lookup.
        write_session_id: names the session.
        block_mask: positions that need not be written: they are there.
    """

    source: str
    trigger_time_us: Micros
    write_session_id: str
    keys: list[Key] = []
    tokens: list[int] = []
    block_mask: Mask | None = None


class Finished(msgspec.Struct, kw_only=True):
    """A write session ended.

    Attributes:
        source: the instance.
        trigger_time_us: unix time.
        write_session_id: names the session.
        success_block: which of the positions that had to be written were; None: all.
    """

    source: str
    trigger_time_us: Micros
    write_session_id: str
    success_block: Mask | None = None


# Lines of the original optimizer's own schema: reads, writes and turns of dialogues, distinguished by their fields.


class SchemaLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request: a turn of a dialogue with `total_keys`, else a read with `query_type`, else a write.

    Attributes:
        instance_id: that is asked.
        timestamp_us: when.
        trace_id: names the request.
        keys: that are read, or of a write: written.
        tokens: of the prompt; the keys are computed from them where there are none.
        query_type: how keys are matched.
        block_mask: positions that the caller has itself.
        sw_size: blocks per window.
        location_spec_names: specs that are asked for; empty: all.
        input_len: tokens of the prompt.
        output_len: tokens generated.
        total_keys: that a turn writes, generated blocks included.
    """

    instance_id: str
    timestamp_us: Micros
    trace_id: str = ""
    keys: list[Key] = []
    tokens: list[int] = []
    query_type: str | None = None
    block_mask: Mask | None = None
    sw_size: int = 0
    location_spec_names: list[str] = []
    input_len: Length | None = None
    output_len: Length = 0
    total_keys: list[Key] | None = None


# Lines of the Bailian traces of Qwen: a turn of a dialogue each, with one hash per block's own content.

BLOCK_TOKENS = 16
NO_PARENT = -1


class BailianLine(msgspec.Struct, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: seconds.
        input_length: tokens of the prompt.
        hash_ids: of its blocks, 16 tokens each; equal content has equal ids, whatever stands before it.
        output_length: tokens generated.
        chat_id: of this turn.
        parent_chat_id: of the turn before, -1 for the first.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOST_MICROS / 1_000_000)]
    input_length: Length
    hash_ids: list[Key]
    output_length: Length = 0
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None


# Detects the format of a file from its first lines.

FORMATS = ("mooncake", "qwen_bailian", "publisher_log", "optimizer_schema")
_LINES_SNIFFED = 100
_FIELDS_OF_FORMATS = (  # in this order: fields that only this format has
    ("publisher_log", {"trigger_time_us"}),
    ("optimizer_schema", {"timestamp_us"}),
    ("qwen_bailian", {"hash_ids", "chat_id"}),
    ("qwen_bailian", {"hash_ids", "parent_chat_id"}),
    ("qwen_bailian", {"hash_ids", "turn"}),
    ("mooncake", {"hash_ids"}),
)


def check_format(name: str) -> str:
    """Return the name of a format.

    Raises:
        OptionError: there is none of this name.
    """
    if name not in FORMATS:
        raise OptionError(f"format: {name!r} is none; allowed: {', '.join(FORMATS)}")
    return name


def format_of(path: Path) -> str:
    """Return the format of a file.

    Raises:
        TraceError: it cannot be read, or its first lines are of no format.
    """
    with open_lines(path, None, BadLines()) as file:
        return _format_of(path, file)


def _format_of(path: Path, file: LineFile) -> str:
    for (_, line), _ in zip(file, range(_LINES_SNIFFED), strict=False):
        try:
            fields = set(_decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        for name, sign in _FIELDS_OF_FORMATS:
            if sign <= fields:
                return name
    raise TraceError(f"{path}: its first lines are of no known format ({', '.join(FORMATS)}); give the format")


_decode = msgspec.json.Decoder(dict[str, Any]).decode
