"""Whether a RocksDB still holds everything that was acknowledged, found out before it is opened for writing.

RocksDB itself ends at the first damaged record of its log without a word, since that is how a torn tail looks after a
power cut, and takes a missing log or a missing last part of its manifest for what there was. Two notes of our own tell
damage from a torn tail:

* Each batch holds a row of state: its own last sequence number, the last one that was synced before it, and how many
  blocks and documents there are. A later record proves with it that an earlier, unreadable one was synced.
* The mark, a small file beside the tables, has the last sequence number that was written and the last that was synced.
  It is written after the log and before anything is acknowledged. What was written counts while the host has not booted
  since, what was synced always. It is synced itself once a second at most, so after a power cut it may be older than
  the log: then less is known, and nothing wrong.

So missing changes are damage if a note says that they were there, or if a release before these notes wrote records
behind them. Otherwise they were never on the disk, and nothing that was promised to be durable is missing.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from rocksdict import AccessType, Options, Rdict

from kvcm.model.errors import StorageIOError
from kvcm.store.rocks_wal import BATCH_HEADER, BadBytes, LogRecord, read_log
from kvcm.store.synced_file import SyncedFile

__all__ = [
    "MARK",
    "REPAIR",
    "STATE_KEY",
    "UNKNOWN",
    "Base",
    "DamagedStoreError",
    "Gap",
    "LogsRead",
    "StoreMark",
    "StoredState",
    "check_database",
    "is_repair_interrupted",
    "log_paths",
    "manifest_number",
    "opened_tables",
    "read_base",
    "read_marked",
    "read_replayed_logs",
    "read_unanchored_logs",
]

MARK: Final = "kvcm.mark"
REPAIR: Final = "repair"
"""Name of the folder in which a repair makes a new database."""
STATE_KEY: Final = b"state"
UNKNOWN: Final = -1
_STATE: Final = Struct(">QQqq")
_MARKED: Final = Struct(">16sQQQQqq")
_CHECKSUM: Final = Struct(">I")
_COPY_BYTES: Final = 4096  # two copies of the mark, in sectors of their own: one bit loses one of them at most
_STATE_HEAD: Final = b"\x01" + bytes((len(STATE_KEY),)) + STATE_KEY + bytes((_STATE.size,))
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class DamagedStoreError(StorageIOError):
    """A database lost something that it had; the message says what, and what to do."""

    def __init__(self, directory: Path, damage: str) -> None:
        super().__init__(
            f"{directory} is damaged: {damage}. `kvcm index repair` keeps everything that can be read and counts what "
            "is gone; or put a backup of the directory in its place"
        )


class StoredState(NamedTuple):
    """The row of state of a batch.

    Attributes:
        sequence: number of the last change of the batch.
        synced: number of the last change that was synced before it.
        blocks: number of blocks, `UNKNOWN` where they were not counted.
        documents: number of documents, likewise.
    """

    sequence: int
    synced: int
    blocks: int = UNKNOWN
    documents: int = UNKNOWN

    def encoded(self) -> bytes:
        """Return the value of the row."""
        return _STATE.pack(*self)

    @classmethod
    def decoded(cls, value: bytes | None) -> StoredState | None:
        """Read a row; None if it is not there, or another release's."""
        return cls(*_STATE.unpack(value)) if value is not None and len(value) == _STATE.size else None

    @classmethod
    def of_batch(cls, batch: bytes) -> StoredState | None:
        """Return the state that a batch begins with; None if it has none."""
        at = BATCH_HEADER.size + len(_STATE_HEAD)
        if batch[BATCH_HEADER.size : at] != _STATE_HEAD or len(batch) < at + _STATE.size:
            return None
        return cls(*_STATE.unpack_from(batch, at))


class Marked(NamedTuple):
    """What the mark says.

    Attributes:
        boot_id: of the host while it was written; zeros where that is not known.
        written: number of the last change that the log had.
        synced: number of the last change that the disk had.
        manifest: number of the manifest, a new one whenever the database is opened.
        opened: number of the last change before that; all later batches have a row of state.
        blocks: number of blocks with the last change that was written, `UNKNOWN` where they were not counted.
        documents: number of documents, likewise.
    """

    boot_id: bytes
    written: int
    synced: int
    manifest: int
    opened: int
    blocks: int
    documents: int

    @property
    def durable(self) -> int:
        """Number of the last change that has to be there."""
        return max(self.written, self.synced) if self.boot_id == _boot_id() != bytes(16) else self.synced


class StoreMark(SyncedFile):
    """The mark of one directory, and the lock that keeps a second process of this release from it.

    Raises:
        StorageIOError: another process has it.
        OSError: it cannot be made or opened.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(os.open(directory / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StorageIOError(
                f"{directory} is in use by another process: stop it, or choose another data directory"
            ) from None
        self._boot_id = _boot_id()
        self._opened = (0, 0)

    def begin(self, manifest: int, state: StoredState) -> None:
        """Note that the database was opened, with which manifest and state.

        Raises:
            OSError: the disk failed.
        """
        self._opened = (manifest, state.sequence)
        self._write(state)
        self.sync()

    def note(self, state: StoredState) -> None:
        """Note how far the log and the disk are. Where that fails the mark is older, and knows less."""
        with suppress(OSError):
            self._write(state)

    def adopt(self, path: Path) -> None:
        """Say what another mark says.

        Raises:
            OSError: the disk failed.
        """
        os.pwrite(self._descriptor, path.read_bytes(), 0)
        os.fsync(self._descriptor)

    def _write(self, state: StoredState) -> None:
        body = _MARKED.pack(self._boot_id, state.sequence, state.synced, *self._opened, state.blocks, state.documents)
        copy = body + _CHECKSUM.pack(zlib.crc32(body))
        os.pwrite(self._descriptor, copy.ljust(_COPY_BYTES, b"\0") + copy, 0)
        self._is_synced = False


def read_marked(directory: Path) -> Marked | None:
    """Return what the mark says, None where there is none that can be read."""
    with suppress(OSError):
        data = (directory / MARK).read_bytes()
        copies = (data[at : at + _MARKED.size + _CHECKSUM.size] for at in (0, _COPY_BYTES))
        return max((found for copy in copies if (found := _decoded(copy))), key=lambda each: each.written, default=None)
    return None


def _decoded(copy: bytes) -> Marked | None:
    body, checksum = copy[: _MARKED.size], copy[_MARKED.size :]
    fits = len(checksum) == _CHECKSUM.size and _CHECKSUM.unpack(checksum)[0] == zlib.crc32(body)
    return Marked(*_MARKED.unpack(body)) if fits else None


def _boot_id() -> bytes:
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


# ── the logs ──


class Gap(NamedTuple):
    """Changes that are not in the logs, though later ones are, or though they were acknowledged.

    Attributes:
        where: what cannot be read, or is not there.
        first: sequence number of the first missing change.
        changes: number of missing changes.
        is_damage: whether they were on the disk once.
    """

    where: str
    first: int
    changes: int
    is_damage: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.changes:,} change{'s are' if self.changes > 1 else ' is'} missing"


class LogsRead(NamedTuple):
    """What the logs of a database hold.

    Attributes:
        gaps: in order.
        last: sequence number of the last readable change, 0 for none.
    """

    gaps: list[Gap]
    last: int


def log_paths(directory: Path) -> list[Path]:
    """Return the logs of a database, oldest first."""
    return sorted((path for path in directory.glob("*.log") if path.stem.isdigit()), key=lambda path: int(path.stem))


class _Scan:
    """Finds what logs lack, from record to record.

    Args:
        expected: sequence number that they have to begin with at most, 0 for unknown.
    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.last = 0
        self.synced = 0
        self.missing: list[tuple[str, int, int, bool]] = []  # where, first, count, whether of a release without states
        self._where = ""  # a place that cannot be read, since the last record

    def read(self, path: Path) -> None:
        """Read the next log."""
        data = path.read_bytes()
        for item in read_log(data):
            if isinstance(item, BadBytes):
                self._where = self._where or f"{path.name} cannot be read at byte {item.offset:,} of {len(data):,}"
            else:
                self._follow(item, path.name)

    def _follow(self, record: LogRecord, name: str) -> None:
        state = StoredState.of_batch(record.batch)
        if self.expected and record.sequence > self.expected:
            where = self._where or (f"{name} has a hole" if record.offset else f"the log before {name} is missing")
            self.missing.append((where, self.expected, record.sequence - self.expected, state is None))
        self._where = ""
        self.last = max(self.last, record.next_sequence - 1)
        self.expected = max(self.expected, record.next_sequence)
        self.synced = max(self.synced, state.synced if state is not None else 0)

    def gaps(self, durable: int, end: str) -> list[Gap]:
        """Return the missing changes, with everything up to `durable` that is not there behind the last record."""
        durable = max(durable, self.synced)
        found = [
            Gap(where, first, count, is_damage=is_old or durable >= first)
            for where, first, count, is_old in self.missing
        ]
        if durable >= self.expected > 0:
            found.append(Gap(self._where or end, self.expected, durable - self.expected + 1, is_damage=True))
        return found


def _read_logs(paths: Sequence[Path], expected: int, durable: int) -> LogsRead:
    """Read logs, and find what they lack.

    Args:
        paths: of the logs that a start replays, oldest first.
        expected: sequence number that the first one has to begin with at most, 0 for unknown.
        durable: number of the last change that has to be there, as far as a mark says so.

    Raises:
        OSError: one cannot be read.
    """
    scan = _Scan(expected)
    for path in paths:
        scan.read(path)
    end = f"{paths[-1].name} ends too early" if paths else "its log is missing"
    return LogsRead(scan.gaps(durable, end), scan.last)


# ── the database ──

_OWN_FILES: Final = ("*.sst", "*.log", "MANIFEST-*", "CURRENT")


def is_repair_interrupted(directory: Path) -> bool:
    """Return whether a repair was moving files when it ended, so that only another one can tell what is where."""
    return any((directory / REPAIR / step).exists() for step in ("ready", "placing"))


def _database_files(directory: Path) -> list[Path]:
    """Return the files of a database that hold something, none where a new one may be made."""
    return [path for pattern in _OWN_FILES for path in directory.glob(pattern)]


class Base(NamedTuple):
    """A database without its logs, as its manifest has it.

    Attributes:
        least_log: number of the oldest log that a start replays.
        sequence: number of the last change that the manifest knows; logs may have changes before it.
        state: row of state of the last batch in tables.
    """

    least_log: int
    sequence: int
    state: StoredState | None


@contextmanager
def opened_tables(directory: Path, options: Options) -> Iterator[Rdict]:
    """Open the tables of a database without its logs, and without changing anything.

    Raises:
        Exception: they cannot be opened; RocksDB's errors have no type of their own.
    """
    with tempfile.TemporaryDirectory(prefix="kvcm-no-log-") as no_logs:
        options.create_if_missing(False)
        options.set_wal_dir(no_logs)
        database = Rdict(str(directory), options, access_type=AccessType.read_only())
        try:
            yield database
        finally:
            database.close()


def read_base(directory: Path, options: Options) -> Base:
    """Read how far the tables of a database go.

    Raises:
        Exception: they cannot be read; RocksDB's errors have no type of their own.
    """
    with opened_tables(directory, options) as tables:
        least_log = tables.property_int_value("rocksdb.min-log-number-to-keep") or 0
        return Base(least_log, tables.latest_sequence_number(), StoredState.decoded(tables.get(STATE_KEY)))


def manifest_number(directory: Path) -> int:
    """Return the number of the manifest in use, that of the newest one where CURRENT is damaged, 0 for none."""
    with suppress(OSError, ValueError):
        number = int((directory / "CURRENT").read_text().strip().removeprefix("MANIFEST-"))
        if (directory / f"MANIFEST-{number:06}").exists():
            return number
    with suppress(OSError):
        numbers = (path.name.removeprefix("MANIFEST-") for path in directory.glob("MANIFEST-*"))
        return max((int(number) for number in numbers if number.isdigit()), default=0)
    return 0


def read_replayed_logs(directory: Path, base: Base) -> LogsRead:
    """Read the logs that a start replays, and find what they lack.

    Raises:
        OSError: one cannot be read.
    """
    marked = read_marked(directory)
    expected = 0  # unknown: opened last by a release without a mark, or the mark is gone
    if marked is not None and marked.manifest == manifest_number(directory):
        expected = max(marked.opened, base.state.sequence if base.state else 0) + 1
    paths = [path for path in log_paths(directory) if int(path.stem) >= base.least_log]
    return _read_logs(paths, expected, marked.durable if marked else 0)


def read_unanchored_logs(directory: Path) -> LogsRead:
    """Read all logs of a database whose tables cannot be opened, so that it is not known where they begin.

    Raises:
        OSError: one cannot be read.
    """
    marked = read_marked(directory)
    return _read_logs(log_paths(directory), 0, marked.durable if marked else 0)


def check_database(directory: Path, new_options: Callable[[], Options]) -> None:
    """Return if a database holds all that it has to, as far as its manifest and logs show.

    Args:
        directory: one without a database is not damaged.
        new_options: of the database.

    Raises:
        DamagedStoreError: something is missing; the message says what, and how much.
        Exception: its tables cannot be opened; RocksDB's errors have no type of their own.
        OSError: a log cannot be read.
    """
    if is_repair_interrupted(directory):
        raise DamagedStoreError(directory, "a repair of it was interrupted, and has to be run again")
    if not _database_files(directory):
        return
    if not (directory / "CURRENT").exists():
        raise DamagedStoreError(directory, "CURRENT is missing, so its tables and logs belong to nothing")
    found = read_replayed_logs(directory, read_base(directory, new_options()))
    damage = [gap for gap in found.gaps if gap.is_damage]
    if damage:
        raise DamagedStoreError(directory, "; ".join(map(str, damage)))
    if not log_paths(directory):
        raise DamagedStoreError(directory, "its log is missing")
