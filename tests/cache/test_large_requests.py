"""A large request gives way to others after each page: it never has the event loop for itself."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from cache_rig import Rig, group, opened

from kvcm.cache.pages import PAGE_KEYS, pages
from kvcm.cache.pin_values import PinRequest
from kvcm.cache.sessions import WriteRequest
from kvcm.model.errors import NotReadyError
from kvcm.model.masks import NO_MASK, BlockMask

PAGES = 6
KEYS = list(range(PAGES * PAGE_KEYS))


async def turns_of_others(awaitable: Awaitable[Any]) -> tuple[Any, int]:
    """Return what a call returns, and how often others had their turn until then."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    result = await awaitable
    other.cancel()
    return result, turns


async def test_every_call_over_many_blocks_lets_others_in_between() -> None:
    with opened() as rig:
        manager = rig.manager
        started, turns = await turns_of_others(manager.start_write("i", WriteRequest(KEYS)))
        assert len(started.chunks) == len(KEYS)
        assert turns >= PAGES
        finish = manager.finish_write("i", started.session.id, BlockMask(offset=len(KEYS)))
        finished, turns = await turns_of_others(finish)
        assert finished.served == len(KEYS)
        assert turns >= PAGES
        metas, turns = await turns_of_others(manager.metas("i", KEYS, NO_MASK))
        assert len(metas) == len(KEYS)
        assert turns >= PAGES
        removed, turns = await turns_of_others(manager.remove("i", KEYS, NO_MASK))
        assert removed == len(KEYS)
        assert turns >= PAGES


async def test_many_pins_of_the_same_blocks_let_others_in_between() -> None:
    """Ending one pin, and listing all, reads every pin of the instance."""
    count = 40
    with opened(replace(group(), pin_budget_bytes=1 << 40)) as rig:
        await rig.store([1, 2])
        pins = [await rig.manager.pin("i", PinRequest([1, 2], "me", 100)) for _ in range(count)]
        listed, turns = await turns_of_others(rig.manager.pins.of_instance(rig.manager.cache("i")))
        assert len(listed) == count
        assert turns >= count
        assert pins[0] is not None
        _, turns = await turns_of_others(rig.manager.unpin("i", pins[0].id))
        assert turns >= count


async def test_two_large_writers_share_blocks_without_overlap() -> None:
    """Both run page by page in turns: each block has one writer, and both answers add up (invariant 2)."""
    with opened() as rig:
        first, second = await asyncio.gather(
            rig.manager.start_write("i", WriteRequest(KEYS)), rig.manager.start_write("i", WriteRequest(KEYS))
        )
        assert set(first.session.keys) | set(second.session.keys) == set(KEYS)
        assert set(first.session.keys).isdisjoint(second.session.keys)
        for started in (first, second):
            assert len(started.chunks) == len(started.session.keys) == len(started.mask.unmasked(len(KEYS)))


@pytest.mark.parametrize("count", [0, 1, PAGE_KEYS, PAGE_KEYS + 1, 3 * PAGE_KEYS])
def test_pages_hold_every_item_once_in_order(count: int) -> None:
    items = list(range(count))
    cut = list(pages(items))
    assert [item for page in cut for item in page] == items
    assert all(0 < len(page) <= PAGE_KEYS for page in cut)


async def has_addresses(rig: Rig) -> bool:
    """Whether a storage has handed some out."""
    for backend in rig.storages.open_backends().values():
        async for page in backend.objects(rig.storages.cluster_id):
            if page.objects:
                return True
    return False


async def test_a_storage_removed_in_the_middle_of_a_start_is_a_refusal_and_leaves_nothing_writing() -> None:
    with opened() as rig:
        start = asyncio.create_task(rig.manager.start_write("i", WriteRequest(KEYS, timeout_seconds=5)))
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
