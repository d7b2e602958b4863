"""Two storages of a game, small file systems in memory: one behind a mount that fails on command, one as it is."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "store"))
from fault_mount import FaultMount, why_no_mounts

__all__ = ["KEYS_PER_FILE", "Spoiled", "Storages", "why_no_fuse"]

KEYS_PER_FILE = {"disk_a": 4, "disk_b": 1}
_SIZE = "512m"
_BALLAST = "ballast"
_NO_BYTES_OF_BLOCKS = (_BALLAST, ".kvcm-")
_FILLING_TRIES = 100
_ANY = (
    *("getattr", "readdir", "open", "create", "read", "write", "truncate", "fallocate", "fsync", "flush", "unlink"),
    *("mkdir", "rmdir", "rename", "statfs"),
)
_WRITING = ("create", "write", "truncate", "fallocate", "unlink", "mkdir", "rmdir", "rename")
_FEWEST_BYTES = 1024  # smaller files are no blocks of engines
_BESIDE = ".deleted"  # of the record beside a packed file, which goes with it


def why_no_fuse() -> str:
    """Return why no mount can fail on command here, "" when it can."""
    return why_no_mounts()


@dataclass(slots=True)
class Spoiled:
    """Bytes of files that the game changed behind everybody's back.

    Attributes:
        ranges: by path as engines see it, the first changed byte and the one behind the last.
    """

    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, path: str, begin: int, end: int) -> None:
        """Record that bytes are no longer the written ones."""
        self.ranges.setdefault(path, []).append((begin, end))

    def touches(self, path: str, offset: int, size: int) -> bool:
        """Return whether a part at that place may be damaged."""
        return any(begin < offset + size and offset < end for begin, end in self.ranges.get(path, ()))


class Storages:
    """The two storages.

    Args:
        folder: that they are made in.
        has_fuse: disk_a is behind a mount that fails on command; without it, it is a plain directory.
    """

    def __init__(self, folder: Path, *, has_fuse: bool) -> None:
        self._media = {
            name: folder / f"{name}-medium" if name == "disk_a" and has_fuse else folder / name
            for name in KEYS_PER_FILE
        }
        self.roots = {name: folder / name for name in KEYS_PER_FILE}
        self.spoiled = Spoiled()
        for medium in self._media.values():
            medium.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "none", str(medium)], check=True)
        self._mount = FaultMount(self._media["disk_a"], self.roots["disk_a"]) if has_fuse else None

    @property
    def mount(self) -> FaultMount:
        """The mount that fails on command."""
        assert self._mount is not None
        return self._mount

    def fill(self, name: str) -> None:
        """Fill a storage.

        Raises:
            OSError: others write and remove there all the time.
        """
        with (self._media[name] / _BALLAST).open("wb") as ballast:
            for _ in range(_FILLING_TRIES):
                status = os.statvfs(self._media[name])
                if not status.f_bavail:
                    return
                half = (status.f_bavail + 1) // 2 * status.f_frsize
                with contextlib.suppress(OSError):  # engines took so much of it meanwhile
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, half)
        raise OSError(f"{name} cannot be filled: it is written to all the time")

    def make_space(self, name: str) -> None:
        """Undo `fill`."""
        (self._media[name] / _BALLAST).unlink(missing_ok=True)

    def forbid_writes(self, name: str) -> None:
        """Make a storage read-only."""
        if name == "disk_a":
            self.mount.inject(*_WRITING, error="EROFS")
            return
        deadline = time.monotonic() + 20.0
        while self._remount(name, "ro"):  # not while a file is open for writing
            if time.monotonic() > deadline:
                raise OSError(f"{name} cannot be made read-only: it is written to all the time")

    def allow_writes(self, name: str) -> None:
        """Undo `forbid_writes`."""
        if name == "disk_a":
            self.mount.clear()
        elif self._remount(name, "rw"):
            raise OSError(f"{name} cannot be made writable")

    def hang(self) -> None:
        """Let every access to disk_a hang."""
        self.mount.inject(*_ANY, hang=True)

    def fail(self) -> None:
        """Let every access to disk_a end with an error."""
        self.mount.inject(*_ANY, error="EIO")

    def delay(self) -> None:
        """Let every access to disk_a take a while."""
        self.mount.inject(*_ANY, delay_seconds=0.05)

    def recover(self) -> None:
        """Undo `hang`, `fail` and `delay`."""
        self.mount.clear()

    def lose_server(self) -> None:
        """Kill the file system behind disk_a."""
        self.mount.die()

    def mount_again(self) -> None:
        """Undo `lose_server`."""
        self.mount.close()
        self.mount.mount()

    def files(self, name: str) -> list[Path]:
        """Return all files of a storage, as engines see them.

        Left out are what the game made, and files of probes: one that is cut off leaves its file for an hour.
        """
        medium, root = self._media[name], self.roots[name]
        found = (path for path in medium.rglob("*") if path.is_file() and not path.name.startswith(_NO_BYTES_OF_BLOCKS))
        return sorted(root / path.relative_to(medium) for path in found)

    def _blocks(self, name: str) -> list[Path]:
        """Return the files that blocks of engines lie in."""
        return [path for path in self.files(name) if not _is_beside(path) and self._size(name, path) >= _FEWEST_BYTES]

    def _size(self, name: str, path: Path) -> int:
        try:
            return self._medium_of(name, path).stat().st_size
        except FileNotFoundError:
            return 0

    def _medium_of(self, name: str, path: Path) -> Path:
        return self._media[name] / path.relative_to(self.roots[name])

    def spoil(self, name: str, how: str, random: random.Random, count: int) -> list[str]:
        """Damage files; returns which.

        Args:
            name: of the storage.
            how: `flip` a byte, `cut` in the middle, or `delete`.
            random: chooses.
            count: of files.
        """
        files = self._blocks(name)
        chosen = random.sample(files, min(count, len(files)))
        return [str(path) for path in chosen if self._spoil(name, path, how, random)]

    def _spoil(self, name: str, path: Path, how: str, random: random.Random) -> bool:
        medium = self._medium_of(name, path)
        try:
            size = medium.stat().st_size
            if how == "delete":
                self.spoiled.add(str(path), 0, 1 << 62)
                medium.unlink()
            elif how == "cut":
                self.spoiled.add(str(path), size // 2, 1 << 62)  # also later appends begin too early
                os.truncate(medium, size // 2)
            else:
                self._flip(medium, path, random.randrange(size))
        except FileNotFoundError:
            return False  # evicted a moment ago
        return True

    def _flip(self, medium: Path, path: Path, at: int) -> None:
        self.spoiled.add(str(path), at, at + 1)
        with medium.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0xFF]))

    def _remount(self, name: str, mode: str) -> int:
        return subprocess.run(
            ["mount", "-o", f"remount,{mode}", str(self._media[name])], capture_output=True
        ).returncode


def _is_beside(path: Path) -> bool:
    return "." not in path.name or path.name.startswith(".") or path.name.endswith(_BESIDE)
