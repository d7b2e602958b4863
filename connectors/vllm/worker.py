"""What a rank does: loads its parts into blocks that the scheduler named, and saves its parts of others.

Loads go through staging memory, so that nothing can reach a block after its load was answered. Saves read blocks where
they lie: the scheduler keeps them from being freed until they are answered. Whatever fails is an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from connectors.answers import decode_locations
from connectors.reuse.loading import Deliver, LoadReport, PartToLoad, load_parts, report_of
from connectors.reuse.staging import Bytes, StagingTrays
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from connectors.transfer.pool import PRIORITY_LOAD, WorkerPool
from connectors.vllm.layers import LayerProgress, load_layers
from connectors.vllm.memory import GroupMemory
from connectors.vllm.messages import GroupLoad, LoadJob, SaveJob, SaveResult, StepOrders, StepResults
from connectors.vllm.options import VllmOptions
from connectors.vllm.plan import KvPlan
from connectors.vllm.rank_storages import RankStorages

__all__ = ["KvcmWorker"]

_log = logging.getLogger(__name__)

_JOBS_AT_ONCE = 2
_LEAST_TRAYS = 2


class KvcmWorker:
    """One rank of one engine.

    Args:
        plan: how KV is stored.
        rank: of the tensor-parallel group.
        options: what is configured.
        storages: of the rank; closed with it.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        plan: KvPlan,
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
        self._results = StepResults()
        # Loads wait for nobody's saves.
        self._load_threads = WorkerPool(_JOBS_AT_ONCE, "kvcm-load")
        self._save_threads = WorkerPool(_JOBS_AT_ONCE, "kvcm-save")
        part_bytes = max(group.stored.shard_bytes(group.part_of(rank, plan.ranks).shard) for group in plan.groups)
        tray_bytes = max(options.staging_bytes // (2 * _LEAST_TRAYS), part_bytes)
        self._trays = StagingTrays(tray_bytes, max(_LEAST_TRAYS, options.staging_bytes // tray_bytes))

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV memory.

        Raises:
            InvalidArgumentError: it is not as the plan says.
        """
        for group in self._plan.groups:
            self._memory[group.id] = GroupMemory(group, group.part_of(self._rank, self._plan.ranks), caches)

    def begin_loads(self, orders: StepOrders) -> None:
        """Begin the loads of a step, and end those that nobody waits for; wait for them when the step has to.

        Layer by layer that is done by `wait_for_layer`.
        """
        if orders.storages is not None:
            self._storages.use(orders.storages)
        with self._lock:
            cancelled = [self._loads[request] for request in orders.cancelled if request in self._loads]
        for token in cancelled:
            token.cancel()
        self._progress = self._new_progress(orders)
        begun = []
        for number, job in enumerate(orders.loads):
            token = CancelToken()
            with self._lock:
                self._loads[job.request_id] = token
            deadline = self._clock() + job.seconds  # which goes on while the job waits for its turn
            on_layers = partial(self._progress.advance, number) if self._progress else None
            task = partial(self._load, job, token, deadline, on_layers, is_waited_for=orders.waits)
            begun.append(self._load_threads.submit(PRIORITY_LOAD, task))
            if self._progress is not None:
                begun[-1].add_done_callback(partial(self._progress.end, number))
        if orders.waits:
            self._waited_for = begun
        if self._progress is None:
            self._wait_for_loads()

    def wait_for_layer(self, layer_name: str) -> None:
        """Wait until this step's loads have brought a layer, where layers wait for them."""
        if self._progress is not None:
            self._progress.wait(layer_name)

    def begin_saves(self, orders: StepOrders) -> None:
        """Begin the saves of a step, after its forward."""
        for job in orders.saves:
            self._save_threads.submit(PRIORITY_LOAD, partial(self._save, job, self._clock() + job.seconds))

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those of them that have failed.

        Asked at the end of a step: whatever it waited for has ended then.
        """
        self._wait_for_loads()
        with self._lock:
            ended, self._ended_loads = self._ended_loads, set()
            failed, self._failed_loads = self._failed_loads, set()
            return ended, failed

    def take_failed_block_ids(self) -> set[int]:
        """Return the blocks that were not loaded since the last call; asked after `take_ended_loads`."""
        with self._lock:
            failed, self._failed_block_ids = self._failed_block_ids, set()
            return failed

    def take_results(self) -> StepResults | None:
        """Return what the scheduler has to hear, None for nothing."""
        with self._lock:
            results, self._results = self._results, StepResults()
        return results if results else None

    def close(self) -> None:
        """Begin nothing more, and give up what is under way: no step will hear of it.

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

    def _new_progress(self, orders: StepOrders) -> LayerProgress | None:
        """Return how far the loads of a step will be, where layers wait for them: it has one group of layers then."""
        if not (self._options.layerwise and orders.waits and orders.loads):
            return None
        return LayerProgress(self._plan.groups[0].layer_names, len(orders.loads))

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
        begun = self._clock()
        failed: set[int] = set()
        reports: list[LoadReport] = []
        loaded = 0
        try:
            for group in job.groups:
                bad, report = self._load_group(group, deadline, token, on_layers)
                failed |= bad
                reports += [report] if report else []
                loaded = max(loaded, len(group.block_ids) - len(bad))
        except Exception:
            _log.exception("a load failed; request %s is computed", job.request_id)
            failed = {block_id for group in job.groups for block_id in group.block_ids}
        self._statistics.observe("load_seconds", self._clock() - begun)
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
        """Load one group's blocks; return the ids of those that are not there, and what the manager has to hear."""
        memory = self._memory[group.group]
        engine = self._storages.engine(min(self._options.call_seconds, deadline - self._clock()))
        if engine is None:
            return set(group.block_ids), None
        name = memory.part.name
        found = decode_locations(group.locations, [name])
        places = [index for index, location in enumerate(found) if location is not None]
        parts: list[PartToLoad] = []
        for index in places:
            location = found[index]
            assert location is not None
            checksum = location.checksums.get(name, 0) if self._options.checksums else 0
            parts.append(PartToLoad(group.keys[index], location.uris[name], checksum))

        block_ids = [group.block_ids[index] for index in places]

        def load(parts: Sequence[PartToLoad], size_bytes: int, deliver: Deliver) -> list[TransferResult]:
            seconds = deadline - self._clock()
            return load_parts(engine, self._trays, parts, size_bytes, deliver, seconds, token, self._clock)

        def deliver(rows: Bytes, positions: Sequence[int]) -> None:
            memory.put([block_ids[position] for position in positions], rows)

        if on_layers is None:
            results = load(parts, memory.part_bytes, deliver)
        else:
            results = load_layers(memory, block_ids, parts, load, on_layers)
        self._look_at_refusals(results)
        good = {block_id for block_id, result in zip(block_ids, results, strict=True) if result.ok}
        return set(group.block_ids) - good, report_of(parts, results, self._statistics)

    def _save(self, job: SaveJob, deadline: float) -> None:
        result = SaveResult(1, (False,) * len(job.blocks), ({},) * len(job.blocks), "not begun")
        begun = self._clock()
        try:
            engine = self._storages.engine(self._options.call_seconds)
            result = self._saved(job, engine, deadline) if engine else result
        except Exception as error:
            _log.exception("a save failed; %d blocks are not stored", len(job.blocks))
            result = SaveResult(1, result.written, result.checksums, repr(error))
        self._statistics.observe("save_seconds", self._clock() - begun)
        with self._lock:
            self._results.saves[job.id] = result

    def _saved(self, job: SaveJob, engine: TransferEngine, deadline: float) -> SaveResult:
        items: list[TransferItem] = []
        owners: list[tuple[int, str]] = []
        written = [True] * len(job.blocks)
        for number, block in enumerate(job.blocks):
            for group_id, memory in self._memory.items():
                uri = block.uris.get(memory.part.name)
                if uri is None or not memory.part.is_writer:
                    continue
                if group_id not in block.block_ids:  # never promise what nobody writes
                    written[number] = False
                    continue
                items.append(TransferItem(uri, memory.memory_of(block.block_ids[group_id])))
                owners.append((number, memory.part.name))
        results = engine.save(items, deadline - self._clock(), self._is_closing)
        self._look_at_refusals(results)
        checksums: list[dict[str, int]] = [{} for _ in job.blocks]
        for (number, name), result in zip(owners, results, strict=True):
            written[number] = written[number] and result.ok
            if result.checksum:
                checksums[number][name] = result.checksum
        saved_bytes = sum(result.moved_bytes for result in results if result.ok)
        self._statistics.add(saved_bytes=saved_bytes)
        reason = next((result.reason for result in results if not result.ok), "")
        return SaveResult(1, tuple(written), tuple(checksums), reason)

    def _look_at_refusals(self, results: Sequence[TransferResult]) -> None:
        if any(result.failure is Failure.REFUSED for result in results):
            with self._lock:
                self._results.has_unknown_storage = True  # perhaps it was added since the registration
