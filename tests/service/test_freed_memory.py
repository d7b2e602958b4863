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
