"""Transfers of engines while a storage fails: a miss or a refused write, in time, and never other bytes.

What holds for every single call is asserted where the calls are made (transfers_on_mount.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from fault_mount import FaultMount
from transfers_on_mount import BLOCK_BYTES, Transfers
from waiting import until

from kvcm.connectors.transfer import Failure

DEADLINE_SECONDS, LONG_SECONDS = 1.0, 20.0

READ_FAULTS = {operation: ["EIO", "ESTALE", "hang"] for operation in ("read", "open", "getattr")}
WRITE_FAULTS = {
    "write": ["EIO", "ENOSPC", "ESTALE", "EDQUOT", "hang"],
    "create": ["EIO", "ENOSPC", "ESTALE", "EROFS", "hang"],
    "flush": ["EIO", "ENOSPC", "ESTALE", "EDQUOT", "hang"],
    "mkdir": ["EIO", "ENOSPC", "EROFS", "hang"],
}


def each_of(faults: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    return [(operation, fault) for operation, found in faults.items() for fault in found]


def inject(transfers: Transfers, operation: str, fault: str, **where: str) -> float:
    """Have an operation fail or hang; returns how long a call may take then."""
    hangs = fault == "hang"
    transfers.mount.inject(operation, **where, **({"hang": True} if hangs else {"error": fault}))
    return DEADLINE_SECONDS if hangs else LONG_SECONDS


@pytest.fixture
def transfers(fault_mount: FaultMount) -> Iterator[Transfers]:
    transfers = Transfers(fault_mount)
    yield transfers
    fault_mount.clear()
    transfers.engine.close()


@pytest.mark.parametrize(("operation", "fault"), each_of(READ_FAULTS))
def test_a_load_that_fails_is_a_miss_in_time(transfers: Transfers, operation: str, fault: str) -> None:
    uris = transfers.uris("a")
    assert all(transfers.save(uris).ok)
    deadline = inject(transfers, operation, fault, path="/cluster/inst/*")
    for _ in range(2):
        assert not any(transfers.load(uris, deadline).ok)
    transfers.mount.clear()
    transfers.until_all_load(uris)


@pytest.mark.parametrize(("operation", "fault"), each_of(WRITE_FAULTS))
def test_a_write_that_fails_is_refused_in_time(transfers: Transfers, operation: str, fault: str) -> None:
    """Also when only closing the file fails: network file systems report lost writes there."""
    deadline = inject(transfers, operation, fault)
    for number in range(2):
        assert not any(transfers.save(transfers.uris(f"{number}"), deadline).ok)
    transfers.mount.clear()
    uris = transfers.uris("after")
    transfers.until_all_save(uris)
    transfers.until_all_load(uris)


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EROFS"])
def test_a_storage_that_takes_no_writes_still_gives_what_it_has(transfers: Transfers, error: str) -> None:
    uris = transfers.uris("a")
    assert all(transfers.save(uris).ok)
    transfers.mount.inject("create", "write", error=error)
    for number in range(5):
        assert not any(transfers.save(transfers.uris(f"{number}")).ok)
        assert all(transfers.load(uris).ok)
    transfers.mount.clear()
    transfers.until_all_save(transfers.uris("after"))


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "ESTALE"])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_storage_that_fails_meanwhile_loses_what_it_failed(transfers: Transfers, error: str, after: int) -> None:
    """Blocks written before the fault count as saved, and load; every call asserts both."""
    uris = transfers.uris("a")
    transfers.mount.inject("write", error=error, after=after)
    saved = transfers.save(uris)
    assert not all(saved.ok)
    transfers.mount.clear()
    kept = [uri for uri, ok in zip(uris, saved.ok, strict=True) if ok]
    transfers.until_all_load(kept)
    transfers.mount.inject("read", error=error, after=after)
    assert not all(transfers.load(uris).ok)


def test_blocks_beside_one_that_fails_are_moved(transfers: Transfers) -> None:
    uris = transfers.uris("a")
    transfers.mount.inject("read", "write", path="*-p0", error="EIO")
    expected = [not uri.path.endswith("-p0") for uri in uris]
    assert transfers.save(uris).ok == expected
    transfers.mount.clear()
    transfers.until_all_save(uris)
    transfers.mount.inject("read", path="*-p0", error="EIO")
    assert transfers.load(uris).ok == expected


@pytest.mark.parametrize("most_bytes", [1, 1000, 65_537])
def test_short_reads_and_writes_are_carried_on(transfers: Transfers, most_bytes: int) -> None:
    """The first many requests; as slow as single bytes are, not all of them."""
    uris = transfers.uris("a", packed_files=1, files=1)
    transfers.mount.inject("read", "write", most_bytes=most_bytes, times=200)
    assert all(transfers.save(uris).ok)
    transfers.mount.clear()
    transfers.mount.inject("read", "write", most_bytes=most_bytes, times=200)
    assert all(transfers.load(uris).ok)


def test_a_storage_that_takes_no_bytes_refuses_the_write(transfers: Transfers) -> None:
    transfers.mount.inject("write", most_bytes=0)
    assert not any(transfers.save(transfers.uris("a")).ok)
    transfers.mount.clear()
    transfers.until_all_save(transfers.uris("b"))


def test_a_file_that_ends_early_is_a_miss_from_there_on(transfers: Transfers) -> None:
    """As on a mount that still trusts the length that the file had before its later slots were written."""
    uris = transfers.uris("a")
    assert all(transfers.save(uris).ok)
    transfers.mount.inject("read", ends_at=2 * BLOCK_BYTES + 10)
    loaded = transfers.load(uris)
    assert loaded.ok == [uri.offset < 2 * BLOCK_BYTES for uri in uris]
    assert loaded.failures == {None, Failure.LOST}
    transfers.mount.clear()
    transfers.until_all_load(uris)


def test_a_write_that_lands_after_it_was_given_up_harms_no_neighbour(transfers: Transfers) -> None:
    packed = transfers.uris("a", packed_files=1, files=0)
    assert all(transfers.save(packed[:1] + packed[2:]).ok)
    transfers.mount.inject("write", hang=True)
    until(lambda: transfers.save(packed[1:2], DEADLINE_SECONDS).failures == {Failure.PENDING}, "one has begun in time")
    transfers.mount.until_waiting()
    transfers.mount.clear()
    transfers.until_all_load(packed[:1] + packed[2:])


def test_a_mount_whose_server_died_fails_until_it_is_back(transfers: Transfers) -> None:
    uris = transfers.uris("a")
    assert all(transfers.save(uris).ok)
    transfers.mount.die()
    for number in range(5):
        loaded = transfers.load(uris)
        assert not any(loaded.ok)
        assert Failure.LOST not in loaded.failures
        assert not any(transfers.save(transfers.uris(f"{number}")).ok)
    transfers.mount.close()
    transfers.mount.mount()
    transfers.until_all_load(uris)
    transfers.until_all_save(transfers.uris("after"))


@pytest.mark.parametrize("loads_first", [True, False])
def test_a_mount_that_went_away_takes_no_writes(transfers: Transfers, loads_first: bool) -> None:
    """The empty mount point stays empty: no other host would see files in it."""
    uris = transfers.uris("a")
    assert all(transfers.save(uris).ok)
    transfers.mount.close()
    if loads_first:
        assert Failure.LOST not in transfers.load(uris).failures
    saved = transfers.save_unread(transfers.uris("b"))
    left = list(transfers.mount.path.iterdir())
    shutil.rmtree(transfers.mount.path / "cluster", ignore_errors=True)
    transfers.mount.mount()
    assert not any(saved.ok)
    assert left == []
    transfers.until_all_load(uris)
    transfers.until_all_save(transfers.uris("c"))


_ERRORS = [{"error": name} for name in ("EIO", "ESTALE", "ENOSPC")]
_SHORT = [{"most_bytes": 70_000}, {"most_bytes": 0, "times": 3}, {"ends_at": BLOCK_BYTES + 1}]
STORM: list[dict[str, Any]] = [*_ERRORS, *_SHORT, {"delay_seconds": 0.05}, {"hang": True}]
OPERATIONS = ("read", "write", "open", "create", "getattr", "mkdir", "flush")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_no_other_bytes_and_it_ends_well(transfers: Transfers, seed: int) -> None:
    """Saves and loads at the same time, under faults that come and go."""
    random = Random(seed)
    known = transfers.uris("first")
    assert all(transfers.save(known).ok)
    with ThreadPoolExecutor(4) as callers:
        for step in range(15):
            fault = random.choice(STORM) | {"after": random.randrange(3)}
            transfers.mount.inject(*random.sample(OPERATIONS, 2), path="/cluster/inst/*", **fault)
            uris = transfers.uris(f"{step}")
            calls = [callers.submit(transfers.load, random.sample(known, 8), 0.5) for _ in range(3)]
            saved = callers.submit(transfers.save, uris, 0.5).result()
            for call in calls:
                call.result()
            transfers.mount.clear()
            known += [uri for uri, ok in zip(uris, saved.ok, strict=True) if ok]
    transfers.until_all_load(known)
    transfers.until_all_save(transfers.uris("last"))
