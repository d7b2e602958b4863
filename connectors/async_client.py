"""The client for asyncio; the same exchanges and policy as the client for threads, carried out with `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

import grpc.aio

from connectors.calls import AnswerT, Call
from connectors.channels import failed, left_seconds, open_async_channel, read_addresses
from connectors.credentials import Login, Shown
from connectors.exchanges import ClientSettings, Exchange, Exchanges, ResultT
from connectors.policy import Conversation, Pause, Reply
from connectors.results import (
    CallCounters,
    ClusterInfo,
    EncodedMatch,
    MatchMode,
    MatchResult,
    MissingReport,
    Pin,
    PoolReport,
    Registration,
    WriteGrant,
)
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri

__all__ = ["AsyncManagerClient"]


class AsyncManagerClient:
    """Calls the manager from coroutines of one event loop.

    Arguments, results and behaviour are those of `ManagerClient`, whose docstrings hold here too.
    """

    def __init__(
        self, addresses: str | Sequence[str], instance_id: str, settings: ClientSettings | None = None
    ) -> None:
        self._addresses = read_addresses(addresses)
        settings = settings or ClientSettings()
        self._login = Login(settings.credentials)
        self._exchanges = Exchanges(len(self._addresses), instance_id, settings)
        self._channels: dict[int, tuple[grpc.aio.Channel, Shown]] = {}
        self._closed = False

    def counters(self) -> dict[str, CallCounters]:
        """Return a snapshot of how calls ended, by name of the call."""
        return self._exchanges.counters

    @property
    def is_suspended(self) -> bool:
        """Whether no manager answered lately: calls are misses at once, but for one now and then that probes."""
        return self._exchanges.is_suspended

    async def register_instance(
        self,
        instance_group: str,
        block_size: int,
        spec_infos: Sequence[LocationSpecInfo],
        model: ModelDeployment,
        *,
        spec_groups: Sequence[LocationSpecGroup] = (),
        timeout_seconds: float | None = None,
    ) -> Registration:
        """See `ManagerClient.register_instance`."""
        return await self._run(
            self._exchanges.register_instance(
                instance_group, block_size, spec_infos, model, spec_groups, timeout_seconds
            )
        )

    async def match(
        self,
        keys: Sequence[int],
        mode: MatchMode = MatchMode.PREFIX,
        *,
        mask: int | Sequence[bool] | None = None,
        spec_names: Sequence[str] = (),
        window: int = 0,
        read_lease_ms: int = 0,
        timeout_seconds: float | None = None,
    ) -> MatchResult:
        """See `ManagerClient.match`."""
        return await self._run(
            self._exchanges.match(keys, mode, mask, spec_names, window, read_lease_ms, timeout_seconds)
        )

    async def match_encoded(
        self,
        keys: Sequence[int],
        mode: MatchMode = MatchMode.PREFIX,
        *,
        spec_names: Sequence[str] = (),
        window: int = 0,
        read_lease_ms: int = 0,
        timeout_seconds: float | None = None,
    ) -> EncodedMatch:
        """See `ManagerClient.match_encoded`."""
        return await self._run(
            self._exchanges.match_encoded(keys, mode, spec_names, window, read_lease_ms, timeout_seconds)
        )

    async def match_length(
        self,
        keys: Sequence[int],
        mode: MatchMode = MatchMode.PREFIX,
        *,
        window: int = 0,
        timeout_seconds: float | None = None,
    ) -> int:
        """See `ManagerClient.match_length`."""
        return await self._run(self._exchanges.match_length(keys, mode, window, timeout_seconds))

    async def start_write(
        self,
        keys: Sequence[int],
        *,
        parent_block_key: int | None = None,
        spec_groups: Sequence[str] = (),
        session_seconds: int = 30,
        min_replica_count: int = 0,
        timeout_seconds: float | None = None,
    ) -> WriteGrant | None:
        """See `ManagerClient.start_write`."""
        started = await self._run(
            self._exchanges.start_write(
                keys, parent_block_key, spec_groups, session_seconds, min_replica_count, timeout_seconds
            )
        )
        if started.orphan_session_id:
            await self.abort_write(started.orphan_session_id, timeout_seconds=timeout_seconds)
        return started.grant

    async def finish_write(
        self,
        session_id: str,
        succeeded: Sequence[bool],
        *,
        checksums: Sequence[Mapping[str, int]] = (),
        priority: int = 0,
        ttl_seconds: int = 0,
        timeout_seconds: float | None = None,
    ) -> bool:
        """See `ManagerClient.finish_write`."""
        return await self._run(
            self._exchanges.finish_write(session_id, succeeded, checksums, priority, ttl_seconds, timeout_seconds)
        )

    async def abort_write(self, session_id: str, *, timeout_seconds: float | None = None) -> bool:
        """See `ManagerClient.abort_write`."""
        return await self._run(self._exchanges.abort_write(session_id, timeout_seconds))

    async def renew_write(self, session_id: str, session_seconds: int, *, timeout_seconds: float | None = None) -> bool:
        """See `ManagerClient.renew_write`."""
        return await self._run(self._exchanges.renew_write(session_id, session_seconds, timeout_seconds))

    async def release_lease(self, *lease_ids: str, timeout_seconds: float | None = None) -> bool:
        """See `ManagerClient.release_lease`."""
        return await self._run(self._exchanges.release_lease(lease_ids, timeout_seconds))

    async def remove(self, keys: Sequence[int], *, timeout_seconds: float | None = None) -> bool:
        """See `ManagerClient.remove`."""
        return await self._run(self._exchanges.remove(keys, timeout_seconds))

    async def pin_prefix(
        self, keys: Sequence[int], owner: str, ttl_seconds: int, *, timeout_seconds: float | None = None
    ) -> Pin | None:
        """See `ManagerClient.pin_prefix`."""
        return await self._run(self._exchanges.pin_prefix(keys, owner, ttl_seconds, timeout_seconds))

    async def unpin(self, pin_id: str, *, timeout_seconds: float | None = None) -> bool:
        """See `ManagerClient.unpin`."""
        return await self._run(self._exchanges.unpin(pin_id, timeout_seconds))

    async def list_pins(self, *, timeout_seconds: float | None = None) -> tuple[Pin, ...] | None:
        """See `ManagerClient.list_pins`."""
        return await self._run(self._exchanges.list_pins(timeout_seconds))

    async def report_missing(
        self,
        parts: Sequence[tuple[int, LocationUri | str]],
        *,
        corrupt: Sequence[tuple[int, LocationUri | str, int]] = (),
        timeout_seconds: float | None = None,
    ) -> MissingReport | None:
        """See `ManagerClient.report_missing`."""
        return await self._run(self._exchanges.report_missing(parts, corrupt, timeout_seconds))

    async def report_pool(
        self,
        storage: str,
        node_id: str,
        generation: int,
        capacity_bytes: int,
        *,
        valid_ms: int = 0,
        timeout_seconds: float | None = None,
    ) -> PoolReport | None:
        """See `ManagerClient.report_pool`."""
        return await self._run(
            self._exchanges.report_pool(storage, node_id, generation, capacity_bytes, valid_ms, timeout_seconds)
        )

    async def cluster_info(self, *, timeout_seconds: float | None = None) -> ClusterInfo | None:
        """See `ManagerClient.cluster_info`."""
        return await self._run(self._exchanges.cluster_info(timeout_seconds))

    async def close(self) -> None:
        """See `ManagerClient.close`."""
        self._closed = True
        for channel, _ in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> AsyncManagerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, exchange: Exchange[AnswerT, ResultT]) -> ResultT:
        steps: Conversation[AnswerT] = self._exchanges.policy.converse(exchange.budget_seconds)
        request = exchange.request.SerializeToString()
        reply: Reply[AnswerT] | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                return self._exchanges.finish(exchange, end.value)
            if isinstance(step, Pause):
                reply = None
                await asyncio.sleep(step.seconds)
            else:
                reply = await self._send(exchange.call, request, step.address, step.timeout_seconds)

    async def _send(self, call: Call[AnswerT], request: bytes, address: int, timeout_seconds: float) -> Reply[AnswerT]:
        begin, shown = time.monotonic(), self._login.shown
        reply = await self._attempt(call, request, address, timeout_seconds, shown)
        is_in_doubt = reply.answer is None and self._login.is_in_doubt(reply.status)
        if is_in_doubt and await asyncio.to_thread(self._login.has_changed, shown):
            timeout_seconds = left_seconds(begin, timeout_seconds)
            reply = await self._attempt(call, request, address, timeout_seconds, self._login.shown)
        return reply

    async def _attempt(
        self, call: Call[AnswerT], request: bytes, address: int, timeout_seconds: float, shown: Shown
    ) -> Reply[AnswerT]:
        try:
            channel = self._channel(address, shown)
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            return Reply(call.decode(await method(request, timeout=timeout_seconds, metadata=shown.metadata)))
        except Exception as error:
            return failed(error)

    def _channel(self, address: int, shown: Shown) -> grpc.aio.Channel:
        if self._closed:
            raise ValueError("the client is closed")
        known = self._channels.get(address)
        if known is None or known[1].channel is not shown.channel:
            # Made on the first call, because a channel belongs to the event loop that runs then.
            known = self._channels[address] = open_async_channel(self._addresses[address], self._login, shown), shown
        return known[0]
