"""The steady runs of a batch, with which every plan of an execution buffer begins.

They are the same in all layers and heads, and are made and uploaded once a step.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_tier.kernels.token_runs import SteadyPlan
from gpu_tier.manager.steady_runs import SteadyPlaces, SteadyRuns
from gpu_tier.runtime import DeviceRuntime, upload
from gpu_tier.types import ForwardBatch, Source, SteadyRing, SteadyZone

__all__ = ["SteadyPlanner"]


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
            if self._may_select(request, first, length):
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

    def _may_select(self, request: int, first: int, length: int) -> bool:
        # Of rows that do not select, most have 0 for their first token. It is also that of a request without a sink
        # all of whose tokens are steady: all of them have places then, and a row that is masked out reads none.
        return request in self._places and (first > 0 or length <= self._places.ring(request).ring)

    def _upload(self, numbers: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return upload(torch.from_numpy(numbers), self._device)
