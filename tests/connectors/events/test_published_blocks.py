"""Removals of blocks in storages that an engine published: against plain sets, and with a real manager's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from fake_clock import FakeClock
from thoroughness import examples

from kvcm.connectors.events.decoding import AllBlocksCleared, BlockRemoved, BlockStored
from kvcm.connectors.events.published_blocks import PublishedBlocks

DOUBT_SECONDS = 30.0


@dataclass
class Engine:
    """What a router that reads the engine's events knows."""

    known: set[int] = field(default_factory=set)

    def on_gone(self, name: int | bytes) -> None:
        assert isinstance(name, int)
        assert name in self.known, "removed twice, or never stored"
        self.known.remove(name)


class World:
    """An engine, a storage, and the manager's events in between, which may be interrupted."""

    def __init__(self, seed: int) -> None:
        self.random, self.clock, self.engine = Random(seed), FakeClock(1_000.0), Engine()
        self.blocks = PublishedBlocks(self.engine.on_gone, lambda: self.clock.time, DOUBT_SECONDS)
        self.stored: set[int] = set()
        self.is_connected = True
        self.late: list[int] = []  # events of the manager that are on their way

    def write(self) -> None:
        """The manager's event comes at once, or is late."""
        name = self.random.randrange(12)
        is_new = name not in self.stored
        self.stored.add(name)
        if is_new and self.blocks.publish(name, name):
            assert name not in self.engine.known, "stored twice without a removal in between"
            self.engine.known.add(name)
        if self.is_connected and is_new:
            self.late.append(name)
        if self.random.random() < 0.7:
            self.deliver()

    def deliver(self) -> None:
        for name in self.late:
            self.blocks.apply([stored_event({name})])
        self.late.clear()

    def evict(self) -> None:
        name = self.random.randrange(12)
        if name in self.stored:
            self.stored.remove(name)
            if self.is_connected:
                self.deliver()
                self.blocks.apply([BlockRemoved((name,))])

    def lose(self) -> None:
        self.is_connected = False
        self.late.clear()

    def come_back(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.blocks.apply([AllBlocksCleared(), stored_event(self.stored)])

    def wait(self) -> None:
        self.deliver()
        self.clock.time += self.random.choice([1.0, 40.0])
        if self.is_connected:
            self.blocks.expire()


@pytest.mark.parametrize("seed", range(examples(200)))
def test_a_router_knows_the_blocks_that_are_still_there(seed: int) -> None:
    """Through writes and evictions, and connections and managers that are lost and come back."""
    world = World(seed)
    acts = [world.write, world.write, world.evict, world.evict, world.lose, world.come_back, world.wait]
    for _ in range(world.random.randrange(80)):
        world.random.choice(acts)()
    world.come_back()
    world.deliver()
    world.clock.time += DOUBT_SECONDS
    world.blocks.expire()
    assert world.engine.known == world.stored


def test_blocks_that_are_not_named_again_are_gone_after_a_while() -> None:
    clock, engine = FakeClock(1_000.0), Engine({1, 2})
    blocks = PublishedBlocks(engine.on_gone, lambda: clock.time, DOUBT_SECONDS)
    assert blocks.publish(1, 1)
    assert blocks.publish(2, 2)
    blocks.doubt()
    blocks.apply([stored_event({2})])
    clock.time += DOUBT_SECONDS - 1
    blocks.expire()
    assert engine.known == {1, 2}
    clock.time += 1
    blocks.expire()
    assert engine.known == {2}


def test_the_oldest_of_too_many_blocks_are_published_as_removed() -> None:
    engine = Engine({1, 2, 3})
    blocks = PublishedBlocks(engine.on_gone, most_blocks=2)
    for name in (1, 2, 3):
        assert blocks.publish(name, name)
    assert engine.known == {2, 3}


def stored_event(names: set[int]) -> BlockStored:
    return BlockStored(tuple(sorted(names)), None, (), 0, "STORAGE")
