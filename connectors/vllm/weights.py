"""What tells a model's weights from others of the same name, without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["weights_digest"]

_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_HEAD_BYTES = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weights_digest(folder: Path) -> str:
    """Return a digest of the weight files of a folder: their sizes, their heads, and samples evenly from each.

    A head names every tensor with its type, shape and place. Weights that were trained on differ everywhere, so samples
    tell them; files that differ in a few bytes between samples are not told apart.

    Args:
        folder: holds the files of one model.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in _weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _weight_files(folder: Path) -> Iterator[Path]:
    for pattern in _PATTERNS:
        found = sorted(folder.glob(pattern))
        if found:  # several formats of the same weights may lie side by side; engines take the first kind
            yield from found
            return
