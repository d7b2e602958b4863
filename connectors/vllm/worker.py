"""A rank's side of the connector: loads its parts into blocks that the scheduler named, and saves its parts of others.

A load: `start_load_kv` → `_load` → `_load_group` → `reuse.loads.load_parts` → `GroupMemory.put`. With option
`layerwise` `layerwise_load.load_layers` calls the last two per layer, and attention waits in `wait_for_layer_load`.
Invariants:

1. Loads go through staging memory, so that no byte reaches a block after the result of its load.
2. Saves read blocks in place: the scheduler pins them until it has the result.
3. Every job has a result; a failure is one, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.layout.gather import EngineKv, block_memory, gather, scatter
from kvcm.connectors.layout.stored_format import ByteRange, IndexRange, Shard
from kvcm.connectors.layout.tensors import iovec
from kvcm.connectors.pool_reports import PoolReporter, PoolReports
from kvcm.connectors.reuse.loads import Bytes, Deliver, LoadReport, PartToLoad, StagingTrays, load_parts, missing_report
from kvcm.connectors.reuse.statistics import ReuseStatistics
from kvcm.connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.memory import span_of
from kvcm.connectors.transfer.worker_pool import PRIORITY_LOAD, WorkerPool
from kvcm.connectors.vllm.connector_metadata import (
    GroupLoad,
    KvcmConnectorMetadata,
    KvcmWorkerMetadata,
    LoadJob,
    SaveJob,
    SaveResult,
)
from kvcm.connectors.vllm.engine_weights import RankWeights
from kvcm.connectors.vllm.kv_cache_groups import KvCacheGroup, KvCacheLayout, RankPart
from kvcm.connectors.vllm.layerwise_load import LayerProgress, load_layers
from kvcm.connectors.vllm.options import VllmOptions
from kvcm.connectors.wire import decode_locations
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageConfig

__all__ = ["GroupMemory", "KvcmWorker", "RankStorages"]

_log = logging.getLogger(__name__)


class RankStorages:
    """Makes the transfer engine of a rank, in the background, and again when the group's storages change.

    A rank does not register: the scheduler sends the storages. With one registration per engine all ranks store and
    load under one identity, even if vLLM changes its configuration inside a worker.

    Args:
        client: of the manager, for reports of mapped memory pools; closed with the storages.
        options: of the connector.
    """

    def __init__(self, client: ManagerClient, options: VllmOptions) -> None:
        self._client = client
        self._options = options
        self._changed = threading.Condition()
        self._engine: TransferEngine | None = None
        self._maker = WorkerPool(1, "kvcm-storages")
        self._pool_reporter = PoolReporter(PoolReports(client), options.call_seconds)

    def set_storages(self, storages: Sequence[StorageConfig]) -> None:
        """Use these storages from now on."""
        self._maker.submit(PRIORITY_LOAD, partial(self._use, storages))

    def engine(self, timeout_seconds: float) -> TransferEngine | None:
        """Return the transfer engine, None when there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._engine is not None, max(0.0, timeout_seconds))
            engine = self._engine
        if engine is not None:
            self._pool_reporter.report_pools(engine)
        return engine

    def close(self, timeout_seconds: float) -> None:
        """Close everything; accesses that hang longer are abandoned."""
        deadline = time.monotonic() + timeout_seconds
        self._maker.close(deadline - time.monotonic())
        self._pool_reporter.close(deadline - time.monotonic())
        self._client.close()
        if self._engine is not None:
            self._engine.close(deadline - time.monotonic())

    def _use(self, storages: Sequence[StorageConfig]) -> None:
        threads, checksums = self._options.transfer_threads or None, self._options.checksums
        try:
            engine = TransferEngine.for_storages(storages, threads, checksums=checksums)
        except Exception:  # a storage's client may raise anything; the engine that we serve goes on
            _log.exception("the storages of the group cannot be used here, KV is not reused")
            return
        self._pool_reporter.report_pools(engine)
        with self._changed:
            before, self._engine = self._engine, engine
            self._changed.notify_all()
        if before is not None:
            before.close()


_PACKED = ("block", "head", "token", "kv_dim")
_LATENT = ("block", "head", "token", "dim")


class _Piece(NamedTuple):
    """Where one contiguous piece of block 0 lies, and how far it is to that of the next block."""

    memory: memoryview
    start: int
    size_bytes: int
    step: int


class GroupMemory:
    """Reads and writes the blocks of one group; safe to use from several threads, for different blocks.

    Args:
        group: of layers.
        part: of the rank.
        caches: vLLM's tensors by name of the layer, each [block, head, token, K and V].

    Raises:
        InvalidArgumentError: a tensor is missing, or not of the form that the group is stored in.
    """

    def __init__(self, group: KvCacheGroup, part: RankPart, caches: Mapping[str, torch.Tensor]) -> None:
        missing = [name for name in group.layer_names if name not in caches]
        if missing:
            raise InvalidArgumentError(f"no KV cache of layer {missing[0]}, vLLM registered {len(caches)}")
        axes = _LATENT if group.stored.kv_parts == 1 else _PACKED
        self.part = part
        self.part_bytes = group.stored.shard_bytes(part.shard)
        self._kv = EngineKv(group.stored, part.shard, [[caches[name]] for name in group.layer_names], axes)
        self._pieces = self._pieces_of_block_0()

    def memory_of(self, block_id: int) -> Sequence[memoryview]:
        """Return the bytes of a block in stored order: the engine's own memory where that is possible, else a copy."""
        if self._pieces is not None:
            return [
                memory[start + block_id * step : start + block_id * step + size]
                for memory, start, size, step in self._pieces
            ]
        direct = block_memory(self._kv, [block_id], self.part.shard)
        if direct is not None:
            return direct
        with self._on_device():
            copy = torch.empty((1, self.part_bytes), dtype=torch.uint8, device=self._kv.device)
            gather(self._kv, [block_id], self.part.shard, copy)
            return iovec([copy.cpu()])

    @property
    def layers(self) -> int:
        """Number of layers in a part."""
        return self.part.shard.layers.end - self.part.shard.layers.first

    def layer_range(self, layer: int) -> ByteRange:
        """Return where the bytes of a layer lie in a part."""
        [found] = self._kv.stored.byte_ranges(self.part.shard, self._shard(layer))
        return found

    def put(self, block_ids: Sequence[int], rows: Bytes, layer: int | None = None) -> None:
        """Bring stored bytes into blocks.

        Args:
            block_ids: one per row, none twice.
            rows: [block, byte], as they were stored.
            layer: which the rows are of; None for rows of all layers.
        """
        with self._on_device():
            stored = torch.from_numpy(np.ascontiguousarray(rows)).to(self._kv.device)
            scatter(self._kv, list(block_ids), self._shard(layer), stored)
            if self._kv.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _shard(self, layer: int | None) -> Shard:
        whole = self.part.shard
        if layer is None:
            return whole
        first = whole.layers.first + layer
        return Shard(IndexRange(first, first + 1), whole.heads)

    def _pieces_of_block_0(self) -> list[_Piece] | None:
        """Return where the pieces of block 0 lie, when those of every other block lie a fixed distance further on.

        A twentieth of the time of `block_memory`, which makes a tensor per piece of every block.
        """
        last = self._kv.blocks - 1
        first, end = (block_memory(self._kv, [block], self.part.shard) for block in (0, last))
        if (
            first is None
            or end is None
            or last == 0
            or [each.nbytes for each in first] != [each.nbytes for each in end]
        ):
            return None
        pieces = []
        for view, further in zip(first, end, strict=True):
            step, rest = divmod(span_of(further).address - span_of(view).address, last)
            whole = memoryview(view.obj).cast("B")
            start = span_of(view).address - span_of(whole).address
            if rest or step < view.nbytes or not 0 <= start <= start + last * step + view.nbytes <= whole.nbytes:
                return None
            pieces.append(_Piece(whole, start, view.nbytes, step))
        return pieces

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels are launched on a thread's current device, which is the first one for threads that we start."""
        return torch.cuda.device(self._kv.device) if self._kv.device.type == "cuda" else nullcontext()


_JOBS_AT_ONCE = 2
_LEAST_TRAYS = 2


class KvcmWorker:
    """One rank of one engine.

    Args:
        plan: how KV is stored.
        rank: of the tensor-parallel group.
        options: of the connector.
        storages: of the rank; closed with it.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        plan: KvCacheLayout,
        rank: int,
        options: VllmOptions,
        storages: RankStorages,
        statistics: ReuseStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._options = options
        self._storages = storages
        self._statistics = statistics
        self._clock = clock
        self._memory: dict[int, GroupMemory] = {}
        self._lock = threading.Lock()
        self._loads: dict[str, CancelToken] = {}
        self._waited_for: list[Future[None]] = []  # loads of the step that is being computed
        self._progress: LayerProgress | None = None  # of these, where layers wait for them
        self._is_closing = CancelToken()
        self._ended_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._results = KvcmWorkerMetadata()
        # Threads of their own: loads wait for no saves.
        self._load_threads = WorkerPool(_JOBS_AT_ONCE, "kvcm-load")
        self._save_threads = WorkerPool(_JOBS_AT_ONCE, "kvcm-save")
        part_bytes = max(group.stored.shard_bytes(group.part_of(rank, plan.ranks).shard) for group in plan.groups)
        tray_bytes = max(options.staging_bytes // (2 * _LEAST_TRAYS), part_bytes)
        self._trays = StagingTrays(tray_bytes, max(_LEAST_TRAYS, options.staging_bytes // tray_bytes))

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Use the engine's KV memory.

        Raises:
            InvalidArgumentError: it is not as the plan says.
        """
        for group in self._plan.groups:
            self._memory[group.id] = GroupMemory(group, group.part_of(self._rank, self._plan.ranks), caches)

    def watch_weights(self, weights: RankWeights) -> None:
        """Refuse jobs of other weights than the rank has."""
        self._weights = weights

    def set_weights_version(self, name: str) -> None:
        """See `KVCMConnector.set_weights_version`."""
        self._weights.set_version(name)

    def start_load_kv(self, metadata: KvcmConnectorMetadata) -> None:
        """Start the loads of a step, and cancel those of ended requests; wait for them when the step has to.

        With `layerwise`, `wait_for_layer_load` waits instead.
        """
        if metadata.storages is not None:
            self._storages.set_storages(metadata.storages)
        with self._lock:
            cancelled = [self._loads[request] for request in metadata.cancelled if request in self._loads]
        for token in cancelled:
            token.cancel()
        report = self._weights.report(metadata.generation, has_jobs=bool(metadata.loads or metadata.saves))
        if report is not None:
            with self._lock:
                self._results.weights[self._rank] = report
        self._progress = self._new_progress(metadata)
        started = []
        for number, job in enumerate(metadata.loads):
            token = CancelToken()
            with self._lock:
                self._loads[job.request_id] = token
            deadline = self._clock() + job.seconds  # time in the queue counts
            on_layers = partial(self._progress.advance, number) if self._progress else None
            task = partial(self._load, job, token, deadline, on_layers, is_waited_for=metadata.waits)
            started.append(self._load_threads.submit(PRIORITY_LOAD, task))
            if self._progress is not None:
                started[-1].add_done_callback(partial(self._progress.finish, number))
        if metadata.waits:
            self._waited_for = started
        if self._progress is None:
            self._wait_for_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until this step's loads of a layer have ended, with `layerwise`."""
        if self._progress is not None:
            self._progress.wait(layer_name)

    def start_saves(self, metadata: KvcmConnectorMetadata) -> None:
        """Start the saves of a step, after its forward."""
        is_current = self._weights.admits(metadata.generation)
        for job in metadata.saves:
            task = partial(self._save, job, self._clock() + job.seconds, is_current=is_current)
            self._save_threads.submit(PRIORITY_LOAD, task)

    def get_transfer_results(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those of them that have failed.

        Called at the end of a step: the loads that it waited for have ended then.
        """
        self._wait_for_loads()
        with self._lock:
            ended, self._ended_loads = self._ended_loads, set()
            failed, self._failed_loads = self._failed_loads, set()
            return ended, failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded since the last call; called after `get_transfer_results`."""
        with self._lock:
            failed, self._failed_block_ids = self._failed_block_ids, set()
            return failed

    def build_connector_worker_meta(self) -> KvcmWorkerMetadata | None:
        """Return the results for the scheduler, None for nothing."""
        with self._lock:
            results, self._results = self._results, KvcmWorkerMetadata()
        return results if results else None

    def shutdown(self) -> None:
        """Start no more jobs, and cancel those in flight: no step reads their results.

        The scheduler's side is closed after the ranks, and needs its half of the time to end the write sessions.
        """
        deadline = self._clock() + self._options.shutdown_seconds / 2
        with self._lock:
            tokens = [self._is_closing, *self._loads.values()]
        for token in tokens:
            token.cancel()
        for threads in (self._load_threads, self._save_threads):
            threads.close(deadline - self._clock())
        self._storages.close(deadline - self._clock())

    def _new_progress(self, metadata: KvcmConnectorMetadata) -> LayerProgress | None:
        """Return the progress of a step's loads with `layerwise`, else None. There is one group of layers then."""
        if not (self._options.layerwise and metadata.waits and metadata.loads):
            return None
        return LayerProgress(self._plan.groups[0].layer_names, len(metadata.loads))

    def _wait_for_loads(self) -> None:
        for future in self._waited_for:
            future.exception()
        self._waited_for = []

    def _load(
        self,
        job: LoadJob,
        token: CancelToken,
        deadline: float,
        on_layers: Callable[[int], None] | None,
        *,
        is_waited_for: bool,
    ) -> None:
        started = self._clock()
        failed = {block_id for group in job.groups for block_id in group.block_ids}
        reports: list[LoadReport] = []
        loaded = 0
        try:
            if self._weights.admits(job.generation):
                failed = set()
                for group in job.groups:
                    bad, report = self._load_group(group, deadline, token, on_layers)
                    failed |= bad
                    reports += [report] if report else []
                    loaded = max(loaded, len(group.block_ids) - len(bad))
        except Exception:
            _log.exception("a load failed; request %s is computed", job.request_id)
            failed = {block_id for group in job.groups for block_id in group.block_ids}
        self._statistics.observe("load_seconds", self._clock() - started)
        self._statistics.add(loaded_blocks=0 if failed and len(job.groups) > 1 else loaded)
        with self._lock:
            del self._loads[job.request_id]
            if not is_waited_for:
                self._ended_loads.add(job.request_id)
            if failed:
                self._failed_loads.add(job.request_id)
                self._results.failed_loads.add(job.request_id)
                self._failed_block_ids |= failed
            self._results.reports += reports

    def _load_group(
        self, group: GroupLoad, deadline: float, token: CancelToken, on_layers: Callable[[int], None] | None
    ) -> tuple[set[int], LoadReport | None]:
        """Load one group's blocks; return the ids of those that failed, and the report for the manager."""
        memory = self._memory[group.group]
        engine = self._storages.engine(min(self._options.call_seconds, deadline - self._clock()))
        if engine is None:
            return set(group.block_ids), None
        name = memory.part.name
        found = decode_locations(group.locations, [name])
        present = [index for index, location in enumerate(found) if location is not None]
        parts: list[PartToLoad] = []
        for index in present:
            location = found[index]
            assert location is not None
            checksum = location.checksums.get(name, 0) if self._options.checksums else 0
            parts.append(PartToLoad(group.keys[index], location.uris[name], checksum))

        block_ids = [group.block_ids[index] for index in present]

        def load(parts: Sequence[PartToLoad], size_bytes: int, deliver: Deliver) -> list[TransferResult]:
            seconds = deadline - self._clock()
            return load_parts(
                engine,
                trays=self._trays,
                parts=parts,
                part_bytes=size_bytes,
                deliver=deliver,
                deadline_seconds=seconds,
                cancel=token,
                clock=self._clock,
            )

        def deliver(rows: Bytes, positions: Sequence[int]) -> None:
            memory.put([block_ids[position] for position in positions], rows)

        if on_layers is None:
            results = load(parts, memory.part_bytes, deliver)
        else:
            results = load_layers(memory, block_ids=block_ids, parts=parts, load=load, on_layers=on_layers)
        self._check_refusals(results)
        good = {block_id for block_id, result in zip(block_ids, results, strict=True) if result.ok}
        return set(group.block_ids) - good, missing_report(parts, results, self._statistics)

    def _save(self, job: SaveJob, deadline: float, *, is_current: bool) -> None:
        reason = "not started" if is_current else "the weights changed"
        result = SaveResult(
            ranks=1, written=(False,) * len(job.blocks), checksums=({},) * len(job.blocks), reason=reason
        )
        started = self._clock()
        try:
            engine = self._storages.engine(self._options.call_seconds) if is_current else None
            result = self._save_blocks(job, engine, deadline) if engine else result
        except Exception as error:
            _log.exception("a save failed; %d blocks are not stored", len(job.blocks))
            result = SaveResult(1, result.written, result.checksums, repr(error))
        self._statistics.observe("save_seconds", self._clock() - started)
        with self._lock:
            self._results.saves[job.id] = result

    def _save_blocks(self, job: SaveJob, engine: TransferEngine, deadline: float) -> SaveResult:
        items: list[TransferItem] = []
        owners: list[tuple[int, str]] = []
        written = [True] * len(job.blocks)
        for number, block in enumerate(job.blocks):
            for group_id, memory in self._memory.items():
                uri = block.uris.get(memory.part.name)
                if uri is None or not memory.part.is_writer:
                    continue
                if group_id not in block.block_ids:  # its part is not written
                    written[number] = False
                    continue
                items.append(TransferItem(uri, memory.memory_of(block.block_ids[group_id])))
                owners.append((number, memory.part.name))
        results = engine.save(items, deadline - self._clock(), self._is_closing)
        self._check_refusals(results)
        checksums: list[dict[str, int]] = [{} for _ in job.blocks]
        for (number, name), result in zip(owners, results, strict=True):
            written[number] = written[number] and result.ok
            if result.checksum:
                checksums[number][name] = result.checksum
        saved_bytes = sum(result.moved_bytes for result in results if result.ok)
        self._statistics.add(saved_bytes=saved_bytes)
        reason = next((result.reason for result in results if not result.ok), "")
        return SaveResult(1, tuple(written), tuple(checksums), reason)

    def _check_refusals(self, results: Sequence[TransferResult]) -> None:
        if any(result.failure is Failure.REFUSED for result in results):
            with self._lock:
                self._results.has_unknown_storage = True  # perhaps it was added since the registration
