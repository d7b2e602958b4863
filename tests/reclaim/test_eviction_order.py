"""Who is evicted, in which order, against plain lists: indexes in this process's memory are followed exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest
from eviction_model import MODELS, Model
from eviction_rig import BLOCK, EvictionRig, group_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_backends import Rig, opened

from kvcm.index.meta_index import MetaIndex

LIMIT = 16  # blocks; above this eviction begins
LOW = 11


@pytest.fixture(params=["memory", "rocksdb"])
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


@dataclass(frozen=True)
class Step:
    """What happens next.

    Attributes:
        verb: a method of `Run`.
        pick: chooses a block.
        length: of a chain, or a number of reads.
    """

    verb: str
    pick: int
    length: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["write", "write", "write", "again", "read", "read", "remove", "wait", "delete"]),
        st.integers(0, 1 << 16),
        st.integers(1, 8),
    ),
    min_size=30,
    max_size=60,
)


class Run:
    """One workload on the real index and on the model.

    Args:
        policy: its name.
        backends: makes the index.
        low: blocks that are left after an eviction.
    """

    def __init__(self, policy: str, backends: Rig, low: int = LOW) -> None:
        self.low = low
        hysteresis = 1 - low / LIMIT
        group = group_of(policy=policy, used_size=LIMIT * BLOCK, hysteresis=hysteresis, delay_ms=700)
        self.rig = EvictionRig({"g": group})
        self.index: MetaIndex = self.rig.add(backend=backends.fresh())
        self.model = Model(policy)
        self.keys = count(1)
        self.chains: dict[int, tuple[int, ...]] = {}  # of every block ever written, from its head to it
        self.rig.reclaimer.follow()

    def chain(self, pick: int) -> tuple[int, ...]:
        """The chain of some block, also of one that is gone."""
        return list(self.chains.values())[pick % len(self.chains)] if self.chains else ()

    async def write(self, step: Step) -> None:
        """A new chain, or a branch of an old one, whose prefix is written again where it is missing."""
        prefix = self.chain(step.pick)[: step.pick % 7] if step.pick % 3 else ()
        await self.store((*prefix, *(next(self.keys) * 7919 % 100_003 for _ in range(step.length))))

    async def again(self, step: Step) -> None:
        await self.store(self.chain(step.pick))

    async def store(self, chain: Sequence[int]) -> None:
        await self.add(chain)
        await self.reclaim()

    async def add(self, chain: Sequence[int], start: int = 0) -> None:
        parent = chain[start - 1] if start else None
        await self.rig.write(self.index, chain[start:], start, parent)
        for depth, key in enumerate(chain[start:], start):
            self.chains.setdefault(key, tuple(chain[: depth + 1]))
            if key not in self.model.blocks:
                self.model.write(key, chain[depth - 1] if depth else None, depth, self.rig.clock.time)

    async def read(self, step: Step) -> None:
        chain = self.chain(step.pick)
        await self.rig.read(self.index, chain, step.length)
        self.model.read(reversed(chain), step.length, self.rig.clock.time)

    async def remove(self, step: Step) -> None:
        """A block, of whatever place in its chain."""
        chain = self.chain(step.pick)[-1:]
        await self.rig.remove(self.index, chain)
        for key in chain:
            self.model.remove(key)

    async def wait(self, step: Step) -> None:
        self.rig.clock.time += step.length / 8

    async def delete(self, step: Step) -> None:
        self.rig.clock.time += step.length / 8
        await self.rig.executor.run_due()

    @property
    def excess(self) -> int:
        """Blocks that have to go."""
        used = len(self.model.blocks)
        return used - self.low if used > LIMIT else 0

    async def reclaim(self) -> None:
        expected = self.model.evict(self.excess)
        assert await self.rig.settle() == expected
        assert set(await self.rig.resident(self.index)) == set(self.model.blocks)

    async def go(self, steps: Sequence[Step]) -> None:
        for step in steps:
            await getattr(self, step.verb)(step)
        await self.reclaim()


class OneByOne(Run):
    """Room is made after every block."""

    async def store(self, chain: Sequence[int]) -> None:
        for start in range(len(chain)):
            await self.add(chain[: start + 1], start)
            await self.reclaim()


class Leaves(Run):
    """`leaf_lru` in batches: a block that becomes a leaf only while a batch is chosen may have to wait for the next."""

    async def reclaim(self) -> None:
        excess, order = self.excess, self.model.order
        before = set(filter(self.model.is_leaf, self.model.blocks))
        evicted = await self.rig.settle()
        assert len(evicted) == excess
        for key in evicted:
            assert self.model.is_leaf(key)
            older = set(order.queue[: order.queue.index(key)])
            assert not older & before, f"{key} went before {older & before}, which were leaves and colder"
            self.model.remove(key, evicted=True)
        assert set(await self.rig.resident(self.index)) == set(self.model.blocks)


EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("policy", sorted(MODELS.keys() - {"leaf_lru"}))
@EXAMPLES
@given(steps=STEPS)
async def test_victims_are_those_of_the_lists(policy: str, backends: Rig, steps: list[Step]) -> None:
    """Invariant 7 within the order of every policy, whatever is written, read, removed and deleted meanwhile."""
    await Run(policy, backends).go(steps)


@EXAMPLES
@given(steps=STEPS)
async def test_the_coldest_leaf_goes_first(backends: Rig, steps: list[Step]) -> None:
    """Invariant 7."""
    await OneByOne("leaf_lru", backends, low=LIMIT).go(steps)


@EXAMPLES
@given(steps=STEPS)
async def test_no_leaf_goes_before_a_colder_one(backends: Rig, steps: list[Step]) -> None:
    """Invariant 7."""
    await Leaves("leaf_lru", backends).go(steps)


@pytest.mark.parametrize("policy", sorted(MODELS.keys() - {"leaf_lru", "s3fifo"}))
async def test_an_eviction_of_many_batches_goes_on_in_order(policy: str, backends: Rig) -> None:
    """What is chosen in one batch does not disturb the order of the next."""
    run, random = Run(policy, backends), Random(policy)
    run.rig.groups["g"] = group_of(policy=policy)  # there is room
    for _ in range(60):
        pick = random.randrange(1 << 16)
        prefix = run.chain(pick)[: pick % 7]
        await run.add((*prefix, *(next(run.keys) * 7919 % 100_003 for _ in range(pick % 9 + 1))))
        await run.read(Step("read", random.randrange(1 << 16), pick % 3 + 1))
        run.rig.clock.time += 0.4
    run.rig.groups["g"] = group_of(policy=policy, used_size=LIMIT * BLOCK, hysteresis=1 - LOW / LIMIT)
    assert run.excess > 100
    await run.reclaim()
