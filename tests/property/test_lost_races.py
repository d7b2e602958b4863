"""MetaIndex over a store where other managers change records between its reading and its writing.

A record counts in its `depth`, and every change of anybody raises it by one: a lost update is a number that is missing.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from cache_world import dummy
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget
from kvcm.model.errors import NotReadyError
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.storage.directory import StorageDirectory

FIXED = settings(max_examples=examples(200), deadline=None, derandomize=True)
KEYS = st.lists(st.integers(0, 20), min_size=1, max_size=15, unique=True)
ATTEMPTS = 32
DUMMY = StorageType.ST_DUMMY
PLACE = Place("a", DUMMY)


def counting_record(key: int, count: int) -> BlockRecord:
    chunk = encode_chunk(DUMMY, 1, [SpecUri("kv", f"dummy://a/{key}/{count}?size=1")])
    place = Location(f"{key}-{count}", "a", DUMMY, LocationStatus.SERVING, ("kv",), chunk, count, 0.0)
    return BlockRecord(None, count, (place,))


def increment(key: int, old: BlockRecord | None) -> BlockRecord:
    return counting_record(key, 1 if old is None else old.depth + 1)


class ContestedBackend(MemoryBackend):
    """A shared store: a rival increments some of the keys right before they are compared and set.

    Attributes:
        rivals: keys that the rival takes before the first write, before the second and so on.
        written: the keys of every write that was tried.
        rival_usage: bytes that the rival added.
    """

    awaits = True
    is_shared = True

    def __init__(self, rivals: Sequence[Sequence[int]] = ()) -> None:
        super().__init__()
        self._rivals = iter(rivals)
        self.written: list[list[int]] = []
        self.rival_counts: Counter[int] = Counter()
        self.rival_usage = 0

    async def write_many(self, changes: Sequence[Change]) -> Written:
        await self._lose(next(self._rivals, ()))
        self.written.append([change.key for change in changes])
        return await super().write_many(changes)

    async def _lose(self, keys: Sequence[int]) -> None:
        records = await self.get_many(keys)
        changes = [Change(key, old, increment(key, old)) for key, old in zip(keys, records, strict=True)]
        written = await super().write_many(changes)
        assert not written.lost
        self.rival_counts.update(keys)
        self.rival_usage += written.usage.get(PLACE, 0)


class Rig:
    def __init__(self, backend: ContestedBackend, batch_key_size: int = 256) -> None:
        view = StorageDirectory("cluster")
        view.open(dummy("a"))
        self.backend = backend
        self.told_bytes: Counter[Place] = Counter()
        self.told_keys = 0
        self.applied: list[Change] = []
        self.index = MetaIndex(
            backend,
            view,
            shard_count=4,
            batch_key_size=batch_key_size,
            on_usage=lambda: self.on_usage,
            budget=CacheBudget(1 << 20),
        )

    def on_usage(self, difference: Counter[Place], keys: int) -> None:
        self.told_bytes.update(difference)
        self.told_keys += keys

    async def increment(self, keys: Sequence[int]) -> list[Change]:
        return await self.index.read_modify_write(keys, increment, self.applied.extend)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They spread managers in time; here there is one."""
    monkeypatch.setattr("kvcm.index.meta_index._LONGEST_PAUSE_SECONDS", 0.0)


async def test_only_the_keys_that_lost_are_tried_again() -> None:
    rig = Rig(ContestedBackend([[2, 4], [4]]))
    changes = await rig.increment([1, 2, 3, 4])
    assert [sorted(keys) for keys in rig.backend.written] == [[1, 2, 3, 4], [2, 4], [4]]
    assert [(change.key, change.new and change.new.depth) for change in changes] == [(1, 1), (2, 2), (3, 1), (4, 3)]


async def test_attempts_are_bounded_and_the_error_says_what_to_do() -> None:
    rig = Rig(ContestedBackend([[7]] * 100))
    with pytest.raises(NotReadyError, match=rf"1 blocks .* {ATTEMPTS} attempts: retry"):
        await rig.increment([7, 8])
    assert rig.backend.written == [rig.backend.written[0], *[[7]] * (ATTEMPTS - 1)]
    assert [change.key for change in rig.applied] == [8], "what was stored was told"
    assert rig.told_keys == 1


async def test_the_last_attempt_counts() -> None:
    rig = Rig(ContestedBackend([[7]] * (ATTEMPTS - 1)))
    (change,) = await rig.increment([7])
    assert change.new == counting_record(7, ATTEMPTS)


async def test_a_modify_that_changes_its_mind_after_a_lost_race_writes_nothing() -> None:
    """It wanted the key for itself and a rival has it now: the answer shows the rival's record."""
    rig = Rig(ContestedBackend([[1]]))
    (change,) = await rig.index.read_modify_write([1], lambda key, old: old or counting_record(key, 50))
    assert change.new is change.old
    assert change.new == counting_record(1, 1)
    assert rig.backend.written == [[1]]


@FIXED
@given(
    calls=st.lists(KEYS, min_size=1, max_size=5),
    seed=st.integers(0, 1 << 32),
    batch=st.sampled_from([1, 4, 100]),
)
async def test_no_update_is_lost_and_usage_is_the_recount(calls: list[list[int]], seed: int, batch: int) -> None:
    """Invariant 4 across managers: what each was told adds up to what the records say."""
    random = Random(seed)
    rivals = [[key for key in range(21) if random.random() < 0.3] for _ in range(40)]
    rig = Rig(ContestedBackend(rivals), batch)
    counted: Counter[int] = Counter()
    for keys in calls:
        rig.applied.clear()
        changes = await rig.increment(keys)
        assert sorted(rig.applied) == sorted(changes), "each stored change is told once"
        counted.update(keys)
        # Nothing of what lost a race is shown.
        records = await rig.backend.get_many(keys)
        assert await rig.index.answers(keys) == [record and record.locations[0].chunk for record in records]
        rig.index.invalidate(range(21))  # as the store tells of what rivals change
    counted += rig.backend.rival_counts
    records = await rig.backend.get_many(range(21))
    assert {key: record.depth for key, record in enumerate(records) if record is not None} == dict(counted)
    recount = sum(place.size_bytes for record in records if record is not None for place in record.locations)
    assert rig.told_bytes[PLACE] + rig.backend.rival_usage == recount
    assert rig.told_keys <= rig.backend.key_count == sum(record is not None for record in records)
