"""Clusters the keys of layers, beside everything else or at once.

A layer is one job: its H·m problems are batched, and layers do not depend on each other. On the CPU jobs run in threads
of their own, one core each; keys are copied to host memory first, so that a job needs neither the pools nor the device,
and a request that ends meanwhile leaves a job whose result is dropped. Only so many jobs are under way at a time as
keep all threads busy: each holds the keys of a layer in f32.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcm.gpu_tier.config import PQCacheConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index import pq
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = [
    "Clusterer",
    "CostModel",
    "Fingerprint",
    "LayerIndex",
    "Profile",
    "dense_layer_seconds",
    "fingerprint",
    "fit",
    "fit_layer",
    "load",
    "measure",
    "obtain",
    "place_of",
    "save",
]

# How many iterations of k-means fit beside the computation of a layer (PQCache, equations 1 to 3).

_CLUSTER_SIZES, _CLUSTER_ITERATIONS = (1024, 2048, 4096), (1, 3, 6)
_LAYER_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_FEWEST_LAYERS, _LAYER_BUDGET_SECONDS = 4, 2.0
Fingerprint = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The coefficients, in seconds.

        t_clus(s, T) = α1 + β1·s·T + δ·s        clustering the keys of a layer of s tokens in T iterations
        t_comp(s)    = α2 + β2·s + γ2·s²        computing one layer over a prompt of s tokens
        T_max(s)     = (t_comp(s) − α1 − δ·s) / (β1·s), within the limits of the settings

    The document has no δ; reading and encoding keys costs as much per token however many iterations there are, and fits
    are better with it. The coefficients are fitted by least squares of relative errors to a few measurements. They
    belong to a machine, its device, a number of threads and the shapes of a model: a profile on disk names them all.

    A profile that is asked for and does not exist is measured and written. One that is damaged or belongs to something
    else is refused: an operator named it, and meant neither wrong numbers nor another machine's file overwritten.

    Attributes:
        alpha1: constant part of clustering.
        beta1: per token and iteration.
        delta: per token, once.
        alpha2: constant part of a layer.
        beta2: per token.
        gamma2: per square of the tokens.
    """

    alpha1: float
    beta1: float
    delta: float
    alpha2: float
    beta2: float
    gamma2: float

    def clustering_seconds(self, tokens: int, iterations: int) -> float:
        """Return t_clus."""
        return self.alpha1 + self.beta1 * tokens * iterations + self.delta * tokens

    def layer_seconds(self, tokens: int) -> float:
        """Return t_comp."""
        return self.alpha2 + self.beta2 * tokens + self.gamma2 * tokens**2

    def iterations(self, tokens: int, least: int, most: int) -> int:
        """Return T_max within [least, most]; `least` where measurements say that iterations cost nothing."""
        per_iteration = self.beta1 * tokens
        if per_iteration <= 0:
            return least
        fitting = (self.layer_seconds(tokens) - self.alpha1 - self.delta * tokens) / per_iteration
        return int(min(max(math.floor(fitting), least), most))


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted cost model and what it belongs to.

    Attributes:
        fingerprint: of machine and shapes.
        model: the coefficients.
        clustering_r2: share of the variance of the clustering's seconds that the model explains.
        layer_r2: likewise of the layer's.
    """

    fingerprint: Fingerprint
    model: CostModel
    clustering_r2: float
    layer_r2: float


def fingerprint(device_name: str, threads: int, shapes: Mapping[str, int]) -> Fingerprint:
    """Return what a profile belongs to: processor, cores, threads of clustering, device, torch, shapes."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "device": device_name,
        "torch": torch.__version__,
        **shapes,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _fit_clustering(samples: Sequence[tuple[int, int, float]]) -> tuple[tuple[float, float, float], float]:
    """Return (α1, β1, δ) and R² of measurements (tokens, iterations, seconds)."""
    rows = [(1.0, tokens * iterations, tokens) for tokens, iterations, _ in samples]
    return _least_squares(rows, [seconds for *_, seconds in samples])


def fit_layer(samples: Sequence[tuple[int, float]]) -> tuple[tuple[float, float, float], float]:
    """Return (α2, β2, γ2) and R² of measurements (tokens, seconds)."""
    return _least_squares([(1.0, tokens, tokens**2) for tokens, _ in samples], [seconds for _, seconds in samples])


def _least_squares(
    rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]
) -> tuple[tuple[float, float, float], float]:
    if len(set(rows)) < 3 or min(seconds) <= 0:
        allowed = "three coefficients need three different sizes, each of which took some time"
        raise ConfigError("samples", list(zip(rows, seconds, strict=True)), allowed)
    design, wanted = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    scale = design.abs().amax(0)  # columns of 1 to 1e9: alike for the solver
    weighted: Tensor = design / scale / wanted[:, None]
    solved = torch.linalg.lstsq(weighted, torch.ones_like(wanted)[:, None]).solution[:, 0] / scale
    left = (design @ solved - wanted).square().sum()
    spread = (wanted - wanted.mean()).square().sum()
    first, second, third = solved.tolist()
    return (first, second, third), float(1 - left / spread) if spread > 0 else 1.0


def fit(clustering: Sequence[tuple[int, int, float]], layers: Sequence[tuple[int, float]], of: Fingerprint) -> Profile:
    """Return the profile of measurements."""
    (alpha1, beta1, delta), clustering_r2 = _fit_clustering(clustering)
    (alpha2, beta2, gamma2), layer_r2 = fit_layer(layers)
    return Profile(
        of,
        CostModel(alpha1=alpha1, beta1=beta1, delta=delta, alpha2=alpha2, beta2=beta2, gamma2=gamma2),
        clustering_r2,
        layer_r2,
    )


def measure(
    cluster: Callable[[int, int], float], layer: Callable[[int], float], of: Fingerprint, fewest: int = 1
) -> Profile:
    """Measure and fit.

    Args:
        cluster: clusters a layer of so many tokens in so many iterations and returns the seconds that a layer takes.
        layer: computes one layer over so many tokens and returns the seconds.
        of: the subject of the measurement.
        fewest: tokens from which there is an index.
    """
    sizes = [max(tokens, (i + 1) * fewest) for i, tokens in enumerate(_CLUSTER_SIZES)]
    cluster(sizes[0], 1)  # the first call of everything is slow
    clustering = [(s, count, cluster(s, count)) for s in sizes for count in _CLUSTER_ITERATIONS]
    layer(_LAYER_SIZES[0])
    layers: list[tuple[int, float]] = []
    for tokens in _LAYER_SIZES:
        if len(layers) >= _FEWEST_LAYERS and sum(seconds for _, seconds in layers) > _LAYER_BUDGET_SECONDS:
            break
        layers.append((tokens, layer(tokens)))
    return fit(clustering, layers, of)


def save(path: Path, profile: Profile) -> None:
    """Write a profile atomically: a concurrent reader sees the old one or the new one."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(asdict(profile), indent=2) + "\n")
    fresh.replace(path)


def load(path: Path, of: Fingerprint) -> Profile:
    """Return a profile from disk.

    Raises:
        ConfigError: it is damaged, or belongs to another machine or other shapes.
    """
    try:
        data = json.loads(path.read_text())
        model = CostModel(**{name: _number(value) for name, value in data["model"].items()})
        profile = Profile(dict(data["fingerprint"]), model, _number(data["clustering_r2"]), _number(data["layer_r2"]))
        differing = sorted(
            name for name in {*of, *profile.fingerprint} if of.get(name) != profile.fingerprint.get(name)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        allowed = f"no profile of clustering can be read there ({error}); delete it to measure again"
        raise ConfigError("profile", str(path), allowed) from error
    if differing:
        now = {name: of.get(name) for name in differing}
        was = {name: profile.fingerprint.get(name) for name in differing}
        allowed = f"belongs to {was}, this is {now}; name another file, which will then be measured"
        raise ConfigError("profile", str(path), allowed)
    return profile


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


_measured: dict[tuple[tuple[str, str | int], ...], Profile] = {}


def obtain(path: str, of: Fingerprint, take: Callable[[], Profile]) -> Profile:
    """Return the profile of settings.

    Args:
        path: where it is; if there is none it is taken and written there. "" takes it once in a process.
        of: what it must belong to.
        take: measures.

    Raises:
        ConfigError: see `load` and `place_of`.
    """
    if not path:
        key = tuple(sorted(of.items()))
        if key not in _measured:
            _measured[key] = take()
        return _measured[key]
    place = place_of(path)
    if place.exists():
        return load(place, of)
    profile = take()
    save(place, profile)
    return profile


def place_of(path: str) -> Path:
    """Return where a profile is, or can be written.

    Raises:
        ConfigError: it can not: there is no such folder, or nothing may be written in it.
    """
    place = Path(path)
    if not place.exists() and not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigError("profile", path, f"{place.parent} must be a folder in which it can be written")
    return place


# How long one layer of a model computes over a prompt: attention and the products around it, of random numbers.

_WIDER = 3.5


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights, transposed; queries, keys and values come of one product."""

    heads: int
    kv_heads: int
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, dims: int) -> Tensor:
        """Return ``[s, hidden]``."""
        split = (self.heads, self.kv_heads, self.kv_heads)
        heads: Tensor = (x @ self.qkv).unflatten(-1, (-1, dims)).transpose(0, 1)
        q, k, v = heads.split(split)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + attended.transpose(0, 1).flatten(1) @ self.out
        gate, up = (x @ self.up).chunk(2, -1)
        result: Tensor = x + (torch.nn.functional.silu(gate) * up) @ self.down
        return result


def dense_layer_seconds(
    geometry: KVGeometry, num_q_heads: int, runtime: DeviceRuntime, clock: Callable[[], float] = time.perf_counter
) -> Callable[[int], float]:
    """Return a function that computes a layer over so many tokens and returns the seconds it took.

    A stand-in for engines that do not say how long their layers take: a hidden size of all query heads, three products
    of a gated feed-forward part 3.5 times as wide, causal attention. It is measured on the device that attention runs
    on.
    """
    dims = geometry.v_head_dim
    hidden = num_q_heads * dims
    wide = int(_WIDER * hidden)
    dtype = torch.bfloat16 if runtime.is_cuda else torch.float32

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=runtime.device) / math.sqrt(rows)

    layer = _Layer(
        heads=num_q_heads, kv_heads=geometry.num_kv_heads,
        qkv=weight(hidden, (num_q_heads + 2 * geometry.num_kv_heads) * dims), out=weight(hidden, hidden),
        up=weight(hidden, 2 * wide), down=weight(wide, hidden),
    )  # fmt: skip

    def seconds(tokens: int) -> float:
        x = torch.randn(tokens, hidden, dtype=dtype, device=runtime.device)
        runtime.record("compute").wait()
        begin = clock()
        layer(x, dims)
        runtime.record("compute").wait()
        return clock() - begin

    return seconds


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """What clustering a layer gives.

    Attributes:
        codebook: ``f16 [H, m, 2^b, d/m]``.
        codes: ``uint8 [n, H, m]`` of all keys that were given.
    """

    codebook: Tensor
    codes: Tensor


class Clusterer:
    """Clusters for one engine.

    Args:
        shape: of keys and codes.
        settings: of the algorithm.
        runtime: of the device.
        layer_seconds: returns a function that computes a layer over so many tokens and returns the seconds; asked for
            when iterations are adaptive and there is no profile yet.
        kernels: implementation of the kernels on the device, see `registry.get`.

    Raises:
        ConfigError: the profile of the settings will be needed, does not exist and cannot be written.

    Attributes:
        trained: codebooks of a layer that were asked for so far.
    """

    def __init__(
        self, shape: pq.PQShape, settings: PQCacheConfig, runtime: DeviceRuntime,
        layer_seconds: Callable[[], Callable[[int], float]], kernels: str = "auto",
    ) -> None:  # fmt: skip
        if settings.profile and not settings.iterations:
            place_of(settings.profile)  # now, and not with the first prompt
        self._shape, self._settings, self._runtime = shape, settings, runtime
        # On a CPU the reference is the fast one, and Triton's interpreter works in one thread only.
        self._on_device = kernels if runtime.is_cuda else "reference"
        self._kernels = "reference" if self.on_cpu else self._on_device
        self._layer_seconds = layer_seconds
        self.threads = min(settings.kmeans_threads, os.cpu_count() or 1)
        self._executor: ThreadPoolExecutor | None = None
        self._running: list[Future[LayerIndex]] = []
        self._profile: Profile | None = None
        self.trained = 0

    @property
    def on_cpu(self) -> bool:
        """Whether jobs run on the CPU, beside the device."""
        return self._settings.kmeans_device == "cpu"

    def is_free(self) -> bool:
        """Return whether another job can begin without waiting in a queue of more than one per thread."""
        self._running = [job for job in self._running if not job.done()]
        return len(self._running) < 2 * self.threads

    def iterations(self, tokens: int) -> int:
        """Return T for clustering so many tokens."""
        settings = self._settings
        if settings.iterations:
            return settings.iterations
        model = self.profile().model
        return model.iterations(tokens, settings.min_iterations, settings.max_iterations)

    def start(self, keys: Tensor, first: int, stop: int) -> Future[LayerIndex]:
        """Begin to cluster a layer.

        Args:
            keys: ``[n, H, d]``.
            first: the centroids are those of keys `first` to `stop` - 1; all keys get codes.
            stop: see `first`.
        """
        count = self.iterations(stop - first)
        self.trained += 1
        if not self.on_cpu:
            return _done(self._cluster(keys, first, stop, count))
        job = self._threads().submit(self._cluster, keys.cpu(), first, stop, count)
        self._running.append(job)
        return job

    def now(self, keys: Tensor, first: int, stop: int) -> LayerIndex:
        """Cluster a layer and wait for it, see `start`."""
        keys = keys.cpu() if self.on_cpu else keys
        self.trained += 1
        return self._cluster(keys, first, stop, self.iterations(stop - first))

    def encode(self, keys: Tensor, codebook: Tensor) -> Tensor:
        """Return the codes of keys, where they are."""
        return pq.encode(keys, codebook, kernels=self._on_device)

    def _cluster(self, keys: Tensor, first: int, stop: int, count: int) -> LayerIndex:
        codebook = pq.train(keys[first:stop], self._shape, count, self._settings.seed, kernels=self._kernels)
        return LayerIndex(codebook, pq.encode(keys, codebook, kernels=self._kernels))

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, "kmeans", initializer=_one_core)
        return self._executor

    def close(self) -> None:
        """End the threads, after what they are at."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    # The cost model.

    def profile(self) -> Profile:
        """Return the cost model of this machine; measured if there is none yet.

        Raises:
            ConfigError: the file of the settings is damaged or another machine's.
        """
        if self._profile is None:
            self._profile = obtain(self._settings.profile, self._fingerprint(), self._measure)
        return self._profile

    def _fingerprint(self) -> Fingerprint:
        shape = self._shape
        shapes = {"heads": shape.heads, "dims": shape.dims, "m": shape.m, "b": shape.b}
        where = self._runtime.device_name
        return {
            **fingerprint(where, self.threads, shapes),
            "kmeans_device": self._settings.kmeans_device,
        }

    def _measure(self) -> Profile:
        return measure(self._seconds, self._layer_seconds(), self._fingerprint(), self._shape.fewest)

    def _seconds(self, tokens: int, count: int) -> float:
        """Return the seconds between two layers when layers follow each other through all threads."""
        keys = torch.randn(tokens, self._shape.heads, self._shape.dims, generator=torch.Generator().manual_seed(0))
        begin = time.perf_counter()
        if not self.on_cpu:
            self._cluster(keys=keys.to(self._runtime.device), first=0, stop=tokens, count=count).codes.cpu()
            return time.perf_counter() - begin
        jobs = [self._threads().submit(self._cluster, keys, 0, tokens, count) for _ in range(self.threads)]
        for job in jobs:
            job.result()
        return (time.perf_counter() - begin) / self.threads


def _one_core() -> None:
    # As many jobs as threads: if each also spread over all cores they would mostly wait for each other.
    torch.set_num_threads(1)


def _done(index: LayerIndex) -> Future[LayerIndex]:
    job: Future[LayerIndex] = Future()
    job.set_result(index)
    return job
