"""Whoever follows an index knows its resident blocks row by row, from what it was told alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from index_rig import TableView, location, record

from kvcm.index.backends.backend import Change, IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.rocks import load_index
from kvcm.index.backends.rows import Rows
from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import SystemClock
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.store.rocks.store import RocksStore

KEYS = range(7)


class Follower:
    """Keeps what it is told, and checks that every event is true when it is told."""

    def __init__(self, follow: Callable[[Follower], Rows | None]) -> None:
        self.blocks: dict[int, int] = {}
        self.events: list[tuple[str, int, int]] = []
        rows = follow(self)
        assert rows is not None
        self.rows = rows
        self.blocks = {row: rows.key(row) for row in range(len(rows)) if rows.is_resident(row)}

    def added(self, row: int) -> None:
        assert row not in self.blocks
        assert self.rows.is_resident(row)
        self.blocks[row] = self.rows.key(row)
        self.note("added", row)

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        for row in rows:
            assert self.rows.priority(row) == priority
            self.added(row)

    def removed(self, row: int) -> None:
        assert self.blocks[row] == self.rows.key(row)
        self.note("removed", row)
        del self.blocks[row]

    def changed(self, row: int) -> None:
        assert self.blocks[row] == self.rows.key(row)
        assert self.rows.is_resident(row)
        self.note("changed", row)

    def moved(self, row: int, to: int) -> None:
        assert to not in self.blocks
        self.blocks[to] = self.blocks.pop(row)
        assert self.blocks[to] == self.rows.key(to)
        self.note("moved", to)

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        for row, count in zip(rows, reads, strict=True):
            if row in self.blocks:
                assert self.blocks[row] == self.rows.key(row)
                self.note("touched", row, count)

    def note(self, what: str, row: int, reads: int = 0) -> None:
        self.events.append((what, self.blocks[row], reads))

    def told(self, *, without_moves: bool = True) -> list[tuple[str, int, int]]:
        """What was told since it was asked last."""
        events, self.events = self.events, []
        return [event for event in events if not (without_moves and event[0] == "moved")]


async def write(backend: IndexBackend, states: Mapping[int, BlockRecord | None]) -> None:
    olds = await backend.get_many(list(states))
    written = await backend.write_many([Change(key, old, states[key]) for key, old in zip(states, olds, strict=True)])
    assert not written.lost


def is_resident(made: BlockRecord | None) -> bool:
    return made is not None and any(place.status is LocationStatus.SERVING for place in made.locations)


def event_of(key: int, old: BlockRecord | None, new: BlockRecord | None) -> list[tuple[str, int, int]]:
    names = {(False, True): "added", (True, False): "removed", (True, True): "changed"}
    name = names.get((is_resident(old), is_resident(new)))
    return [(name, key, 0)] if name is not None else []


STATES = st.none() | st.builds(
    lambda statuses, parent: record(*(location(f"{s:d}", status=s) for s in sorted(statuses)), parent=parent),
    st.sets(st.sampled_from(LocationStatus), min_size=1),
    st.none() | st.sampled_from(KEYS),
)
STEPS = st.lists(
    st.tuples(st.just("write"), st.dictionaries(st.sampled_from(KEYS), STATES, max_size=5))
    | st.tuples(st.just("touch"), st.dictionaries(st.sampled_from(KEYS), st.integers(1, 9), max_size=4))
    | st.tuples(st.just("drop"), st.just({})),
    max_size=15,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(before=st.dictionaries(st.sampled_from(KEYS), STATES), steps=STEPS)
async def test_what_is_told_is_what_is_resident(
    before: Mapping[int, BlockRecord | None], steps: list[tuple[str, dict[int, BlockRecord | None]]]
) -> None:
    backend = MemoryBackend()
    await write(backend, before)
    records = {key: made for key, made in before.items() if made is not None}
    follower = Follower(backend.follow)
    for verb, values in steps:
        if verb == "write":
            await write(backend, values)
            expected = [event for key, new in values.items() for event in event_of(key, records.get(key), new)]
            records = {key: made for key, made in {**records, **values}.items() if made is not None}
        elif verb == "touch":
            await backend.touch(values, 50.0, moves=False)
            expected = [("touched", key, n) for key, n in values.items() if is_resident(records.get(key))]
        else:
            await backend.drop()
            expected = [("removed", key, 0) for key, made in records.items() if is_resident(made)]
            records = {}
        told = follower.told()
        assert sorted(told) == sorted(expected) if verb == "drop" else told == expected
        resident = sorted(key for key, made in records.items() if is_resident(made))
        assert sorted(follower.blocks.values()) == resident
        assert all(follower.rows.row(key) == row for row, key in follower.blocks.items())


async def test_a_block_that_loses_takes_nobody_along() -> None:
    """What lost to another change is not told."""
    backend = MemoryBackend()
    await write(backend, {1: record()})
    follower = Follower(backend.follow)
    written = await backend.write_many([Change(1, record(parent=3), None), Change(2, record(), None)])
    assert sorted(written.lost) == [1, 2]
    assert follower.told(without_moves=False) == []


async def test_only_the_last_who_asked_is_told() -> None:
    backend = MemoryBackend()
    first = Follower(backend.follow)
    second = Follower(backend.follow)
    await write(backend, {1: record()})
    backend.follow(None)
    await write(backend, {2: record()})
    assert (first.told(), second.told()) == ([], [("added", 1, 0)])


async def test_what_was_loaded_is_followed_too(tmp_path: Path) -> None:
    made = {key: record(location(status=Random(key).choice(list(LocationStatus)))) for key in range(30)}
    store = RocksStore(tmp_path, "never", SystemClock())
    await write(load_index(store).backend(1), made)
    await store.close()
    store = RocksStore(tmp_path, "never", SystemClock())
    backend = load_index(store).backend(1)
    follower = Follower(backend.follow)
    assert sorted(follower.blocks.values()) == [key for key in made if is_resident(made[key])]
    await backend.drop()
    assert follower.blocks == {}
    await store.close()


class SharedMemory(MemoryBackend):
    """What several managers would change."""

    is_shared = True


async def test_an_index_that_others_change_cannot_be_followed() -> None:
    alone = MetaIndex(MemoryBackend(), TableView({"nfs": 1}))
    follower = Follower(alone.follow)
    await alone.put({1: record()})
    await alone.touch({1: 3}, 5.0)
    assert follower.told() == [("added", 1, 0), ("touched", 1, 3)]
    assert not alone.is_shared
    shared = MetaIndex(SharedMemory(), TableView({"nfs": 1}))
    assert shared.follow(follower) is None
    await shared.put({2: record()})
    assert (follower.told(), shared.is_shared) == ([], True)
