"""The scheduler's side of the connector: hits of a request, work of the ranks in a step, blocks to save.

In the order of vLLM's calls: `on_new_request` starts the lookup, `get_num_new_matched_tokens` polls it,
`update_state_after_alloc` makes the load job, `build_connector_meta` sends jobs to the ranks,
`update_connector_output` handles their results, `request_finished` releases everything. Invariants:

1. No method waits for the manager.
2. After a failed load a request loads nothing any more: it is computed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcm.connectors.events.published_blocks import StorageWatch
from kvcm.connectors.keys import HashKeys
from kvcm.connectors.reuse.loads import LoadReport
from kvcm.connectors.reuse.lookups import FoundPrefix, Lookups
from kvcm.connectors.reuse.registration import ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.reuse.write_sessions import WriteSessions
from kvcm.connectors.vllm.connector_metadata import GroupLoad, KvcmConnectorMetadata, KvcmWorkerMetadata, LoadJob
from kvcm.connectors.vllm.engine_weights import AdapterVersions, EngineWeights
from kvcm.connectors.vllm.kv_cache_groups import KvCacheGroup, KvCacheLayout
from kvcm.connectors.vllm.options import VllmOptions
from kvcm.connectors.vllm.saves import BlockPins, BlockRun, Reservations, SaveQueue, TrackedRequest
from kvcm.model.keys import BlockKey
from kvcm.model.storages import StorageConfig
from kvcm.protocol.meta_service_pb2 import ST_3FS, ST_MOONCAKE, ST_NFS, ST_TAIRMEMPOOL, ST_VCNS_3FS

__all__ = ["EngineMode", "KvcmScheduler", "StoredEvents"]

# vLLM's tier of a stored block, by type of the storage.
_SOURCES: Mapping[int, CacheHitSource] = {
    ST_NFS: CacheHitSource.DISK,
    ST_3FS: CacheHitSource.DISK,
    ST_VCNS_3FS: CacheHitSource.DISK,
    ST_MOONCAKE: CacheHitSource.P2P,
    ST_TAIRMEMPOOL: CacheHitSource.HOST,
}
_TYPE_FIELD = b"\x08"  # a location begins with field 1, its type, as a varint


def _external_cache_hit_sources(locations: Sequence[bytes], block_tokens: int) -> dict[CacheHitSource, int]:
    """Return how many tokens come from where.

    Args:
        locations: of the blocks, encoded. They are not decoded here: the type is their second byte.
        block_tokens: tokens per block.
    """
    types = Counter([each[1] if each[:1] == _TYPE_FIELD else 0 for each in locations])
    tokens: Counter[CacheHitSource] = Counter()
    for storage_type, blocks in types.items():
        tokens[_SOURCES.get(storage_type, CacheHitSource.EXTERNAL_UNSPECIFIED)] += blocks * block_tokens
    return dict(tokens)


_MAX_EVENTS = 10_000


class StoredEvents:
    """KV events for the blocks that this engine stored, until vLLM takes them; safe to use from several threads.

    They are made only when vLLM is configured to publish KV events, for routers that send a request to the engine with
    its prefix. The medium is vLLM's name for storage. The engine does not know which blocks the manager evicts. With
    `options.storage_events` it reads that from the manager's own events, and publishes a removal for each block that it
    published; without, consumers have to treat events as hints.

    Args:
        is_enabled: whether vLLM publishes KV events.
        block_tokens: tokens per block.
        options: of the connector.
    """

    def __init__(self, is_enabled: bool, block_tokens: int, options: VllmOptions) -> None:
        self._is_enabled = is_enabled
        self._block_tokens = block_tokens
        is_followed = is_enabled and bool(options.storage_events)
        # A removal must not be lost; there is one at most for each block that was published.
        self._events: deque[BlockStored | BlockRemoved] = deque(maxlen=None if is_followed else _MAX_EVENTS)
        self._watch: StorageWatch | None = None
        if is_followed:
            self._watch = StorageWatch(options.storage_events, options.storage_replay, self._on_gone)

    def on_stored(self, request: Any, blocks: Sequence[int]) -> None:
        """Record that blocks of a request, by their positions, are stored now."""
        if not self._is_enabled:
            return
        hashes, size = request.block_hashes, self._block_tokens
        lora = request.lora_request
        for block in blocks:
            event = BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[block])],
                parent_block_hash=maybe_convert_block_hash(hashes[block - 1]) if block else None,
                token_ids=list(request.all_token_ids[block * size : (block + 1) * size]),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.name if lora else None,
            )
            if self._watch is None:
                self._events.append(event)
            else:
                self._watch.publish(hashes[block], event.block_hashes[0], partial(self._events.append, event))

    def take_events(self) -> Iterable[BlockStored | BlockRemoved]:
        """Return the events since the last call."""
        if self._watch is not None:
            self._watch.expire()
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        """Follow the manager's events no longer."""
        if self._watch is not None:
            self._watch.close()

    def _on_gone(self, name: int | bytes) -> None:
        self._events.append(BlockRemoved(block_hashes=[name], medium=MEDIUM_STORAGE))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineMode:
    """The connector's mode in an engine.

    Attributes:
        loads: whether KV is loaded.
        saves: whether KV is saved.
        load_async: whether it is loaded between steps, while other requests are computed.
    """

    loads: bool
    saves: bool
    load_async: bool

    @classmethod
    def from_config(cls, config: VllmConfig, plan: KvCacheLayout, options: VllmOptions) -> EngineMode:
        """Return the mode of an engine; log a warning where it differs from the configuration."""
        transfer = config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "kv_load_failure_policy is %r: a request of which a block cannot be loaded ends with an error."
                " 'recompute' computes it",
                transfer.kv_load_failure_policy,
            )
        # With several groups vLLM accepts failures of whole requests only, and only of those that load between steps.
        # With overlapping steps it would keep a token that the next step computed from KV that was not loaded.
        must_be_async = len(plan.groups) > 1 or config.max_concurrent_batches > 1
        if must_be_async and not options.load_async:
            _log.warning("load_async is false, which this engine cannot do safely: KV is loaded between steps")
        return cls(
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer and options.publish,
            load_async=options.load_async or must_be_async,
        )


_NULL_BLOCK = 0  # stands in block tables where a group has dropped its block
_NO_KEY = BlockKey(0)
_IDLE_SECONDS = 0.001


class KvcmScheduler:
    """One engine.

    Args:
        plan: how KV is stored.
        options: of the connector.
        mode: of this engine.
        link: to the manager.
        weights: of all ranks.
        keys_of: makes block keys of vLLM's hashes, of a version of the weights and one of an adapter.
        statistics: where to count.
        events: of stored blocks.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        plan: KvCacheLayout,
        options: VllmOptions,
        mode: EngineMode,
        link: ManagerLink,
        weights: EngineWeights,
        keys_of: Callable[[str, str], HashKeys],
        statistics: ReuseStatistics,
        events: StoredEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._options = options
        self._link = link
        self._statistics = statistics
        self._events = events
        self._clock = clock
        self._mode = mode
        self._weights = weights
        self._adapters = AdapterVersions()
        self._keys_of = keys_of
        self._requests: dict[str, TrackedRequest] = {}
        self._pins = BlockPins(options.pinned_fraction)
        self._lookups = Lookups(link, plan=plan.lookup, settings=options.lookups, statistics=statistics, clock=clock)
        self._saves = SaveQueue(
            WriteSessions(link.client, options.sessions, clock),
            pins=self._pins,
            ranks=plan.ranks,
            batch_blocks=max(1, options.save_batch_bytes // plan.block_bytes),
            save_seconds=options.save_seconds,
            statistics=statistics,
            on_published=self._on_published,
            clock=clock,
        )
        self._reservations = Reservations(
            plan,
            pins=self._pins,
            saves=self._saves,
            decode_batch_blocks=options.decode_batch_blocks,
            statistics=statistics,
        )
        self._sent_storages: Sequence[StorageConfig] | None = None
        self._loads: list[LoadJob] = []
        self._cancelled: set[str] = set()
        self._loading: set[str] = set()
        self._ended_sync: set[str] = set()
        link.is_ready()  # registers in the background

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Pin blocks of vLLM's block pool from now on."""
        self._pins.bind_gpu_block_pool(block_pool, self._abandon_saves, self._on_reset)

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a new request, so that it is answered when the request is scheduled."""
        self._requests[request.request_id] = tracked = TrackedRequest(request, arrived_at=self._clock())
        self._begin(tracked)

    def get_num_new_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the local ones, None when that is not known yet."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._mode.loads or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if not self._begin(tracked):
            is_patient = self._clock() < tracked.arrived_at + self._options.load_seconds
            return (None if self._weights.is_pending and is_patient else 0), False
        found = self._poll_lookup(tracked)
        if found is None:
            return None, False
        tracked.local_tokens = local_tokens
        tracked.promised_tokens = max(0, found.blocks * self._plan.block_tokens - local_tokens)
        return tracked.promised_tokens, self._mode.load_async and tracked.promised_tokens > 0

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """Make the load job of a request whose blocks are allocated, of which `tokens` tokens are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.is_loading:
            return
        if not tokens or tracked.found is None:
            self._release_lookup(tracked)
            return
        tracked.is_loading = True
        self._loading.add(tracked.id)
        self._loads.append(self._load_job(tracked, tracked.found, block_ids, tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KvcmConnectorMetadata:
        """Return the work of the ranks in a step.

        Args:
            scheduler_output: of vLLM.
        """
        self._finish_sync_loads()
        for request_id in scheduler_output.preempted_req_ids or ():
            if tracked := self._requests.get(request_id):
                self._reservations.release(tracked)
        step_requests = [
            (tracked, tokens)
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items()
            if (tracked := self._requests.get(request_id)) is not None
        ]
        self._reservations.on_step(step_requests, scheduler_output.kv_connector_block_state)
        if not scheduler_output.total_num_scheduled_tokens:
            self._wait_while_idle()
        metadata = KvcmConnectorMetadata(
            self._weights.generation,
            self._loads,
            self._cancelled,
            self._saves.drain_jobs(),
            waits=not self._mode.load_async,
            storages=self._new_storages(),
        )
        if not self._mode.load_async:
            self._ended_sync = {job.request_id for job in self._loads}
        self._loads, self._cancelled = [], set()
        return metadata

    def update_connector_output(self, ended_loads: Sequence[str], results: KvcmWorkerMetadata | None) -> None:
        """Handle loads and saves that ended on the ranks.

        Args:
            ended_loads: ids of requests whose loads have ended on all ranks.
            results: of the ranks.
        """
        self._reservations.on_step_processed()
        if results is not None:
            if self._weights.on_reports(results.weights):
                self._on_weights_changed()
            if results.has_unknown_storage:
                self._link.invalidate()
            for request_id in results.failed_loads:
                if tracked := self._requests.get(request_id):
                    self._on_load_failed(tracked)
            self._saves.on_save_results(results.saves)
            for report in results.reports:
                # First, so that the manager does not take them for stored when they are to be saved again.
                self._saves.run_before_starts(partial(self._report_missing, report))
        for request_id in ended_loads:
            self._on_load_finished(request_id)

    def request_finished(self, request: Any) -> None:
        """Release everything of a request, before its blocks are freed."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.is_loading:
            self._cancelled.add(tracked.id)
            self._loading.discard(tracked.id)
            self._reservations.release(tracked)
        self._reservations.finish(tracked)
        if self._mode.saves:
            registration = self._link.registration
            self._reservations.count_unsaved(tracked, "" if registration.ok else registration.message)
        self._release_lookup(tracked)

    def get_external_cache_hit_sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Return how many of the tokens to load come from which tier."""
        tracked = self._requests.get(request.request_id)
        if not tokens or tracked is None or tracked.found is None:
            return {}
        first = tracked.local_tokens // self._plan.block_tokens
        blocks = tracked.found.locations[first : first + -(-tokens // self._plan.block_tokens)]
        return _external_cache_hit_sources(blocks, self._plan.block_tokens)

    def take_events(self) -> Iterable[BlockStored | BlockRemoved]:
        """Return the events since the last call."""
        return self._events.take_events()

    @property
    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping without requests, so that saves end."""
        return self._saves.is_busy or self._reservations.has_reserved

    def reset_cache(self) -> None:
        """Have the weights compared: they may be others, and vLLM has forgotten its own blocks."""
        self._lookups.clear()
        self._on_reset()

    def shutdown(self) -> None:
        """Finish the saves that have ended, abort the rest, within `shutdown_seconds`."""
        deadline = self._clock() + self._options.shutdown_seconds / 2  # the ranks had the other half
        self._saves.close(deadline - self._clock())
        self._lookups.close(deadline - self._clock())
        self._link.close(deadline - self._clock())
        self._events.close()

    def _on_reset(self) -> None:
        if not self._options.keep_on_reset:
            self._weights.begin_generation()
            self._on_weights_changed()

    def _on_weights_changed(self) -> None:
        """Share nothing of the requests that computed with other weights, and look the others up again."""
        self._lookups.clear()
        self._abandon_saves()
        for tracked in self._requests.values():
            self._release_lookup(tracked)
            if tracked.is_loading or tracked.request.num_computed_tokens:
                tracked.may_load = tracked.may_save = False
                tracked.has_gap, tracked.unsaved = True, Unsaved.WEIGHTS
            else:
                self._requests[tracked.id] = TrackedRequest(tracked.request, arrived_at=self._clock())

    def _begin(self, tracked: TrackedRequest) -> bool:
        """Start the lookup of a request when the version of the weights is known; return whether it is."""
        if tracked.hash_keys is None:
            version = self._weights.version
            if version is None:
                return False
            adapter = self._adapters.of(tracked.request.lora_request)
            if adapter is None:
                return False
            tracked.hash_keys = self._keys_of(version, adapter)
            self._start_lookup(tracked)
        return True

    def _start_lookup(self, tracked: TrackedRequest) -> None:
        blocks = (tracked.request.num_tokens - 1) // self._plan.block_tokens  # one token at least is computed
        self._lookups.start(tracked.id, tracked.keys(blocks))
        tracked.has_lookup = True

    def _poll_lookup(self, tracked: TrackedRequest) -> FoundPrefix | None:
        """Return the prefix found, if there is time enough to load it; start another lookup otherwise."""
        if not tracked.has_lookup:
            self._start_lookup(tracked)
        found = self._lookups.poll(tracked.id)
        if found is not None and found.usable_until - self._clock() < self._options.load_seconds / 2:
            self._release_lookup(tracked)
            self._start_lookup(tracked)
            found = self._lookups.poll(tracked.id)
        if found is not None and found is not tracked.found:
            self._apply_lookup(tracked, found)
        return found

    def _apply_lookup(self, tracked: TrackedRequest, found: FoundPrefix) -> None:
        """Use a new answer: blocks that are not stored any more have to be saved again."""
        tracked.found = found
        if found.may_save and not tracked.has_gap:
            tracked.may_save = self._mode.saves
        if not tracked.reserved:
            tracked.next_block = found.blocks

    def _load_job(
        self, tracked: TrackedRequest, found: FoundPrefix, block_ids: Sequence[Sequence[int]], tokens: int
    ) -> LoadJob:
        first = tracked.local_tokens // self._plan.block_tokens
        end = first + -(-tokens // self._plan.block_tokens)
        keys = tracked.keys(found.blocks)
        groups = [
            self._group_load(group, found=found, keys=keys, block_ids=block_ids[group.id], first=first, end=end)
            for group in self._plan.groups
        ]
        seconds = min(self._options.load_seconds, found.usable_until - self._clock())
        return LoadJob(tracked.id, groups, seconds, self._weights.generation)

    def _group_load(
        self,
        group: KvCacheGroup,
        found: FoundPrefix,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        first: int,
        end: int,
    ) -> GroupLoad:
        locations, offset = found.locations, 0
        if group.window_tokens:
            locations, offset = found.window_locations, found.blocks - len(found.window_locations)
        elif group.is_state:
            locations, offset = found.locations[-1:], found.blocks - 1
        places = [index for index in range(first, end) if block_ids[index] != _NULL_BLOCK]
        return GroupLoad(
            group.id,
            [keys[index] if index < len(keys) else _NO_KEY for index in places],
            [locations[index - offset] if 0 <= index - offset < len(locations) else b"" for index in places],
            [block_ids[index] for index in places],
        )

    def _abandon_saves(self) -> None:
        self._reservations.release_all()
        self._saves.abandon()

    def _on_load_failed(self, tracked: TrackedRequest) -> None:
        tracked.may_load = False
        self._reservations.release(tracked)
        tracked.next_block = min(tracked.next_block, tracked.local_tokens // self._plan.block_tokens)

    def _on_load_finished(self, request_id: str) -> None:
        self._loading.discard(request_id)
        if tracked := self._requests.get(request_id):
            tracked.is_loading = False
            self._release_lookup(tracked)

    def _finish_sync_loads(self) -> None:
        """The step that waited for these loads has been given to the ranks; its successor begins."""
        for request_id in self._ended_sync:
            self._on_load_finished(request_id)
        self._ended_sync = set()

    def _release_lookup(self, tracked: TrackedRequest) -> None:
        if tracked.has_lookup:
            tracked.has_lookup = False
            self._lookups.release(tracked.id)

    def _on_published(self, run: BlockRun, numbers: Sequence[int]) -> None:
        self._lookups.clear()  # shared answers are stale
        self._events.on_stored(run.tracked.request, [run.first + number for number in numbers])

    def _new_storages(self) -> Sequence[StorageConfig] | None:
        """Return the group's storages, when the ranks do not know them yet."""
        registration = self._link.registration
        if not registration.ok or registration.storages == self._sent_storages:
            return None
        self._sent_storages = registration.storages
        return registration.storages

    def _report_missing(self, report: LoadReport) -> None:
        self._link.client.report_missing(report.lost, corrupt=report.corrupt)
        self._lookups.clear()

    def _wait_while_idle(self) -> None:
        """Nothing is computed in this step: spare the processor while answers are under way."""
        if (
            self._weights.is_pending
            or self._loading
            or self._saves.is_busy
            or any(tracked.has_lookup for tracked in self._requests.values())
        ):
            self._lookups.answered.clear()
            self._lookups.answered.wait(_IDLE_SECONDS)
