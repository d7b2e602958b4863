"""Wheels and sdists of a copy of the tree, so that a build leaves no files in the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "VERSION", "build", "packed_files", "tree_of"]

ROOT = Path(__file__).parents[2]
VERSION = "9.8.7"
"""Version of the builds: the copy of the tree has no git."""

_LINKED = ("connectors", "gpu_tier")
"""Folders that are installed as packages below `kvcm`, where the tree has a link to them."""

_SOURCE_DATE_EPOCH = "1700000000"


def packed_files() -> set[str]:
    """Return the files of the wheel: those of the packages, and the old names `connectors` and `gpu_tier`.

    Of an old name the top level is packed, whose `__init__.py` makes it an alias of the package below `kvcm`.
    """
    tracked = {name for name in _tracked_files() if name.startswith(("kvcm/", "connectors/", "gpu_tier/"))}
    files = tracked - {f"kvcm/{name}" for name in _LINKED}
    linked = {name for name in files if name.startswith(tuple(f"{each}/" for each in _LINKED))}
    return (files - linked) | {f"kvcm/{name}" for name in linked} | {name for name in linked if name.count("/") == 1}


def tree_of(folder: Path) -> Path:
    """Copy all that git tracks, or will track, links as links, into a folder; return it."""
    for name in _tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(tree: Path, *options: str) -> Path:
    """Build a tree into `dist` below it; return that."""
    environment = {
        **os.environ,
        "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_KVCM": VERSION,
        "SOURCE_DATE_EPOCH": _SOURCE_DATE_EPOCH,
    }
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *options, "."],
        cwd=tree, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return tree / "dist"


def _tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [
        name for name in listed.stdout.split("\0") if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())
    ]
