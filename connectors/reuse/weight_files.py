"""Digest of a model's files: every byte of them, read once per version of a file.

A file that was read has its digest cached under what the file system says of it: device, inode, size, and when content
and inode last changed. The clock of a file system is coarse, so files that changed a moment ago are not cached.

The cache is a directory of small files: `KVCM_CACHE_DIRECTORY`, else `$XDG_CACHE_HOME/kvcm`, else `~/.cache/kvcm`.
Where it cannot be written, each start reads the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from kvcm.model.directories import cache_directory

__all__ = ["weights_digest"]

_log = logging.getLogger(__name__)
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_CONFIGURATIONS = ("config.json", "adapter_config.json")
_READ_BYTES = 8 << 20
_THREADS = 4
_SETTLED_SECONDS = 10.0
_DIGEST_CHARACTERS = 32


def weights_digest(directory: Path, cache: Path | None = None, now: Callable[[], float] = time.time) -> str:
    """Return a text that differs when configuration or weights of a model differ.

    Args:
        directory: of the model, with `config.json` and its weights; or of an adapter, with `adapter_config.json`.
        cache: where digests of files are kept; None for `cache_directory`.
        now: seconds since 1970.

    Raises:
        OSError: a file cannot be read.
        ValueError: there are no weights, the configuration is not JSON, or a file changed while it was read.
    """
    digests = _CachedDigests(cache_directory() if cache is None else cache, now)
    files = _files(directory)
    with ThreadPoolExecutor(_THREADS) as threads:
        contents = list(threads.map(digests.of, files))
    whole = hashlib.sha256()
    for config in (directory / name for name in _CONFIGURATIONS if (directory / name).exists()):
        whole.update(json.dumps(_relevant_settings(json.loads(config.read_text())), sort_keys=True).encode())
    for path, content in zip(files, contents, strict=True):
        whole.update(f"\n{len(path.name)} {path.name} {content}".encode())
    return whole.hexdigest()[:_DIGEST_CHARACTERS]


def _files(directory: Path) -> list[Path]:
    """Return the files of weights. The same weights may lie there in several formats: engines take the first."""
    for pattern in _PATTERNS:
        if found := sorted(directory.glob(pattern)):
            return found
    raise ValueError(f"there are no weights in {directory.name}")


def _relevant_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that computing depends on; a version and a name are not."""
    return {key: value for key, value in config.items() if key not in {"_name_or_path", "transformers_version"}}


class _CachedDigests:
    """Digests of files, read or from the cache; safe to use from several threads and processes."""

    def __init__(self, directory: Path, now: Callable[[], float]) -> None:
        self._directory = directory
        self._now = now

    def of(self, path: Path) -> str:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            raise ValueError(f"{path.name} is not a file")
        entry = self._directory / hashlib.sha256(repr(_state(before)).encode()).hexdigest()
        if (known := _read_entry(entry)) is not None:
            return known
        content = _content(path)
        if _state(path.stat()) != _state(before):
            raise ValueError(f"{path.name} changed while it was read")
        if self._now() - max(before.st_mtime, before.st_ctime) > _SETTLED_SECONDS:
            self._write_entry(entry, content)
        return content

    def _write_entry(self, entry: Path, content: str) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._directory, delete=False) as file:
                file.write(content)
            Path(file.name).replace(entry)
        except OSError as error:
            _log.warning("digests of weights are not cached, each start reads them: %s", error)


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_entry(entry: Path) -> str | None:
    try:
        content = entry.read_text()
    except OSError:
        return None
    return content if len(content) == _DIGEST_CHARACTERS and content.isalnum() else None


def _content(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
