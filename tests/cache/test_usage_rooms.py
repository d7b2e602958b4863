"""What a group uses, and what a write may still take."""

import pytest
from cache_rig import group
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.usage import UsageLedger
from kvcm.model.storages import StorageType

NFS, FS, POOL = StorageType.ST_NFS, StorageType.ST_3FS, StorageType.ST_TAIRMEMPOOL


def test_usage_is_counted_by_group_and_type() -> None:
    ledger = UsageLedger()
    here, again, there = ledger.listener("group"), ledger.listener("group"), ledger.listener("other")
    here(NFS, 10)
    again(NFS, 5)
    again(FS, 3)
    there(NFS, 100)
    here(NFS, -2)
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
    ledger.listener("group")(NFS, 23)
    ledger.listener("group")(FS, 9)
    limit = ledger.room(group(capacity=50, quotas={NFS: 30})).limit(NFS, size)
    assert (limit is None) == (refused_by is None)
    if refused_by is not None:
        assert refused_by in str(limit)
        assert "'group'" in str(limit)


def test_a_type_that_is_not_listed_has_the_groups_limit_only() -> None:
    room = UsageLedger().room(group(capacity=50, quotas={NFS: 0}))
    assert room.limit(POOL, 50) is None
    assert room.limit(POOL, 51) is not None
    assert room.limit(NFS, 1) is not None
    assert room.limit(NFS, 0) is None


def test_what_a_plan_takes_is_gone_for_the_rest_of_it() -> None:
    ledger = UsageLedger()
    room = ledger.room(group(capacity=50, quotas={NFS: 30}))
    room.take(NFS, 25)
    assert room.limit(NFS, 5) is None
    assert room.limit(NFS, 6) is not None
    room.take(FS, 20)
    assert room.limit(FS, 5) is None
    assert room.limit(FS, 6) is not None
    assert ledger.room(group(capacity=50)).limit(NFS, 50) is None, "planning takes nothing from the ledger"


def test_reservations_count_until_they_end() -> None:
    ledger = UsageLedger()
    settings_ = group(capacity=50)
    with ledger.reserve("group", {NFS: 20}), ledger.reserve("group", {NFS: 10, FS: 15}):
        assert ledger.room(settings_).limit(NFS, 5) is None
        assert ledger.room(settings_).limit(NFS, 6) is not None
        assert dict(ledger.used("group")) == {}
    assert ledger.room(settings_).limit(NFS, 50) is None


def test_a_reservation_ends_with_an_error_too() -> None:
    ledger = UsageLedger()
    with pytest.raises(KeyError), ledger.reserve("group", {NFS: 20}):
        raise KeyError
    assert ledger.room(group(capacity=20)).limit(NFS, 20) is None


STEPS = st.lists(st.tuples(st.sampled_from([NFS, FS]), st.integers(0, 30), st.booleans()), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=STEPS, capacity=st.integers(0, 100), quota=st.integers(0, 60))
def test_what_fits_is_within_every_limit(steps: list[tuple[StorageType, int, bool]], capacity: int, quota: int) -> None:
    """Whatever was let in, by plans and by others meanwhile, no limit is ever exceeded."""
    ledger = UsageLedger()
    configured = group(capacity=capacity, quotas={NFS: quota})
    count = ledger.listener("group")
    used = {NFS: 0, FS: 0}
    for storage_type, size, reserved_first in steps:
        fits = sum(used.values()) + size <= capacity and (storage_type is not NFS or used[NFS] + size <= quota)
        assert (ledger.room(configured).limit(storage_type, size) is None) == fits
        if fits:
            with ledger.reserve("group", {storage_type: size if reserved_first else 0}):
                count(storage_type, size)
            used[storage_type] += size
