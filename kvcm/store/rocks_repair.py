"""Repair of a damaged RocksDB: everything that can be read goes into a new one, and what cannot is counted.

RocksDB's own repair drops a whole table for one damaged block, and the rest of a log for one damaged record. Here

* logs are written again from all of their records that can be read, so that RocksDB replays those behind damage, too;
* tables are read from one damaged block to the next. Rows of other tables in the range of a damaged block are read one
  by one: those with a newer version than the block's are certain. Where only an older version can be read, that block
  of KV is kept as *doubtful*: its last change may be among the losses. The manager verifies packed files and compares
  stamps of pools, and other storages never use a name twice, so an old record costs a miss and never gives other bytes;
* where the manifest is damaged, or a table is missing, RocksDB's repair puts the other tables together, on links;
* documents of the registry come from their copy (`kvcm.store.rocks_copy`).

Checksums are never ignored. The damaged files stay as they were, in a directory beside the new ones.

::

    DIRECTORY/repair/making   the new database while it is made; goes with the next attempt
    DIRECTORY/repair/ready    complete; the damaged files are moved away
    DIRECTORY/repair/placing  they are away; the new files come to their place, CURRENT last
    DIRECTORY/damaged-N       the damaged files
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import msgspec
from rocksdict import DBRecoveryMode, Options, Rdict, ReadOptions, WriteBatch

from kvcm.model.errors import StorageIOError
from kvcm.store.load_progress import LoadProgress
from kvcm.store.rocks import (
    DOCUMENTS,
    FORMAT_KEY,
    REGISTRY,
    Row,
    database_options,
    decode_row,
    make_private,
    open_database,
    row_prefix,
    row_title,
    unopened,
)
from kvcm.store.rocks_check import (
    MARK,
    REPAIR,
    STATE_KEY,
    UNKNOWN,
    LogsRead,
    StoredState,
    StoreMark,
    is_repair_interrupted,
    log_paths,
    manifest_number,
    read_base,
    read_marked,
    read_replayed_logs,
    read_unanchored_logs,
)
from kvcm.store.rocks_copy import read_copy
from kvcm.store.rocks_wal import LogRecord, encode_log, read_log

__all__ = [
    "Found",
    "Hole",
    "RepairNote",
    "Salvage",
    "is_document",
    "read_repairs",
    "repair_database",
    "survey_database",
]

_NOTES: Final = "kvcm.repairs"
_DAMAGED: Final = "damaged-"
_ADDRESS: Final = Struct(">cIq")  # of rows of blocks (kvcm/index/backends/rocks.py)
_BATCH_ROWS: Final = 4096
_KEY_BYTES: Final = 256  # of the keys between which the end of a damaged block is searched
_REGISTRY: Final = row_prefix(REGISTRY)
_KEPT_DOCUMENTS: Final = (b"instance/", b"group/", b"storage/")


class Hole(NamedTuple):
    """A range of keys that cannot be read as a whole.

    Attributes:
        after: the last readable key before it, empty for none.
        before: the first readable key behind it, empty for none.
        reason: what RocksDB says.
    """

    after: bytes
    before: bytes
    reason: str


@dataclass(slots=True)
class Found:
    """What a damaged database still holds.

    Attributes:
        reasons: why its tables cannot be opened as they are, if they cannot.
        logs: what its logs hold and lack.
        holes: in its tables.
        blocks: that are there.
        documents: that are there.
        doubtful: of the blocks, those whose last change may be missing.
        from_copy: documents of the registry that only their copy has.
        state: with the last change, as far as that is known.
        moved_to: where the damaged files are; None as long as nothing is repaired.
        is_interrupted: whether nothing is known, since a repair was interrupted.
    """

    reasons: list[str] = field(default_factory=list)
    logs: LogsRead = field(default_factory=lambda: LogsRead([], 0))
    holes: list[Hole] = field(default_factory=list)
    blocks: int = 0
    documents: int = 0
    doubtful: int = 0
    from_copy: int = 0
    state: StoredState | None = None
    moved_to: Path | None = None
    is_interrupted: bool = False

    @property
    def lost_changes(self) -> int:
        """Changes that the logs lack, though they were on the disk."""
        return sum(gap.changes for gap in self.logs.gaps if gap.is_damage)

    @property
    def lost_blocks(self) -> int | None:
        """Blocks that were stored and are not there; None where that is not known."""
        return _missing(self.state.blocks if self.state else UNKNOWN, self.blocks)

    @property
    def lost_documents(self) -> int | None:
        """Documents that were stored and are not there; None where that is not known."""
        return _missing(self.state.documents if self.state else UNKNOWN, self.documents)

    @property
    def is_incomplete(self) -> bool:
        """Whether something is gone, or may be."""
        return bool(self.lost_blocks != 0 or self.lost_documents != 0 or self.lost_changes or self.doubtful)

    def sentences(self) -> Iterator[str]:
        """Yield the faults and the losses, for people."""
        if self.is_interrupted:
            yield "a repair was interrupted, and has to be run again"
            return
        yield from self.reasons
        for gap in self.logs.gaps:
            if gap.is_damage:
                yield str(gap)
        for hole in self.holes:
            yield f"rows behind {_title(hole.after)} and before {_title(hole.before)} cannot be read: {hole.reason}"
        yield f"{_lost(self.lost_blocks, 'blocks')}, {self.blocks:,} can be read"
        yield f"{_lost(self.lost_documents, 'documents')}, {self.documents:,} can be read"
        if self.from_copy:
            yield f"{self.from_copy:,} documents of the registry come from their copy"
        if self.doubtful:
            yield f"of {self.doubtful:,} blocks an older record is kept, since a newer one may be gone"


def _lost(count: int | None, what: str) -> str:
    return f"an unknown number of {what} is gone" if count is None else f"{count:,} {what} are gone"


def _title(key: bytes) -> str:
    if key[:1] == DOCUMENTS:
        return row_title((key, b""))
    if len(key) == _ADDRESS.size:
        return "block {2} of registration {1}".format(*_ADDRESS.unpack(key))
    return f"row {key.hex()}" if key else "the end"


def _missing(stored: int, found: int) -> int | None:
    return max(stored - found, 0) if stored != UNKNOWN else None


class RepairNote(msgspec.Struct, frozen=True):
    """What a repair did: one line of a file beside the database.

    Attributes:
        at: unix seconds.
        lost_changes: that the logs lacked.
        lost_blocks: that are gone; None where that is not known.
        lost_documents: that are gone; None where that is not known.
        doubtful_blocks: of which an older record was kept.
        found: sentences.
        moved_to: where the damaged files are.
    """

    at: float
    lost_changes: int
    lost_blocks: int | None
    lost_documents: int | None
    doubtful_blocks: int
    found: list[str]
    moved_to: str


def read_repairs(directory: Path) -> list[RepairNote]:
    """Return the notes of all repairs of a database, oldest first; lines that cannot be read are left out."""
    notes = []
    with suppress(OSError):
        for line in (directory / _NOTES).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                notes.append(msgspec.json.decode(line, type=RepairNote))
    return notes


def _note(directory: Path, found: Found, now: float, moved_to: Path) -> None:
    note = RepairNote(
        at=now,
        lost_changes=found.lost_changes,
        lost_blocks=found.lost_blocks,
        lost_documents=found.lost_documents,
        doubtful_blocks=found.doubtful,
        found=list(found.sentences()),
        moved_to=str(moved_to),
    )
    with (directory / _NOTES).open("ab") as file:
        file.write(msgspec.json.encode(note) + b"\n")
        os.fsync(file.fileno())


class Salvage:
    """Sees every row that is kept, and adds rows of its own; this one adds none."""

    def see(self, key: bytes, value: bytes) -> bytes:
        """Return the value to keep for a row."""
        return value

    def more(self) -> Iterable[Row]:
        """Return further rows, when all were seen."""
        return ()


def survey_database(directory: Path, progress: LoadProgress = lambda _done, _total: None) -> Found:
    """Count what a repair would keep, and change nothing. Blocks.

    Raises:
        StorageIOError: it cannot be read at all.
    """
    if is_repair_interrupted(directory):
        return Found(is_interrupted=True)
    try:
        with suppress(FileNotFoundError):
            shutil.rmtree(directory / REPAIR / "making")
        return _Repair(directory, progress).keep(lambda _key, _value: None)
    except StorageIOError:
        raise
    except Exception as error:  # RocksDB's errors have no type of their own
        raise unopened(directory, error) from error
    finally:
        shutil.rmtree(directory / REPAIR / "making", ignore_errors=True)
        with suppress(OSError):
            (directory / REPAIR).rmdir()


def repair_database(
    directory: Path, salvage: Salvage, now: float, progress: LoadProgress = lambda _done, _total: None
) -> Found | None:
    """Put a new database, with everything that can be read, in the place of a damaged one. Blocks.

    A repair that was interrupted before goes on.

    Args:
        directory: of the damaged database.
        salvage: sees every row.
        now: unix seconds, for the note of the repair.
        progress: receives the number of rows that were kept.

    Returns:
        What was found; None where an interrupted repair was only completed.

    Raises:
        StorageIOError: another process has the directory open, or the disk failed.
    """
    try:
        make_private(directory)
        mark = StoreMark(directory)
        try:
            return _repair(directory, mark, salvage, now, progress)
        finally:
            mark.close()
    except StorageIOError:
        raise
    except Exception as error:  # RocksDB's errors have no type of their own
        raise unopened(directory, error) from error


def _repair(directory: Path, mark: StoreMark, salvage: Salvage, now: float, progress: LoadProgress) -> Found | None:
    work, found = directory / REPAIR, None
    if not is_repair_interrupted(directory):
        shutil.rmtree(work, ignore_errors=True)
        found = _Repair(directory, progress).copy(salvage)
        (work / "making" / "new").rename(work / "ready")
        _sync(work)
        found.moved_to = _damaged_directory(directory)
        _note(work / "ready", found, now, found.moved_to)
    if (work / "ready").exists():
        _move_away(directory)
    _place(directory, mark)
    return found


class _Repair:
    """One attempt.

    Args:
        directory: of the damaged database; nothing in it is changed but in its folder of repairs.
        progress: receives the number of rows.
    """

    def __init__(self, directory: Path, progress: LoadProgress) -> None:
        self._directory = directory
        self._progress = progress
        self._work = directory / REPAIR / "making"
        self._found = Found()
        self._marked = read_marked(directory)
        self._copy = read_copy(directory, manifest_number(directory))
        self._in_database = set[bytes]()  # of the documents that are in the copy
        make_private(self._work)

    def copy(self, salvage: Salvage) -> Found:
        """Make the new database, `new`."""
        database = open_database(self._work / "new")
        try:
            writer = _Writer(database)
            found = self.keep(lambda key, value: writer.put(key, salvage.see(key, value)))
            found.documents += writer.put_new(salvage.more())
            writer.finish(found)
        finally:
            database.close()
        mark = StoreMark(self._work / "new")
        mark.begin(manifest_number(self._work / "new"), writer.state)
        mark.close()
        notes = self._directory / _NOTES
        if notes.exists():
            shutil.copyfile(notes, self._work / "new" / _NOTES)
        _sync_all(self._work / "new")
        return found

    def keep(self, keep: Callable[[bytes, bytes], None]) -> Found:
        """Find all rows that can be read, in order of their keys."""
        batches = self._read_logs()
        as_stored = self._open_as_stored(batches)
        try:
            if as_stored is None or self._lags(as_stored):
                self._keep_all(self._open_put_together(batches), None, keep)
            else:
                self._keep_all(as_stored, lambda: self._open_put_together(batches), keep)
        finally:
            if as_stored is not None:
                as_stored.close()
        self._keep_copy(keep)
        return self._found

    def _keep_copy(self, keep: Callable[[bytes, bytes], None]) -> None:
        if self._copy is not None:
            for key, value in self._copy.rows.items():
                keep(key, value)
            self._found.documents += len(self._copy.rows)
            self._found.from_copy = len(self._copy.rows) - len(self._in_database)

    def _read_logs(self) -> dict[str, list[bytes]]:
        """Return the readable batches of each log, and find out what they lack."""
        try:
            base = read_base(self._directory, database_options())
            self._found.logs = read_replayed_logs(self._directory, base)
        except Exception as error:  # RocksDB's errors have no type of their own
            self._found.reasons.append(_one_line(error))
            self._found.logs = read_unanchored_logs(self._directory)
        return {
            path.name: [each.batch for each in read_log(path.read_bytes()) if isinstance(each, LogRecord)]
            for path in log_paths(self._directory)
        }

    def _open_as_stored(self, batches: dict[str, list[bytes]]) -> Rdict | None:
        """Open links to the tables as the manifest has them, with the readable parts of the logs."""
        target = self._linked("stored", batches)
        for path in [self._directory / "CURRENT", *self._directory.glob("MANIFEST-*")]:
            if path.exists():
                shutil.copyfile(path, target / path.name)
        try:
            return Rdict(str(target), _salvage_options())
        except Exception as error:  # RocksDB's errors have no type of their own
            reason = _one_line(error).replace(str(target), str(self._directory))
            if reason not in self._found.reasons:
                self._found.reasons.append(reason)
            return None

    def _open_put_together(self, batches: dict[str, list[bytes]]) -> Rdict:
        """Open links to those tables that are not damaged, put together by RocksDB without a manifest."""
        target = self._linked("tables", batches)
        Rdict.repair(str(target), _salvage_options())
        return Rdict(str(target), _salvage_options())

    def _linked(self, name: str, batches: dict[str, list[bytes]]) -> Path:
        target = self._work / name
        shutil.rmtree(target, ignore_errors=True)
        make_private(target)
        for path in self._directory.glob("*.sst"):
            _link(path, target / path.name)
        for log, kept in batches.items():
            with (target / log).open("wb") as file:
                file.writelines(encode_log(kept))
        return target

    def _lags(self, database: Rdict) -> bool:
        """Return whether the manifest is older than the tables, since its end is missing."""
        listed = {Path(each["name"]).name for each in database.live_files()}
        others = {path.name for path in self._directory.glob("*.sst")} - listed
        return bool(others) and bool(self._found.lost_changes)

    def _keep_all(
        self, database: Rdict, others: Callable[[], Rdict] | None, keep: Callable[[bytes, bytes], None]
    ) -> None:
        other: Rdict | None = None
        done = 0
        for item in _rows(database):
            if isinstance(item, Hole):
                reason = item.reason.replace(str(self._work / "stored"), str(self._directory))
                self._found.holes.append(item._replace(reason=reason))
                if others is not None:
                    other = other or others()
                    self._keep_in_hole(database, other, item, keep)
                continue
            self._count(item.key, item.value, keep)
            done += 1
            if done % _BATCH_ROWS == 0:
                self._progress(done, 0)
        self._found.state = self._last_state(database)
        if other is not None:
            other.close()
        self._progress(done, 0)

    def _last_state(self, database: Rdict) -> StoredState | None:
        """Return the state with the last change, None where another release wrote that, or it cannot be read."""
        marked, states = self._marked, list[StoredState | None]()
        with suppress(Exception):  # it may lie in a damaged block
            states.append(StoredState.decoded(database.get(STATE_KEY)))
        if marked is not None and marked.durable >= marked.written:
            states.append(StoredState(marked.written, marked.synced, marked.blocks, marked.documents))
        last = max(database.latest_sequence_number(), marked.durable if marked else 0)
        return next((state for state in states if state is not None and state.sequence >= last), None)

    def _keep_in_hole(self, database: Rdict, other: Rdict, hole: Hole, keep: Callable[[bytes, bytes], None]) -> None:
        for item in _rows(other, hole.after, hole.before):
            if isinstance(item, Hole) or item.key == hole.after:
                continue
            try:
                value = database.get(item.key)  # looks into newer tables first, and fails at the damaged block
            except Exception:
                if not _may_be_older(item.key):
                    continue
                value = item.value
                self._found.doubtful += item.key[:1] == b"b"
            if value is not None:
                self._count(item.key, value, keep)

    def _count(self, key: bytes, value: bytes, keep: Callable[[bytes, bytes], None]) -> None:
        if key in (STATE_KEY, FORMAT_KEY):
            return
        if self._copy is not None and key.startswith(_REGISTRY):
            if key in self._copy.rows:
                self._in_database.add(key)
                return
            if self._copy.is_whole:  # it was removed
                return
        if key[:1] == b"b":
            self._found.blocks += 1
        elif is_document(key, value):
            self._found.documents += 1
        keep(key, value)


class _KeyValue(NamedTuple):
    key: bytes
    value: bytes


def _rows(database: Rdict, begin: bytes = b"", end: bytes = b"") -> Iterator[_KeyValue | Hole]:
    """Yield the rows with keys from `begin` to before `end`, and the holes between them."""
    options = ReadOptions()
    if end:
        options.set_iterate_upper_bound(end)
    options.set_readahead_size(4 << 20)
    last, start = begin, begin
    while True:
        rows = database.iter(options)
        rows.seek(start)
        while rows.valid():
            last = rows.key()
            yield _KeyValue(last, rows.value())
            rows.next()
        try:
            rows.status()
        except Exception as error:  # RocksDB's errors have no type of their own
            start = _readable_from(database, options, last)
            before = _key_at(database, options, start) if start else None
            yield Hole(last, before or b"", _one_line(error))
            if not before:
                return
        else:
            return


def _readable_from(database: Rdict, options: ReadOptions, last: bytes) -> bytes:
    """Return where rows behind a damaged block can be read again; empty for nowhere."""
    low = int.from_bytes(last[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"))
    most, step = (1 << 8 * _KEY_BYTES) - 1, 1
    while _key_at(database, options, _as_key(min(low + step, most))) is None:  # nearby first: behind it may be another
        if low + step >= most:
            return b""
        step *= 2
    bad, good = low + step // 2, min(low + step, most)
    while good - bad > 1:
        middle = (good + bad) // 2
        if _key_at(database, options, _as_key(middle)) is None:
            bad = middle
        else:
            good = middle
    return _as_key(good)


def _as_key(number: int) -> bytes:
    return number.to_bytes(_KEY_BYTES)


def _key_at(database: Rdict, options: ReadOptions, key: bytes) -> bytes | None:
    """Return the first key at or behind one; empty at the end, None where that cannot be read."""
    rows = database.iter(options)
    rows.seek(key)
    if rows.valid():
        return bytes(rows.key())
    try:
        rows.status()
    except Exception:  # RocksDB's errors have no type of their own
        return None
    return b""


def is_document(key: bytes, value: bytes) -> bool:
    """Return whether a row is of a document, and not of how one ended."""
    if key[:1] != DOCUMENTS:
        return False
    with suppress(StorageIOError):
        return not decode_row(key, value).table.endswith(".ended")
    return True


def _may_be_older(key: bytes) -> bool:
    """Return whether an older version of a row is better than none: not of a key, an account, a session or a pin."""
    if key[:1] != DOCUMENTS:
        return True
    return key.startswith(_REGISTRY) and key.removeprefix(_REGISTRY).startswith(_KEPT_DOCUMENTS)


class _Writer:
    """Writes rows to the new database."""

    def __init__(self, database: Rdict) -> None:
        self._database = database
        self._batch = WriteBatch(raw_mode=True)
        self.state = StoredState(0, 0)  # when all rows are written

    def put(self, key: bytes, value: bytes) -> None:
        """Write a row."""
        self._batch.put(key, value)
        if self._batch.len() >= _BATCH_ROWS:
            self._write()

    def put_new(self, rows: Iterable[Row]) -> int:
        """Write rows, and return how many of them were not there."""
        self._write()
        new = 0
        for key, value in rows:
            new += self._database.get(key) is None
            self.put(key, value)
        return new

    def finish(self, found: Found) -> None:
        """Write the state, and everything to tables."""
        self._write()
        sequence = self._database.latest_sequence_number() + 1
        self.state = StoredState(sequence, sequence, found.blocks, found.documents)
        self._database.put(STATE_KEY, self.state.encoded())
        self._database.flush()

    def _write(self) -> None:
        if self._batch.len():
            self._database.write(self._batch)
            self._batch = WriteBatch(raw_mode=True)


def _salvage_options() -> Options:
    options = database_options()
    options.create_if_missing(False)
    options.set_wal_recovery_mode(DBRecoveryMode.skip_any_corrupted_record())  # of whole records; they were checked
    options.set_disable_auto_compactions(True)  # one would fail at a damaged block
    return options


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# ── files ──


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # RocksDB never changes a table
    except OSError:
        shutil.copyfile(source, target)


def _damaged_directory(directory: Path) -> Path:
    """Make the directory that the damaged files are moved to."""
    numbers = [int(each.name[len(_DAMAGED) :]) for each in directory.glob(f"{_DAMAGED}[0-9]*")]
    target = directory / f"{_DAMAGED}{max(numbers, default=0) + 1}"
    target.mkdir(mode=0o700)
    return target


def _move_away(directory: Path) -> None:
    """Move the damaged files to the last directory that was made for them."""
    numbers = [int(each.name[len(_DAMAGED) :]) for each in directory.glob(f"{_DAMAGED}[0-9]*")]
    target = directory / f"{_DAMAGED}{max(numbers)}"
    for path in directory.iterdir():
        if path.is_file() and path.name not in (MARK, "LOCK"):
            path.rename(target / path.name)
    _sync(target)
    _sync(directory)
    (directory / REPAIR / "ready").rename(directory / REPAIR / "placing")


def _place(directory: Path, mark: StoreMark) -> None:
    """Move the new files to their place; the mark before the last of them, since that makes them a database."""
    placing = directory / REPAIR / "placing"
    if (placing / MARK).exists():
        mark.adopt(placing / MARK)
    for path in sorted(placing.iterdir(), key=lambda path: path.name == "CURRENT"):
        if path.is_file() and path.name not in (MARK, "LOCK"):
            _sync(directory)
            path.rename(directory / path.name)
    _sync(directory)
    shutil.rmtree(directory / REPAIR)


def _sync_all(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
