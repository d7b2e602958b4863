"""Where a user's processes keep what they can make again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `KVCM_CACHE_DIRECTORY`, else `$XDG_CACHE_HOME/kvcm`, else `~/.cache/kvcm`; it need not exist."""
    if named := environment.get("KVCM_CACHE_DIRECTORY"):
        return Path(named)
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    return Path(home) / "kvcm"
