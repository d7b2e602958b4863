"""Loading some layers of blocks from a Mooncake store, and memory that the engine registers."""

from __future__ import annotations

import pytest
from mooncake_rig import Process, addresses

pytestmark = pytest.mark.e2e


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
