"""Usage when a shared store does what it is told and its answer is lost: never below the truth (decision 2)."""

from collections import Counter
from collections.abc import Sequence

import pytest
from index_rig import TableView, location, record

from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import Place
from kvcm.model.storages import StorageType

NFS = Place("nfs", StorageType.ST_NFS)


class UnheardBackend(MemoryBackend):
    """A shared store whose answers to writes get lost, after it wrote or before."""

    awaits = True
    is_shared = True
    is_heard = True
    writes = True

    async def write_many(self, changes: Sequence[Change]) -> Written:
        written = await super().write_many(changes) if self.writes else None
        if not self.is_heard or written is None:
            raise StorageIOError("no answer")
        return written


class Told:
    """An index and the sum of what it told of usage."""

    def __init__(self) -> None:
        self.usage: Counter[Place] = Counter()
        self.keys = 0
        self.backend = UnheardBackend()
        self.index = MetaIndex(self.backend, TableView({"nfs": 1}), on_usage=lambda: self._add)

    def _add(self, usage: dict[Place, int], keys: int) -> None:
        self.usage.update(usage)
        self.keys += keys


@pytest.mark.parametrize("writes", [True, False])
async def test_growth_is_told_when_nobody_knows_whether_it_was_stored(writes: bool) -> None:
    told = Told()
    told.backend.is_heard, told.backend.writes = False, writes
    with pytest.raises(StorageIOError):
        await told.index.put({1: record(location(size_bytes=10)), 2: record(location(size_bytes=5))})
    assert told.usage == {NFS: 15}
    assert told.keys == 2


async def test_shrinking_is_not_told_before_it_is_certain() -> None:
    told = Told()
    await told.index.put({1: record(location(size_bytes=10))})
    told.backend.is_heard = told.backend.writes = False
    with pytest.raises(StorageIOError):
        await told.index.delete([1])
    assert told.usage == told.backend.usage_bytes == {NFS: 10}
    assert told.keys == 1


async def test_one_that_shrinks_hides_none_that_grows() -> None:
    told = Told()
    await told.index.put({1: record(location(size_bytes=10))})
    told.backend.is_heard = False
    records = {1: None, 2: record(location(size_bytes=10))}
    with pytest.raises(StorageIOError):
        await told.index.read_modify_write(records, lambda key, _old: records[key])
    assert told.usage == {NFS: 20}
    assert told.keys == 2
