"""Leader election: the manager that holds the lease in the store runs the background tasks.

Leading concerns background tasks only: every manager serves every call unless `kvcm.service.require_leader` is set.

Invariants:
1. Never two managers on one store lead at the same time: this one counts its term from before it requested the lease,
   ends it early by a margin, and the store grants the lease to another only when it expired or was released.
2. Silence of the store ends no term early and none late.
3. After `demote` and `withdraw` this manager does not lead, whatever an answer in flight says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import NotLeaderError, StorageIOError
from kvcm.model.nodes import Endpoint, Vitals
from kvcm.registry.document_cache import decode_document, encode_document
from kvcm.store.store import Lease, LeaseState, Revision, Table

__all__ = ["Leadership", "NodeTable", "VitalsTable"]

# The managers of a deployment by node id, each with the addresses that it serves.
#
# A node's document has a deadline and is renewed long before it, so that nodes that were killed vanish by themselves.

_LIFE_SECONDS = 60.0
_RENEWAL_SECONDS = 20.0
_MOST_FORGOTTEN = 16  # at one renewal


@dataclass(frozen=True, slots=True)
class _Node:
    """The stored document. It includes the deadline: the removal of dead nodes must see a renewal that changed nothing
    else."""

    endpoint: Endpoint
    until: float


class NodeTable:
    """The table of nodes, and this node's own entry.

    Args:
        node_id: id of this manager.
        clock: time source.
        table: one document per node.
    """

    def __init__(self, node_id: str, clock: Clock, table: Table) -> None:
        self._node_id = node_id
        self._clock = clock
        self._table = table
        self._own: Endpoint | None = None
        self._renew_at = 0.0

    async def publish(self, endpoint: Endpoint) -> None:
        """Publish the addresses of this manager; they stay known while `renew` is called.

        Raises:
            StorageIOError: the store cannot be asked; `renew` tries again.
        """
        self._own, self._renew_at = endpoint, 0.0
        await self.renew()

    async def renew(self) -> None:
        """When it is time, renew the own entry and remove expired entries of others.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        if self._own is None or now < self._renew_at:
            return
        node = _Node(self._own, now + _LIFE_SECONDS)
        old = await self._table.get(self._node_id)
        if await self._table.replace(self._node_id, old, encode_document(node), due=node.until):
            self._renew_at = now + _RENEWAL_SECONDS
        await self._forget_expired(now)

    async def withdraw(self) -> None:
        """Remove the own entry.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._own = None
        document = await self._table.get(self._node_id)
        if document is not None:
            await self._table.replace(self._node_id, document, None)

    async def find(self, node_id: str) -> Endpoint | None:
        """Return where a node is, None when that is not known.

        Raises:
            StorageIOError: the store cannot be asked, or the entry cannot be read.
        """
        if self._own is not None and node_id == self._node_id:
            return self._own
        document = await self._table.get(node_id)
        return None if document is None else decode_document(_Node, document).endpoint

    async def all(self) -> list[tuple[Endpoint, float]]:
        """Return where the nodes are that live, and when each said so, in unix seconds.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now, found = self._clock.now(), []
        for document in (await self._table.all()).values():
            with suppress(StorageIOError):  # of a release that knows better
                node = decode_document(_Node, document)
                if node.until > now:
                    found.append((node.endpoint, node.until - _LIFE_SECONDS))
        return found

    async def _forget_expired(self, now: float) -> None:
        for node_id in await self._table.due(now, _MOST_FORGOTTEN) if self._table.due_from <= now else ():
            document = await self._table.get(node_id)
            if document is not None and _ended(document, now):
                await self._table.replace(node_id, document, None)


def _ended(document: bytes, now: float) -> bool:
    try:
        return decode_document(_Node, document).until <= now
    except StorageIOError:
        return True  # unreadable, so useless


_log = structlog.get_logger("kvcm.registry")
_OBSERVE_SECONDS = 1.0  # a leader that started again under its old id has other ports
_RENEWALS_PER_LEASE = 10  # so many fail before a term ends
_LONGEST_RENEWAL_SECONDS = 1.0
_LONGEST_TRUST_SECONDS = 1.0  # that a lease is as it was seen, since no change of it was reported


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
        self._nodes = NodeTable(node_id, clock, nodes)
        self._asking = asyncio.Lock()  # an answer to `acquire` and a release must not overtake each other
        self._renewal_seconds = min(lease_seconds / _RENEWALS_PER_LEASE, _LONGEST_RENEWAL_SECONDS)
        self._renew_at = 0.0
        self._revision: Revision | None = None  # of the lease as last seen
        self._changed_at = self._asked_at = 0.0
        self._expires = 0.0
        self._stay_out_until = 0.0
        self._resignations = 0
        self._seen = LeaseState("", 0)
        self._seen_until = 0.0
        self._endpoint: Endpoint | None = None
        self._observe_again_at = 0.0

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
        """Id of the holder as last seen, "" when no holder is known."""
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
        """Publish the addresses of this manager. Ticks retry where the store fails."""
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
        """Do one round of the election: renew the lease when it is time, or take it when it is free and the campaign
        delay is over. Nothing is asked while the lease is known to be as it was.

        A store that cannot be asked is logged and asked again in the next round.
        """
        self.last_tick = self._clock.now()
        try:
            await self._campaign()
            await self._refresh_nodes()
        except StorageIOError as error:
            _log.warning("election_round_failed", leads=self.is_leader, reason=str(error))

    async def _campaign(self) -> None:
        async with self._asking:
            begin, resignations, revision = self._clock.now(), self._resignations, self._lease.revision
            if self._is_settled(begin, revision):
                return
            if not self.is_leader and begin < self._stay_out_until:
                await self._observe(begin)
            elif not await self._is_held_until_renewal(begin):
                state = await self._lease.acquire(self.node_id, self._lease_seconds)
                if resignations == self._resignations:
                    self._record_state(state, begin)
            if resignations != self._resignations:
                return  # the store may have granted the lease in vain; release follows
            if revision is None or revision != self._revision:
                self._changed_at = begin
            self._revision, self._asked_at = revision, begin

    async def _is_held_until_renewal(self, now: float) -> bool:
        """Return whether this manager still holds the lease, and need not renew it yet."""
        return self.is_leader and now < self._renew_at and (await self._lease.get()).holder == self.node_id

    def _is_settled(self, now: float, revision: Revision | None) -> bool:
        """Return whether the lease is held as it was, and it is not time to renew it, nor to see that it ended."""
        if revision is None or revision != self._revision:
            return False
        if self.is_leader:
            return now < self._renew_at
        ends = self._changed_at + self._term_seconds  # unless its holder was given another time
        return bool(self._seen.holder) and now < min(ends, self._asked_at + _LONGEST_TRUST_SECONDS)

    async def _observe(self, begin: float) -> None:
        """Read the current leader while this manager does not campaign."""
        state = await self._lease.get()
        if state.holder == self.node_id:  # giving it up did not reach the store
            await self._lease.release(self.node_id)
            state = LeaseState("", state.token)
        self._seen, self._seen_until = state, begin + self._lease_seconds

    def _record_state(self, state: LeaseState, begin: float) -> None:
        was_leader, before = self.is_leader, self.token
        holds = state.holder == self.node_id
        self._expires = begin + self._term_seconds if holds else 0.0
        self._renew_at = begin + self._renewal_seconds
        self.token = state.token if holds else 0
        self._seen, self._seen_until = state, begin + self._lease_seconds
        self.terms += self.is_leader and (not was_leader or self.token != before)
        if was_leader is not self.is_leader:
            _log.info("leads" if self.is_leader else "leads_no_more", leader=state.holder, token=state.token)

    async def _refresh_nodes(self) -> None:
        await self._nodes.renew()
        leader, now = self.leader_node_id, self._clock.now()
        if leader and (self.leader_endpoint is None or now >= self._observe_again_at):
            self._endpoint = await self._nodes.find(leader)
            self._observe_again_at = now + _OBSERVE_SECONDS

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
        self._expires, self.token, self._revision = 0.0, 0, None
        self._seen_until = 0.0
        try:
            async with self._asking:
                await self._lease.release(self.node_id)
        except StorageIOError as error:
            _log.warning("lease_not_released", reason=str(error), ends_within_seconds=self._lease_seconds)


# The vitals of the managers of a deployment, in a table of their own.
#
# A document has a deadline and is replaced long before it, so that those of managers that were killed vanish by
# themselves. Managers of other releases need not know the table; documents that cannot be read are skipped.

_VITALS_LIFE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Entry:
    vitals: Vitals
    until: float


class VitalsTable:
    """The table, and this manager's own entry.

    Args:
        clock: time source.
        table: one document per manager.
    """

    def __init__(self, clock: Clock, table: Table) -> None:
        self._clock = clock
        self._table = table
        self._written: bytes | None = None

    async def publish(self, vitals: Vitals) -> None:
        """Publish the own vitals, and remove those of dead managers.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        name, entry = vitals.endpoint.node_id, _Entry(vitals, now + _VITALS_LIFE_SECONDS)
        new = encode_document(entry)
        if not await self._table.replace(name, self._written, new, due=entry.until):
            self._written = await self._table.get(name)  # of a run before, or others forgot it
            if not await self._table.replace(name, self._written, new, due=entry.until):
                return  # the next time
        self._written = new
        for each in await self._table.due(now, _MOST_FORGOTTEN) if self._table.due_from <= now else ():
            await self._forget_expired(each, now)

    async def _forget_expired(self, name: str, now: float) -> None:
        document = await self._table.get(name)
        entry = None if document is None else _read(document)
        if document is not None and (entry is None or entry.until <= now):
            await self._table.replace(name, document, None)

    async def withdraw(self, node_id: str) -> None:
        """Remove the own entry.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        document = await self._table.get(node_id)
        if document is not None:
            await self._table.replace(node_id, document, None)

    async def all(self) -> Mapping[str, Vitals]:
        """Return the vitals of every manager that lives, by node id.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return dict(_unexpired(await self._table.all(), self._clock.now()))


def _unexpired(documents: Mapping[str, bytes], now: float) -> Iterator[tuple[str, Vitals]]:
    for name, document in documents.items():
        entry = _read(document)
        if entry is not None and entry.until > now:
            yield name, entry.vitals


def _read(document: bytes) -> _Entry | None:
    try:
        return decode_document(_Entry, document)
    except StorageIOError:
        return None
