"""A hierarchy of caches as plain dictionaries: what the compiled replay is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcm.optimizer.tiers import Rules
from kvcm.optimizer.trace import Trace

__all__ = ["TierModel"]


class TierModel:
    """Levels from the oldest block to the newest, each saying whether the block's bytes are there."""

    def __init__(self, capacities: Sequence[int], rules: Rules) -> None:
        self.capacities = capacities
        self.rules = rules
        self.levels: list[OrderedDict[int, bool]] = [OrderedDict() for _ in capacities]
        self.seen: dict[int, int] = {}
        zeros = [0] * len(capacities)
        self.sums = {
            name: zeros.copy()
            for name in ("prefix_blocks", "prefix_tokens", "object_blocks", "inserted_blocks", "promoted_blocks",
                         "demoted_blocks", "dropped_blocks", "written_blocks")
        }  # fmt: skip
        self.full_requests = 0

    def replay(self, trace: Trace) -> None:
        for request in range(len(trace)):
            blocks = trace.request_blocks(request).tolist()
            reads = blocks[: trace.read_blocks[request]]
            size, prompt = int(trace.tokens_per_block()[request]), int(trace.input_tokens[request])
            self._replay(blocks, reads, bool(trace.writes[request]), size, prompt)

    def _replay(self, blocks: list[int], reads: list[int], writes: bool, size: int, prompt: int) -> None:
        if self.rules.policy == "leaf_lru":
            found = [self.find(block) for block in reads]
            prefix = self._count(found, size, prompt)
            self._access(reversed(blocks if writes else blocks[:prefix]))
            return
        found = []
        for place, block in enumerate(blocks):
            if place < len(reads):
                found.append(self.find(block))
            if writes or (place < len(reads) and None not in found):
                self._access([block])
        self._count(found, size, prompt)

    def _count(self, found: list[int | None], size: int, prompt: int) -> int:
        prefix = next((place for place, level in enumerate(found) if level is None), len(found))
        for place, level in enumerate(found):
            if level is not None:
                self.sums["object_blocks"][level] += 1
                if place < prefix:
                    self.sums["prefix_blocks"][level] += 1
                    self.sums["prefix_tokens"][level] += max(0, min(size, prompt - place * size))
        self.full_requests += bool(found) and prefix == len(found)
        return prefix

    def find(self, block: int) -> int | None:
        return next((number for number, level in enumerate(self.levels) if block in level), None)

    def _access(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            level = self.find(block)
            if level is None:
                self._insert(block)
            else:
                self._hit(block, level)

    def _insert(self, block: int) -> None:
        lowest = len(self.levels) - 1 if self.rules.inclusive else 0
        for level in range(lowest, -1, -1):
            is_written = level == 0 or self.rules.write == "through"
            self.put(level, block, is_written)
            self.sums["inserted_blocks"][level] += is_written

    def _hit(self, block: int, found: int) -> None:
        if self.rules.policy != "fifo":
            for number, level in enumerate(self.levels):
                if block in level and (number == found or self.rules.lower_sees_hits):
                    level.move_to_end(block)
        if found == 0 or self.rules.promote == "never":
            return
        self.seen[block] = self.seen.get(block, 0) + 1
        if self.rules.promote == "second_hit" and self.seen[block] < 2:
            return
        self.sums["promoted_blocks"][found] += 1
        if not self.rules.inclusive:
            del self.levels[found][block]
        for level in range(found - 1, -1, -1) if self.rules.inclusive else [0]:
            self.put(level, block, True)

    def put(self, number: int, block: int, is_written: bool) -> None:
        level, victim = self.levels[number], None
        if len(level) == self.capacities[number]:
            victim, _ = level.popitem(last=False)
            if self.rules.inclusive and self.rules.back_invalidates:
                for upper in self.levels[:number]:
                    upper.pop(victim, None)
        level[block] = is_written
        self.seen.pop(block, None)
        self.sums["written_blocks"][number] += is_written
        if victim is not None and all(victim not in upper for upper in self.levels[:number]):
            self._hand_down(number, victim)

    def _hand_down(self, number: int, victim: int) -> None:
        lower = next((each for each in range(number + 1, len(self.levels)) if victim in self.levels[each]), None)
        if lower is not None:
            if not self.levels[lower][victim]:
                self.levels[lower][victim] = True
                self.sums["written_blocks"][lower] += 1
                self.sums["demoted_blocks"][number] += 1
        elif number + 1 < len(self.levels) and self.rules.demote:
            self.sums["demoted_blocks"][number] += 1
            self.put(number + 1, victim, True)
        else:
            self.sums["dropped_blocks"][number] += 1
