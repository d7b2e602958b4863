"""What a manager frees stays with its process: the next answer takes it without asking the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
from kvcm.freed_memory import keep_freed_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        bytes(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

before = faults()
assert keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_pieces_are_taken_again_without_page_faults() -> None:
    run = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, run.stdout.split())
    assert after < before / 10, (before, after)


_ARENAS = """
import ctypes, re, threading
from kvcm.freed_memory import limit_arenas

assert limit_arenas()
barrier = threading.Barrier(33)

def allocate():
    kept = [bytearray(4096) for _ in range(100)]
    barrier.wait()

for thread in [threading.Thread(target=allocate) for _ in range(32)]:
    thread.start()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
file = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, file)
libc.fclose(file)
barrier.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_threads_share_a_few_arenas() -> None:
    run = subprocess.run([sys.executable, "-c", _ARENAS], capture_output=True, text=True, timeout=60, check=True)
    assert 1 < run.stdout.count("<heap ") <= 4, run.stdout


_CYCLES = """
import weakref
from kvcm.freed_memory import collect_seldom

class Cycle:
    def __init__(self):
        self.self = self

collect_seldom()
most, left = 0, weakref.WeakSet()
for _ in range(100_000):
    left.add(Cycle())
    most = max(most, len(left))
print(most)
"""


def test_cycles_of_requests_do_not_pile_up() -> None:
    run = subprocess.run([sys.executable, "-c", _CYCLES], capture_output=True, text=True, timeout=60, check=True)
    assert 1000 < int(run.stdout) <= 20_001, run.stdout


_TRIMMED = """
import os
from kvcm.freed_memory import give_back_now, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

assert keep_freed_memory()
pieces = [bytearray(b"x" * 50_000) for _ in range(4000)]
kept = pieces[::50]
del pieces
before = resident()
assert give_back_now()
print(before, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_is_free_between_pieces_that_stay_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", _TRIMMED], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, run.stdout.split())
    assert before > 190 > 100 > after, (before, after)
