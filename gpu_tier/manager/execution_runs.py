"""Puts the runs of an execution plan together: steady tokens first, then the items that were selected.

The steady runs of a batch are the same in all layers and heads, and are uploaded once a step; the items' runs are made
on the device. Where a token goes in the buffer follows from the selection alone, never from what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_tier.kernels.token_runs import SteadyPlan
from gpu_tier.manager.steady_runs import SteadyPlaces, SteadyRuns
from gpu_tier.runtime import DeviceRuntime, upload
from gpu_tier.types import CopyRuns, ExecutionPlan, ForwardBatch, Source, SteadyRing, SteadyZone

__all__ = ["ItemRuns", "SteadyPlanner", "execution_plan"]


@dataclass(frozen=True, slots=True)
class ItemRuns:
    """The runs of the selected items of each row and head, in the order of the selection, ``[B, H, U]`` each.

    Attributes:
        kind: ``int32`` source, -1 behind the items.
        src: ``int64`` slot of the first token.
        tokens: ``int32`` tokens of the run, 0 behind the items.
        lengths: ``int32 [B, H]`` runs of each row and head.
    """

    kind: Tensor
    src: Tensor
    tokens: Tensor
    lengths: Tensor


class SteadyPlanner:
    """Makes the steady runs of a batch, once a step.

    Args:
        tokens_per_row: slots of a row of the execution buffer.
        runtime: of the device.
    """

    def __init__(self, tokens_per_row: int, runtime: DeviceRuntime) -> None:
        self._places = SteadyPlaces()
        self._tokens_per_row = tokens_per_row
        self._device = runtime.device
        self._last: tuple[object, SteadyPlan] | None = None

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """See `SteadyPlaces.admit`."""
        self._places.admit(request, ring, buffer_slots)
        self._last = None

    def release(self, request: int) -> None:
        """See `SteadyPlaces.release`."""
        self._places.release(request)
        self._last = None

    def __contains__(self, request: int) -> bool:
        return request in self._places

    def plan(self, batch: ForwardBatch, zone: SteadyZone) -> SteadyPlan:
        """Return the steady runs of a batch, none of rows that do not select or have no places.

        Raises:
            StateError: more tokens of a request are steady than have places.
        """
        key = (batch.requests, batch.lengths, batch.rows, zone.firsts)
        if self._last is None or self._last[0] != key:
            self._last = key, self._packed(batch, zone.firsts)
        return self._last[1]

    def _packed(self, batch: ForwardBatch, firsts: tuple[int, ...]) -> SteadyPlan:
        runs: dict[int, SteadyRuns] = {}
        for row, (request, first, length) in enumerate(zip(batch.requests, firsts, batch.lengths, strict=True)):
            if first > 0 and request in self._places:
                runs[row] = self._places.runs(request, first, length)
        width = max((len(run.src) for run in runs.values()), default=0)
        begin = np.arange(batch.rows) * self._tokens_per_row
        kind_dst_tokens = np.zeros((3, batch.rows, width), np.int32)
        kind_dst_tokens[0] = -1
        src = np.zeros((batch.rows, width), np.int64)
        total = np.zeros(batch.rows, np.int64)
        for row, run in runs.items():
            used = slice(len(run.src))
            kind_dst_tokens[0, row, used] = int(Source.STEADY)
            kind_dst_tokens[1, row, used] = begin[row] + run.first
            kind_dst_tokens[2, row, used] = run.tokens
            src[row, used] = run.src
            total[row] = run.total
        kind, dst, tokens = self._upload(kind_dst_tokens)
        end, total_of_row = self._upload(np.stack([begin + total, total]).astype(np.int32))
        return SteadyPlan(kind, self._upload(src), dst, tokens, end, total_of_row)

    def _upload(self, numbers: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return upload(torch.from_numpy(numbers), self._device)


def execution_plan(steady: SteadyPlan, items: ItemRuns, active: Tensor) -> ExecutionPlan:
    """Return the plan of a step of one layer; nothing waits for the device.

    Args:
        steady: of the batch.
        items: of the layer.
        active: ``bool [B]`` rows that have a plan; the others have no runs.
    """
    rows, heads, width = items.kind.shape
    behind = items.tokens.cumsum(-1)
    dst = steady.end[:, None, None] + behind - items.tokens

    def lines(of_steady: Tensor, of_items: Tensor) -> Tensor:
        return torch.cat([of_steady[:, None].expand(-1, heads, -1), of_items], -1).view(rows * heads, -1)

    total = behind[..., -1] if width else torch.zeros(rows, heads, dtype=torch.int64, device=active.device)
    lens = (steady.total[:, None] + total).where(active[:, None], 0).int()
    count = (steady.kind.shape[-1] + items.lengths).where(active[:, None], 0).int().flatten()
    runs = CopyRuns(
        lines(steady.kind, items.kind), lines(steady.src, items.src), lines(steady.dst, dst.int()),
        lines(steady.tokens, items.tokens), count,
    )  # fmt: skip
    return ExecutionPlan(runs, lens)
