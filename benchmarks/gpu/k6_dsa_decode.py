"""K6, claim: with its KV on the host, DSA decodes more tokens per second than any way that fits on the device.

Attention layers of DeepSeek-V3.2's size over random KV of n tokens a request: hierarchical (a buffer of C tokens per
request and layer, loads not overlapped), resident (sparse, all KV on the device) and dense, each at rising batches B
up to what its bytes allow under one KV budget, index keys included. Some layers of 61 are measured and their time is
extrapolated; the budget is scaled alike. Projections and experts are not run: rows with modelled weights add the time
of reading them once a step, since without it ratios would flatter the side with the larger batch. The hit rate is an
input. Rows at the same batch show where hierarchical loses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import checkout  # noqa: F401 - first: it makes the rest importable
from device_run import DeviceRun, run
from dsa_decode import Dense, Hierarchical, Indexer, Resident, Workload, counted_hit_rate, host_pool
from report import Row

from kvcm.gpu_tier.config import DsaConfig, SparseConfig
from kvcm.gpu_tier.eval.capacity_plan import footprint
from kvcm.gpu_tier.eval.model_shapes import Device, ModelShape, model_shape
from kvcm.gpu_tier.eval.roofline import Traffic, step_time, traffic
from kvcm.gpu_tier.geometry import Layout
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import runtime_for

MEASURES = "decode throughput of hierarchical, resident and dense attention at one KV budget, 16K to 128K tokens"
DEEPSEEK = model_shape("deepseek-v3.2")
MOST_STEPS = 256
WHOLE_DEVICE = 1 << 10
LRU_SHARE = 0.02
_CONFIG = SparseConfig("dsa", io_blocks=WHOLE_DEVICE)
_NOTHING = Traffic(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sizes of a sweep.

    Attributes:
        layers: measured, of the model's.
        budget_bytes: of KV and index keys on the device, at the model's depth.
        lengths: tokens of a request.
        batches: requests, below what fits; what fits is added.
        buffers: (C, hit rates) of the hierarchical way.
        most_batch: more requests are not tried.
        config: of DSA.
        shape: of the model.
    """

    layers: int = 4
    budget_bytes: int = 40 << 30
    lengths: tuple[int, ...] = (16384, 32768, 65536, 131072)
    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    buffers: tuple[tuple[int, tuple[float, ...]], ...] = ((4096, (0.8, 0.9, 0.95)), (2048, (0.8,)), (8192, (0.95,)))
    most_batch: int = 96
    config: SparseConfig = _CONFIG
    shape: ModelShape = DEEPSEEK

    @property
    def scale(self) -> float:
        """Layers of the model over the measured ones."""
        return self.shape.geometry.num_layers / self.layers

    def most(self, config: SparseConfig, n_tokens: int) -> int:
        """Return how many requests fit under the budget."""
        request = footprint(self.shape, config, n_tokens)
        return min(self.most_batch, self.budget_bytes // request.device)

    def sizes(self, most: int) -> list[int]:
        """Return the batches to measure."""
        return sorted({batch for batch in self.batches if batch < most} | ({most} if most else set()))


FULL = Sweep()
QUICK = replace(FULL, lengths=(32768,), batches=(1, 16), buffers=((4096, (0.9,)),))
_SMALL = SparseConfig("dsa", top_k=16, device_buffer_size=32, algo=DsaConfig(index_heads=4, index_dim=32))
SMOKE = Sweep(2, 64 << 20, (256,), (1,), ((32, (0.75,)),), 3, _SMALL)


@dataclass(frozen=True, slots=True)
class Speed:
    """One batch of one way: tokens per second of attention alone and with modelled weights, and whether in a graph."""

    name: str
    batch: int
    attention: float
    with_weights: float
    is_graph: bool


class Bench:
    """One length of requests.

    Args:
        this: the run.
        sweep: its sizes.
        n_tokens: of a request.
    """

    def __init__(self, this: DeviceRun, sweep: Sweep, n_tokens: int) -> None:
        self.this = this
        self.sweep = sweep
        self.n_tokens = n_tokens
        self.runtime = runtime_for(this.device)
        self.device = Device(this.peaks.hbm, this.peaks.h2d, this.peaks.flops)

    def work(self, batch: int, config: SparseConfig, hit_rate: float) -> Workload:
        """Return a workload."""
        geometry = replace(self.sweep.shape.geometry, num_layers=self.sweep.layers)
        return Workload(geometry, config, self.sweep.shape.num_q_heads, batch, self.n_tokens, MOST_STEPS, hit_rate)

    def publish(self, name: str, step: Dense | Resident | Hierarchical, batch: int) -> Speed:
        """Time a way and publish its speed."""
        case = f"n={self.n_tokens}, B={batch}: {name}"
        samples = self.this.time(case, step.run, step.prepare)
        seconds = samples.median * self.sweep.scale
        weights = step_time(self.sweep.shape, self.device, _NOTHING, batch).weights
        label = f"{self.sweep.layers} of {self.sweep.shape.geometry.num_layers} layers, extrapolated"
        self.this.add_time(f"{case} ({label})", samples, self.sweep.scale)
        self.this.add(Row(case, "tokens/s, attention layers alone", batch / seconds, "1/s"))
        self.this.add(Row(case, "tokens/s, with modelled weights", batch / (seconds + weights), "1/s"))
        return Speed(name, batch, batch / seconds, batch / (seconds + weights), samples.is_graph)

    def dense_share(self, batch: int, speed: Speed) -> float:
        """Return the share of the roofline that dense attention reached."""
        request = traffic(self.sweep.shape, SparseConfig("full"), self.n_tokens, 0.0)
        least = step_time(self.sweep.shape, self.device, request, batch).attention
        share = least * speed.attention / batch
        self.this.add(Row(f"n={self.n_tokens}, B={batch}: dense", "share of the roofline", share, "", target=">= 0.75"))
        return share

    def batches(self, config: SparseConfig, name: str) -> Iterator[int]:
        """Yield the batches of a way while there is time, smaller ones first, and say which are left out."""
        for batch in self.sweep.sizes(self.sweep.most(config, self.n_tokens)):
            if not self.this.leaves_out(f"n={self.n_tokens}, B={batch}: {name}"):
                yield batch

    def resident(self) -> tuple[list[Speed], dict[int, float]]:
        """Measure what holds all KV on the device; return speeds, and of each dense batch the share of the roofline."""
        found, shares = [], {}
        resident = self.sweep.config.replaced(residency="device")
        for batch in self.batches(resident, "resident, sparse"):
            work = self.work(batch, resident, 0.9)
            indexer = Indexer(work, self.this.clock)
            found.append(
                self.publish("resident, sparse", Resident(work, indexer, self.runtime, self.this.clock), batch)
            )
        for batch in self.batches(SparseConfig("full"), "dense"):
            dense = Dense(self.work(batch, resident, 0.9), None, self.runtime, self.this.clock)
            found.append(self.publish("dense", dense, batch))
            shares[batch] = self.dense_share(batch, found[-1])
        return found, shares

    def hierarchical(self) -> list[tuple[list[Speed], bool]]:
        """Measure what holds its KV on the host; return of each buffer and hit rate the speeds, and whether all ran."""
        sweep = self.sweep
        configs = {size: sweep.config.replaced(device_buffer_size=size) for size, _ in sweep.buffers}
        most = max(sweep.most(config, self.n_tokens) for config in configs.values())
        host = host_pool(self.work(most, sweep.config, 0.0), self.runtime, self.this.clock, Layout.PAGE_FIRST)
        found = []
        for size, rates in sweep.buffers:
            for rate in rates:
                batches = self.batches(configs[size], way(size, rate))
                speeds = [self.one(configs[size], rate, batch, host) for batch in batches]
                found.append((speeds, 0 < len(speeds) == len(sweep.sizes(sweep.most(configs[size], self.n_tokens)))))
        host.close()
        return found

    def one(self, config: SparseConfig, rate: float, batch: int, host: HostKVPool) -> Speed:
        """Measure one hierarchical batch."""
        work = self.work(batch, config, rate)
        step = Hierarchical(work, Indexer(work, self.this.clock), host, self.runtime)
        name = way(config.device_buffer_size, rate)
        speed = self.publish(name, step, batch)
        counted = counted_hit_rate(step.policy, step.prepare, step.run)
        step.policy.check()
        self.this.add(Row(f"n={self.n_tokens}, B={batch}: {name}", "hit rate counted", counted, "", rate))
        ok = step.is_right(host)
        self.this.add_check(
            Row(f"n={self.n_tokens}, B={batch}: {name}", "buffer equals host", int(ok), "", target="1", ok=ok)
        )
        return speed

    def breakdown(self) -> None:
        """Time the parts of one hierarchical step alone."""
        sweep = self.sweep
        size, rates = sweep.buffers[0]
        config, rate = sweep.config.replaced(device_buffer_size=size), rates[len(rates) // 2]
        batch = min(32, sweep.most(config, self.n_tokens))
        work = replace(self.work(batch, config, rate), most_steps=8 * MOST_STEPS)
        host = host_pool(work, self.runtime, self.this.clock, Layout.PAGE_FIRST)
        step = Hierarchical(work, Indexer(work, self.this.clock), host, self.runtime)
        whole = self.this.time("whole", step.run, step.prepare).median

        def plan(_step: int) -> None:
            step.prepare()
            for layer in work.geometry.layers[:2]:
                step.resolve(layer)

        parts: list[tuple[str, Callable[[int], object], Callable[[int], None]]] = [
            ("index scores", lambda layer: step.indexer.score(layer, step.seq_lens), step.prepare),
            ("top-k", lambda _layer: step.indexer.pick(step.seq_lens), step.prepare),
            ("loads", lambda layer: step.load(layer, step.plans[layer % 2]), plan),
            ("attention", lambda layer: step.attend(layer, step.plans[layer % 2]), plan),
            ("lru_diff", step.resolve, step.prepare),
            ("lru_diff, then loads", lambda layer: step.load(layer, step.resolve(layer)), step.prepare),
            ("lru_diff and loads in one kernel", step.swap, step.prepare),
        ]
        case = f"n={self.n_tokens}, B={batch}, C={size}, hit rate {rate:.2f} (input)"
        for name, part, prepare in parts:

            def all_layers(part: Callable[[int], object] = part) -> None:
                for layer in work.geometry.layers:
                    part(layer)

            taken = self.this.time(f"{case}: {name} alone", all_layers, prepare)
            self.this.add_time(f"{case}: {name} alone", taken, sweep.scale)
            share = taken.median / whole
            wanted, ok = (f"<= {LRU_SHARE}", share <= LRU_SHARE) if name == "lru_diff" else ("", None)
            self.this.add(Row(f"{case}: {name} alone", "share of the step", share, "", target=wanted, ok=ok))
        host.close()

    def compare(self) -> None:
        """Measure all ways and publish the ratios: of the fastest batches, and of the same batches."""
        on_device, shares = self.resident()
        if self.this.leaves_out(f"n={self.n_tokens}: hierarchical"):
            return  # as late as here, batches of the rivals may be left out too: later ones are
        dense = [speed for speed in on_device if speed.name == "dense"]
        share = shares[max(dense, key=_weighed).batch] if dense else None
        for speeds, is_complete in self.hierarchical():
            for rival in ("resident, sparse", "dense"):
                theirs = {speed.batch: speed for speed in on_device if speed.name == rival}
                if theirs and is_complete:
                    budget = f"one budget of {self.sweep.budget_bytes >> 30} GiB"
                    self.ratio(budget, max(speeds, key=_weighed), max(theirs.values(), key=_weighed), share)
                for ours in speeds:
                    if ours.batch in theirs:
                        self.ratio("the same batch", ours, theirs[ours.batch], shares.get(ours.batch))

    def ratio(self, where: str, ours: Speed, theirs: Speed, share: float | None) -> None:
        """Publish how much faster one way is than another, if dense attention reaches enough of the roofline there."""
        case = f"n={self.n_tokens}, {ours.name}, B={ours.batch}: {where}"
        over = f"{theirs.name} at B={theirs.batch}"
        graphs = ours.is_graph, theirs.is_graph
        gains = {
            "with modelled weights": ours.with_weights / theirs.with_weights,
            "attention layers alone": ours.attention / theirs.attention,
        }
        for which, gain in gains.items():
            self.this.add_speed_up(case, f"{over}, {which}", gain, share, graphs)


def way(size: int, rate: float) -> str:
    """Name the hierarchical way."""
    return f"hierarchical, C={size}, hit rate {rate:.2f} (input)"


def _weighed(speed: Speed) -> float:
    return speed.with_weights


def measure(this: DeviceRun) -> None:
    """All lengths, then the parts of a step."""
    sweep = SMOKE if this.is_smoke else QUICK if this.is_quick else FULL
    for n_tokens in sweep.lengths:
        if not this.leaves_out(f"n={n_tokens}"):
            Bench(this, sweep, n_tokens).compare()
    if not this.leaves_out("parts of a step"):
        Bench(this, sweep, sweep.lengths[len(sweep.lengths) // 2]).breakdown()


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
