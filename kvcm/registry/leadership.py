"""Who runs the background duties: the manager that holds the lease in the store.

Leading concerns duties only: every manager serves every call unless `kvcm.service.require_leader` is set.

Invariants:
1. Of the managers on one store never two lead at the same time: this one counts its term from before it asked for the
   lease, ends it early by a margin, and the store gives the lease to another only when it ran out or was released.
2. Silence of the store ends no term early and none late.
3. After `demote` and `withdraw` this manager does not lead, whatever an answer says that was under way.
"""

from __future__ import annotations

import asyncio
import math

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import NotLeaderError, StorageIOError
from kvcm.model.nodes import Endpoint
from kvcm.registry.nodes import Nodes
from kvcm.store.store import Lease, LeaseState, Table

__all__ = ["Leadership"]

_log = structlog.get_logger("kvcm.registry")

_LOOK_AGAIN_SECONDS = 1.0  # a leader that started again under its old id has other ports


class Leadership:
    """One manager's view of the lease, moved on by `tick`.

    Args:
        node_id: id of this manager.
        clock: time source.
        lease_seconds: how long a lease lasts after each tick.
        lease: the lease in the store.
        nodes: table of where managers are.
        margin_seconds: how much earlier than the lease a term ends: one interval between ticks.
    """

    def __init__(
        self,
        node_id: str,
        clock: Clock,
        lease_seconds: float,
        lease: Lease,
        nodes: Table,
        margin_seconds: float = 0.1,
    ) -> None:
        self.node_id = node_id
        self.campaign_delay_ms = 0
        self.last_tick = 0.0
        self.token = 0
        self.terms = 0  # that this manager began
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._term_seconds = lease_seconds - min(margin_seconds, lease_seconds / 2)
        self._lease = lease
        self._nodes = Nodes(node_id, clock, nodes)
        self._asking = asyncio.Lock()  # an answer to `hold` and a release must not overtake each other
        self._expires = 0.0
        self._stay_out_until = 0.0
        self._resignations = 0
        self._seen = LeaseState("", 0)
        self._seen_until = 0.0
        self._endpoint: Endpoint | None = None
        self._look_again_at = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether this manager holds the lease now."""
        return self._clock.now() < self._expires

    @property
    def expires(self) -> float | None:
        """Unix seconds when this manager's term ends unless renewed, None when it does not lead."""
        return self._expires if self.is_leader else None

    @property
    def remaining_seconds(self) -> float:
        """How long this manager's term lasts unless renewed, 0 when it does not lead."""
        return max(0.0, self._expires - self._clock.now())

    @property
    def leader_node_id(self) -> str:
        """Id of the holder as last seen, "" when nobody is known to hold the lease."""
        if self.is_leader:
            return self.node_id
        seen = self._seen.holder if self._clock.now() < self._seen_until else ""
        return "" if seen == self.node_id else seen

    @property
    def leader_endpoint(self) -> Endpoint | None:
        """Where the leader is, None when that is not known."""
        known = self._endpoint
        return known if known is not None and known.node_id == self.leader_node_id else None

    async def publish(self, endpoint: Endpoint) -> None:
        """Tell the other managers where this one is. What the store fails to take now is told again by ticks."""
        try:
            await self._nodes.publish(endpoint)
        except StorageIOError as error:
            _log.warning("node_not_published", reason=str(error))

    async def nodes(self) -> list[tuple[Endpoint, float]]:
        """Return where the managers are that live, and when each said so, in unix seconds.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return await self._nodes.all()

    async def tick(self) -> None:
        """Do one round of the election: renew the lease, or take it when it is free and the campaign delay is over.

        A store that cannot be asked is logged and asked again in the next round.
        """
        self.last_tick = self._clock.now()
        try:
            await self._campaign()
            await self._follow_nodes()
        except StorageIOError as error:
            _log.warning("election_round_failed", leads=self.is_leader, reason=str(error))

    async def _campaign(self) -> None:
        async with self._asking:
            begin, resignations = self._clock.now(), self._resignations
            if not self.is_leader and begin < self._stay_out_until:
                await self._look_on(begin)
                return
            state = await self._lease.hold(self.node_id, self._lease_seconds)
            if resignations != self._resignations:
                return  # the lease may have been taken or renewed for one who does not want it; release follows
            self._took_note(state, begin)

    async def _look_on(self, begin: float) -> None:
        """Hear who leads while this manager does not want to."""
        state = await self._lease.look()
        if state.holder == self.node_id:  # giving it up did not reach the store
            await self._lease.release(self.node_id)
            state = LeaseState("", state.token)
        self._seen, self._seen_until = state, begin + self._lease_seconds

    def _took_note(self, state: LeaseState, begin: float) -> None:
        was_leader = self.is_leader
        holds = state.holder == self.node_id
        self._expires = begin + self._term_seconds if holds else 0.0
        self.token = state.token if holds else 0
        self._seen, self._seen_until = state, begin + self._lease_seconds
        self.terms += self.is_leader and not was_leader
        if was_leader is not self.is_leader:
            _log.info("leads" if self.is_leader else "leads_no_more", leader=state.holder, token=state.token)

    async def _follow_nodes(self) -> None:
        await self._nodes.renew()
        leader, now = self.leader_node_id, self._clock.now()
        if leader and (self.leader_endpoint is None or now >= self._look_again_at):
            self._endpoint = await self._nodes.find(leader)
            self._look_again_at = now + _LOOK_AGAIN_SECONDS

    async def demote(self) -> None:
        """Give the lease up; it is taken again at the first tick after the campaign delay.

        Raises:
            NotLeaderError: this manager does not hold it.
        """
        if not self.is_leader:
            raise NotLeaderError(f"node {self.node_id} is not the leader")
        await self._resign(self._clock.now() + self.campaign_delay_ms / 1000)

    async def withdraw(self) -> None:
        """Leave for good, before the manager stops: give the lease up, and let others forget where this one was."""
        await self._resign(math.inf)
        try:
            await self._nodes.withdraw()
        except StorageIOError as error:
            _log.warning("node_not_withdrawn", reason=str(error))

    async def _resign(self, stay_out_until: float) -> None:
        self._resignations += 1
        self._stay_out_until = stay_out_until
        self._expires, self.token = 0.0, 0
        self._seen_until = 0.0
        try:
            async with self._asking:
                await self._lease.release(self.node_id)
        except StorageIOError as error:
            _log.warning("lease_not_released", reason=str(error), ends_within_seconds=self._lease_seconds)
