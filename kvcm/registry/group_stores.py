"""Which metadata store keeps the blocks of each instance group, and the moves of instances to it.

One store has the registry, write sessions and usage of all groups; the blocks of a group, which are nearly all of the
memory and most of the work, may be kept in another one (`kvcm.store.block_stores`). A group has a document with the
store that is wanted, and each registration says where its blocks are (`Placement.store`); where the two differ, the
leader moves the instance.

A move has a document with the number of the attempt. A later attempt puts its own there, and so ends the one before:
the registration changes together with the document or not at all. So of two managers that both believe to lead, one
moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcm.model.errors import InvalidArgumentError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import REGISTRY_STORE, GroupStore, Registration, StoreMove
from kvcm.registry.document_cache import DocumentBatch, DocumentCache, Flush
from kvcm.store.store import Table

__all__ = ["GroupStores", "StoreDocuments"]


@dataclass(frozen=True, slots=True)
class StoreDocuments:
    """The documents that say where blocks are.

    Attributes:
        groups: by name.
        wanted: the store of each group that was given one, by name of the group.
        moves: those that have not ended, by uid.
        numbers: has the number of the last attempt.
        registrations: by instance id.
    """

    groups: DocumentCache[InstanceGroup]
    wanted: DocumentCache[GroupStore]
    moves: DocumentCache[StoreMove]
    numbers: DocumentCache[int]
    registrations: DocumentCache[Registration]


class GroupStores:
    """Stores of groups, and moves.

    Args:
        table: has all of these documents.
        documents: as this manager knows them.
        tags: parts of instances (`Placement.tags`) in each store that this manager can open, by name.
        flush: returns when all changes are durable.
    """

    def __init__(self, table: Table, documents: StoreDocuments, *, tags: Mapping[str, int], flush: Flush) -> None:
        self._table = table
        self._groups = documents.groups
        self._wanted = documents.wanted
        self._moves = documents.moves
        self._numbers = documents.numbers
        self._registrations = documents.registrations
        self._tags = tags
        self._flush = flush

    @property
    def names(self) -> list[str]:
        """Names of the stores that this manager can open, in order; "" is the one that has the registry."""
        return sorted(self._tags)

    def store_of(self, group_name: str) -> str:
        """Return the store that a group's blocks are to be kept in."""
        wanted = self._wanted.get(group_name)
        return wanted.store if wanted is not None else ""

    def tags_in(self, store: str) -> int:
        """Return the number of tags of an instance in a store.

        Raises:
            NotReadyError: this manager does not have the store.
        """
        if store not in self._tags:
            raise NotReadyError(f"kvcm.store.block_stores of this manager lacks {store!r}: {self._described()}")
        return self._tags[store]

    async def assign(self, group_name: str, store: str) -> None:
        """Have a group's blocks kept in a store from now on; the leader moves those that lie elsewhere.

        Raises:
            InvalidArgumentError: there is no such group, or no such store.
            NotReadyError: managers of the release before may use the registry.
            StorageIOError: the store cannot be asked.
        """
        if await self._groups.read(group_name) is None:
            raise InvalidArgumentError(f"instance group {group_name!r} does not exist")
        if store not in self._tags:
            raise InvalidArgumentError(f"store is {store!r}: {self._described()}")
        known = await self._wanted.read(group_name)
        if store == (known.store if known is not None else ""):
            return
        if not self._tags[""]:
            raise NotReadyError(
                "managers of the release before may use the metadata store, and they know one store only: stop them "
                "and run `kvcm index finalize`"
            )
        await self._wanted.change(group_name, lambda _known: GroupStore(store))
        await self._flush()

    def _described(self) -> str:
        names = ", ".join(map(repr, self.names[1:]))
        return (
            f"kvcm.store.block_stores names {names}; {REGISTRY_STORE!r} is the store that keeps the registry"
            if names
            else f"kvcm.store.block_stores names none, so that {REGISTRY_STORE!r} is the only one"
        )

    def misplaced(self) -> list[Registration]:
        """Return the instances whose blocks lie in another store than is wanted for their group, ordered by id. Those
        with a value per block stay where they are (`Placement.tags`)."""
        if not self._wanted.names():  # nearly always
            return []
        return [
            each
            for each in self._registrations.all()
            if each.placement.tags and each.placement.store != self.store_of(each.instance.instance_group_name)
        ]

    def moves(self) -> list[StoreMove]:
        """Return the moves that have not ended, in order of the uids."""
        return self._moves.all()

    def is_current(self, uid: int, number: int) -> bool:
        """Return whether a move of an instance has not ended, as far as this manager knows."""
        move = self._moves.get(str(uid))
        return move is not None and move.number == number

    async def begin(self, registration: Registration) -> StoreMove | None:
        """Begin a move of an instance to the store of its group, or begin it again.

        Returns:
            None where an earlier move has to be ended first, a later one began, or the instance is another one, or lies
            elsewhere, than this manager knew.

        Raises:
            NotReadyError: this manager does not have the store.
            StorageIOError: the store cannot be asked.
        """
        target = self.store_of(registration.instance.instance_group_name)
        self.tags_in(target)
        placement = registration.placement
        new = StoreMove(placement.uid, placement.store, placement.tags, target, await self._new_number())

        def decide(known: StoreMove | None) -> StoreMove:
            is_over = known is None or (not known.is_placed and known.number < new.number)
            return new if is_over or known is None else known

        if await self._moves.change(str(placement.uid), decide) != new:
            return None
        # From here on no other attempt can place the blocks, so what is read now stays true.
        if await self._registrations.read(registration.instance.instance_id) == registration:
            return new
        await self.end(new)
        return None

    async def take_over(self, move: StoreMove) -> StoreMove | None:
        """Begin a move again that is not placed, to undo it.

        Returns:
            The move with the number of this attempt; None where it was placed, has ended, or began again.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        assert not move.is_placed
        new = replace(move, number=await self._new_number())
        taken = await self._moves.change(str(move.uid), lambda known: new if known == move else known)
        return new if taken == new else None

    async def _new_number(self) -> int:
        number = await self._numbers.change("moves", lambda last: (last or 0) + 1)
        assert number is not None
        return number

    async def place(self, move: StoreMove, registration: Registration, now: float) -> StoreMove | None:
        """Let the registration of an instance name the store that its blocks were copied to.

        Args:
            move: of this attempt.
            registration: of the instance, as it was when the move began.
            now: unix seconds.

        Returns:
            The move, placed; None where another attempt has begun or the instance was removed: nothing is changed.

        Raises:
            StorageIOError: the store cannot be asked; it may have happened nevertheless.
        """
        placed = replace(move, is_placed=True, placed_at=now)
        placement = registration.placement._replace(store=move.target, tags=self.tags_in(move.target))
        instance_id = registration.instance.instance_id
        if await self._moves.read(str(move.uid)) != move or await self._registrations.read(instance_id) != registration:
            return None
        batch = DocumentBatch()
        batch.stage(self._moves, str(move.uid), placed)
        batch.stage(self._registrations, instance_id, replace(registration, placement=placement))
        done = await batch.commit(self._table)
        await self._flush()
        return placed if done else None

    async def end(self, move: StoreMove) -> None:
        """Forget a move, unless another attempt has begun.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._moves.change(str(move.uid), lambda known: None if known == move else known)
        await self._flush()
