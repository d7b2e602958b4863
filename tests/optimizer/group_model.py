"""A group of instances over dictionaries: what `kvcm.optimizer.groups` is compared with.

Nothing is kept but when blocks were read and written, and how often; victims and answers are searched for each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from group_traces import Step

from kvcm.optimizer.trace import QueryMode

POLICIES = ("lru", "fifo", "lfu", "leaf_lru")


@dataclass
class _Block:
    written: int
    read: int
    now: float
    parent: int | None
    reads: int = 1


@dataclass
class ModelOfGroup:
    """Serves requests one by one."""

    policy: str
    capacity: int
    mode: str
    instances: list[dict[int, _Block]] = field(default_factory=lambda: [{}, {}, {}])
    objects: int = 0
    clock: int = 0

    @property
    def used(self) -> int:
        return sum(map(len, self.instances))

    def serve(self, step: Step, now: float) -> int:
        """Serve a request; return the blocks of its answer, masked ones included."""
        blocks, reads = self.instances[step.instance], step.ids[: step.read_blocks]
        masked = [place < len(step.mask) and step.mask[place] for place in range(len(step.ids))]
        there = [number in blocks for number in reads]
        positions, internal = self._answer(step, there, masked)
        if step.writes:
            there = self._write(step, masked, now)
        else:
            for place in positions:
                self._touch(blocks[reads[place]], now)
        self.objects += sum(here and not left for here, left in zip(there, masked, strict=False))
        return len(positions) + internal

    def _answer(self, step: Step, there: list[bool], masked: list[bool]) -> tuple[Sequence[int], int]:
        met = [here and not left for here, left in zip(there, masked, strict=False)]
        if step.mode is QueryMode.BATCH:
            return [place for place, is_met in enumerate(met) if is_met], sum(masked[: len(there)])
        if step.mode is QueryMode.WINDOW:
            for end in range(len(met), step.window - 1, -1):
                if step.window and all(met[end - step.window : end]):
                    return range(end - step.window, end), 0
            return (), 0
        end = 0
        while end < len(there) and (there[end] or masked[end]):
            end += 1
        unmasked = [place for place in range(end) if not masked[place]]
        return unmasked, end - len(unmasked)

    def _touch(self, block: _Block, now: float) -> None:
        self.clock += 1
        block.read, block.now, block.reads = self.clock, now, block.reads + 1

    def _write(self, step: Step, masked: list[bool], now: float) -> list[bool]:
        """Write the blocks; return which of those that are read were there, in whole writes before all of them."""
        blocks, from_tail = self.instances[step.instance], self.policy == "leaf_lru"
        is_whole = self.mode == "request" or from_tail
        there = [number in blocks for number in step.ids]
        places = range(len(step.ids))
        for place in reversed(places) if from_tail else places:
            number = step.ids[place]
            if masked[place] and not step.read_blocks:
                continue
            there[place] = there[place] if is_whole else number in blocks
            if number in blocks:
                self._touch(blocks[number], now)
                continue
            if not is_whole:
                self._evict_to(self.capacity - 1, now)
            self.clock += 1
            blocks[number] = _Block(self.clock, self.clock, now, step.ids[place - 1] if place else None)
        self._evict_to(self.capacity, now)
        return there[: step.read_blocks]

    def _candidate(self, blocks: dict[int, _Block]) -> int:
        parents = {block.parent for block in blocks.values()} if self.policy == "leaf_lru" else set()

        def order(number: int) -> tuple[int, ...]:
            block = blocks[number]
            if self.policy == "fifo":
                return (block.written,)
            return (block.reads, block.read) if self.policy == "lfu" else (block.read,)

        return min((number for number in blocks if number not in parents), key=order)

    def _evict_to(self, target: int, now: float) -> None:
        while self.used > target:
            heads = [(blocks, self._candidate(blocks)) for blocks in self.instances if blocks]
            blocks, number = min(heads, key=lambda head: head[0][head[1]].now)
            del blocks[number]
