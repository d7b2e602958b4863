"""One run of a GPU benchmark: its options, the device and its measured peaks, and the published rows.

Every figure stands beside the peak measured in the same process, the driver, the versions and the commit. A speed-up is
published only if the baseline was worth beating: full attention has to reach `LEAST_OF_ROOFLINE` of what the device's
memory, or its products, allow; and only if both sides were captured in a graph, or neither. Where that is not so, times
are published and ratios are not. Measured cases are published even if a later case fails.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from device_clock import DeviceClock, Samples
from report import Row, arguments, publish

__all__ = ["LEAST_OF_ROOFLINE", "DeviceRun", "Peaks", "run"]

LEAST_OF_ROOFLINE = 0.75
_LATE_SECONDS = 420.0
_MEANINGLESS = "CPU smoke, meaningless: "


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the device did at best in this process.

    Attributes:
        hbm: bytes per second of a copy in its memory, read plus written.
        h2d: bytes per second from pinned host memory.
        d2h: bytes per second to it.
        flops: operations per second of a bf16 product.
    """

    hbm: float
    h2d: float
    d2h: float
    flops: float


@dataclass
class DeviceRun:
    """What a benchmark works with, and collects.

    Attributes:
        clock: of the device.
        is_smoke: whether sizes are tiny and figures mean nothing.
        is_quick: whether fewer sizes are measured.
        rows: figures so far.
    """

    clock: DeviceClock
    is_smoke: bool
    is_quick: bool
    rows: list[Row] = field(default_factory=list)
    _raw: list[tuple[str, Samples]] = field(default_factory=list)
    _peaks: Peaks | None = None
    _started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def leaves_out(self, case: str) -> bool:
        """Return whether there is no time to begin a case, and say so: no script may take ten minutes."""
        is_late = self.seconds > _LATE_SECONDS
        if is_late:
            self.add(Row(case, "left out: no time left", 1, ""))
        return is_late

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self.clock.device

    @property
    def peaks(self) -> Peaks:
        """Measured when first asked for, with rows of their own."""
        if self._peaks is None:
            large = 1 << 12 if self.is_smoke else 1 << 30
            h2d, d2h = self.clock.link_peaks(large)
            self._peaks = Peaks(
                self.clock.copy_peak(large), h2d, d2h, self.clock.product_peak(64 if self.is_smoke else 8192)
            )
            self.add(Row("peak", "copy in device memory, read + written", self._peaks.hbm / 1e9, "GB/s"))
            self.add(Row("peak", "copy from pinned host memory", h2d / 1e9, "GB/s"))
            self.add(Row("peak", "copy to pinned host memory", d2h / 1e9, "GB/s"))
            self.add(Row("peak", "bf16 product", self._peaks.flops / 1e12, "TFLOP/s"))
        return self._peaks

    def time(
        self,
        case: str,
        step: Callable[[], object],
        prepare: Callable[[int], object] | None = None,
        is_graph: bool = True,
        host_goes_ahead: bool = False,
    ) -> Samples:
        """Time a step and keep every sample for the raw file.

        Args:
            case: its name.
            step: the timed callable.
            prepare: called with the number of the step before each, outside its time.
            is_graph: whether the step is captured in a graph, if it can be.
            host_goes_ahead: see `DeviceClock.samples`.
        """
        replay, is_graph = self.clock.captured(step) if is_graph else (step, False)
        samples = self.clock.samples(replay, prepare, is_graph, host_goes_ahead)
        self._raw.append((case, samples))
        return samples

    def add(self, row: Row) -> None:
        """Publish a figure. Of a smoke run ratios and targets are left out: they would look like results."""
        if self.is_smoke:
            row = Row(row.case, _MEANINGLESS + row.metric, row.value, row.unit)
        self.rows.append(row)

    def add_check(self, row: Row) -> None:
        """Publish whether something is right: that counts at any size."""
        self.rows.append(row)

    def add_time(self, case: str, samples: Samples, scale: float = 1.0) -> None:
        """Publish a median and a 95th percentile in microseconds; `scale` divides a step of several calls."""
        how = "one graph" if samples.is_graph else "launched one by one"
        self.add(Row(case, f"time, median ({how})", samples.median * scale * 1e6, "µs"))
        self.add(Row(case, "time, 95th percentile", samples.p95 * scale * 1e6, "µs"))

    def add_share(self, case: str, metric: str, speed: float, peak: float, target: float | None) -> None:
        """Publish a speed in GB/s beside a peak."""
        share = speed / peak
        wanted, ok = ("", None) if target is None else (f"share of the peak >= {target:.2f}", share >= target)
        self.add(Row(case, metric, speed / 1e9, "GB/s", peak / 1e9, share, wanted, ok))

    def add_speed_up(
        self, case: str, over: str, gain: float, dense_share: float | None, graphs: tuple[bool, bool]
    ) -> None:
        """Publish how much faster something is than a baseline, or why that is not stated.

        Args:
            case: the faster one.
            over: the baseline.
            gain: time of the baseline over that of the case.
            dense_share: what full attention reaches of the roofline; None where it was not measured.
            graphs: whether the case and the baseline were captured in a graph.
        """
        if self.is_smoke:
            return
        reason = _no_speed_up(dense_share, graphs)
        if reason:
            self.add(Row(case, f"no speed-up over {over} stated: {reason}", dense_share or 0.0, ""))
        else:
            self.add(Row(case, f"speed-up over {over}", gain, "x", ratio=gain))

    def write_raw(self, path: Path) -> None:
        """Write every sample: case, step, seconds."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("case", "step", "seconds"))
            for case, samples in self._raw:
                writer.writerows((case, step, f"{taken:.9f}") for step, taken in enumerate(samples.seconds))


def run(doc: str, measures: str, measure: Callable[[DeviceRun], None], argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit status.

    Args:
        doc: what it claims.
        measures: what it would measure, for machines without a GPU.
        measure: does it.
        argv: arguments instead of the command line's.
    """
    parser = arguments(doc)
    parser.add_argument("--cpu-smoke", action="store_true", help="run tiny sizes on the CPU; figures mean nothing")
    options = parser.parse_args(argv)
    if not options.cpu_smoke and not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: needs a CUDA GPU. It would measure {measures}", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    this = _device_run(options.cpu_smoke, options.quick)
    before = _described(this)
    _measure(this, measure)
    device = before | {"clocks, memory in use after": _clocks(this)}
    met = publish(doc.partition("\n")[0], this.rows, options.json, device)
    if options.json is not None:
        this.write_raw(options.json.with_suffix(".csv"))
    return 0 if met else 1


def _measure(this: DeviceRun, measure: Callable[[DeviceRun], None]) -> None:
    try:
        measure(this)
    except Exception as error:  # of any kind: the cases measured before it are published
        traceback.print_exc()
        text = f"stopped: {type(error).__name__}: {error}"[:300]
        this.add_check(Row("the run", text, 1, "", target="= 0", ok=False))


def _no_speed_up(dense_share: float | None, graphs: tuple[bool, bool]) -> str:
    ours, baseline = graphs
    if ours != baseline:
        return f"only {'this' if ours else 'the baseline'} was captured in a graph"
    if dense_share is None:
        return "full attention was not measured there"
    if dense_share < LEAST_OF_ROOFLINE:
        return f"full attention reaches less than {LEAST_OF_ROOFLINE:.2f} of the roofline"
    return ""


def _device_run(is_smoke: bool, is_quick: bool) -> DeviceRun:
    if is_smoke:
        return DeviceRun(DeviceClock(torch.device("cpu"), steps=2, repetitions=1), True, True)
    clock = DeviceClock(torch.device("cuda", torch.cuda.current_device()), steps=50, repetitions=1 if is_quick else 3)
    return DeviceRun(clock, False, is_quick)


def _described(this: DeviceRun) -> dict[str, str]:
    described = {"torch": torch.__version__, "triton": _version("triton"), "command": " ".join(sys.argv)}
    if not this.clock.is_gpu:
        return described | {"name": "CPU smoke: no figure here means anything"}
    properties = torch.cuda.get_device_properties(this.device)
    return described | {
        "name": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "memory_bytes": str(properties.total_memory),
        "cuda": str(torch.version.cuda),
        "driver": _asked("driver_version"),
        "clocks, memory in use before": _clocks(this),
    }


def _clocks(this: DeviceRun) -> str:
    return _asked("clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used") if this.clock.is_gpu else ""


def _asked(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: nvidia-smi did not answer"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
