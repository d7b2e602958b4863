"""Registers many instances as part of a batch: numbers, seats and registrations change together.

A registration by itself takes two steps (`kvcm.registry.seats`), since it may die in between. In a batch nothing lies
in between: whoever has a seat by it is registered, and a register call that comes at the same time sees the number or
the seats of its group changed, or makes the batch begin anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvcm.model.errors import CapacityError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, Placement, Registration, Removal
from kvcm.registry.batch import Batch
from kvcm.registry.instances import FIRST_UID, shard_count_in
from kvcm.registry.seats import Seats, SeatsTaken
from kvcm.registry.shelf import Shelf

__all__ = ["Enrolment"]

_NEXT_UID = "next_uid"


class Enrolment:
    """Adds registrations to batches.

    Args:
        registrations: what is registered, by instance id.
        removals: removals that are not done yet, by uid.
        numbers: holds the next uid.
        seats: which instances count towards a group's limit, by group.
    """

    def __init__(
        self,
        registrations: Shelf[Registration],
        removals: Shelf[Removal],
        numbers: Shelf[int],
        seats: Shelf[SeatsTaken],
    ) -> None:
        self._registrations = registrations
        self._removals = removals
        self._numbers = numbers
        self._taken = seats
        self._seats = Seats(seats, registrations, removals)

    def copy(self) -> Enrolment:
        """Return one that decides by what is known now."""
        return Enrolment(self._registrations.copy(), self._removals, self._numbers.copy(), self._taken.copy())

    async def refresh(self, instances: Iterable[Instance]) -> None:
        """Bring up to date what is needed to register instances.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        new = [each for each in instances if self._registrations.get(each.instance_id) is None]
        if new:
            await self._numbers.read(_NEXT_UID)
        for group_name in sorted({each.instance_group_name for each in new}):
            await self._taken.read(group_name)

    def stage(self, batch: Batch, new: Iterable[Instance], groups: Mapping[str, InstanceGroup]) -> None:
        """Register instances that are not registered.

        Args:
            batch: takes the changes.
            new: the instances; they may be of groups that are not there, as those of removed groups are.
            groups: as they will be.

        Raises:
            CapacityError: a group would have more than its max_instance_count.
        """
        first = self._numbers.get(_NEXT_UID) or FIRST_UID
        by_group: defaultdict[str, list[Registration]] = defaultdict(list)
        for uid, instance in enumerate(new, first):
            group = groups.get(instance.instance_group_name)
            registration = Registration(instance, Placement(uid, shard_count_in(group)))
            batch.stage(self._registrations, instance.instance_id, registration)
            by_group[instance.instance_group_name].append(registration)
        for group_name, registrations in by_group.items():
            self._stage_seats(batch, group_name, registrations, groups.get(group_name))
        count = sum(map(len, by_group.values()))
        if count:
            batch.stage(self._numbers, _NEXT_UID, first + count)

    def _stage_seats(self, batch: Batch, group_name: str, new: list[Registration], group: InstanceGroup | None) -> None:
        seats = self._seats.settled(group_name, self._taken.get(group_name) or SeatsTaken())
        most = group.max_instance_count if group is not None else 0
        if most and len(seats.uids) + len(new) > most:
            raise CapacityError(
                f"instance group {group_name!r} has {len(seats.uids)} instances and would get {len(new)} more: its "
                f"max_instance_count is {most}; remove some, or raise it"
            )
        held = seats.held | {each.placement.uid: each.instance.instance_id for each in new}
        batch.stage(self._taken, group_name, SeatsTaken(held, seats.pending))
