"""Host memory in which the control writes plans, and the way of the plans to the device: one copy each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_tier.manager.wave_control import Change, Changes, Control, Lines, Plan, Stat
from gpu_tier.runtime import DeviceRuntime, upload
from gpu_tier.types import CopyRuns, ExecutionPlan, Source

__all__ = ["Plans"]

_FEWEST_RUNS = 64
_RUN_BYTES = 20  # src, kind, dst, tokens
_COPY_BYTES = 16  # src, dst, tokens


class Plans:
    """Makes plans of what the control finds.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._room = _FEWEST_RUNS  # runs of a line: what was needed so far, and some more

    def look_up(self, control: Control, lines: Lines) -> tuple[ExecutionPlan, npt.NDArray[np.int64]]:
        """Return how the execution buffer is put together, and what is to say of each line, by `Stat`."""
        packed, plan = self._packed(lines.count)
        control.look_up(lines, plan)
        needed = int(plan.stats[:, Stat.RUNS].max(initial=0))
        if needed > self._room:
            self._room = needed + needed // 4
            packed, plan = self._packed(lines.count)
            control.look_up(lines, plan)
        return self._uploaded(packed, lines), plan.stats

    def _packed(self, lines: int) -> tuple[Tensor, Plan]:
        runs = lines * self._room
        packed = self._runtime.staging(_RUN_BYTES * runs + 8 * lines)
        src, rest = packed[: 8 * runs].view(torch.int64), packed[8 * runs :].view(torch.int32)
        arrays = rest.split([runs, runs, runs, lines, lines])
        kind, dst, tokens = (array.view(lines, -1).numpy() for array in arrays[:3])
        stats = np.zeros((lines, len(Stat)), np.int64)
        return packed, Plan(
            src.view(lines, -1).numpy(), kind, dst, tokens, arrays[3].numpy(), arrays[4].numpy(), stats
        )  # fmt: skip

    def _uploaded(self, packed: Tensor, lines: Lines) -> ExecutionPlan:
        count, runs = lines.count, lines.count * self._room
        device = upload(packed, self._runtime.device)
        src = device[: 8 * runs].view(torch.int64).view(count, -1)
        kind, dst, tokens, number, lens = device[8 * runs :].view(torch.int32).split([runs, runs, runs, count, count])
        shaped = CopyRuns(kind.view(count, -1), src, dst.view(count, -1), tokens.view(count, -1), number)
        return ExecutionPlan(shaped, lens.view(lines.lengths.shape))

    def copies(self, changes: Changes) -> CopyRuns | None:
        """Return the copies from the execution buffer into the cache, None when there are none."""
        counts = changes.counts[:, Change.COPIES]
        lines, most = len(counts), int(counts.max(initial=0))
        if not most:
            return None
        runs = lines * most
        packed = self._runtime.staging(_COPY_BYTES * runs + 4 * lines)
        packed[: 8 * runs].view(torch.int64).view(lines, most).numpy()[:] = changes.src[:, :most]
        rest = packed[8 * runs :].view(torch.int32)
        rest[:runs].view(lines, most).numpy()[:] = changes.dst[:, :most]
        rest[runs : 2 * runs].view(lines, most).numpy()[:] = changes.tokens[:, :most]
        rest[2 * runs :].numpy()[:] = counts
        device = upload(packed, self._runtime.device)
        src = device[: 8 * runs].view(torch.int64).view(lines, most)
        dst, tokens, count = device[8 * runs :].view(torch.int32).split([runs, runs, lines])
        kind = torch.full((lines, most), int(Source.STEADY), dtype=torch.int32, device=device.device)
        return CopyRuns(kind, src, dst.view(lines, most), tokens.view(lines, most), count)
