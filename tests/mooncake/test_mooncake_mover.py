"""Bytes between two engines through a Mooncake store whose memory lies in a third process."""

from __future__ import annotations

import time

import pytest
from mooncake_rig import Process, Site, addresses, eventually, name_of

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("pieces", [1, 8])
@pytest.mark.parametrize("loads_registered", [False, True])
@pytest.mark.parametrize("saves_registered", [False, True])
def test_what_one_engine_stored_another_loads_byte_for_byte(
    engine: Process, other_engine: Process, saves_registered: bool, loads_registered: bool, pieces: int
) -> None:
    uris = addresses(100_003, 20)
    saved = engine.ask("save", uris=uris, pieces=pieces, registered=saves_registered)
    assert saved["failures"] == [None] * 20, saved["reasons"]
    loaded = other_engine.ask("load", uris=uris, pieces=9 - pieces, registered=loads_registered)
    assert loaded["failures"] == [None] * 20, loaded["reasons"]
    assert loaded["equal"] == [True] * 20


def test_one_missing_object_among_many_is_the_only_miss(engine: Process, other_engine: Process) -> None:
    uris = addresses(4096, 50)
    engine.ask("save", uris=uris[:17] + uris[18:])
    for pieces in (1, 3):
        loaded = other_engine.ask("load", uris=uris, pieces=pieces)
        assert loaded["failures"] == [None] * 17 + ["lost"] + [None] * 32
        assert loaded["equal"] == [True] * 17 + [False] + [True] * 32


def test_storing_the_same_location_again_changes_nothing_and_succeeds(engine: Process, other_engine: Process) -> None:
    uris = addresses(4096)
    for _ in range(2):
        assert engine.ask("save", uris=uris)["failures"] == [None]
    assert other_engine.ask("load", uris=uris)["equal"] == [True]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("stored_bytes", [1000, 9000])
def test_an_object_of_another_size_is_never_taken_for_the_part(
    shared_site: Site, engine: Process, stored_bytes: int, pieces: int, registered: bool
) -> None:
    [uri] = addresses(4096)
    raw = shared_site.client()
    raw.ask("own", size_bytes=0)
    assert raw.ask("raw_put", name=name_of(uri), size_bytes=stored_bytes) == 0
    [failure] = engine.ask("load", uris=[uri], pieces=pieces, registered=registered)["failures"]
    assert failure in {"lost", "error"}


def test_an_object_without_its_end_is_a_miss(site: Site) -> None:
    owner, engine = site.owner(32 << 20), site.client()
    [uri] = addresses(4096)
    assert owner.ask("raw_begin", name=name_of(uri), size_bytes=4096) == [0]
    assert engine.ask("load", uris=[uri])["failures"] == ["lost"]


def test_an_item_that_is_wrong_itself_is_refused(engine: Process) -> None:
    answer = engine.ask("save", uris=["mooncake://mc/?size=10", "mooncake://mc/?key=a&size=0"])
    assert answer["failures"] == ["refused"] * 2
    assert "is not mooncake://<storage>/" in answer["reasons"][0]
    assert "both must be equal, > 0" in answer["reasons"][1]


def test_memory_that_is_too_large_for_staging_is_refused_and_moves_once_registered(engine: Process) -> None:
    uris = addresses(5 << 20)
    answer = engine.ask("save", uris=uris)
    assert answer["failures"] == ["refused"]
    assert "register it" in answer["reasons"][0]
    assert engine.ask("save", uris=uris, registered=True)["failures"] == [None]
    assert engine.ask("load", uris=uris, registered=True)["equal"] == [True]
    assert engine.ask("load", uris=uris, pieces=5, registered=True)["equal"] == [True]


def test_more_parts_than_the_client_can_queue_are_moved_in_turns(engine: Process, other_engine: Process) -> None:
    uris = addresses(512, 5000)
    saved = engine.ask("save", uris=uris, registered=True)
    assert saved["failures"] == [None] * 5000
    assert other_engine.ask("load", uris=uris, pieces=3, registered=True)["equal"] == [True] * 5000


def test_more_than_fits_the_staging_memory_goes_through_it_in_turns(engine: Process, other_engine: Process) -> None:
    uris = addresses(3 << 20, 12)
    assert engine.ask("save", uris=uris)["failures"] == [None] * 12
    assert other_engine.ask("load", uris=uris)["equal"] == [True] * 12


def test_what_the_store_evicted_is_a_miss_and_never_other_bytes(site: Site) -> None:
    site.owner(16 << 20)
    engine = site.client()
    uris = [uri for _ in range(10) for uri in addresses(1 << 20, 4)]
    stored: list[str] = []
    for start in range(0, len(uris), 4):
        part = uris[start : start + 4]

        def is_stored(part: list[str] = part) -> bool:
            return engine.ask("save", uris=part)["failures"] == [None] * 4

        eventually(is_stored)
        stored += part
    loaded = engine.ask("load", uris=stored)
    assert set(loaded["failures"]) == {None, "lost"}
    assert loaded["failures"].count(None) <= 16
    assert loaded["equal"] == [failure is None for failure in loaded["failures"]]


@pytest.mark.parametrize("site", [2], indirect=True)
def test_loads_fail_in_time_when_the_owner_of_the_memory_is_killed(site: Site) -> None:
    owner, engine = site.owner(32 << 20), site.client()
    uris = addresses(64 << 10, 8)
    assert engine.ask("save", uris=uris)["failures"] == [None] * 8
    owner.kill()
    loaded = engine.ask("load", uris=uris, deadline=5.0)
    assert set(loaded["failures"]) <= {"lost", "error", "pending"}
    assert loaded["seconds"] < 20
    assert loaded["equal"] == [False] * 8
    site.owner(32 << 20)
    fresh = addresses(64 << 10, 8)
    eventually(lambda: engine.ask("save", uris=fresh, deadline=5.0)["failures"] == [None] * 8)
    assert engine.ask("load", uris=fresh)["equal"] == [True] * 8
    eventually(lambda: engine.ask("load", uris=uris)["failures"] == ["lost"] * 8)


def test_no_call_hangs_while_the_owner_of_the_memory_is_stopped_and_transfers_resume_with_it(site: Site) -> None:
    owner, engine = site.owner(32 << 20), site.client()
    uris = addresses(64 << 10, 2)
    assert engine.ask("save", uris=uris)["failures"] == [None] * 2
    owner.stop()
    loaded = engine.ask("load", uris=uris, deadline=1.0)
    while loaded["failures"] == ["cancelled"] * 2:  # a busy machine has begun nothing by then
        loaded = engine.ask("load", uris=uris, deadline=1.0)
    assert loaded["failures"] == ["pending"] * 2
    assert loaded["seconds"] < 10
    owner.resume()
    fresh = addresses(64 << 10, 2)
    eventually(lambda: engine.ask("save", uris=fresh, deadline=2.0)["failures"] == [None] * 2)
    assert engine.ask("load", uris=fresh)["equal"] == [True] * 2


def test_an_engine_goes_on_by_itself_when_the_master_was_killed_and_is_back(site: Site) -> None:
    site.owner(32 << 20)
    engine, late = site.client(), site.client()
    uris = addresses(64 << 10, 2)
    assert engine.ask("save", uris=uris)["failures"] == [None] * 2
    site.kill_master()
    for client in (engine, late):
        began = time.monotonic()
        loaded = client.ask("load", uris=uris, deadline=2.0)
        assert set(loaded["failures"]) <= {"error", "pending", "cancelled"}
        assert time.monotonic() - began < 20, "also a client that was never set up does not wait for long"
    site.start_master()
    fresh = addresses(64 << 10, 2)
    eventually(lambda: engine.ask("save", uris=fresh, deadline=5.0)["failures"] == [None] * 2)
    eventually(lambda: late.ask("load", uris=fresh, deadline=5.0)["equal"] == [True] * 2)


def test_a_first_use_against_a_master_that_stopped_ends_and_a_later_one_succeeds(site: Site) -> None:
    site.owner(32 << 20)
    engine, uris = site.client(), addresses(4096)
    site.stop_master()
    answer = engine.ask("save", uris=uris, deadline=1.0)
    assert set(answer["failures"]) <= {"error", "pending", "cancelled"}
    assert answer["seconds"] < 20, (
        "left to itself the client's setup never returns, and nothing else in its process runs"
    )
    site.resume_master()
    eventually(lambda: engine.ask("save", uris=uris, deadline=5.0)["failures"] == [None])


def test_parts_of_an_interrupted_save_count_as_stored_only_when_they_are(site: Site) -> None:
    site.owner(32 << 20)
    engine, uris = site.client(), addresses(4096, 4)
    assert engine.ask("save", uris=addresses(4096))["failures"] == [None]
    site.stop_master()
    assert set(engine.ask("save", uris=uris, deadline=30.0)["failures"]) == {"error"}
    site.resume_master()
    # The master takes the names now, for a writer that has given up: it says of every further try that it succeeded.
    saved = engine.ask("save", uris=uris)
    assert engine.ask("load", uris=uris)["equal"] == [failure is None for failure in saved["failures"]]
    assert all(not reason or "an earlier try" in reason for reason in saved["reasons"])


def test_a_closed_engine_answers_and_does_not_crash(shared_site: Site) -> None:
    engine = shared_site.client()
    uris = addresses(4096)
    assert engine.ask("save", uris=uris)["failures"] == [None]
    engine.ask("close_engine")
    assert engine.ask("load", uris=uris)["failures"] == ["cancelled"]


# ---- Ranges of parts, for loads of some layers ----


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("registered", [False, True])
def test_ranges_of_a_part_are_its_bytes(engine: Process, other_engine: Process, registered: bool, pieces: int) -> None:
    uris = addresses(100_003, 20)
    assert engine.ask("save", uris=uris)["failures"] == [None] * 20
    ranges = [[0, 1000], [0, 100_003], [50_000, 20_011], [100_002 - 8, 9]]
    loaded = other_engine.ask("load_ranges", uris=uris, ranges=ranges, pieces=pieces, registered=registered)
    assert loaded["failures"] == [None] * 80, loaded["reasons"]
    assert loaded["equal"] == [True] * 80
    assert loaded["moved_bytes"] == [size for _, size in ranges] * 20


@pytest.mark.parametrize("registered", [False, True])
def test_a_missing_object_is_the_only_miss(engine: Process, other_engine: Process, registered: bool) -> None:
    uris = addresses(4096, 10)
    engine.ask("save", uris=uris[:4] + uris[5:])
    loaded = other_engine.ask("load_ranges", uris=uris, ranges=[[0, 8], [4000, 96]], registered=registered)
    assert loaded["failures"] == [None] * 8 + ["lost"] * 2 + [None] * 10
    assert loaded["equal"] == [True] * 8 + [False] * 2 + [True] * 10
    whole = other_engine.ask("load", uris=uris[:4])  # nothing is left of the ranges that failed
    assert whole["equal"] == [True] * 4


def test_a_range_outside_the_part_is_refused(engine: Process) -> None:
    uris = addresses(4096)
    engine.ask("save", uris=uris)
    answer = engine.ask("load_ranges", uris=uris, ranges=[[4090, 7], [0, 4096]])
    assert answer["failures"] == ["refused", None]
    assert "must be > 0 and end within the part's 4096" in answer["reasons"][0]


def test_an_object_that_ends_before_the_range_is_a_miss(engine: Process, other_engine: Process) -> None:
    [uri] = addresses(1000)
    engine.ask("save", uris=[uri])
    larger = uri.replace("size=1000", "size=9000")
    answer = other_engine.ask("load_ranges", uris=[larger], ranges=[[900, 200]])
    assert answer["failures"] == ["lost"]
