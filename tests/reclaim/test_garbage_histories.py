"""Any history: what has its prefix stays, what has not goes after its grace (invariant 7)."""

import asyncio

import pytest
from fake_clock import FakeClock
from garbage_rig import Deployment, Disk, deployed
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.reclaim.garbage import GRACE_SECONDS

KEYS = range(12)
STEPS = st.one_of(
    st.tuples(st.just("write"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True).map(sorted)),
    st.tuples(st.just("remove"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("wait"), st.sampled_from([[1], [300], [599], [600], [700]])),
    st.tuples(st.just("collect"), st.just([])),
)


class Model:
    """Which blocks serve, what is before each, and since when a block's prefix is not complete."""

    def __init__(self) -> None:
        self.stored: dict[int, int | None] = {}
        self.since: dict[int, float] = {}

    def is_whole(self, key: int) -> bool:
        parent = self.stored[key]
        return parent is None or (parent in self.stored and self.is_whole(parent))

    def note(self, time: float) -> None:
        cut = {key for key in self.stored if not self.is_whole(key)}
        self.since = {key: self.since.get(key, time) for key in cut}


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(steps=st.lists(STEPS, max_size=25))
def test_what_has_its_prefix_stays_and_everything_else_goes_after_its_grace(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]]
) -> None:
    """Invariant 7, with a collector that looks after every step. Keys are written in ascending order, so that each has
    whatever parent it was first written behind."""

    async def history() -> None:
        clock = FakeClock()
        with deployed(Disk(tmp_path_factory.getbasetemp()), clock) as site:
            model = Model()
            for what, numbers in steps:
                if what == "write":
                    await site.store(numbers)
                    for parent, key in zip([None, *numbers], numbers, strict=False):
                        model.stored.setdefault(key, parent)
                elif what == "remove":
                    await site.remove(numbers)
                    for key in numbers:
                        model.stored.pop(key, None)
                elif what == "wait":
                    clock.time += numbers[0]
                model.note(clock.time)
                await check(site, model, clock.time, dry_run=what != "collect")
            for _ in range(3):
                clock.time += GRACE_SECONDS
                await check(site, model, clock.time, dry_run=False)
            assert all(map(model.is_whole, model.stored))

    asyncio.run(history())


async def check(site: Deployment, model: Model, time: float, *, dry_run: bool) -> None:
    site.marked.clear()
    report = await site.collector.collect(dry_run=dry_run, check_bytes=False)
    marked = [key for key, _ in site.marked]
    assert dry_run <= (not marked)
    assert len(marked) == (0 if dry_run else report.without_prefix)
    for key in marked:
        assert time - model.since[key] >= GRACE_SECONDS
        assert all(model.stored[other] != key for other in model.stored), "the tail first"
        del model.stored[key]
    assert await site.serving() == model.stored.keys()
    site.clock.time += 5
    await site.executor.run_due()
    site.clock.time -= 5
