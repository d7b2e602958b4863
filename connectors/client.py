"""Clients of the manager: one for threads, one for asyncio, with the same methods and the same behaviour.

For the engine an error is a miss: no method raises because of the manager or the network. Errors are counted
(`counters`), logged at a bounded rate, and returned in results that have a `reason`. A wrong argument is the caller's
mistake and raises `InvalidArgumentError`, which names it.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from kvcm.connectors.addresses import Addresses, AnnouncedManager, parse_addresses
from kvcm.connectors.calls import GET_CLUSTER_INFO, AnswerT, Call, CallSteps, Pause, Reply, ok_answer
from kvcm.connectors.credentials import CredentialFiles, PresentedCredentials
from kvcm.connectors.exchanges import ClientSettings, Exchange, Exchanges, ResultT
from kvcm.connectors.results import (
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
from kvcm.protocol import meta_service_pb2 as meta

__all__ = [
    "AsyncManagerClient",
    "ManagerClient",
    "error_reply",
    "open_channel",
    "parse_addresses",
    "remaining_seconds",
]

_PROBE_SECONDS = 2.0

# ---- transport: channel options, gRPC errors ----

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # a match of a long prompt is bigger than gRPC's default limit of 4 MiB
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # retries are ours; and a manager that is back should be noticed within seconds, not within two minutes
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # two clients of one process do not wait for each other's backoff
    ("grpc.use_local_subchannel_pool", 1),
    # managers are inside the cluster; proxies of the environment are for downloads
    ("grpc.enable_http_proxy", 0),
]


def _channel_options(login: CredentialFiles, addresses: Addresses, address: str) -> list[tuple[str, Any]]:
    """Return the options of a channel to an address."""
    # The last one of a name counts: a name that the user gave.
    return [*_CHANNEL_OPTIONS, *_name_option(addresses.verified_name(address)), *login.options]


def _name_option(name: str) -> list[tuple[str, Any]]:
    return [("grpc.ssl_target_name_override", name)] if name else []


def open_channel(address: str, login: CredentialFiles, name: str = "") -> grpc.Channel:
    """Return a channel for threads to one manager, for callers that do without the policy of the clients.

    Args:
        address: `host:port` of it.
        login: credentials.
        name: that its certificate must have; "" for that of the address. A name that the user gave wins.
    """
    return _open_channel(address, [*_CHANNEL_OPTIONS, *_name_option(name), *login.options], login.presented)


def _open_channel(address: str, options: list[tuple[str, Any]], shown: PresentedCredentials) -> grpc.Channel:
    """Return a channel for threads."""
    if shown.channel is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, shown.channel, options)


def _open_async_channel(address: str, options: list[tuple[str, Any]], shown: PresentedCredentials) -> grpc.aio.Channel:
    """Return a channel for the running event loop."""
    if shown.channel is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, shown.channel, options)


def remaining_seconds(begin: float, timeout_seconds: float) -> float:
    """Return the rest of a timeout that began at `begin`."""
    return begin + timeout_seconds - time.monotonic()


def error_reply(error: Exception) -> Reply[AnswerT]:
    """Return the reply that a failed attempt stands for."""
    # Both flavours of gRPC raise subclasses of RpcError that also have the methods of a call.
    if isinstance(error, grpc.RpcError) and hasattr(error, "code") and hasattr(error, "details"):
        return Reply(None, error.code(), str(error.details()), _pushback_seconds(error))
    # a closed channel, an answer that is no protobuf
    return Reply(None, grpc.StatusCode.UNKNOWN, repr(error))


def _pushback_seconds(error: Any) -> float | None:
    """Return when the manager wants a retry (gRFC A6), None when it does not say."""
    pushback_ms = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", "")
    is_number = isinstance(pushback_ms, str) and re.fullmatch("[0-9]{1,9}", pushback_ms)
    return int(pushback_ms) / 1000 if is_number else None


class AsyncManagerClient:
    """Calls the manager from coroutines of one event loop.

    Arguments, results and behaviour are those of `ManagerClient`, whose docstrings hold here too.
    """

    def __init__(
        self, addresses: str | Sequence[str], instance_id: str, settings: ClientSettings | None = None
    ) -> None:
        given, settings = parse_addresses(addresses), settings or ClientSettings()
        self._login = CredentialFiles(settings.credentials)
        self._exchanges = Exchanges(given, instance_id, settings)
        self._channels: dict[str, tuple[grpc.aio.Channel, PresentedCredentials]] = {}
        self._probe: asyncio.Task[None] | None = None
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
                instance_group=instance_group,
                block_size=block_size,
                spec_infos=spec_infos,
                model=model,
                spec_groups=spec_groups,
                timeout_seconds=timeout_seconds,
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
            self._exchanges.match(
                keys=keys,
                mode=mode,
                mask=mask,
                spec_names=spec_names,
                window=window,
                read_lease_ms=read_lease_ms,
                timeout_seconds=timeout_seconds,
            )
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
            self._exchanges.match_encoded(
                keys=keys,
                mode=mode,
                spec_names=spec_names,
                window=window,
                read_lease_ms=read_lease_ms,
                timeout_seconds=timeout_seconds,
            )
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
        event_hashes: Sequence[int] = (),
        timeout_seconds: float | None = None,
    ) -> WriteGrant | None:
        """See `ManagerClient.start_write`."""
        started = await self._run(
            self._exchanges.start_write(
                keys=keys,
                parent_block_key=parent_block_key,
                spec_groups=spec_groups,
                session_seconds=session_seconds,
                min_replica_count=min_replica_count,
                event_hashes=event_hashes,
                timeout_seconds=timeout_seconds,
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
            self._exchanges.finish_write(
                session_id=session_id,
                succeeded=succeeded,
                checksums=checksums,
                priority=priority,
                ttl_seconds=ttl_seconds,
                timeout_seconds=timeout_seconds,
            )
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
            self._exchanges.report_pool(
                storage=storage,
                node_id=node_id,
                generation=generation,
                capacity_bytes=capacity_bytes,
                valid_ms=valid_ms,
                timeout_seconds=timeout_seconds,
            )
        )

    async def cluster_info(self, *, timeout_seconds: float | None = None) -> ClusterInfo | None:
        """See `ManagerClient.cluster_info`."""
        return await self._run(self._exchanges.cluster_info(timeout_seconds))

    async def close(self) -> None:
        """See `ManagerClient.close`."""
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        for channel, _ in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> AsyncManagerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, exchange: Exchange[AnswerT, ResultT]) -> ResultT:
        steps: CallSteps[AnswerT] = self._exchanges.policy.steps(exchange.budget_seconds)
        request = exchange.request.SerializeToString()
        reply: Reply[AnswerT] | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                result = self._exchanges.finish(exchange, end.value)
                self._follow_assignment()
                return result
            if isinstance(step, Pause):
                reply = None
                await asyncio.sleep(step.seconds)
            else:
                reply = await self._send(exchange.call, request, step.address, step.timeout_seconds)

    async def _send(self, call: Call[AnswerT], request: bytes, address: str, timeout_seconds: float) -> Reply[AnswerT]:
        begin, shown = time.monotonic(), self._login.presented
        reply = await self._attempt(call, request, address, timeout_seconds, shown)
        is_in_doubt = reply.answer is None and self._login.may_have_changed(reply.status)
        if is_in_doubt and await asyncio.to_thread(self._login.reload, shown):
            timeout_seconds = remaining_seconds(begin, timeout_seconds)
            reply = await self._attempt(call, request, address, timeout_seconds, self._login.presented)
        return reply

    async def _attempt(
        self, call: Call[AnswerT], request: bytes, address: str, timeout_seconds: float, shown: PresentedCredentials
    ) -> Reply[AnswerT]:
        try:
            channel = self._channel(address, shown)
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            return Reply(call.decode(await method(request, timeout=timeout_seconds, metadata=shown.metadata)))
        except Exception as error:
            return error_reply(error)

    def _channel(self, address: str, shown: PresentedCredentials) -> grpc.aio.Channel:
        if self._closed:
            raise ValueError("the client is closed")
        known = self._channels.get(address)
        if known is None or known[1].channel is not shown.channel:
            # Made on the first call, because a channel belongs to the event loop that runs then.
            options = _channel_options(self._login, self._exchanges.addresses, address)
            known = self._channels[address] = _open_async_channel(address, options, shown), shown
        return known[0]

    def _follow_assignment(self) -> None:
        """Begin to probe an announced manager if there is one to follow."""
        manager = None if self._closed else self._exchanges.addresses.next_probe()
        if manager is not None:
            self._probe = asyncio.get_running_loop().create_task(self._probe_manager(manager))

    async def _probe_manager(self, manager: AnnouncedManager) -> None:
        answer = None
        try:
            await self._close_unused()
            request = self._exchanges.probe().SerializeToString()
            shown = self._login.presented
            reply = await self._attempt(GET_CLUSTER_INFO, request, manager.address, _PROBE_SECONDS, shown)
            answer = ok_answer(reply)
        finally:
            self._exchanges.addresses.on_probe(manager, answer)

    async def _close_unused(self) -> None:
        in_use = self._exchanges.addresses.in_use()
        for address in [each for each in self._channels if each not in in_use]:
            channel, _ = self._channels.pop(address)
            await channel.close()


class ManagerClient:
    """Calls the manager from threads; safe to share between them.

    Args:
        addresses: `host:port` of each manager, or of a load balancer in front of them; a list or separated by commas.
            All are equal; the list is walked when one does not serve. The manager that the instance is assigned to is
            called first, once it is known (`ClientSettings.follow_assignment`).
        instance_id: instance that all calls are about.
        settings: deadlines and retries.

    Raises:
        InvalidArgumentError: an address or the instance id is malformed, or the credentials cannot be used.

    Every method takes `timeout_seconds`: its budget, retries and pauses included (None: `settings.timeout_seconds`).
    """

    def __init__(
        self, addresses: str | Sequence[str], instance_id: str, settings: ClientSettings | None = None
    ) -> None:
        given, settings = parse_addresses(addresses), settings or ClientSettings()
        self._login = CredentialFiles(settings.credentials)
        self._exchanges = Exchanges(given, instance_id, settings)
        self._channels: dict[str, tuple[grpc.Channel, PresentedCredentials]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def counters(self) -> dict[str, CallCounters]:
        """Return a snapshot of how calls ended, by name of the call."""
        return self._exchanges.counters

    @property
    def is_suspended(self) -> bool:
        """Whether no manager answered lately: calls are misses at once, but for one now and then that probes."""
        return self._exchanges.is_suspended

    def register_instance(
        self,
        instance_group: str,
        block_size: int,
        spec_infos: Sequence[LocationSpecInfo],
        model: ModelDeployment,
        *,
        spec_groups: Sequence[LocationSpecGroup] = (),
        timeout_seconds: float | None = None,
    ) -> Registration:
        """Register the instance; the same registration again is fine.

        Args:
            instance_group: existing group that the instance belongs to.
            block_size: tokens per block.
            spec_infos: parts of a block and their sizes in bytes.
            model: identity of the model; any difference to an earlier registration is refused and logged as an error.
            spec_groups: named sets of parts.
            timeout_seconds: see the class.

        Returns:
            Whether it is registered, refused (with the manager's code and message) or no manager could be reached.
        """
        return self._run(
            self._exchanges.register_instance(
                instance_group=instance_group,
                block_size=block_size,
                spec_infos=spec_infos,
                model=model,
                spec_groups=spec_groups,
                timeout_seconds=timeout_seconds,
            )
        )

    def match(
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
        """Ask where blocks can be read.

        Args:
            keys: block keys from the start of the prompt, at least one. Those behind the first 65,536 are not found.
            mode: longest prefix, each key for itself, or a window.
            mask: blocks that the engine has already: the first `mask`, or those whose flag is true. In prefix modes
                they have no entry in the result.
            spec_names: only these parts, and only blocks that have all of them; none = all that are stored.
            window: length of the window for `MatchMode.SLIDING_WINDOW`.
            read_lease_ms: keep the locations readable for so long, or until `release_lease`.
            timeout_seconds: see the class.
        """
        return self._run(
            self._exchanges.match(
                keys=keys,
                mode=mode,
                mask=mask,
                spec_names=spec_names,
                window=window,
                read_lease_ms=read_lease_ms,
                timeout_seconds=timeout_seconds,
            )
        )

    def match_encoded(
        self,
        keys: Sequence[int],
        mode: MatchMode = MatchMode.PREFIX,
        *,
        spec_names: Sequence[str] = (),
        window: int = 0,
        read_lease_ms: int = 0,
        timeout_seconds: float | None = None,
    ) -> EncodedMatch:
        """Return where blocks can be read, with locations that stay encoded until their reader decodes them.

        Arguments as for `match`. The reader finds out whether a location is malformed or lacks a part.
        """
        return self._run(
            self._exchanges.match_encoded(
                keys=keys,
                mode=mode,
                spec_names=spec_names,
                window=window,
                read_lease_ms=read_lease_ms,
                timeout_seconds=timeout_seconds,
            )
        )

    def match_length(
        self,
        keys: Sequence[int],
        mode: MatchMode = MatchMode.PREFIX,
        *,
        window: int = 0,
        timeout_seconds: float | None = None,
    ) -> int:
        """Return how many blocks a match would find; 0 on error."""
        return self._run(self._exchanges.match_length(keys, mode, window, timeout_seconds))

    def start_write(
        self,
        keys: Sequence[int],
        *,
        parent_block_key: int | None = None,
        spec_groups: Sequence[str] = (),
        session_seconds: int = 30,
        min_replica_count: int = 0,
        event_hashes: Sequence[int] = (),
        timeout_seconds: float | None = None,
    ) -> WriteGrant | None:
        """Ask where blocks can be written.

        Args:
            keys: consecutive block keys.
            parent_block_key: key before `keys[0]` when they are the tail of a chain, None when they begin it.
            spec_groups: none, or per key the name of the group of parts to write.
            session_seconds: finish within this time, or the write is rolled back; see `renew_write`.
            min_replica_count: skip a block only when it has so many replicas; 0 = 1.
            event_hashes: none, or per key the int64 by which the engine's KV events name the block, 0 = none: the
                manager stores them with the blocks. `keys.event_hashes` makes them of vLLM's hashes.
            timeout_seconds: see the class.

        Returns:
            The grant; end it with `finish_write` or `abort_write`. None on error: write nothing.
        """
        started = self._run(
            self._exchanges.start_write(
                keys=keys,
                parent_block_key=parent_block_key,
                spec_groups=spec_groups,
                session_seconds=session_seconds,
                min_replica_count=min_replica_count,
                event_hashes=event_hashes,
                timeout_seconds=timeout_seconds,
            )
        )
        if started.orphan_session_id:
            self.abort_write(started.orphan_session_id, timeout_seconds=timeout_seconds)
        return started.grant

    def finish_write(
        self,
        session_id: str,
        succeeded: Sequence[bool],
        *,
        checksums: Sequence[Mapping[str, int]] = (),
        priority: int = 0,
        ttl_seconds: int = 0,
        timeout_seconds: float | None = None,
    ) -> bool:
        """Publish the blocks that were written.

        Args:
            session_id: of the grant.
            succeeded: one flag per location of the grant.
            checksums: none, or per location those of its parts by spec name, from
                `TransferResult.checksum`; 0 = none. A load compares the bytes of a part with its checksum.
            priority: from -100 to 100; blocks of a lower one are evicted first, those of other writers have 0.
            ttl_seconds: the blocks expire after this time, even if the group has capacity; 0 = no limit.
            timeout_seconds: see the class.

        Returns:
            Whether the manager confirmed it. False can also mean that the confirmation was lost.
        """
        return self._run(
            self._exchanges.finish_write(
                session_id=session_id,
                succeeded=succeeded,
                checksums=checksums,
                priority=priority,
                ttl_seconds=ttl_seconds,
                timeout_seconds=timeout_seconds,
            )
        )

    def abort_write(self, session_id: str, *, timeout_seconds: float | None = None) -> bool:
        """Give a session back with nothing written. Without it, its blocks cannot be written until the session ends."""
        return self._run(self._exchanges.abort_write(session_id, timeout_seconds))

    def renew_write(self, session_id: str, session_seconds: int, *, timeout_seconds: float | None = None) -> bool:
        """Move the end of a session to `session_seconds` from now."""
        return self._run(self._exchanges.renew_write(session_id, session_seconds, timeout_seconds))

    def release_lease(self, *lease_ids: str, timeout_seconds: float | None = None) -> bool:
        """End read leases early."""
        return self._run(self._exchanges.release_lease(lease_ids, timeout_seconds))

    def remove(self, keys: Sequence[int], *, timeout_seconds: float | None = None) -> bool:
        """Remove blocks; unknown keys are fine."""
        return self._run(self._exchanges.remove(keys, timeout_seconds))

    def pin_prefix(
        self, keys: Sequence[int], owner: str, ttl_seconds: int, *, timeout_seconds: float | None = None
    ) -> Pin | None:
        """Keep the longest prefix that can be read from eviction.

        Args:
            keys: block keys of the prefix, in order.
            owner: name of the pin's owner, shown in lists.
            ttl_seconds: for how long, from 1 to 30 days.
            timeout_seconds: see the class.

        Returns:
            The pin; its id is "" if no block is pinned. None on error, also when the group's budget is used up.
        """
        return self._run(self._exchanges.pin_prefix(keys, owner, ttl_seconds, timeout_seconds))

    def unpin(self, pin_id: str, *, timeout_seconds: float | None = None) -> bool:
        """End a pin early; one that has ended is fine."""
        return self._run(self._exchanges.unpin(pin_id, timeout_seconds))

    def list_pins(self, *, timeout_seconds: float | None = None) -> tuple[Pin, ...] | None:
        """Return the instance's pins, those that end first first; None on error."""
        return self._run(self._exchanges.list_pins(timeout_seconds))

    def report_missing(
        self,
        parts: Sequence[tuple[int, LocationUri | str]],
        *,
        corrupt: Sequence[tuple[int, LocationUri | str, int]] = (),
        timeout_seconds: float | None = None,
    ) -> MissingReport | None:
        """Report parts whose bytes are missing or corrupt.

        The manager verifies missing parts itself, and removes their locations if the bytes are gone. It removes the
        location of a corrupt part if the reported checksum is the recorded one.

        Args:
            parts: block key and uri of each whose bytes are missing.
            corrupt: block key and uri of each whose bytes are wrong, and the checksum that the match gave for it.
            timeout_seconds: see the class.

        Returns:
            How many locations the manager removed; None on error.
        """
        return self._run(self._exchanges.report_missing(parts, corrupt, timeout_seconds))

    def report_pool(
        self,
        storage: str,
        node_id: str,
        generation: int,
        capacity_bytes: int,
        *,
        valid_ms: int = 0,
        timeout_seconds: float | None = None,
    ) -> PoolReport | None:
        """Report that the memory of a pool exists.

        Args:
            storage: name of the storage.
            node_id: node that it is on.
            generation: of the memory.
            capacity_bytes: of its data.
            valid_ms: the pool counts as gone without another report within this time; 0 = as the last report of
                this generation said, for good if none did.
            timeout_seconds: see the class.

        Returns:
            Whether the generation is new; None on error, also when the storage is not such a pool.
        """
        return self._run(
            self._exchanges.report_pool(
                storage=storage,
                node_id=node_id,
                generation=generation,
                capacity_bytes=capacity_bytes,
                valid_ms=valid_ms,
                timeout_seconds=timeout_seconds,
            )
        )

    def cluster_info(self, *, timeout_seconds: float | None = None) -> ClusterInfo | None:
        """Return the answering manager and the leader; None on error."""
        return self._run(self._exchanges.cluster_info(timeout_seconds))

    def close(self) -> None:
        """Close the connections; calls after it are misses."""
        with self._lock:
            self._closed = True
            for channel, _ in self._channels.values():
                channel.close()

    def __enter__(self) -> ManagerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, exchange: Exchange[AnswerT, ResultT]) -> ResultT:
        steps: CallSteps[AnswerT] = self._exchanges.policy.steps(exchange.budget_seconds)
        request = exchange.request.SerializeToString()
        reply: Reply[AnswerT] | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                result = self._exchanges.finish(exchange, end.value)
                self._follow_assignment()
                return result
            if isinstance(step, Pause):
                reply = None
                time.sleep(step.seconds)
            else:
                reply = self._send(exchange.call, request, step.address, step.timeout_seconds)

    def _send(self, call: Call[AnswerT], request: bytes, address: str, timeout_seconds: float) -> Reply[AnswerT]:
        begin, shown = time.monotonic(), self._login.presented
        reply = self._attempt(call, request, address, timeout_seconds, shown)
        if reply.answer is None and self._login.may_have_changed(reply.status) and self._login.reload(shown):
            timeout_seconds = remaining_seconds(begin, timeout_seconds)
            reply = self._attempt(call, request, address, timeout_seconds, self._login.presented)
        return reply

    def _attempt(
        self, call: Call[AnswerT], request: bytes, address: str, timeout_seconds: float, shown: PresentedCredentials
    ) -> Reply[AnswerT]:
        try:
            channel = self._channel(address, shown)
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            return Reply(call.decode(method(request, timeout=timeout_seconds, metadata=shown.metadata)))
        except Exception as error:
            return error_reply(error)

    def _channel(self, address: str, shown: PresentedCredentials) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            known = self._channels.get(address)
            if known is None or known[1].channel is not shown.channel:
                options = _channel_options(self._login, self._exchanges.addresses, address)
                known = self._channels[address] = _open_channel(address, options, shown), shown
            return known[0]

    def _follow_assignment(self) -> None:
        """Begin to probe an announced manager if there is one to follow. gRPC receives the answer: no call waits."""
        addresses = self._exchanges.addresses
        manager = addresses.next_probe()
        if manager is None:
            return
        try:
            self._close_unused()
            request, shown = self._exchanges.probe().SerializeToString(), self._login.presented
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel(manager.address, shown).unary_unary(
                GET_CLUSTER_INFO.path
            )
            probe = method.future(request, timeout=_PROBE_SECONDS, metadata=shown.metadata)
        except Exception:  # the client is closed
            addresses.on_probe(manager, None)
            return
        probe.add_done_callback(lambda done: addresses.on_probe(manager, _probe_answer(done)))

    def _close_unused(self) -> None:
        in_use = self._exchanges.addresses.in_use()
        with self._lock:
            for address in [each for each in self._channels if each not in in_use]:
                channel, _ = self._channels.pop(address)
                channel.close()


def _probe_answer(probe: Any) -> meta.GetClusterInfoResponse | None:
    """Return the answer of a probe that ended, None without one that is OK."""
    try:
        return ok_answer(Reply(GET_CLUSTER_INFO.decode(probe.result())))
    except Exception:
        return None
