"""The duty that tells the other managers how this one is, hears how they are, and keeps what that adds up to.

Every manager hears everything, so that each of them answers for the whole deployment. While the store is away, it goes
on with what it knows of itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.nodes import Endpoint
from kvcm.model.vitals import Vitals
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.leadership import Leadership
from kvcm.registry.vitals import VitalsBoard
from kvcm.service.vitals.gather import VitalSigns
from kvcm.service.vitals.history import History
from kvcm.service.vitals.rates import Rates
from kvcm.service.vitals.spans import HistorySpan

__all__ = ["ManagerView", "VitalsWatch"]

_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ManagerView:
    """A manager as this one knows it.

    Attributes:
        endpoint: where it is.
        seen_at: unix seconds when it last said that it lives.
        is_leader: whether it runs the background duties.
        is_self: whether it is the one that answers.
        vitals: None of managers that do not tell any: those of earlier releases, and those that died a moment ago.
        rates: None where they are not known yet.
    """

    endpoint: Endpoint
    seen_at: float
    is_leader: bool
    is_self: bool
    vitals: Vitals | None
    rates: Rates | None


class VitalsWatch:
    """Vitals of all managers, and their history.

    Args:
        signs: of this manager.
        board: where managers tell theirs.
        leadership: who leads, and where managers are.
        groups: as configured.
        clock: time source.
    """

    def __init__(
        self, signs: VitalSigns, board: VitalsBoard, leadership: Leadership, groups: GroupRegistry, clock: Clock
    ) -> None:
        self._signs, self._board, self._leadership = signs, board, leadership
        self._groups, self._clock = groups, clock
        self._nodes: Mapping[str, tuple[Endpoint, float]] = {}
        self._vitals: Mapping[str, Vitals] = {}
        self._wake = asyncio.Event()
        self._history = History(signs.started_at)

    async def run(self) -> None:
        """Tell and hear for good."""
        while True:
            self._wake.clear()
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_SECONDS):
                    await self._wake.wait()

    async def look(self) -> None:
        """Tell and hear once."""
        own = await self._signs.take()
        vitals: Mapping[str, Vitals] = {}
        with suppress(KvcmError):
            await self._board.publish(own)
            vitals = await self._board.all()
            self._nodes = {each.node_id: (each, seen_at) for each, seen_at in await self._leadership.nodes()}
        self._vitals = {**vitals, own.endpoint.node_id: own}
        quotas = {group.name: group.quota.capacity for group in self._groups.all()}
        self._history.note(self._clock.now(), self._vitals, quotas)

    async def wake(self) -> None:
        """Tell at once: the phase has changed."""
        self._wake.set()

    async def withdraw(self) -> None:
        """Let the others forget this manager."""
        with suppress(KvcmError):
            await self._board.withdraw(self._signs.endpoint.node_id)

    async def span(self, seconds: int, group: str = "", groups: Collection[str] | None = None) -> HistorySpan:
        """Return the last seconds of the history; see `History.span`."""
        return await self._history.span(self._clock.now(), seconds, group, groups)

    def has_group(self, name: str) -> bool:
        """Return whether there is a group of that name."""
        return self._groups.find(name) is not None

    def managers(self) -> list[ManagerView]:
        """Return every manager that lives, by node id."""
        vitals, own = self._vitals, self._signs.endpoint
        nodes = {own.node_id: (own, self._signs.started_at), **self._nodes}
        nodes |= {name: (each.endpoint, each.at) for name, each in vitals.items()}
        return [self._view(*nodes[name], vitals.get(name)) for name in sorted(nodes)]

    def _view(self, endpoint: Endpoint, seen_at: float, vitals: Vitals | None) -> ManagerView:
        name = endpoint.node_id
        is_leader, is_self = name == self._leadership.leader_node_id, name == self._signs.endpoint.node_id
        rates = self._history.rates.get(name) if vitals is not None else None
        return ManagerView(endpoint, seen_at, is_leader, is_self, vitals, rates)
