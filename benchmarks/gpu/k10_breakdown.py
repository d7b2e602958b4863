"""K10, claim: in a layer of RetroInfer's step, look-up and copies take at most 150 µs at 120K tokens.

Events between the parts of whole steps, over some layers of Llama-3-8B: what passes on the device between two of them,
waiting for the host included, and beside it what the host took to issue the part. Parts are ranking (scores of all
centroids, zones), estimation, look-up of clusters, gathering (from the device and over the link), exact attention and
merging, admission to the cache. Without a cache, with one that is brought up to date before or beside attention, and
with the control on the CPU or on the device. The bar is that of the largest batch, with the cache beside attention.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import checkout  # noqa: F401 - first: it makes the rest importable
from device_run import DeviceRun, run
from k4_wave_decode import LLAMA, wave_config
from report import Row
from sparse_decode import PARTS, Marks, SparseDecode, counted_hit_rate
from sparse_system import SparseSystem, Work
from tiny_llama import TINY_LLAMA, TINY_PAGE, TINY_WAVE

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.eval.model_shapes import ModelShape
from kvcm.gpu_tier.runtime import runtime_for

MEASURES = "the parts of a layer of RetroInfer's decode step at 120K tokens"
MOST_MICROSECONDS = 150.0
_PLANTED = RetroInferConfig(iterations=0)


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a run.

    Attributes:
        model: all of it.
        layers: measured ones.
        n_tokens: of a prompt.
        batches: requests.
        hit_rate: with a cache.
        settings: of RetroInfer.
        page: tokens of a page.
        controls: of the wave buffer.
    """

    model: ModelShape = LLAMA
    layers: int = 8
    n_tokens: int = 122880
    batches: tuple[int, ...] = (1, 4)
    hit_rate: float = 0.85
    settings: RetroInferConfig = _PLANTED
    page: int = 64
    controls: tuple[str, ...] = ("cpu", "gpu")

    def ways(self) -> dict[str, RetroInferConfig]:
        """Return settings by name; the bar is the first one's."""
        found = {}
        for control in self.controls:
            settings = replace(self.settings, control=control)
            if control == "cpu":
                found["control cpu, cache beside attention"] = settings
                found["control cpu, cache before attention"] = replace(settings, async_update=False)
                found["control cpu, no cache"] = replace(settings, cache_ratio=0.0)
            else:
                found["control gpu"] = settings
        return found


FULL = Size()
QUICK = replace(FULL, layers=4, n_tokens=30720)
SMOKE = Size(TINY_LLAMA, 2, 300, (1, 2), 0.5, TINY_WAVE, TINY_PAGE)


def parts_of(this: DeviceRun, step: SparseDecode) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each part in every step, of the device and of the host, layers added up."""
    on_device: dict[str, list[float]] = {part: [] for part in PARTS}
    on_host: dict[str, list[float]] = {part: [] for part in PARTS}
    marks = Marks(this.clock.is_gpu)

    def marked() -> None:
        marks.clear()
        step.run(marks)

    for number in range(this.clock.total_steps):
        this.clock.once(marked, step.prepare)
        if number < this.clock.total_steps - this.clock.steps * this.clock.repetitions:
            continue
        for found, host in ((on_device, False), (on_host, True)):
            for part, seconds in marks.read(host).items():
                found[part].append(seconds)
    return on_device, on_host


def add_part(this: DeviceRun, case: str, seconds: list[float], layers: int, bar: float | None = None) -> None:
    """Publish what a part takes in a layer, median and 95th percentile over the steps."""
    scaled = sorted(taken / layers * 1e6 for taken in seconds)
    middle = median(scaled)
    wanted, ok = ("", None) if bar is None else (f"<= {bar:.0f}", middle <= bar)
    this.add(Row(case, "time in a layer, median", middle, "µs", target=wanted, ok=ok))
    this.add(Row(case, "time in a layer, 95th percentile", scaled[min(len(scaled) - 1, int(0.95 * len(scaled)))], "µs"))


def measure_batch(this: DeviceRun, size: Size, system: SparseSystem, batch: int, name: str, bar: float | None) -> None:
    """Publish the parts of one batch."""
    case = f"n={size.n_tokens}, B={batch}: {name}"
    step = SparseDecode(system, batch, size.hit_rate)
    whole = this.time(f"{case}: whole step", step.run, step.prepare, is_graph=False)
    this.add_time(f"{case}: whole step, a layer", whole, 1 / size.layers)
    on_device, on_host = parts_of(this, step)
    for part in PARTS:
        add_part(this, f"{case}: {part}", on_device[part], size.layers)
        add_part(this, f"{case}: {part}, issued by the host", on_host[part], size.layers)
    both = [looked_up + gathered for looked_up, gathered in zip(on_device["lookup"], on_device["gather"], strict=True)]
    add_part(this, f"{case}: look-up and gathering", both, size.layers, bar)
    this.add(Row(case, "hit rate counted", counted_hit_rate(step), "", size.hit_rate))
    ok = step.is_right()
    this.add_check(Row(case, "buffer equals host", int(ok), "", target="1", ok=ok))


def measure(this: DeviceRun) -> None:
    """All ways."""
    size = SMOKE if this.is_smoke else QUICK if this.is_quick else FULL
    shape = replace(size.model, geometry=replace(size.model.geometry, num_layers=size.layers))
    headline = size is FULL
    for number, (name, settings) in enumerate(size.ways().items()):
        if this.leaves_out(f"n={size.n_tokens}: {name}"):
            continue
        most = max(size.batches)
        work = Work(shape, wave_config(settings, size.page), most, size.n_tokens, settings.update_segment // 2)
        system = SparseSystem(work, this.clock, runtime_for(this.device))
        for batch in size.batches:
            bar = MOST_MICROSECONDS if headline and number == 0 and batch == most else None
            measure_batch(this, size, system, batch, name, bar)
        system.close()


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
