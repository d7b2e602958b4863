"""Deleted slots of packed files are handed out again by a running manager, as configured (design.md decision 16)."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from test_transport_drivers import eventually
from test_transport_process import manager
from test_transport_sites import Site

from kvcm.model.uri import LocationUri

pytestmark = pytest.mark.e2e

KEYS = list(range(8))


def places(entries: list[dict[str, str]]) -> list[LocationUri]:
    return [LocationUri.parse(uri) for entry in entries for uri in entry.values()]


def written(found: list[LocationUri]) -> None:
    for place in found:
        path = Path(place.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.seek(place.offset)
            file.write(Random(place.offset).randbytes(place.size))


@pytest.mark.parametrize("grace_ms", [1, 0])
def test_a_write_gets_the_slots_of_removed_blocks(tmp_path: Path, grace_ms: int) -> None:
    setting = f"kvcm.storage.slot_reuse_grace_ms={grace_ms}"
    with manager(tmp_path, setting) as process, process.api() as api:
        site = Site(api)
        storage = site.storage(nfs={"root_path": str(tmp_path / "root"), "key_count_per_file": 8})
        instance = site.instance(site.group(storage, delay_ms=1))
        before = places(site.write(instance, KEYS))
        written(before)
        api.ok("RemoveCache", instance_id=instance, block_keys=KEYS[4:])
        notes = Path(before[0].path + ".deleted")
        eventually(lambda: notes.exists() and notes.read_bytes().count(b".") == 4)
        fresh = iter(range(1000, 2000))

        def tried() -> list[LocationUri]:
            return places(site.write(instance, [next(fresh) for _ in range(4)]))

        if grace_ms:
            again = eventually(lambda: [each for each in tried() if each.path == before[0].path])
            assert {each.blkid for each in again} <= {each.blkid for each in before[4:]}
            assert all(each.location_id for each in again)
        else:
            assert not [each for _ in range(20) for each in tried() if each.path == before[0].path]
        assert [each.blkid for each in places(site.match(instance, KEYS))] == [0, 1, 2, 3]
