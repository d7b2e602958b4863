"""Objects of a real Mooncake store that another client replaces: a miss with checksums, and their neighbours load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest
from mooncake_rig import Process, Site, addresses, eventually, name_of
from participant import content

pytestmark = pytest.mark.e2e

SIZE = 40_003
EDGES = (0, 1, SIZE // 2, SIZE - 2, SIZE - 1)
BLOCKS = 12


@pytest.fixture(scope="session")
def meddler(shared_site: Site) -> Process:
    """A client of the store that is none of ours."""
    meddler = shared_site.client()
    meddler.ask("own", size_bytes=0)
    return meddler


def replaced(meddler: Process, uri: str, data: bytes) -> None:
    """Replace an object by other bytes, once no client reads it."""
    eventually(lambda: meddler.ask("raw_replace", name=name_of(uri), data=data.hex()) == 0)


def flipped(data: bytes, byte: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def saved(engine: Process) -> tuple[list[str], list[int]]:
    uris = addresses(SIZE, BLOCKS)
    answer = engine.ask("save", uris=uris)
    assert answer["failures"] == [None] * BLOCKS, answer["reasons"]
    assert all(answer["checksums"])
    return uris, answer["checksums"]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_changed_byte_is_a_miss_of_its_object_alone(
    meddler: Process, engine: Process, other_engine: Process, pieces: int, registered: bool
) -> None:
    random = Random(pieces)
    uris, checksums = saved(engine)
    damaged = random.sample(range(BLOCKS), len(EDGES))
    for index, byte in zip(damaged, EDGES, strict=True):
        replaced(meddler, uris[index], flipped(content(uris[index], SIZE), byte, random.randrange(8)))
    loaded = other_engine.ask("load", uris=uris, checksums=checksums, pieces=pieces, registered=registered)
    assert loaded["failures"] == ["corrupt" if index in damaged else None for index in range(BLOCKS)]
    assert [equal for index, equal in enumerate(loaded["equal"]) if index not in damaged] == [True] * (BLOCKS - 5)
    assert loaded["seconds"] < 10


@pytest.mark.parametrize("site", [2], indirect=True)
def test_the_death_of_the_owner_of_the_memory_leaves_no_wrong_bytes(site: Site) -> None:
    """With checksums, and again after another process lends memory: misses in time, and then all is well."""
    owner, engine = site.owner(32 << 20), site.client()
    uris, checksums = saved(engine)
    owner.kill()
    loaded = engine.ask("load", uris=uris, checksums=checksums, deadline=5.0)
    assert None not in loaded["failures"]
    assert loaded["seconds"] < 20
    site.owner(32 << 20)
    fresh = addresses(SIZE, BLOCKS)
    sums: list[int] = []

    def is_saved() -> bool:
        answer = engine.ask("save", uris=fresh, deadline=5.0)
        sums[:] = answer["checksums"]
        return bool(answer["failures"] == [None] * BLOCKS)

    eventually(is_saved)
    assert engine.ask("load", uris=fresh, checksums=sums)["failures"] == [None] * BLOCKS


def test_a_manager_forgets_what_changed_and_gives_other_addresses(site: Site, tmp_path: Path) -> None:
    site.owner(64 << 20)
    program = str(Path(__file__).with_name("corruption_process.py"))
    assert site.run([sys.executable, program, json.dumps(site.spec), str(tmp_path)]) == 0
