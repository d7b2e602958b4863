"""What was chosen and could not be marked stays where it was in the order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from eviction_rig import BLOCK, EvictionRig, group_of

from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.errors import StorageIOError
from kvcm.reclaim.policies import POLICIES


class Refusing(MemoryBackend):
    """A store that takes nothing for a while."""

    refuses = False
    read_meanwhile = 99

    async def write_many(self, changes: Sequence[Change]) -> Written:
        if self.refuses:
            await self.touch({self.read_meanwhile: 1}, 1_000_500.0)
            raise StorageIOError("the disk is too slow; try again")
        return await super().write_many(changes)


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_blocks_that_a_store_refused_to_mark_go_first_when_it_takes_them(policy: str) -> None:
    """Otherwise every refusal would make the coldest blocks the hottest, and hot ones would go in their place."""
    rig = EvictionRig({"g": group_of(policy=policy)})
    backend = Refusing()
    index = rig.add(backend=backend)
    for key in range(100):
        await rig.write(index, [key])
        rig.clock.time += 1
    rig.groups["g"] = group_of(policy=policy, capacity=90 * BLOCK, ratio=1.0, hysteresis=0.0)
    backend.refuses = True
    for _ in range(3):
        with pytest.raises(StorageIOError):
            await rig.reclaimer.look()
    backend.refuses = False
    evicted = await rig.settle()
    assert sorted(evicted) == list(range(len(evicted)))
    assert len(evicted) >= 10


async def test_a_block_that_is_read_while_it_is_marked_keeps_that_read() -> None:
    rig = EvictionRig({"g": group_of(policy="lru")})
    backend = Refusing()
    backend.read_meanwhile = 3
    index = rig.add(backend=backend)
    for key in range(20):
        await rig.write(index, [key])
        rig.clock.time += 1
    rig.groups["g"] = group_of(policy="lru", capacity=11 * BLOCK, ratio=1.0, hysteresis=0.0)
    backend.refuses = True
    with pytest.raises(StorageIOError):
        await rig.reclaimer.look()
    backend.refuses = False
    evicted = await rig.settle()
    assert evicted == [key for key in range(len(evicted) + 1) if key != 3]
    assert len(evicted) >= 9
