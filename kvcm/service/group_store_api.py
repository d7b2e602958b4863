"""The calls of GroupService that say in which metadata store the blocks of groups are kept. Thin translation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from kvcm.cache.store_moves import StoreMoves
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import REGISTRY_STORE, Registration, StoreMove
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as pb
from kvcm.registry.leadership import Leadership, VitalsTable
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.translate import fill
from kvcm.service.usage_values import UNKNOWN, BlockMove, BlockMoveState, BlockStoreStatus, GroupStoreStatus
from kvcm.store.store import StoreHealth

__all__ = ["GroupStoreApi", "GroupStoreView"]

_SERVICE = "kvcm.v1.GroupService"
_NOT_NAMED = StoreHealth(closed="kvcm.store.block_stores of this manager does not name it")

# The state of stores and moves, for operators.


class GroupStoreView:
    """Looks at stores and moves.

    Args:
        registry: groups, instances and moves.
        health: returns the faults of each store that this manager has, by name.
        moves: moves that this manager carries out while it leads; None with one store.
        leadership: whether it does.
        clock: time source.
    """

    def __init__(
        self,
        registry: Registry,
        health: Callable[[], Mapping[str, StoreHealth]],
        moves: StoreMoves | None,
        leadership: Leadership,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._stores = registry.group_stores
        self._health = health
        self._moves = moves
        self._leadership = leadership
        self._clock = clock

    def stores(self) -> list[BlockStoreStatus]:
        """Return the stores of this manager, and those that others have: that of the registry first, then by name."""
        health = self._health()
        counts = Counter(each.placement.store for each in self._registrations())
        wanted = {self._stores.store_of(group.name) for group in self._registry.groups.all()}
        names = sorted({"", *health, *counts, *wanted})
        return [self._store(name, health.get(name, _NOT_NAMED), counts[name]) for name in names]

    def _store(self, name: str, health: StoreHealth, instance_count: int) -> BlockStoreStatus:
        return BlockStoreStatus(
            name=_title(name),
            is_usable=not health.closed,
            reason=health.closed or health.evicts,
            instance_count=instance_count,
        )

    def usable_stores(self) -> dict[str, bool]:
        """Return whether this manager uses each of its stores, by name."""
        return {_title(name): not health.closed for name, health in self._health().items()}

    @property
    def misplaced_count(self) -> int:
        """Number of instances that are to be moved."""
        return len(self._stores.misplaced())

    def troubles(self) -> dict[str, str]:
        """Return why block stores of this manager are not as they should be, by name."""
        return {name: why for name, each in self._health().items() if name and (why := each.closed or each.evicts)}

    def failing_moves(self) -> list[BlockMove]:
        """Return the moves that this manager carries out and whose last attempt failed, by instance."""
        if self._moves is None or not self._leadership.is_leader:
            return []
        found = [
            BlockMove(
                instance_id=each.instance_id,
                source=_title(each.source),
                target=_title(each.target),
                state=BlockMoveState.BLOCK_MOVE_WAITING,
                copied_blocks=each.blocks,
                failures=each.failures,
                reason=each.trouble,
            )
            for each in self._moves.progress.values()
            if each.trouble
        ]
        return sorted(found, key=lambda move: move.instance_id)

    def groups(self) -> list[GroupStoreStatus]:
        """Return every group and its moves, by name."""
        of_groups: defaultdict[str, list[Registration]] = defaultdict(list)
        for each in self._registrations():
            of_groups[each.instance.instance_group_name].append(each)
        moves = {move.uid: move for move in self._stores.moves()}
        names = {group.name for group in self._registry.groups.all()} | of_groups.keys()
        return [self._group(name, of_groups[name], moves) for name in sorted(names)]

    def _group(self, name: str, registrations: list[Registration], moves: Mapping[int, StoreMove]) -> GroupStoreStatus:
        store = self._stores.store_of(name)
        placed = [each for each in registrations if each.placement.store == store]
        elsewhere = [each for each in registrations if each.placement.store != store]
        fixed = [each for each in elsewhere if not each.placement.tags]
        found = [move for each in registrations if (move := self._move(each, store, moves)) is not None]
        return GroupStoreStatus(
            name=name,
            store=_title(store),
            instance_count=len(registrations),
            placed_instance_count=len(placed),
            fixed_instance_count=len(fixed),
            moves=tuple(sorted(found, key=lambda move: move.instance_id)),
        )

    def _move(self, registration: Registration, store: str, moves: Mapping[int, StoreMove]) -> BlockMove | None:
        """Return the move of an instance, None where it is not to be moved and nothing is to be cleared."""
        placement, known = registration.placement, moves.get(registration.placement.uid)
        is_misplaced = bool(placement.tags) and placement.store != store
        if known is None and not is_misplaced:
            return None
        state, source, target = BlockMoveState.BLOCK_MOVE_WAITING, placement.store, store
        if known is not None:
            is_under_way = is_misplaced and not known.is_placed and known.target == store
            state = BlockMoveState.BLOCK_MOVE_COPYING if is_under_way else BlockMoveState.BLOCK_MOVE_CLEARING
            source, target = known.source, known.target
        copied, failures, reason = self._progress(placement.uid, state)
        return BlockMove(
            instance_id=registration.instance.instance_id,
            source=_title(source),
            target=_title(target),
            state=state,
            copied_blocks=copied,
            failures=failures,
            reason=reason,
        )

    def _progress(self, uid: int, state: BlockMoveState) -> tuple[int, int, str]:
        if not self._leadership.is_leader:
            leader = self._leadership.leader_node_id
            reason = f"manager {leader} leads and carries it out: ask that one how far it is" if leader else ""
            return UNKNOWN, UNKNOWN, reason or "no manager leads at the moment"
        if self._moves is None:
            return UNKNOWN, UNKNOWN, "the manager that leads has no further stores: set kvcm.store.block_stores there"
        progress = self._moves.progress.get(uid)
        if progress is None:
            return 0, 0, ""
        is_failing = bool(progress.trouble) and state is not BlockMoveState.BLOCK_MOVE_CLEARING
        seconds = max(0.0, progress.retry_at - self._clock.now())
        reason = f"{progress.trouble}; tried again in {seconds:.0f} s" if is_failing else ""
        return progress.blocks, progress.failures, reason

    def _registrations(self) -> list[Registration]:
        return list(self._registry.instances.by_id.values())


def _title(store: str) -> str:
    return store or REGISTRY_STORE


class GroupStoreApi:
    """Handlers of the calls.

    Args:
        registry: groups.
        view: of stores and moves.
        board: what the managers say of themselves.
    """

    def __init__(self, registry: Registry, view: GroupStoreView, board: VitalsTable) -> None:
        self._stores = registry.group_stores
        self._view = view
        self._board = board

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane."""
        move = (pb.MoveInstanceGroupRequest, admin_pb.CommonResponse, self.move_group)
        listing = (pb.ListGroupStoreRequest, pb.ListGroupStoreResponse, self.list_stores)
        return [
            Call(_SERVICE, "MoveInstanceGroup", Plane.ADMIN, *move),
            Call(_SERVICE, "ListGroupStore", Plane.ADMIN, *listing),
        ]

    async def move_group(self, request: Any) -> Reply:
        """Have the blocks of a group kept in a store from now on."""
        require(request.name, "MoveInstanceGroup.name")
        require(request.store, "MoveInstanceGroup.store", f"is required: {REGISTRY_STORE!r}, or a block store")
        store = "" if request.store == REGISTRY_STORE else request.store
        if store in self._stores.names:  # else the registry refuses it
            await self._check_managers(store)
        await self._stores.assign(request.name, store)
        return Reply(admin_pb.CommonResponse())

    async def _check_managers(self, store: str) -> None:
        """Check that every manager can open a store: blocks in it would be misses for one that cannot.

        Raises:
            InvalidArgumentError: one cannot.
            StorageIOError: the store of the registry cannot be asked.
        """
        if not store:
            return
        vitals = await self._board.all()
        others = sorted(name for name, each in vitals.items() if store not in each.block_stores)
        if others:
            raise InvalidArgumentError(
                f"store is {store!r}: kvcm.store.block_stores of {', '.join(others)} does not name it; set it on every "
                "manager, restart them, and try again"
            )

    async def list_stores(self, _request: Any) -> Reply:
        """List stores and groups."""
        message = pb.ListGroupStoreResponse()
        for store in self._view.stores():
            fill(message.stores.add(), store)
        for group in self._view.groups():
            fill(message.groups.add(), group)
        return Reply(message)
