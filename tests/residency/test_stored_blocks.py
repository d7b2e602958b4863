"""What follows the blocks of an index, against a plain set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from fake_clock import FakeClock
from index_rig import TableView, location
from thoroughness import examples

from kvcm.index.backends.backend import Change
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed_key, unmixed_key
from kvcm.model.locations import BlockRecord, Location, LocationStatus, with_event_hashes
from kvcm.residency.storage_events import OpenIndex, StorageEvents
from kvcm.residency.stored_blocks import StoredBlocks, StoredChange

STATUSES = (LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING)
STORAGES = ("a", "b")


@dataclass
class Listener:
    """Knows the changes that it gets, and nothing else."""

    keys: set[int] = field(default_factory=set)

    def on_change(self, change: StoredChange) -> None:
        stored, removed = set(change.stored.keys.tolist()), set(change.removed.keys.tolist())
        assert len(stored) == len(change.stored.keys)
        assert removed <= self.keys
        self.keys -= removed
        assert not stored & self.keys, "stored twice without a removal in between"
        self.keys |= stored


class FailingBackend(MemoryBackend):
    """Is away for some calls."""

    away_for = 0

    async def get_many(self, keys):  # type: ignore[no-untyped-def]
        if self.away_for:
            self.away_for -= 1
            raise StorageIOError("the store is away")
        return await super().get_many(keys)


def _new_record(new: Mapping[int, BlockRecord | None], key: int, _old: BlockRecord | None) -> BlockRecord | None:
    return new[key]


def random_record(random: Random) -> BlockRecord | None:
    locations: list[Location] = [
        location(f"l{number}", storage=random.choice(STORAGES), status=random.choice(STATUSES))
        for number in range(random.choice([0, 1, 1, 1, 2]))
    ]
    return BlockRecord(None, 0, tuple(locations)) if locations else None


async def settled(blocks: StoredBlocks) -> None:
    while blocks.has_work:
        with contextlib.suppress(StorageIOError):
            await blocks.step()


async def readable(index: MetaIndex, keys: range) -> set[int]:
    mixed = [mixed_key(key) for key in keys]
    answers = await index.answers(mixed)
    return {key for key, answer in zip(keys, answers, strict=True) if answer is not None}


@pytest.mark.parametrize("seed", range(examples(150)))
async def test_a_listener_knows_what_can_be_read_after_any_history(seed: int) -> None:
    """S1 and S2: through writes, removals, storages that come and go, lost hints, other indexes and failing reads."""
    random, view, listener = Random(seed), TableView({"a": 0, "b": 1}), Listener()
    keys = range(random.choice([5, 60, 3000]))
    backend = FailingBackend()
    index = MetaIndex(backend, view)
    blocks = StoredBlocks(index, view, listener.on_change)
    for _ in range(random.randrange(1, 60)):
        match random.choice(["write"] * 6 + ["storage", "unsure", "unseen", "index"] + ["step"] * 8):
            case "write":
                chosen = random.sample(keys, min(len(keys), random.choice([1, 3, 1500])))
                new = {mixed_key(key): random_record(random) for key in chosen}
                await index.read_modify_write(new, partial(_new_record, new))
            case "storage":
                view.change(random.choice(STORAGES), random.choice([0, None]))
            case "unsure":
                blocks.all_changed()
            case "unseen":  # by another manager, while the connection was lost
                key = mixed_key(random.choice(keys))
                await backend.write_many(
                    [Change(key, (await backend.get_many([key]))[0], random_record(random), False)]
                )
                index.invalidate_all()
            case "index":
                backend = FailingBackend()
                index = MetaIndex(backend, view)
                blocks.follow(index)
            case _:
                backend.away_for = random.choice([0, 0, 1, 2, 9])
                for _ in range(random.randrange(4)):
                    with contextlib.suppress(StorageIOError):
                        await blocks.step()
                backend.away_for = 0
    await settled(blocks)
    expected = await readable(index, keys)
    assert listener.keys == expected
    assert set(blocks.snapshot().keys.tolist()) == expected
    assert (blocks.count, blocks.is_complete) == (len(expected), True)
    blocks.close()
    assert listener.keys == set()


async def test_a_change_during_the_read_is_not_lost() -> None:
    """The hint that comes while its key is read is used afterwards."""
    view, listener = TableView({"a": 0}), Listener()
    reading, go_on = asyncio.Event(), asyncio.Event()

    class SlowBackend(MemoryBackend):
        async def get_many(self, keys):  # type: ignore[no-untyped-def]
            found = await super().get_many(keys)
            if not go_on.is_set():
                reading.set()
                await go_on.wait()
            return found

    index = MetaIndex(SlowBackend(), view)
    blocks = StoredBlocks(index, view, listener.on_change)
    key, record = mixed_key(7), BlockRecord(None, 0, (location(storage="a"),))
    blocks.changed([key])
    step = asyncio.create_task(blocks.step())
    await reading.wait()
    go_on.set()
    await index.put({key: record})
    await step
    await settled(blocks)
    assert listener.keys == {7}


async def test_millions_of_hints_of_few_blocks_take_no_memory() -> None:
    view = TableView({"a": 0})
    blocks = StoredBlocks(MetaIndex(MemoryBackend(), view), view, lambda _change: None)
    for _ in range(10_000):
        blocks.changed([mixed_key(key) for key in range(8)])
    await settled(blocks)
    assert blocks.count == 0


async def test_hints_are_bounded_while_the_store_is_away() -> None:
    view, listener = TableView({"a": 0}), Listener()
    index = MetaIndex(MemoryBackend(), view)
    blocks = StoredBlocks(index, view, listener.on_change)
    await settled(blocks)
    await index.put({mixed_key(key): BlockRecord(None, 0, (location(storage="a"),)) for key in range(10)})
    blocks.changed(range(1_000_000))
    assert len(blocks._hints) == 0
    assert not blocks.is_complete
    await settled(blocks)
    assert listener.keys == set(range(10))


async def test_a_block_whose_record_is_damaged_is_no_block_and_holds_up_no_other() -> None:
    view, listener = TableView({"a": 0}), Listener()
    damaged = {mixed_key(key) for key in (3, 700)}

    class Damaged(MemoryBackend):
        async def get_many(self, keys):  # type: ignore[no-untyped-def]
            if damaged & set(keys):
                raise StorageIOError("a stored record is damaged")
            return await super().get_many(keys)

    index = MetaIndex(Damaged(), view)
    blocks = StoredBlocks(index, view, listener.on_change)
    await index._backend.write_many(
        [Change(mixed_key(key), None, BlockRecord(None, 0, (location(storage="a"),)), False) for key in range(2000)]
    )
    for _ in range(20):
        await blocks.step()
    assert blocks.is_complete
    assert listener.keys == set(range(2000)) - {3, 700}


async def test_a_pass_ends_however_many_hints_come() -> None:
    """A storage that went away is noticed while others are written."""
    view, listener = TableView({"a": 0, "b": 0}), Listener()
    index = MetaIndex(MemoryBackend(), view)
    blocks = StoredBlocks(index, view, listener.on_change)
    await index.put({mixed_key(key): BlockRecord(None, 0, (location(storage="a"),)) for key in range(5000)})
    await settled(blocks)
    view.change("a", None)
    for key in range(5000, 5020):
        await index.put({mixed_key(key): BlockRecord(None, 0, (location(storage="b"),))})
        await blocks.step()
    assert listener.keys == set(range(5000, 5020))


async def test_a_failure_of_ours_is_no_end_of_a_pass() -> None:
    view, listener = TableView({"a": 0}), Listener()

    class Failing(MemoryBackend):
        fails = True

        def scan(self, batch_size=1024):  # type: ignore[no-untyped-def]
            if self.fails:
                raise RuntimeError("a mistake")
            return super().scan(batch_size)

    backend = Failing()
    index = MetaIndex(backend, view)
    await index.put({mixed_key(1): BlockRecord(None, 0, (location(storage="a"),))})
    blocks = StoredBlocks(index, view, listener.on_change)
    with pytest.raises(RuntimeError):
        await blocks.step()
    assert not blocks.is_complete
    backend.fails = False
    await settled(blocks)
    assert listener.keys == {1}


async def test_another_event_hash_is_a_removal_and_a_store() -> None:
    view, listener = TableView({"a": 0}), Listener()
    changes: list[tuple[list[int], list[int]]] = []

    def on_change(change: StoredChange) -> None:
        listener.on_change(change)
        changes.append((change.removed.event_hashes.tolist(), change.stored.event_hashes.tolist()))

    index = MetaIndex(MemoryBackend(), view)
    blocks = StoredBlocks(index, view, on_change)
    for number in (0, 77, -5):
        plain = location(storage="a")
        (chunk,) = with_event_hashes([plain.chunk], [number]) if number else (plain.chunk,)
        await index.put({mixed_key(1): BlockRecord(None, 0, (plain._replace(chunk=chunk),))})
        await settled(blocks)
    assert changes == [([], [0]), ([0], [77]), ([77], [-5])]
    assert blocks.snapshot().event_hashes.tolist() == [-5]


async def test_instances_are_followed_while_they_are_registered() -> None:
    view = TableView({"a": 0})
    indexes: list[OpenIndex] = []
    published: list[tuple[str, StoredChange]] = []
    sink = SimpleNamespace(publish=lambda instance, change: published.append((instance.instance_id, change)))
    events = StorageEvents(lambda: indexes, lambda: list(indexes), view, {"wanted": [sink], "late": [sink]})

    def index_of(uid: int, name: str) -> OpenIndex:
        return opened(uid, name, MetaIndex(MemoryBackend(), view))

    async def advance() -> list[tuple[str, list[int], list[int]]]:
        published.clear()
        events.refresh()
        while await events.step():
            pass
        return [(name, sorted(c.stored.keys.tolist()), sorted(c.removed.keys.tolist())) for name, c in published]

    indexes += [index_of(1, "wanted"), index_of(2, "other")]
    record = BlockRecord(None, 0, (location(storage="a"),))
    for each in indexes:
        await each.handle.meta_index.put({mixed_key(5): record})
    assert await advance() == [("wanted", [5], [])]
    indexes.append(index_of(3, "late"))
    await indexes[-1].handle.meta_index.put({mixed_key(6): record})
    assert await advance() == [("late", [6], [])]
    indexes[0] = index_of(4, "wanted")  # removed and registered again: its blocks are others
    await indexes[0].handle.meta_index.put({mixed_key(8): record})
    assert await advance() == [("wanted", [], [5]), ("wanted", [8], [])]
    del indexes[0]
    assert await advance() == [("wanted", [], [8])]
    assert events.counts.blocks == 1
    assert np.array_equal(events.snapshot("late").keys, [6])  # type: ignore[union-attr]
    assert events.snapshot("wanted") is None
    assert unmixed_key(mixed_key(6)) == 6


async def test_an_instance_that_cannot_be_read_holds_up_no_other() -> None:
    view, clock = TableView({"a": 0}), FakeClock(1_000.0)
    published: list[tuple[str, int]] = []
    sink = SimpleNamespace(
        publish=lambda instance, change: published.append((instance.instance_id, len(change.stored.keys)))
    )
    away = FailingBackend()
    indexes = [opened(1, "away", MetaIndex(away, view)), opened(2, "there", MetaIndex(MemoryBackend(), view))]
    events = StorageEvents(lambda: indexes, lambda: 1, view, {"*": [sink]}, lambda: clock.time)
    for each in indexes:
        await each.handle.meta_index.put({mixed_key(1): BlockRecord(None, 0, (location(storage="a"),))})
    away.away_for = 1_000
    events.refresh()
    for _ in range(5):
        await events.step()
    assert published == [("there", 1)]
    away.away_for = 0
    await events.step()
    assert published == [("there", 1)], "it is left alone for a while"
    clock.time += 10
    while await events.step():
        pass
    assert published == [("there", 1), ("away", 1)]


def opened(uid: int, name: str, index: MetaIndex) -> OpenIndex:
    instance = SimpleNamespace(instance_id=name, instance_group_name="g")
    return OpenIndex(SimpleNamespace(uid=uid, instance_id=name, instance=instance, meta_index=index), "")  # type: ignore[arg-type]
