"""An exclusive LRU hierarchy as plain dictionaries: what the compiled replay is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcm.optimizer.trace import Trace


class TierModel:
    """Levels of blocks, each from the oldest to the newest."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = capacities
        self.levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
        names = "prefix_blocks prefix_tokens object_blocks inserted_blocks promoted_blocks demoted_blocks"
        self.sums = {name: [0] * len(capacities) for name in f"{names} dropped_blocks written_blocks".split()}
        self.full_requests = 0

    def replay(self, trace: Trace) -> None:
        for request in range(len(trace)):
            blocks = trace.request_blocks(request).tolist()
            reads = int(trace.read_blocks[request])
            found: list[int | None] = []
            for place, block in enumerate(blocks):
                level = next((number for number, level in enumerate(self.levels) if block in level), None)
                if place < reads:
                    found.append(level)
                if trace.writes[request] or (place < reads and None not in found):
                    self._access(block, level)
            self._count(found, int(trace.tokens_per_block()[request]), int(trace.input_tokens[request]))

    def _count(self, found: list[int | None], size: int, prompt: int) -> None:
        prefix = next((place for place, level in enumerate(found) if level is None), len(found))
        for place, level in enumerate(found):
            if level is not None:
                self.sums["object_blocks"][level] += 1
                if place < prefix:
                    self.sums["prefix_blocks"][level] += 1
                    self.sums["prefix_tokens"][level] += max(0, min(size, prompt - place * size))
        self.full_requests += bool(found) and prefix == len(found)

    def _access(self, block: int, level: int | None) -> None:
        if level == 0:
            self.levels[0].move_to_end(block)
            return
        if level is None:
            self.sums["inserted_blocks"][0] += 1
        else:
            self.sums["promoted_blocks"][level] += 1
            del self.levels[level][block]
        self._put(0, block)

    def _put(self, number: int, block: int) -> None:
        if number == len(self.levels):
            self.sums["dropped_blocks"][number - 1] += 1
            return
        level = self.levels[number]
        victim = level.popitem(last=False)[0] if len(level) == self.capacities[number] else None
        level[block] = None
        self.sums["written_blocks"][number] += 1
        if victim is not None:
            self.sums["demoted_blocks"][number] += number + 1 < len(self.levels)
            self._put(number + 1, victim)
