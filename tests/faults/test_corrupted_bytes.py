"""Bytes that change after they were saved, on every type of storage: a miss, never served, and saved again.

Mooncake's are changed in tests/mooncake/test_mooncake_corruption.py, since its store is in a network of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from corruption_media import PATH_SPECS, Medium, PathMedium, PoolMedium
from corruption_site import PART_BYTES, SPECS, BlockSite, Part, opened_site
from fault_mount import FaultMount
from manager_process import ManagerProcess

from kvcm.connectors.results import Location, MissingReport
from kvcm.connectors.transfer import Failure
from kvcm.model.uri import LocationUri

KEYS = list(range(1, 13))
ON_MOUNT = "file-8 on FUSE"
FILES = ["file-1", "hf3fs-8", "vcns-8", ON_MOUNT]
MEDIA = [*FILES, "pool"]
EDGES = (0, 1, PART_BYTES // 2, PART_BYTES - 2, PART_BYTES - 1)


@pytest.fixture
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    name: str = request.param
    if name == "pool":
        return PoolMedium(request.getfixturevalue("shared_memory"))
    if name == ON_MOUNT:
        mount: FaultMount = request.getfixturevalue("fault_mount")
        return PathMedium(PATH_SPECS["file-8"], mount.path, mount.directory)
    return PathMedium(PATH_SPECS[name], tmp_path / "root")


@pytest.fixture
def site(manager: ManagerProcess, medium: Medium) -> Iterator[BlockSite]:
    with opened_site(manager, medium) as site:
        yield site


def chosen(random: Random, count: int) -> list[Part]:
    """Some parts: always both of one block, and at least one whose neighbour in another spec stays as it is."""
    both, one, *others = random.sample(KEYS, count)
    return [(both, "tp0"), (both, "tp1"), (one, "tp1"), *((key, random.choice(SPECS)) for key in others)]


def saved(site: BlockSite) -> dict[int, Location]:
    """Save all blocks and return where they lie."""
    assert site.save(KEYS) == KEYS
    locations = site.match(KEYS)
    assert set(site.load(locations).values()) == {None}
    return locations


def corrupt(parts: list[Part]) -> Mapping[Part, Failure]:
    return dict.fromkeys(parts, Failure.CORRUPT)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("medium", MEDIA, indirect=True)
def test_a_changed_byte_is_a_miss_of_its_part_alone_and_is_saved_again(site: BlockSite, seed: int) -> None:
    random = Random(seed)
    for _ in range(3):
        before = site.match(KEYS) or saved(site)
        places, parts = site.places(before), chosen(random, 4)
        for number, part in enumerate(parts):
            byte = random.choice([EDGES[number % len(EDGES)], random.randrange(PART_BYTES)])
            site.medium.flip(places[part], byte, 1 << random.randrange(8))
        site.assert_found_out(KEYS, corrupt(parts), before)


@pytest.mark.parametrize("medium", MEDIA, indirect=True)
def test_parts_full_of_zeros_are_misses(site: BlockSite) -> None:
    """As a file system leaves what it lost, or a hole that was punched in the wrong place."""
    before, parts = saved(site), chosen(Random(1), 3)
    for part in parts:
        site.medium.poke(site.places(before)[part], bytes(PART_BYTES))
    site.assert_found_out(KEYS, corrupt(parts), before)


@pytest.mark.parametrize("medium", MEDIA, indirect=True)
def test_parts_that_changed_places_are_misses(site: BlockSite) -> None:
    """Every byte was saved by an engine, and the lengths are right: of two blocks, and of two parts of one block."""
    before = saved(site)
    places = site.places(before)
    pairs: list[tuple[Part, Part]] = [((2, "tp0"), (3, "tp0")), ((6, "tp0"), (6, "tp1")), ((1, "tp1"), (12, "tp0"))]
    for one, other in pairs:
        bytes_of_one, bytes_of_other = site.medium.peek(places[one]), site.medium.peek(places[other])
        site.medium.poke(places[one], bytes_of_other)
        site.medium.poke(places[other], bytes_of_one)
    site.assert_found_out(KEYS, corrupt([part for pair in pairs for part in pair]), before)


@pytest.mark.parametrize("medium", MEDIA, indirect=True)
def test_bytes_that_change_under_readers_are_never_served(site: BlockSite) -> None:
    """Many readers while bytes change and change back: what counts as loaded is right, which every load asserts."""
    before = saved(site)
    places, random = list(site.places(before).values()), Random(3)
    with ThreadPoolExecutor(3) as readers:
        calls = [readers.submit(lambda: [site.load(before) for _ in range(6)]) for _ in range(3)]
        while not all(call.done() for call in calls):
            uri, byte = random.choice(places), random.randrange(PART_BYTES)
            site.medium.flip(uri, byte)
            site.medium.flip(uri, byte)
        seen = {failure for call in calls for failures in call.result() for failure in failures.values()}
    assert seen <= {None, Failure.CORRUPT}
    assert set(site.load(before).values()) == {None}


@pytest.mark.parametrize("medium", MEDIA, indirect=True)
def test_only_recorded_checksums_remove_a_location(site: BlockSite) -> None:
    """The manager ignores reports with a checksum that it did not record, or with that of a location that is gone."""
    before = saved(site)
    places = site.places(before)
    made_up = [(key, uri, before[key].checksums[spec] ^ 1) for (key, spec), uri in places.items()]
    assert site.client.report_missing([], corrupt=made_up) == MissingReport(0, len(made_up))
    assert site.match(KEYS) == before
    site.medium.flip(places[4, "tp0"], 0)
    site.assert_found_out(KEYS, corrupt([(4, "tp0")]), before)
    late = [(4, places[4, "tp0"], before[4].checksums["tp0"])]
    assert site.client.report_missing([], corrupt=late) == MissingReport(0, 1)
    site.assert_all_load(KEYS)


@pytest.mark.parametrize("left_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 7])
@pytest.mark.parametrize("medium", FILES, indirect=True)
def test_a_file_that_was_cut_is_a_miss_from_there_on(site: BlockSite, left_bytes: int) -> None:
    before = saved(site)
    places, file = site.places(before), _file_of(site, before)
    expected = {
        part: Failure.LOST for part, uri in places.items() if _is_in(site, uri, file) and _end(uri) > left_bytes
    }
    os.truncate(file, left_bytes)
    if not expected:  # a file of one part is whole
        assert set(site.load(before).values()) == {None}
        return
    site.assert_found_out(KEYS, expected, before)


def _file_of(site: BlockSite, locations: Mapping[int, Location], key: int = 6) -> Path:
    assert isinstance(site.medium, PathMedium)
    return site.medium.file(locations[key].uris["tp1"])


def _is_in(site: BlockSite, uri: LocationUri, file: Path) -> bool:
    assert isinstance(site.medium, PathMedium)
    return site.medium.file(uri) == file


def _end(uri: LocationUri) -> int:
    return uri.offset + uri.size
