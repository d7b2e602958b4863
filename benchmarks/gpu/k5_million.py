"""K5, claim: at a million tokens a request RetroInfer decodes several times as fast as PQCache.

Some attention layers of Llama-3-8B; as many requests as their KV on the host allows. Both attend to as many tokens and
have a cache for the same share of them; PQCache at a tenth of the tokens, its own setting, stands beside. What each
takes of the device is printed. Hit rates are inputs: for PQCache so large a share of the selection is put into whole
blocks, as far as its cache can hold these; the counted rate is printed.

Full attention does not fit at the model's depth; of the measured layers it is timed with one request, and a speed-up is
stated only where that reaches 75 % of its roofline.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import checkout  # noqa: F401 - first: it makes the rest importable
from dense_decode import DenseDecode, dense_share, fastest_dense
from device_run import DeviceRun, run
from k4_wave_decode import LLAMA, WHOLE_DEVICE, wave_config
from report import Row
from scaled_layers import Layers, Speed
from sparse_decode import SparseDecode, counted_hit_rate
from sparse_system import SparseSystem, Work, store_bytes
from tiny_llama import TINY_LLAMA, TINY_PAGE, TINY_PQ, TINY_WAVE

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.eval.model_shapes import ModelShape
from kvcm.gpu_tier.eval.roofline import traffic, wave_cache_tokens, wave_retrieved
from kvcm.gpu_tier.pools.pinned import LARGEST_SHARE, available_bytes
from kvcm.gpu_tier.runtime import runtime_for

MEASURES = "decode of RetroInfer and of PQCache at a million tokens a request, KV on the host"
_PLANTED = RetroInferConfig(iterations=0)
_CODES = PQCacheConfig(iterations=1, kmeans_device="device")


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a run.

    Attributes:
        model: all of it.
        layers: measured ones.
        n_tokens: of a prompt.
        most_batch: requests; fewer where they do not fit on the host.
        hit_rates: inputs.
        ratio: share of the tokens of PQCache's own setting.
        wave: settings of RetroInfer.
        codes: settings of PQCache.
        page: tokens of a page.
    """

    model: ModelShape = LLAMA
    layers: int = 8
    n_tokens: int = 1 << 20
    most_batch: int = 3
    hit_rates: tuple[float, ...] = (0.85, 0.5)
    ratio: float = 0.1
    wave: RetroInferConfig = _PLANTED
    codes: PQCacheConfig = _CODES
    page: int = 64

    def work(self, config: SparseConfig, batch: int) -> Work:
        """Return requests."""
        shape = replace(self.model, geometry=replace(self.model.geometry, num_layers=self.layers))
        return Work(shape, config, batch, self.n_tokens, self.wave.update_segment // 2)

    def pq_config(self, settings: PQCacheConfig) -> SparseConfig:
        """Return PQCache with a block cache as large as RetroInfer's."""
        cache = wave_cache_tokens(self.model.geometry, self.wave, self.n_tokens) // settings.block * settings.block
        settings = replace(settings, cache_tokens=cache, k_cache=max(1, cache // settings.block))
        return SparseConfig(
            "pqcache", page_size=self.page, io_blocks=WHOLE_DEVICE, residency="blocks", algo=settings
        )  # fmt: skip

    def ways(self) -> dict[str, SparseConfig]:
        """Return the compared settings, RetroInfer first."""
        steady = self.wave.local + self.wave.update_segment // 2
        budget = steady + wave_retrieved(self.wave, self.n_tokens)
        same = replace(self.codes, token_budget=budget, local_ratio=steady / budget)
        return {
            f"wave, control {self.wave.control}": wave_config(self.wave, self.page),
            "PQCache, as many tokens": self.pq_config(same),
            f"PQCache, {self.ratio} of the tokens": self.pq_config(replace(self.codes, token_ratio=self.ratio)),
        }

    def batch(self) -> int:
        """Return how many requests fit on the host in each way."""
        config = next(iter(self.ways().values()))
        host = int(LARGEST_SHARE * (available_bytes() or 0))
        return min(self.most_batch, host // store_bytes(self.work(config, 1)))


FULL = Size()
QUICK = replace(FULL, layers=2, n_tokens=1 << 19, hit_rates=(0.85,))
SMOKE = Size(
    TINY_LLAMA, 2, 400, 2, (0.5,), 0.3, TINY_WAVE, TINY_PQ, TINY_PAGE
)  # fmt: skip


def measure_way(this: DeviceRun, size: Size, layers: Layers, name: str, config: SparseConfig) -> list[Speed]:
    """Measure all hit rates of a way, with `most_batch` requests."""
    batch, found = size.most_batch, []
    system = SparseSystem(size.work(config, batch), this.clock, runtime_for(this.device))
    case = f"n={size.n_tokens}"
    each = system.device_bytes / batch * layers.scale
    this.add(Row(f"{case}, B={batch}: {name}", "bytes on the device of a request", each / 1e9, "GB"))
    for rate in size.hit_rates:
        way = f"{name}, hit rate {rate:.2f} (input)"
        if this.leaves_out(f"{case}, B={batch}: {way}"):
            continue
        step = SparseDecode(system, batch, rate)
        samples = this.time(f"{case}, B={batch}: {way}", step.run, step.prepare, is_graph=False)
        found.append(layers.publish(case, way, batch, samples))
        counted = counted_hit_rate(step)
        layers.limits(f"{case}, B={batch}: {way}", traffic(size.model, config, size.n_tokens, counted), batch)
        this.add(Row(f"{case}, B={batch}: {way}", "hit rate counted", counted, "", rate))
        ok = step.is_right()
        this.add_check(Row(f"{case}, B={batch}: {way}", "buffer equals host", int(ok), "", target="1", ok=ok))
    system.close()
    return found


def full_share(this: DeviceRun, size: Size, layers: Layers) -> float:
    """Return what full attention of one request reaches of its roofline."""
    dense = DenseDecode(layers.shape, 1, size.n_tokens, this.clock, runtime_for(this.device))
    case = f"n={size.n_tokens}"
    name, samples = fastest_dense(this, f"{case}, B=1", dense, is_graph=False)
    layers.publish(case, f"{name} (does not fit at the model's depth)", 1, samples)
    return dense_share(this, layers.shape, 1, size.n_tokens, samples.median)


def measure(this: DeviceRun) -> None:
    """Measure both ways and their ratio."""
    size = SMOKE if this.is_smoke else QUICK if this.is_quick else FULL
    size = replace(size, most_batch=size.batch())  # once, before anything is there
    layers = Layers(this, size.model, size.layers)
    if not size.most_batch:
        this.add(Row(f"n={size.n_tokens}", "left out: no request fits on the host", 1, ""))
        return
    share = full_share(this, size, layers)
    ours: list[Speed] = []
    for name, config in size.ways().items():
        if this.leaves_out(f"n={size.n_tokens}: {name}"):
            continue
        found = measure_way(this, size, layers, name, config)
        if not ours:
            ours = found
            continue
        for wave, codes in zip(ours, found, strict=False):
            layers.compare(f"n={size.n_tokens}", wave, codes, share)


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
