"""Times work on a device as the protocol of the GPU benchmarks asks for.

1. Medians of at least 50 steps, after warm-ups, in three repetitions; the 95th percentile beside them.
2. Between two events of the device, which sees its own work and not the host. Before every step a buffer larger than
   the L2 cache is written, and read so that none of its writes is left to be done in the step's time: nothing is read
   from the cache that a real step would not find there, and the host has time to enqueue the step, so that no launch is
   waited for.
3. Steps of several kernels are captured in a graph where they can be; whether they were is part of the result.

On a CPU the same calls run with a wall clock: to see that a script works, never for a figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

__all__ = ["DeviceClock", "Samples"]

Step = Callable[[], object]
Prepare = Callable[[int], object]

_L2_FLUSH_BYTES = 256 << 20
_FILL_BYTES = 64 << 20
_WARM_UPS = 10
_AHEAD_CYCLES = 40_000_000  # some 20 ms


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of the steps of all repetitions.

    Attributes:
        seconds: of every step, repetition by repetition.
        is_graph: whether a step was one replay of a graph.
    """

    seconds: tuple[float, ...]
    is_graph: bool = False

    @property
    def median(self) -> float:
        """Of all steps."""
        return median(self.seconds)

    @property
    def p95(self) -> float:
        """Of all steps."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(0.95 * len(self.seconds)))]


class DeviceClock:
    """The clock of one device.

    Args:
        device: whose work is timed.
        steps: of each repetition.
        repetitions: how often.
    """

    def __init__(self, device: torch.device, steps: int = 50, repetitions: int = 3) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.steps = steps
        self.repetitions = repetitions
        self._warm_ups = _WARM_UPS if self.is_gpu else 1
        self._flush = torch.zeros(_L2_FLUSH_BYTES // 8 if self.is_gpu else 1, dtype=torch.int64, device=device)
        self._sink = torch.zeros((), dtype=torch.int64, device=device)
        self._side: torch.cuda.Stream | None = None

    @property
    def total_steps(self) -> int:
        """Steps of one call of `samples`."""
        return self._warm_ups + self.steps * self.repetitions

    def samples(
        self, step: Step, prepare: Prepare | None = None, is_graph: bool = False, host_goes_ahead: bool = False
    ) -> Samples:
        """Time a step.

        Args:
            step: the timed callable.
            prepare: called with the number of the step before each, outside its time.
            is_graph: whether `step` replays a graph.
            host_goes_ahead: let the device wait some milliseconds before each step, so that the host has enqueued all
                of it: for steps that compute arguments of the device on the host, which an engine does beside others.
        """
        number = 0
        seconds: list[float] = []
        for repetition in range(self.repetitions):
            times = []
            for count in range(self.steps + (self._warm_ups if repetition == 0 else 0)):
                if prepare is not None:
                    prepare(number)
                number += 1
                times.append(self._begin_and_end(step, host_goes_ahead))
                if repetition == 0 and count < self._warm_ups:
                    times.clear()
            self._synchronize()
            seconds += [end() for end in times]
        return Samples(tuple(seconds), is_graph)

    def once(self, step: Step, prepare: Prepare) -> None:
        """Run a step as `samples` does and wait for it: for steps that take the time of their parts themselves."""
        prepare(0)
        self._begin_and_end(step, host_goes_ahead=False)
        self._synchronize()

    def captured(self, step: Step) -> tuple[Step, bool]:
        """Return a step as the replay of a graph and True, or the step itself and False where it cannot be one."""
        if not self.is_gpu:
            return step, False
        # One stream for all: scratch memory of kernels is kept for each stream and never freed.
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                step()
        except RuntimeError as error:
            print(f"not captured in a graph, timed with its launches: {error}".splitlines()[0])
            self._synchronize()
            return step, False
        return graph.replay, True

    def copy_peak(self, nbytes: int) -> float:
        """Return the bytes per second of a copy inside the device, bytes read plus bytes written."""
        source = self.random_bytes(nbytes)
        return 2 * nbytes / self._peak(torch.empty_like(source), source)

    def link_peaks(self, nbytes: int) -> tuple[float, float]:
        """Return the bytes per second of one large copy from pinned host memory, and of one to it."""
        on_device = self.random_bytes(nbytes)
        on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_gpu)
        on_host.copy_(on_device)
        return nbytes / self._peak(on_device, on_host), nbytes / self._peak(on_host, on_device)

    def product_peak(self, size: int) -> float:
        """Return the operations per second of a product of two square bf16 matrices of random numbers."""
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.samples(lambda: left @ right).median

    def random_bytes(self, nbytes: int) -> Tensor:
        """Return random bytes on the device: zeros are faster than data on some devices."""
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device)

    def fill(self, data: Tensor, piece: Tensor | None = None) -> None:
        """Write a piece of bytes over and over, or random ones, drawn on the device: a host would take minutes."""
        if piece is None:
            piece = self.random_bytes(min(len(data), _FILL_BYTES))
        for start in range(0, len(data), len(piece)):
            stop = min(start + len(piece), len(data))
            data[start:stop].copy_(piece[: stop - start])

    def _peak(self, target: Tensor, source: Tensor) -> float:
        # The best of some large copies: a peak is what the device can do, not what it does on average.
        return min(self.samples(lambda: target.copy_(source, non_blocking=True)).seconds)

    def _begin_and_end(self, step: Step, host_goes_ahead: bool) -> Callable[[], float]:
        if not self.is_gpu:
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            return lambda: taken
        self._flush.zero_()
        # The bytes just written stay dirty in the L2 cache until other bytes replace them.
        torch.amax(self._flush, dim=0, out=self._sink)
        if host_goes_ahead:
            torch.cuda._sleep(_AHEAD_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3

    def _synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
