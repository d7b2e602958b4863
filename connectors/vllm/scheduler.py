"""The scheduler's side: what a request can load, what the ranks do in a step, which blocks are saved.

No method waits for the manager. After a failed load a request loads nothing any more: it is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.keys import HashKeys
from connectors.reuse.link import ManagerLink
from connectors.reuse.loading import LoadReport
from connectors.reuse.lookups import Found, Lookups
from connectors.reuse.sessions import WriteSessions
from connectors.reuse.statistics import ReuseStatistics
from connectors.vllm.events import StoredEvents
from connectors.vllm.messages import GroupLoad, LoadJob, StepOrders, StepResults
from connectors.vllm.mode import EngineMode
from connectors.vllm.options import VllmOptions
from connectors.vllm.pins import Pins
from connectors.vllm.plan import KvGroup, KvPlan
from connectors.vllm.reservations import Reservations
from connectors.vllm.saves import BlockRun, SaveQueue
from connectors.vllm.sources import tokens_by_source
from connectors.vllm.tracked import TrackedRequest
from kvcm.model.keys import BlockKey
from kvcm.model.storages import StorageConfig

__all__ = ["KvcmScheduler"]

_log = logging.getLogger(__name__)

_NULL_BLOCK = 0  # stands in block tables where a group has dropped its block
_NO_KEY = BlockKey(0)
_IDLE_SECONDS = 0.001


class KvcmScheduler:
    """One engine.

    Args:
        plan: how KV is stored.
        options: what is configured.
        mode: what of it this engine can do.
        link: to the manager.
        hash_keys: makes block keys of vLLM's hashes.
        statistics: where to count.
        events: where to note what was stored.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        plan: KvPlan,
        options: VllmOptions,
        mode: EngineMode,
        link: ManagerLink,
        hash_keys: HashKeys,
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
        self._hash_keys = hash_keys
        self._requests: dict[str, TrackedRequest] = {}
        self._pins = Pins(options.pinned_fraction)
        self._lookups = Lookups(link, plan.lookup, options.lookups, statistics, clock)
        self._saves = SaveQueue(
            WriteSessions(link.client, options.sessions, clock),
            self._pins,
            plan.ranks,
            max(1, options.save_batch_bytes // plan.block_bytes),
            options.save_seconds,
            statistics,
            self._published,
            clock,
        )
        self._reservations = Reservations(plan, self._pins, self._saves, options.decode_batch_blocks, statistics)
        self._sent_storages: Sequence[StorageConfig] | None = None
        self._is_off = False
        self._loads: list[LoadJob] = []
        self._cancelled: set[str] = set()
        self._loading: set[str] = set()
        self._ended_sync: set[str] = set()
        link.is_ready()  # registers in the background

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pins.bind(block_pool, self._give_up_saves)

    def arrived(self, request: Any) -> None:
        """Hear of a new request: its lookup begins now, so that it is answered when the request is scheduled."""
        if self._is_off:
            return
        tracked = self._requests[request.request_id] = TrackedRequest(request, self._hash_keys)
        self._ask(tracked)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the local ones, None when that is not known yet."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._mode.loads or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        found = self._answer(tracked)
        if found is None:
            return None, False
        tracked.local_tokens = local_tokens
        tracked.promised_tokens = max(0, found.blocks * self._plan.block_tokens - local_tokens)
        return tracked.promised_tokens, self._mode.load_async and tracked.promised_tokens > 0

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """Hear that a request has its blocks, of which `tokens` tokens are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.is_loading:
            return
        if not tokens or tracked.found is None:
            self._forget(tracked)
            return
        tracked.is_loading = True
        self._loading.add(tracked.id)
        self._loads.append(self._load_job(tracked, tracked.found, block_ids, tokens))

    def orders(self, scheduled: Any) -> StepOrders:
        """Return what the ranks do in a step.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
        """
        self._end_sync_loads()
        for request_id in scheduled.preempted_req_ids or ():
            if tracked := self._requests.get(request_id):
                self._reservations.give_back(tracked)
        taking_part = [
            (tracked, tokens)
            for request_id, tokens in scheduled.num_scheduled_tokens.items()
            if (tracked := self._requests.get(request_id)) is not None
        ]
        self._reservations.begin_step(taking_part, scheduled.kv_connector_block_state)
        if not scheduled.total_num_scheduled_tokens:
            self._wait_a_moment()
        orders = StepOrders(
            self._loads,
            self._cancelled,
            self._saves.take_jobs(),
            waits=not self._mode.load_async,
            storages=self._new_storages(),
        )
        if not self._mode.load_async:
            self._ended_sync = {job.request_id for job in self._loads}
        self._loads, self._cancelled = [], set()
        return orders

    def heard(self, ended_loads: Sequence[str], results: StepResults | None) -> None:
        """Hear what ended on the ranks.

        Args:
            ended_loads: ids of requests whose loads have ended on all ranks.
            results: of the ranks.
        """
        self._reservations.step_processed()
        if results is not None:
            if results.has_unknown_storage:
                self._link.forget()
            for request_id in results.failed_loads:
                if tracked := self._requests.get(request_id):
                    self._load_failed(tracked)
            self._saves.answered(results.saves)
            for report in results.reports:
                # First, so that the manager does not take them for stored when they are to be saved again.
                self._saves.call_before_begins(partial(self._report, report))
        for request_id in ended_loads:
            self._load_ended(request_id)

    def finished(self, request: Any) -> None:
        """Hear that a request has ended, before its blocks are freed."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.is_loading:
            self._cancelled.add(tracked.id)
            self._loading.discard(tracked.id)
            self._reservations.give_back(tracked)
        self._reservations.end(tracked)
        self._forget(tracked)

    def hit_sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Return where the tokens to load come from."""
        tracked = self._requests.get(request.request_id)
        if not tokens or tracked is None or tracked.found is None:
            return {}
        first = tracked.local_tokens // self._plan.block_tokens
        blocks = tracked.found.locations[first : first + -(-tokens // self._plan.block_tokens)]
        return tokens_by_source(blocks, self._plan.block_tokens)

    def take_events(self) -> Iterable[BlockStored]:
        """Return what was stored since the last call."""
        return self._events.take()

    @property
    def is_busy(self) -> bool:
        """Whether the engine has to go on stepping without requests, so that saves arrive."""
        return self._saves.is_busy or self._reservations.is_holding

    def reset(self) -> None:
        """Share nothing with others from now on, since the weights may have changed; unless they are said to stay."""
        self._lookups.clear()
        if self._options.keep_on_reset:
            return
        if not self._is_off:
            _log.warning("vLLM was reset: KV is not reused until it restarts, since its weights may be others now")
        self._is_off = True
        self._saves.drop()
        for tracked in self._requests.values():
            tracked.may_load = tracked.may_save = False
            self._reservations.give_back(tracked)

    def close(self) -> None:
        """Publish what has ended, give up the rest, within the time that is configured."""
        deadline = self._clock() + self._options.shutdown_seconds / 2  # the ranks had the other half
        self._saves.close(deadline - self._clock())
        self._lookups.close(deadline - self._clock())
        self._link.close(deadline - self._clock())

    def _ask(self, tracked: TrackedRequest) -> None:
        blocks = (tracked.request.num_tokens - 1) // self._plan.block_tokens  # one token at least is computed
        self._lookups.begin(tracked.id, tracked.keys(blocks))
        tracked.is_asked = True

    def _answer(self, tracked: TrackedRequest) -> Found | None:
        """Return what was found, if there is time enough to load it, and ask anew otherwise."""
        if not tracked.is_asked:
            self._ask(tracked)
        found = self._lookups.poll(tracked.id)
        if found is not None and found.usable_until - self._clock() < self._options.load_seconds / 2:
            self._forget(tracked)
            self._ask(tracked)
            found = self._lookups.poll(tracked.id)
        if found is not None and found is not tracked.found:
            self._take(tracked, found)
        return found

    def _take(self, tracked: TrackedRequest, found: Found) -> None:
        """Go by a new answer: blocks that are not stored any more have to be saved again."""
        tracked.found = found
        if found.is_known and not tracked.has_gap:
            tracked.may_save = self._mode.saves
        if not tracked.reserved:
            tracked.next_block = found.blocks

    def _load_job(
        self, tracked: TrackedRequest, found: Found, block_ids: Sequence[Sequence[int]], tokens: int
    ) -> LoadJob:
        first = tracked.local_tokens // self._plan.block_tokens
        end = first + -(-tokens // self._plan.block_tokens)
        keys = tracked.keys(found.blocks)
        groups = [self._group_load(group, found, keys, block_ids[group.id], first, end) for group in self._plan.groups]
        seconds = min(self._options.load_seconds, found.usable_until - self._clock())
        return LoadJob(tracked.id, groups, seconds)

    def _group_load(
        self, group: KvGroup, found: Found, keys: Sequence[BlockKey], block_ids: Sequence[int], first: int, end: int
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

    def _give_up_saves(self) -> None:
        self._reservations.give_back_all()
        self._saves.give_up()

    def _load_failed(self, tracked: TrackedRequest) -> None:
        tracked.may_load = False
        self._reservations.give_back(tracked)
        tracked.next_block = min(tracked.next_block, tracked.local_tokens // self._plan.block_tokens)

    def _load_ended(self, request_id: str) -> None:
        self._loading.discard(request_id)
        if tracked := self._requests.get(request_id):
            tracked.is_loading = False
            self._forget(tracked)

    def _end_sync_loads(self) -> None:
        """The step that waited for these loads has been given to the ranks; its successor begins."""
        for request_id in self._ended_sync:
            self._load_ended(request_id)
        self._ended_sync = set()

    def _forget(self, tracked: TrackedRequest) -> None:
        if tracked.is_asked:
            tracked.is_asked = False
            self._lookups.forget(tracked.id)

    def _published(self, run: BlockRun, numbers: Sequence[int]) -> None:
        self._lookups.clear()  # what was answered a moment ago is out of date
        self._events.stored(run.tracked.request, [run.first + number for number in numbers])

    def _new_storages(self) -> Sequence[StorageConfig] | None:
        """Return the group's storages, when the ranks do not know them yet."""
        registration = self._link.registration
        if not registration.ok or registration.storages == self._sent_storages:
            return None
        self._sent_storages = registration.storages
        return registration.storages

    def _report(self, report: LoadReport) -> None:
        self._link.client.report_missing(report.lost, corrupt=report.corrupt)
        self._lookups.clear()

    def _wait_a_moment(self) -> None:
        """Nothing is computed in this step: spare the processor while answers are under way."""
        if self._loading or self._saves.is_busy or any(tracked.is_asked for tracked in self._requests.values()):
            self._lookups.answered.clear()
            self._lookups.answered.wait(_IDLE_SECONDS)
