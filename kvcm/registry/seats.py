"""Seats: which instances count towards a group's `max_instance_count`, exact however many managers register at once.

Per group one document lists the seats that are taken. An instance is registered in two steps:

1. It takes a seat by compare-and-set, which is where the limit is checked; the seat carries the whole registration.
2. The registration is stored.

A manager that dies in between leaves a seat whose registration is missing. Where such a seat is in somebody's way,
whoever comes next does the second step for it: that is what its caller asked for. Giving the seat away instead could
let a manager that was only slow store one registration too many.

Removal goes the other way round: the registration first, then the seat. A seat that was left behind by a manager that
died there is known by the removal, which is remembered before anything else, and given away.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Registration, Removal
from kvcm.registry.shelf import Shelf

__all__ = ["Seats", "SeatsTaken"]


@dataclass(frozen=True, slots=True)
class SeatsTaken:
    """The seats of one group.

    Attributes:
        held: uid to instance id of what was registered when last looked at.
        pending: registrations that may not be stored yet.
    """

    held: dict[int, str] = field(default_factory=dict)
    pending: tuple[Registration, ...] = ()

    @property
    def uids(self) -> set[int]:
        """Numbers of all registrations that have a seat."""
        return {*self.held, *(each.placement.uid for each in self.pending)}

    def without(self, uids: Container[int]) -> SeatsTaken:
        """Return the seats less some."""
        held = {uid: instance_id for uid, instance_id in self.held.items() if uid not in uids}
        return SeatsTaken(held, tuple(each for each in self.pending if each.placement.uid not in uids))


class Seats:
    """Gives and takes seats.

    Args:
        shelf: where they are kept, by group.
        registrations: what is registered, by instance id.
        removals: removals that are not done yet, by uid.
    """

    def __init__(self, shelf: Shelf[SeatsTaken], registrations: Shelf[Registration], removals: Shelf[Removal]) -> None:
        self._shelf = shelf
        self._registrations = registrations
        self._removals = removals

    async def take(self, group: InstanceGroup, new: Registration) -> bool:
        """Take a seat for a registration that is about to be stored. False: all seats of the group are taken.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if await self._take(group, new):
            return True
        await self._make_room(group.name)
        return await self._take(group, new)

    async def _take(self, group: InstanceGroup, new: Registration) -> bool:
        def decide(known: SeatsTaken | None) -> SeatsTaken:
            seats = self.settled(group.name, known or SeatsTaken())
            if group.max_instance_count and len(seats.uids) >= group.max_instance_count:
                return seats
            return SeatsTaken(seats.held, (*seats.pending, new))

        seats = await self._shelf.change(group.name, decide)
        return seats is not None and new in seats.pending

    def settled(self, group_name: str, seats: SeatsTaken) -> SeatsTaken:
        """Return the seats with what this manager knows to be registered; a seat too many is given away when it is in
        the way."""
        registered = {
            each.placement.uid: each.instance.instance_id
            for each in self._registrations.all()
            if each.instance.instance_group_name == group_name
        }
        pending = tuple(each for each in seats.pending if each.placement.uid not in registered)
        return SeatsTaken({**seats.held, **registered}, pending)

    async def _make_room(self, group_name: str) -> None:
        """Finish what managers that died left half done."""
        seats = await self._shelf.read(group_name) or SeatsTaken()
        for each in seats.pending:
            if await self._removals.read(str(each.placement.uid)) is None:
                await self._store(each)
        names = seats.held | {each.placement.uid: each.instance.instance_id for each in seats.pending}
        free = {uid for uid, instance_id in names.items() if not await self._is_stored(uid, instance_id)}
        await self._give_back(group_name, free)

    async def _store(self, pending: Registration) -> None:
        await self._registrations.change(pending.instance.instance_id, lambda known: known or pending)

    async def _is_stored(self, uid: int, instance_id: str) -> bool:
        stored = await self._registrations.read(instance_id)
        return stored is not None and stored.placement.uid == uid

    async def revoked(self, stored: Registration) -> bool:
        """Return whether a registration that was stored a moment ago must be taken back: this manager was so slow that
        others completed it, and removed it again. Then it has no seat and is stored all the same: a removal takes the
        registration before the seat.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        seats = await self._shelf.read(stored.instance.instance_group_name)
        if seats is not None and stored.placement.uid in seats.uids:
            return False
        return await self._is_stored(stored.placement.uid, stored.instance.instance_id)

    async def give_back(self, registration: Registration) -> None:
        """Give a seat back; doing so twice is fine.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._give_back(registration.instance.instance_group_name, {registration.placement.uid})

    async def _give_back(self, group_name: str, uids: Container[int]) -> None:
        def decide(known: SeatsTaken | None) -> SeatsTaken | None:
            left = known.without(uids) if known is not None else None
            return left if left is not None and left.uids else None

        await self._shelf.change(group_name, decide)
