"""How the process treats memory that is freed: the C library's allocator, and Python's collector of cycles.

Answers take 100 kB and more, and live for a millisecond. By default glibc gives such pieces back to the system when
they are freed and asks for new ones, whose pages the system fills with zeros first: a tenth of the CPU time of a lookup
of 1,024 blocks, more where answers are texts. So freed memory stays with the process, for the next answer. But what is
free between pieces that stay grows with every peak, and would never go back: twice a minute all of it is given back, at
the price of ten thousand page faults.

By default glibc also makes eight arenas per core, and gives each new thread one of its own, which keeps what its
busiest moment took. Threads here mostly wait for the disk or for Python's global lock, and never allocate at the same
time in such numbers: a few arenas do. Other C libraries are left as they are.

Records live long and form no cycles: collecting as often as Python does by default costs a quarter of a write. But
gRPC leaves a cycle of five objects behind with every request, with its path and metadata. What waits for its collection
has to stay small, and so has the pause for it: 20,000 objects are some 4,000 requests, 2 MB, and a millisecond or two.
Each object that lives is looked at twice, however small the first step is: what costs is to look at all of them again.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

__all__ = ["collect_seldom", "give_back_freed_memory", "give_back_now", "keep_freed_memory", "limit_arenas"]

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_PIECE = 32 << 20  # glibc allows no more; larger ones are mapped and given back each time
_MOST_KEPT = 64 << 20
_TAKEN_AT_ONCE = 4 << 20
_MOST_ARENAS = 4

_GIVE_BACK_SECONDS = 30.0

_YOUNG_OBJECTS, _YOUNG_ROUNDS, _OLD_ROUNDS = 20_000, 50, 100


def keep_freed_memory() -> bool:
    """Let the allocator keep up to 64 MiB at the end of its heap; return whether it is one that can be told so."""
    return _tell_allocator(
        (_M_MMAP_THRESHOLD, _LARGEST_PIECE), (_M_TRIM_THRESHOLD, _MOST_KEPT), (_M_TOP_PAD, _TAKEN_AT_ONCE)
    )


def limit_arenas() -> bool:
    """Let threads share a few arenas, those that begin from now on; return whether the allocator can be told so."""
    return _tell_allocator((_M_ARENA_MAX, _MOST_ARENAS))


def give_back_now() -> bool:
    """Give the pages that nothing lies on back to the system; return whether the allocator can be told so. Blocks for
    milliseconds, without Python's global lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(_TAKEN_AT_ONCE))
    return True


async def give_back_freed_memory() -> None:
    """Do that again and again, beside the event loop."""
    while True:
        await asyncio.sleep(_GIVE_BACK_SECONDS)
        await asyncio.to_thread(give_back_now)


def collect_seldom() -> None:
    """Take what there is for permanent, and look for cycles only among what comes."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _OLD_ROUNDS)


def _tell_allocator(*wanted: tuple[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [mallopt(option, size) for option, size in wanted]
    return all(done)
