"""PQCache's block cache and its buffers: what attention reads never depends on it, and it holds what its rules say."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from block_rigs import GEOMETRY, BlockRig
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.config import CACHE_POLICIES
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.manager.execution_buffer import BlockResidency, ExecutionBuffer, SteadyPlanner
from kvcm.gpu_tier.manager.residency import SparseBuffers
from kvcm.gpu_tier.manager.token_blocks import CachePlaces, TokenBlockPolicy
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.runtime import NullRuntime
from kvcm.gpu_tier.types import Selection, Source, SteadyRing, Unit


@dataclass
class Case:
    """A history: what the cache is like, and the seed of what happens."""

    seed: int
    policy: str
    cache_tokens: int
    k_cache: int
    unit: str
    layout: Layout
    layers_at_once: int


cases = st.builds(
    Case, st.integers(0, 1 << 30), st.sampled_from(CACHE_POLICIES), st.sampled_from([0, 4, 12, 120]),
    st.integers(1, 3), st.sampled_from(["block", "block", "token"]), st.sampled_from(Layout), st.integers(1, 3),
)  # fmt: skip


def rig_of(case: Case) -> BlockRig:
    blocks = max(1, case.cache_tokens // 4)
    changes = {"policy": case.policy, "cache_tokens": case.cache_tokens, "k_cache": min(case.k_cache, blocks)}
    return BlockRig(
        BlockRig.settings_of(**changes, cache_unit=case.unit, seed=case.seed),
        case.layout,
        layers_at_once=case.layers_at_once,
    )


@settings(max_examples=examples(120), deadline=None)
@given(cases)
def test_attention_reads_and_caches_the_right_blocks(case: Case) -> None:
    """Unequal lengths, growth, padding, rows that do not select, requests that come and go."""
    rng, rig = Random(case.seed), rig_of(case)
    for step in range(8):
        for request in range(rig.max_requests):
            if request not in rig.requests and rng.random() < 0.5:
                rig.admit(request, 100 * step + request, rng.choice([1, 3, 4, 9, 20, 60, 90]))
            elif request in rig.requests and rng.random() < 0.1:
                rig.release(request)
        requests = rng.sample(sorted(rig.requests), rng.randint(0, len(rig.requests)))
        if not requests:
            continue
        rig.decode(requests)
        padding = rng.randint(0, 2)
        batch = rig.batch(requests, padding)
        sparse = torch.tensor([rng.random() < 0.9 for _ in range(batch.rows)])
        for layer in range(GEOMETRY.num_layers):
            picked = rig.pick(requests, rng)
            for row in range(len(requests)):
                if not sparse[row]:
                    picked[row] = [[] for _ in picked[row]]
            rig.step(batch, layer, picked, sparse)


def one_request(tokens: int = 60, **changes: object) -> BlockRig:
    rig = BlockRig(BlockRig.settings_of(**changes))
    rig.admit(0, 9, tokens)
    return rig


def read(rig: BlockRig, *heads: list[int], layer: int = 0) -> set[int]:
    """Let the request's two heads select tokens, and return the blocks that are cached after that."""
    rig.step(rig.batch([0]), layer, [list(heads)])
    return {item for item in rig.cached(layer, 0)[0] if item >= 0}


def test_the_blocks_with_most_selected_tokens_of_all_heads_are_admitted() -> None:
    rig = one_request(k_cache=2)
    # Block b is tokens 3 + 4b to 6 + 4b. Hits: block 0 three, block 2 four (of two heads), block 5 two, block 7 three.
    assert read(rig, [3, 4, 11, 12, 23, 31, 32], [5, 11, 14, 24, 33]) == {2, 0}  # of 0 and 7 the lower one


def test_blocks_selected_again_stay_and_move_nothing() -> None:
    rig = one_request(k_cache=2)
    tokens = ([3, 4, 11, 12], [3, 11])
    read(rig, *tokens)
    before = rig.policy.counters
    moved = rig.transfer.counters.h2d_bytes
    assert read(rig, *tokens) == {0, 2}
    after = rig.policy.counters
    assert (after.admissions, rig.transfer.counters.h2d_bytes) == (before.admissions, moved)
    assert after.hits - before.hits == 6 == after.selected - before.selected
    assert (before.selected, before.hits, before.admissions, before.evictions) == (6, 0, 2, 0)
    assert after.hit_rate == 0.5


def test_a_token_of_a_cached_block_is_read_there_though_it_was_not_selected_before() -> None:
    rig = one_request()
    read(rig, [3], [])
    plan = rig.step(rig.batch([0]), 0, [[[6, 7], [4]]])
    assert plan.execution is not None
    kinds = [line[line >= 0].tolist() for line in plan.execution.runs.kind]
    steady = kinds[0].count(Source.STEADY)
    assert [kind[steady:] for kind in kinds] == [[Source.CACHE, Source.HOST], [Source.CACHE]]


def test_blocks_that_reach_into_the_recent_tokens_are_never_admitted() -> None:
    """60 tokens, the last 5 recent: block 12 (51 to 54) is all of the middle, block 13 is not."""
    rig = one_request()
    assert read(rig, [51, 52, 54], [51]) == {12}
    rig = one_request(tokens=59)
    assert read(rig, [50, 51, 52], [50]) == {11}  # block 12 has the recent token 54
    rig.decode([0])
    assert read(rig, [50, 51, 52], [51, 52]) == {11, 12}


def test_blocks_that_are_not_on_the_host_are_never_admitted() -> None:
    rig = one_request(tokens=60)
    rig.requests[0].local = 0  # the newest tokens are in the middle at once, and two of them on their way to the host
    rig.decode([0] * 3)
    assert rig.host_tokens.host_loc[0, 60] >= 0 > rig.host_tokens.host_loc[0, 61]
    assert read(rig, [59, 60], [59]) == set()  # block 14 is 59 to 62
    rig.decode([0] * 2)
    assert read(rig, [59, 60], [59]) == {14}


def test_a_token_that_is_nowhere_is_said_in_debug_mode() -> None:
    rig = one_request(tokens=60)
    rig.requests[0].local = 0
    rig.decode([0])
    with pytest.raises(StateError, match="1 selected tokens are neither cached nor on the host"):
        read(rig, [60], [40])


def test_the_cache_of_a_short_request_grows_with_it() -> None:
    rig = one_request(tokens=11, k_cache=4)
    assert [rig.policy.cache_slots(n) for n in (0, 3, 4, 11, 12, 16, 500)] == [0, 0, 4, 8, 12, 16, 16]
    assert read(rig, [3], [4]) == set()  # block 0 is 3 to 6, and 6 is recent
    rig.decode([0])
    rig.decode([0] * 8)
    assert read(rig, [3, 7], [11]) == {0, 1, 2}
    rig.decode([0] * 12)
    assert read(rig, [15, 19, 23], [23]) == {2, 3, 4, 5}  # four places, and the coldest of the three went


def test_a_dense_request_in_the_row_of_a_released_one_is_passed_over() -> None:
    rig = one_request()
    rig.admit(1, 4, 60)
    rig.step(rig.batch([0, 1]), 0, [[[5], [6]], [[7], [8]]])
    rig.policy.release(0)
    plan = rig.step(rig.batch([1, 0]), 2, [[[7], [9]], []], torch.tensor([True, False]))
    assert plan.execution is not None
    assert plan.execution.lens.tolist() == [[9, 9], [0, 0]]
    assert plan.execution.runs.count[2:].tolist() == [0, 0]
    assert cached_blocks(rig, 0) == [set(), set(), set()]


def cached_blocks(rig: BlockRig, request: int) -> list[set[int]]:
    return [{item for item in rig.cached(layer, request)[0] if item >= 0} for layer in range(3)]


def test_layers_are_decided_together_and_the_last_one_waits_for_no_other() -> None:
    rig = BlockRig(BlockRig.settings_of(), layers_at_once=2)
    rig.admit(0, 9, 60)
    batch = rig.batch([0])
    seen = []
    for layer in range(3):
        rig.step(batch, layer, [[[3 + 8 * layer], []]])
        seen.append(cached_blocks(rig, 0))
    assert seen == [[set(), set(), set()], [{0}, {2}, set()], [{0}, {2}, {4}]]


def test_layers_of_a_pass_that_was_cut_short_are_decided_without_those_of_the_next() -> None:
    rig = BlockRig(BlockRig.settings_of(), layers_at_once=3)
    rig.admit(0, 9, 60)
    rig.admit(1, 4, 40)
    rig.step(rig.batch([0]), 0, [[[3], []]])
    batch = rig.batch([1, 0])
    rig.step(batch, 0, [[[7], []], [[], [11]]])
    assert cached_blocks(rig, 0) == [{0}, set(), set()]
    for layer in (1, 2):
        rig.step(batch, layer, [[[7], []], [[], [11]]])
    assert cached_blocks(rig, 0) == [{0, 2}, {2}, {2}]
    assert cached_blocks(rig, 1) == [{1}, {1}, {1}]


def test_pending_admissions_end_with_their_request() -> None:
    rig = BlockRig(BlockRig.settings_of(), layers_at_once=3)
    for request in (0, 1):
        rig.admit(request, request, 60)
    rig.step(rig.batch([0, 1]), 0, [[[3], []], [[4], []]])
    rig.release(0)
    rig.admit(0, 5, 50)
    batch = rig.batch([1])
    for layer in range(3):
        rig.step(batch, layer, [[[11], []]])
    assert cached_blocks(rig, 0) == [set(), set(), set()]
    assert cached_blocks(rig, 1) == [{2}, {2}, {2}]


def test_single_tokens_are_cached_for_each_head() -> None:
    rig = one_request(cache_unit="token", cache_tokens=8, k_cache=1)
    rig.step(rig.batch([0]), 0, [[[10, 20, 30, 40, 50], [11]]])
    cached = [sorted(3 + item for item in head if item >= 0) for head in rig.cached(0, 0)]
    assert cached == [[10, 20, 30, 40], [11]]  # a block's worth of each head
    plan = rig.step(rig.batch([0]), 0, [[[11, 20], [10, 11]]])
    assert plan.execution is not None
    assert [int((line == Source.CACHE).sum()) for line in plan.execution.runs.kind] == [1, 1]


def test_selections_of_other_kinds_are_refused() -> None:
    rig = one_request()
    batch = rig.batch([0])
    good = rig.selection(batch, [[[5], [5]]])
    mask = torch.tensor([True])
    for bad in (
        Selection(Unit.TOKEN, 1, good.indices, good.lengths),
        Selection(Unit.TOKEN, 1, good.indices[:, :1], good.lengths[:, :1], steady=good.steady),
        Selection(Unit.PAGE, 4, good.indices, good.lengths, steady=good.steady),
    ):
        with pytest.raises(ConfigError, match="single tokens of 2 heads"):
            rig.policy.resolve(2, batch, bad, mask)


def test_it_needs_a_table_of_single_host_tokens() -> None:
    rig = one_request()
    rig.host_tokens.unit = 4
    with pytest.raises(ConfigError, match="single tokens"):
        TokenBlockPolicy(
            rig.settings, rig.execution, rig.host_tokens, rig.transfer, rig.runtime, max_requests=4, max_tokens=120
        )


LAYERS, REQUESTS = 2, 3


@dataclass
class Model:
    """A cache as the documents describe it: what each place holds, and when and how often it was used."""

    policy: str
    places: int
    held: dict[int, int] = field(default_factory=dict)  # place -> item
    used: dict[int, tuple[int, ...]] = field(default_factory=dict)  # place -> what the order is by
    uses: dict[int, int] = field(default_factory=dict)

    def step(self, wanted: list[int], clock: int, usable: int) -> list[tuple[int, int]]:
        """Return the (item, place) that have to be loaded."""
        at = {item: place for place, item in self.held.items()}
        for item in wanted:
            if item in at:
                self._touch(at[item], clock)
        free = [place for place in range(usable) if self.held.get(place) not in wanted]
        victims = sorted(free, key=lambda place: (place in self.held, self.used.get(place, ()), place))
        misses = [item for item in wanted if item not in at]
        loads = list(zip(misses, victims, strict=False))
        for item, place in loads:
            self.held[place] = item
            self.uses[place] = 1
            self.used[place] = (1, clock) if self.policy == "lfu" else (clock,)
        return loads

    def _touch(self, place: int, clock: int) -> None:
        self.uses[place] += 1
        if self.policy == "lru":
            self.used[place] = (clock,)
        elif self.policy == "lfu":
            self.used[place] = (self.uses[place], clock)


@dataclass
class PlacesCase:
    seed: int
    policy: str
    places: int
    items: int
    width: int
    heads: int


places_cases = st.builds(
    PlacesCase, st.integers(0, 1 << 30), st.sampled_from([p for p in CACHE_POLICIES if p != "random"]),
    st.integers(1, 9), st.integers(1, 25), st.integers(1, 9), st.sampled_from([1, 3]),
)  # fmt: skip


def cache_of(case: PlacesCase) -> CachePlaces:
    return CachePlaces(
        layers=LAYERS, max_requests=REQUESTS, heads=case.heads, places=case.places, items=case.items,
        policy=case.policy, seed=case.seed, device=torch.device("cpu"),
    )  # fmt: skip


def padded(items: list[int], width: int, rng: Random) -> list[int]:
    """Return items with -1 anywhere between them."""
    row = [-1] * width
    for place, item in zip(sorted(rng.sample(range(width), len(items))), items, strict=True):
        row[place] = item
    return row


@settings(max_examples=examples(200), deadline=None)
@given(places_cases)
def test_a_history_is_that_of_dictionaries(case: PlacesCase) -> None:
    rng = Random(case.seed)
    cache = cache_of(case)
    usable = torch.tensor([rng.randint(0, case.places) for _ in range(REQUESTS)] + [0])
    models: dict[tuple[int, int, int], Model] = {}
    clocks = [0] * LAYERS
    for _ in range(12):
        layer = rng.randrange(LAYERS)
        rows = rng.sample(range(REQUESTS), rng.randint(1, REQUESTS)) + [REQUESTS] * rng.randint(0, 2)
        picks = {
            (b, h): rng.sample(range(case.items), rng.randint(0, min(case.width, case.items)))
            for b, row in enumerate(rows) for h in range(case.heads) if row < REQUESTS
        }  # fmt: skip
        wanted = [[padded(picks.get((b, h), []), case.width, rng) for h in range(case.heads)] for b in range(len(rows))]
        loads = cache.update(torch.tensor([layer] * len(rows)), torch.tensor(rows), torch.tensor(wanted), usable[rows])
        for (b, h), items in picks.items():
            model = models.setdefault((layer, rows[b], h), Model(case.policy, case.places))
            expected = model.step(items, clocks[layer], int(usable[rows[b]]))
            count = int(loads.count[b, h])
            found = zip(loads.items[b, h, :count].tolist(), loads.places[b, h, :count].tolist(), strict=True)
            assert list(found) == expected
            assert (loads.items[b, h, count:] == -1).all()
            held = cache.held(layer, rows[b])[h].tolist()
            assert {place: item for place, item in enumerate(held) if item >= 0} == model.held
            at = {item: place for place, item in model.held.items()}
            places = cache.place_of(layer)[rows[b], h, : case.items].tolist()
            assert places == [at.get(item, -1) for item in range(case.items)]
        assert not loads.count[[b for b, row in enumerate(rows) if row == REQUESTS]].any()
        clocks[layer] += 1
        if rng.random() < 0.2:
            gone = rng.randrange(REQUESTS)
            cache.reset(gone)
            models = {key: model for key, model in models.items() if key[1] != gone}


def test_random_eviction_keeps_selected_items_and_repeats_with_its_seed() -> None:
    histories = []
    for seed in (1, 1, 2):
        rng, cache = Random(5), cache_of(PlacesCase(seed, "random", 6, 30, 4, 1))
        for _ in range(40):
            wanted = rng.sample(range(30), 4)
            cache.update(torch.tensor([0]), torch.tensor([1]), torch.tensor([[wanted]]), torch.tensor([6]))
            held = cache.held(0, 1)[0].tolist()
            assert set(wanted) <= set(held)
            assert len(set(held) - {-1}) == len([item for item in held if item >= 0])
        histories.append(held)
    assert histories[0] == histories[1] != histories[2]


ONE_HEAD = KVGeometry(KVKind.MHA, 1, 1, 4, 4, KVDtype.F32, page_size=4)


RING = SteadyRing(3, 5)


class HalfCached:
    """A policy whose cache holds half of a request's tokens; it only remembers what it was given."""

    def __init__(self) -> None:
        self.places: dict[int, list[list[int]]] = {}

    def cache_slots(self, n_tokens: int) -> int:
        return n_tokens // 8 * 4

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        assert ring is RING
        self.places.setdefault(request, []).append(buffer_slots.tolist())

    def release(self, request: int) -> None:
        self.places.pop(request, None)


def parts(pages: int = 12) -> tuple[BlockResidency, HalfCached, SparseBuffers]:
    policy: Any = HalfCached()
    runtime = NullRuntime()
    buffers = SparseBuffers(DeviceKVPool(ONE_HEAD, pages, runtime), 1)
    return BlockResidency(policy, ExecutionBuffer(ONE_HEAD, 2, 8, runtime)), policy, buffers


def test_a_buffer_grows_when_its_cache_does_and_places_stay() -> None:
    blocks, policy, buffers = parts()
    blocks.admit(0, RING, 16, buffers)
    for n in range(17, 41):
        blocks.grow(0, n, buffers)
    lengths = [len(places) for places in policy.places[0]]
    assert lengths == [RING.capacity + cache for cache in (8, 12, 16, 20)]
    for before, after in zip(policy.places[0], policy.places[0][1:], strict=False):
        assert after[: len(before)] == before
        assert len(set(after)) == len(after)
    assert buffers.item_slot(0, RING.position(9)) == policy.places[0][-1][RING.position(9)]


def test_a_buffer_that_cannot_grow_stays_as_it_was() -> None:
    blocks, policy, buffers = parts(pages=5)
    blocks.admit(0, RING, 16, buffers)
    with pytest.raises(PoolExhaustedError):
        blocks.grow(0, 24, buffers)
    assert len(policy.places[0]) == 1
    blocks.grow(0, 23, buffers)
    assert len(policy.places[0]) == 1


LATER_STAGE = KVGeometry(KVKind.MHA, 3, 2, 4, 4, KVDtype.F32, page_size=8, start_layer=5)


def test_padding_rows_have_no_slots() -> None:
    buffer = ExecutionBuffer(LATER_STAGE, 2, 8, NullRuntime())
    assert torch.equal(buffer.table_of(1), buffer.table[:1])
    table = buffer.table_of(4)
    assert torch.equal(table[:2], buffer.table)
    assert bool((table[2:] == -1).all())
    assert buffer.table_of(4) is table


@pytest.mark.parametrize(("rows", "tokens"), [(0, 8), (1, 0)])
def test_an_empty_buffer_is_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        ExecutionBuffer(LATER_STAGE, rows, tokens, NullRuntime())


@st.composite
def steady_cases(draw: st.DrawFn) -> tuple[SteadyRing, list[int], int, int]:
    """Return a ring, the slot of each place, the first recent token and the request's length."""
    ring = SteadyRing(draw(st.integers(0, 9)), draw(st.integers(1, 40)))
    page = draw(st.sampled_from([1, 4, 8]))
    pages = draw(st.permutations(range(2 + (ring.capacity + 2) // page)))
    slots = [page_ * page + offset for page_ in pages for offset in range(page)][2:]
    n = draw(st.integers(1, 200))
    recent = draw(st.integers(0, min(ring.ring, max(0, n - ring.sink))))
    return ring, slots[: ring.capacity], max(ring.sink, n - recent), n


@settings(max_examples=examples(400), deadline=None)
@given(steady_cases())
def test_runs_are_the_slots_of_the_steady_tokens(case: tuple[SteadyRing, list[int], int, int]) -> None:
    ring, slots, first, n = case
    places = SteadyPlanner(64, NullRuntime())
    places.admit(3, ring, torch.tensor(slots, dtype=torch.int32))
    runs = places.runs(3, first, n)
    tokens = [t for t in range(n) if t < ring.sink or t >= first]
    found = [src + i for src, count in zip(runs.src, runs.tokens, strict=True) for i in range(count)]
    assert found == [slots[ring.position(token)] for token in tokens]
    assert runs.total == len(tokens)
    assert runs.first.tolist() == [sum(runs.tokens[:i]) for i in range(len(runs.tokens))]
    # Not a run per token: the buffer's pages, twice where the ring's end is among them, and one for the sink.
    assert len(runs.src) <= len([i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]) + 3


def test_more_recent_tokens_than_places_are_refused() -> None:
    places = SteadyPlanner(64, NullRuntime())
    places.admit(0, SteadyRing(2, 4), torch.arange(6))
    assert places.runs(0, 6, 10).total == 6
    with pytest.raises(StateError, match="5 recent tokens"):
        places.runs(0, 5, 10)


def test_a_buffer_without_the_steady_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 steady places"):
        SteadyPlanner(64, NullRuntime()).admit(0, SteadyRing(2, 4), torch.arange(5))
