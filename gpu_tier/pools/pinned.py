"""Host memory that the device reads and writes directly.

torch's pinned allocator rounds up to a power of two (20 GiB become 32), and one registration of 512 GiB or more fails
with recent drivers. So the memory is an anonymous mapping of the exact size, registered in chunks; a chunk is a whole
number of pages of the pool, because a copy that spans two registrations fails.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["LARGEST_SHARE", "PinnedMemory", "available_bytes", "chunks"]

LARGEST_SHARE = 0.8
_MAX_CHUNK_BYTES = 64 << 30
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_PREFERRED = 1  # MPOL_PREFERRED: with MPOL_BIND a full node would have the process killed

_log = logging.getLogger(__name__)


def available_bytes() -> int | None:
    """Return MemAvailable of the host, None where the kernel does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def chunks(nbytes: int, granule: int, largest: int = _MAX_CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return (start, bytes) of each registration; all but the last are the same multiple of `granule`.

    They are whole memory pages too: two registrations of one are refused.
    """
    step = math.lcm(granule, mmap.PAGESIZE)
    size = max(largest // step, 1) * step
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]


class _Mapping(mmap.mmap):
    """Anonymous memory that takes its registrations back before it is unmapped.

    A registration outlives the memory that it names: what the system puts there next would be taken for pinned, and
    the device would read pages that are no longer written. `PinnedMemory.close` is how it should end; this is for
    owners that were forgotten.
    """

    registered: list[int]
    device: torch.device

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> _Mapping:
        # Private, since shared anonymous memory gets no huge pages by default; not for children of a fork, since pages
        # that are private and pinned would be copied when one of them writes.
        mapping = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.registered, mapping.device = [], device
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(advice)
        return mapping

    def unregister(self) -> None:
        """Take the registrations back, last first."""
        cudart: Any = torch.cuda.cudart() if self.registered else None
        while self.registered:
            code = int(cudart.cudaHostUnregister(self.registered.pop()))
            if code:
                _log.error("unregistering host memory gave CUDA error %d", code)

    def __del__(self) -> None:
        if not getattr(self, "registered", None) or sys.is_finalizing():
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no owner is left that could say that the last copy has ended
        self.unregister()


class PinnedMemory:
    """Memory of the exact size; pinned if there is a device and the system lets us, else pageable.

    Attributes:
        data: flat ``uint8 [nbytes]``, zeros at first.
        is_pinned: whether the device can read it.
        nbytes: its size.
        chunk_bytes: bytes of a registration.

    Args:
        nbytes: size.
        granule: bytes that must not be split between registrations.
        runtime: of the device.
        numa_node: "auto" (the node of the device, if the system says which), "none", or a number.
        largest_chunk: most bytes of a registration.

    Raises:
        ConfigError: a size or the node is not allowed.
        PoolExhaustedError: more than 80 % of the available memory is asked for.
    """

    def __init__(
        self,
        nbytes: int,
        granule: int,
        runtime: DeviceRuntime,
        *,
        numa_node: str | int = "auto",
        largest_chunk: int = _MAX_CHUNK_BYTES,
    ) -> None:
        if nbytes < 1 or granule < 1:
            raise ConfigError("nbytes, granule", (nbytes, granule), "must be at least 1")
        _check_fits(nbytes)
        parts = chunks(nbytes, granule, largest_chunk)
        self.nbytes = nbytes
        self.chunk_bytes = parts[0][1]
        self._mapping: _Mapping | None = None
        if not runtime.is_cuda:
            self.data = torch.zeros(nbytes, dtype=torch.uint8)
            return
        self._device = runtime.device
        # The tensor keeps the mapping alive; it is unmapped when the last view is gone.
        self._mapping = _Mapping.of(nbytes, runtime.device)
        self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)
        _bind(self.data, numa_node, runtime.device)
        self._register(self._mapping, parts)

    @property
    def is_pinned(self) -> bool:
        """Whether the device can read the memory."""
        return self._mapping is not None and bool(self._mapping.registered)

    def close(self) -> None:
        """Take the registrations back, last first. The device must be done with the memory."""
        if self._mapping is not None:
            self._mapping.unregister()
        self._mapping = None
        self.data = torch.empty(0, dtype=torch.uint8)

    def _register(self, mapping: _Mapping, parts: list[tuple[int, int]]) -> None:
        # With unified addressing (every 64-bit Linux) a registered page has the same address on host and device, which
        # is why kernels may be given the data_ptr of a tensor of this memory; Triton asks the driver whether they may.
        cudart: Any = torch.cuda.cudart()
        for start, size in parts:
            code = int(cudart.cudaHostRegister(self.data.data_ptr() + start, size, _PORTABLE_MAPPED))
            if code:
                mapping.unregister()
                _forget_error(self._device)
                _warn_once(
                    f"host memory stays pageable, transfers will be slow: registering {size} bytes gave CUDA error "
                    f"{code}; this is about host memory (try a smaller host_bytes, or raise the limit of locked memory)"
                )
                return
            mapping.registered.append(self.data.data_ptr() + start)


def _check_fits(nbytes: int) -> None:
    available = available_bytes()
    if available is not None and nbytes > LARGEST_SHARE * available:
        raise PoolExhaustedError(
            f"{nbytes} bytes of host memory were asked for, the limit is {int(LARGEST_SHARE * available)} bytes "
            f"(80 % of the {available} that are available); lower host_bytes or host_to_device_ratio"
        )


def _forget_error(device: torch.device) -> None:
    # CUDA keeps the error of a failed call until it is read: the next launch of torch would be blamed.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


@lru_cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _bind(data: Tensor, numa_node: str | int, device: torch.device) -> None:
    """Let the memory come from a node, before it is touched."""
    node = _node_of(device) if numa_node == "auto" else numa_node
    if node == "none":
        return
    if isinstance(node, str):
        raise ConfigError("numa_node", numa_node, "must be auto, none or a number")
    try:
        libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
    except OSError:
        _warn_once("host memory is not bound to a NUMA node: libnuma is not installed")
        return
    mask = ctypes.c_ulong(1 << node)
    address, size = ctypes.c_void_p(data.data_ptr()), ctypes.c_ulong(data.numel())
    if libnuma.mbind(address, size, _PREFERRED, ctypes.byref(mask), ctypes.c_ulong(64), 0):
        _warn_once(f"host memory is not bound to NUMA node {node}: error {ctypes.get_errno()}")


def _node_of(device: torch.device) -> str | int:
    properties: Any = torch.cuda.get_device_properties(device)
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    entry = Path("/sys/bus/pci/devices") / place / "numa_node"
    node = int(entry.read_text()) if entry.exists() else -1
    if node < 0:
        _warn_once(f"host memory is not bound to a NUMA node: the system does not say which is that of {place}")
        return "none"
    return node
