"""The ids of selected clusters on their way to the host, which looks them up there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_tier.runtime import DeviceRuntime, Event
from gpu_tier.types import Selection

__all__ = ["SelectedIds"]


@dataclass(frozen=True, slots=True)
class _Copy:
    selection: Selection
    numbers: Tensor
    done: Event


class SelectedIds:
    """Copies selections to the host beside what else the device computes.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._copy: _Copy | None = None

    def fetch(self, selection: Selection) -> None:
        """Begin to copy a selection; one that was not asked for is forgotten."""
        runtime = self._runtime
        # One piece, so that one copy brings ids and lengths. It is new memory: the selection may be overwritten.
        numbers = torch.cat([selection.indices.flatten(), selection.lengths.flatten()])
        runtime.fence(runtime.record("compute"), "upd")
        with runtime.stream("upd"):
            on_host = runtime.staging(numbers.nbytes).view(torch.int32)
            on_host.copy_(numbers, non_blocking=True)
            runtime.used(numbers)
        self._copy = _Copy(selection, on_host, runtime.record("upd"))

    def wait(self, selection: Selection) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return a selection's ids ``int32 [B, H, K]`` and lengths ``int32 [B, H]`` when they have arrived."""
        if self._copy is None or self._copy.selection is not selection:
            self.fetch(selection)
        assert self._copy is not None
        copied, self._copy = self._copy, None
        copied.done.wait()
        ids = selection.indices.numel()
        numbers = copied.numbers.numpy()
        return numbers[:ids].reshape(selection.indices.shape), numbers[ids:].reshape(selection.lengths.shape)
