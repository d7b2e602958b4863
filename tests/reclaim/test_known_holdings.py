"""What is remembered of an index between two looks is what a look at it would find."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import pytest
from levels_rig import Levels, group, instance, levels

from kvcm.cache.instance_cache import IndexInCustody
from kvcm.index.backends.backend import Change
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.groups import InstanceGroup
from kvcm.model.masks import NO_MASK
from kvcm.reclaim.holdings import Holding, Holdings

STEPS = 300
KEYS = range(12)


class SharedMemory(MemoryBackend):
    """Records that other managers change, too."""

    is_shared = True


def of_groups(rig: Levels) -> list[tuple[IndexInCustody, InstanceGroup]]:
    return [(each, rig.registry.groups.get(each.instance.instance_group_name)) for each in rig.manager.indexes()]


async def change(rig: Levels, generator: Random) -> None:
    """Do one thing of those that change what instances hold."""
    to, keys = generator.choice("ij"), generator.sample(KEYS, 3)
    steps: list[Callable[[], Awaitable[object]]] = [
        lambda: rig.write(keys, to),
        lambda: rig.manager.remove(to, keys, NO_MASK),
        lambda: rig.read(keys, to),
        rig.reclaim,
        rig.delete,
        lambda: rig.manager.trim_meta(to),
        lambda: rig.update(group(blocks=generator.randint(20, 40), max_keys=generator.randint(20, 40))),
    ]
    await generator.choice(steps)()


async def test_what_is_remembered_is_what_is_there() -> None:
    generator, known = Random(1), Holdings()
    with levels(group(blocks=40), [instance("i"), instance("j")]) as rig:
        held: set[tuple[int, ...]] = set()
        for _ in range(STEPS):
            await change(rig, generator)
            found = known.of(of_groups(rig))
            assert found == [Holding.of(*each) for each in of_groups(rig)]
            held.add(tuple(sum(each.remaining.values()) for each in found))
        assert len(held) > STEPS // 10


async def test_what_did_not_change_is_not_looked_at_again() -> None:
    known = Holdings()
    with levels(group(blocks=40), [instance("i"), instance("j")]) as rig:
        await rig.write([1, 2], "i")
        i, j = known.of(of_groups(rig))
        await rig.write([1], "j")
        later_i, later_j = known.of(of_groups(rig))
        assert later_i is i
        assert later_j is not j


async def test_another_registration_of_an_id_holds_nothing_yet() -> None:
    known = Holdings()
    with levels() as rig:
        await rig.write([1])
        known.of(of_groups(rig))
        await rig.manager.remove_instance("i")
        await rig.delete()
        await rig.manager.purge_removed()
        await rig.manager.register_instance(instance())
        assert [each.keys for each in known.of(of_groups(rig))] == [0]


@pytest.mark.parametrize("is_asked_before", [False, True])
async def test_of_what_others_change_nothing_is_remembered(is_asked_before: bool) -> None:
    class SharedLevels(Levels):
        new_backend = staticmethod(lambda _placement: backend)

    backend, known = SharedMemory(), Holdings()
    rig = SharedLevels([group(blocks=40)], [instance()])
    try:
        await rig.write([1, 2])
        if is_asked_before:
            known.of(of_groups(rig))
        records = await backend.get_many([1])
        await MemoryBackend.write_many(backend, [Change(1, records[0], None)])  # by another manager
        assert [each.keys for each in known.of(of_groups(rig))] == [1]
    finally:
        rig.storages.close_all()
