"""The ways in which a storage goes away while engines use it, and comes back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

for folder in ("faults", "mooncake"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from engine_figures import AWAY  # noqa: E402
from fault_mount import FaultMount, why_no_mounts  # noqa: E402
from mooncake_rig import Process, Site, missing  # noqa: E402

from kvcm.protocol import admin_service_pb2 as admin_pb  # noqa: E402

_KEYS_PER_FILE = 4
_OWNED_BYTES = 512 << 20
_OPERATIONS = (
    *("getattr", "readdir", "open", "create", "read", "write", "truncate", "fallocate", "fsync", "flush", "unlink"),
    *("mkdir", "rmdir", "rename", "statfs"),
)


class Outage(Protocol):
    """A storage that can be away."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether the stored blocks are there again afterwards."""

    @property
    def config(self) -> admin_pb.StorageConfig:
        """Its configuration in the manager."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Let processes started inside the block reach the storage."""

    def leave(self) -> None:
        """Let it be away from now on."""

    def come_back(self) -> None:
        """Let it be there again; nothing happens when it is."""

    def close(self) -> None:
        """End it."""


def file_storage(name: str, root: Path) -> admin_pb.StorageConfig:
    """Return the configuration of a directory, some blocks to a file."""
    spec = admin_pb.NfsStorageSpec(root_path=f"{root}/", key_count_per_file=_KEYS_PER_FILE)
    return admin_pb.StorageConfig(global_unique_name=name, nfs=spec)


class _MountOutage:
    """A mount whose server is killed, or hangs."""

    keeps_bytes = True

    def __init__(self, directory: Path, hangs: bool) -> None:
        medium = directory / "medium"
        medium.mkdir()
        self._mount = FaultMount(medium, directory / "mount")
        self._hangs = hangs
        self._is_away = False

    @property
    def config(self) -> admin_pb.StorageConfig:
        return file_storage(AWAY, self._mount.path)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def leave(self) -> None:
        self._is_away = True
        if self._hangs:
            self._mount.inject(*_OPERATIONS, hang=True)
        else:
            self._mount.die()

    def come_back(self) -> None:
        if not self._is_away:
            return
        self._is_away = False
        if self._hangs:
            self._mount.clear()
        else:
            self._mount.close()
            self._mount.mount()

    def close(self) -> None:
        self._mount.close()


class _StoreOutage:
    """A Mooncake store whose master and whose only owner of memory are killed: a new one knows no objects."""

    keeps_bytes = False

    def __init__(self, directory: Path) -> None:
        self._site = Site(directory)
        self._owner: Process | None = self._site.owner(_OWNED_BYTES)

    @property
    def config(self) -> admin_pb.StorageConfig:
        return admin_pb.StorageConfig(global_unique_name=AWAY, mooncake=admin_pb.MooncakeStorageSpec(**self._site.spec))

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return self._site.entered()

    def leave(self) -> None:
        assert self._owner is not None
        self._owner.kill()
        self._owner = None
        self._site.kill_master()

    def come_back(self) -> None:
        if self._owner is None:
            self._site.start_master()
            self._owner = self._site.owner(_OWNED_BYTES)

    def close(self) -> None:
        self._site.close()


_MAKERS: dict[str, Callable[[Path], Outage]] = {
    "a mount's server is killed": lambda directory: _MountOutage(directory, hangs=False),
    "a mount hangs": lambda directory: _MountOutage(directory, hangs=True),
    "a Mooncake master and owner are killed": _StoreOutage,
}


@contextlib.contextmanager
def _made(name: str, directory: Path) -> Iterator[Outage]:
    outage = _MAKERS[name](directory)
    try:
        yield outage
    finally:
        outage.close()


def _maker(name: str) -> Callable[[Path], contextlib.AbstractContextManager[Outage]]:
    return lambda directory: _made(name, directory)


OUTAGES = {name: _maker(name) for name in _MAKERS}
"""Name → the storage in a directory of its own, for the time of a block."""


def impossible(name: str) -> str:
    """Return why this machine cannot have an outage, "" when it can."""
    return missing() if "Mooncake" in name else why_no_mounts()
