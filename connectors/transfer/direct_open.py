"""Opens a file by a path in which no component is a link, in one system call.

`openat2` with RESOLVE_NO_SYMLINKS makes the kernel itself refuse links while it walks the path, so there is no gap
between a check and the open. Python has no such call, so libc's `syscall` is used; its number is the same on all
architectures. A kernel without it (before 5.6), or a sandbox that forbids it, answers with an error like any other.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

__all__ = ["open_without_links"]

_SYS_OPENAT2 = 437
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 0x04


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_syscall.restype = ctypes.c_long


def open_without_links(path: str, flags: int, mode: int) -> int | None:
    """Open `path` and return the descriptor; None when that fails, for whatever reason, or a component is a link.

    Args:
        path: absolute, without `.` and `..` components and null characters.
        flags: of `os.open`.
        mode: of a file made here.
    """
    if "\0" in path:
        return None
    how, size = _how(flags, mode if flags & os.O_CREAT else 0)
    descriptor: int = _syscall(_SYS_OPENAT2, _AT_FDCWD, path.encode("utf-8", "surrogateescape"), how, size)
    return descriptor if descriptor >= 0 else None


@cache
def _how(flags: int, mode: int) -> tuple[object, int]:
    how = _OpenHow(flags, mode, _RESOLVE_NO_SYMLINKS)
    return ctypes.byref(how), ctypes.sizeof(how)  # the reference keeps the structure alive
