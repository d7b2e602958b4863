"""The reserve: bytes of the metadata's disk that KV never gets, so that a full disk can be emptied again.

KV and metadata may lie on one disk (`kvcm serve` with nothing but a data directory does so). Only the manager deletes
KV, and for each deletion it writes metadata first: a disk without a free byte could not be emptied by anyone.

* The last `kvcm.store.reserve_bytes` of the disk are not for KV: writes to storages on the same file system are refused
  before they are touched (`MetadataDisk` of `kvcm.cache.quotas`). What open write sessions may still write counts as
  written.
* Others may fill the disk to the last byte nevertheless. So a part of the reserve is held by files, as much as a start
  needs: it writes what lies in the log of the database to tables. They are given up step by step when the database
  cannot be opened or written for lack of space, and made again when there is space.
* So reads, evictions, deletions and starts go on, on any full disk, until the files are given up: each MiB is enough
  for thousands of deletions. Then changes are refused until there is space.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

import structlog

__all__ = ["MetadataReserve", "is_no_space"]

_NAME: Final = "reserve"  # RocksDB leaves alone what is not named like a file of its own
_PARTS: Final = 64  # of the whole reserve; files hold inodes, too
_LEAST_PARTS: Final = 8
_STEP_PARTS: Final = 4
_LARGEST_PART_OF_DISK: Final = 8
_log = structlog.get_logger("kvcm.store")


def is_no_space(error: BaseException) -> bool:
    """Return whether an error of the system or of RocksDB, whose errors are texts, says that a disk is full."""
    texts = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    return any(text in str(error) for text in texts)


class MetadataReserve:
    """The reserve of one directory. All methods but the properties block, on a local disk for microseconds.

    Args:
        directory: of the database.
        size_bytes: of the reserve; 0 for none. It is an eighth of the file system at most, beside what files hold.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.directory = directory
        self.setting_bytes = size_bytes
        self._folder = directory / _NAME
        self._lock = Lock()  # the log's thread gives up, and the manager asks
        self._is_short = False

    @property
    def device(self) -> int | None:
        """The file system that the directory is on, None while it cannot be asked."""
        try:
            return self.directory.stat().st_dev
        except OSError:
            return None

    def size_bytes(self) -> int:
        """Return how much is reserved on this file system."""
        status = os.statvfs(self.directory)
        return min(self.setting_bytes, status.f_blocks * status.f_frsize // _LARGEST_PART_OF_DISK)

    def make(self) -> None:
        """Make the files that are missing, where there is space for them and half the reserve is free beside."""
        with self._lock, suppress(OSError):
            part = self.size_bytes() // _PARTS
            missing = [self._folder / str(number) for number in range(self._wanted_parts(part))]
            missing = [path for path in missing if not path.exists()]
            if missing and _free_bytes(self.directory) >= (len(missing) + _PARTS // 2) * part:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                for path in missing:
                    _allocate(path, part)
                missing = []
            if self._is_short and not missing:
                self._is_short = False
                _log.info("metadata_reserve_restored", directory=str(self.directory))

    def _wanted_parts(self, part: int) -> int:
        """Return how many files a start may need: what lies in the logs of the database is written to tables."""
        if not part:
            return 0
        log_bytes = sum(each.stat().st_size for each in self.directory.glob("*.log"))
        return min(_PARTS, _LEAST_PARTS + log_bytes // part + 1)

    def give_up(self) -> bool:
        """Free some files of the reserve, since the database has no space; return False where none is left."""
        with self._lock, suppress(OSError):
            parts = sorted(self._folder.iterdir())
            for path in parts[-max(_STEP_PARTS, len(parts) // 4) :]:
                path.unlink()
            if parts and not self._is_short:
                self._is_short = True
                _log.warning("metadata_reserve_used", directory=str(self.directory), files=len(parts))
            return bool(parts)
        return False


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _allocate(path: Path, size_bytes: int) -> None:
    """Make a file that takes up its space."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        path.unlink()  # a part of one is none
        raise
    finally:
        os.close(descriptor)
