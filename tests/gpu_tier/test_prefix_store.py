"""Prefixes are attached with the bytes that were published, whatever storages do; and every page comes back."""

from __future__ import annotations

import pytest
from memory_connector import MemoryStorage
from prefix_cases import MHA, MLA, PAGE, SIDECAR_BYTES, Tier, page_keys, sidecars_of

from gpu_tier.connector import KV_SPEC
from gpu_tier.geometry import KVGeometry, Layout

TOKENS = list(range(100, 100 + 4 * PAGE + 1))  # four full pages and the token that has to be computed


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def full(storage: MemoryStorage, tokens: list[int] = TOKENS, **options: object) -> MemoryStorage:
    """Let another engine publish a prompt."""
    Tier(storage, **options).serve(tokens)  # type: ignore[arg-type]
    return storage


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("sidecar", ["", "optional", "required"])
def test_another_engine_attaches_what_was_published(
    storage: MemoryStorage, geometry: KVGeometry, layout: Layout, sidecar: str
) -> None:
    full(storage, geometry=geometry, layout=layout, sidecar=sidecar)
    tier = Tier(storage, geometry=geometry, layout=layout, sidecar=sidecar)
    prefix = tier.attach(TOKENS)
    assert prefix.n_tokens == 4 * PAGE
    assert tier.connector.memory_bytes == tier.host.nbytes
    tier.check(TOKENS, prefix)
    assert bool(prefix.sidecars) == bool(sidecar)
    assert tier.store.counters.storage_tokens == 4 * PAGE
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_the_last_prompt_token_is_never_attached(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    for length, pages in ((0, 0), (1, 0), (PAGE, 0), (PAGE + 1, 1), (2 * PAGE, 1), (4 * PAGE, 3), (4 * PAGE + 1, 4)):
        prefix = tier.attach(TOKENS[:length])
        assert len(prefix.pages) == pages
        tier.check([*TOKENS[:length], 0], prefix)
        tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_pages_in_the_pool_need_no_storage(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    first = tier.attach(TOKENS)
    tier.connector.is_down = True
    second = tier.attach(TOKENS)
    assert second.pages == first.pages
    assert tier.store.counters.host_tokens == 4 * PAGE
    tier.check(TOKENS, second)
    tier.store.give_back(first)
    tier.store.give_back(second)
    third = tier.attach(TOKENS)  # nobody holds the pages now, and nobody has needed them either
    assert third.pages == first.pages
    tier.store.give_back(third)
    tier.check_nothing_is_held()


def test_a_tier_without_a_storage_shares_inside_its_pool() -> None:
    tier = Tier(None)
    tier.serve(TOKENS)
    prefix = tier.attach(TOKENS)
    tier.check(TOKENS, prefix)
    assert prefix.n_tokens == 4 * PAGE
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_the_pool_has_the_beginning_and_the_storage_the_rest(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    tier.store.give_back(tier.attach(TOKENS[: 2 * PAGE + 1]))
    prefix = tier.attach(TOKENS)
    tier.check(TOKENS, prefix)
    assert (tier.store.counters.host_tokens, tier.store.counters.storage_tokens) == (2 * PAGE, 4 * PAGE)
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_a_block_without_its_required_sidecar_is_a_miss(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    assert tier.spec is not None
    del storage.blocks[page_keys(TOKENS)[2]][tier.spec.name]
    prefix = tier.attach(TOKENS)
    assert prefix.n_tokens == 2 * PAGE
    tier.check(TOKENS, prefix)
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_a_block_without_its_optional_sidecar_is_attached(storage: MemoryStorage) -> None:
    full(storage, sidecar="optional")
    tier = Tier(storage, sidecar="optional")
    assert tier.spec is not None
    del storage.blocks[page_keys(TOKENS)[2]][tier.spec.name]
    for _ in range(2):  # from the storage, then from the pool
        prefix = tier.attach(TOKENS)
        assert prefix.n_tokens == 4 * PAGE
        assert len(sidecars_of(prefix)) == 2
        tier.check(TOKENS, prefix)
        tier.store.give_back(prefix)
    assert tier.store.counters.sidecar_misses == 2 * 2 * PAGE
    tier.check_nothing_is_held()


def test_sidecars_of_other_parameters_are_a_miss(storage: MemoryStorage) -> None:
    full(storage, parameters=128)
    tier = Tier(storage, parameters=64)
    assert tier.attach(TOKENS).n_tokens == 0
    tier.check_nothing_is_held()
    # What it publishes adds its own sidecar to the same blocks; the others' stays.
    tier.serve(TOKENS)
    assert all(len(parts) == 3 for parts in storage.blocks.values())
    for parameters in (64, 128):
        other = Tier(storage, parameters=parameters)
        prefix = other.attach(TOKENS)
        assert prefix.n_tokens == 4 * PAGE
        other.check(TOKENS, prefix)


@pytest.mark.parametrize("arrived", [[], [0], [0, 1], [1, 2, 3], [0, 2, 3]], ids=str)
def test_a_partial_load_is_used_up_to_its_first_gap(storage: MemoryStorage, arrived: list[int]) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True)
    assert tier.spec is not None
    attach = tier.store.begin(TOKENS)
    tier.connector.answer(0)
    tier.store.poll(attach)
    for block in arrived:
        tier.connector.arrive(1, (block, KV_SPEC), (block, tier.spec.name))
    missing = next(block for block in range(4) if block not in arrived)
    tier.connector.arrive(1, (missing, KV_SPEC))
    tier.connector.fail(1, (missing, tier.spec.name))
    prefix = tier.store.poll(attach)
    assert prefix is not None
    assert prefix.n_tokens == missing * PAGE
    tier.check(TOKENS, prefix)
    assert tier.store.counters.loads_short == 1
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


@pytest.mark.parametrize("layout", Layout)
def test_a_load_that_breaks_after_some_bytes_gives_whole_blocks_only(storage: MemoryStorage, layout: Layout) -> None:
    full(storage, layout=layout)
    block_size = MHA.page_bytes + SIDECAR_BYTES
    for count in (0, 1, MHA.page_bytes, block_size - 1, block_size, block_size + 1, 3 * block_size + 5):
        tier = Tier(storage, layout=layout, is_manual=True)
        attach = tier.store.begin(TOKENS)
        tier.connector.answer(0)
        tier.store.poll(attach)
        tier.connector.break_after(1, count)
        prefix = tier.store.poll(attach)
        assert prefix is not None
        assert prefix.n_tokens == count // block_size * PAGE
        tier.check(TOKENS, prefix)
        tier.store.give_back(prefix)
        tier.check_nothing_is_held()


def test_pages_stay_held_while_a_storage_hangs_on_to_them(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True, pages=4)
    attach = tier.store.begin(TOKENS)
    tier.connector.answer(0)
    tier.store.poll(attach)
    tier.connector.break_after(1, 2 * (MHA.page_bytes + SIDECAR_BYTES) + 3)  # now block 2 has failed
    tier.connector.fail(1, (3, KV_SPEC), hangs=True)
    prefix = tier.store.poll(attach)
    assert prefix is not None
    assert prefix.n_tokens == 2 * PAGE
    assert tier.allocator.available == 0
    assert not tier.store.is_idle
    tier.store.step()  # the storage writes again
    tier.check(TOKENS, prefix)
    tier.connector.let_go(1)
    tier.store.step()
    assert tier.allocator.available == 2
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_an_optional_part_that_hangs_is_neither_used_nor_published(storage: MemoryStorage) -> None:
    full(storage, sidecar="optional")
    tier = Tier(storage, sidecar="optional", is_manual=True)
    assert tier.spec is not None
    attach = tier.store.begin(TOKENS)
    tier.connector.answer(0)
    tier.store.poll(attach)
    for block in range(4):
        tier.connector.arrive(1, (block, KV_SPEC))
    tier.connector.arrive(1, (0, tier.spec.name), (1, tier.spec.name))
    tier.connector.fail(1, (2, tier.spec.name), hangs=True)
    prefix = tier.store.poll(attach)
    assert prefix is not None
    assert prefix.n_tokens == 4 * PAGE
    assert len(sidecars_of(prefix)) == 2
    tier.check(TOKENS, prefix)
    tier.store.publish(TOKENS, prefix.pages, len(TOKENS), first_page=2, sidecar=tier.sidecar(TOKENS, 2))
    assert not tier.connector.writes
    tier.store.give_back(prefix)
    others = tier.allocator.alloc(tier.allocator.available)
    assert len(others) == 16 - 2  # the storage still writes beside two of them
    tier.allocator.free(others)
    tier.connector.let_go(1)
    tier.check_nothing_is_held()


@pytest.mark.parametrize("moment", ["before the answer", "loading", "half loaded", "hanging", "done"])
def test_an_abort_frees_everything(storage: MemoryStorage, moment: str) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True)
    attach = tier.store.begin(TOKENS)
    if moment != "before the answer":
        tier.connector.answer(0)
        tier.store.poll(attach)
    if moment == "half loaded":
        tier.connector.arrive(1, (0, KV_SPEC), (2, KV_SPEC))
    if moment == "hanging":
        tier.connector.loads[1].hanging += [
            piece for page in tier.connector.loads[1].pages for piece in page.parts[KV_SPEC]
        ]
    if moment == "done":
        tier.connector.arrive(1, *tier.connector.loads[1].left)
        assert tier.store.poll(attach) is not None
    tier.store.abort(attach)
    assert tier.store.poll(attach) is None
    tier.store.abort(attach)  # once more is fine
    if moment == "hanging":
        tier.store.step()
        assert tier.allocator.in_use == 4
        tier.connector.let_go(1)
    tier.check_nothing_is_held()


def test_a_block_is_loaded_once_for_two_requests(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True)
    first = tier.store.begin(TOKENS)
    tier.connector.answer(0)
    tier.store.poll(first)
    second = tier.store.begin(TOKENS)
    assert tier.store.poll(second) is None
    assert len(tier.connector.loads) == 1
    tier.connector.arrive(1, *list(tier.connector.loads[1].left))
    found = tier.store.poll(second)  # nobody has asked for the first one since
    assert found is None or found.n_tokens
    found = found or tier.store.poll(second)
    mine = tier.store.poll(first)
    assert found is not None
    assert mine is not None
    assert found.pages == mine.pages
    tier.check(TOKENS, found)
    tier.store.give_back(found)
    tier.store.give_back(mine)
    tier.check_nothing_is_held()


def test_who_waits_for_a_load_that_is_aborted_loads_himself(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True)
    first = tier.store.begin(TOKENS)
    tier.connector.answer(0)
    tier.store.poll(first)
    second = tier.store.begin(TOKENS)
    tier.store.abort(first)
    tier.connector.is_manual = False
    prefix = next(found for _ in range(4) if (found := tier.store.poll(second)) is not None)
    assert prefix.n_tokens == 4 * PAGE
    tier.check(TOKENS, prefix)
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()


def test_a_pool_with_little_room_attaches_less(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, pages=3)
    (held,) = tier.allocator.alloc(1)
    prefix = tier.attach(TOKENS)
    assert prefix.n_tokens == 2 * PAGE
    tier.check(TOKENS, prefix)
    tier.store.give_back(prefix)
    tier.allocator.free([held])
    tier.check_nothing_is_held()


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    tier = Tier(None, pages=8)
    tier.serve(TOKENS)
    tier.serve([token + 1000 for token in TOKENS])
    for pages in (4, 3, 2, 1, 0):  # the chain that was used longest ago, block by block
        prefix = tier.attach([token + 1000 for token in TOKENS])
        assert len(prefix.pages) == 4
        taken = tier.allocator.alloc(4 - pages)
        tier.allocator.free(taken)
        tier.store.give_back(prefix)
        prefix = tier.attach(TOKENS)
        assert len(prefix.pages) == pages
        tier.check(TOKENS, prefix)
        tier.store.give_back(prefix)
        tier.store.give_back(tier.attach([token + 1000 for token in TOKENS]))


def test_attach_waits_for_its_time_and_no_longer(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True)
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    prefix = tier.store.attach(TOKENS, 1.0, lambda: now[0], pause)
    assert prefix.n_tokens == 0
    assert 1.0 <= now[0] < 1.1
    tier.check_nothing_is_held()
    tier.connector.is_manual = False
    prefix = tier.store.attach(TOKENS, 1.0, lambda: now[0], pause)
    assert prefix.n_tokens == 4 * PAGE
    tier.store.give_back(prefix)
    tier.check_nothing_is_held()
