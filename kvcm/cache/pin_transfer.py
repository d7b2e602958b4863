"""Pins on their way from one store to another, as documents of an export.

A pin keeps its id, its owner, its deadline and the locations that it holds, whose ids an import does not change. It is
begun again when the blocks are there, in the three steps of any pin (pins.py), so whatever ends an import in the middle
leaves no mark without a pin; the next attempt finishes what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.pin_budget import PinBudgets
from kvcm.cache.pin_values import HeldPlace, HeldPlaces, Pin
from kvcm.cache.pins import Pins
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, StorageIOError
from kvcm.registry.registry import Registry
from kvcm.store.store import Store

__all__ = ["ExportedPin", "PinImport", "exported_pins"]

_SHARDS: Final = 16


@dataclass(frozen=True, slots=True)
class ExportedPin:
    """A pin without what belongs to one store.

    Attributes:
        id: names it.
        instance_id: whose blocks it holds.
        owner: who pinned.
        deadline: unix seconds.
        places: what it holds, in the order of the prefix.
    """

    id: str
    instance_id: str
    owner: str
    deadline: float
    places: tuple[HeldPlace, ...]


async def exported_pins(store: Store, registry: Registry, now: float, group_name: str = "") -> list[ExportedPin]:
    """Return the pins that hold something at unix time `now`, ordered by id; of one group if it is named.

    Raises:
        StorageIOError: the store cannot be asked, or a pin cannot be read.
    """
    instances = {
        registry.instances.placement(instance.instance_id).uid: instance.instance_id
        for instance in registry.instances.all(group_name)
    }
    documents = await store.table("pins", _SHARDS).all()
    pins = [Pin.decoded(pin_id, document) for pin_id, document in sorted(documents.items())]
    return [
        ExportedPin(pin.id, instances[pin.uid], pin.owner, pin.deadline, pin.places)
        for pin in pins
        if pin.uid in instances and not pin.is_ended and pin.deadline > now
    ]


@dataclass(slots=True)
class PinImport:
    """Begins pins again.

    Args:
        registry: with the instances of the pins.
        caches: opens their indexes.
        store: takes the pins.
        clock: time source.

    Attributes:
        restored: ids of the pins that are there now.
        refused: a sentence for each that is not.
    """

    registry: Registry
    caches: OpenCaches
    store: Store
    clock: Clock
    restored: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def restore(self, exported: Sequence[ExportedPin]) -> None:
        """Begin pins again; those that are over, and those that do not fit, are left out.

        Raises:
            StorageIOError: the store failed; what was begun is finished by the next import.
        """
        tables = (self.store.table(name, _SHARDS) for name in ("pins", "pinbudgets"))
        pins, budgets = tables
        work = Pins(pins, PinBudgets(budgets, self.clock), self._nobody, _AllReadable(), self.clock, _no_new_id)
        for each in exported:
            if each.deadline > self.clock.now():
                await self._restore(work, each)
        await self.store.flush()

    async def _restore(self, work: Pins, each: ExportedPin) -> None:
        cache = self.caches.of(each.instance_id)
        group = self.registry.groups.get(cache.instance.instance_group_name)
        pin = Pin(each.id, cache.placement.uid, group.name, each.owner, each.deadline, HeldPlaces.of(each.places))
        try:
            held = await work.restore(cache, group, pin)
        except CapacityError as error:
            self.refused.append(f"pin {each.id} of instance {each.instance_id!r} was left out: {error}")
            return
        if held is None:
            self.refused.append(f"pin {each.id} of instance {each.instance_id!r} was left out: its blocks are not here")
        else:
            self.restored.append(each.id)

    async def _nobody(self, _uid: int) -> None:
        raise StorageIOError("pins do not end while they are imported")


class _AllReadable:
    """Takes the place of the storages: whether their bytes are there is looked at by the manager, later."""

    generation = 0

    def rank(self, storage: str) -> int | None:
        """Return that of any storage."""
        return 0


def _no_new_id() -> str:
    raise AssertionError("pins of an export have their ids")
