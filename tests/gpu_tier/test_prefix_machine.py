"""Random lives of two engines over a storage that is late, fails and hangs: bytes are right, and no page is lost."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_connector import MemoryStorage
from prefix_cases import PAGE, Tier
from thoroughness import examples

from gpu_tier.manager.prefixes import AttachedPrefix, PrefixAttach

# Prompts share beginnings: a digit per page says which way a chain goes.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)

ENDINGS = ["arrive", "arrive", "arrive", "arrive all", "arrive all", "break", "hang", "let go"]


def tokens_of(path: list[int]) -> list[int]:
    return [digit * 100 + offset for digit in path for offset in range(PAGE)] + [7]


class PrefixMachine(RuleBasedStateMachine):
    """Engines attach and publish while the storage does what it likes."""

    @initialize(sidecar=st.sampled_from(["", "optional", "required"]))
    def start(self, sidecar: str) -> None:
        storage = MemoryStorage()
        self.tiers = [Tier(storage, sidecar=sidecar, pages=9, is_manual=True) for _ in range(2)]
        filler = Tier(storage, sidecar=sidecar, pages=64)
        for number in range(16):  # every path of four digits
            filler.serve(tokens_of([number >> digit & 1 for digit in range(4)]))
        self.attaching: list[tuple[Tier, list[int], PrefixAttach]] = []
        self.attached: list[tuple[Tier, list[int], AttachedPrefix]] = []

    @rule(engine=st.integers(0, 1), path=PATHS)
    def begin(self, engine: int, path: list[int]) -> None:
        tier = self.tiers[engine]
        self.attaching.append((tier, tokens_of(path), tier.store.begin(tokens_of(path))))

    @rule(which=st.integers(0, 100))
    @precondition(lambda self: self.attaching)
    def poll(self, which: int) -> None:
        tier, tokens, attach = self.attaching[which % len(self.attaching)]
        prefix = tier.store.poll(attach)
        if prefix is not None:
            self.attaching.pop(which % len(self.attaching))
            self.attached.append((tier, tokens, prefix))

    @rule(which=st.integers(0, 100))
    @precondition(lambda self: self.attaching)
    def abort(self, which: int) -> None:
        tier, _, attach = self.attaching.pop(which % len(self.attaching))
        tier.store.abort(attach)

    @rule(which=st.integers(0, 100), publishes=st.booleans())
    @precondition(lambda self: self.attached)
    def finish(self, which: int, publishes: bool) -> None:
        tier, tokens, prefix = self.attached.pop(which % len(self.attached))
        first = len(prefix.pages)
        pages = list(prefix.pages)
        if publishes and tier.allocator.available >= (len(tokens) // PAGE) - first:
            pages = tier.compute(tokens, prefix)
            tier.store.publish(tokens, pages, len(tokens), first_page=first, sidecar=tier.sidecar(tokens, first))
        tier.allocator.free(pages)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        tier = self._one_with(data, "lookups")
        if tier is not None:
            tier.connector.answer(data.draw(st.sampled_from(sorted(tier.connector.lookups))))

    @rule(data=st.data(), ending=st.sampled_from(ENDINGS))
    def move_bytes(self, data: st.DataObject, ending: str) -> None:
        tier = self._one_with(data, "loads")
        if tier is None:
            return
        number = data.draw(st.sampled_from(sorted(tier.connector.loads)))
        left = tier.connector.loads[number].left
        if ending == "let go":
            tier.connector.let_go(number)
        elif ending == "arrive all":
            tier.connector.arrive(number, *left)
        elif ending == "break":
            tier.connector.break_after(number, data.draw(st.integers(0, 400)))
        elif left and not tier.connector.loads[number].is_done:
            part = data.draw(st.sampled_from(left))
            if ending == "hang":
                tier.connector.fail(number, part, hangs=True)
            else:
                tier.connector.arrive(number, part)

    @rule(data=st.data(), count=st.integers(0, 4))
    def end_write(self, data: st.DataObject, count: int) -> None:
        tier = self._one_with(data, "writes")
        if tier is not None:
            tier.connector.finish_write(data.draw(st.sampled_from(sorted(tier.connector.writes))), count)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        storage = self.tiers[0].connector.storage
        free = [key for key in storage.blocks if not storage.pins.get(key)]
        if free:
            del storage.blocks[data.draw(st.sampled_from(free))]

    @rule(engine=st.integers(0, 1))
    def evict(self, engine: int) -> None:
        """Let another request have whatever nobody holds, and write over it."""
        tier = self.tiers[engine]
        pages = tier.allocator.alloc(tier.allocator.available)
        for page in pages:
            for piece in tier.host.page_pieces(page):
                piece.fill_(0xDD)
            if tier.spec is not None:
                tier.host.sidecar(tier.spec.name)[page] = 0xDD
        tier.allocator.free(pages)

    @rule(engine=st.integers(0, 1))
    def step(self, engine: int) -> None:
        self.tiers[engine].store.step()

    @invariant()
    def bytes_are_right(self) -> None:
        for tier, tokens, prefix in getattr(self, "attached", []):
            tier.check(tokens, prefix)

    def teardown(self) -> None:
        for tier, _, attach in getattr(self, "attaching", []):
            tier.store.abort(attach)
        for tier, tokens, prefix in getattr(self, "attached", []):
            tier.check(tokens, prefix)
            tier.store.give_back(prefix)
        for tier in getattr(self, "tiers", []):
            for number in list(tier.connector.lookups):
                tier.connector.answer(number)
            for number in list(tier.connector.writes):
                tier.connector.finish_write(number)
            for load in tier.connector.loads.values():
                load.hanging.clear()
            tier.store.step()
        for tier in getattr(self, "tiers", []):  # all of them have let go of the storage they share
            tier.check_nothing_is_held()

    def _one_with(self, data: st.DataObject, what: str) -> Tier | None:
        tiers = [tier for tier in self.tiers if getattr(tier.connector, what)]
        return data.draw(st.sampled_from(tiers)) if tiers else None


TestPrefixMachine: Any = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=examples(600), stateful_step_count=30, deadline=None)
