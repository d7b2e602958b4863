"""A device whose copies wait for everything before them and hold up everything behind them: what overlapping gains."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from kvcm.gpu_tier.runtime import CudaRuntime, DeviceRuntime, Event, NullRuntime

__all__ = ["serial_runtime"]


class _OneStream(CudaRuntime):
    """All named streams are the stream that computes."""

    def stream(self, name: str) -> Any:
        """See `DeviceRuntime`."""
        return nullcontext()

    def record(self, name: str = "compute") -> Event:
        """See `DeviceRuntime`."""
        return super().record("compute")

    def fence(self, event: Event, name: str = "compute") -> None:
        """See `DeviceRuntime`: one stream waits for nothing of its own."""


def serial_runtime(device: torch.device) -> DeviceRuntime:
    """Return a runtime without overlapping; a CPU's is one as it is."""
    return _OneStream(device) if device.type == "cuda" else NullRuntime()
