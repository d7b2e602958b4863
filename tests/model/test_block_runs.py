"""Runs of blocks: what they stand for, one by one."""

import pytest

from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.runs import BlockRun
from kvcm.model.storages import StorageType

ALIKE = Location("l", "nfs", StorageType.ST_NFS, LocationStatus.WRITING, ("tp0",), b"", 10, 5.0, "s", 60.0)
KEYS = [11, 12, 13, 14]
CHUNKS = [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("parent", [None, 10])
def test_each_block_is_the_parent_of_the_next(parent: int | None) -> None:
    records = BlockRun(KEYS, parent, 3, ALIKE, CHUNKS).records()
    assert records == [
        BlockRecord(before, 3 + number, (ALIKE._replace(chunk=CHUNKS[number]),))
        for number, before in enumerate([parent, 11, 12, 13])
    ]


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (0, 2), (1, 3), (3, 4), (2, 9)])
def test_a_part_of_a_run_stands_for_the_same_blocks(begin: int, end: int) -> None:
    run = BlockRun(KEYS, 10, 3, ALIKE, CHUNKS)
    part = run.cut(begin, end)
    assert part.keys == KEYS[begin:end]
    assert part.records() == run.records()[begin:end]
