"""Wheels and sdists of the tree as it is, built apart from it, so that nothing of theirs lies around in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "VERSION", "build", "packed_files", "tree_of"]

ROOT = Path(__file__).parents[2]
VERSION = "9.8.7"
"""What the builds are told: the copy has no git."""

_ROOMS = {"kvcm", "connectors", "gpu_tier"}
_A_DAY = "1700000000"


def packed_files() -> set[str]:
    """Return all files of the packages that git tracks, or will track."""
    return {name for name in _tracked_files() if Path(name).parts[0] in _ROOMS}


def tree_of(folder: Path) -> Path:
    """Copy what git tracks, or will track, into a folder; returns it."""
    for name in _tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(tree: Path, *options: str) -> Path:
    """Build a tree into `dist` below it; returns that."""
    told = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_KVCM": VERSION, "SOURCE_DATE_EPOCH": _A_DAY}
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *options, "."],
        cwd=tree, env={**os.environ, **told}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return tree / "dist"


def _tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
