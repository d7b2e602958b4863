"""Tile sizes of Triton kernels: measured on a GPU, fixed where Triton interprets.

`triton.autotune` needs a driver, so in the interpreter the first tiling is taken. On a GPU the first call with a new
key measures all of them: call every shape once, with lengths as they will be, before it is captured in a CUDA graph.
With `GPU_TIER_TUNING=first` nothing is measured there either: results are the same, bit by bit, in every process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import torch

__all__ = ["Tiling", "TunedKernel", "interpreting", "next_power_of_2", "processors", "tunable"]


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


class TunedKernel:
    """A Triton kernel that is launched like any other, ``kernel[grid](...)``, without naming its tile sizes.

    Args:
        function: what Triton compiles.
        tilings: to choose from; the first is for the interpreter.
        key: names of the arguments that the choice depends on, beside the types of all.
    """

    def __init__(self, function: Callable[..., Any], tilings: Sequence[Tiling], key: Sequence[str]) -> None:
        self._kernel: Any = import_module("triton").jit(function)
        self.tilings = tuple(tilings)
        self._key = list(key)
        first = interpreting() or os.environ.get("GPU_TIER_TUNING") == "first"
        self.forced: Tiling | None = tilings[0] if first else None
        """Tiling to use in place of the measured one."""

    @cached_property
    def _measured(self) -> Any:
        triton: Any = import_module("triton")
        configs = [triton.Config(dict(t.sizes), num_warps=t.num_warps, num_stages=t.num_stages) for t in self.tilings]
        return triton.autotune(configs=configs, key=self._key)(self._kernel)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher of a grid; a callable grid gets the tile sizes by name."""
        tiling = self.forced
        if tiling is None:
            return self._measured[grid]  # type: ignore[no-any-return]
        options = {**dict(tiling.sizes), "num_warps": tiling.num_warps, "num_stages": tiling.num_stages}

        def launch(*args: Any, **kwargs: Any) -> Any:
            return self._kernel[grid](*args, **kwargs, **options)

        return launch


def tunable(tilings: Sequence[Tiling], key: Sequence[str]) -> Callable[[Callable[..., Any]], TunedKernel]:
    """Return what makes a kernel of a function; see `TunedKernel`."""
    return lambda function: TunedKernel(function, tilings, key)


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
