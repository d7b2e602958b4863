"""Whether a file that holds a secret can be read by others than those who must."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_exposed"]

_OTHERS = 0o077
_STRANGERS = 0o007


def is_exposed(path: Path) -> bool:
    """Tell whether others on this host can read a file.

    What somebody else owns, as orchestrators mount secrets for processes that are not root, this process reads through
    the file's group. There the group's permission is no exposure.

    Raises:
        OSError: the file cannot be looked at.
    """
    found = path.stat()
    return bool(found.st_mode & (_OTHERS if found.st_uid == os.geteuid() else _STRANGERS))
