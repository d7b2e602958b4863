"""Keeps the trace of a file in the user's cache directory, in binary: the next reading takes a tenth of the time.

A kept trace is used only while the file still has the very content that was read: both are compared by their hashes,
since times of files lie. It is replaced as a whole, so no reader finds half of it. Where it cannot be kept, reading
goes on without, and the log says so once per directory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcm.model.directories import cache_directory
from kvcm.optimizer.trace import BadLine, QueryMode, Trace

__all__ = ["Origin", "cache_path", "decode_trace", "encode_trace", "load_cached_trace", "store_cached_trace"]

# A trace as a binary file: its columns as they lie in memory, behind a header that says what they are made from.
#
# Layout: 8 bytes that name the format and its version, the BLAKE2b hash of all that follows, the length of the header,
# the header as JSON, and the columns, each at a multiple of 64 bytes. Nothing in it is code, and nothing is believed:
# what does not fit the hash, the lengths or the ranges of a trace is no trace.

_MAGIC = b"KVTRACE\x02"
_HASH_BYTES = 32
_START = len(_MAGIC) + _HASH_BYTES + 8
_ALIGNMENT = 64
_COLUMNS = {
    "times_us": "<i8", "input_tokens": "<i8", "output_tokens": "<i8", "sessions": "<i4", "instances": "<i4",
    "read_blocks": "<i4", "writes": "|b1", "offsets": "<i8", "blocks": "<i4", "parents": "<i4",
}  # fmt: skip
_RARE = {"modes": "<i8", "windows": "<i8", "mask_ends": "<i8", "mask_flags": "|b1"}
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a trace was made from.

    Attributes:
        digest: hash of the file, in hex.
        format: of its lines.
        block_tokens: as they were given.
    """

    digest: str
    format: str
    block_tokens: int | dict[str, int] | None


class _Header(msgspec.Struct):
    origin: Origin
    block_tokens: int
    instance_names: tuple[str, ...]
    instance_block_tokens: tuple[int, ...]
    has_one_parent: bool
    specs: dict[int, tuple[str, ...]]
    bad_lines: tuple[BadLine, ...]
    bad_line_count: int
    assumed: tuple[str, ...]
    lengths: dict[str, int]


_decode = msgspec.json.Decoder(_Header).decode


def encode_trace(trace: Trace, origin: Origin) -> list[bytes]:
    """Return the parts of a file that holds a trace and what it was made from."""
    arrays = {name: getattr(trace, name) for name in _COLUMNS} | _rare_arrays(trace)
    header = msgspec.json.encode(
        _Header(
            origin=origin,
            block_tokens=trace.block_tokens,
            instance_names=trace.instance_names,
            instance_block_tokens=trace.instance_block_tokens,
            has_one_parent=trace.has_one_parent,
            specs=dict(trace.specs),
            bad_lines=trace.bad_lines,
            bad_line_count=trace.bad_line_count,
            assumed=trace.assumed,
            lengths={name: len(array) for name, array in arrays.items()},
        )
    )
    parts = [len(header).to_bytes(8, "little"), header, _padding(_START + len(header))]
    for name, array in arrays.items():
        column = np.ascontiguousarray(array, _type_of(name))
        parts += [column.tobytes(), _padding(column.nbytes)]
    return [_MAGIC, _hash(parts), *parts]


def decode_trace(data: bytearray, origin: Origin, name: str) -> Trace | None:
    """Return the trace that a file holds, whose columns share its memory; None where it holds none made from this.

    Args:
        data: of the file.
        origin: that the trace must be made from.
        name: of the trace.
    """
    header = _header(data)
    if header is None or header.origin != origin:
        return None
    arrays = _arrays(data, header)
    if arrays is None or _hash([memoryview(data)[len(_MAGIC) + _HASH_BYTES :]]) != _stored_hash(data):
        return None
    return _trace(header, arrays, name) if _is_valid(header, arrays) else None


def _header(data: bytearray) -> _Header | None:
    length = int.from_bytes(data[_START - 8 : _START], "little")
    if len(data) < _START or not data.startswith(_MAGIC) or length > len(data) - _START:
        return None
    try:
        return _decode(memoryview(data)[_START : _START + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _arrays(data: bytearray, header: _Header) -> dict[str, Array] | None:
    """Return the columns, None where the file is too short for them."""
    arrays = {}
    place = _START + int.from_bytes(data[_START - 8 : _START], "little")
    place += len(_padding(place))
    for name in (*_COLUMNS, *_names_of(_RARE)):
        kind, length = np.dtype(_type_of(name)), header.lengths.get(name, -1)
        end = place + length * kind.itemsize
        if length < 0 or end > len(data):
            return None
        arrays[name] = np.frombuffer(data, kind, length, place) if length else np.empty(0, kind)
        place = end + len(_padding(end - place))
    return arrays


def _rare_arrays(trace: Trace) -> dict[str, Array]:
    """Return what only some requests have as columns: which requests, and what."""
    flags = list(trace.masks.values())
    arrays: dict[str, Array] = {}
    for name, values in (("modes", trace.modes), ("windows", trace.windows)):
        arrays[f"{name}_of"] = np.array(list(values), np.int64)
        arrays[name] = np.array([int(each) for each in values.values()], np.int64)
    arrays["mask_ends_of"] = np.array(list(trace.masks), np.int64)
    arrays["mask_ends"] = np.cumsum([len(each) for each in flags], dtype=np.int64)
    arrays["mask_flags"] = np.concatenate(flags) if flags else np.empty(0, np.bool_)
    return arrays


def _names_of(rare: Mapping[str, str]) -> list[str]:
    return [each for name in rare for each in ([name] if name == "mask_flags" else [f"{name}_of", name])]


def _type_of(name: str) -> str:
    return _COLUMNS.get(name) or _RARE.get(name) or "<i8"


def _padding(length: int) -> bytes:
    return bytes(-length % _ALIGNMENT)


def _hash(parts: Iterable[bytes | memoryview]) -> bytes:
    found = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


def _stored_hash(data: bytearray) -> bytes:
    return bytes(data[len(_MAGIC) : len(_MAGIC) + _HASH_BYTES])


def _is_valid(header: _Header, arrays: dict[str, Array]) -> bool:
    """Whether every number is in its range: kernels look at memory by them and check nothing."""
    offsets, blocks, parents = arrays["offsets"], arrays["blocks"], arrays["parents"]
    count, unique = len(offsets) - 1, len(parents)
    per_request = (name for name in _COLUMNS if name not in {"offsets", "blocks", "parents"})
    if count < 1 or offsets[0] or offsets[-1] != len(blocks) or any(len(arrays[name]) != count for name in per_request):
        return False
    lengths = np.diff(offsets)
    instances = len(header.instance_names)
    return (
        _is_within(lengths, 0, len(blocks))
        and _is_within(blocks, 0, unique - 1)
        and bool((parents < np.arange(unique)).all())
        and _is_within(parents, -1, unique)
        and _is_within(arrays["instances"], 0, instances - 1)
        and len(header.instance_block_tokens) == instances
        and _is_within(arrays["sessions"], -1, count)
        and bool((arrays["read_blocks"] <= lengths).all())
        and _is_within(arrays["read_blocks"], 0, len(blocks))
        and _is_within(arrays["times_us"], 0, 1 << 62)
        and bool((np.diff(arrays["times_us"]) >= 0).all())
        and _are_rare_valid(arrays, lengths)
    )


def _are_rare_valid(arrays: dict[str, Array], lengths: Array) -> bool:
    last = len(lengths) - 1
    for name in ("modes", "windows", "mask_ends"):
        if len(arrays[name]) != len(arrays[f"{name}_of"]) or not _is_within(arrays[f"{name}_of"], 0, last):
            return False
    masks = np.diff(arrays["mask_ends"], prepend=0)
    return (
        _is_within(arrays["modes"], 0, max(QueryMode))
        and bool((masks == lengths[arrays["mask_ends_of"]]).all())
        and len(arrays["mask_flags"]) == masks.sum()
    )


def _is_within(values: Array, least: int, most: int) -> bool:
    return not len(values) or bool(values.min() >= least and values.max() <= most)


def _trace(header: _Header, arrays: dict[str, Array], name: str) -> Trace:
    modes = map(QueryMode, arrays["modes"].tolist())
    flags = np.split(arrays["mask_flags"], arrays["mask_ends"][:-1])
    return Trace(
        name=name,
        block_tokens=header.block_tokens,
        **{each: arrays[each] for each in _COLUMNS},
        instance_names=header.instance_names,
        instance_block_tokens=header.instance_block_tokens,
        has_one_parent=header.has_one_parent,
        modes=dict(zip(arrays["modes_of"].tolist(), modes, strict=True)),
        windows=dict(zip(arrays["windows_of"].tolist(), arrays["windows"].tolist(), strict=True)),
        masks=dict(zip(arrays["mask_ends_of"].tolist(), flags, strict=False)),
        specs=header.specs,
        bad_lines=header.bad_lines,
        bad_line_count=header.bad_line_count,
        assumed=header.assumed,
    )


_log = logging.getLogger("kvcm.optimizer")


_KEPT_SECONDS = 30 * 86_400  # since it was last used


def cache_path(path: Path) -> Path:
    """Return where the trace of a file is kept."""
    place = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    return cache_directory() / "traces" / f"{place}.kvtrace"


def load_cached_trace(path: Path, origin: Callable[[], Origin]) -> Trace | None:
    """Return the trace that is kept for a file; None where there is none, or it was made from something else.

    Args:
        path: of the file that it is a trace of.
        origin: returns the content of the file now, and how it is to be read; called only where a trace is kept.

    Raises:
        TraceError: the file cannot be read.
    """
    with contextlib.suppress(OSError, RuntimeError):
        kept = cache_path(path)
        # Another user could have put a trace there that this file does not hold.
        if kept.is_file() and kept.stat().st_uid == os.geteuid():
            with kept.open("rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                del data[file.readinto(data) :]
            os.utime(kept)  # it is used
            return decode_trace(data, origin(), path.name)
    return None


def store_cached_trace(path: Path, origin: Origin, trace: Trace) -> None:
    """Keep the trace of a file, for its user alone."""
    directory = Path()
    try:
        kept = cache_path(path)
        directory = kept.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_is_for_writing(directory)
        _remove_unused(directory, time.time())
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=f".{kept.name}.", delete=False) as file:
            try:
                file.writelines(encode_trace(trace, origin))
                file.close()
                Path(file.name).replace(kept)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except (OSError, RuntimeError) as error:  # or there is no home
        _warn_once(directory, getattr(error, "strerror", None) or str(error))


def _remove_unused(directory: Path, now: float) -> None:
    """Remove what was not used for long, so that the directory does not grow for ever."""
    for kept in directory.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            if now - kept.stat().st_mtime > _KEPT_SECONDS:
                kept.unlink()


def _check_is_for_writing(directory: Path) -> None:
    """Raise PermissionError where the mode forbids writing, for the superuser, too."""
    if not directory.stat().st_mode & 0o222:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@functools.cache
def _warn_once(directory: Path, reason: str) -> None:
    _log.warning("traces are read anew each time: none can be kept in %s: %s", directory, reason)
