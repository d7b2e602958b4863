"""Prefixes are attached with the bytes that were published, whatever storages do, and every page comes back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_connector import MemoryStorage
from prefix_cases import MHA, MLA, PAGE, SIDECAR_BYTES, Tier, format_of, page_keys, sidecars_of
from thoroughness import examples

from kvcm.gpu_tier.connector import KV_SPEC, fingerprint8
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, Layout
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix, PrefixAttach

TOKENS = list(range(100, 100 + 4 * PAGE + 1))  # four full pages and the token that has to be computed


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


LONGER = [*TOKENS, *range(PAGE)]


def loading(storage: MemoryStorage, **options: Any) -> tuple[Tier, PrefixAttach]:
    """Let an engine begin to load what another one has published; nothing has arrived yet."""
    full(storage, **options)
    tier = Tier(storage, is_manual=True, **options)
    attach = tier.store.begin(TOKENS)
    tier.connector.answer(0)
    tier.store.poll(attach)
    return tier, attach


def full(storage: MemoryStorage, **options: Any) -> None:
    """Let another engine publish a prompt."""
    Tier(storage, **options).serve(TOKENS)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("sidecar", ["", "optional", "required"])
def test_another_engine_attaches_published_blocks(
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
    tier.end(prefix)


def test_the_last_prompt_token_is_never_attached(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    for length, pages in ((0, 0), (1, 0), (PAGE, 0), (PAGE + 1, 1), (2 * PAGE, 1), (4 * PAGE, 3), (4 * PAGE + 1, 4)):
        prefix = tier.attach(TOKENS[:length])
        assert len(prefix.pages) == pages
        tier.check([*TOKENS[:length], 0], prefix)
        tier.end(prefix)


def test_pages_in_the_pool_need_no_storage(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    first = tier.attach(TOKENS)
    tier.connector.is_down = True
    second = tier.attach(TOKENS)
    assert second.pages == first.pages
    assert tier.store.counters.host_tokens == 4 * PAGE
    tier.check(TOKENS, second)
    tier.store.release(first)
    tier.store.release(second)
    third = tier.attach(TOKENS)  # the pages are not held now, but nothing has needed them either
    assert third.pages == first.pages
    tier.store.release(third)
    tier.check_nothing_is_held()


def test_the_pool_has_the_beginning_and_the_storage_the_rest(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    tier.store.release(tier.attach(TOKENS[: 2 * PAGE + 1]))
    prefix = tier.attach(TOKENS)
    tier.check(TOKENS, prefix)
    assert (tier.store.counters.host_tokens, tier.store.counters.storage_tokens) == (2 * PAGE, 4 * PAGE)
    tier.end(prefix)


def test_a_block_without_its_required_sidecar_is_a_miss(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage)
    del storage.blocks[page_keys(TOKENS)[2]][tier.sidecar_name]
    prefix = tier.attach(TOKENS)
    assert prefix.n_tokens == 2 * PAGE
    tier.check(TOKENS, prefix)
    tier.end(prefix)


def test_a_block_without_its_optional_sidecar_is_attached(storage: MemoryStorage) -> None:
    full(storage, sidecar="optional")
    tier = Tier(storage, sidecar="optional")
    del storage.blocks[page_keys(TOKENS)[2]][tier.sidecar_name]
    for _ in range(2):  # from the storage, then from the pool
        prefix = tier.attach(TOKENS)
        assert prefix.n_tokens == 4 * PAGE
        assert len(sidecars_of(prefix)) == 2
        tier.check(TOKENS, prefix)
        tier.store.release(prefix)
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
    tier, attach = loading(storage)
    for block in arrived:
        tier.connector.arrive(1, (block, KV_SPEC), (block, tier.sidecar_name))
    missing = next(block for block in range(4) if block not in arrived)
    tier.connector.arrive(1, (missing, KV_SPEC))
    tier.connector.fail(1, (missing, tier.sidecar_name))
    prefix = tier.attached(attach)
    assert prefix.n_tokens == missing * PAGE
    tier.check(TOKENS, prefix)
    assert tier.store.counters.loads_short == 1
    tier.end(prefix)


@pytest.mark.parametrize("layout", Layout)
def test_a_load_that_breaks_after_some_bytes_gives_whole_blocks_only(storage: MemoryStorage, layout: Layout) -> None:
    block_size = MHA.page_bytes + SIDECAR_BYTES
    for count in (0, 1, MHA.page_bytes, block_size - 1, block_size, block_size + 1, 3 * block_size + 5):
        tier, attach = loading(storage, layout=layout)
        tier.connector.break_after(1, count)
        prefix = tier.attached(attach)
        assert prefix.n_tokens == count // block_size * PAGE
        tier.check(TOKENS, prefix)
        tier.end(prefix)


def test_pages_stay_held_while_a_storage_hangs_on_to_them(storage: MemoryStorage) -> None:
    tier, attach = loading(storage, pages=4)
    tier.connector.break_after(1, 2 * (MHA.page_bytes + SIDECAR_BYTES) + 3)  # now block 2 has failed
    tier.connector.fail(1, (3, KV_SPEC), hangs=True)
    prefix = tier.attached(attach)
    assert prefix.n_tokens == 2 * PAGE
    assert tier.allocator.available == 0
    assert not tier.store.is_idle
    tier.store.step()  # the storage writes again
    tier.check(TOKENS, prefix)
    tier.connector.let_go(1)
    tier.store.step()
    assert tier.allocator.available == 2
    tier.end(prefix)


def test_an_optional_part_that_hangs_is_neither_used_nor_published(storage: MemoryStorage) -> None:
    tier, attach = loading(storage, sidecar="optional")
    for block in range(4):
        tier.connector.arrive(1, (block, KV_SPEC))
    tier.connector.arrive(1, (0, tier.sidecar_name), (1, tier.sidecar_name))
    tier.connector.fail(1, (2, tier.sidecar_name), hangs=True)
    prefix = tier.attached(attach)
    assert prefix.n_tokens == 4 * PAGE
    assert len(sidecars_of(prefix)) == 2
    tier.check(TOKENS, prefix)
    tier.store.publish(TOKENS, prefix.pages, len(TOKENS), first_page=2, sidecar=tier.sidecar(TOKENS, 2))
    assert not tier.connector.writes
    tier.store.release(prefix)
    others = tier.allocator.alloc(tier.allocator.available)
    assert len(others) == 16 - 2  # the storage still writes beside two of them
    tier.allocator.free(others)
    tier.connector.let_go(1)
    tier.check_nothing_is_held()


def test_a_block_is_loaded_once_for_two_requests(storage: MemoryStorage) -> None:
    tier, first = loading(storage)
    second = tier.store.begin(TOKENS)
    assert tier.store.poll(second) is None
    assert len(tier.connector.loads) == 1
    tier.connector.arrive(1, *list(tier.connector.loads[1].left))
    found = tier.store.poll(second) or tier.attached(second)  # the first one was not polled since
    mine = tier.attached(first)
    assert found.pages == mine.pages
    tier.check(TOKENS, found)
    tier.store.release(found)
    tier.store.release(mine)
    tier.check_nothing_is_held()


def test_a_request_that_waits_for_an_aborted_load_loads_itself(storage: MemoryStorage) -> None:
    tier, first = loading(storage)
    second = tier.store.begin(TOKENS)
    tier.store.abort(first)
    tier.connector.is_manual = False
    prefix = next(found for _ in range(4) if (found := tier.store.poll(second)) is not None)
    assert prefix.n_tokens == 4 * PAGE
    tier.check(TOKENS, prefix)
    tier.end(prefix)


def test_a_pool_with_few_free_pages_attaches_less(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, pages=3)
    (held,) = tier.allocator.alloc(1)
    prefix = tier.attach(TOKENS)
    assert prefix.n_tokens == 2 * PAGE
    tier.check(TOKENS, prefix)
    tier.store.release(prefix)
    tier.allocator.free([held])
    tier.check_nothing_is_held()


def test_a_tier_without_a_storage_loses_the_end_of_a_chain_before_its_beginning() -> None:
    tier = Tier(None, pages=8)
    tier.serve(TOKENS)
    tier.serve([token + 1000 for token in TOKENS])
    for pages in (4, 3, 2, 1, 0):  # the chain that was used longest ago, block by block
        prefix = tier.attach([token + 1000 for token in TOKENS])
        assert len(prefix.pages) == 4
        taken = tier.allocator.alloc(4 - pages)
        tier.allocator.free(taken)
        tier.store.release(prefix)
        prefix = tier.attach(TOKENS)
        assert len(prefix.pages) == pages
        tier.check(TOKENS, prefix)
        tier.store.release(prefix)
        tier.store.release(tier.attach([token + 1000 for token in TOKENS]))


def test_attach_waits_for_its_time_and_no_longer(storage: MemoryStorage) -> None:
    full(storage)
    tier = Tier(storage, is_manual=True)
    pauses = list[float]()
    prefix = tier.store.attach(TOKENS, 1.0, lambda: sum(pauses), pauses.append)
    assert prefix.n_tokens == 0
    assert 1.0 <= sum(pauses) < 1.1
    tier.check_nothing_is_held()
    tier.connector.is_manual = False
    prefix = tier.store.attach(TOKENS, 1.0, lambda: sum(pauses), pauses.append)
    assert prefix.n_tokens == 4 * PAGE
    tier.end(prefix)


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


def test_pages_that_are_being_written_are_not_written_twice(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True)
    pages = tier.publish(TOKENS)
    attach = tier.store.begin(LONGER)
    tier.connector.answer(1)
    prefix = tier.attached(attach)
    assert prefix.pages == tuple(pages)
    more = tier.compute(LONGER, prefix)
    tier.store.publish(LONGER, more, len(LONGER), first_page=4, sidecar=tier.sidecar(LONGER, 4))
    assert [[page.key for page in write.pages] for write in tier.connector.writes.values()] == [
        page_keys(LONGER)[:4],
        page_keys(LONGER)[4:],
    ]
    tier.allocator.free(pages)
    tier.allocator.free(more)
    for number in list(tier.connector.writes):
        tier.connector.finish_write(number)
    tier.check_nothing_is_held()


def test_what_a_write_did_not_store_is_written_again(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True)
    pages = tier.publish(TOKENS)
    tier.connector.finish_write(0, count=1)
    tier.store.step()
    assert (tier.store.counters.written_pages, tier.store.counters.failed_pages) == (1, 3)
    pages = pages + tier.compute(LONGER)[4:]
    tier.store.publish(LONGER, pages, len(LONGER), first_page=4, sidecar=tier.sidecar(LONGER, 4))
    (write,) = tier.connector.writes.values()
    assert [page.key for page in write.pages] == page_keys(LONGER)[1:]


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
    tier.end(prefix)


def test_a_prompt_that_is_all_in_the_pool_is_looked_up_all_the_same(storage: MemoryStorage) -> None:
    """So that the storage knows that it is used, and what follows a block that it lost is not stored in vain."""
    tier = Tier(storage)
    tier.serve(TOKENS)
    tier.connector.is_manual = True
    prefix = tier.store.poll(tier.store.begin(TOKENS))
    assert prefix is not None  # without waiting
    (number,) = tier.connector.lookups
    del storage.blocks[page_keys(TOKENS)[2]]
    tier.connector.answer(number)
    tier.store.step()
    pages = tier.compute(LONGER, prefix)
    tier.store.publish(LONGER, pages, len(LONGER), first_page=4, sidecar=tier.sidecar(LONGER, 4))
    tier.allocator.free(pages)
    (number,) = tier.connector.writes
    tier.connector.finish_write(number)
    assert set(storage.blocks) == set(page_keys(LONGER))
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


def test_a_stored_block_does_not_count_as_stored_for_ever(storage: MemoryStorage) -> None:
    tier = Tier(storage)
    tier.serve(TOKENS)
    storage.blocks.clear()
    tier.allocator.free(tier.allocator.alloc(16))  # out of the pool, too
    tier.serve(TOKENS)  # in the same pages, perhaps
    assert set(storage.blocks) == set(page_keys(TOKENS))


def test_no_more_pages_are_held_for_writing_than_allowed(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True, pages=6, most_writing=0.5)
    pages = tier.publish(TOKENS)
    tier.allocator.free(pages)
    assert tier.allocator.in_use == 3
    assert tier.store.counters.dropped_pages == 1
    tier.connector.finish_write(0)
    tier.check_nothing_is_held()


def test_flush_waits_for_writes_in_flight(storage: MemoryStorage) -> None:
    tier = Tier(storage, is_manual=True)
    tier.publish(TOKENS)
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


# Prompts share beginnings: a digit per page says which way a chain goes.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


ENDINGS = ["arrive", "arrive", "arrive", "arrive all", "arrive all", "break", "hang", "let go"]


def tokens_of(path: list[int]) -> list[int]:
    return [digit * 100 + offset for digit in path for offset in range(PAGE)] + [7]


class PrefixMachine(RuleBasedStateMachine):
    """Engines attach and publish while the storage does what it likes."""

    @initialize(sidecar=st.sampled_from(["", "optional", "required"]))
    def start(self, sidecar: str) -> None:
        storage = MemoryStorage()
        self.tiers = [Tier(storage, sidecar=sidecar, pages=9, is_manual=True) for _ in range(2)]
        filler = Tier(storage, sidecar=sidecar, pages=64)
        for number in range(16):  # every path of four digits
            filler.serve(tokens_of([number >> digit & 1 for digit in range(4)]))
        self.attaching: list[tuple[Tier, list[int], PrefixAttach]] = []
        self.attached: list[tuple[Tier, list[int], AttachedPrefix]] = []

    @rule(engine=st.integers(0, 1), path=PATHS)
    def begin(self, engine: int, path: list[int]) -> None:
        tier = self.tiers[engine]
        self.attaching.append((tier, tokens_of(path), tier.store.begin(tokens_of(path))))

    @rule(which=st.integers(0, 100))
    @precondition(lambda self: self.attaching)
    def poll(self, which: int) -> None:
        tier, tokens, attach = self.attaching[which % len(self.attaching)]
        prefix = tier.store.poll(attach)
        if prefix is not None:
            self.attaching.pop(which % len(self.attaching))
            self.attached.append((tier, tokens, prefix))

    @rule(which=st.integers(0, 100))
    @precondition(lambda self: self.attaching)
    def abort(self, which: int) -> None:
        tier, _, attach = self.attaching.pop(which % len(self.attaching))
        tier.store.abort(attach)
        assert tier.store.poll(attach) is None
        tier.store.abort(attach)  # once more is fine

    @rule(which=st.integers(0, 100), publishes=st.booleans())
    @precondition(lambda self: self.attached)
    def finish(self, which: int, publishes: bool) -> None:
        tier, tokens, prefix = self.attached.pop(which % len(self.attached))
        first = len(prefix.pages)
        pages = list(prefix.pages)
        if publishes and tier.allocator.available >= (len(tokens) // PAGE) - first:
            pages = tier.compute(tokens, prefix)
            tier.store.publish(tokens, pages, len(tokens), first_page=first, sidecar=tier.sidecar(tokens, first))
        tier.allocator.free(pages)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        tier = self._one_with(data, "lookups")
        if tier is not None:
            tier.connector.answer(data.draw(st.sampled_from(sorted(tier.connector.lookups))))

    @rule(data=st.data(), ending=st.sampled_from(ENDINGS))
    def move_bytes(self, data: st.DataObject, ending: str) -> None:
        tier = self._one_with(data, "loads")
        if tier is None:
            return
        number = data.draw(st.sampled_from(sorted(tier.connector.loads)))
        left = tier.connector.loads[number].left
        if ending == "let go":
            tier.connector.let_go(number)
        elif ending == "arrive all":
            tier.connector.arrive(number, *left)
        elif ending == "break":
            tier.connector.break_after(number, data.draw(st.integers(0, 400)))
        elif left and not tier.connector.loads[number].is_done:
            part = data.draw(st.sampled_from(left))
            if ending == "hang":
                tier.connector.fail(number, part, hangs=True)
            else:
                tier.connector.arrive(number, part)

    @rule(data=st.data(), count=st.integers(0, 4))
    def end_write(self, data: st.DataObject, count: int) -> None:
        tier = self._one_with(data, "writes")
        if tier is not None:
            tier.connector.finish_write(data.draw(st.sampled_from(sorted(tier.connector.writes))), count)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        storage = self.tiers[0].connector.storage
        free = [key for key in storage.blocks if not storage.pins.get(key)]
        if free:
            del storage.blocks[data.draw(st.sampled_from(free))]

    @rule(engine=st.integers(0, 1))
    def evict(self, engine: int) -> None:
        """Let another request have all pages that are not held, and write over them."""
        tier = self.tiers[engine]
        pages = tier.allocator.alloc(tier.allocator.available)
        for page in pages:
            for piece in tier.host.page_pieces(page):
                piece.fill_(0xDD)
            if tier.spec is not None:
                tier.host.sidecar(tier.sidecar_name)[page] = 0xDD
        tier.allocator.free(pages)

    @rule(engine=st.integers(0, 1))
    def step(self, engine: int) -> None:
        self.tiers[engine].store.step()

    @invariant()
    def bytes_are_right(self) -> None:
        for tier, tokens, prefix in getattr(self, "attached", []):
            tier.check(tokens, prefix)

    def teardown(self) -> None:
        for tier, _, attach in getattr(self, "attaching", []):
            tier.store.abort(attach)
        for tier, tokens, prefix in getattr(self, "attached", []):
            tier.check(tokens, prefix)
            tier.store.release(prefix)
        for tier in getattr(self, "tiers", []):
            for number in list(tier.connector.lookups):
                tier.connector.answer(number)
            for number in list(tier.connector.writes):
                tier.connector.finish_write(number)
            for load in tier.connector.loads.values():
                load.hanging.clear()
            tier.store.step()
        for tier in getattr(self, "tiers", []):  # all of them have let go of the storage they share
            tier.check_nothing_is_held()

    def _one_with(self, data: st.DataObject, what: str) -> Tier | None:
        tiers = [tier for tier in self.tiers if getattr(tier.connector, what)]
        return data.draw(st.sampled_from(tiers)) if tiers else None


TestPrefixMachine: Any = PrefixMachine.TestCase


TestPrefixMachine.settings = settings(max_examples=examples(600), stateful_step_count=30, deadline=None)


KV = format_of(MHA)


PARAMETERS = {"index_dim": 128, "scale_format": "f32"}


def test_the_name_of_a_sidecar() -> None:
    name = KV.sidecar_spec("dsa", PARAMETERS)
    assert name == f"index.dsa.{fingerprint8(KV, 'dsa', PARAMETERS)}"
    assert name == KV.sidecar_spec("dsa", dict(reversed(PARAMETERS.items())))
    assert len(name) == len("index.dsa.") + 8
    # Fixed for good: with another number every sidecar that is stored is lost.
    assert fingerprint8(KV, "dsa", PARAMETERS) == "85b43b0b"


def test_another_algorithm_parameter_or_format_has_another_fingerprint() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"kind": "mla"}, {"model": "other"}, {"weights": "1"}, {"kv_dtype": "bf16"}, {"layout": "page_head"},
        {"page_tokens": 8}, {"shape": "other"}, {"rope": {"theta": 500_000.0}},
    ]  # fmt: skip
    geometries = [MLA, replace(MHA, num_layers=3), replace(MHA, start_layer=2), replace(MHA, dtype=KVDtype.FP8)]
    geometries += [replace(MHA, num_kv_heads=4), replace(MHA, head_dim=8), replace(MHA, v_head_dim=8)]
    formats = [*(replace(KV, **change) for change in changes), *map(format_of, geometries)]
    formats += [format_of(MHA, Layout.LAYER_FIRST), *(format_of(MHA, first_head=first) for first in (2, 4))]
    found = [fingerprint8(kv, "dsa", PARAMETERS) for kv in formats]
    found += [fingerprint8(KV, "quest", PARAMETERS)]
    found += [fingerprint8(KV, "dsa", changed) for changed in ({**PARAMETERS, "index_dim": 64}, {})]
    assert len(set(found)) == len(found)


def test_the_protocol_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvcm.gpu_tier.connector"
    subprocess.run([sys.executable, "-c", code], check=True)
