"""Moves KV between the host pool and the device pool.

Two engines give the same bytes. `kernel` runs on the device and reads and writes host memory itself: for scattered
rows, and for plans that only the device knows. `dma` hands contiguous runs to the copy engine: for whole pages of pools
with the same order, whose runs are long. A transfer goes to the stream that is current when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Addressing, KVGeometry, Layout, PartStrides
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.io_transfer import io_transfer
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import DeviceRuntime, upload
from kvcm.gpu_tier.types import CopyRuns, Source

__all__ = ["Engine", "KVTransfer", "Runs", "TransferCounters", "copy_runs", "slot_pairs"]

# The bytes that a transfer moves, as contiguous runs for a copy engine.

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous copies.

    Runs are merged over heads, tokens and pages where both pools are contiguous there. Only for indices on the host.

    Attributes:
        src: ``int64 [n]`` first byte of each in the pool that is read.
        dst: ``int64 [n]`` first byte in the other pool.
        nbytes: ``int64 [n]`` bytes of each.
    """

    src: Ints
    dst: Ints
    nbytes: Ints

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    @property
    def mean_bytes(self) -> float:
        """Bytes of a run on average, 0 without runs."""
        return self.total_bytes / len(self.nbytes) if len(self.nbytes) else 0.0

    def split(self, src_border: int, dst_border: int) -> Runs:
        """Return the same copies cut where either side passes a multiple of its border; 0 means no border."""
        runs = self
        for side, border in (("src", src_border), ("dst", dst_border)):
            if border:
                runs = runs._split_side(getattr(runs, side), border)
        return runs

    def _split_side(self, start: Ints, border: int) -> Runs:
        first, last = start // border, (start + self.nbytes - 1) // border
        pieces = last - first + 1
        which = np.repeat(np.arange(len(start)), pieces)
        chunk = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.maximum(start[which], chunk * border)
        end = np.minimum(start[which] + self.nbytes[which], (chunk + 1) * border)
        shift = begin - start[which]
        return Runs(self.src[which] + shift, self.dst[which] + shift, end - begin)


def slot_pairs(src_idx: Tensor, dst_idx: Tensor, count: Tensor | None, unit_tokens: int) -> tuple[Ints, Ints, Ints]:
    """Return the tokens that a transfer moves as (row, source slot, target slot), in order.

    Args:
        src_idx: ``int [R, M]`` on the host.
        dst_idx: ``int [R, M]`` on the host.
        count: ``int [R]`` on the host, or None.
        unit_tokens: tokens of an entry.
    """
    src, dst = src_idx.numpy().astype(np.int64), dst_idx.numpy().astype(np.int64)
    live = (src >= 0) & (dst >= 0)
    if count is not None:
        live &= np.arange(live.shape[1]) < count.numpy()[:, None]
    rows = np.repeat(np.nonzero(live)[0], unit_tokens)
    offsets = np.arange(unit_tokens)
    return rows, (src[live][:, None] + offsets).ravel(), (dst[live][:, None] + offsets).ravel()


def copy_runs(
    src_addr: Addressing,
    dst_addr: Addressing,
    pairs: tuple[Ints, Ints, Ints],
    *,
    layers: tuple[tuple[int, int], ...],
    num_heads: int,
    per_head: bool,
) -> Runs:
    """Return the runs of a transfer; arguments as of `io_transfer`, `pairs` of `slot_pairs`."""
    rows, src_slots, dst_slots = pairs
    heads = rows[:, None] % num_heads if per_head else np.arange(num_heads)[None]
    runs = []
    for src, dst in zip(src_addr.parts, dst_addr.parts, strict=True):
        begin = _token_bytes(src, src_addr.page_size, src_slots), _token_bytes(dst, dst_addr.page_size, dst_slots)
        one_layer = _merge(_head_rows(begin[0], src, heads), _head_rows(begin[1], dst, heads), src.row_bytes)
        runs += [_shifted(one_layer, src.layer * here, dst.layer * there) for here, there in layers]
    return Runs(*(np.concatenate([getattr(run, field) for run in runs]) for field in ("src", "dst", "nbytes")))


def _token_bytes(part: PartStrides, page_size: int, slots: Ints) -> Ints:
    return part.base + part.page * (slots // page_size) + part.token * (slots % page_size)


def _head_rows(tokens: Ints, part: PartStrides, heads: Ints) -> Ints:
    return (tokens[:, None] + part.head * heads).ravel()


def _merge(src: Ints, dst: Ints, row_bytes: int) -> Runs:
    if not len(src):
        return Runs(src, dst, np.zeros(0, np.int64))
    starts = np.ones(len(src), bool)
    starts[1:] = (np.diff(src) != row_bytes) | (np.diff(dst) != row_bytes)
    first = np.nonzero(starts)[0]
    return Runs(src[first], dst[first], np.diff(np.append(first, len(src))) * row_bytes)


def _shifted(runs: Runs, src: int, dst: int) -> Runs:
    return Runs(runs.src + src, runs.dst + dst, runs.nbytes)


_DMA_RUN_BYTES = 64 << 10


class Engine(StrEnum):
    """What moves the bytes."""

    AUTO = "auto"
    KERNEL = "kernel"
    DMA = "dma"


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """Bytes moved so far, exactly: skipped entries and those behind a row's count do not count."""

    h2d_bytes: int
    d2h_bytes: int
    d2d_bytes: int


@dataclass(frozen=True, slots=True)
class _Side:
    data: Tensor
    addressing: Addressing
    geometry: KVGeometry
    border: int = 0

    def position(self, layer: int) -> int:
        return self.geometry.layer_index(layer)


class _OneLayer(_Side):
    """A pool that holds one layer, whichever was loaded last."""

    def position(self, layer: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Job:
    src: _Side
    dst: _Side
    src_idx: Tensor
    dst_idx: Tensor
    layers: tuple[tuple[int, int], ...]
    count: Tensor | None
    per_head: bool
    unit_tokens: int


_H2D, _D2H, _D2D = range(3)


class KVTransfer:
    """Transfers between one host pool and one device pool of the same model.

    Attributes:
        geometry: of the host pool.
        pools: the host pool and the device pool.

    Args:
        host: the host pool.
        device: the device pool; it may hold fewer layers.
        runtime: of the device.
        config: settings; `io_blocks` and `kernels` are used.

    Raises:
        ConfigError: the pools hold different KV.
    """

    def __init__(self, host: HostKVPool, device: DeviceKVPool, runtime: DeviceRuntime, config: SparseConfig) -> None:
        if replace(device.geometry, num_layers=host.geometry.num_layers) != host.geometry:
            raise ConfigError("host, device", (host.geometry, device.geometry), "both pools must hold the same KV")
        self.geometry = host.geometry
        self.pools = host, device
        self._runtime = runtime
        self._config = config
        # Kernels add to the tensor; what the copy engine moves is known on the host.
        self._moved = torch.zeros(3, dtype=torch.int64, device=runtime.device)
        self._by_dma = [0, 0, 0]
        self._gathered = torch.zeros(len(Source), dtype=torch.int64, device=runtime.device)
        self._is_one_layer = False

    def to(self, device: DeviceKVPool, *, is_one_layer: bool = False) -> KVTransfer:
        """Return transfers to another device pool, whose bytes count here.

        Args:
            device: the pool; it may hold fewer layers.
            is_one_layer: the pool holds one layer at a time, whichever was loaded last.
        """
        other = KVTransfer(self.pools[0], device, self._runtime, self._config)
        other._moved, other._by_dma, other._is_one_layer = self._moved, self._by_dma, is_one_layer
        other._gathered = self._gathered
        return other

    @property
    def counters(self) -> TransferCounters:
        """Bytes moved so far. Reading them waits for the transfers: not in a step."""
        for stream in ("h2d", "d2h", "upd"):
            self._runtime.fence(self._runtime.record(stream), "compute")
        h2d, d2h, d2d = (kernel + dma for kernel, dma in zip(self._moved.tolist(), self._by_dma, strict=True))
        gathered = self._gathered.tolist()
        from_device = gathered[Source.STEADY] + gathered[Source.CACHE]
        return TransferCounters(h2d + gathered[Source.HOST], d2h, d2d + from_device)

    @property
    def gathered(self) -> tuple[int, ...]:
        """Bytes that were gathered into execution buffers so far, by `Source`; reading them waits for the transfers."""
        self._runtime.fence(self._runtime.record("h2d"), "compute")
        return tuple(self._gathered.tolist())

    def load(
        self, host_slots: Tensor, device_slots: Tensor, *, layers: range, count: Tensor | None = None,
        per_head: bool = False, unit_tokens: int = 1, engine: Engine = Engine.AUTO,
    ) -> None:  # fmt: skip
        """Copy items from the host to the device.

        Args:
            host_slots: ``int [R, M]`` host slot of each item's first token; negative ones are skipped.
            device_slots: ``int [R, M]`` device slot it goes to; likewise.
            layers: ids of the layers.
            count: ``int32 [R]`` entries of each row; None for all.
            per_head: row r concerns only head ``r % H``.
            unit_tokens: tokens of an item.
            engine: auto, kernel or dma; dma needs indices on the host.

        Raises:
            ConfigError: shapes do not fit, a layer is not held here, or dma was asked for with indices on the device.
        """
        host, device = self._sides()
        job = self._job(
            src=host,
            dst=device,
            src_idx=host_slots,
            dst_idx=device_slots,
            layers=layers,
            count=count,
            per_head=per_head,
            unit_tokens=unit_tokens,
        )
        self._run(job, _H2D, engine)

    def store(
        self, device_slots: Tensor, host_slots: Tensor, *, layers: range, count: Tensor | None = None,
        per_head: bool = False, unit_tokens: int = 1, engine: Engine = Engine.AUTO,
    ) -> None:  # fmt: skip
        """Copy items from the device to the host; see `load`."""
        host, device = self._sides()
        job = self._job(
            src=device,
            dst=host,
            src_idx=device_slots,
            dst_idx=host_slots,
            layers=layers,
            count=count,
            per_head=per_head,
            unit_tokens=unit_tokens,
        )
        self._run(job, _D2H, engine)

    def move(
        self, src_slots: Tensor, dst_slots: Tensor, *, layers: range, count: Tensor | None = None,
        per_head: bool = False, unit_tokens: int = 1, engine: Engine = Engine.AUTO,
    ) -> None:  # fmt: skip
        """Copy items inside the device; no target may be a source of the same call. See `load`."""
        _, device = self._sides()
        job = self._job(
            src=device,
            dst=device,
            src_idx=src_slots,
            dst_idx=dst_slots,
            layers=layers,
            count=count,
            per_head=per_head,
            unit_tokens=unit_tokens,
        )
        self._run(job, _D2D, engine)

    def gather(self, sources: tuple[RowPool, ...], target: RowPool, runs: CopyRuns) -> None:
        """Copy runs of tokens of single heads into a pool of one layer.

        Args:
            sources: pools by `Source`.
            target: where they go.
            runs: what to copy.
        """
        host, _ = self.pools
        gather_copy(
            sources, target, runs, num_heads=self.geometry.num_kv_heads, moved=self._gathered,
            impl=self._config.kernels if host.is_device_readable else "reference",
        )  # fmt: skip
        self._runtime.used(runs.kind, runs.src, runs.dst, runs.tokens, runs.count)

    def _sides(self) -> tuple[_Side, _Side]:
        host, device = self.pools
        on_device = _OneLayer if self._is_one_layer else _Side
        return (
            _Side(host.data, host.addressing, host.geometry, host.chunk_bytes),
            on_device(device.data, device.addressing, device.geometry),
        )

    def _job(
        self, src: _Side, dst: _Side, src_idx: Tensor, dst_idx: Tensor, layers: range, count: Tensor | None,
        per_head: bool, unit_tokens: int,
    ) -> _Job:  # fmt: skip
        positions = tuple((src.position(layer), dst.position(layer)) for layer in layers)
        return _Job(
            src=src,
            dst=dst,
            src_idx=src_idx,
            dst_idx=dst_idx,
            layers=positions,
            count=count,
            per_head=per_head,
            unit_tokens=unit_tokens,
        )

    def _run(self, job: _Job, direction: int, engine: Engine) -> None:
        if engine is Engine.DMA and not _on_host(job):
            raise ConfigError("engine", engine.value, "needs indices on the host")
        may_use_copies = engine is Engine.AUTO and _on_host(job) and self._may_have_long_runs(job)
        runs = self._runs(job) if engine is Engine.DMA or may_use_copies else None
        if runs is None or (engine is Engine.AUTO and runs.mean_bytes < _DMA_RUN_BYTES):
            self._by_kernel(job, direction)
        else:
            self._by_copies(job, runs, direction)

    def _may_have_long_runs(self, job: _Job) -> bool:
        # Tokens of a layer follow each other only in layer_first pools; looking costs more than a short transfer.
        tokens = job.src_idx.numel() * job.unit_tokens
        orders = {job.src.addressing.layout, job.dst.addressing.layout}
        return orders == {Layout.LAYER_FIRST} and tokens * self.geometry.token_layer_bytes >= _DMA_RUN_BYTES

    def _by_copies(self, job: _Job, runs: Runs, direction: int) -> None:
        src, dst, nbytes = (torch.from_numpy(numbers) for numbers in (runs.src, runs.dst, runs.nbytes))
        dma_copy(job.src.data, job.dst.data, src, dst, nbytes, impl=self._config.kernels)
        self._by_dma[direction] += runs.total_bytes

    def _runs(self, job: _Job) -> Runs:
        pairs = slot_pairs(job.src_idx, job.dst_idx, job.count, job.unit_tokens)
        runs = copy_runs(
            job.src.addressing, job.dst.addressing, pairs, layers=job.layers, num_heads=self.geometry.num_kv_heads,
            per_head=job.per_head,
        )  # fmt: skip
        return runs.split(job.src.border, job.dst.border)

    def _by_kernel(self, job: _Job, direction: int) -> None:
        device = self._runtime.device
        host, _ = self.pools
        # Inside the device nothing is computed beside the transfer: it may use the whole device.
        blocks = 0 if direction == _D2D else self._config.io_blocks
        # Kernels cannot reach pageable memory; the reference copies through the host, and waits.
        readable = direction == _D2D or host.is_device_readable
        io_transfer(
            src=job.src.data,
            dst=job.dst.data,
            src_addr=job.src.addressing,
            dst_addr=job.dst.addressing,
            src_idx=upload(job.src_idx, device),
            dst_idx=upload(job.dst_idx, device),
            layers=job.layers,
            num_heads=self.geometry.num_kv_heads,
            count=None if job.count is None else upload(job.count, device),
            per_head=job.per_head,
            unit_tokens=job.unit_tokens,
            blocks=blocks,
            moved=self._moved[direction : direction + 1],
            impl=self._config.kernels if readable else "reference",
        )
        self._runtime.used(job.src_idx, job.dst_idx, job.count)


def _on_host(job: _Job) -> bool:
    indices = (job.src_idx, job.dst_idx) if job.count is None else (job.src_idx, job.dst_idx, job.count)
    return all(index.device.type == "cpu" for index in indices)
