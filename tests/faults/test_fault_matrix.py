"""Faults of a mount through a real manager and with checksums, with files that engines make and that the manager makes.

Always a miss or a rejected write, never wrong bytes, no caller held beyond its deadline, and all well when the fault is
over: what every call must hold is asserted in corruption_site.py. Single operations, and faults in all their forms:
test_transfers_on_failing_mounts.py. Memory pools and Mooncake have other faults: test_pool_faults.py, tests/mooncake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from corruption_media import PATH_SPECS, PathMedium
from corruption_site import BlockSite, opened_site
from fault_mount import FaultMount
from manager_process import ManagerProcess
from waiting import until

from kvcm.connectors.transfer import Failure

KEYS = list(range(1, 9))
NEW = list(range(101, 109))
BLOCKS = "/*/tp?/*"  # below the mount, whatever the deployment is called
DEADLINE_SECONDS = 1.5
RECOVERY_SECONDS = 90.0  # a storage that hung may be left alone for a while, by engine and manager


class FaultCase(NamedTuple):
    """A fault and what it may do.

    Attributes:
        operations: that meet it.
        fault: how.
        passes: whether calls may succeed nevertheless.
    """

    operations: tuple[str, ...]
    fault: dict[str, Any]
    passes: bool = False


LOADS = {
    "ESTALE": FaultCase(("open",), {"error": "ESTALE"}),
    "short read": FaultCase(("read",), {"most_bytes": 30_000}, passes=True),
    "hang": FaultCase(("read",), {"hang": True}),
    "flipped on the way": FaultCase(("read",), {"flip_at": 77}, passes=True),
}
SAVES = {
    "ESTALE": FaultCase(("create", "open"), {"error": "ESTALE"}),
    "EIO at the close": FaultCase(("flush",), {"error": "EIO"}),
    "short write": FaultCase(("write",), {"most_bytes": 30_000}, passes=True),
    "hang": FaultCase(("write",), {"hang": True}),
}


@pytest.fixture(params=["file-1", "hf3fs-8"])
def site(request: pytest.FixtureRequest, manager: ManagerProcess, fault_mount: FaultMount) -> Iterator[BlockSite]:
    medium = PathMedium(PATH_SPECS[request.param], fault_mount.path, fault_mount.directory)
    with opened_site(manager, medium) as site:
        yield site
        fault_mount.clear()


def until_all_is_well(site: BlockSite) -> None:
    """The engine saves lost blocks again, and everything loads."""
    keys = KEYS + NEW

    def is_well() -> bool:
        site.try_to_save(keys, 10.0)
        found = site.match(keys)
        failures = site.load(found)
        if set(failures.values()) - {None}:
            site.report(failures, found)
        return set(found) == set(keys) and set(failures.values()) == {None}

    until(is_well, "all is well again", RECOVERY_SECONDS)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", LOADS)
def test_loads(site: BlockSite, fault_mount: FaultMount, fault: str) -> None:
    case = LOADS[fault]
    site.save(KEYS)
    before = site.match(KEYS)
    fault_mount.inject(*case.operations, path=BLOCKS, **case.fault)
    for _ in range(3):
        failures = site.load(before, 20.0 if case.passes else DEADLINE_SECONDS)
        if not case.passes:
            assert None not in failures.values()
        elif "flip_at" in case.fault:
            places = site.places(before)
            assert failures == {part: Failure.CORRUPT if uri.offset == 0 else None for part, uri in places.items()}
        else:
            assert set(failures.values()) == {None}
    fault_mount.clear()
    until_all_is_well(site)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", SAVES)
def test_saves(site: BlockSite, fault_mount: FaultMount, fault: str) -> None:
    case = SAVES[fault]
    site.save(KEYS)
    fault_mount.inject(*case.operations, path=BLOCKS, **case.fault)
    for _ in range(3):
        assert case.passes or site.try_to_save(NEW, DEADLINE_SECONDS) == []
    if case.passes:
        assert site.try_to_save(NEW, 20.0) == NEW
    fault_mount.clear()
    until_all_is_well(site)


def test_a_block_is_lost_until_it_is_seen(manager: ManagerProcess, new_fault_mount: Callable[[], FaultMount]) -> None:
    """The manager sees what an engine does not yet, and keeps it."""
    mount = new_fault_mount()
    with opened_site(manager, PathMedium(PATH_SPECS["file-8"], mount.path, mount.directory)) as site:
        site.save(KEYS)
        before = site.match(KEYS)
        mount.hide(BLOCKS)
        failures = site.load(before)
        assert set(failures.values()) == {Failure.LOST}
        mount.clear()
        report = site.report(failures, before)
        assert report is not None
        assert report.removed_locations == 0
        assert site.match(KEYS) == before
        site.assert_all_load(KEYS)
