"""Which storages a group's writes may go to, best first (wire.md 5.6)."""

from itertools import permutations

import pytest
from cache_rig import TableView, group

from kvcm.cache.selection import candidates
from kvcm.model.groups import CachePreferStrategy
from kvcm.model.storages import StorageType

TYPES = {
    "fs": StorageType.ST_3FS,
    "fs-b": StorageType.ST_3FS,
    "mc": StorageType.ST_MOONCAKE,
    "pool": StorageType.ST_TAIRMEMPOOL,
    "nfs": StorageType.ST_NFS,
    "vfs": StorageType.ST_VCNS_3FS,
}
EVERYTHING = TableView(dict.fromkeys(TYPES, 1), TYPES)
NAMED = {"3FS": "fs", "MOONCAKE": "mc", "TAIR_MEMPOOL": "pool", "VCNS_3FS": "vfs"}


def chosen(names: list[str], strategy: CachePreferStrategy, view: TableView = EVERYTHING) -> list[str]:
    found = candidates(group(storages=names, strategy=strategy), view)
    assert all(TYPES[candidate.storage] is candidate.storage_type for candidate in found)
    return [candidate.storage for candidate in found]


@pytest.mark.parametrize("strategy", CachePreferStrategy)
def test_every_strategy_against_the_rule(strategy: CachePreferStrategy) -> None:
    """For every order of a group's candidates: the named type first or alone, the group's own order otherwise."""
    verb, _, name = strategy.name.removeprefix("CPS_").partition("_")
    named = TYPES[NAMED[name]] if name else None
    for order in permutations(["nfs", "fs", "fs-b", NAMED.get(name, "mc")]):
        names = list(dict.fromkeys(order))
        preferred = [each for each in names if TYPES[each] is named]
        others = [] if verb == "ALWAYS" else [each for each in names if TYPES[each] is not named]
        assert chosen(names, strategy) == preferred + others


@pytest.mark.parametrize("strategy", [s for s in CachePreferStrategy if s.is_exclusive])
def test_always_allows_nothing_else(strategy: CachePreferStrategy) -> None:
    assert chosen(["nfs"], strategy) == []


def test_prefer_without_such_a_storage_keeps_the_groups_order() -> None:
    assert chosen(["nfs", "mc"], CachePreferStrategy.CPS_PREFER_3FS) == ["nfs", "mc"]


def test_disabled_and_unregistered_storages_count_as_absent() -> None:
    disabled = TableView({"nfs": 1, "mc": 1}, TYPES)
    names = ["never-registered", "fs", "nfs", "mc"]
    assert chosen(names, CachePreferStrategy.CPS_PREFER_3FS, disabled) == ["nfs", "mc"]
    assert chosen(names, CachePreferStrategy.CPS_ALWAYS_3FS, disabled) == []
    assert chosen(["fs"], CachePreferStrategy.CPS_UNSPECIFIED, disabled) == []


def test_speed_does_not_matter_for_writes() -> None:
    fast_last = TableView({"nfs": 3, "pool": 0}, TYPES)
    assert chosen(["nfs", "pool"], CachePreferStrategy.CPS_UNSPECIFIED, fast_last) == ["nfs", "pool"]
