"""A read that overlaps FinishWriteCache never hides a finished block.

Writers finish 300 rounds of 256 blocks while readers keep asking for the same blocks. What was finished before a read
began must be in its answer, and what any reader saw once stays visible; also while another copy of the same blocks is
written, finished or given up.
"""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from cache_world import World, dummy, group_of, instance
from suspending_backend import SuspendingBackend
from thoroughness import examples

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.sessions import WriteRequest
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.masks import BlockMask

ROUNDS, KEYS_PER_ROUND = examples(300), 256
BACKENDS: dict[str, Callable[[], IndexBackend]] = {
    "memory": MemoryBackend,
    "suspending": lambda: SuspendingBackend(Random(5), most=1),
}


class Traffic:
    """One writer and several readers of the blocks of the current round."""

    def __init__(self, world: World) -> None:
        self._manager = world.manager
        self._keys: range = range(0)
        self._visible = 0
        self._random = Random(11)
        self.writing = True
        self.overlapping_reads = 0

    async def write(self) -> None:
        for number in range(ROUNDS):
            self._keys = range(number * KEYS_PER_ROUND, (number + 1) * KEYS_PER_ROUND)
            self._visible = 0
            await self._write_once(copies=1, count=KEYS_PER_ROUND)
            await self._write_once(copies=2, count=self._random.choice([0, 100, KEYS_PER_ROUND]))
        self.writing = False

    async def _write_once(self, copies: int, count: int) -> None:
        keys = self._keys
        started = await self._manager.start_write("i", WriteRequest(keys, min_replica_count=copies))
        assert len(started.chunks) == KEYS_PER_ROUND
        await asyncio.sleep(0)
        finished = await self._manager.finish_write("i", started.session.id, BlockMask(offset=count))
        assert finished.served == count
        self._visible = max(self._visible, count)
        await asyncio.sleep(0)

    async def read(self, mode: MatchMode) -> None:
        seen, of = 0, self._keys
        while self.writing:
            if self._keys != of:
                seen, of = 0, self._keys
            at_least = max(seen, self._visible)
            found = await self._manager.match("i", MatchQuery(mode, of))
            if self._keys == of:
                assert len(found.keys) >= at_least
                self.overlapping_reads += at_least > 0
                # Blocks of one finish need not appear at once, but none that appeared goes away.
                seen = max(seen, len(found.keys))
            await asyncio.sleep(0)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_read_never_hides_a_finished_block(backend: str) -> None:
    world = World(group_of(["d"]), [instance("i", {"kv": 64})], [dummy("d")], BACKENDS[backend])
    traffic = Traffic(world)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.write())
            for mode in (MatchMode.PREFIX_MATCH, MatchMode.BATCH_GET):
                tasks.create_task(traffic.read(mode))
        assert traffic.overlapping_reads > ROUNDS
        everything = range(ROUNDS * KEYS_PER_ROUND)
        assert len((await world.manager.match("i", MatchQuery(MatchMode.PREFIX_MATCH, everything))).keys) == len(
            everything
        )
    finally:
        world.close()
