"""Published blocks: with all their parts, exact ones alone, and their pages stay until they are written."""

from __future__ import annotations

import pytest
import torch
from memory_connector import MemoryStorage
from prefix_cases import PAGE, SIDECAR_BYTES, Tier, page_keys

from gpu_tier.errors import ConfigError

TOKENS = list(range(100, 100 + 4 * PAGE + 1))  # four full pages and the token that has to be computed


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def test_two_engines_write_the_same_blocks(storage: MemoryStorage) -> None:
    tiers = [Tier(storage, is_manual=True) for _ in range(2)]
    pages = [tier.compute(TOKENS) for tier in tiers]
    for tier, mine in zip(tiers, pages, strict=True):
        tier.store.publish(TOKENS, mine, len(TOKENS), sidecar=tier.sidecar(TOKENS))
        tier.allocator.free(mine)
    assert [len(write.mine) for tier in tiers for write in tier.connector.writes.values()] == [4, 0]
    for tier in reversed(tiers):
        tier.connector.finish_write(0)
        tier.check_nothing_is_held()
    tier = Tier(storage)
    tier.check(TOKENS, tier.attach(TOKENS))


def test_pages_stay_until_they_are_written(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True, pages=4)
    pages = tier.compute(TOKENS)
    tier.store.publish(TOKENS, pages, len(TOKENS), sidecar=tier.sidecar(TOKENS))
    tier.allocator.free(pages)  # the request has ended
    assert tier.allocator.available == 0
    tier.connector.finish_write(0)
    tier.check_nothing_is_held()
    other = Tier(storage)
    other.check(TOKENS, other.attach(TOKENS))


def test_pages_that_are_being_written_are_not_written_twice(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True)
    pages = tier.compute(TOKENS)
    tier.store.publish(TOKENS, pages, len(TOKENS), sidecar=tier.sidecar(TOKENS))
    longer = [*TOKENS, *range(PAGE)]
    attach = tier.store.begin(longer)
    tier.connector.answer(1)
    prefix = tier.store.poll(attach)
    assert prefix is not None
    assert prefix.pages == tuple(pages)
    more = tier.compute(longer, prefix)
    tier.store.publish(longer, more, len(longer), first_page=4, sidecar=tier.sidecar(longer, 4))
    assert [[page.key for page in write.pages] for write in tier.connector.writes.values()] == [
        page_keys(longer)[:4],
        page_keys(longer)[4:],
    ]
    tier.allocator.free(pages)
    tier.allocator.free(more)
    for number in list(tier.connector.writes):
        tier.connector.finish_write(number)
    tier.check_nothing_is_held()


def test_what_a_write_did_not_store_is_written_again(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True)
    pages = tier.compute(TOKENS)
    tier.store.publish(TOKENS, pages, len(TOKENS), sidecar=tier.sidecar(TOKENS))
    tier.connector.finish_write(0, count=1)
    tier.store.step()
    assert (tier.store.counters.written_pages, tier.store.counters.failed_pages) == (1, 3)
    longer = [*TOKENS, *range(PAGE)]
    pages = pages + tier.compute(longer)[4:]
    tier.store.publish(longer, pages, len(longer), first_page=4, sidecar=tier.sidecar(longer, 4))
    (write,) = tier.connector.writes.values()
    assert [page.key for page in write.pages] == page_keys(longer)[1:]


def test_blocks_decoded_over_a_selection_are_never_published(storage: MemoryStorage) -> None:
    """Decision 23: their KV differs from the exact one."""
    tier = Tier(storage)
    pages = tier.compute(TOKENS)
    n_exact = 2 * PAGE + 1
    tier.store.publish(TOKENS, pages, n_exact, sidecar=tier.sidecar(TOKENS))
    tier.allocator.free(pages)
    tier.store.step()
    assert list(storage.blocks) == page_keys(TOKENS)[:2]
    prefix = tier.attach(TOKENS)  # nor are they found in the pool
    assert prefix.n_tokens == 2 * PAGE
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_the_storage_forgot_what_the_pool_still_has(storage: MemoryStorage) -> None:
    tier = Tier(storage)
    tier.serve(TOKENS)
    storage.blocks.clear()
    longer = [*TOKENS, *range(PAGE)]
    prefix = tier.attach(longer)
    assert prefix.n_tokens == 4 * PAGE
    pages = tier.compute(longer, prefix)
    tier.store.publish(longer, pages, len(longer), first_page=4, sidecar=tier.sidecar(longer, 4))
    tier.allocator.free(pages)
    tier.store.step()
    assert set(storage.blocks) == set(page_keys(longer))
    tier.check_nothing_is_held()


def test_a_prompt_that_is_all_in_the_pool_is_looked_up_all_the_same(storage: MemoryStorage) -> None:
    """So that the storage knows that it is used, and what follows a block that it lost is not stored in vain."""
    tier = Tier(storage)
    tier.serve(TOKENS)
    tier.connector.is_manual = True
    prefix = tier.store.poll(tier.store.begin(TOKENS))
    assert prefix is not None  # nobody waited
    (number,) = tier.connector.lookups
    del storage.blocks[page_keys(TOKENS)[2]]
    tier.connector.answer(number)
    tier.store.step()
    longer = [*TOKENS, *range(PAGE)]
    pages = tier.compute(longer, prefix)
    tier.store.publish(longer, pages, len(longer), first_page=4, sidecar=tier.sidecar(longer, 4))
    tier.allocator.free(pages)
    (number,) = tier.connector.writes
    tier.connector.finish_write(number)
    assert set(storage.blocks) == set(page_keys(longer))
    tier.check_nothing_is_held()


@pytest.mark.parametrize("is_there", [False, True])
def test_an_answer_about_pages_that_others_have_now_changes_nothing(storage: MemoryStorage, is_there: bool) -> None:
    tier = Tier(storage, pages=4)
    tier.serve(TOKENS)
    tier.connector.is_manual = True
    attach = tier.store.begin(TOKENS)
    tier.store.abort(attach)
    others = [token + 1000 for token in TOKENS]
    pages = tier.compute(others)
    tier.connector.is_down = True
    tier.store.publish(others, pages, len(others), sidecar=tier.sidecar(others))
    tier.connector.finish_write(2)
    tier.connector.is_down = False
    if not is_there:
        storage.blocks.clear()
    tier.connector.answer(1)
    tier.store.step()
    tier.store.publish([*others, 1], pages, len(others), first_page=4)
    (write,) = tier.connector.writes.values()
    assert [page.key for page in write.pages] == page_keys(others)


def test_what_was_stored_once_is_not_taken_for_stored_for_ever(storage: MemoryStorage) -> None:
    tier = Tier(storage)
    tier.serve(TOKENS)
    storage.blocks.clear()
    tier.allocator.free(tier.allocator.alloc(16))  # out of the pool, too
    tier.serve(TOKENS)  # in the same pages, perhaps
    assert set(storage.blocks) == set(page_keys(TOKENS))


def test_no_more_pages_are_held_for_writing_than_allowed(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True, pages=6, most_writing=0.5)
    pages = tier.compute(TOKENS)
    tier.store.publish(TOKENS, pages, len(TOKENS), sidecar=tier.sidecar(TOKENS))
    tier.allocator.free(pages)
    assert tier.allocator.in_use == 3
    assert tier.store.counters.dropped_pages == 1
    tier.connector.finish_write(0)
    tier.check_nothing_is_held()


def test_flush_waits_for_what_is_being_written(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True)
    pages = tier.compute(TOKENS)
    tier.store.publish(TOKENS, pages, len(TOKENS), sidecar=tier.sidecar(TOKENS))
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1.0 and tier.connector.writes:
            tier.connector.finish_write(0)

    assert not tier.store.flush(0.5, lambda: now[0], pause)
    assert tier.store.flush(5.0, lambda: now[0], pause)
    assert len(storage.blocks) == 4


def test_a_required_sidecar_has_to_be_given_and_to_fit(storage: MemoryStorage) -> None:
    tier = Tier(storage)
    pages = tier.compute(TOKENS)
    with pytest.raises(ConfigError, match="sidecar"):
        tier.store.publish(TOKENS, pages, len(TOKENS))
    with pytest.raises(ConfigError, match="sidecar"):
        tier.store.publish(TOKENS, pages, len(TOKENS), sidecar=torch.zeros(3, SIDECAR_BYTES, dtype=torch.uint8))
