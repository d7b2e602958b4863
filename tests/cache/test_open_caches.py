"""Which indexes are open: those of registered instances, and of those that are being removed."""

from __future__ import annotations

from dataclasses import replace

from cache_rig import Rig, instance, opened


def open_ids(rig: Rig) -> list[str]:
    return [each.instance_id for each in rig.manager.indexes()]


async def test_instances_are_open_from_their_registration_until_the_end_of_their_removal() -> None:
    with opened() as rig:
        assert open_ids(rig) == ["i"]
        await rig.manager.register_instance(replace(instance(), instance_id="j"))
        assert open_ids(rig) == ["i", "j"]
        await rig.store([1])
        await rig.manager.remove_instance("i")
        assert sorted(open_ids(rig)) == ["i", "j"]
        rig.wait(60)
        await rig.executor.run_due()
        await rig.manager.purge_removed()
        assert open_ids(rig) == ["j"]


async def test_another_registration_of_an_id_is_beside_the_one_that_is_being_removed() -> None:
    with opened() as rig:
        await rig.store([1])
        await rig.manager.remove_instance("i")
        await rig.manager.register_instance(instance())
        assert open_ids(rig) == ["i", "i"]
        assert len({each.uid for each in rig.manager.indexes()}) == 2


async def test_what_is_opened_for_a_removal_that_is_over_does_not_stay() -> None:
    """Another manager may have ended it while this one was on its way to it."""
    with opened() as rig:
        await rig.store([1])
        await rig.manager.remove_instance("i")
        (removal,) = rig.registry.instances.removals()
        await rig.registry.instances.forget_removal(removal.placement.uid)
        assert open_ids(rig) == []
        caches = rig.manager.open_caches
        caches.of_removal(removal.instance, removal.placement)
        assert open_ids(rig) == []
        assert caches.by_uid(removal.placement.uid) is None
