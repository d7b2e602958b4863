"""K7, claim: PQCache's codes arrive beside the layer before, and its block cache shortens the step.

Attention layers of Llama-3-8B at 120K tokens, a fifth of them attended to. First the parts of a search alone, for both
sizes of codes: tables of products, scores of all tokens, top-k, and the copy of a layer's codes. Then whole steps: with
codes and misses on streams of their own and all on one stream; without a cache, with one of 4,096 and of 8,192 tokens,
and with one of single tokens. The share of the selection that is asked for is put into whole blocks, as far as a cache
can hold these; the hit rate counted is printed.

How much a cache or a stream gains is stated only where full attention of the same requests reaches 75 % of its
roofline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from dense_decode import DenseDecode, dense_share, fastest_dense
from device_run import DeviceRun, run
from k4_wave_decode import LLAMA, WHOLE_DEVICE
from one_stream import serial_runtime
from report import Row
from scaled_layers import Layers, Speed
from sparse_decode import SparseDecode, counted_hit_rate
from sparse_system import SparseSystem, Work
from tiny_llama import TINY_LLAMA, TINY_PAGE, TINY_PQ

from kvcm.gpu_tier.config import PQCacheConfig, SparseConfig
from kvcm.gpu_tier.eval.model_shapes import ModelShape
from kvcm.gpu_tier.index.pq import PQShape, tables
from kvcm.gpu_tier.kernels.pq_score import pq_score
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.runtime import DeviceRuntime, runtime_for

MEASURES = "PQCache's search, its parts, streams and caches, at 120K tokens"
_CODES = PQCacheConfig(iterations=1, kmeans_device="device", m=4, b=8)


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a run.

    Attributes:
        model: all of it.
        layers: measured ones.
        n_tokens: of a prompt.
        batches: requests.
        codes: sub-vectors and bits.
        caches: tokens of the caches, the smaller one first.
        hit_rate: asked for.
        settings: of PQCache.
        page: tokens of a page.
    """

    model: ModelShape = LLAMA
    layers: int = 8
    n_tokens: int = 122880
    batches: tuple[int, ...] = (1, 4)
    codes: tuple[tuple[int, int], ...] = ((4, 8), (2, 6))
    caches: tuple[int, int] = (4096, 8192)
    hit_rate: float = 0.6
    settings: PQCacheConfig = _CODES
    page: int = 64

    def ways(self) -> dict[str, PQCacheConfig]:
        """Return settings by name; the first one is what the others are compared with."""

        def cached(tokens: int, unit: str = "block") -> PQCacheConfig:
            blocks = max(1, tokens // self.settings.block)
            return replace(self.settings, cache_tokens=tokens, k_cache=blocks, cache_unit=unit)

        small, large = self.caches
        return {
            "no cache": cached(0),
            f"cache of {small} tokens": cached(small),
            f"cache of {large} tokens": cached(large),
            f"cache of {small} single tokens a head": cached(small, "token"),
        }


FULL = Size()
QUICK = replace(FULL, layers=4, n_tokens=30720, batches=(4,), codes=((4, 8),))
SMOKE = Size(TINY_LLAMA, 2, 300, (1, 2), ((2, 3),), (16, 32), 0.6, TINY_PQ, TINY_PAGE)


def search(
    this: DeviceRun, size: Size, batch: int, shape: PQShape, k: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the parts of a layer's search by name, and the bytes that each moves at least."""
    device, heads, q_heads = this.device, shape.heads, size.model.num_q_heads
    pages = -(-size.n_tokens // size.page)
    codes = torch.randint(
        shape.centroids, (batch * pages + 1, size.page, heads, shape.m), dtype=torch.uint8, device=device
    )  # fmt: skip
    on_host = torch.empty(codes.shape, dtype=torch.uint8, pin_memory=this.clock.is_gpu)
    books = torch.randn(batch, *shape.codebook_shape, device=device)
    q = torch.randn(batch, q_heads, shape.dims, device=device, dtype=torch.bfloat16)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    first, lengths = (torch.full((batch,), n, dtype=torch.int32, device=device) for n in (0, size.n_tokens))
    products = tables(q, books, shape.dims**-0.5)
    scores = torch.empty(batch, q_heads, size.n_tokens, device=device)
    weights = torch.rand(batch, heads, size.n_tokens, device=device)
    indices = torch.empty(batch, heads, k, dtype=torch.int32, device=device)
    found = torch.empty(batch, heads, dtype=torch.int32, device=device)
    return {
        "tables of products": (lambda: tables(q, books, shape.dims**-0.5), books.nbytes),
        "scores of all tokens": (
            lambda: pq_score(products, codes, table, first, lengths, scores), codes.nbytes + scores.nbytes
        ),
        "softmax and its sum": (
            lambda: scores.softmax(-1).view(batch, heads, -1, size.n_tokens).sum(2), 3 * scores.nbytes + weights.nbytes
        ),
        "top-k": (lambda: topk_select(weights, lengths, k, indices, found), weights.nbytes),
        "codes of a layer over the link": (lambda: codes.copy_(on_host, non_blocking=True), codes.nbytes),
    }  # fmt: skip


def measure_parts(this: DeviceRun, size: Size, m: int, b: int) -> None:
    """Time the parts of a search in a layer."""
    geometry, (_, k) = size.model.geometry, size.settings.budget(size.n_tokens)
    shape = PQShape(geometry.num_kv_heads, geometry.head_dim, m, b)
    for batch in size.batches:
        for name, (part, nbytes) in search(this, size, batch, shape, k).items():
            case = f"n={size.n_tokens}, B={batch}, m={m}, b={b}: {name}, a layer"
            samples = this.time(case, part)
            this.add_time(case, samples)
            peak = this.peaks.h2d if "link" in name else this.peaks.hbm
            this.add_share(case, "bytes moved at least", nbytes / samples.median, peak, None)


@dataclass(frozen=True, slots=True)
class Steps:
    """Whole steps of one size: the run, the size, its layers, and of each batch what full attention reaches."""

    this: DeviceRun
    size: Size
    layers: Layers
    shares: dict[int, float]

    def system(self, settings: PQCacheConfig, runtime: DeviceRuntime) -> SparseSystem:
        """Return the requests of a way."""
        size = self.size
        config = SparseConfig("pqcache", page_size=size.page, io_blocks=WHOLE_DEVICE, algo=settings)
        work = Work(self.layers.shape, config, max(size.batches), size.n_tokens, 64)
        return SparseSystem(work, self.this.clock, runtime)

    def way(self, name: str, settings: PQCacheConfig, runtime: DeviceRuntime) -> dict[int, Speed]:
        """Measure a way at all batches."""
        if self.this.leaves_out(f"n={self.size.n_tokens}: {name}"):
            return {}
        system = self.system(settings, runtime)
        found = {batch: self.one(system, batch, name) for batch in self.size.batches}
        system.close()
        return found

    def one(self, system: SparseSystem, batch: int, name: str) -> Speed:
        """Measure a batch."""
        this, size = self.this, self.size
        case = f"n={size.n_tokens}, B={batch}: {name}"
        step = SparseDecode(system, batch, size.hit_rate)
        samples = this.time(case, step.run, step.prepare, is_graph=False)
        speed = self.layers.publish(f"n={size.n_tokens}", name, batch, samples)
        this.add(Row(case, "hit rate counted", counted_hit_rate(step), "", size.hit_rate))
        ok = step.is_right()
        this.add_check(Row(case, "buffer equals host", int(ok), "", target="1", ok=ok))
        return speed

    def compare(self, ours: dict[int, Speed], theirs: dict[int, Speed]) -> None:
        """Publish what one way gains over another."""
        for batch in ours.keys() & theirs.keys():
            case = f"n={self.size.n_tokens}"
            self.layers.compare(case, ours[batch], theirs[batch], self.shares.get(batch))


def full_shares(this: DeviceRun, size: Size, layers: Layers) -> dict[int, float]:
    """Return what full attention of each batch reaches of its roofline."""
    shares = {}
    for batch in size.batches:
        dense = DenseDecode(layers.shape, batch, size.n_tokens, this.clock, runtime_for(this.device))
        _, samples = fastest_dense(this, f"n={size.n_tokens}, B={batch}", dense, is_graph=False)
        shares[batch] = dense_share(this, layers.shape, batch, size.n_tokens, samples.median)
    return shares


def measure(this: DeviceRun) -> None:
    """Parts, then caches, then streams."""
    size = SMOKE if this.is_smoke else QUICK if this.is_quick else FULL
    for m, b in size.codes:
        if not this.leaves_out(f"parts of a search, m={m}, b={b}"):
            measure_parts(this, size, m, b)
    if this.leaves_out(f"n={size.n_tokens}: whole steps"):
        return
    layers = Layers(this, size.model, size.layers)
    steps = Steps(this, size, layers, full_shares(this, size, layers))
    ways = list(size.ways().items())
    found = [steps.way(name, settings, runtime_for(this.device)) for name, settings in ways]
    for cached in found[1:]:
        steps.compare(cached, found[0])
    name, settings = ways[1]
    steps.compare(found[1], steps.way(f"{name}, one stream", settings, serial_runtime(this.device)))


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
