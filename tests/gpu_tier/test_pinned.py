"""Host memory: how it is cut into registrations, what happens when one fails, and when it is refused."""

from __future__ import annotations

import gc
import logging
import mmap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_tier.errors import ConfigError, PoolExhaustedError
from gpu_tier.pools import pinned
from gpu_tier.pools.pinned import PinnedMemory, chunks
from gpu_tier.runtime import NullRuntime, runtime_for

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGE = mmap.PAGESIZE


@given(st.integers(1, 10**7), st.integers(1, 10**5), st.integers(1, 10**6))
def test_chunks_cover_everything_and_split_no_page(nbytes: int, granule: int, largest: int) -> None:
    parts = chunks(nbytes, granule, largest)
    assert sum(size for _, size in parts) == nbytes
    end = 0
    for start, size in parts:
        assert start == end
        assert size > 0
        assert start % granule == 0
        assert start % PAGE == 0
        end = start + size
    assert all(size <= max(largest, granule * PAGE) for _, size in parts)


class _Cudart:
    """Stands in for CUDA's runtime: notes what is registered and fails from the n-th call on."""

    def __init__(self, fails_at: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self.left = fails_at

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 3
        self.calls.append(("register", address))
        self.left -= 1
        return 2 if self.left < 0 else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("unregister", address))
        return 0


def _memory(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> tuple[PinnedMemory, _Cudart]:
    cudart = _Cudart(fails_at)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    runtime = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    memory = PinnedMemory(5 * PAGE, PAGE, runtime, numa_node="none", largest_chunk=2 * PAGE)  # type: ignore[arg-type]
    return memory, cudart


def test_registrations_are_taken_back_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, cudart = _memory(monkeypatch, 3)
    start = memory.data.data_ptr()
    addresses = [start, start + 2 * PAGE, start + 4 * PAGE]
    assert memory.is_pinned
    assert (memory.chunk_bytes, memory.data.numel()) == (2 * PAGE, 5 * PAGE)
    assert int(memory.data.sum()) == 0
    memory.close()
    memory.close()
    assert cudart.calls == [("register", a) for a in addresses] + [("unregister", a) for a in reversed(addresses)]
    assert not memory.is_pinned


def test_forgotten_memory_takes_its_registrations_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, cudart = _memory(monkeypatch, 3)
    view = memory.data[10:20]
    del memory
    gc.collect()
    assert [verb for verb, _ in cudart.calls] == ["register"] * 3  # somebody still looks at it
    del view
    gc.collect()
    assert [verb for verb, _ in cudart.calls] == ["register"] * 3 + ["unregister"] * 3


def test_a_failed_registration_leaves_pageable_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        memory, cudart = _memory(monkeypatch, 2)
        _memory(monkeypatch, 2)
    assert not memory.is_pinned
    assert [verb for verb, _ in cudart.calls] == ["register"] * 3 + ["unregister"] * 2
    assert cudart.calls[3][1] == cudart.calls[1][1]
    assert caplog.text.count("host memory stays pageable") == 1
    memory.data.fill_(3)


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 1000)
    wanted = "801 bytes of host memory .* limit is 800 bytes .80 % of the 1000 that are available.; lower host_bytes"
    with pytest.raises(PoolExhaustedError, match=wanted):
        PinnedMemory(801, 1, NullRuntime())
    assert PinnedMemory(800, 1, NullRuntime()).nbytes == 800
    monkeypatch.setattr(pinned, "available_bytes", lambda: None)
    assert PinnedMemory(801, 1, NullRuntime()).data.numel() == 801


def test_a_host_without_gpu_has_plain_memory() -> None:
    memory = PinnedMemory(10, 3, NullRuntime())
    assert not memory.is_pinned
    assert memory.data.tolist() == [0] * 10
    for size, granule in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError):
            PinnedMemory(size, granule, NullRuntime())


def test_the_kernel_says_what_is_available() -> None:
    available = pinned.available_bytes()
    assert available is None or available > 1 << 20


@needs_gpu
def test_a_gpu_reads_the_memory_at_its_own_address() -> None:
    memory = PinnedMemory(9 * PAGE + 5, PAGE, runtime_for("cuda"), largest_chunk=2 * PAGE)
    assert memory.is_pinned
    memory.data.copy_(torch.arange(memory.nbytes) % 251)
    for part in memory.data.split(memory.chunk_bytes):  # one copy must not span two registrations
        assert torch.equal(part.to("cuda").cpu(), part)
    memory.close()
