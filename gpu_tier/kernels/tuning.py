"""Tile sizes of Triton kernels: measured on a GPU, fixed where Triton interprets.

Measuring needs a GPU, so in the interpreter the first tiling is taken. On a GPU the first call with a new key measures
all of them: call every shape once, with lengths as they will be, before it is captured in a CUDA graph. A capture
without that takes the first tiling that fits, since nothing can be timed in a capture.
With `GPU_TIER_TUNING=first` nothing is measured there either: results are the same, bit by bit, in every process.

Tilings are compared by the time of the GPU alone: a CUDA graph of the call is timed, because launching from
Python takes longer than many of these kernels run. This file uses CUDA's streams and graphs for that alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch

__all__ = ["Tiling", "TunedKernel", "interpreting", "is_capturing", "next_power_of_2", "processors", "tunable"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to run a kernel.

    Attributes:
        sizes: names and values of its tile sizes.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
    """

    sizes: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def of(cls, num_warps: int = 4, num_stages: int = 2, **sizes: int) -> Tiling:
        """Return a tiling with sizes by name."""
        return cls(tuple(sizes.items()), num_warps, num_stages)

    def __getitem__(self, name: str) -> int:
        """Return a tile size."""
        return dict(self.sizes)[name]


class TunedKernel:
    """A Triton kernel with tile sizes to choose from: `choose` says with which, and `at` launches it.

    Args:
        function: what Triton compiles.
        tilings: to choose from; the first that fits is taken where nothing is measured.
        varying: names of integer arguments that change from call to call. It is not recompiled for a 1 or a
            multiple of 16 of them.
    """

    def __init__(self, function: Callable[..., Any], tilings: Sequence[Tiling], varying: Sequence[str] = ()) -> None:
        self._kernel: Any = import_module("triton").jit(function, do_not_specialize=list(varying))
        self.tilings = tuple(tilings)
        self._fastest: dict[Hashable, Tiling] = {}
        self.measures = not interpreting() and os.environ.get("GPU_TIER_TUNING") != "first"
        """Whether tilings are measured."""
        self.forced: Tiling | None = None
        """Tiling to use whatever else would be."""

    def at(self, tiling: Tiling, grid: Any) -> Callable[..., Any]:
        """Return the launcher of a grid with a tiling."""
        options = {**dict(tiling.sizes), "num_warps": tiling.num_warps, "num_stages": tiling.num_stages}

        def launch(*args: Any, **kwargs: Any) -> Any:
            return self._kernel[grid](*args, **kwargs, **options)

        return launch

    def choose(
        self, key: Hashable, fits: Callable[[Tiling], bool], call: Callable[[Tiling], object], *, measure: bool = True
    ) -> Tiling:
        """Return the tiling to call with: the fastest of those that fit, measured when the key is new.

        Args:
            key: what the choice depends on.
            fits: whether a tiling is worth trying; it is of at least one.
            call: does with a tiling all that depends on it, and may be repeated.
            measure: whether a new key may be measured now; otherwise the first that fits is taken.
        """
        if self.forced is not None:
            return self.forced
        if key in self._fastest:
            return self._fastest[key]
        candidates = [tiling for tiling in self.tilings if fits(tiling)]
        if not self.measures or not measure:
            return candidates[0]
        times = {tiling: _milliseconds(partial(call, tiling)) for tiling in candidates}
        return self._fastest.setdefault(key, min(times, key=times.__getitem__))


def _milliseconds(call: Callable[[], object]) -> float:
    """Return how long a call takes on the GPU, infinitely long if it asks for more than the GPU has."""
    testing: Any = import_module("triton.testing")
    errors: Any = import_module("triton.runtime.errors")
    try:
        return float(testing.do_bench(_replay(call), warmup=10, rep=50, return_mode="median"))
    except (errors.OutOfResources, errors.PTXASError):
        return float("inf")


def _replay(call: Callable[[], object]) -> Callable[[], object]:
    """Return what repeats a call without Python: the replay of a CUDA graph, or the call if it cannot be captured."""
    try:
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):  # around the capture too, which does not leave its stream when it fails
            call()  # compiles, and makes the scratch memory of this stream: neither belongs into a capture
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                call()
    except (RuntimeError, AssertionError):  # the latter is how a PyTorch without CUDA says so
        return call
    return graph.replay


@lru_cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the one stream of a device that calls are captured on: scratch memory is kept for each stream."""
    return torch.cuda.Stream(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether launches are captured in a CUDA graph now, so that none can be timed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tunable(tilings: Sequence[Tiling], varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], TunedKernel]:
    """Return what makes a kernel of a function; see `TunedKernel`."""
    return lambda function: TunedKernel(function, tilings, varying)


def interpreting() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@lru_cache
def processors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a GPU; a small number elsewhere, where programs run one by one."""
    if device.type != "cuda":
        return 2
    triton: Any = import_module("triton")
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["multiprocessor_count"])
