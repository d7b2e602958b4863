"""What the memory backend promises beyond the contract: sampling does not slow down as keys come and go."""

from random import Random

from index_rig import record

from kvcm.index.backends.backend import Change
from kvcm.index.backends.memory import MemoryBackend


class CountingRandom(Random):
    """Counts the draws."""

    draws = 0

    def randrange(self, *args: int, **kwargs: int) -> int:
        self.draws += 1
        return super().randrange(*args, **kwargs)


async def test_it_never_suspends() -> None:
    assert MemoryBackend.awaits is False


async def test_a_sample_costs_a_few_draws_per_key_after_most_keys_are_gone() -> None:
    backend = MemoryBackend()
    await backend.write_many([Change(key, None, record()) for key in range(20_000)])
    await backend.write_many([Change(key, record(), None) for key in range(3_000, 20_000)])
    random = CountingRandom(3)
    assert len(await backend.random_sample(100, random)) == 100
    assert random.draws < 100 * 8


async def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    backend = MemoryBackend()
    for start in range(0, 50_000, 500):
        await backend.write_many([Change(start + i, None, record(parent=start + i - 1)) for i in range(500)])
        await backend.write_many([Change(start + i, record(parent=start + i - 1), None) for i in range(500)])
    assert backend.key_count == 0
    assert len(backend._order) <= 2_048
    assert len(backend._gone) <= 2_048
    assert backend._children == {}
