"""What `kvcm storage list` shows, and how a status is told."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from kvcm.capacity_tables import ListedStorage, print_drains, print_storages
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.service.translate import fill, read
from kvcm.service.usage_values import DrainState, DrainStatus, StorageStatus
from kvcm.storage.backend import StorageSpace
from kvcm.storage.health import HealthState, StorageHealth

GIB = 1 << 30
SINCE = 1_795_248_000.0
CONFIG = StorageConfig("nfs", DummyStorageSpec())
SPACE = StorageSpace(100 * GIB, 40 * GIB)
UP = StorageStatus.of(CONFIG, StorageHealth(since=SINCE, space=SPACE))
SLOW = StorageStatus.of(
    StorageConfig("moon", DummyStorageSpec(), is_available=False),
    StorageHealth(HealthState.SH_DEGRADED, "slow: it took 2.0 s to answer", SINCE),
)
CLOSED = StorageStatus.of(StorageConfig("[red]gone", DummyStorageSpec()), None)

SEEN = """\
storage    type      state               since                    used    limit      free  of medium
────────────────────────────────────────────────────────────────────────────────────────────────────
nfs        file      up                  2026-11-21 08:00:00Z  4.0 GiB  8.0 GiB  40.0 GiB  100.0 GiB
moon       mooncake  degraded, disabled  2026-11-21 08:00:00Z      0 B     none
[red]gone  file      down                                          0 B     none
old        file                                                    0 B     none

storage moon is degraded: slow: it took 2.0 s to answer
storage [red]gone is down: it could not be opened on this manager, whose log says why
"""

SEEN_DRAINS = """\
storage     task             state    since                    left
───────────────────────────────────────────────────────────────────
old [b]nfs  drain            running  2026-11-21 08:00:00Z  1.0 GiB
gone        forget, removed  done     2026-11-21 08:00:00Z      0 B

storage old [b]nfs: 2 locations are pinned
"""


SEEN_AT_80 = """\
storage  type      state       since          used    limit      free  of medium
────────────────────────────────────────────────────────────────────────────────
shared   file      up          2026-11-21  4.0 GiB  8.0 GiB  40.0 GiB  100.0 GiB
                               08:00:00Z
moon     mooncake  degraded,   2026-11-21      0 B     none
                   disabled    08:00:00Z

storage moon is degraded: slow: it took 2.0 s to answer
"""


def _shown(*storages: ListedStorage, width: int = 160, colour: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=colour, color_system="standard" if colour else None)
    print_storages(storages, console)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def test_a_table_of_storages_and_a_sentence_for_each_that_is_not_well() -> None:
    listed = (
        ListedStorage("nfs", "file", 4 * GIB, 8 * GIB, UP),
        ListedStorage("moon", "mooncake", 0, 0, SLOW),
        ListedStorage("[red]gone", "file", 0, 0, CLOSED),
        ListedStorage("old", "file", 0, 0, None),  # of a manager that does not tell
    )
    assert _shown(*listed) == SEEN


def test_a_terminal_of_80_columns_is_wide_enough() -> None:
    listed = ListedStorage("shared", "file", 4 * GIB, 8 * GIB, UP), ListedStorage("moon", "mooncake", 0, 0, SLOW)
    assert _shown(*listed, width=80) == SEEN_AT_80


@pytest.mark.parametrize(("status", "colour"), [(UP, None), (SLOW, "33"), (CLOSED, "1;31")])
def test_what_is_degraded_is_yellow_and_what_is_down_is_red(status: StorageStatus, colour: str | None) -> None:
    shown = _shown(ListedStorage("s", "file", 0, 0, status), colour=True)
    word = {None: "up", "33": "degraded", "1;31": "down"}[colour]
    assert (f"\x1b[{colour}m{word}" in shown) is (colour is not None)


@pytest.mark.parametrize("status", [UP, SLOW, CLOSED, StorageStatus.of(CONFIG, StorageHealth())])
def test_a_status_is_read_as_it_was_told(status: StorageStatus) -> None:
    message = pb.StorageStatus()
    fill(message, status)
    assert read(StorageStatus, message) == status


def test_a_storage_that_was_not_probed_yet_is_up_and_nothing_else_is_known() -> None:
    assert StorageStatus.of(CONFIG, StorageHealth()) == StorageStatus("nfs", True, HealthState.SH_UP)


def test_a_storage_that_is_drained_is_marked_unless_it_is_disabled_anyway() -> None:
    leaving = StorageConfig("s", DummyStorageSpec(), draining_since=SINCE)
    shown = {}
    for config in (CONFIG, leaving, replace(leaving, is_available=False)):
        status = StorageStatus.of(config, StorageHealth())
        shown[config] = re.split("  +", _shown(ListedStorage("s", "file", 0, 0, status)).splitlines()[2])[2]
    assert list(shown.values()) == ["up", "up, draining", "up, disabled"]


def test_drains_are_shown_with_what_holds_them_up() -> None:
    text = io.StringIO()
    drains = [
        DrainStatus("old [b]nfs", False, DrainState.DRAIN_RUNNING, int(SINCE * 1000), GIB, "2 locations are pinned"),
        DrainStatus("gone", True, DrainState.DRAIN_DONE, int(SINCE * 1000), 0),
    ]
    print_drains(drains, Console(file=text, width=120))
    assert text.getvalue() == SEEN_DRAINS
