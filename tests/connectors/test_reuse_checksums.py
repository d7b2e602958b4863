"""Bytes that change on the disk: found out when they are loaded, computed anew, forgotten and saved again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from manager_process import ManagerProcess
from reuse_cases import BLOCK, PATIENT, Connect, plain, prompt, read_block, run

from connectors.client import ManagerClient
from connectors.layout import staging
from connectors.results import Location
from connectors.transformers import KVReuse
from kvcm.model.uri import LocationUri


@pytest.fixture(params=["memory of the cache", "staging"])
def any_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks move from and to the cache itself, or through the staging buffer."""
    if request.param == "staging":
        monkeypatch.setattr(staging, "_MAX_PIECES", 1)


def locations_of(reuse: KVReuse, manager: ManagerProcess, instance_id: str, ids: torch.Tensor) -> list[Location]:
    with ManagerClient(manager.address, instance_id) as client:
        found = client.match(reuse.block_keys(ids[0].tolist()), timeout_seconds=20).locations
        return [location for location in found if location is not None]


def flip(uri: LocationUri, byte: int) -> None:
    path = Path(uri.path)
    data = bytearray(path.read_bytes())
    data[uri.offset + byte] ^= 0x10
    path.write_bytes(data)


@pytest.mark.usefixtures("any_memory")
def test_saved_blocks_have_the_checksums_of_their_bytes(
    connect: Connect, manager: ManagerProcess, instance_id: str
) -> None:
    reuse, ids = connect(), prompt(100)
    run(reuse, ids)
    locations = locations_of(reuse, manager, instance_id, ids)
    assert len(locations) == 6
    assert [location.checksums for location in locations] == [
        {"tp0": xxhash.xxh3_64_intdigest(read_block(location.uris["tp0"]))} for location in locations
    ]


@pytest.mark.feature("transformers", "changed bytes are found")
@pytest.mark.usefixtures("any_memory")
def test_a_flipped_bit_is_a_miss_and_the_block_is_saved_again(
    connect: Connect, manager: ManagerProcess, instance_id: str
) -> None:
    reuse, ids = connect(), prompt(300)
    expected, report = run(reuse, ids)
    assert torch.equal(expected, plain(ids))
    assert report.blocks_saved == 20
    before = locations_of(reuse, manager, instance_id, ids)
    flip(before[9].uris["tp0"], reuse.parts.block_bytes - 1)
    output, report = run(reuse, ids)
    assert torch.equal(output, expected)
    assert (report.matched_tokens, report.loaded_tokens, report.blocks_corrupt) == (288, 9 * BLOCK, 1)
    assert report.reason.startswith("block 9: the bytes have checksum ")
    assert report.blocks_saved == 1  # its location was removed at the manager, and those behind it are right
    after = locations_of(reuse, manager, instance_id, ids)
    assert [index for index in range(18) if before[index] != after[index]] == [9]
    assert after[9].checksums == before[9].checksums
    output, report = run(reuse, ids)
    assert torch.equal(output, expected)
    assert (report.loaded_tokens, report.blocks_corrupt, report.reason) == (288, 0, "")


def test_several_corrupt_blocks_are_reported_at_once(
    connect: Connect, manager: ManagerProcess, instance_id: str
) -> None:
    reuse, ids = connect(), prompt(100)
    expected, _ = run(reuse, ids)
    for location in locations_of(reuse, manager, instance_id, ids)[::2]:
        flip(location.uris["tp0"], 0)
    output, report = run(reuse, ids)
    assert torch.equal(output, expected)
    assert (report.loaded_tokens, report.blocks_corrupt, report.blocks_saved) == (0, 3, 3)
    assert run(reuse, ids)[1].loaded_tokens == 96


def test_blocks_that_were_saved_without_checksums_are_loaded_as_they_are(
    connect: Connect, manager: ManagerProcess, instance_id: str
) -> None:
    without, ids = connect(settings=replace(PATIENT, checksums=False)), prompt(100)
    expected, _ = run(without, ids)
    assert [each.checksums for each in locations_of(without, manager, instance_id, ids)] == [{}] * 6
    output, report = run(connect(), ids)
    assert torch.equal(output, expected)
    assert (report.loaded_tokens, report.reason) == (96, "")
