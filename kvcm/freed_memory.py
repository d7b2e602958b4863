"""Freed memory stays with the process, for the next answer.

Answers take 100 kB and more, and live for a millisecond. By default glibc gives such pieces back to the system when
they are freed and asks for new ones, whose pages the system fills with zeros first: a tenth of the CPU time of a lookup
of 1,024 blocks, more where answers are texts. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_PIECE = 32 << 20  # glibc allows no more; larger ones are mapped and given back each time
_MOST_KEPT = 64 << 20
_TAKEN_AT_ONCE = 4 << 20


def keep_freed_memory() -> bool:
    """Let the allocator keep up to 64 MiB at the end of its heap; return whether it is one that can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_MMAP_THRESHOLD, _LARGEST_PIECE), (_M_TRIM_THRESHOLD, _MOST_KEPT), (_M_TOP_PAD, _TAKEN_AT_ONCE))
    done = [mallopt(option, size) for option, size in wanted]
    return all(done)
