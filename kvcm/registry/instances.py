"""The registered instances. An instance's config and placement never change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcm.model.errors import CapacityError, DuplicateEntityError, NotReadyError, UnknownInstanceError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, LocationSpecGroup, Placement, Registration, Removal
from kvcm.registry.document_cache import DocumentBatch, DocumentCache, Flush
from kvcm.registry.group_stores import GroupStores
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.secrets import restored
from kvcm.registry.validation import check_instance

__all__ = [
    "BatchRegistration",
    "InstanceRegistry",
    "ReservedInstances",
    "Uids",
    "same_registration",
    "with_sorted_groups",
]

# The instance limit of a group (`max_instance_count`), exact however many managers register at once.
#
# One document per group lists its reservations. An instance is registered in two steps:
#
# 1. Reserve by compare-and-set, which checks the limit; the reservation carries the whole registration.
# 2. Store the registration.
#
# A manager that dies in between leaves a reservation without a registration. When the group is full, the next register
# call completes such reservations. To release them instead could let a slow manager store one registration too many.
#
# A removal removes the registration first, then the reservation. It is recorded before both, so a reservation that a
# manager left behind there is recognized and released.


@dataclass(frozen=True, slots=True)
class ReservedInstances:
    """The reservations of one group.

    Attributes:
        held: uid to instance id of the registrations that were stored at the last change.
        pending: registrations that may not be stored yet.
    """

    held: dict[int, str] = field(default_factory=dict)
    pending: tuple[Registration, ...] = ()

    def stored(self) -> object:
        """Return the stored form, as of `Registration.stored`."""
        return {"held": self.held, "pending": [each.stored() for each in self.pending]}

    @property
    def uids(self) -> set[int]:
        """Uids of all registrations with a reservation."""
        return {*self.held, *(each.placement.uid for each in self.pending)}

    def without(self, uids: Container[int]) -> ReservedInstances:
        """Return the reservations without those of some uids."""
        held = {uid: instance_id for uid, instance_id in self.held.items() if uid not in uids}
        return ReservedInstances(held, tuple(each for each in self.pending if each.placement.uid not in uids))


class _InstanceLimit:
    """Reserves and releases places of instances in groups.

    Args:
        cache: their documents, by group.
        registrations: by instance id.
        removals: removals that are not done yet, by uid.
    """

    def __init__(
        self,
        cache: DocumentCache[ReservedInstances],
        registrations: DocumentCache[Registration],
        removals: DocumentCache[Removal],
    ) -> None:
        self._cache = cache
        self._registrations = registrations
        self._removals = removals

    async def try_reserve(self, group: InstanceGroup, new: Registration) -> bool:
        """Reserve for a registration that is about to be stored. False: the group is full.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if await self._try_reserve(group, new):
            return True
        await self._settle_abandoned(group.name)
        return await self._try_reserve(group, new)

    async def _try_reserve(self, group: InstanceGroup, new: Registration) -> bool:
        def decide(known: ReservedInstances | None) -> ReservedInstances:
            reservations = self.settled(group.name, known or ReservedInstances())
            if group.max_instance_count and len(reservations.uids) >= group.max_instance_count:
                return reservations
            return ReservedInstances(reservations.held, (*reservations.pending, new))

        reservations = await self._cache.change(group.name, decide)
        return reservations is not None and new in reservations.pending

    def settled(self, group_name: str, reservations: ReservedInstances) -> ReservedInstances:
        """Return the reservations with all registrations that this manager knows. Excess ones are released when the
        group is full."""
        registered = {
            each.placement.uid: each.instance.instance_id
            for each in self._registrations.all()
            if each.instance.instance_group_name == group_name
        }
        pending = tuple(each for each in reservations.pending if each.placement.uid not in registered)
        return ReservedInstances({**reservations.held, **registered}, pending)

    async def _settle_abandoned(self, group_name: str) -> None:
        """Complete or release reservations that dead managers left."""
        reservations = await self._cache.read(group_name) or ReservedInstances()
        for each in reservations.pending:
            if await self._removals.read(str(each.placement.uid)) is None:
                await self._store(each)
        names = reservations.held | {each.placement.uid: each.instance.instance_id for each in reservations.pending}
        free = {uid for uid, instance_id in names.items() if not await self._is_stored(uid, instance_id)}
        await self._release(group_name, free)

    async def _store(self, pending: Registration) -> None:
        await self._registrations.change(pending.instance.instance_id, lambda known: known or pending)

    async def _is_stored(self, uid: int, instance_id: str) -> bool:
        stored = await self._registrations.read(instance_id)
        return stored is not None and stored.placement.uid == uid

    async def revoked(self, stored: Registration) -> bool:
        """Return whether a registration that was just stored must be removed again: this manager was so slow that
        others completed it and removed it. Then it is stored without a reservation: a removal removes the registration
        before the reservation.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        reservations = await self._cache.read(stored.instance.instance_group_name)
        if reservations is not None and stored.placement.uid in reservations.uids:
            return False
        return await self._is_stored(stored.placement.uid, stored.instance.instance_id)

    async def release(self, registration: Registration) -> None:
        """Release a reservation; idempotent.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._release(registration.instance.instance_group_name, {registration.placement.uid})

    async def _release(self, group_name: str, uids: Container[int]) -> None:
        def decide(known: ReservedInstances | None) -> ReservedInstances | None:
            left = known.without(uids) if known is not None else None
            return left if left is not None and left.uids else None

        await self._cache.change(group_name, decide)


_DEFAULT_SHARDS = 16


# Numbers of registrations.
#
# They are drawn, not counted. A counter lies in the store, and a store that went back in time (an old dump, a failover
# to a replica that lagged, a damaged log) would give a number twice: managers that remember the first registration
# would answer the second one's readers with the first one's blocks. So would a counter that is lost in a repair. A
# number that was drawn does not come again, whatever the store forgets.
#
# Earlier releases counted from 1. Numbers of theirs stay, and drawn ones lie above any that they come to.

_LARGEST_IN_ROWS = (1 << 32) - 1
_LARGEST_IN_NAMES = (1 << 63) - 1


class Uids:
    """Draws uids.

    Args:
        registrations: by instance id.
        removals: removals that are not done yet, by uid.
        store_kind: the metadata store: the rows of a RocksDB have space for 32 bits, the key names of a Redis for 63.
        draw: returns a random number from 0 up to below another.
        stores: where the blocks of a group are to be kept.
    """

    def __init__(
        self,
        registrations: DocumentCache[Registration],
        removals: DocumentCache[Removal],
        store_kind: str,
        draw: Callable[[int], int],
        stores: GroupStores,
    ) -> None:
        self._registrations = registrations
        self._removals = removals
        self._store_kind = store_kind
        self._draw = draw
        self._stores = stores

    def copy(self) -> Uids:
        """Return a copy that decides by the current view."""
        return Uids(self._registrations.copy(), self._removals.copy(), self._store_kind, self._draw, self._stores)

    def place(self, groups: Sequence[InstanceGroup | None]) -> list[Placement]:
        """Return placements for new registrations in these groups, with uids that no registration and no removal
        has.

        Raises:
            NotReadyError: this manager does not have the store of a group.
        """
        return [self._place(uid, group) for uid, group in zip(self._new(len(groups)), groups, strict=True)]

    def _place(self, uid: int, group: InstanceGroup | None) -> Placement:
        store = self._stores.store_of(group.name) if group is not None else ""
        return Placement(uid, _shard_count_in(group), self._stores.tags_in(store), store)

    def _new(self, count: int) -> list[int]:
        least, largest = (1 << 24, _LARGEST_IN_ROWS)
        if self._store_kind == "redis":
            least, largest = (_LARGEST_IN_ROWS + 1, _LARGEST_IN_NAMES)
        taken = {each.placement.uid for each in (*self._registrations.all(), *self._removals.all())}
        found: dict[int, None] = {}
        while len(found) < count:
            uid = least + self._draw(largest - least + 1)
            if uid not in taken:
                found[uid] = None
        return list(found)


class InstanceRegistry:
    """Instances by id.

    Args:
        cache: where registrations are kept, by instance id.
        removals: where removals are kept that are not done yet, by uid.
        uids: draws those of new registrations.
        reservations: which instances count towards a group's limit, by group.
        groups: the groups that instances belong to.
        flush: returns when all changes are durable.

    Attributes:
        by_id: the registrations, for callers on the path of every request.
    """

    def __init__(
        self,
        cache: DocumentCache[Registration],
        removals: DocumentCache[Removal],
        uids: Uids,
        reservations: DocumentCache[ReservedInstances],
        groups: GroupRegistry,
        flush: Flush,
    ) -> None:
        self._cache = cache
        self.by_id = cache.values
        self._removals = removals
        self._uids = uids
        self._limit = _InstanceLimit(reservations, cache, removals)
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
        known = await self._cache.read(instance.instance_id)
        instance = restored(instance, known.instance if known is not None else None)
        stored = same_registration(known.instance, instance) if known is not None else await self._add(instance)
        await self._flush()
        return stored

    async def _add(self, instance: Instance) -> Instance:
        group = await self._groups.read(instance.instance_group_name)
        (placement,) = self._uids.place([group])
        new = Registration(replace(instance, quota_group_name=group.global_quota_group_name), placement)
        if not await self._limit.try_reserve(group, new):
            known = self._cache.get(instance.instance_id)  # another manager's half-done registration was completed
            if known is None:
                raise CapacityError(
                    f"instance group {group.name!r} is full: it has its max_instance_count of "
                    f"{group.max_instance_count} instances; remove one, or raise it with UpdateInstanceGroup"
                )
            return same_registration(known.instance, instance)
        return same_registration((await self._store(new)).instance, instance)

    async def _store(self, new: Registration) -> Registration:
        """Store a reserved registration, and return the one that is registered then."""
        instance_id = new.instance.instance_id
        stored = await self._cache.change(instance_id, lambda known: known or new)
        assert stored is not None
        if stored != new:  # another manager was faster
            await self._limit.release(new)
        elif await self._limit.revoked(new):
            await self._cache.change(instance_id, lambda known: None if known == new else known)
            raise NotReadyError(
                f"instance {instance_id!r} was removed while it was being registered: register it again"
            )
        return stored

    async def remove(self, instance_id: str, uid: int | None = None) -> Instance:
        """Remove an instance and return it. Its removal is recorded first, until `forget_removal`.

        Args:
            instance_id: names it.
            uid: of the registration to remove; None for any.

        Raises:
            UnknownInstanceError: there is no such instance, or it was registered again.
            StorageIOError: the store cannot be asked.
        """
        known = await self._registered(instance_id, uid)
        while not await self._try_remove(known):  # its blocks came to lie in another store just now
            known = await self._registered(instance_id, known.placement.uid)
        await self._limit.release(known)
        await self._flush()
        return known.instance

    async def _registered(self, instance_id: str, uid: int | None) -> Registration:
        known = await self._cache.read(instance_id)
        if known is None or uid not in {None, known.placement.uid}:
            raise _unknown(instance_id)
        return known

    async def _try_remove(self, known: Registration) -> bool:
        """Record the removal of a registration, then remove it. False: it is another one by now."""
        instance_id, uid = known.instance.instance_id, known.placement.uid
        await self._removals.change(str(uid), lambda _: known)

        def decide(registered: Registration | None) -> Registration | None:
            if registered is None or registered.placement.uid != uid:  # another manager removed it meanwhile
                raise _unknown(instance_id)
            return None if registered == known else registered

        return await self._cache.change(instance_id, decide) is None

    def removals(self) -> list[Removal]:
        """Return the removals whose instance is forgotten and whose blocks may not all be deleted, by uid."""
        removals = self._removals.all()
        if not removals:  # nearly always, and duties ask all the time
            return []
        registered = {registration.placement.uid for registration in self._cache.all()}
        going = (removal for removal in removals if removal.placement.uid not in registered)
        return sorted(going, key=lambda removal: removal.placement.uid)

    async def forget_removal(self, uid: int) -> None:
        """Forget a removal whose blocks are all deleted; forgetting it twice is fine.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        removal = await self._removals.read(str(uid))
        if removal is not None:
            await self._limit.release(removal)  # the manager that removed it may have died before
        await self._removals.change(str(uid), lambda _: None)
        await self._flush()

    def get(self, instance_id: str) -> Instance:
        """Return an instance.

        Raises:
            UnknownInstanceError: there is no such instance.
        """
        registration = self._cache.get(instance_id)
        if registration is None:
            raise _unknown(instance_id)
        return registration.instance

    def group_of(self, instance_id: str) -> str | None:
        """Return the group of an instance, None when there is no such instance."""
        registration = self._cache.get(instance_id)
        return None if registration is None else registration.instance.instance_group_name

    def placement(self, instance_id: str) -> Placement:
        """Return where the metadata of an instance lies.

        Raises:
            UnknownInstanceError: there is no such instance.
        """
        registration = self._cache.get(instance_id)
        if registration is None:
            raise _unknown(instance_id)
        return registration.placement

    def all(self, group_name: str = "") -> list[Instance]:
        """Return the instances of a group, of all groups when no name is given, ordered by id."""
        instances = (registration.instance for registration in self._cache.all())
        return [i for i in instances if not group_name or i.instance_group_name == group_name]


def _shard_count_in(group: InstanceGroup | None) -> int:
    """Return how many lock shards the index of an instance has that is registered in a group now."""
    return (group.cache_config.meta_indexer_config.mutex_shard_num if group is not None else 0) or _DEFAULT_SHARDS


def _unknown(instance_id: str) -> UnknownInstanceError:
    return UnknownInstanceError(f"instance {instance_id!r} is not registered: call RegisterInstance first")


def with_sorted_groups(instance: Instance) -> Instance:
    """Return an instance as it is stored."""
    groups = (
        LocationSpecGroup(group.name, tuple(sorted(set(group.spec_names)))) for group in instance.location_spec_groups
    )
    return replace(instance, location_spec_groups=tuple(sorted(groups, key=lambda group: group.name)))


_EXCERPT_CHARACTERS = 200


def same_registration(known: Instance, again: Instance) -> Instance:
    """Return the registered instance, if it is registered again with the same config.

    Raises:
        DuplicateEntityError: the id is registered with another config; the message names the field and both values.
    """
    difference = known.difference(again)
    if difference is None:
        return known
    values = f"registered is {_excerpt(difference.first)}, this registration has {_excerpt(difference.second)}"
    if difference.field == "instance_group_name":  # users of one group learn nothing of another
        values = f"this registration has {_excerpt(difference.second)}"
    raise DuplicateEntityError(
        f"instance {known.instance_id!r} is registered with another {difference.field.removesuffix('_name')}: {values}"
        "; a different layout needs an instance_id of its own"
    )


def _excerpt(value: object) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "…"


# Batch registration: reservations and registrations change together, so no step lies in between. A register call at the
# same time sees the reservations of its group changed, or makes the batch start again.


class BatchRegistration:
    """Adds registrations to batches.

    Args:
        registrations: by instance id.
        removals: removals that are not done yet, by uid.
        uids: draws those of new registrations.
        reservations: which instances count towards a group's limit, by group.
    """

    def __init__(
        self,
        registrations: DocumentCache[Registration],
        removals: DocumentCache[Removal],
        uids: Uids,
        reservations: DocumentCache[ReservedInstances],
    ) -> None:
        self._registrations = registrations
        self._removals = removals
        self._uids = uids
        self._reservations = reservations
        self._limit = _InstanceLimit(reservations, registrations, removals)

    def copy(self) -> BatchRegistration:
        """Return a copy that decides by the current view."""
        return BatchRegistration(
            self._registrations.copy(), self._removals, self._uids.copy(), self._reservations.copy()
        )

    async def refresh(self, instances: Iterable[Instance]) -> None:
        """Read the documents that a registration of these instances needs.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        new = [each for each in instances if self._registrations.get(each.instance_id) is None]
        for group_name in sorted({each.instance_group_name for each in new}):
            await self._reservations.read(group_name)

    def stage(self, batch: DocumentBatch, new: Iterable[Instance], groups: Mapping[str, InstanceGroup]) -> None:
        """Register instances that are not registered.

        Args:
            batch: takes the changes.
            new: the instances; they may be of groups that are not there, as those of removed groups are.
            groups: as they will be.

        Raises:
            CapacityError: a group would have more than its max_instance_count.
        """
        by_group: defaultdict[str, list[Registration]] = defaultdict(list)
        instances = list(new)
        placements = self._uids.place([groups.get(each.instance_group_name) for each in instances])
        for placement, instance in zip(placements, instances, strict=True):
            registration = Registration(instance, placement)
            batch.stage(self._registrations, instance.instance_id, registration)
            by_group[instance.instance_group_name].append(registration)
        for group_name, registrations in by_group.items():
            self._stage_reservations(batch, group_name, registrations, groups.get(group_name))

    def _stage_reservations(
        self, batch: DocumentBatch, group_name: str, new: list[Registration], group: InstanceGroup | None
    ) -> None:
        reservations = self._limit.settled(group_name, self._reservations.get(group_name) or ReservedInstances())
        most = group.max_instance_count if group is not None else 0
        if most and len(reservations.uids) + len(new) > most:
            raise CapacityError(
                f"instance group {group_name!r} has {len(reservations.uids)} instances and would get {len(new)} more: "
                f"its max_instance_count is {most}; remove some, or raise it"
            )
        held = reservations.held | {each.placement.uid: each.instance.instance_id for each in new}
        batch.stage(self._reservations, group_name, ReservedInstances(held, reservations.pending))
