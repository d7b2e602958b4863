"""A stand-in for the events and graphs of a device, for tests of what the GPU benchmarks publish on one."""

from __future__ import annotations

import importlib
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

__all__ = ["Event", "Graph", "Stream", "device_run", "found", "install", "script"]

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


class Event:
    """An event of a device on which every step takes 2 ms."""

    ticks = itertools.count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.tick = next(self.ticks)

    def elapsed_time(self, other: Event) -> float:
        return 2.0 * (other.tick - self.tick)


class Graph:
    """A graph that remembers nothing: whoever replays it only wants the time."""

    def replay(self) -> None:
        return None


class Stream:
    """A stream that is always done."""

    def __init__(self, *_: Any) -> None:
        return None

    def wait_stream(self, other: Stream) -> None:
        return None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch and the scripts believe that there is a device."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("GPU_TIER_KERNELS", "reference")
    for name, value in {
        "Event": Event, "Stream": Stream, "CUDAGraph": Graph, "current_stream": Stream,
        "stream": lambda _: nullcontext(), "graph": lambda _, stream: nullcontext(), "synchronize": lambda _: None,
        "_sleep": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    script("checkout")  # first: it makes the others importable


def script(name: str) -> ModuleType:
    """Return a script of the benchmarks."""
    return importlib.import_module(name)


def device_run(**peaks: float) -> Any:
    """Return a run that believes to be on a device with these peaks."""
    clock = script("device_clock").DeviceClock(torch.device("cpu"), steps=2, repetitions=1)
    clock.is_gpu = True
    this = script("device_run").DeviceRun(clock, is_smoke=False, is_quick=True)
    this._peaks = script("device_run").Peaks(**{"hbm": 1e12, "h2d": 1e9, "d2h": 1e9, "flops": 1e12} | peaks)
    return this


def found(this: Any, metric: str) -> list[Any]:
    """Return the rows of a run whose metric contains a text."""
    return [row for row in this.rows if metric in row.metric]
