"""Clusters the keys of layers, beside everything else or at once.

A layer is one job: its H·m problems are batched, and layers do not depend on each other. On the CPU jobs run in threads
of their own, one core each; keys are copied to host memory first, so that a job needs neither the pools nor the device,
and a request that ends meanwhile leaves a job whose result nobody takes. Only so many jobs are under way at a time as
keep all threads busy: each holds the keys of a layer in f32.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.config import PQCacheConfig
from gpu_tier.index import iterations, pq
from gpu_tier.index.iterations import Fingerprint, Profile
from gpu_tier.runtime import DeviceRuntime

__all__ = ["Clusterer", "LayerIndex"]


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
            iterations.place_of(settings.profile)  # now, and not with the first prompt
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
            self._profile = iterations.obtain(self._settings.profile, self._fingerprint(), self._measure)
        return self._profile

    def _fingerprint(self) -> Fingerprint:
        shape = self._shape
        shapes = {"heads": shape.heads, "dims": shape.dims, "m": shape.m, "b": shape.b}
        where = self._runtime.device_name
        return {
            **iterations.fingerprint(where, self.threads, shapes),
            "kmeans_device": self._settings.kmeans_device,
        }

    def _measure(self) -> Profile:
        return iterations.measure(self._seconds, self._layer_seconds(), self._fingerprint(), self._shape.fewest)

    def _seconds(self, tokens: int, count: int) -> float:
        """Return the seconds between two layers when layers follow each other through all threads."""
        keys = torch.randn(tokens, self._shape.heads, self._shape.dims, generator=torch.Generator().manual_seed(0))
        begin = time.perf_counter()
        if not self.on_cpu:
            self._cluster(keys.to(self._runtime.device), 0, tokens, count).codes.cpu()
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
