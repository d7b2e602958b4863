"""What the manager does with a Mooncake store, against a real master and memory in another process."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
from mooncake_rig import AskedError, Process, Site, eventually

from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.storages import MooncakeStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.storage.mooncake import MooncakeStorage

pytestmark = pytest.mark.e2e

SIZE = 5000


def allocated(manager: Process, location_id: str, count: int = 3) -> list[str]:
    uris: list[str] = manager.ask("allocate", keys=list(range(count)), size_bytes=SIZE, location_id=location_id)
    return uris


def test_addresses_are_those_of_the_wire_below_the_deployment_with_a_name_per_location(manager: Process) -> None:
    uris = manager.ask("allocate", keys=[1, -1], size_bytes=1024, location_id="abc", instance_id="a/b c")
    assert uris == [
        "mooncake://mc/?key=cluster/a%2Fb%20c/tp0/1.abc&size=1024",
        "mooncake://mc/?key=cluster/a%2Fb%20c/tp0/ffffffffffffffff.abc&size=1024",
    ]
    other = manager.ask("allocate", keys=[1], size_bytes=1024, location_id="abd", instance_id="a/b c")
    assert other[0] != uris[0]
    [foreign] = manager.ask("allocate", keys=[7], size_bytes=9, location_id="q", instance_id="ключ")
    parsed = LocationUri.parse(foreign)
    assert str(parsed) == foreign
    assert (parsed.key or "").startswith("cluster/%")


def test_an_object_with_a_reader_is_deleted_later(manager: Process, engine: Process) -> None:
    uris = allocated(manager, "leased", 1)
    engine.ask("save", uris=uris)
    reasons: list[str | None] = []

    def is_refused() -> bool:  # the lease is shorter than some pauses of a busy machine
        engine.ask("save", uris=uris)
        engine.ask("load", uris=uris)
        reasons[:] = manager.ask("delete", uris=uris)
        return reasons[0] is not None

    eventually(is_refused)
    assert reasons[0] is not None
    assert "in use by a reader, try again later" in reasons[0]
    eventually(lambda: manager.ask("delete", uris=uris) == [None])


@pytest.mark.parametrize("site", [2], indirect=True)
def test_a_full_store_is_never_down_for_that(site: Site) -> None:
    """What it holds can be read; a store that is hidden would never be read less, nor emptied."""
    owner = site.owner(16 << 20)
    manager = site.manager()
    eventually(lambda: manager.ask("probe") is None)
    owner.kill()  # without a client that lends it memory, the store is as good as full
    eventually(lambda: _is_full(manager))
    assert manager.ask("state_after", probes=4) == "degraded"
    site.kill_master()
    assert manager.ask("state_after", probes=4) == "down", "as many failures of another kind do"


def _is_full(manager: Process) -> bool:
    try:
        manager.ask("probe")
    except AskedError as error:
        return "no segment has room" in str(error)
    return False


def test_a_master_that_is_away_at_the_start_is_found_when_it_comes(site: Site) -> None:
    site.kill_master()
    manager = site.manager()
    uris = allocated(manager, "away")
    began = time.monotonic()
    with pytest.raises(AskedError, match=r"StorageIOError: storage mc: mooncake master .* cannot be reached"):
        manager.ask("probe")
    with pytest.raises(AskedError, match="StorageIOError"):
        manager.ask("exists", uris=uris)
    assert all("cannot be reached" in reason for reason in manager.ask("delete", uris=uris))
    assert time.monotonic() - began < 30, "setting a client up takes 90 s; the master is looked for first"
    site.start_master()
    site.owner(32 << 20)
    eventually(lambda: manager.ask("probe") is None)


def test_a_master_that_dies_or_stops_answering_costs_answers_until_it_is_back(site: Site) -> None:
    site.owner(32 << 20)
    manager, engine = site.manager(), site.client()
    manager.ask("probe")
    old = allocated(manager, "old")
    engine.ask("save", uris=old)
    site.kill_master()
    with pytest.raises(AskedError, match="StorageIOError: storage mc: "):
        manager.ask("exists", uris=old)
    assert all(manager.ask("delete", uris=old)), "nothing counts as deleted"
    site.start_master()
    eventually(lambda: manager.ask("probe") is None)
    assert manager.ask("exists", uris=old) == [False] * 3, "the master's memory of objects is gone with it"

    site.stop_master()
    with pytest.raises(AskedError, match="does not answer"):
        manager.ask("probe")
    site.resume_master()
    eventually(lambda: manager.ask("probe") is None)


def test_a_client_that_is_killed_is_started_again_and_ends_with_the_storage(site: Site) -> None:
    site.owner(32 << 20)
    manager = site.manager()
    manager.ask("probe")
    [first] = manager.ask("children")
    os.kill(first, signal.SIGKILL)
    with pytest.raises(AskedError, match="StorageIOError: storage mc: the mooncake client gave no answer"):
        manager.ask("probe")
    manager.ask("probe")
    [second] = manager.ask("children")
    assert second != first
    manager.ask("close_storage")
    eventually(lambda: manager.ask("children") == [])
    with pytest.raises(AskedError, match=r"StorageIOError: .*closed"):
        manager.ask("probe")


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("protocol", MooncakeStorageSpec("h", "P2PHANDSHAKE", "udp", "", "127.0.0.1:1")),
        ("master_service_entry", MooncakeStorageSpec("h", "P2PHANDSHAKE", "tcp", "", "127.0.0.1")),
        ("master_service_entry", MooncakeStorageSpec("h", "P2PHANDSHAKE", "tcp", "", "127.0.0.1:99999")),
        ("local_hostname", MooncakeStorageSpec(":1", "P2PHANDSHAKE", "tcp", "", "127.0.0.1:1")),
    ],
)
def test_a_malformed_field_is_named_when_the_storage_is_opened(field: str, spec: MooncakeStorageSpec) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(field)):
        MooncakeStorage.open(StorageConfig("mc", spec), "cluster")


def test_a_missing_package_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    spec = MooncakeStorageSpec("h", "P2PHANDSHAKE", "tcp", "", "127.0.0.1:1")
    with pytest.raises(UnsupportedError, match=r"pip install 'kvcm\[mooncake\]'"):
        MooncakeStorage.open(StorageConfig("mc", spec), "cluster")
