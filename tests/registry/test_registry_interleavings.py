"""Whatever two managers do at the same time, in whatever order their calls reach the store: it is as if one call had
been after the other, and after a refresh both see the same."""

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import cycle, permutations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from registry_rig import GROUP, INSTANCE, Opener, SuspendingTable
from thoroughness import examples

from kvcm.model.errors import KvcmError
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.registry.registry import Registry
from kvcm.store.memory import MemoryTable


@dataclass
class Model:
    """What is configured: groups by name with their version, instances by id with their block size, storages with
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
            if (config := registry.storages.being_left(drain)) is not None
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
def test_concurrent_changes_are_as_one_after_the_other(
    rounds: list[list[Step]], pauses: list[int], refreshes: bool
) -> None:
    async def run() -> None:
        table = MemoryTable()
        openers = Opener(), Opener()
        managers = [
            Registry(opener, SuspendingTable(table, cycle(pauses[turn:] + pauses[:turn])))
            for turn, opener in enumerate(openers)
        ]
        model = Model()
        for together in rounds:
            calls = [outcome(VERBS[verb](managers[who], name, number)) for who, verb, name, number in together]
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

    asyncio.run(run())
