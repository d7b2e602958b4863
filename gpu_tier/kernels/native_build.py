"""Builds C++ into shared objects and keeps them.

An object is kept under a hash of its source, so that a changed source is built again and processes share an
object that one of them built.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcm.gpu_tier.errors import KernelUnavailableError

__all__ = ["build_once"]


def build_once(
    name: str,
    compiler: Callable[[], str],
    flags: Sequence[str],
    sources: Sequence[Path],
    *,
    headers: Sequence[Path] = (),
    directory: Path | None = None,
) -> Path:
    """Return a shared object, built if there is none of these sources and flags.

    Args:
        name: of the object.
        compiler: returns the compiler, or raises that there is none; only asked for when there is something to build.
        flags: of the compiler.
        sources: what it is built from.
        headers: what they include.
        directory: where objects are kept; `GPU_TIER_CACHE` or the user's cache directory if not given.

    Raises:
        KernelUnavailableError: there is no compiler, or it failed; the message has its output.
    """
    directory = directory or _cache_directory()
    target = directory / f"{name}-{_fingerprint(flags, [*sources, *headers])}.so"
    if target.exists():
        return target
    found = compiler()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / target.name
        command = [found, *flags, "-o", str(made), *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
        if done.returncode:
            text = f"{Path(found).name} failed with {done.returncode}: {done.stderr or done.stdout}"
            raise KernelUnavailableError(text)
        made.replace(target)  # at once, so that another process never loads half a file
    return target


def _fingerprint(flags: Sequence[str], paths: Sequence[Path]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in paths:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPU_TIER_CACHE") or Path(base) / "kvcm" / "gpu_tier")
