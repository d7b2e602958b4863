"""The control in C++: `wave_control.cpp`, built by the host's compiler when it is first needed."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from kvcm.gpu_tier.errors import KernelUnavailableError
from kvcm.gpu_tier.kernels.native_build import build_once
from kvcm.gpu_tier.manager.wave_control.reference import SEED
from kvcm.gpu_tier.manager.wave_control.tables import Changes, Lines, Plan

__all__ = ["NativeControl", "library"]

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
_POLICIES = {"lru": 0, "lfu": 1, "fifo": 2, "random": 3}
_SOURCE = Path(__file__).with_name("wave_control.cpp")


class _Batch(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("records", "requests", "ids", "lengths", "tokens", "first")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "width", "block_tokens", "row_slots")),
    ]


class _Lookup(ctypes.Structure):
    _fields_: ClassVar = [
        ("batch", _Batch),
        ("capacity", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("src", "kind", "dst", "tokens", "count", "lens", "stats")),
    ]


class _Update(ctypes.Structure):
    _fields_: ClassVar = [
        ("batch", _Batch),
        *((name, ctypes.c_int64) for name in ("capacity", "policy", "seed")),
        *((name, ctypes.c_void_p) for name in ("src", "dst", "tokens", "changes")),
    ]


@lru_cache
def library(directory: Path | None = None) -> ctypes.CDLL:
    """Return the library, built if need be.

    Args:
        directory: where it is kept; see `build_once`.

    Raises:
        KernelUnavailableError: there is no compiler, it failed, or the object cannot be kept or loaded.
    """
    try:
        loaded = ctypes.CDLL(str(build_once("wave_control", _compiler, _FLAGS, [_SOURCE], directory=directory)))
    except OSError as error:
        raise KernelUnavailableError(f"the control of the wave buffer cannot be built or loaded: {error}") from error
    for name in ("wave_pool", "wave_update"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.wave_pool.argtypes = [ctypes.c_int64]
    for name in ("wave_pool_end", "wave_wake"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p]
    for name in ("wave_lookup", "wave_update", "wave_join"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return loaded


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        raise KernelUnavailableError("the control of the wave buffer needs a C++ compiler: no g++ on PATH, none in CXX")
    return found


class NativeControl:
    """See `Control`.

    Args:
        policy: one of `CACHE_POLICIES`.
        threads: that work on a lookup, the calling thread included; at least one decides updates beside it.

    Raises:
        KernelUnavailableError: the library cannot be built or loaded.
    """

    def __init__(self, policy: str, threads: int) -> None:
        self._policy = _POLICIES[policy]
        self._library = library()
        self._pool: int | None = self._library.wave_pool(max(1, threads - 1))

    def wake(self) -> None:
        """See `Control`."""
        self._library.wave_wake(self._pool)

    def lookup(self, lines: Lines, plan: Plan) -> None:
        """See `Control`."""
        arrays = (plan.src, plan.kind, plan.dst, plan.tokens, plan.count, plan.lens, plan.stats)
        args = _Lookup(_batch(lines), plan.capacity, *[_address(array) for array in arrays])
        self._library.wave_lookup(self._pool, ctypes.byref(args))

    def begin_update(self, lines: Lines, changes: Changes) -> Callable[[], None]:
        """See `Control`."""
        arrays = (changes.src, changes.dst, changes.tokens, changes.counts)
        args = _Update(_batch(lines), changes.src.shape[1], self._policy, SEED, *[_address(array) for array in arrays])
        # The threads use the memory of all of these until the job has been waited for.
        jobs = [(self._library.wave_update(self._pool, ctypes.byref(args)), args, lines, changes)]

        def join() -> None:
            while jobs:
                self._library.wave_join(self._pool, jobs[-1][0])
                jobs.pop()

        return join

    def close(self) -> None:
        """See `Control`. All updates must have been waited for."""
        if self._pool is not None:
            self._library.wave_pool_end(self._pool)
        self._pool = None


def _batch(lines: Lines) -> _Batch:
    rows, heads, width = lines.ids.shape
    return _Batch(
        records=_address(lines.tables.records),
        requests=_address(lines.requests),
        ids=_address(lines.ids),
        lengths=_address(lines.lengths),
        tokens=_address(lines.tokens),
        first=_address(lines.first),
        rows=rows,
        heads=heads,
        width=width,
        block_tokens=lines.tables.block_tokens,
        row_slots=lines.row_slots,
    )


def _address(array: npt.NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
