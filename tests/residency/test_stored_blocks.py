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
from index_rig import TableView, location
from thoroughness import examples

from kvcm.index.backends.backend import Change
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed_key, unmixed_key
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.residency.storage_events import StorageEvents
from kvcm.residency.stored_blocks import StoredBlocks, StoredChange

STATUSES = (LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING)
STORAGES = ("a", "b")


@dataclass
class Listener:
    """Knows only what it is told."""

    keys: set[int] = field(default_factory=set)

    def on_change(self, change: StoredChange) -> None:
        stored, removed = set(change.stored.keys.tolist()), set(change.removed.keys.tolist())
        assert len(stored) == len(change.stored.keys)
        assert not stored & self.keys, "stored twice without a removal in between"
        assert removed <= self.keys
        self.keys = (self.keys - removed) | stored


class FailingBackend(MemoryBackend):
    """Fails every few reads."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.fails = False

    async def get_many(self, keys):  # type: ignore[no-untyped-def]
        if self.fails and self.random.random() < 0.5:
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
    while True:
        try:
            if not await blocks.step():
                return
        except StorageIOError:
            continue


async def readable(index: MetaIndex, keys: range) -> set[int]:
    mixed = [mixed_key(key) for key in keys]
    answers = await index.answers(mixed)
    return {key for key, answer in zip(keys, answers, strict=True) if answer is not None}


@pytest.mark.parametrize("seed", range(examples(150)))
async def test_a_listener_knows_what_can_be_read_after_any_history(seed: int) -> None:
    """S1 and S2: through writes, removals, storages that come and go, lost hints, other indexes and failing reads."""
    random, view, listener = Random(seed), TableView({"a": 0, "b": 1}), Listener()
    keys = range(random.choice([5, 60, 3000]))
    backend = FailingBackend(random)
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
                backend = FailingBackend(random)
                index = MetaIndex(backend, view)
                blocks.follow(index)
            case _:
                backend.fails = random.random() < 0.3
                for _ in range(random.randrange(4)):
                    with contextlib.suppress(StorageIOError):
                        await blocks.step()
                backend.fails = False
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


async def test_instances_are_followed_while_they_are_registered() -> None:
    view = TableView({"a": 0})
    handles: list[SimpleNamespace] = []
    published: list[tuple[str, StoredChange]] = []
    sink = SimpleNamespace(publish=lambda instance, change: published.append((instance.instance_id, change)))
    events = StorageEvents(lambda: handles, view, {"wanted": [sink], "late": [sink]})  # type: ignore[arg-type,return-value]

    def handle(uid: int, name: str) -> SimpleNamespace:
        instance = SimpleNamespace(instance_id=name, instance_group_name="g")
        return SimpleNamespace(
            uid=uid, instance_id=name, instance=instance, meta_index=MetaIndex(MemoryBackend(), view)
        )

    async def advance() -> list[tuple[str, list[int], list[int]]]:
        published.clear()
        events.refresh()
        while await events.step():
            pass
        return [(name, sorted(c.stored.keys.tolist()), sorted(c.removed.keys.tolist())) for name, c in published]

    handles += [handle(1, "wanted"), handle(2, "other")]
    record = BlockRecord(None, 0, (location(storage="a"),))
    for each in handles:
        await each.meta_index.put({mixed_key(5): record})
    assert await advance() == [("wanted", [5], [])]
    handles.append(handle(3, "late"))
    await handles[-1].meta_index.put({mixed_key(6): record})
    assert await advance() == [("late", [6], [])]
    handles[0] = handle(4, "wanted")  # removed and registered again: its blocks are others
    await handles[0].meta_index.put({mixed_key(8): record})
    assert await advance() == [("wanted", [], [5]), ("wanted", [8], [])]
    del handles[0]
    assert await advance() == [("wanted", [], [8])]
    assert events.counts.blocks == 1
    assert np.array_equal(events.snapshot("late").keys, [6])  # type: ignore[union-attr]
    assert events.snapshot("wanted") is None
    assert unmixed_key(mixed_key(6)) == 6
