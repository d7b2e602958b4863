"""Writers that race for the last free keys of an instance over a slow store (decision 17)."""

import asyncio

from test_manager_over_slow_store import SlowWorld

from kvcm.cache.sessions import StartedWrite, WriteRequest
from kvcm.model.errors import CapacityError
from kvcm.model.groups import MetaIndexerConfig

LIMIT = 5


async def race(seed: int) -> list[StartedWrite]:
    """Four writers of three blocks each; what those got who were not refused altogether."""
    world = SlowWorld(seed, capacity=10_000, indexer=MetaIndexerConfig(LIMIT, mutex_shard_num=4, batch_key_size=1))
    try:
        chains = [range(start, start + 3) for start in (0, 10, 20, 30)]
        starts = [world.manager.start_write("i", WriteRequest(keys)) for keys in chains]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        assert world.index.key_count <= LIMIT
        assert all(isinstance(outcome, StartedWrite | CapacityError) for outcome in outcomes), outcomes
        return [outcome for outcome in outcomes if isinstance(outcome, StartedWrite)]
    finally:
        world.close()


async def test_a_block_that_found_no_room_takes_its_suffix_with_it() -> None:
    for seed in range(30):
        for started in await race(seed):
            assert list(started.mask.unmasked(3)) == list(range(len(started.chunks))), seed


async def test_a_writer_is_told_what_was_refused() -> None:
    """Every mask but a refusal means that somebody else has the block; here nobody has."""
    for seed in range(30):
        for started in await race(seed):
            assert started.refused == 3 - len(started.chunks), seed
            assert started.chunks, "nothing fits: an error"
