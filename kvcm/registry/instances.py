"""The registered instances. An instance's config and placement never change."""

from __future__ import annotations

from dataclasses import replace

from kvcm.model.errors import CapacityError, DuplicateEntityError, NotReadyError, UnknownInstanceError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, LocationSpecGroup, Placement, Registration, Removal
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.seats import Seats, SeatsTaken
from kvcm.registry.secrets import restored
from kvcm.registry.shelf import Flush, Shelf
from kvcm.registry.validation import check_instance

__all__ = ["FIRST_UID", "InstanceRegistry", "same_registration", "shard_count_in", "with_sorted_groups"]

_DEFAULT_SHARDS = 16
FIRST_UID = 1
"""Number of the first registration of a deployment."""


class InstanceRegistry:
    """Instances by id.

    Args:
        shelf: where registrations are kept, by instance id.
        removals: where removals are kept that are not done yet, by uid.
        numbers: holds the next uid.
        seats: which instances count towards a group's limit, by group.
        groups: the groups that instances belong to.
        flush: returns when what was changed is durable.
    """

    def __init__(
        self,
        shelf: Shelf[Registration],
        removals: Shelf[Removal],
        numbers: Shelf[int],
        seats: Shelf[SeatsTaken],
        groups: GroupRegistry,
        flush: Flush,
    ) -> None:
        self._shelf = shelf
        self._removals = removals
        self._numbers = numbers
        self._seats = Seats(seats, shelf, removals)
        self._groups = groups
        self._flush = flush

    async def register(self, instance: Instance) -> Instance:
        """Register an instance, or confirm that it is registered just so.

        Returns:
            The stored instance: spec groups sorted, quota group as of its first registration.

        Raises:
            InvalidArgumentError: a field is missing or malformed, or the group does not exist.
            DuplicateEntityError: the id is registered with another config; the message names the field.
            CapacityError: the group has its max_instance_count.
            NotReadyError: it was removed while it was being registered.
            StorageIOError: the store cannot be asked.
        """
        check_instance(instance)
        instance = with_sorted_groups(instance)
        known = await self._shelf.read(instance.instance_id)
        instance = restored(instance, known.instance if known is not None else None)
        stored = same_registration(known.instance, instance) if known is not None else await self._add(instance)
        await self._flush()
        return stored

    async def _add(self, instance: Instance) -> Instance:
        group = await self._groups.read(instance.instance_group_name)
        new = Registration(
            replace(instance, quota_group_name=group.global_quota_group_name),
            Placement(await self._next_uid(), shard_count_in(group)),
        )
        if not await self._seats.take(group, new):
            known = self._shelf.get(instance.instance_id)  # another manager's half-done registration was completed
            if known is None:
                raise CapacityError(
                    f"instance group {group.name!r} is full: it has its max_instance_count of "
                    f"{group.max_instance_count} instances; remove one, or raise it with UpdateInstanceGroup"
                )
            return same_registration(known.instance, instance)
        return same_registration((await self._store(new)).instance, instance)

    async def _store(self, new: Registration) -> Registration:
        """Store a registration that has a seat, and return what is registered then."""
        instance_id = new.instance.instance_id
        stored = await self._shelf.change(instance_id, lambda known: known or new)
        assert stored is not None
        if stored != new:  # another manager was faster
            await self._seats.give_back(new)
        elif await self._seats.revoked(new):
            await self._shelf.change(instance_id, lambda known: None if known == new else known)
            raise NotReadyError(
                f"instance {instance_id!r} was removed while it was being registered: register it again"
            )
        return stored

    async def _next_uid(self) -> int:
        following = await self._numbers.change("next_uid", lambda uid: (uid or FIRST_UID) + 1)
        assert following is not None
        return following - 1

    async def remove(self, instance_id: str, uid: int | None = None) -> Instance:
        """Forget an instance and return it. Its removal is remembered first, until `forget_removal`.

        Args:
            instance_id: names it.
            uid: of the registration that is meant; None for whichever there is.

        Raises:
            UnknownInstanceError: there is no such instance, or it was registered anew.
            StorageIOError: the store cannot be asked.
        """
        known = _registered(instance_id, await self._shelf.read(instance_id))
        if uid not in {None, known.placement.uid}:
            raise _unknown(instance_id)
        await self._removals.change(str(known.placement.uid), lambda _: known)

        def decide(registered: Registration | None) -> None:
            if registered != known:  # another manager removed it meanwhile
                raise _unknown(instance_id)

        await self._shelf.change(instance_id, decide)
        await self._seats.give_back(known)
        await self._flush()
        return known.instance

    def removals(self) -> list[Removal]:
        """Return the removals whose instance is forgotten and whose blocks may not all be deleted, the oldest first."""
        removals = self._removals.all()
        if not removals:  # nearly always, and duties ask all the time
            return []
        registered = {registration.placement.uid for registration in self._shelf.all()}
        going = (removal for removal in removals if removal.placement.uid not in registered)
        return sorted(going, key=lambda removal: removal.placement.uid)

    async def forget_removal(self, uid: int) -> None:
        """Forget a removal whose blocks are all deleted; forgetting it twice is fine.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        removal = await self._removals.read(str(uid))
        if removal is not None:
            await self._seats.give_back(removal)  # whoever removed it may have died before
        await self._removals.change(str(uid), lambda _: None)
        await self._flush()

    def get(self, instance_id: str) -> Instance:
        """Return an instance.

        Raises:
            UnknownInstanceError: there is no such instance.
        """
        return _registered(instance_id, self._shelf.get(instance_id)).instance

    def group_of(self, instance_id: str) -> str | None:
        """Return the group of an instance, None when there is no such instance."""
        registration = self._shelf.get(instance_id)
        return None if registration is None else registration.instance.instance_group_name

    def placement(self, instance_id: str) -> Placement:
        """Return where the metadata of an instance lies.

        Raises:
            UnknownInstanceError: there is no such instance.
        """
        return _registered(instance_id, self._shelf.get(instance_id)).placement

    def all(self, group_name: str = "") -> list[Instance]:
        """Return the instances of a group, of all groups when no name is given, ordered by id."""
        instances = (registration.instance for registration in self._shelf.all())
        return [i for i in instances if not group_name or i.instance_group_name == group_name]


def shard_count_in(group: InstanceGroup | None) -> int:
    """Return how many lock shards the index of an instance has that is registered in a group now."""
    return (group.cache_config.meta_indexer_config.mutex_shard_num if group is not None else 0) or _DEFAULT_SHARDS


def _registered(instance_id: str, known: Registration | None) -> Registration:
    if known is None:
        raise _unknown(instance_id)
    return known


def _unknown(instance_id: str) -> UnknownInstanceError:
    return UnknownInstanceError(f"instance {instance_id!r} is not registered: call RegisterInstance first")


def with_sorted_groups(instance: Instance) -> Instance:
    """Return an instance as it is stored."""
    groups = (
        LocationSpecGroup(group.name, tuple(sorted(set(group.spec_names)))) for group in instance.location_spec_groups
    )
    return replace(instance, location_spec_groups=tuple(sorted(groups, key=lambda group: group.name)))


def same_registration(known: Instance, again: Instance) -> Instance:
    """Return what is registered, if it is registered again just so.

    Raises:
        DuplicateEntityError: the id is registered with another config; the message names the field.
    """
    field = known.difference(again)
    if field is not None:
        raise DuplicateEntityError(
            f"instance {known.instance_id!r} is registered with another {field.removesuffix('_name')}: "
            "a different layout needs an instance_id of its own"
        )
    return known
