"""The host pools of the GPU benchmarks: memory that the device cannot read would be measured as something else."""

from __future__ import annotations

from kvcm.gpu_tier.geometry import KVGeometry, Layout
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["pinned_pool"]


def pinned_pool(geometry: KVGeometry, num_pages: int, layout: Layout, runtime: DeviceRuntime) -> HostKVPool:
    """Return a host pool that kernels read; arguments as of `HostKVPool`.

    Raises:
        RuntimeError: its memory could not be pinned. A transfer would then take the reference, and a kernel that is
            given the addresses of the host would fail.
    """
    pool = HostKVPool(geometry, num_pages, layout, runtime)
    if not pool.is_device_readable:
        nbytes = pool.nbytes
        pool.close()
        raise RuntimeError(f"{nbytes} bytes of host memory could not be pinned: nothing here can be measured without")
    return pool
