"""Tile sizes of Triton kernels: measured on a GPU, fixed where Triton interprets.

Measuring needs a GPU, so in the interpreter the first tiling is taken. On a GPU the first call with a new key measures
all of them: call every shape once, with lengths as they will be, before it is captured in a CUDA graph.
With `GPU_TIER_TUNING=first` nothing is measured there either: results are the same, bit by bit, in every process.

There are two ways to launch: ``kernel[grid](...)`` where the tiling is the kernel's own business (`triton.autotune`
measures it), and `choose` with `at` where more than the kernel depends on it, such as scratch memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
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

    def __getitem__(self, name: str) -> int:
        """Return a tile size."""
        return dict(self.sizes)[name]


class TunedKernel:
    """A Triton kernel that is launched like any other, ``kernel[grid](...)``, without naming its tile sizes.

    Args:
        function: what Triton compiles.
        tilings: to choose from; the first is taken where nothing is measured.
        key: names of the arguments that the choice depends on, beside the types of all.
    """

    def __init__(self, function: Callable[..., Any], tilings: Sequence[Tiling], key: Sequence[str]) -> None:
        self._kernel: Any = import_module("triton").jit(function)
        self.tilings = tuple(tilings)
        self._key = list(key)
        self._fastest: dict[Hashable, Tiling] = {}
        self.measures = not interpreting() and os.environ.get("GPU_TIER_TUNING") != "first"
        """Whether tilings are measured."""
        self.forced: Tiling | None = None
        """Tiling to use whatever else would be."""

    @cached_property
    def _measured(self) -> Any:
        triton: Any = import_module("triton")
        configs = [triton.Config(dict(t.sizes), num_warps=t.num_warps, num_stages=t.num_stages) for t in self.tilings]
        return triton.autotune(configs=configs, key=self._key)(self._kernel)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher of a grid; a callable grid gets the tile sizes by name."""
        if self.forced is None and self.measures:
            return self._measured[grid]  # type: ignore[no-any-return]
        return self.at(self.forced or self.tilings[0], grid)

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
            fits: tells whether a tiling is worth trying; it is of at least one.
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
        return float(testing.do_bench(call, warmup=10, rep=50, return_mode="median"))
    except (errors.OutOfResources, errors.PTXASError):
        return float("inf")


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
