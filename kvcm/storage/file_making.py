"""Makes the empty files of fresh addresses, for storages whose clients want to find them there."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from stat import S_ISREG
from typing import Final

from kvcm.model.errors import StorageIOError
from kvcm.storage.folders import made_folder, opened_folder

__all__ = ["make_files", "make_folders"]

_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE: Final = 0o600  # as engines make them: KV tells the prompt
_DEPTH: Final = 3  # instance, spec, file


def make_files(directory: str, paths: Iterable[str]) -> None:
    """Make empty files below a deployment's directory, and the directories that they lie in. Blocks.

    A file that is there stays as it is. No link is followed.

    Args:
        directory: of the deployment, with a slash at its end.
        paths: of the files, absolute.

    Raises:
        StorageIOError: a path does not lie where objects lie.
        NoFolderError: the deployment's directory is not there.
        OSError: a file or a directory cannot be made, or something else lies there.
    """
    names: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for path in paths:
        instance, spec, name = _components(directory, path)
        names[instance, spec][name] = None
    with opened_folder(directory) as top:
        for (instance, spec), files in names.items():
            with made_folder(instance, top) as above, made_folder(spec, above) as inside:
                for name in files:
                    _make(inside, name)


def make_folders(directory: str, path: str) -> None:
    """Make the directories that a file lies in, below a deployment's directory; no link is followed. Blocks.

    Raises:
        StorageIOError: the path does not lie where objects lie.
        NoFolderError: the deployment's directory is not there.
        OSError: a directory cannot be made.
    """
    instance, spec, _ = _components(directory, path)
    with opened_folder(directory) as top, made_folder(instance, top) as above, made_folder(spec, above):
        pass


def _components(directory: str, path: str) -> list[str]:
    components = path.removeprefix(directory).split("/")
    if not path.startswith(directory) or len(components) != _DEPTH or {"", ".", ".."} & {*components}:
        raise StorageIOError(f"path {path!r} is not that of an object below {directory!r}")
    return components


def _make(inside: int, name: str) -> None:
    try:
        os.close(os.open(name, _FILE, _MODE, dir_fd=inside))
    except FileExistsError:
        if not S_ISREG(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            raise
