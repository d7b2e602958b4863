"""Which instances have an order of eviction, and which order: as their groups say now.

Every look asks, and nearly always nothing has changed since the last one: an instance is only thought about anew when
its group is another object than before, or when the limits above the groups make a difference that they did not make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import InstanceGroup
from kvcm.reclaim.custody import IndexInCustody
from kvcm.reclaim.lanes import OrderPlan
from kvcm.reclaim.live_order import LiveOrder, to_its_end
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.window_order import WindowOrder

__all__ = ["TRIGGER_SECONDS", "Order", "Orders"]

TRIGGER_SECONDS = 1.0
"""Between looks, unless a group says otherwise."""

_SHARED_SECONDS = 0.5  # other managers' writes are only seen by looking

Order = LiveOrder | WindowOrder


class _Above(NamedTuple):
    """What of the limits above the groups decides whether a group has marks.

    Attributes:
        are_storages_limited: whether any storage is.
        quota_names: of the global quotas.
    """

    are_storages_limited: bool
    quota_names: frozenset[str]

    @classmethod
    def of(cls, limits: Limits) -> _Above:
        is_limited = any(storage.limit_bytes for storage in limits.storages)
        return cls(is_limited, frozenset(quota.name for quota in limits.quotas))

    def gives_marks(self, group: InstanceGroup) -> bool:
        """Return whether anything limits what a group uses, itself included."""
        trigger = group.cache_config.reclaim_strategy.trigger_strategy
        return bool(
            0 < trigger.used_percentage <= 1
            or trigger.used_size
            or self.are_storages_limited
            or group.global_quota_group_name in self.quota_names
        )


class _Followed(NamedTuple):
    """What was found out about an instance.

    Attributes:
        group: that was asked, None when it was gone.
        order: None when it needs none.
        expires: whether some of its blocks leave at an age.
        seconds: between looks.
    """

    group: InstanceGroup | None
    order: Order | None
    expires: bool
    seconds: float


class Orders:
    """The orders of all instances that need one.

    Args:
        find_group: from a name to a group, None when it is gone.
        window_order: makes the order over an index that others share.

    Attributes:
        by_uid: the orders.
        expiring: the uids of those in which some blocks leave at an age.
    """

    def __init__(
        self,
        find_group: Callable[[str], InstanceGroup | None],
        window_order: Callable[[MetaIndex, OrderPlan], WindowOrder],
    ) -> None:
        self._find_group = find_group
        self._window_order = window_order
        self._above = _Above(are_storages_limited=False, quota_names=frozenset())
        self._followed: dict[int, _Followed] = {}
        self.by_uid: Mapping[int, Order] = {}
        self.expiring: Collection[int] = ()

    def follow(self, custodies: Iterable[IndexInCustody], limits: Limits) -> None:
        """Bring the orders up to date. A new policy reads the whole index once, in one piece.

        Args:
            custodies: all instances; the others are forgotten.
            limits: above the groups.
        """
        to_its_end(self._steps(custodies, limits))

    async def begin(self, custodies: Iterable[IndexInCustody], limits: Limits) -> None:
        """Do `follow` while nothing is served yet, and let others run meanwhile: they must not change any index."""
        for _ in self._steps(custodies, limits):
            await asyncio.sleep(0)

    def _steps(self, custodies: Iterable[IndexInCustody], limits: Limits) -> Iterator[None]:
        above = _Above.of(limits)
        is_as_before, current = above == self._above, {}
        for custody in custodies:
            group = self._find_group(custody.instance.instance_group_name)
            known = self._followed.get(custody.uid)
            if known is None or known.group is not group or not is_as_before:
                known = yield from self._think(custody, group, above, known.order if known is not None else None)
            current[custody.uid] = known
        self._above, self._followed = above, current
        self.by_uid = {uid: each.order for uid, each in current.items() if each.order is not None}
        self.expiring = {uid for uid, each in current.items() if each.expires}

    def _think(
        self, custody: IndexInCustody, group: InstanceGroup | None, above: _Above, order: Order | None
    ) -> Generator[None, None, _Followed]:
        plan = OrderPlan.of(group, custody.instance.instance_id) if group is not None else None
        if group is not None and plan is not None and (plan.expires or above.gives_marks(group)):
            if order is None or order.plan != plan:
                order = yield from self._new_order(custody.meta_index, plan)
        elif order is not None:
            custody.meta_index.follow(None)
            order = None
        expires = order is not None and order.plan.expires
        return _Followed(group, order, expires, _seconds_between_looks(custody, group, expires=expires))

    def _new_order(self, index: MetaIndex, plan: OrderPlan) -> Generator[None, None, Order]:
        live = yield from LiveOrder.over(index, plan)
        return live if live is not None else self._window_order(index, plan)

    @property
    def seconds_between_looks(self) -> float:
        """How long to wait when no write presses and no setting changes."""
        return min(
            (each.seconds for each in self._followed.values() if each.group is not None), default=TRIGGER_SECONDS
        )


def _seconds_between_looks(custody: IndexInCustody, group: InstanceGroup | None, *, expires: bool) -> float:
    wanted = group.cache_config.reclaim_strategy.trigger_period_seconds if group is not None else 0
    seconds = wanted or TRIGGER_SECONDS
    if expires:  # no write tells of an age that was reached
        seconds = min(seconds, TRIGGER_SECONDS)
    return min(seconds, _SHARED_SECONDS) if custody.meta_index.is_shared else seconds
