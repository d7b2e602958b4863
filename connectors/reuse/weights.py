"""Tells the weights of a model from others of the same shape and name, without reading all of them.

Of every tensor in the model's safetensors files a piece in its middle is read: training, fine-tuning and merged
adapters change it, and a thousand tensors take milliseconds. Files in other formats count by name, size and pieces at
even distances. The configuration counts as a whole. Who needs more certainty than that names the weights himself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["weights_fingerprint"]

_PIECE_BYTES = 256
_PIECES_PER_FILE = 256
_MOST_HEADER_BYTES = 100 << 20
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weights_fingerprint(directory: Path) -> str:
    """Return a text that differs when configuration or weights of a model differ.

    Args:
        directory: of the model, with `config.json` and its weights.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says, or there are no weights at all.
    """
    digest = hashlib.sha256()
    config = directory / "config.json"
    if config.exists():
        digest.update(json.dumps(_counting(json.loads(config.read_text())), sort_keys=True).encode())
    for path in _files(directory):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            for piece in _pieces(file, path):
                digest.update(piece)
    return digest.hexdigest()[:32]


def _files(directory: Path) -> list[Path]:
    """Return the files of weights. The same weights may lie there in several formats: engines take the first."""
    for pattern in _PATTERNS:
        if found := sorted(directory.glob(pattern)):
            return found
    raise ValueError(f"there are no weights in {directory.name}")


def _counting(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that computing depends on; a version and a name are not."""
    return {key: value for key, value in config.items() if key not in {"_name_or_path", "transformers_version"}}


def _pieces(file: BinaryIO, path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        yield from _tensor_pieces(file, size)
        return
    step = max(_PIECE_BYTES, size // _PIECES_PER_FILE)
    for begin in range(0, size, step):
        file.seek(begin)
        yield file.read(_PIECE_BYTES)


def _tensor_pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"a safetensors file has a header of {header_bytes} bytes")
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    yield json.dumps(header, sort_keys=True).encode()
    for _, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        middle = max(begin, (begin + end - _PIECE_BYTES) // 2)
        file.seek(8 + header_bytes + middle)
        yield file.read(min(_PIECE_BYTES, end - begin))
