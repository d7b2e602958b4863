"""Types of path storages: where the root is, and when the deployment's directory in it is made.

A storage that is being configured gets its directory made. One that was configured earlier is only opened: where its
medium is not mounted yet, after a restart for example, there is an empty mount point. A directory made in that would
turn every deletion into one of a file that is gone already, and its bytes would stay for ever.

One case looks the same and is none: a deployment that was moved, whose storages are configured and to which it has
never written. Its directory is made when the root holds blocks of another deployment: so it is mounted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.storages import NfsStorageSpec, PathStorageSpec, StorageConfig
from kvcm.storage.file import FileStorage
from kvcm.storage.slots import SlotReuse

__all__ = ["FILE", "PathType"]


@dataclass(frozen=True, slots=True)
class PathType:
    """Opens storages of a type, which is a call of it.

    Attributes:
        root_field: what of the config says where the root is, for messages.
        check: raises KvcmError when something else is wrong with a config; may block.
    """

    root_field: str
    check: Callable[[StorageConfig], None]

    def make(self, config: StorageConfig, cluster_id: str) -> None:
        """Make the directory of a deployment, for a storage that is being configured. Blocks.

        Raises:
            InvalidArgumentError: the root cannot be one.
            StorageIOError: the directory cannot be made.
        """
        storage = self._storage(config, cluster_id)
        try:
            Path(storage.directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{self.root_field} {_root(config)!r} cannot be created: {error.strerror}"
            raise StorageIOError(reason) from error

    def __call__(self, config: StorageConfig, cluster_id: str, reuse: SlotReuse | None = None) -> FileStorage:
        """Open a storage, and make nothing where its medium may not be mounted. Blocks.

        Args:
            config: of the storage.
            cluster_id: of the deployment.
            reuse: when slots of packed files are handed out again; None is never.

        Raises:
            InvalidArgumentError: the root cannot be one.
            StorageIOError: the deployment's directory is not there or cannot be written.
        """
        storage = self._storage(config, cluster_id, reuse)
        if not os.path.lexists(storage.directory.rstrip("/")) and _holds_blocks(_root(config)):
            self.make(config, cluster_id)
        # An engine that does not find the directory either knows that the storage is not mounted where it is.
        storage.check_mounted()
        if not os.access(storage.directory, os.W_OK | os.X_OK):
            raise StorageIOError(f"{self.root_field} {_root(config)!r}: {storage.directory} is not writable")
        return storage

    def _storage(self, config: StorageConfig, cluster_id: str, reuse: SlotReuse | None = None) -> FileStorage:
        spec = config.spec
        assert isinstance(spec, PathStorageSpec)
        self._check_text(spec.root)
        self.check(config)
        return FileStorage(
            config.global_unique_name,
            config.storage_type.scheme,
            spec.root,
            cluster_id,
            spec.key_count_per_file,
            makes_objects=not isinstance(spec, NfsStorageSpec) and spec.touch_file_when_create,
            reuse=reuse,
        )

    def _check_text(self, root: str) -> None:
        if not root.startswith("/"):
            raise InvalidArgumentError(f"{self.root_field} {root!r} is not an absolute path")
        if not os.path.normpath(root).strip("/"):
            raise InvalidArgumentError(f"{self.root_field} is {root!r}, must be a directory below /")
        if set(root) & set("?#") or not root.isprintable():
            raise InvalidArgumentError(f"{self.root_field} {root!r} holds characters that a uri cannot carry")


def _root(config: StorageConfig) -> str:
    assert isinstance(config.spec, PathStorageSpec)
    return config.spec.root


def _holds_blocks(root: str) -> bool:
    """Return whether there is a directory of any deployment with something in it: no mount point has that."""
    with suppress(OSError), os.scandir(root) as entries:
        return any(entry.is_dir(follow_symlinks=False) and _holds_folders(entry.path) for entry in entries)
    return False


def _holds_folders(directory: str) -> bool:
    with suppress(OSError), os.scandir(directory) as entries:
        return any(entry.is_dir(follow_symlinks=False) for entry in entries)
    return False


def _nothing_else(_config: StorageConfig) -> None:
    """The root is all there is to check."""


FILE = PathType("root_path", _nothing_else)
"""Type `file`: NFS, or any directory that all engines have mounted at the same path."""
