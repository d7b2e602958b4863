"""Blocks that are pinned in the step that computes them, and saved once they are computed for certain.

A step has been processed when vLLM has heard its outcome. Steps may overlap, and a block may be computed for one
request while another one counts it as its own already (vLLM shares blocks as soon as they are given out). Hence:

1. Of a request that a step is still busy with only that is saved which was reserved in steps that have been processed.
2. What turns out not to be computed (a load failed, a speculation was rejected, the request was preempted) goes back;
   it is reserved again when it is computed again.
3. A prompt's blocks are saved step by step, so that others find them at once; new tokens' are gathered first, since a
   write session costs the same for one block and for many.
4. Nothing stays reserved of a request that is not part of a step: an engine may stop stepping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from connectors.reuse.statistics import ReuseStatistics
from connectors.vllm.pins import Pins
from connectors.vllm.plan import ALL_PARTS, FULL_PARTS, KvPlan
from connectors.vllm.saves import BlockRun, SaveQueue
from connectors.vllm.tracked import ReservedBlock, TrackedRequest

__all__ = ["Reservations"]

_NULL_BLOCK = 0  # stands in block tables where a group has dropped its block


class Reservations:
    """Reserves the blocks of one engine. Used by its scheduler's thread alone.

    Args:
        plan: how KV is stored.
        pins: of the engine's blocks.
        saves: where computed blocks go.
        gathered: blocks of new tokens to save at once.
        statistics: where to count.
    """

    def __init__(self, plan: KvPlan, pins: Pins, saves: SaveQueue, gathered: int, statistics: ReuseStatistics) -> None:
        self._plan = plan
        self._pins = pins
        self._saves = saves
        self._gathered = gathered
        self._statistics = statistics
        self._holding: dict[str, TrackedRequest] = {}
        self._step = 0
        self._processed = 0

    @property
    def is_holding(self) -> bool:
        """Whether something is reserved, which the next step saves or gives back."""
        return bool(self._holding)

    def begin_step(self, tracked: Sequence[tuple[TrackedRequest, int]], state: Any) -> None:
        """Save what is computed by now, and reserve what a step computes.

        Args:
            tracked: requests of the step, and how many of their tokens it computes.
            state: vLLM's `KVConnectorBlockState`.
        """
        self._step += 1
        idle = self._holding.keys() - {request.id for request, _ in tracked}
        for request_id in idle:
            self.end(self._holding[request_id])
        for request, tokens in tracked:
            self._save_computed(request, self._least(request))
            self._reserve(request, tokens, state)

    def step_processed(self) -> None:
        """Hear that vLLM has heard the outcome of the oldest step that was under way."""
        self._processed += 1

    def end(self, tracked: TrackedRequest) -> None:
        """Save what is computed of a request, and give the rest back."""
        self._save_computed(tracked, least=1)
        self.give_back(tracked)

    def give_back(self, tracked: TrackedRequest) -> None:
        """Unpin what is not known to be computed."""
        self._holding.pop(tracked.id, None)
        if tracked.reserved:
            tracked.next_block = tracked.reserved[0].index
            self._pins.release([block_id for block in tracked.reserved for block_id in block.block_ids.values()])
            tracked.reserved = []

    def give_back_all(self) -> None:
        """Unpin everything that is reserved."""
        for tracked in list(self._holding.values()):
            self.give_back(tracked)

    def _reserve(self, tracked: TrackedRequest, tokens: int, state: Any) -> None:
        """Pin the blocks that this step fills."""
        computed = tracked.request.num_computed_tokens + tokens
        end = computed // self._plan.block_tokens
        if not tracked.may_save or end <= tracked.next_block:
            return
        table = state.get_block_ids(tracked.id)
        if table is None:
            return
        is_at_end = end * self._plan.block_tokens == computed
        wanted = [
            self._reserved(index, table, has_state=is_at_end and index == end - 1)
            for index in range(tracked.next_block, end)
        ]
        ids = [block_id for block in wanted for block_id in block.block_ids.values()]
        if not self._pins.take(ids):
            tracked.has_gap, tracked.may_save = True, False
            self._statistics.add(dropped_save_blocks=len(wanted))
            return
        tracked.reserved += wanted
        tracked.next_block = end
        self._holding[tracked.id] = tracked

    def _reserved(self, index: int, table: Sequence[Sequence[int]], *, has_state: bool) -> ReservedBlock:
        """Return what there is of a block; a state belongs to it only when the step ends with it."""
        ids = {
            group.id: table[group.id][index]
            for group in self._plan.groups
            if index < len(table[group.id]) and (has_state or not group.is_state)
        }
        return ReservedBlock(index, {group: block for group, block in ids.items() if block != _NULL_BLOCK}, self._step)

    def _least(self, tracked: TrackedRequest) -> int:
        """Return how many blocks are worth a write session."""
        may_gather = tracked.reserved and tracked.is_decoding(self._plan.block_tokens) and not self._pins.are_scarce
        return self._gathered if may_gather else 1

    def _save_computed(self, tracked: TrackedRequest, least: int) -> None:
        blocks = tracked.take_computed(self._plan.block_tokens, self._processed, least)
        if not tracked.reserved:
            self._holding.pop(tracked.id, None)
        if not blocks:
            return
        first = blocks[0].index
        keys = tracked.keys(blocks[-1].index + 1)
        has_all = [len(block.block_ids) == len(self._plan.groups) for block in blocks]
        self._saves.add(
            BlockRun(
                tracked,
                first,
                keys[first - 1] if first else None,
                keys[first:],
                [block.block_ids for block in blocks],
                [ALL_PARTS if is_whole else FULL_PARTS for is_whole in has_all],
            )
        )
