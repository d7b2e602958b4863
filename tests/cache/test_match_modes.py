"""The match modes (wire.md 5.3 and 14, decision 13) against oracles that spell the rules out."""

from collections.abc import Sequence

import pytest
from cache_rig import instance, location
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.match import Match, MatchMode, MatchQuery, match
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import Placement
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.protocol import meta_service_pb2

BATCH, PREFIX, WINDOW, MAMBA = (
    MatchMode.BATCH_GET,
    MatchMode.PREFIX_MATCH,
    MatchMode.REVERSE_ROLL_SW_MATCH,
    MatchMode.PREFIX_MATCH_WITH_MAMBA,
)
SPECS = ("kv", "state")
FIXED = settings(max_examples=300, deadline=None, derandomize=True)


class AllUp:
    generation = 0

    def rank(self, storage: str) -> int | None:
        return 1


async def cache_with(full: Sequence[int] = (), light: Sequence[int] = (), hidden: Sequence[int] = ()) -> InstanceCache:
    """Blocks with both specs, with `kv` only, and blocks that are still being written."""
    registered = instance({"kv": 10, "state": 10}, {"light": ("kv",), "full": SPECS})
    cache = InstanceCache(registered, Placement(1, 16), MetaIndex(MemoryBackend(), AllUp()))
    records = {
        key: BlockRecord(None, 0, (location("a", SPECS, LocationStatus.WRITING, location_id=str(key)),))
        for key in hidden
    }
    records |= {key: BlockRecord(None, 0, (location("a", SPECS, location_id=str(key)),)) for key in full}
    records |= {key: BlockRecord(None, 0, (location("a", ("kv",), location_id=str(key)),)) for key in light}
    await cache.index.put(records)
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


# Prefix.


@pytest.mark.parametrize(
    ("keys", "mask", "hits"),
    [
        ([1, 2, 3], NO_MASK, [1, 2, 3]),
        ([1, 2, 9, 3], NO_MASK, [1, 2]),
        ([9, 1], NO_MASK, []),
        ([], NO_MASK, []),
        # Masked positions have no entry; keys behind a masked hole go on.
        ([9, 1, 2], BlockMask(offset=1), [1, 2]),
        ([1, 9, 2, 3], BlockMask(flags=(False, True)), [1, 2, 3]),
        ([1, 9, 2, 8], BlockMask(flags=(True, True, False, False)), [2]),
        ([1, 2], BlockMask(offset=2), []),
        ([1, 2], BlockMask(offset=-1), []),
        ([1, 1, 2], NO_MASK, [1, 1, 2]),
    ],
)
async def test_prefix_by_example(keys: list[int], mask: BlockMask, hits: list[int]) -> None:
    cache = await cache_with(full=[1, 2, 3], hidden=[9])
    assert await ask(cache, PREFIX, keys, mask=mask) == (both(*hits), hits)


# Batch.


@pytest.mark.parametrize(
    ("keys", "mask", "entries", "hits"),
    [
        ([1, 9, 2], NO_MASK, ["1:kv+state", "-", "2:kv+state"], [1, 2]),
        ([9, 8], NO_MASK, ["-", "-"], []),
        ([1, 2, 3], BlockMask(offset=2), ["-", "-", "3:kv+state"], [3]),
        ([1, 2, 1], BlockMask(flags=(True,)), ["-", "2:kv+state", "1:kv+state"], [2, 1]),
        ([], NO_MASK, [], []),
    ],
)
async def test_batch_has_one_entry_per_key(
    keys: list[int], mask: BlockMask, entries: list[str], hits: list[int]
) -> None:
    cache = await cache_with(full=[1, 2, 3], hidden=[9])
    assert await ask(cache, BATCH, keys, mask=mask) == (entries, hits)


# Window.


@pytest.mark.parametrize(
    ("keys", "window", "mask", "filled"),
    [
        ([1, 2, 3, 4], 2, NO_MASK, [2, 3]),
        ([1, 2, 9, 4], 2, NO_MASK, [0, 1]),
        ([1, 9, 2, 9, 3], 2, NO_MASK, []),
        ([1, 9, 2, 9, 3], 1, NO_MASK, [4]),
        ([1, 2, 3], 3, NO_MASK, [0, 1, 2]),
        ([9, 2, 3], 3, NO_MASK, []),
        # A masked position is never part of a window.
        ([1, 2, 3, 4], 2, BlockMask(flags=(False, False, False, True)), [1, 2]),
        ([1, 2, 3, 4], 2, BlockMask(offset=3), []),
    ],
)
async def test_window_by_example(keys: list[int], window: int, mask: BlockMask, filled: list[int]) -> None:
    cache = await cache_with(full=[1, 2, 3, 4], hidden=[9])
    entries = [f"{key}:kv+state" if i in filled else "-" for i, key in enumerate(keys)]
    assert await ask(cache, WINDOW, keys, window=window, mask=mask) == (entries, [keys[i] for i in filled])


@pytest.mark.parametrize(("count", "window"), [(3, 0), (3, -1), (3, 4), (0, 0), (0, 1)])
async def test_a_window_that_does_not_fit_is_refused(count: int, window: int) -> None:
    cache = await cache_with(full=[0, 1, 2])
    with pytest.raises(InvalidArgumentError, match=f"sw_size is {window}, must be from 1 to .* {count}"):
        await ask(cache, WINDOW, range(count), window=window)


# Prefix with linear-attention state.


@pytest.mark.parametrize(
    ("keys", "hits"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 11, 2, 12], [1, 11, 2]),
        ([11, 12], []),
        ([11, 1, 12, 9, 2], [11, 1]),
        ([], []),
    ],
)
async def test_the_mamba_prefix_ends_at_a_block_with_state(keys: list[int], hits: list[int]) -> None:
    cache = await cache_with(full=[1, 2, 3], light=[11, 12], hidden=[9])
    entries = [f"{key}:kv" if key > 10 else f"{key}:kv+state" for key in hits]
    assert await ask(cache, MAMBA, keys) == (entries, hits)


async def test_a_block_without_all_full_attention_ends_the_mamba_prefix() -> None:
    cache = await cache_with(full=[1, 3])
    await cache.index.put({2: BlockRecord(None, 0, (location("a", ("state",), location_id="2"),))})
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
    flags=st.lists(st.booleans(), max_size=12),
    window=st.integers(1, 4),
    full=st.sets(st.integers(0, 9)),
    light=st.sets(st.integers(0, 9)),
)
async def test_any_query_against_the_rules(
    mode: MatchMode, keys: list[int], flags: list[bool], window: int, full: set[int], light: set[int]
) -> None:
    light -= full
    window = min(window, len(keys))
    cache = await cache_with(sorted(full), sorted(light), hidden=sorted(set(range(10)) - full - light))
    masked = [i < len(flags) and flags[i] for i in range(len(keys))]
    answer = await ask(cache, mode, keys, mask=BlockMask(flags=tuple(flags)), window=window)
    assert answer == oracle(mode, keys, masked, window, full, light)


# Spec names.


@pytest.mark.parametrize("mode", MatchMode)
async def test_only_the_named_specs_are_returned(mode: MatchMode) -> None:
    """After matching; placeholders are filtered too, `spec_size` still counts all, unknown names leave nothing."""
    cache = await cache_with(full=[1, 2])
    for names, left in (({"state"}, ["state"]), ({"kv", "state"}, ["kv", "state"]), ({"nothing"}, [])):
        found = await match(cache, MatchQuery(mode, [1, 2, 3], window=2, spec_names=frozenset(names)))
        answer = meta_service_pb2.GetCacheLocationResponse.FromString(b"".join(found.chunks))
        assert [[spec.name for spec in each.location_specs] for each in answer.locations] == [left] * len(
            answer.locations
        )
        assert {each.spec_size for each in answer.locations} == {2}
        assert list(found.keys) == [1, 2]
