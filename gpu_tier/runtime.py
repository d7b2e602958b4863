"""What the tier needs of a device: streams, events, pinned memory. On a CPU everything is synchronous.

The streams are named: `compute` (where the engine computes), `h2d` (misses), `d2h` (offload), `upd` (what comes into a
block cache, beside the next layers). Work is ordered by events, never by waiting for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError

__all__ = ["CudaRuntime", "DeviceRuntime", "Event", "NullRuntime", "runtime_for", "upload"]


class Event(ABC):
    """A point in the work of a stream."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether all work before the point has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until it has."""


class DeviceRuntime(ABC):
    """Streams and events of one device.

    Attributes:
        device: where tensors live.
        device_name: what the device is, as its maker calls it.
    """

    device: torch.device
    device_name: str

    @abstractmethod
    def stream(self, name: str) -> Any:
        """Return a context in which work goes to the stream `name`."""

    @abstractmethod
    def record(self, name: str = "compute") -> Event:
        """Return an event behind all work given to the stream `name` so far."""

    @abstractmethod
    def fence(self, event: Event, name: str = "compute") -> None:
        """Let the stream `name` wait for an event; the host does not wait."""

    def used(self, *tensors: Tensor | None) -> None:  # noqa: B027 - a CPU reuses no memory while it is in use
        """Say that the current stream uses tensors that another stream may have made.

        Their memory is not given out again before the stream is done with the work launched so far.
        """

    def staging(self, nbytes: int) -> Tensor:
        """Return ``uint8 [nbytes]`` of host memory that copies to and from the device do not wait for.

        Its memory is given out again when it is dropped and the copies given to the current stream are done.
        """
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"


class _Done(Event):
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class NullRuntime(DeviceRuntime):
    """A CPU: one stream, everything done when the call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.device_name = "cpu"

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """See `DeviceRuntime`."""
        yield

    def record(self, name: str = "compute") -> Event:
        """See `DeviceRuntime`."""
        return _Done()

    def fence(self, event: Event, name: str = "compute") -> None:
        """See `DeviceRuntime`."""


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaRuntime(DeviceRuntime):
    """A GPU. `compute` is the stream that the engine has made current.

    Raises:
        ConfigError: the GPU is not the current one. torch switches GPUs for its own operations, but kernels of Triton
            and of our library are launched on the current one.
    """

    def __init__(self, device: torch.device) -> None:
        current = torch.cuda.current_device()
        if device.index not in (None, current):
            allowed = f"must be the current one, cuda:{current}; call torch.cuda.set_device({device.index}) before"
            raise ConfigError("device", str(device), allowed)
        self.device = torch.device("cuda", current)
        self.device_name = torch.cuda.get_device_name(current)
        self._streams = {name: torch.cuda.Stream(self.device) for name in ("h2d", "d2h", "upd")}

    def _named(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if name == "compute" else self._streams[name]

    def stream(self, name: str) -> Any:
        """See `DeviceRuntime`."""
        return torch.cuda.stream(self._named(name))

    def record(self, name: str = "compute") -> Event:
        """See `DeviceRuntime`."""
        event = torch.cuda.Event()
        event.record(self._named(name))
        return _CudaEvent(event)

    def used(self, *tensors: Tensor | None) -> None:
        """See `DeviceRuntime`."""
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def fence(self, event: Event, name: str = "compute") -> None:
        """See `DeviceRuntime`."""
        assert isinstance(event, _CudaEvent)
        self._named(name).wait_event(event.event)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The current stream copies it and the host does not wait.

    `Tensor.to` waits for everything that was given to the stream: in a step, for the whole step.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Pinning keeps strides: an expanded tensor cannot be pinned, and a strided one is copied through pageable memory.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def runtime_for(device: torch.device | str) -> DeviceRuntime:
    """Return the runtime of a device."""
    device = torch.device(device)
    return CudaRuntime(device) if device.type == "cuda" else NullRuntime()
