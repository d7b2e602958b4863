"""Groups of instances over dictionaries: what `kvcm.optimizer.groups` is compared with.

Nothing is kept but when blocks were read and written, and how often; victims and answers are looked for anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from group_traces import NAMES, Step

from kvcm.optimizer.groups import GroupLayout, InstanceLayout, QuotaGroup, SpecKind, SpecLayout
from kvcm.optimizer.trace import QueryMode

__all__ = ["ModelOfGroups"]

_POLICIES = ("lru", "fifo", "lfu", "leaf_lru")


@dataclass
class _Block:
    specs: set[str]
    written: int
    read: int
    now: float
    reads: int = 1
    parent: int | None = None


@dataclass
class _Instance:
    layout: InstanceLayout
    group: QuotaGroup
    blocks: dict[int, _Block] = field(default_factory=dict)
    external: int = 0
    internal: int = 0
    objects: int = 0
    evicted: int = 0

    def amount(self, specs: set[str]) -> int:
        if self.group.unit == "blocks":
            return bool(specs)
        return sum(spec.bytes for spec in self.layout.specs if spec.name in specs)

    @property
    def used(self) -> int:
        return sum(self.amount(block.specs) for block in self.blocks.values())

    @property
    def from_tail(self) -> bool:
        return self.group.tail_first or self.layout.policy.name == "leaf_lru"

    def candidate(self) -> int:
        return self.candidates()[0]

    def candidates(self) -> list[int]:
        name = self.layout.policy.name
        assert name in _POLICIES

        def order(number: int) -> tuple[int, ...]:
            block = self.blocks[number]
            if name == "fifo":
                return (block.written,)
            return (block.reads, block.read) if name == "lfu" else (block.read,)

        leaves = [each for each in self.blocks if not self.children(each)]
        return sorted(leaves if name == "leaf_lru" else self.blocks, key=order)

    def thin(self, amount: int) -> None:
        kinds = {spec.name: spec.kind for spec in self.layout.specs}
        states = {name for name, kind in kinds.items() if kind is SpecKind.STATE}
        full = {name for name, kind in kinds.items() if kind is SpecKind.FULL}
        wanted, seen = self.used - amount, set[int | None]()
        for candidate in self.candidates():
            number: int | None = candidate
            while number in self.blocks and number not in seen and self.used > wanted:
                assert number is not None
                seen.add(number)
                block = self.blocks[number]
                rest = block.specs - states
                if rest and full <= rest and len(self.children(number)) == 1:
                    block.specs = rest
                number = block.parent

    def children(self, number: int) -> list[int]:
        return [each for each, block in self.blocks.items() if block.parent == number]

    def below(self, number: int, depth: int = 0) -> Iterator[tuple[int, int]]:
        yield depth, number
        for child in self.children(number):
            yield from self.below(child, depth + 1)

    def victim(self, candidate: int) -> int:
        if not self.group.tail_first:
            return candidate
        leaves = [(depth, each) for depth, each in self.below(candidate) if not self.children(each)]
        return min(leaves, key=lambda leaf: (self.blocks[leaf[1]].now, -leaf[0], leaf[1]))[1]


class ModelOfGroups:
    """Serves requests one by one.

    Args:
        layout: of the groups; only policies of which a dictionary makes a line.
    """

    def __init__(self, layout: GroupLayout) -> None:
        self._mode = layout.mode
        self._clock = 0
        self.instances = {
            each.name: _Instance(each, group) for group in layout.groups for each in group.instances
        }  # fmt: skip

    def serve(self, step: Step, now: float) -> int | None:
        """Serve a request; return the blocks of its answer."""
        instance = self.instances[NAMES[step.instance]]
        names = {spec.name for spec in instance.layout.specs}
        wanted = names if step.specs is None else names & set(step.specs)
        positions, internal = self._answer(instance, step, wanted)
        objects = self._objects(instance, step, wanted)
        if step.writes:
            objects = self._write(instance, step, wanted, now)
        else:
            for number in (step.ids[position] for position in positions):
                if number in instance.blocks:  # a prefix may be known by the state of its end alone
                    self._touch(instance, number, now)
        if not step.read_blocks:
            return None
        instance.external += len(positions)
        instance.internal += internal
        instance.objects += objects
        return len(positions) + internal

    def _masked(self, step: Step, place: int) -> bool:
        return place < len(step.mask) and step.mask[place]

    def _objects(self, instance: _Instance, step: Step, wanted: set[str]) -> int:
        return sum(
            self._is_met(instance, step.ids[place], wanted) and not self._masked(step, place)
            for place in range(step.read_blocks)
        )

    def _is_met(self, instance: _Instance, number: int, wanted: set[str]) -> bool:
        has = instance.blocks[number].specs if number in instance.blocks else set()
        full = {spec.name for spec in instance.layout.specs if spec.kind is SpecKind.FULL} & wanted
        return full <= has and bool(has & wanted)

    def _answer(self, instance: _Instance, step: Step, wanted: set[str]) -> tuple[Sequence[int], int]:
        places = range(step.read_blocks)
        if step.mode is QueryMode.BATCH:
            met = [
                each for each in places
                if not self._masked(step, each) and self._is_met(instance, step.ids[each], wanted)
            ]  # fmt: skip
            return met, sum(self._masked(step, each) for each in places)
        if step.mode is QueryMode.WINDOW:
            for end in range(step.read_blocks, step.window - 1, -1):
                window = range(end - step.window, end)
                if not any(self._masked(step, each) for each in window) and all(
                    self._is_met(instance, step.ids[each], wanted) for each in window
                ):
                    return window, 0
            return (), 0
        end = max(each for each in range(step.read_blocks + 1) if self._may_end(instance, step, wanted, each))
        unmasked = [each for each in range(end) if not self._masked(step, each)]
        return unmasked, end - len(unmasked)

    def _may_end(self, instance: _Instance, step: Step, wanted: set[str], end: int) -> bool:
        def has(place: int, spec: SpecLayout) -> bool:
            block = instance.blocks.get(step.ids[place])
            return (self._masked(step, place) and bool(wanted)) or (block is not None and spec.name in block.specs)

        specs = [spec for spec in instance.layout.specs if spec.name in wanted]
        for spec in specs:
            needed = {
                SpecKind.FULL: range(end),
                SpecKind.STATE: range(max(0, end - 1), end),
                SpecKind.WINDOW: range(max(0, end - spec.window_blocks), end),
            }[spec.kind]
            if not all(has(place, spec) for place in needed):
                return False
        return end == 0 or any(has(end - 1, spec) for spec in specs)

    def _touch(self, instance: _Instance, number: int, now: float) -> None:
        self._clock += 1
        block = instance.blocks[number]
        block.read, block.now, block.reads = self._clock, now, block.reads + 1

    def _write(self, instance: _Instance, step: Step, wanted: set[str], now: float) -> int:
        whole = self._mode == "request" or instance.from_tail
        places = list(range(len(step.ids)))
        objects = self._objects(instance, step, wanted) if whole else 0
        for place in reversed(places) if instance.from_tail else places:
            if not step.read_blocks and self._masked(step, place):
                continue
            if not whole:
                objects += self._objects_at(instance, step, wanted, place)
            self._write_block(instance, step, wanted, place, now, makes_room=not whole)
        if whole and self._used(instance) > instance.group.high:
            self._evict_to(instance, instance.group.low, now)
        return objects

    def _objects_at(self, instance: _Instance, step: Step, wanted: set[str], place: int) -> bool:
        is_asked = place < step.read_blocks and not self._masked(step, place)
        return is_asked and self._is_met(instance, step.ids[place], wanted)

    def _write_block(
        self, instance: _Instance, step: Step, wanted: set[str], place: int, now: float, *, makes_room: bool
    ) -> None:
        number, group = step.ids[place], instance.group
        specs = {
            spec.name for spec in instance.layout.specs
            if spec.name in wanted
            and ((spec.every and (place + 1) % spec.every == 0) or (spec.at_end and place + 1 == len(step.ids)))
        }  # fmt: skip
        has = set(instance.blocks[number].specs) if number in instance.blocks else set()
        if has:
            self._touch(instance, number, now)
        if not specs - has:
            return
        size = instance.amount(has | specs) - instance.amount(has)
        if makes_room and self._used(instance) + size > group.high:
            if size > group.high:
                return
            self._evict_to(instance, max(0, group.low - size), now)
            if number not in instance.blocks and self._used(instance) + instance.amount(specs) > group.high:
                return
        if number in instance.blocks:
            instance.blocks[number].specs |= specs
            return
        self._clock += 1
        parent = step.ids[place - 1] if place else None
        instance.blocks[number] = _Block(specs, self._clock, self._clock, now, parent=parent)

    def _used(self, instance: _Instance) -> int:
        return sum(each.used for each in self._peers(instance))

    def _peers(self, instance: _Instance) -> list[_Instance]:
        return [each for each in self.instances.values() if each.group is instance.group]

    def _evict_to(self, instance: _Instance, target: int, now: float) -> None:
        peers = self._peers(instance)
        for peer in peers if instance.group.thins_states else []:
            peer.thin(self._used(instance) - target)
        began = {each.layout.name: each.used for each in peers}
        weights = sum(each.layout.weight for each in peers)

        def turn(peer: _Instance) -> tuple[float, ...]:
            layout, age = peer.layout, (now - peer.blocks[peer.candidate()].now) / peer.layout.weight
            given = began[layout.name] - peer.used
            if instance.group.share == "proportional":
                return given * layout.weight / max(1, began[layout.name]), -age
            if instance.group.share == "fixed":
                return target / weights * layout.weight + given - began[layout.name], -age
            return (-age,)

        while self._used(instance) > target:
            peer = min((each for each in peers if each.blocks), key=turn)
            del peer.blocks[peer.victim(peer.candidate())]
            peer.evicted += 1
