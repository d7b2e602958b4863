"""Lookups: match modes, required specs, recorded reads and read leases (wire.md 5.3 and 14, decisions 13 and 18)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from cache_rig import Rig, TableView, group, instance, location, opened
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.cache.instance_cache import BATCH_KEYS, InstanceCache
from kvcm.cache.prefix_match import AccessRecorder, CacheObserver, Match, MatchMode, MatchQuery, match
from kvcm.cache.read_leases import MAX_LEASE_MS, ReadLease
from kvcm.index.backends.backend import Access
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import CapacityError, InvalidArgumentError
from kvcm.model.groups import EvictionPolicy
from kvcm.model.instances import Placement
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.protocol import meta_service_pb2

# ── Match modes ──


BATCH, PREFIX, WINDOW, MAMBA = (
    MatchMode.BATCH_GET,
    MatchMode.PREFIX_MATCH,
    MatchMode.REVERSE_ROLL_SW_MATCH,
    MatchMode.PREFIX_MATCH_WITH_MAMBA,
)
SPECS = ("kv", "state")
FIXED = settings(max_examples=examples(300))


class AllUp:
    generation = 0

    def rank(self, storage: str) -> int | None:
        return 1


async def cache_of(specs: Mapping[int, Iterable[str]], hidden: Iterable[int] = ()) -> InstanceCache:
    """Blocks with these specs, of which those without any are not there, and blocks that are still being written."""
    registered = instance({"kv": 10, "state": 10}, {"light": ("kv",), "full": SPECS})
    cache = InstanceCache(registered, Placement(1, 16), MetaIndex(MemoryBackend(), AllUp()))
    places = {key: location("a", SPECS, LocationStatus.WRITING, location_id=str(key)) for key in hidden}
    for key, names in specs.items():
        if names:
            places[key] = location("a", tuple(sorted(names)), location_id=str(key))
    await cache.index.put({key: BlockRecord(None, 0, (place,)) for key, place in places.items()})
    return cache


def shown(found: Match) -> list[str]:
    """Per entry the key and its specs as in `3:kv+state`; `-` for a placeholder."""
    answer = meta_service_pb2.GetCacheLocationResponse.FromString(b"".join(found.chunks))
    entries = []
    for each in answer.locations:
        uris = {spec.name: spec.uri for spec in each.location_specs}
        if any(uris.values()):
            (key,) = {uri.rpartition("/")[2].partition("?")[0] for uri in uris.values()}
            entries.append(f"{key}:{'+'.join(uris)}")
        else:
            assert (each.type, each.spec_size) == (0, 2)
            entries.append("-")
    return entries


async def ask(
    cache: InstanceCache, mode: MatchMode, keys: Sequence[int], **fields: object
) -> tuple[list[str], list[int]]:
    found = await match(cache, MatchQuery(mode, keys, **fields))  # type: ignore[arg-type]
    return shown(found), list(found.keys)


def both(*keys: int) -> list[str]:
    return [f"{key}:kv+state" for key in keys]


@pytest.mark.parametrize(("count", "window"), [(3, 0), (3, -1), (3, 4), (0, 0), (0, 1)])
async def test_a_window_that_does_not_fit_is_refused(count: int, window: int) -> None:
    cache = await cache_of(dict.fromkeys(range(3), SPECS))
    with pytest.raises(InvalidArgumentError, match=f"sw_size is {window}, must be from 1 to .* {count}"):
        await ask(cache, WINDOW, range(count), window=window)


async def test_a_block_without_all_full_attention_ends_the_mamba_prefix() -> None:
    cache = await cache_of({1: SPECS, 2: ("state",), 3: SPECS})
    assert await ask(cache, MAMBA, [1, 2, 3]) == (both(1), [1])


async def test_the_mamba_prefix_is_the_plain_one_where_no_spec_is_linear() -> None:
    cache = InstanceCache(instance({"kv": 10}), Placement(1, 16), MetaIndex(MemoryBackend(), AllUp()))
    await cache.index.put({1: BlockRecord(None, 0, (location("a", ("kv",), location_id="1"),))})
    assert await ask(cache, MAMBA, [1, 2]) == (["1:kv"], [1])


# All modes against one oracle.


def oracle(
    mode: MatchMode, keys: list[int], masked: list[bool], window: int, full: set[int], light: set[int]
) -> tuple[list[str], list[int]]:
    entry = {key: f"{key}:kv" for key in light} | {key: f"{key}:kv+state" for key in full}
    hit = [key in entry and not off for key, off in zip(keys, masked, strict=True)]
    if mode is BATCH:
        return [entry[k] if h else "-" for k, h in zip(keys, hit, strict=True)], [
            k for k, h in zip(keys, hit, strict=True) if h
        ]
    if mode is WINDOW:
        starts = [s for s in range(len(keys) - window + 1) if all(hit[s : s + window])]
        inside = set(range(starts[-1], starts[-1] + window)) if starts else set()
        return [entry[k] if i in inside else "-" for i, k in enumerate(keys)], [keys[i] for i in sorted(inside)]
    rest = [key for key, off in zip(keys, masked, strict=True) if not off]
    prefixes = [rest[:n] for n in range(len(rest) + 1) if all(key in entry for key in rest[:n])]
    if mode is MAMBA:
        prefixes = [prefix for prefix in prefixes if not prefix or prefix[-1] in full]
    longest = max(prefixes, key=len)
    return [entry[key] for key in longest], longest


@FIXED
@given(
    mode=st.sampled_from(MatchMode),
    keys=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    mask=st.builds(BlockMask, st.integers(-1, 13))
    | st.builds(BlockMask, st.none(), st.lists(st.booleans()).map(tuple)),
    window=st.integers(1, 4),
    full=st.sets(st.integers(0, 9)),
    light=st.sets(st.integers(0, 9)),
)
async def test_any_query_against_the_rules(
    mode: MatchMode, keys: list[int], mask: BlockMask, window: int, full: set[int], light: set[int]
) -> None:
    """Masked positions have no entry, or a placeholder; keys behind a masked hole go on."""
    light -= full
    window = min(window, len(keys))
    stored = dict.fromkeys(full, SPECS) | dict.fromkeys(light, SPECS[:1])
    cache = await cache_of(stored, hidden=set(range(10)) - full - light)
    unmasked = range(len(keys)) if mask.offset is None else range(mask.offset, len(keys)) if mask.offset >= 0 else ()
    flags = mask.flags or ()
    masked = [i not in unmasked or (i < len(flags) and flags[i]) for i in range(len(keys))]
    answer = await ask(cache, mode, keys, mask=mask, window=window)
    assert answer == oracle(mode, keys, masked, window, full, light)


# Spec names.


@pytest.mark.parametrize("mode", MatchMode)
async def test_only_the_named_specs_are_returned(mode: MatchMode) -> None:
    """After matching; placeholders are filtered too, `spec_size` still counts all, unknown names leave nothing."""
    cache = await cache_of(dict.fromkeys((1, 2), SPECS))
    for names, left in (({"state"}, ["state"]), ({"kv", "state"}, ["kv", "state"]), ({"nothing"}, [])):
        found = await match(cache, MatchQuery(mode, [1, 2, 3], window=2, spec_names=frozenset(names)))
        answer = meta_service_pb2.GetCacheLocationResponse.FromString(b"".join(found.chunks))
        assert [[spec.name for spec in each.location_specs] for each in answer.locations] == [left] * len(
            answer.locations
        )
        assert {each.spec_size for each in answer.locations} == {2}
        assert list(found.keys) == [1, 2]


# ── Required specs ──


async def found(cache: InstanceCache, query: MatchQuery) -> tuple[list[bool], list[set[str]]]:
    """Return which keys were hit, and the specs of each entry."""
    answer = meta_service_pb2.GetCacheLocationResponse()
    result = await match(cache, query)
    answer.MergeFromString(b"".join(result.chunks))
    entries = [{spec.name for spec in each.location_specs if spec.uri} for each in answer.locations]
    return [key in result.keys for key in query.keys], entries


@settings(max_examples=examples(200))
@given(
    st.lists(st.sets(st.sampled_from(SPECS)).map(frozenset), min_size=1, max_size=8),
    st.sets(st.sampled_from(SPECS), min_size=1).map(frozenset),
    st.lists(st.booleans(), max_size=8),
    st.integers(1, 4),
)
async def test_blocks_without_a_required_spec_are_missing(
    specs: list[frozenset[str]], needed: frozenset[str], flags: list[bool], window: int
) -> None:
    """Invariant 1, for readers that need several parts: the oracle is a match over the blocks that have them."""
    keys, mask = list(range(len(specs))), BlockMask(flags=tuple(flags[: len(specs)]))
    real = await cache_of(dict(enumerate(specs)))
    ideal = await cache_of({key: names for key, names in enumerate(specs) if needed <= names})
    for mode, sw_size in (
        (MatchMode.PREFIX_MATCH, 0),
        (MatchMode.BATCH_GET, 0),
        (MatchMode.REVERSE_ROLL_SW_MATCH, min(window, len(specs))),
    ):
        asked = MatchQuery(mode, keys, mask, sw_size, needed)
        required = MatchQuery(mode, keys, mask, sw_size, needed, requires_specs=True)
        hits, entries = await found(real, required)
        assert (hits, entries) == await found(ideal, asked)
        assert all(not names or names == needed for names in entries)


# ── Access recording ──


class CountingBackend(MemoryBackend):
    """The memory backend, keeping the reads that the manager reports."""

    def __init__(self) -> None:
        super().__init__()
        self.most_touched = BATCH_KEYS
        self.touched: list[dict[int, int]] = []
        self.moved: list[bool] = []

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        self.touched.append(dict(counts))
        self.moved.append(moves)
        await super().touch(counts, at, moves=moves)


def new_cache(uid: int) -> tuple[InstanceCache, CountingBackend]:
    backend = CountingBackend()
    return InstanceCache(instance(), Placement(uid, 16), MetaIndex(backend, TableView())), backend


@settings(max_examples=examples(100))
@given(
    reads=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 9), max_size=6), st.booleans()), max_size=20)
)
async def test_counts_are_merged_per_instance_and_none_is_lost(reads: list[tuple[int, list[int], bool]]) -> None:
    """And they come in the order of the last reads, of which those of a request run from its tail to its head."""
    recorder = AccessRecorder(FakeClock())
    caches = [new_cache(uid) for uid in range(2)]
    expected: list[Counter[int]] = [Counter(), Counter()]
    order: list[list[int]] = [[], []]
    for which, keys, drained in reads:
        recorder.record(caches[which][0], keys)
        expected[which].update(keys)
        order[which] += keys[::-1]
        if drained:
            await recorder.drain()
            assert recorder.pending_count == 0
            for reads_in_order, (_, backend) in zip(order, caches, strict=True):
                if reads_in_order:
                    assert list(backend.touched[-1]) == list(dict.fromkeys(reads_in_order[::-1]))[::-1]
                reads_in_order.clear()
    assert recorder.pending_count <= sum(map(Counter.total, expected))
    await recorder.drain()
    for counts, (_, backend) in zip(expected, caches, strict=True):
        reported: Counter[int] = Counter()
        for page in backend.touched:
            reported.update(page)
        assert reported == counts
    assert recorder.dropped == 0


async def test_many_reads_are_drained_in_pages() -> None:
    recorder, (cache, backend) = AccessRecorder(FakeClock()), new_cache(1)
    for _ in range(2):
        recorder.record(cache, range(2 * BATCH_KEYS + 10))
    await recorder.drain()
    assert [key for page in backend.touched for key in page] == [*range(2 * BATCH_KEYS + 10)][::-1]
    assert {count for page in backend.touched for count in page.values()} == {2}


@pytest.mark.parametrize(("is_shared", "most"), [(False, 256), (True, BATCH_KEYS)])
async def test_a_drain_gives_way(is_shared: bool, most: int) -> None:
    """Small requests and large ones: no more than about a slice of keys is worked on without a pause."""
    recorder, (cache, backend) = AccessRecorder(FakeClock()), new_cache(1)
    backend.is_shared = is_shared
    for keys in (*(range(n, n + 10) for n in range(100)), range(1000, 3000)):
        recorder.record(cache, keys)
    pauses, drain = 0, asyncio.create_task(recorder.drain())
    while not drain.done():
        pauses += 1
        await asyncio.sleep(0)
    assert max(map(len, backend.touched)) == most
    assert pauses >= 3000 / 300 + len(backend.touched)


@pytest.mark.parametrize(
    ("policy", "moves"),
    [
        (EvictionPolicy("lru"), True),
        (EvictionPolicy("sieve"), False),
        (EvictionPolicy("ttl"), False),
        (EvictionPolicy("ttl", 5, ttl_sliding=True), True),
    ],
)
async def test_reads_move_blocks_only_where_the_policy_orders_by_reads(policy: EvictionPolicy, moves: bool) -> None:
    cache, backend = new_cache(1)
    recorder = AccessRecorder(FakeClock(), lambda asked: policy if asked is cache else EvictionPolicy())
    recorder.record(cache, [1])
    await recorder.drain()
    assert backend.moved == [moves]


async def test_the_policy_is_that_of_the_group_at_the_time_of_the_drain(rig: Rig) -> None:
    await rig.store([1, 2])
    index = rig.manager.cache("i").index
    (written, _) = await index.accesses([1, 2])
    assert written is not None
    groups = rig.manager._registry.groups
    group = groups.get("group")
    strategy = replace(group.cache_config.reclaim_strategy, policy=EvictionPolicy("fifo"))
    config = replace(group.cache_config, reclaim_strategy=strategy)
    await groups.update(replace(group, cache_config=config, version=group.version + 1), group.version)
    rig.wait(60)
    await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.PREFIX_MATCH, [1, 2]))
    await rig.manager.accesses.drain()
    assert await index.accesses([1, 2]) == [Access(written.at, 1)] * 2


async def test_what_waits_is_bounded_and_the_newest_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.prefix_match._MOST_KEYS", 10)
    recorder, (cache, backend) = AccessRecorder(FakeClock()), new_cache(1)
    for keys in ([1] * 6, [2] * 5, [3] * 4):
        recorder.record(cache, keys)
    assert (recorder.pending_count, recorder.dropped) == (10, 5)
    await recorder.drain()
    assert backend.touched == [{1: 6, 3: 4}]
    recorder.record(cache, [2] * 10)
    assert (recorder.pending_count, recorder.dropped) == (10, 5)


@pytest.mark.parametrize(("peek", "reads"), [(False, [1, 1, 0]), (True, [0, 0, 0])])
async def test_a_match_counts_what_it_hit_unless_it_only_peeks(rig: Rig, peek: bool, reads: Sequence[int]) -> None:
    await rig.store([1, 2, 3])
    index = rig.manager.cache("i").index
    before = await index.accesses([1, 2, 3])
    rig.wait(60)
    await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.PREFIX_MATCH, [1, 2, 99]), peek=peek)
    await rig.manager.accesses.drain()
    at = int(rig.clock.now())
    expected = [Access(at, 1) if count else old for count, old in zip(reads, before, strict=True)]
    assert await index.accesses([1, 2, 3]) == expected


async def test_times_between_reads_are_reported_of_some_blocks() -> None:
    clock, seconds = FakeClock(), list[float]()
    recorder = AccessRecorder(clock)
    recorder.observer = cast("CacheObserver", SimpleNamespace(on_revisits=lambda _instance, each: seconds.append(each)))
    cache, _ = new_cache(0)
    await cache.index.put({key: BlockRecord(None, 0, (location("a"),)) for key in range(640)})
    for _ in range(3):  # nothing is reported of the first read
        recorder.record(cache, range(640))
        await recorder.drain()
        clock.time += 7
    assert set(seconds) == {7.0}
    assert 2 <= len(seconds) / 2 <= 30  # about one in 64


# ── Read leases ──


async def lease(rig: Rig, keys: list[int], lease_ms: int) -> ReadLease:
    found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, keys))
    return await rig.manager.lease(rig.manager.cache("i"), found, lease_ms)


async def left(rig: Rig, keys: list[int]) -> list[int]:
    """Which blocks still have a record after everything due was deleted."""
    await rig.executor.run_due()
    return [key for key, statuses in zip(keys, await rig.statuses(keys), strict=True) if statuses]


async def test_a_lease_keeps_the_bytes_and_nothing_else() -> None:
    with opened(group(delay_ms=1000)) as rig:
        await rig.store([1, 2, 3])
        held = await lease(rig, [1, 2, 9], 60_000)
        uid = rig.manager.cache("i").placement.uid
        assert [pin[:2] for pin in held.locations] == [(uid, 1), (uid, 2)]
        await rig.manager.trim(rig.manager.cache("i"))
        found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, [1, 2, 3]))
        assert list(found.keys) == []
        rig.wait(1)
        assert await left(rig, [1, 2, 3]) == [1, 2]
        rig.wait(58.5)
        assert await left(rig, [1, 2, 3]) == [1, 2]
        rig.wait(0.5)
        await rig.executor.run_due()
        rig.wait(1)
        assert await left(rig, [1, 2, 3]) == []


async def test_a_lease_that_is_released_early_does_not_hold_bytes_to_its_old_end() -> None:
    """The executor checked while the lease was open; a block held for minutes must go soon after the release."""
    with opened(group(delay_ms=1000)) as rig:
        await rig.store([1])
        held = await lease(rig, [1], MAX_LEASE_MS)
        await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
        rig.wait(1)
        assert await left(rig, [1]) == [1]
        await rig.manager.release_lease(rig.manager.cache("i"), held.id)
        rig.wait(1)
        assert await left(rig, [1]) == []


@pytest.mark.parametrize("lease_ms", [0, -1, MAX_LEASE_MS + 1])
async def test_durations_are_bounded(rig: Rig, lease_ms: int) -> None:
    await rig.store([1])
    held = await lease(rig, [1], MAX_LEASE_MS)
    named = f"read_lease_ms is {lease_ms}, must be from 1 to {MAX_LEASE_MS}"
    with pytest.raises(InvalidArgumentError, match=named):
        await lease(rig, [1], lease_ms)
    with pytest.raises(InvalidArgumentError, match=named):
        await rig.manager.renew_lease(rig.manager.cache("i"), held.id, lease_ms)


async def test_leases_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.read_leases._MAX_LEASES", 2)
    with opened() as rig:
        await rig.store([1])
        for _ in range(2):
            await lease(rig, [1], 1_000)
        with pytest.raises(CapacityError, match="2 read leases"):
            await lease(rig, [1], 1_000)
        rig.wait(1)
        await lease(rig, [1], 1_000)


async def test_pinned_locations_are_bounded_over_all_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.read_leases._MAX_LEASED_LOCATIONS", 5)
    with opened() as rig:
        await rig.store([1, 2, 3])
        first = await lease(rig, [1, 2, 3], 60_000)
        with pytest.raises(CapacityError, match="5 locations"):
            await lease(rig, [1, 2, 3], 60_000)
        await rig.manager.release_lease(rig.manager.cache("i"), first.id)
        await lease(rig, [1, 2, 3], 60_000)
