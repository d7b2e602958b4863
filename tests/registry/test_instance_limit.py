"""How many instances a group may have, however many managers register at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import cycle, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_rig import GROUP, INSTANCE, DyingTable, Opener, SuspendingTable
from thoroughness import examples

from kvcm.model.errors import (
    CapacityError,
    DuplicateEntityError,
    KvcmError,
    NotReadyError,
    StorageIOError,
    UnknownInstanceError,
)
from kvcm.model.instances import Instance
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.registry.registry import Registry
from kvcm.store.memory import MemoryTable


def instance(name: str, **fields: object) -> Instance:
    return replace(INSTANCE, instance_id=name, **fields)  # type: ignore[arg-type]


class WatchedTable(MemoryTable):
    """Holds the registry, and sees after every change that no more instances are registered than may be."""

    limit = 1 << 30

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        done = await super().replace(name, old, new, due)
        assert len(self.registered()) <= self.limit
        return done

    def registered(self) -> list[str]:
        return [name for name in self._documents if name.startswith("instance/")]


def pauses(numbers: Sequence[int]) -> Iterator[int]:
    while True:
        yield from numbers
        yield 1


CALLS = st.lists(st.tuples(st.booleans(), st.sampled_from("abcde")), min_size=1, max_size=4)
MANAGERS = st.lists(
    st.tuples(CALLS, st.lists(st.integers(0, 9), max_size=6), st.integers(1, 40)), min_size=1, max_size=4
)


async def run(registry: Registry, calls: Sequence[tuple[bool, str]]) -> None:
    for is_registration, name in calls:
        try:
            if is_registration:
                await registry.instances.register(instance(name))
            else:
                removed = registry.instances.placement(name).uid
                await registry.instances.remove(name)
                await registry.instances.forget_removal(removed)
        except (CapacityError, UnknownInstanceError):
            continue
        except StorageIOError:
            return


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(limit=st.integers(1, 3), managers=MANAGERS)
async def test_the_limit_is_never_exceeded_and_no_slot_is_lost(
    limit: int, managers: list[tuple[list[tuple[bool, str]], list[int], int]]
) -> None:
    table = WatchedTable()
    table.limit = limit
    await Registry(Opener(), table).groups.create(replace(GROUP, max_instance_count=limit))
    registries = [Registry(Opener(), DyingTable(table, life, pauses=pauses(p))) for _, p, life in managers]
    async with asyncio.TaskGroup() as tasks:
        for registry, (calls, _, _) in zip(registries, managers, strict=True):
            tasks.create_task(run(registry, calls))
    survivor = Registry(Opener(), table)
    await survivor.load()
    for number in range(limit):  # what dead managers began is finished, what they left is given away
        with suppress(CapacityError):
            await survivor.instances.register(instance(f"new{number}"))
    assert len(table.registered()) == limit
    with pytest.raises(CapacityError, match=f"max_instance_count of {limit} instances"):
        await survivor.instances.register(instance("more"))


async def test_a_limit_that_is_set_later_counts_earlier_registrations() -> None:
    """Also by a release without instance limits."""
    table = MemoryTable()
    registry = Registry(Opener(), table)
    await registry.groups.create(GROUP)
    for name in "abc":
        await registry.instances.register(instance(name))
    assert await table.replace("seats/group", await table.get("seats/group"), None)
    await registry.groups.update(replace(GROUP, max_instance_count=3, version=2), 1)
    with pytest.raises(CapacityError, match="group 'group' is full"):
        await registry.instances.register(instance("d"))
    await registry.instances.register(instance("a"))
    await registry.groups.update(replace(GROUP, max_instance_count=4, version=3), 2)
    await registry.instances.register(instance("d"))


async def cut_off(table: MemoryTable, life: int) -> bool:
    """Register an instance `a` through a manager that dies after so many calls. Whether only its seat was taken."""
    await Registry(Opener(), table).groups.create(replace(GROUP, max_instance_count=1))
    with suppress(StorageIOError):
        await Registry(Opener(), DyingTable(table, life)).instances.register(instance("a"))
    return await table.get("seats/group") is not None and await table.get("instance/a") is None


async def test_a_registration_that_was_cut_off_is_completed_when_its_slot_is_needed() -> None:
    tables = [MemoryTable() for _ in range(20)]
    tables = [table for life, table in enumerate(tables) if await cut_off(table, life)]
    assert tables
    for table in tables:
        registry = Registry(Opener(), table)
        await registry.load()
        with pytest.raises(CapacityError):
            await registry.instances.register(instance("b"))
        assert [each.instance_id for each in registry.instances.all()] == ["a"]
        await registry.instances.register(instance("a"))
        with pytest.raises(DuplicateEntityError):
            await registry.instances.register(instance("a", block_size=99))


async def test_a_removal_that_was_cut_off_before_the_slot_is_no_registration_to_complete() -> None:
    seen = 0
    for life in range(20):
        table = MemoryTable()
        registry = Registry(Opener(), table)
        await registry.groups.create(replace(GROUP, max_instance_count=1))
        await registry.instances.register(instance("a"))
        with suppress(StorageIOError):
            await Registry(Opener(), DyingTable(table, life)).instances.remove("a")
        if await table.get("instance/a") is None and await table.get("seats/group") is not None:
            seen += 1
            await Registry(Opener(), table).instances.register(instance("b"))
            assert await table.get("instance/a") is None
    assert seen


class SlowTable(SuspendingTable):
    """Stores registrations once the test sets `go_on`."""

    def __init__(self, table: MemoryTable) -> None:
        super().__init__(table)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        if name.startswith("instance/"):
            self.reached.set()
            await self.go_on.wait()
        return await super().replace(name, old, new, due)


async def test_an_instance_that_others_completed_and_removed_is_not_registered_again() -> None:
    """A number of a registration is never used again, nor is there one instance too many."""
    table = MemoryTable()
    way = SlowTable(table)
    slow, other = Registry(Opener(), way), Registry(Opener(), table)
    await other.groups.create(replace(GROUP, max_instance_count=1))
    call = asyncio.create_task(slow.instances.register(instance("a")))
    await way.reached.wait()
    with pytest.raises(CapacityError):
        await other.instances.register(instance("b"))
    uid = other.instances.placement("a").uid
    await other.instances.remove("a")
    await other.instances.forget_removal(uid)
    await other.instances.register(instance("b"))
    way.go_on.set()
    with pytest.raises(NotReadyError, match="register it again"):
        await call
    assert await table.get("instance/a") is None


# ── Whatever two managers do at the same time, in whatever order their calls reach the store ──


@dataclass
class Model:
    """The configuration: groups by name with their version, instances by id with their block size, storages with
    their root and switch, and roots of removed ones whose names are kept."""

    groups: dict[str, int] = field(default_factory=dict)
    instances: dict[str, int] = field(default_factory=dict)
    storages: dict[str, tuple[str, bool]] = field(default_factory=dict)
    retired: dict[str, str] = field(default_factory=dict)

    def run(self, verb: str, name: str, number: int) -> str:
        """Do a step; returns "ok" or the refusal."""
        outcome: str = getattr(self, verb)(name, number)
        return outcome

    def create(self, name: str, number: int) -> str:
        if name in self.groups:
            return "DuplicateEntityError"
        self.groups[name] = number
        return "ok"

    def update(self, name: str, number: int) -> str:
        if self.groups.get(name) != number:
            return "InvalidArgumentError"
        self.groups[name] = number + 1
        return "ok"

    def forget(self, name: str, number: int) -> str:
        return "InvalidArgumentError" if self.groups.pop(name, None) is None else "ok"

    def register(self, name: str, number: int) -> str:
        if name in self.instances:
            return "ok" if self.instances[name] == number else "DuplicateEntityError"
        if "a" not in self.groups:
            return "InvalidArgumentError"
        self.instances[name] = number
        return "ok"

    def remove(self, name: str, number: int) -> str:
        return "UnknownInstanceError" if self.instances.pop(name, None) is None else "ok"

    def add(self, name: str, number: int) -> str:
        if name in self.storages:
            return "DuplicateEntityError"
        if self.retired.get(name, f"/{number}") != f"/{number}":
            return "NotReadyError"
        self.retired.pop(name, None)
        self.storages[name] = (f"/{number}", True)
        return "ok"

    def move(self, name: str, number: int) -> str:
        if name not in self.storages:
            return "InvalidArgumentError"
        self.storages[name] = (f"/{number}", self.storages[name][1])
        return "ok"

    def switch(self, name: str, number: int) -> str:
        if name not in self.storages:
            return "InvalidArgumentError"
        self.storages[name] = (self.storages[name][0], number % 2 == 0)
        return "ok"

    def close(self, name: str, number: int) -> str:
        if name not in self.storages:
            return "InvalidArgumentError"
        self.retired[name], _ = self.storages.pop(name)
        return "ok"


def storage(name: str, number: int) -> StorageConfig:
    return StorageConfig(name, NfsStorageSpec(f"/{number}"))


VERBS: dict[str, Callable[[Registry, str, int], Awaitable[Any]]] = {
    "create": lambda registry, name, number: registry.groups.create(replace(GROUP, name=name, version=number)),
    "update": lambda registry, name, number: registry.groups.update(
        replace(GROUP, name=name, version=number + 1), number
    ),
    "forget": lambda registry, name, _: registry.groups.remove(name),
    "register": lambda registry, name, number: registry.instances.register(
        replace(INSTANCE, instance_group_name="a", instance_id=name, block_size=number)
    ),
    "remove": lambda registry, name, _: registry.instances.remove(name),
    "add": lambda registry, name, number: registry.storages.add(storage(name, number)),
    "move": lambda registry, name, number: registry.storages.update(storage(name, number)),
    "switch": lambda registry, name, number: registry.storages.set_enabled(name, enabled=number % 2 == 0),
    "close": lambda registry, name, _: registry.storages.retire(name, 9.0),
}


async def outcome(call: Awaitable[Any]) -> str:
    try:
        await call
    except KvcmError as error:
        return type(error).__name__
    return "ok"


def view(registry: Registry) -> Model:
    """What a manager sees, as a model."""
    return Model(
        {group.name: group.version for group in registry.groups.all()},
        {instance.instance_id: instance.block_size for instance in registry.instances.all()},
        {each.global_unique_name: (each.spec.root_path, each.is_available) for each in registry.storages.all()},  # type: ignore[union-attr]
        {
            drain.name: config.spec.root_path  # type: ignore[union-attr]
            for drain in registry.storages.drains()
            if (config := registry.storages.find_draining(drain)) is not None
        },
    )


Step = tuple[int, str, str, int]
STEPS = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from([*VERBS, "create", "register"]), st.sampled_from("ab"), st.integers(1, 3)
        ),
        min_size=1,
        max_size=3,
    ),
    max_size=10,
)


def explained(before: Model, together: list[Step], found: list[str], seen: Model) -> bool:
    """Whether some order of the calls, one after the other, gives these outcomes and this state."""
    for order in permutations(range(len(together))):
        model = deepcopy(before)
        results = {index: model.run(*together[index][1:]) for index in order}
        if model == seen and [results[index] for index in range(len(together))] == found:
            return True
    return False


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(rounds=STEPS, pauses=st.lists(st.integers(0, 4), min_size=1, max_size=12), refreshes=st.booleans())
async def test_concurrent_changes_are_as_one_after_the_other(
    rounds: list[list[Step]], pauses: list[int], refreshes: bool
) -> None:
    table = MemoryTable()
    openers = Opener(), Opener()
    managers = [
        Registry(opener, SuspendingTable(table, cycle(pauses[turn:] + pauses[:turn])))
        for turn, opener in enumerate(openers)
    ]
    model = Model()
    for together in rounds:
        calls = [outcome(VERBS[verb](managers[position], name, number)) for position, verb, name, number in together]
        found, *_ = await asyncio.gather(
            asyncio.gather(*calls), *(manager.refresh() for manager in managers if refreshes)
        )
        for manager in managers:
            await manager.refresh()
        seen = view(managers[0])
        assert view(managers[1]) == seen
        assert explained(model, together, found, seen), (model, together, found, seen)
        model = seen
        placed = [[each.instances.placement(name) for name in seen.instances] for each in managers]
        assert placed[0] == placed[1]
        assert len({placement.uid for placement in placed[0]}) == len(seen.instances)
        for opener in openers:
            assert opener.state() == seen.storages
