"""Matches that require specs: a block without one of them counts as missing, in every mode."""

from __future__ import annotations

from collections.abc import Sequence

from cache_rig import instance, location
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.match import MatchMode, MatchQuery, match
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.instances import Placement
from kvcm.model.locations import BlockRecord
from kvcm.model.masks import BlockMask
from kvcm.protocol import meta_service_pb2

SPECS = ("full", "window")


class AllUp:
    generation = 0

    def rank(self, storage: str) -> int | None:
        return 1


async def cache_of(specs: Sequence[frozenset[str]]) -> InstanceCache:
    """Blocks 0, 1, ... with these specs; those without any are not there."""
    registered = instance({"full": 10, "window": 10}, {"all": SPECS, "light": ("full",)})
    cache = InstanceCache(registered, Placement(1, 16), MetaIndex(MemoryBackend(), AllUp()))
    await cache.index.put(
        {
            key: BlockRecord(None, 0, (location("a", tuple(sorted(names)), location_id=str(key)),))
            for key, names in enumerate(specs)
            if names
        }
    )
    return cache


async def found(cache: InstanceCache, query: MatchQuery) -> tuple[list[bool], list[set[str]]]:
    """Return which keys were hit, and the specs of each entry."""
    answer = meta_service_pb2.GetCacheLocationResponse()
    result = await match(cache, query)
    answer.MergeFromString(b"".join(result.chunks))
    entries = [{spec.name for spec in each.location_specs if spec.uri} for each in answer.locations]
    return [key in result.keys for key in query.keys], entries


@settings(max_examples=200, deadline=None)
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
    real = await cache_of(specs)
    ideal = await cache_of([names if needed <= names else frozenset() for names in specs])
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


async def test_without_the_requirement_specs_only_narrow_what_is_returned() -> None:
    cache = await cache_of([frozenset(SPECS), frozenset({"full"}), frozenset(SPECS)])
    query = MatchQuery(MatchMode.PREFIX_MATCH, [0, 1, 2], spec_names=frozenset({"window"}))
    assert await found(cache, query) == ([True, True, True], [{"window"}, set(), {"window"}])
