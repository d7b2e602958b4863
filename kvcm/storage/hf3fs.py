"""Types `hf3fs` and `vcns_hf3fs`: 3FS through its POSIX mount, where it is a directory like any other.

The config of a `vcns_hf3fs` storage names its metadata service, for hosts that mount it.
"""

from __future__ import annotations

from pathlib import Path

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.storages import StorageConfig, ThreeFSStorageSpec, VcnsThreeFSStorageSpec
from kvcm.storage.file import PathType

__all__ = ["HF3FS"]


def _check(config: StorageConfig) -> None:
    spec = config.spec
    assert isinstance(spec, (ThreeFSStorageSpec, VcnsThreeFSStorageSpec))
    if not spec.mountpoint.startswith("/"):
        raise InvalidArgumentError(f"mountpoint {spec.mountpoint!r} is not an absolute path")
    if ".." in spec.root_dir.split("/"):
        raise InvalidArgumentError(f"root_dir {spec.root_dir!r} has a component '..', must lie below the mountpoint")
    _check_there("mountpoint", spec.mountpoint)
    if config.check_storage_available_when_open:
        _check_there("mountpoint/root_dir", spec.root)


def _check_there(field: str, directory: str) -> None:
    try:
        is_there = Path(directory).is_dir()
    except OSError as error:
        raise StorageIOError(f"{field} {directory!r}: {error.strerror}") from error
    if not is_there:
        raise StorageIOError(f"{field} {directory!r} is no directory, is 3FS mounted on this host?")


HF3FS = PathType("mountpoint/root_dir", _check)
"""Both types of 3FS storages."""
