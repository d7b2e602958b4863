"""A large request gives way to others after each page: it never has the event loop for itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from cache_rig import Rig, group, instance, opened
from loop_turns import turns_of_others

from kvcm.cache.instance_cache import BATCH_KEYS, batch_keys, batches
from kvcm.cache.pins import PinRequest
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.write_sessions import LocationChecksums, WriteRequest
from kvcm.model.errors import NotReadyError
from kvcm.model.instances import Instance
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.meta_api import BlockCalls

# ── Large requests ──


PAGES = 6
KEYS = list(range(PAGES * BATCH_KEYS))


def of_parts(count: int) -> Instance:
    """An instance whose blocks have so many parts."""
    return instance({f"tp{number}": 10 for number in range(count)})


@pytest.mark.parametrize(("registered", "keys"), [(instance(), KEYS), (of_parts(12), KEYS[:BATCH_KEYS])])
async def test_every_call_over_many_blocks_lets_others_in_between(registered: Instance, keys: list[int]) -> None:
    """Also over few blocks of many parts: they take as long."""
    with opened(registered=registered) as rig:
        manager = rig.manager
        started, turns = await turns_of_others(manager.start_write(manager.cache("i"), WriteRequest(keys)))
        assert len(started.chunks) == len(keys)
        assert turns >= PAGES
        finish = manager.finish_write(manager.cache("i"), started.session.id, BlockMask(offset=len(keys)))
        finished, turns = await turns_of_others(finish)
        assert finished.served == len(keys)
        assert turns >= PAGES
        metas, turns = await turns_of_others(manager.metas(manager.cache("i"), keys, NO_MASK))
        assert len(metas) == len(keys)
        assert turns >= PAGES
        removed, turns = await turns_of_others(manager.remove(manager.cache("i"), keys, NO_MASK))
        assert removed == len(keys)
        assert turns >= PAGES


@pytest.mark.parametrize("mode", [MatchMode.PREFIX_MATCH, MatchMode.PREFIX_MATCH_WITH_MAMBA])
async def test_a_match_that_has_to_read_into_locations_lets_others_in_between(mode: MatchMode) -> None:
    keys, only = KEYS[:BATCH_KEYS], frozenset(["tp0"])
    with opened(registered=of_parts(12)) as rig:
        await rig.store(keys)
        query = MatchQuery(mode, keys, spec_names=only if mode is MatchMode.PREFIX_MATCH else frozenset())
        _, turns = await turns_of_others(rig.manager.match(rig.manager.cache("i"), query))
        assert turns >= PAGES - 1
        _, turns = await turns_of_others(rig.manager.match(rig.manager.cache("i"), query))
        assert turns <= 1  # all is known


async def test_texts_of_many_blocks_let_others_in_between(rig: Rig) -> None:
    calls = BlockCalls(rig.manager, pb.GetCacheMetaResponse, pb.CommonResponse)
    request = pb.GetCacheMetaRequest(instance_id="i", block_keys=KEYS[:BATCH_KEYS], detail_level=1)
    reply, turns = await turns_of_others(calls.get_cache_meta(request))
    assert len(reply.message.metas) == BATCH_KEYS
    assert turns >= BATCH_KEYS // 100


@pytest.mark.parametrize("mode", [MatchMode.BATCH_GET, MatchMode.REVERSE_ROLL_SW_MATCH])
async def test_a_match_of_many_unknown_blocks_lets_others_in_between(rig: Rig, mode: MatchMode) -> None:
    await rig.store([1, 2])
    answered: list[int] = []

    async def match(keys: list[int]) -> None:
        found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(mode, keys, window=2))
        answered.append(len(found.chunks))

    unknown = [-key for key in KEYS]
    _, turns = await turns_of_others(asyncio.gather(match(unknown), match([1, 2])))
    assert answered == [2, len(unknown)]
    assert turns >= PAGES


async def test_a_match_of_many_blocks_that_are_not_cached_lets_others_in_between(rig: Rig) -> None:
    await rig.store(KEYS)
    rig.manager.cache("i").index.invalidate_all()
    found, turns = await turns_of_others(
        rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.PREFIX_MATCH, KEYS))
    )
    assert found.keys == KEYS
    assert turns >= PAGES - 1


async def test_blocks_with_many_checksums_serve_some_at_a_time() -> None:
    """A turn of the loop is for some two thousand parts at most."""
    parts, most = 8, 2000
    with opened(registered=instance({f"tp{number}": 10 for number in range(parts)})) as rig:
        started = await rig.start(KEYS[:BATCH_KEYS])
        outcome = [
            LocationChecksums([(f"tp{number}", 1 + key) for number in range(parts)]) for key in started.session.keys
        ]
        index, served = rig.manager.cache("i").index, [0]
        finish = asyncio.create_task(
            rig.manager.finish_write(
                rig.manager.cache("i"), started.session.id, BlockMask(offset=BATCH_KEYS), reported=outcome
            )
        )
        while not finish.done():
            served.append(sum(answer is not None for answer in await index.answers(KEYS[:BATCH_KEYS])))
            await asyncio.sleep(0)
        served.append(sum(answer is not None for answer in await index.answers(KEYS[:BATCH_KEYS])))
        assert (await finish).served == served[-1] == BATCH_KEYS
        assert max(after - before for before, after in pairwise(served)) * parts <= most


async def test_many_pins_of_the_same_blocks_let_others_in_between() -> None:
    """Ending one pin, and listing all, reads every pin of the instance."""
    count = 40
    with opened(replace(group(), pin_budget_bytes=1 << 40)) as rig:
        await rig.store([1, 2])
        pins = [await rig.manager.pin(rig.manager.cache("i"), PinRequest([1, 2], "me", 100)) for _ in range(count)]
        listed, turns = await turns_of_others(rig.manager.pins.of_instance(rig.manager.cache("i")))
        assert len(listed) == count
        assert turns >= count
        assert pins[0] is not None
        _, turns = await turns_of_others(rig.manager.unpin(rig.manager.cache("i"), pins[0].id))
        assert turns >= count


async def test_two_large_writers_share_blocks_without_overlap(rig: Rig) -> None:
    """Both run page by page in turns: each block has one writer, and both answers add up (invariant 2)."""
    first, second = await asyncio.gather(
        rig.manager.start_write(rig.manager.cache("i"), WriteRequest(KEYS)),
        rig.manager.start_write(rig.manager.cache("i"), WriteRequest(KEYS)),
    )
    assert set(first.session.keys) | set(second.session.keys) == set(KEYS)
    assert set(first.session.keys).isdisjoint(second.session.keys)
    for started in (first, second):
        assert len(started.chunks) == len(started.session.keys) == len(started.mask.unmasked(len(KEYS)))


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 12, 64, 1000])
def test_a_page_of_many_parts_has_fewer_blocks(parts: int) -> None:
    assert 16 <= batch_keys(parts) <= BATCH_KEYS
    assert batch_keys(parts) == 16 or batch_keys(parts) * (1 + parts) <= 2 * BATCH_KEYS
    assert batch_keys(parts).bit_count() == 1


@pytest.mark.parametrize("count", [0, 1, BATCH_KEYS, BATCH_KEYS + 1, 3 * BATCH_KEYS])
def test_pages_hold_every_item_once_in_order(count: int) -> None:
    items = list(range(count))
    cut = list(batches(items))
    assert [item for page in cut for item in page] == items
    assert all(0 < len(page) <= BATCH_KEYS for page in cut)


async def has_addresses(rig: Rig) -> bool:
    """Whether a storage has handed some out."""
    for backend in rig.storages.open_backends().values():
        async for page in backend.objects(rig.storages.cluster_id):
            if page.objects:
                return True
    return False


async def test_a_storage_removed_in_the_middle_of_a_start_is_a_refusal_and_leaves_nothing_writing(rig: Rig) -> None:
    start = asyncio.create_task(rig.manager.start_write(rig.manager.cache("i"), WriteRequest(KEYS, timeout_seconds=5)))
    for _ in range(100):
        await asyncio.sleep(0)
        if await has_addresses(rig):
            break
    assert not start.done()
    assert await has_addresses(rig)
    for name in rig.registry.groups.get("group").storage_candidates:
        if rig.storages.backend(name) is not None:
            rig.storages.close(name)
    with pytest.raises(NotReadyError, match="removed while the write was being started"):
        await start
    rig.wait(5)
    await rig.manager.expire()
    await rig.executor.run_due()
    assert rig.manager.cache("i").index.key_count == 0
    assert rig.used_bytes == 0


# ── Open caches ──


def open_ids(rig: Rig) -> list[str]:
    return [each.instance_id for each in rig.manager.indexes()]


async def test_a_cache_opened_for_a_removal_that_is_over_does_not_stay(rig: Rig) -> None:
    """Another manager may have ended it while this one was on its way to it."""
    await rig.store([1])
    await rig.manager.remove_instance("i")
    (removal,) = rig.registry.instances.removals()
    await rig.registry.instances.forget_removal(removal.placement.uid)
    assert open_ids(rig) == []
    caches = rig.manager.open_caches
    caches.find_removed(removal.instance, removal.placement)
    assert open_ids(rig) == []
    assert caches.by_uid(removal.placement.uid) is None
