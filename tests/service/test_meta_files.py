"""Real files behind a `file` storage: when they go, and that neighbours stay (invariants 5 and 6, decisions 15, 16)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from test_transport_drivers import eventually
from test_transport_sites import Site, mask, specs

SIZE = 8192
DELAY_MS = 300
LONG_DELAY_MS = 1500  # for what has to be read before the delay is over


class Slot(NamedTuple):
    """Where the bytes of a block lie."""

    path: Path
    offset: int
    packed: bool

    def write(self, byte: int) -> None:
        """Write the block as an engine does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.seek(self.offset)
            file.write(bytes([byte]) * SIZE)

    def read(self) -> set[int]:
        """The distinct bytes of the block; empty when the file is gone."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return set(file.read(SIZE))
        except FileNotFoundError:
            return set()


def _slot(location: Any) -> Slot:
    uri = urlsplit(specs(location)["kv"])
    params = parse_qs(uri.query)
    assert params["size"] == [str(SIZE)]
    return Slot(Path(uri.path), int(params.get("blkid", ["0"])[0]) * SIZE, "blkid" in params)


class Files:
    """An instance on a `file` storage."""

    def __init__(self, site: Site, root: Path, keys_per_file: int, delay_ms: int = DELAY_MS) -> None:
        self.site, self.root = site, root
        self.storage = site.storage(nfs={"root_path": f"{root}/", "key_count_per_file": keys_per_file})
        group = site.group(self.storage, delay_ms=delay_ms)
        self.instance = site.instance(group, location_spec_infos=[{"name": "kv", "size": SIZE}])

    def start(self, keys: list[int], **fields: Any) -> tuple[Any, list[Slot]]:
        """Start a write and write the bytes: block k is full of byte k."""
        started = self.site.start(self.instance, keys, **fields)
        slots = [_slot(location) for location in started.locations]
        for key, slot in zip(keys, slots, strict=True):
            slot.write(key)
        return started, slots

    def write(self, keys: list[int]) -> list[Slot]:
        """Write blocks and publish them."""
        started, slots = self.start(keys)
        self.site.finish(self.instance, started)
        return slots

    def remove(self, *keys: int) -> None:
        """Remove blocks."""
        self.site.api.ok("RemoveCache", instance_id=self.instance, block_keys=keys)

    def lease(self, keys: list[int], lease_ms: int = 60_000) -> str:
        """Match blocks with a read lease; returns its id."""
        query = {"instance_id": self.instance, "block_keys": keys, "query_type": "QT_PREFIX_MATCH"}
        begin = time.time()
        answer = self.site.api.ok("GetCacheLocation", read_lease_ms=lease_ms, **query)
        assert len(answer.locations) == len(keys)
        assert begin + lease_ms / 1000 - 0.01 < answer.read_lease_deadline_ms / 1000 <= time.time() + lease_ms / 1000
        return str(answer.read_lease_id)


@pytest.fixture
def files(site: Site, tmp_path: Path) -> Files:
    return Files(site, tmp_path, 1)


@pytest.fixture
def quick(site: Site, tmp_path: Path) -> Files:
    """Files that are deleted at once, unless something holds them."""
    return Files(site, tmp_path, 1, delay_ms=0)


@pytest.fixture
def lasting(site: Site, tmp_path: Path) -> Files:
    """Files that can be read for a while after their blocks were removed."""
    return Files(site, tmp_path, 1, delay_ms=LONG_DELAY_MS)


@pytest.fixture
def packed(site: Site, tmp_path: Path) -> Files:
    return Files(site, tmp_path, 4)


def test_a_file_goes_after_the_delay_and_not_before_invariant_6(lasting: Files) -> None:
    kept, removed = lasting.write([1, 2])
    begin = time.monotonic()
    lasting.remove(2)
    assert removed.read() == {2}
    eventually(lambda: not removed.path.exists())
    assert time.monotonic() - begin >= LONG_DELAY_MS / 1000 - 0.01
    assert kept.read() == {1}


def test_a_removed_slot_is_punched_and_its_neighbours_keep_their_bytes_invariant_5(packed: Files) -> None:
    first, second, third = packed.write([1, 2, 3])
    blocks = first.path.stat().st_blocks
    packed.remove(2)
    eventually(lambda: second.read() == {0})
    assert (first.read(), third.read()) == ({1}, {3})
    assert first.path.stat().st_blocks <= blocks - SIZE // 512
    assert first.path.stat().st_size == 3 * SIZE


def test_a_packed_file_goes_with_its_last_block(packed: Files) -> None:
    first, second = packed.write([1, 2])
    packed.remove(1)
    eventually(lambda: first.read() == {0})
    packed.remove(2)
    eventually(lambda: not second.path.exists())


def test_blocks_reported_as_failed_are_deleted_and_the_others_stay(packed: Files) -> None:
    started, (first, second, third) = packed.start([1, 2, 3])
    packed.site.finish(packed.instance, started, mask(flags=[True, False, True]))
    eventually(lambda: second.read() == {0})
    assert (first.read(), third.read()) == ({1}, {3})


@pytest.mark.parametrize("how", ["TrimCache", "AdminService.RemoveInstance"])
def test_trim_and_removal_of_the_instance_delete_the_files_after_the_delay(lasting: Files, how: str) -> None:
    slots = lasting.write([1, 2])
    strategy = {"strategy": "TS_REMOVE_ALL_CACHE"} if how == "TrimCache" else {}
    lasting.site.api.ok(how, instance_id=lasting.instance, **strategy)
    assert [slot.read() for slot in slots] == [{1}, {2}]
    eventually(lambda: not any(slot.path.exists() for slot in slots))


def test_a_delayed_delete_never_touches_the_block_that_was_written_anew_decision_1(files: Files) -> None:
    (old,) = files.write([1])
    files.remove(1)
    (new,) = files.write([1])
    eventually(lambda: not old.path.exists())
    assert new.read() == {1}
    assert len(files.site.match(files.instance, [1])) == 1


def test_bytes_on_a_disabled_storage_are_still_deleted(files: Files) -> None:
    (slot,) = files.write([1])
    files.site.api.ok("AdminService.DisableStorage", storage_unique_name=files.storage)
    files.remove(1)
    eventually(lambda: not slot.path.exists())


# ── Read leases ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_read_lease_keeps_the_file_beyond_the_delay(files: Files) -> None:
    leased, free = files.write([1, 2])
    files.lease([1])
    files.remove(1, 2)
    eventually(lambda: not free.path.exists())
    assert leased.read() == {1}
    assert files.site.hits(files.instance, [1]) == []


def test_a_leased_file_goes_soon_after_the_lease_is_released(quick: Files) -> None:
    leased, free = quick.write([1, 2])
    lease = quick.lease([1])
    quick.remove(1, 2)
    eventually(lambda: not free.path.exists())
    quick.site.api.ok("LeaseService.ReleaseReadLease", instance_id=quick.instance, read_lease_id=lease)
    eventually(lambda: not leased.path.exists())


def test_several_leases_are_released_with_one_call_whatever_is_wrong_with_some(quick: Files, files: Files) -> None:
    first, second = quick.write([1, 2])
    (foreign,) = files.write([1])
    leases = [quick.lease([1]), files.lease([1]), quick.lease([2])]
    quick.remove(1, 2)
    fields = {"instance_id": quick.instance, "read_lease_id": leases[0], "more_read_lease_ids": leases[1:]}
    refused = quick.site.api.refused("LeaseService.ReleaseReadLease", **fields)
    assert (refused.code, refused.message) == ("INVALID_ARGUMENT", "read_lease_id is unknown, released or expired")
    eventually(lambda: not first.path.exists() and not second.path.exists())
    assert foreign.path.exists()


def test_a_renewed_lease_keeps_the_file_beyond_its_first_end(quick: Files) -> None:
    renewed, free = quick.write([1, 2])
    lease = quick.lease([1], 2000)
    quick.lease([2], 2100)
    fields = {"instance_id": quick.instance, "read_lease_id": lease}
    answer = quick.site.api.ok("LeaseService.RenewReadLease", read_lease_ms=60_000, **fields)
    assert 40 < answer.read_lease_deadline_ms / 1000 - time.time() <= 60
    quick.remove(1, 2)
    eventually(lambda: not free.path.exists())
    assert renewed.read() == {1}


def test_a_match_without_hits_or_without_the_wish_has_no_lease(quick: Files) -> None:
    quick.write([1])
    query = {"instance_id": quick.instance, "query_type": "QT_PREFIX_MATCH"}
    for more in ({"block_keys": [404], "read_lease_ms": 1000}, {"block_keys": [1]}):
        answer = quick.site.api.ok("GetCacheLocation", **query, **more)
        assert (answer.read_lease_id, answer.read_lease_deadline_ms) == ("", 0)
