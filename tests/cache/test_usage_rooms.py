"""What a group uses, and what a write may still take."""

from collections.abc import Mapping

import pytest
from at_once import now
from cache_rig import TableView, group, location
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.usage import Reservation, Room, UsageLedger
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import BlockRecord
from kvcm.model.storages import StorageType

NFS, FS, POOL = StorageType.ST_NFS, StorageType.ST_3FS, StorageType.ST_TAIRMEMPOOL
UID = 1


def new_index(max_key_count: int = 1 << 62) -> MetaIndex:
    return MetaIndex(MemoryBackend(), TableView(), max_key_count=max_key_count)


INDEX = new_index()


def room(ledger: UsageLedger, configured: InstanceGroup, index: MetaIndex = INDEX) -> Room:
    return now(ledger.room(configured, UID, index))


def reserve(
    ledger: UsageLedger,
    configured: InstanceGroup,
    wanted: Mapping[StorageType, int],
    new_keys: int = 0,
    index: MetaIndex = INDEX,
) -> Reservation:
    reservation = Reservation("owner", configured, UID, wanted, new_keys, 0.0)
    assert now(ledger.reserve(reservation, index))
    return reservation


def test_usage_is_counted_by_group_and_type() -> None:
    ledger = UsageLedger()
    here, again, there = ledger.listener("group", 1)(), ledger.listener("group", 2)(), ledger.listener("other", 3)()
    here({NFS: 10}, 1)
    again({NFS: 5, FS: 3}, 1)
    there({NFS: 100}, 1)
    here({NFS: -2}, 0)
    assert dict(ledger.used("group")) == {NFS: 13, FS: 3}
    assert dict(ledger.used("other")) == {NFS: 100}
    assert dict(ledger.used("unknown")) == {}


@pytest.mark.parametrize(
    ("size", "refused_by"),
    [(0, None), (7, None), (8, "30 bytes on file"), (18, "30 bytes on file"), (19, "capacity of 50")],
)
def test_the_room_is_exact_to_the_byte(size: int, refused_by: str | None) -> None:
    """Group: 32 of 50 used. Files: 23 of 30 used."""
    ledger = UsageLedger()
    ledger.listener("group", UID)()({NFS: 23, FS: 9}, 2)
    limit = room(ledger, group(capacity=50, quotas={NFS: 30})).limit(NFS, size)
    assert (limit is None) == (refused_by is None)
    if refused_by is not None:
        assert refused_by in str(limit)
        assert "'group'" in str(limit)


def test_a_type_that_is_not_listed_has_the_groups_limit_only() -> None:
    offered = room(UsageLedger(), group(capacity=50, quotas={NFS: 0}))
    assert offered.limit(POOL, 50) is None
    assert offered.limit(POOL, 51) is not None
    assert offered.limit(NFS, 1) is not None
    assert offered.limit(NFS, 0) is None


def test_what_a_plan_takes_is_gone_for_the_rest_of_it() -> None:
    ledger = UsageLedger()
    offered = room(ledger, group(capacity=50, quotas={NFS: 30}))
    offered.take(NFS, 25)
    assert offered.limit(NFS, 5) is None
    assert offered.limit(NFS, 6) is not None
    offered.take(FS, 20)
    assert offered.limit(FS, 5) is None
    assert offered.limit(FS, 6) is not None
    assert room(ledger, group(capacity=50)).limit(NFS, 50) is None, "planning takes nothing from the ledger"


def test_reservations_count_until_they_end() -> None:
    ledger, configured = UsageLedger(), group(capacity=50)
    reservations = [reserve(ledger, configured, wanted) for wanted in ({NFS: 20}, {NFS: 10, FS: 15})]
    assert room(ledger, configured).limit(NFS, 5) is None
    assert room(ledger, configured).limit(NFS, 6) is not None
    assert dict(ledger.used("group")) == {}
    ledger.settle(reservations[0], INDEX)
    assert room(ledger, configured).limit(NFS, 25) is None
    assert room(ledger, configured).limit(NFS, 26) is not None
    ledger.settle(reservations[1], INDEX)
    assert room(ledger, configured).limit(NFS, 50) is None


async def test_reserved_keys_count_until_they_end() -> None:
    """A reservation of three of five keys leaves two; one that was stored under it counts by itself afterwards."""
    ledger, configured, index = UsageLedger(), group(), new_index(max_key_count=5)
    reservation = reserve(ledger, configured, {}, 3, index)
    assert room(ledger, configured, index).free_keys == 2
    await index.read_modify_write([1], lambda _key, _old: BlockRecord(None, 0, (location("a"),)), reserved=True)
    ledger.settle(reservation, index)
    assert room(ledger, configured, index).free_keys == 4


STEPS = st.lists(st.tuples(st.sampled_from([NFS, FS]), st.integers(0, 30), st.booleans()), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=STEPS, capacity=st.integers(0, 100), quota=st.integers(0, 60))
def test_what_fits_is_within_every_limit(steps: list[tuple[StorageType, int, bool]], capacity: int, quota: int) -> None:
    """Whatever was let in, by plans and by others meanwhile, no limit is ever exceeded."""
    ledger = UsageLedger()
    configured = group(capacity=capacity, quotas={NFS: quota})
    count = ledger.listener("group", UID)()
    used = {NFS: 0, FS: 0}
    for storage_type, size, reserved_first in steps:
        fits = sum(used.values()) + size <= capacity and (storage_type is not NFS or used[NFS] + size <= quota)
        assert (room(ledger, configured).limit(storage_type, size) is None) == fits
        if fits:
            reservation = reserve(ledger, configured, {storage_type: size if reserved_first else 0})
            count({storage_type: size}, 1)
            ledger.settle(reservation, INDEX)
            used[storage_type] += size
