"""K9, claim: of a whole model, RetroInfer decodes more tokens per second than full attention, from some batch on.

Llama-3-8B with random weights in bf16, all layers with their products, through the coordinator's hooks; the KV of the
prompts is planted (S1-like), since computing 120K tokens takes a quarter of a minute each. Full attention, RetroInfer
and PQCache at rising batches of requests of 120K tokens, as many as device and host hold. Indexes are built as chunks
arrive, with their real number of iterations (PQCache's by a GPU, few of them), and that counts: printed are the time to
the second token, with a prefill at the speed of the device's products, and the output from which on a way is worth
it. The hit rate is measured, not set: the model's queries are random, and no quality is stated.

Steps are launched one by one in all ways. A ratio is stated only where full attention of that batch reaches 75 % of its
roofline, measured apart on two layers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from dense_decode import DenseDecode, dense_share
from device_clock import Samples
from device_run import DeviceRun, run
from injected_prompts import InjectedEngine, random_llama
from k4_wave_decode import LLAMA, wave_config
from report import Row
from scaled_layers import Layers
from sparse_system import Work, store_bytes
from tiny_llama import TINY_LLAMA, TINY_PAGE, TINY_PQ, TINY_WAVE

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.engine.decoder_models import LlamaDecoder, LlamaShape
from kvcm.gpu_tier.eval.model_shapes import ModelShape
from kvcm.gpu_tier.pools.pinned import LARGEST_SHARE, available_bytes
from kvcm.gpu_tier.runtime import runtime_for

MEASURES = "a model of Llama-3-8B's shape end to end: full attention, RetroInfer and PQCache at 120K tokens"
_SHAPE = LlamaShape(128256, 4096, 32, 32, 8, 128, 14336, 500000.0, 1e-5)
_TINY_SHAPE = LlamaShape(64, 64, 4, 4, 2, 16, 96)
_WAVE = RetroInferConfig()
_CODES = PQCacheConfig(m=4, b=8, iterations=3, kmeans_device="device")
_RESERVE_BYTES = 6 << 30
_SHARE_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a run.

    Attributes:
        model: its shape for models of costs.
        shape: of the model that is run.
        n_tokens: of a prompt.
        batches: requests.
        room: most tokens that a request may decode.
        wave: settings of RetroInfer.
        codes: settings of PQCache.
        buffer_share: places of a sparse request in the arena, of its tokens, at most.
        page: tokens of a page.
    """

    model: ModelShape = LLAMA
    shape: LlamaShape = _SHAPE
    n_tokens: int = 122880
    batches: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    space: int = 2048
    wave: RetroInferConfig = _WAVE
    codes: PQCacheConfig = _CODES
    buffer_share: float = 0.16
    page: int = 64

    def ways(self) -> dict[str, SparseConfig]:
        """Return the ways, full attention first."""
        return {
            "full": SparseConfig("full", page_size=self.page),
            "wave": wave_config(self.wave, self.page),
            "PQCache": SparseConfig("pqcache", page_size=self.page, residency="blocks", algo=self.codes),
        }

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, in whole pages."""
        return -(-(self.n_tokens + self.space) // self.page) * self.page

    def pages(self, config: SparseConfig, batch: int) -> int:
        """Return the pages of the arena: all KV of all requests, or one prompt and the others' buffers."""
        whole = self.max_tokens // self.page
        if config.algorithm == "full":
            return batch * whole
        return whole + batch * (int(self.buffer_share * whole) + 2)

    def host_bytes(self, config: SparseConfig, batch: int) -> int:
        """Return the bytes on the host."""
        if config.algorithm == "full":
            return self.model.geometry.page_bytes
        if config.algorithm == "pqcache":
            return batch * (self.max_tokens // self.page) * self.model.geometry.page_bytes
        work = Work(self.model, config, 1, self.n_tokens, self.space)
        return batch * store_bytes(work) + self.model.geometry.page_bytes

    def most(self, config: SparseConfig, device_bytes: int) -> int:
        """Return how many requests device and host hold beside the weights; 0 if none."""
        left = device_bytes - self.model.weight_bytes - _RESERVE_BYTES
        host = int(LARGEST_SHARE * (available_bytes() or 0))
        index = 0.08 if config.algorithm == "retroinfer" else 0.02  # of the KV: what tokens are chosen by, and tables

        def fits(batch: int) -> bool:
            each = index * self.max_tokens * self.model.geometry.token_bytes if config.algorithm != "full" else 0
            on_device = self.pages(config, batch) * self.model.geometry.page_bytes + int(batch * each)
            return on_device <= left and self.host_bytes(config, batch) <= host

        return max((batch for batch in self.batches if fits(batch)), default=0)


FULL = Size()
QUICK = replace(FULL, n_tokens=30720, batches=(1, 4))
SMOKE = Size(
    TINY_LLAMA, _TINY_SHAPE, 300, (1, 2), 64, TINY_WAVE, TINY_PQ, 4.0, TINY_PAGE
)  # fmt: skip


@dataclass(slots=True)
class Found:
    """The measurements of a way: seconds to take a request in, and of each batch the samples of a step."""

    ingest: float = 0.0
    steps: dict[int, Samples] = field(default_factory=dict)

    def speed(self, batch: int) -> float:
        """Return tokens per second of a batch."""
        return batch / self.steps[batch].median


@dataclass(frozen=True, slots=True)
class Bench:
    """The run, its sizes, the model, and the share of the roofline that full attention reaches at each batch."""

    this: DeviceRun
    size: Size
    model: LlamaDecoder
    shares: dict[int, float]

    @property
    def case(self) -> str:
        """Of all rows."""
        return f"n={self.size.n_tokens}"

    def way(self, name: str, config: SparseConfig) -> Found:
        """Measure a way at all batches that it holds."""
        size, found = self.size, Found()
        most = size.most(config, device_bytes(self.this))
        self.this.add(Row(f"{self.case}: {name}", "most requests that device and host hold", most, ""))
        if not most or self.this.leaves_out(f"{self.case}: {name}"):
            return found
        engine = InjectedEngine(
            self.model, config.replaced(host_bytes=size.host_bytes(config, most)), size.model.geometry,
            device_pages=size.pages(config, most), max_requests=most, max_tokens=size.max_tokens,
            device=self.this.device,
        )  # fmt: skip
        taken = []
        for batch in self.batches(name, most):
            while len(engine.requests) < batch:
                taken.append(engine.admit(size.n_tokens))
            found.steps[batch] = self.steps(engine, name, batch)
        found.ingest = min(taken, default=0.0)  # the first one waits for kernels to be compiled
        engine.close()
        self.add_ingest(name, found)
        return found

    def batches(self, name: str, most: int) -> Iterator[int]:
        """Yield the batches while there is time, and say which are left out."""
        for batch in self.size.batches:
            if batch <= most and not self.this.leaves_out(f"{self.case}, B={batch}: {name}"):
                yield batch

    def steps(self, engine: InjectedEngine, name: str, batch: int) -> Samples:
        """Time the steps of a batch."""
        case = f"{self.case}, B={batch}: {name}"
        requests = engine.requests[:batch]
        hits, selected = engine.counted()
        samples = self.this.time(case, lambda: engine.decode(requests), is_graph=False)
        after = engine.counted()
        self.this.add_time(case, samples)
        self.this.add(Row(case, "tokens/s", batch / samples.median, "1/s"))
        if after[1] > selected:
            self.this.add(Row(case, "hit rate counted", (after[0] - hits) / (after[1] - selected), ""))
        ok = all(engine.is_settled(request) for request in requests)
        self.this.add_check(Row(case, "all requests decode this way", int(ok), "", target="1", ok=ok))
        return samples

    def add_ingest(self, name: str, found: Found) -> None:
        """Publish what a prompt costs beside its prefill."""
        self.this.add(Row(f"{self.case}: {name}", "KV, index and copies of a prompt", found.ingest, "s"))
        prefill = operations(self.size.shape, self.size.n_tokens) / self.this.peaks.flops
        self.this.add(Row(f"{self.case}: {name}", "prefill at the device's best (modelled)", prefill, "s"))
        if 1 in found.steps:
            second = prefill + found.ingest + found.steps[1].median
            self.this.add(Row(f"{self.case}: {name}", "time to the second token, that prefill included", second, "s"))

    def compare(self, name: str, ours: Found, full: Found) -> None:
        """Publish ratios over full attention of the same batch and of its fastest one, and when a way is worth it."""
        for batch in sorted(ours.steps.keys() & full.steps.keys()):
            self.ratio(f"{self.case}, {name}, B={batch}: the same batch", ours, batch, full, batch)
            self.break_even(name, ours, full, batch)
        if ours.steps and full.steps:
            most, rival = max(ours.steps, key=ours.speed), max(full.steps, key=full.speed)
            self.ratio(f"{self.case}, {name}, B={most}: what fits", ours, most, full, rival)

    def ratio(self, case: str, ours: Found, batch: int, full: Found, rival: int) -> None:
        """Publish a ratio, if full attention reaches enough of the roofline there."""
        graphs = ours.steps[batch].is_graph, full.steps[rival].is_graph
        gain = ours.speed(batch) / full.speed(rival)
        self.this.add_speed_up(case, f"full at B={rival}", gain, self.shares.get(rival), graphs)

    def break_even(self, name: str, ours: Found, full: Found, batch: int) -> None:
        """Publish the tokens from which on a batch is done earlier than by full attention."""
        if self.this.rows[-1].ratio is None:
            return  # not stated either
        saved = full.steps[batch].median - ours.steps[batch].median
        case = f"{self.case}, {name}, B={batch}"
        if saved <= 0:
            self.this.add(Row(case, "never done before full attention of the same batch", saved * 1e6, "µs a step"))
            return
        tokens = batch * max(0.0, ours.ingest - full.ingest) / saved
        self.this.add(Row(case, "output of a request from which on it is worth it", tokens, "tokens"))


def operations(shape: LlamaShape, tokens: int) -> int:
    """Return the multiplications and additions of a prefill."""
    q = shape.num_q_heads * shape.head_dim
    weights = shape.d_model * (2 * q + 2 * shape.num_kv_heads * shape.head_dim + 3 * shape.d_ff)
    return shape.num_layers * (2 * tokens * weights + 2 * tokens**2 * q)


def device_bytes(this: DeviceRun) -> int:
    """Return the memory of the device."""
    return torch.cuda.get_device_properties(this.device).total_memory if this.clock.is_gpu else 1 << 36


def full_shares(this: DeviceRun, size: Size) -> dict[int, float]:
    """Return what our full attention reaches of its roofline at each batch, on two layers."""
    layers, shares = Layers(this, size.model, _SHARE_LAYERS), {}
    for batch in size.batches:
        if batch > size.most(size.ways()["full"], device_bytes(this)):
            break
        dense = DenseDecode(layers.shape, batch, size.n_tokens, this.clock, runtime_for(this.device))
        samples = this.time(f"n={size.n_tokens}, B={batch}: full attention alone", dense.ours, is_graph=False)
        shares[batch] = dense_share(this, layers.shape, batch, size.n_tokens, samples.median)
    return shares


def measure(this: DeviceRun) -> None:
    """All ways."""
    size = SMOKE if this.is_smoke else QUICK if this.is_quick else FULL
    if this.leaves_out(f"n={size.n_tokens}"):
        return
    bench = Bench(this, size, random_llama(size.shape, this.device), full_shares(this, size))
    found: dict[str, Found] = {}
    for name, config in size.ways().items():
        found[name] = bench.way(name, config)
        gc.collect()
        if this.clock.is_gpu:
            torch.cuda.empty_cache()  # pools of the next way have other sizes
        if name != "full":
            bench.compare(name, found[name], found["full"])


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
