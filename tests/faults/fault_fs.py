"""A file system that shows a directory and fails on command: a process of its own, like the server behind a mount.

    python fault_fs.py <directory> <mount point>

Commands come as JSON lines on the standard input, each is answered by one on the standard output; the first line says
that the mount is there. The end of the input is the end of the process and of the mount, so that none outlives the
test run that made it, however that ends.

Nothing is cached by the kernel: every request arrives here. As on a network mount, appending is no more than writing
where the file seems to end.
"""

# Paths are text here, as the kernel gives them.
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH115, PTH208, PTH211

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import mfusepy
from fault_rules import Fault, Rules

_ATTRIBUTES = ("mode", "ino", "dev", "nlink", "uid", "gid", "size", "blocks", "blksize", "rdev")
_TIMES = ("atime", "mtime", "ctime")
_STATFS = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "flag", "frsize", "namemax")
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class FaultFs(mfusepy.Operations):  # type: ignore[misc]
    """Passes everything on to a directory, after it met the rules.

    Args:
        directory: that is shown.
        rules: what goes wrong.
    """

    use_ns = True  # times are integers of nanoseconds

    def __init__(self, directory: str, rules: Rules) -> None:
        self._directory = directory
        self._rules = rules

    def init(self, path: str) -> None:
        """Report that the mount is there."""
        _report({"mounted": path})

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._rules.meet("getattr", path)
        status = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        times = {f"st_{name}": getattr(status, f"st_{name}_ns") for name in _TIMES}
        return {f"st_{name}": getattr(status, f"st_{name}") for name in _ATTRIBUTES} | times

    def readdir(self, path: str, _fh: int) -> list[str]:
        self._rules.meet("readdir", path)
        return [".", "..", *os.listdir(self._real(path))]

    def open(self, path: str, flags: int) -> int:
        self._rules.meet("open", path)
        return os.open(self._real(path), flags & ~(os.O_APPEND | os.O_NOFOLLOW))

    def create(self, path: str, mode: int, flags: int) -> int:
        self._rules.meet("create", path)
        return os.open(self._real(path), (flags | os.O_CREAT) & ~(os.O_APPEND | os.O_NOFOLLOW), mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        fault = self._rules.meet("read", path)
        return fault.seen(os.pread(fh, fault.limited(size), offset), offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        fault = self._rules.meet("write", path)
        return os.pwrite(fh, data[: fault.limited(len(data))], offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._rules.meet("truncate", path)
        os.truncate(self._real(path) if fh is None else fh, length)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._rules.meet("fallocate", path)
        if _libc.fallocate(fh, mode, ctypes.c_int64(offset), ctypes.c_int64(size)) == 0:
            return 0
        return -ctypes.get_errno()

    def fsync(self, path: str, _datasync: int, fh: int) -> None:
        self._rules.meet("fsync", path)
        os.fsync(fh)

    def flush(self, path: str, _fh: int) -> None:
        self._rules.meet("flush", path)

    def release(self, _path: str, fh: int) -> None:
        os.close(fh)

    def unlink(self, path: str) -> None:
        self._rules.meet("unlink", path)
        os.unlink(self._real(path))

    def mkdir(self, path: str, mode: int) -> None:
        self._rules.meet("mkdir", path)
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        self._rules.meet("rmdir", path)
        os.rmdir(self._real(path))

    def rename(self, old: str, new: str) -> None:
        self._rules.meet("rename", old)
        os.rename(self._real(old), self._real(new))

    def mknod(self, path: str, mode: int, dev: int) -> None:
        os.mknod(self._real(path), mode, dev)

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._real(target))

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real(path), mode)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        os.utime(self._real(path), ns=times)

    def statfs(self, path: str) -> dict[str, int]:
        self._rules.meet("statfs", path)
        status = os.statvfs(self._real(path))
        return {f"f_{name}": getattr(status, f"f_{name}") for name in _STATFS}

    def _real(self, path: str) -> str:
        return self._directory + path


def _report(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _obey(rules: Rules, mount_point: str) -> None:
    """Do what the lines of the input say, until it ends."""
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "inject":
                _report({"id": rules.inject(Fault.from_json(command["fault"]))})
            case "clear":
                rules.clear()
                _report({})
            case "status":
                _report(rules.status())
    rules.clear()
    _libc.umount2(mount_point.encode(), _MNT_DETACH)
    os._exit(0)


def _main(directory: str, mount_point: str) -> None:
    os.umask(0)  # the mode of a request is what the client's own mask left of it
    rules = Rules()
    threading.Thread(target=_obey, args=(rules, mount_point), daemon=True).start()
    nothing_cached = {"direct_io": True, "entry_timeout": 0, "negative_timeout": 0, "attr_timeout": 0}
    options = {"foreground": True, "hard_remove": True, "max_threads": 100, "fsname": "kvcm-faults"}
    mfusepy.FUSE(FaultFs(str(Path(directory).resolve()), rules), mount_point, **nothing_cached, **options)


if __name__ == "__main__":
    _main(*sys.argv[1:])
