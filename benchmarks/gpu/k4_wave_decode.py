"""K4, claim: RetroInfer with its KV on the host decodes 3 times as many tokens as full attention of what fits.

Some attention layers of Llama-3-8B, requests of n tokens, half an update segment decoded. The KV budget on the device
is that of an 80 GB GPU beside 16 GB of weights, scaled like the layers; it decides how many requests full attention
has. The wave index has as many as its bytes on the device (index, cache, execution buffer) and those on the host allow.
Batches rise from 1, so that rows at the same batch show where it loses. Beside it stand the control on the device, at
the longest prompts, and all KV on the device (gpu_only).

Steps are launched one by one on both sides: the control on the CPU needs the clusters' numbers in every layer, so no
graph can hold a step.

The hit rate is an input. The index is built of planted keys without k-means iterations; what a build costs is K8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import checkout  # noqa: F401 - first: it makes the rest importable
from dense_decode import DenseDecode, dense_share, fastest_dense
from device_run import DeviceRun, run
from report import Row
from scaled_layers import Layers, Speed, best
from sparse_decode import SparseDecode, counted_hit_rate
from sparse_system import SparseSystem, Work, store_bytes
from tiny_llama import TINY_LLAMA, TINY_PAGE, TINY_WAVE

from kvcm.gpu_tier.config import RetroInferConfig, SparseConfig
from kvcm.gpu_tier.eval.capacity_plan import footprint
from kvcm.gpu_tier.eval.model_shapes import ModelShape, model_shape
from kvcm.gpu_tier.eval.roofline import traffic, wave_block_tokens, wave_retrieved
from kvcm.gpu_tier.pools.pinned import LARGEST_SHARE, available_bytes
from kvcm.gpu_tier.runtime import runtime_for

MEASURES = "decode throughput of RetroInfer and of full attention at one KV budget, 30K to 120K tokens"
GOAL = 3.0
WHOLE_DEVICE = 1 << 10
FULL_ATTENTION = SparseConfig("full")
LLAMA = model_shape("llama3-8b")
_PLANTED = RetroInferConfig(iterations=0)


def wave_config(settings: RetroInferConfig, page: int) -> SparseConfig:
    """Return RetroInfer in blocks whose copies may use the whole device."""
    return SparseConfig("retroinfer", page_size=page, io_blocks=WHOLE_DEVICE, residency="blocks", algo=settings)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sizes of a sweep.

    Attributes:
        model: all of it.
        layers: measured ones.
        budget_bytes: of KV and index on the device, at the model's depth.
        host_bytes: of clusters on the host, 0 for what this host has now.
        lengths: tokens of a prompt.
        batches: requests, below what fits; what fits is added.
        hit_rates: (of all batches, of the largest one only).
        most_batch: more requests are not tried.
        settings: of RetroInfer.
        page: tokens of a page.
        controls: of the wave buffer.
    """

    model: ModelShape = LLAMA
    layers: int = 8
    budget_bytes: int = 64 << 30
    host_bytes: int = 0
    lengths: tuple[int, ...] = (122880, 61440, 30720)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    hit_rates: tuple[tuple[float, ...], tuple[float, ...]] = ((0.85,), (0.0, 0.5, 0.7, 0.95, 1.0))
    most_batch: int = 48
    settings: RetroInferConfig = _PLANTED
    page: int = 64
    controls: tuple[str, ...] = ("cpu", "gpu")

    def on_device(self, config: SparseConfig, n_tokens: int) -> int:
        """Return how many requests fit under the budget on the device."""
        return self.budget_bytes // footprint(self.model, self._as_allocated(config, n_tokens), n_tokens).device

    def _as_allocated(self, config: SparseConfig, n_tokens: int) -> SparseConfig:
        """Return settings with the cache of the control on the device: it holds all clusters that a step may select."""
        settings = config.algo
        if not isinstance(settings, RetroInferConfig) or settings.control == "cpu":
            return config
        retrieved = wave_retrieved(settings, n_tokens) // settings.tokens_per_centroid
        widest = settings.exec_factor * retrieved * settings.tokens_per_centroid + settings.update_segment
        widest += (retrieved + 1) * wave_block_tokens(self.model.geometry, settings)
        return replace(config, algo=replace(settings, cache_ratio=min(1, max(settings.cache_ratio, widest / n_tokens))))

    def on_host(self, config: SparseConfig, n_tokens: int) -> int:
        """Return the number of requests that fit on the host; `most_batch` where the way keeps nothing there."""
        each = store_bytes(self.work(config, 1, n_tokens))
        return self.host() // each if each else self.most_batch

    def most(self, config: SparseConfig, n_tokens: int) -> int:
        """Return how many requests are tried at most."""
        return min(self.most_batch, self.on_device(config, n_tokens), self.on_host(config, n_tokens))

    def host(self) -> int:
        """Return the bytes of clusters on the host."""
        return self.host_bytes or int(LARGEST_SHARE * (available_bytes() or 0))

    def settled(self) -> Sweep:
        """Return the same with what the host has now: it has less once a store is there."""
        return replace(self, host_bytes=self.host())

    def work(self, config: SparseConfig, batch: int, n_tokens: int) -> Work:
        """Return requests."""
        shape = replace(self.model, geometry=replace(self.model.geometry, num_layers=self.layers))
        return Work(shape, config, batch, n_tokens, self.settings.update_segment // 2)

    def sizes(self, most: int) -> list[int]:
        """Return the batches to measure."""
        return sorted({batch for batch in self.batches if batch < most} | ({most} if most else set()))


FULL = Sweep()
QUICK = replace(FULL, lengths=(30720,), batches=(1, 4), hit_rates=((0.85,), ()), most_batch=8)
SMOKE = Sweep(TINY_LLAMA, 2, 1 << 20, 64 << 20, (300,), (1,), ((0.5,), (1.0,)), 3, TINY_WAVE, TINY_PAGE)


class Bench:
    """One length of prompts.

    Args:
        this: the run.
        sweep: its sizes.
        n_tokens: of a prompt.
    """

    def __init__(self, this: DeviceRun, sweep: Sweep, n_tokens: int) -> None:
        self.this, self.sweep, self.n_tokens = this, sweep, n_tokens
        self.case = f"n={n_tokens}"
        self.runtime = runtime_for(this.device)
        self.layers = Layers(this, sweep.model, sweep.layers)
        self.shares: dict[int, float] = {}

    def batches(self, config: SparseConfig, name: str) -> Iterator[int]:
        """Yield the batches of a way while there is time, smaller ones first, and say which are left out."""
        for batch in self.sweep.sizes(self.sweep.most(config, self.n_tokens)):
            if not self.this.leaves_out(f"{self.case}, B={batch}: {name}"):
                yield batch

    def full(self) -> dict[int, Speed]:
        """Measure full attention; return its speeds by batch."""
        found = {}
        n_tokens = self.n_tokens + self.sweep.settings.update_segment // 2
        for batch in self.batches(FULL_ATTENTION, "full"):
            dense = DenseDecode(self.layers.shape, batch, n_tokens, self.this.clock, self.runtime)
            name, samples = fastest_dense(self.this, f"{self.case}, B={batch}", dense, is_graph=False)
            found[batch] = self.layers.publish(self.case, name, batch, samples)
            self.shares[batch] = dense_share(self.this, self.layers.shape, batch, n_tokens, samples.median)
            graph = self.this.time(f"{self.case}, B={batch}: full, ours, captured", dense.ours)
            self.this.add_time(
                f"{self.case}, B={batch}: full, ours, captured ({self.layers.label})", graph, self.layers.scale
            )
        return found

    def wave(self, settings: RetroInferConfig) -> tuple[list[Speed], bool]:
        """Measure RetroInfer with its KV on the host; return its speeds, and whether all batches ran."""
        config = wave_config(settings, self.sweep.page)
        found: list[Speed] = []
        name = f"wave, control {settings.control}"
        most = self.sweep.most(config, self.n_tokens)
        if not most or self.this.leaves_out(f"{self.case}: {name}"):
            return found, False
        case = f"{self.case}: {name}"
        self.this.add(Row(case, "most requests in the budget", self.sweep.on_device(config, self.n_tokens), ""))
        self.this.add(Row(case, "most requests that the host holds", self.sweep.on_host(config, self.n_tokens), ""))
        system = self.system(config, most, name)
        for batch in self.batches(config, name):
            rates = self.sweep.hit_rates[0] + (self.sweep.hit_rates[1] if batch == most else ())
            found += [self.one(system, batch, rate, name) for rate in rates]
        system.close()
        return found, len({speed.batch for speed in found}) == len(self.sweep.sizes(most))

    def system(self, config: SparseConfig, batch: int, name: str) -> SparseSystem:
        """Return requests with their index, and publish what they take of the device."""
        system = SparseSystem(self.sweep.work(config, batch, self.n_tokens), self.this.clock, self.runtime)
        each = system.device_bytes / batch * self.layers.scale
        self.this.add(Row(f"{self.case}, B={batch}: {name}", "bytes on the device of a request", each / 1e9, "GB"))
        return system

    def one(self, system: SparseSystem, batch: int, rate: float, name: str) -> Speed:
        """Measure a batch at a hit rate."""
        step = SparseDecode(system, batch, rate)
        way = f"{name}, hit rate {rate:.2f} (input)"
        samples = self.this.time(f"{self.case}, B={batch}: {way}", step.run, step.prepare, is_graph=False)
        speed = self.layers.publish(self.case, way, batch, samples)
        self.layers.limits(
            f"{self.case}, B={batch}: {way}",
            traffic(self.sweep.model, system.work.config, self.n_tokens, rate), batch,
        )  # fmt: skip
        counted = counted_hit_rate(step)
        self.this.add(Row(f"{self.case}, B={batch}: {way}", "hit rate counted", counted, "", rate))
        self.check(step, f"{self.case}, B={batch}: {way}")
        return speed

    def check(self, step: SparseDecode, case: str) -> None:
        """Compare the attended KV with the stored KV."""
        ok = step.is_right()
        self.this.add_check(Row(case, "buffer equals host", int(ok), "", target="1", ok=ok))

    def gpu_only(self) -> list[Speed]:
        """Measure RetroInfer with all KV on the device."""
        settings = replace(self.sweep.settings, mode="gpu_only")
        config = replace(wave_config(settings, self.sweep.page), residency="device")
        found = []
        for batch in self.batches(config, "wave, gpu_only"):
            step = SparseDecode(self.system(config, batch, "wave, gpu_only"), batch, 1.0)
            case = f"{self.case}, B={batch}: wave, gpu_only"
            samples = self.this.time(case, step.run, step.prepare, is_graph=False)
            found.append(self.layers.publish(self.case, "wave, gpu_only", batch, samples))
            self.check(step, case)
            step.system.close()
        return found

    def compare(self) -> None:
        """Measure all ways and publish the ratios: at one budget, and of the same batches."""
        full = self.full()
        headline = max(self.sweep.lengths)
        goal = GOAL if self.n_tokens == headline and not self.this.is_quick else None
        for control in self.sweep.controls if self.n_tokens == headline else self.sweep.controls[:1]:
            speeds, is_complete = self.wave(replace(self.sweep.settings, control=control))
            self.ratios(full, speeds, is_complete, goal if control == self.sweep.controls[0] else None)
        self.ratios(full, self.gpu_only(), False, None)

    def ratios(self, full: dict[int, Speed], speeds: list[Speed], is_complete: bool, goal: float | None) -> None:
        """Publish ratios of one way over full attention."""
        usual = f"hit rate {self.sweep.hit_rates[0][0]:.2f}"
        if full and is_complete:
            rival = best(full)
            most = max(speed.batch for speed in speeds)
            for ours in (speed for speed in speeds if speed.batch == most):
                case = f"{self.case}: one budget of {self.sweep.budget_bytes >> 30} GiB"
                share = self.shares[rival.batch]
                self.layers.compare(case, ours, rival, share, goal if usual in ours.name else None)
        for ours in speeds:
            if ours.batch in full:
                self.layers.compare(f"{self.case}: the same batch", ours, full[ours.batch], self.shares[ours.batch])


def measure(this: DeviceRun) -> None:
    """All lengths."""
    sweep = (SMOKE if this.is_smoke else QUICK if this.is_quick else FULL).settled()
    for n_tokens in sweep.lengths:
        if not this.leaves_out(f"n={n_tokens}"):
            Bench(this, sweep, n_tokens).compare()


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
