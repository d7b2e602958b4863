"""Opening the RocksDB of one directory, and reading what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rocksdict import BlockBasedOptions, DBCompressionType, Options, Rdict, ReadOptions

from kvcm.model.errors import StorageIOError

__all__ = ["FORMAT_VERSION", "Row", "open_database", "prefix_end", "read_rows"]

Row = tuple[bytes, bytes]
"""Key and value."""

FORMAT_VERSION: Final = 1

_FORMAT_KEY: Final = b"format"
_MEBIBYTE: Final = 1 << 20


def open_database(directory: Path) -> Rdict:
    """Open the database in `directory`, or make one there, readable by this user only. Blocks.

    Raises:
        StorageIOError: another process has it open, another release wrote it, or it cannot be read.
    """
    try:
        _make_private(directory)
        database = Rdict(str(directory), _options())
    except Exception as error:  # RocksDB's errors have no type of their own
        raise _unopened(directory, error) from error
    try:
        _check_format(directory, database)
    except BaseException:
        database.close()
        raise
    return database


def read_rows(database: Rdict, prefix: bytes) -> Iterator[Row]:
    """Yield the rows whose key begins with `prefix`, ascending.

    Raises:
        StorageIOError: a row is damaged.
    """
    options = ReadOptions()
    if prefix:
        options.set_iterate_upper_bound(prefix_end(prefix))
    options.set_readahead_size(4 * _MEBIBYTE)
    rows = database.iter(options)
    rows.seek(prefix)
    while rows.valid():
        yield rows.key(), rows.value()
        rows.next()
    try:
        rows.status()  # an iterator ends at a damaged block as if it had come to the end
    except Exception as error:
        raise StorageIOError(f"{database.path()} is damaged: {error}; {_REPAIR}") from error


def prefix_end(prefix: bytes) -> bytes:
    """Return the least key above all keys that begin with `prefix`, unless all its bytes are 255."""
    return (int.from_bytes(prefix) + 1).to_bytes(len(prefix))


_REPAIR = "put a backup of the directory in its place, or move it away to start with an empty index"


def _make_private(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        parent = os.open(directory.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    directory.chmod(0o700)


def _unopened(directory: Path, error: Exception) -> StorageIOError:
    if f"{directory}/LOCK" in str(error):
        return StorageIOError(f"{directory} is in use by another process: stop it, or choose another data directory")
    return StorageIOError(f"{directory} cannot be opened: {error}; {_REPAIR}")


def _check_format(directory: Path, database: Rdict) -> None:
    written = database.get(_FORMAT_KEY)
    ours = str(FORMAT_VERSION).encode()
    if written is None and next(read_rows(database, b""), None) is None:
        database[_FORMAT_KEY] = ours
    elif written != ours:
        found = written.decode(errors="replace") if written else "missing"
        raise StorageIOError(
            f"{directory} has format version {found}, this release reads version {FORMAT_VERSION}: start the release "
            "that wrote it, or move the index with its `kvcm index export` and our `kvcm index import`"
        )


def _options() -> Options:
    # The default recovery, up to the first damaged record of the log, is what a power failure needs: its tail may be
    # torn, and nothing of it was acknowledged.
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # Small tables in memory, and many of their files before they are merged: rows are read only at start, so files cost
    # nothing, and what is merged at a time is as much as with large tables.
    options.set_write_buffer_size(16 * _MEBIBYTE)
    options.set_max_write_buffer_number(8)
    options.set_level_zero_file_num_compaction_trigger(16)
    options.set_level_zero_slowdown_writes_trigger(64)
    options.set_level_zero_stop_writes_trigger(96)
    options.set_max_total_wal_size(256 * _MEBIBYTE)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_background_jobs(2)
    options.set_max_open_files(512)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(8 * _MEBIBYTE)
    options.set_stats_dump_period_sec(0)
    # Rows are read once, in order, at start: no filters, and larger blocks compress better.
    table = BlockBasedOptions()
    table.set_block_size(16 << 10)
    options.set_block_based_table_factory(table)
    return options
