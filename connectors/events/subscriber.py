"""The subscriber of a host's engines: reads their KV events and reports their blocks. Command `kvcm-subscriber`.

It goes on without engines and without managers, and finds both when they come: managers that answers name (`managers`),
and engines that start again with other ports. When it ends, it reports its engines as stopped, since their blocks are
not reported any more.

Exit codes: 0 after SIGTERM or SIGINT; 1 when a package is missing or the address for health cannot be used; 2 for
arguments.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from kvcm.connectors.addresses import AnnouncedManager, verified_name
from kvcm.connectors.calls import GET_CLUSTER_INFO, REPORT_RESIDENCY, Reply, new_trace_id, ok_answer
from kvcm.connectors.client import error_reply, open_channel
from kvcm.connectors.credentials import CredentialFiles
from kvcm.connectors.events.blocks import Change, HeldBlocks, MappingSettings
from kvcm.connectors.events.discovery import (
    discover_ranks,
    fetch_block_tokens,
    fetch_instance,
    registered_scheme,
    weights_version,
)
from kvcm.connectors.events.engine_source import EngineSource, RankEndpoints, SourceLimits, rank_endpoint
from kvcm.connectors.events.health import HealthServer, Metric, Sample
from kvcm.connectors.events.managers import ManagerSet
from kvcm.connectors.events.options import EngineOptions, SubscriberOptions, parse_arguments
from kvcm.connectors.events.packages import require_packages, zmq
from kvcm.connectors.events.registrations import IndexClient, RegisteredRank, RegistrationFollower
from kvcm.connectors.events.reporter import Reporter, ReporterIdentity, ReporterSettings, run_reporter
from kvcm.connectors.events.stream import EventStream, StreamSettings
from kvcm.model.errors import ErrorCode, InvalidArgumentError, StorageIOError, UnsupportedError
from kvcm.model.key_schemes import KeyScheme, vllm_root
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = ["RankSubscriber", "ReportSender", "Subscriber", "main"]

_log = logging.getLogger("kvcm.subscriber")
_RETRY_SECONDS: Final = 2.0
_CALL_SECONDS: Final = 5.0
_PROBE_SECONDS: Final = 2.0
_FOLLOW_SECONDS: Final = 1.0  # between two checks whether a probe is due, or a manager is named no more
_JOIN_SECONDS: Final = 5.0
_MOST_REGISTERED_BLOCKS: Final = 1 << 20  # of a rank: some 500 MB
_MOST_REGISTERED_BYTES: Final = 64 << 20  # of messages that wait for a replay
_WORST_ANSWER_SECONDS: Final = 30.0  # without an answer for longer, the process counts as unhealthy
_OK: Final = int(ErrorCode.OK)


class ReportSender:
    """Sends reports to one manager.

    Args:
        address: `host:port` of it.
        login: credentials.
        name: that its certificate must have; "" for that of the address.
        timeout_seconds: for each report.
    """

    def __init__(
        self, address: str, login: CredentialFiles, name: str = "", timeout_seconds: float = _CALL_SECONDS
    ) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        self._login = login
        self._name = name
        self._shown = login.presented
        self._channel = open_channel(address, login, name)

    def __call__(self, request: pb.ReportResidencyRequest) -> pb.ReportResidencyResponse | str:
        """Return the answer of the manager, or why there is none."""
        reply = self._attempt(request)
        if reply.answer is None and self._login.may_have_changed(reply.status) and self._login.reload(self._shown):
            self._channel.close()
            self._shown, self._channel = self._login.presented, open_channel(self.address, self._login, self._name)
            reply = self._attempt(request)
        return f"{reply.status.name}: {reply.details}" if reply.answer is None else reply.answer

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _attempt(self, request: pb.ReportResidencyRequest) -> Reply[pb.ReportResidencyResponse]:
        call = self._channel.unary_unary(
            REPORT_RESIDENCY.path,
            request_serializer=pb.ReportResidencyRequest.SerializeToString,
            response_deserializer=REPORT_RESIDENCY.decode,
        )
        try:
            return Reply(call(request, timeout=self.timeout_seconds, metadata=self._shown.metadata))
        except Exception as error:  # gRPC's errors, and an answer that is no protobuf
            return error_reply(error)


class ManagerLinks:
    """The managers of the process as ranks need them: which ones get reports, and connections to them.

    Args:
        options: of the process.
        login: credentials.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        managers: which addresses get reports.
        changed: set when they may have changed.
    """

    def __init__(
        self, options: SubscriberOptions, login: CredentialFiles, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = options.managers
        self._login = login
        self.changed = threading.Event()
        self.managers = ManagerSet(options.managers, clock, follows=options.follow_managers, on_change=self.changed.set)

    def sender(self, address: str) -> ReportSender:
        """Return a connection of its own to an address."""
        return ReportSender(address, self._login, self._name_of(address))

    def index_clients(self) -> list[IndexClient]:
        """Return clients of the registrations at all managers that get reports."""
        return [IndexClient(address, self._login, self._name_of(address)) for address in self.managers.streams()]

    def send(self, sender: ReportSender, request: pb.ReportResidencyRequest) -> pb.ReportResidencyResponse | str:
        """Send a report, and record what its answer says of managers."""
        answer = sender(request)
        if isinstance(answer, str):
            self.managers.on_failure(sender.address)
        elif answer.header.status.code == _OK and answer.node_id:
            named = AnnouncedManager.parse_all(answer.managers)
            self.managers.on_answer(sender.address, answer.node_id, named)
        else:
            self.managers.on_answer(sender.address)
        return answer

    def probe_next(self) -> bool:
        """Ask which manager is at an address where that is due; return whether it was."""
        address = self.managers.next_probe()
        if address is None:
            return False
        answer = ok_answer(self._asked(address))
        self.managers.on_probe(address, "" if answer is None else answer.self_node_id)
        return True

    def _asked(self, address: str) -> Reply[meta.GetClusterInfoResponse]:
        try:
            with open_channel(address, self._login, self._name_of(address)) as channel:
                call = channel.unary_unary(
                    GET_CLUSTER_INFO.path,
                    request_serializer=meta.GetClusterInfoRequest.SerializeToString,
                    response_deserializer=GET_CLUSTER_INFO.decode,
                )
                request = meta.GetClusterInfoRequest(trace_id=new_trace_id())
                return Reply(call(request, timeout=_PROBE_SECONDS, metadata=self._login.presented.metadata))
        except Exception as error:  # gRPC's errors, and an answer that is no protobuf
            return error_reply(error)

    def _name_of(self, address: str) -> str:
        return "" if address in self._given else verified_name(address, self._given[0])


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank.

    Attributes:
        identity: of the rank.
        endpoints: where it publishes.
        mapping: how its events become blocks.
        stream: how patient its stream is.
        reports: sizes and times of its reports.
        limits: of what it may send; None for an engine that is trusted.
    """

    identity: ReporterIdentity
    endpoints: RankEndpoints
    mapping: MappingSettings
    stream: StreamSettings
    reports: ReporterSettings
    limits: SourceLimits | None = None


class _Outlet:
    """The reports of a rank to one address, and the thread that sends them.

    Args:
        reporter: what to send.
        sender: the connection.
        epoch: of the streams to this address.
        changed: lock of the reporter.
        links: of the process.
    """

    def __init__(
        self, reporter: Reporter, sender: ReportSender, epoch: int, changed: threading.Condition, links: ManagerLinks
    ) -> None:
        self.reporter, self.sender, self.epoch = reporter, sender, epoch
        self._changed, self._links = changed, links
        self._stop = threading.Event()
        self._is_dropped = False
        self._thread = threading.Thread(target=self._run, name=f"kvcm-reports-{sender.address}", daemon=True)
        self._thread.start()

    def stop(self, *, is_dropped: bool) -> None:
        """Have the thread end; at an address that is dropped without a last report, which might reach a manager that
        gets reports at another one."""
        self._is_dropped = is_dropped
        self._stop.set()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            run_reporter(
                self.reporter,
                self._changed,
                lambda request: self._links.send(self.sender, request),
                self._stop,
                says_stopped=lambda: not self._is_dropped,
            )
        finally:
            self.sender.close()


class RankSubscriber:
    """One rank of an engine: a thread that reads, and one per manager that reports.

    Args:
        plan: of the rank.
        links: to managers.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(self, plan: RankPlan, links: ManagerLinks, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan = plan
        self._links = links
        self._clock = clock
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._outlets: dict[str, _Outlet] = {}
        self.blocks = HeldBlocks(plan.mapping, self._on_changes)
        self.stream = EventStream(plan.stream, self.blocks.apply, self._on_lost, clock)
        self._context = zmq().Context()
        try:
            self.source = EngineSource(
                self._context, plan.endpoints, self.stream, self._changed, self._on_engine, limits=plan.limits
            )
        except Exception:
            self._context.destroy(linger=0)
            raise
        name = f"kvcm-events-{plan.identity.engine}/{plan.identity.rank}"
        self._reading = threading.Thread(target=self.source.run, args=(self._stop,), name=name, daemon=True)
        self.follow_managers()
        self._reading.start()

    @property
    def is_connected(self) -> bool:
        """Whether the rank is read."""
        return self.stream.is_connected and not self.source.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the rank is read no more, through a fault of ours."""
        return self.source.has_failed

    def follow_managers(self) -> None:
        """Begin and end reports so that those managers get them that are to get them now."""
        streams = self._links.managers.streams()
        with self._changed:
            if self._stop.is_set():
                return
            if {address: outlet.epoch for address, outlet in self._outlets.items()} == streams:
                return
            for address in [each for each in self._outlets if each not in streams]:
                self._outlets.pop(address).stop(is_dropped=True)
            for address, epoch in streams.items():
                outlet = self._outlets.get(address)
                if outlet is None:
                    self._outlets[address] = self._new_outlet(address, epoch)
                elif outlet.epoch != epoch:
                    outlet.epoch = epoch
                    self._begin_stream(outlet.reporter)
            self._changed.notify_all()

    def _new_outlet(self, address: str, epoch: int) -> _Outlet:
        plan = self.plan
        reporter = Reporter(plan.identity, self.blocks, plan.reports, lambda: uuid4().hex, self._clock)
        if self.stream.is_engine_gone:
            reporter.stop()
        return _Outlet(reporter, self._links.sender(address), epoch, self._changed, self._links)

    def _begin_stream(self, reporter: Reporter) -> None:
        reporter.reset()
        if self.stream.is_engine_gone:
            reporter.stop()

    def close(self) -> None:
        """End the threads; managers get a last report that the engine stopped, if they answer at once."""
        with self._changed:
            self._stop.set()
            outlets = list(self._outlets.values())
            for outlet in outlets:
                outlet.stop(is_dropped=False)
            self._changed.notify_all()
        self._reading.join(_JOIN_SECONDS)
        for outlet in outlets:
            outlet.join()
        self._context.destroy(linger=0)

    def troubles(self) -> list[str]:
        """Return why blocks of this rank may not be known to managers."""
        identity = self.plan.identity
        name = f"engine {identity.engine} rank {identity.rank}"
        with self._changed:
            found = [] if self.stream.is_connected else [f"{name} is not connected"]
            found += [f"{name} is not read any more, see the log"] if self.source.has_failed else []
            for address, outlet in self._outlets.items():
                reason = self._trouble_of(outlet.reporter) if self._links.managers.is_expected(address) else ""
                found += [f"{name}, manager {address}: {reason}"] if reason else []
        return found

    def _trouble_of(self, reporter: Reporter) -> str:
        if reporter.error:
            return reporter.error
        if not reporter.is_stopped and self._age(reporter) > _WORST_ANSWER_SECONDS:
            return f"no answer for {self._age(reporter):.0f} s"
        return ""

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Yield the values of all metrics, with their names."""
        identity = self.plan.identity
        labels = {"engine": identity.engine, "instance": identity.instance_id, "rank": str(identity.rank)}
        with self._changed:
            rank = list(self._rank_samples())
            managers = [
                (address, list(self._reporter_samples(outlet.reporter))) for address, outlet in self._outlets.items()
            ]
        for name, own, value in rank:
            yield name, Sample(labels | own, value)
        for address, found in managers:
            for name, value in found:
                yield name, Sample(labels | {"manager": address}, value)

    def _rank_samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        counters = self.stream.counters
        for kind, count in sorted(counters.events.items()):
            yield "events_total", {"type": kind}, count
        for memory, count in sorted(self.blocks.counts().items()):
            medium = pb.Medium.Name(memory.medium).removeprefix("MEDIUM_").lower()
            yield "blocks", {"medium": medium, "part": memory.spec_name}, count
        for reason, count in sorted(self.blocks.unmapped.items()):
            yield "unmapped_blocks_total", {"reason": reason}, count
        plain = {
            "messages_total": counters.messages,
            "unknown_events_total": counters.unknown_events,
            "malformed_total": counters.malformed + self.source.malformed_frames,
            "gaps_total": counters.gaps,
            "replays_total": counters.replays,
            "replayed_messages_total": counters.replayed_messages,
            "replay_timeouts_total": counters.replay_timeouts,
            "engine_restarts_total": counters.engine_restarts,
            "losses_total": counters.losses,
            "ignored_blocks_total": self.blocks.ignored,
            "complete": int(self.stream.is_complete),
            "engine_connected": int(self.stream.is_connected),
            "event_lag_seconds": round(self.source.lag_seconds, 6),
        }
        for name, value in plain.items():
            yield name, {}, value

    def _reporter_samples(self, reporter: Reporter) -> Iterator[tuple[str, float]]:
        counters = reporter.counters
        yield "reports_total", counters.reports
        yield "report_failures_total", counters.failures
        yield "snapshots_total", counters.snapshots
        yield "overflows_total", counters.overflows
        yield "streams_total", counters.streams
        yield "pending_changes", reporter.pending
        yield "resident_blocks", reporter.resident_blocks
        yield "last_answer_age_seconds", round(self._age(reporter), 3)

    def _age(self, reporter: Reporter) -> float:
        return self._clock() - reporter.last_answer_at

    # ---- called with the lock, by the thread that reads ----

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for outlet in self._outlets.values():
            outlet.reporter.on_changes(changes)

    def _on_lost(self) -> None:
        self.blocks.clear()
        for outlet in self._outlets.values():
            outlet.reporter.reset()

    def _on_engine(self, is_back: bool) -> None:
        for outlet in self._outlets.values():
            if is_back:
                outlet.reporter.reset()
            else:
                outlet.reporter.stop()


class EngineSubscriber:
    """One engine: a thread that finds out where it publishes and how it makes keys, then its ranks.

    An engine that says where it publishes (`engine_url`) is asked again now and then, and more often while a rank of it
    is not connected: it may have come back with other ports, or with more ranks. The ranks that it still has as they
    were are left alone. While it does not answer, its ranks are read where they were.

    Args:
        engine: options of the engine.
        options: of the process.
        login: credentials for managers.
        links: to managers.
    """

    def __init__(
        self, engine: EngineOptions, options: SubscriberOptions, login: CredentialFiles, links: ManagerLinks
    ) -> None:
        self._engine = engine
        self._options = options
        self._login = login
        self._links = links
        self._trouble = "not started"
        self._stop = threading.Event()
        self._found: FoundRanks | None = None
        self.ranks: tuple[RankSubscriber, ...] = ()
        name = f"kvcm-discovery-{engine.engine_address}"
        self._discovering = threading.Thread(target=self._discover, name=name, daemon=True)
        self._discovering.start()

    def close(self) -> None:
        """End everything of this engine."""
        self._stop.set()
        self._discovering.join(_JOIN_SECONDS)
        for rank in self.ranks:
            rank.close()

    def troubles(self) -> list[str]:
        """Return why blocks of this engine may not be known to managers."""
        found = [trouble for rank in self.ranks for trouble in rank.troubles()]
        if self._trouble and not self._is_connected:
            found.insert(0, f"engine {self._engine.engine_address}: {self._trouble}")
        return found

    def faults(self) -> list[str]:
        """Return the faults of this process that keep the engine from being read."""
        return [f"{rank.plan.identity} is not read any more" for rank in self.ranks if rank.source.has_failed]

    @property
    def _is_connected(self) -> bool:
        wanted = 0 if self._found is None else len(self._found.endpoints)
        return 0 < wanted == sum(rank.is_connected for rank in self.ranks)

    def _discover(self) -> None:
        pause, asked_at = min(_RETRY_SECONDS, self._engine.discovery_seconds), -math.inf
        while not self._stop.is_set():
            is_due = time.monotonic() - asked_at >= self._engine.discovery_seconds
            is_fixed = self._found is not None and not self._engine.engine_url
            if not is_fixed and (is_due or not self._is_connected):
                self._update_ranks()
                asked_at = time.monotonic()
            self._stop.wait(pause)

    def _update_ranks(self) -> None:
        """Ask the engine, and read the ranks that it has."""
        try:
            found = find_ranks(self._engine)
            if found != self._found:
                self._replace_ranks(rank_plans(self._engine, self._options, self._login, found))
                self._found = found
            self._trouble = ""
        except Exception as error:  # also of what an engine that starts, or a port that is taken, brings about
            reason = str(error) or type(error).__name__
            if reason != self._trouble:
                _log.warning("engine %s: %s", self._engine.engine_address, reason)
            self._trouble = reason

    def _replace_ranks(self, plans: Sequence[RankPlan]) -> None:
        kept = [rank for rank in self.ranks if rank.plan in plans]
        for rank in self.ranks:
            if rank not in kept:
                rank.close()  # first: one reader of a rank at a time, and ports that are bound are free then
        self.ranks = tuple(kept)
        known = [rank.plan for rank in kept]
        for plan in plans:
            if plan not in known:
                self.ranks = (*self.ranks, RankSubscriber(plan, self._links))
                _log.info("%s is read at %s", plan.identity, plan.endpoints.endpoint)


@dataclass(frozen=True, slots=True)
class FoundRanks:
    """Where the ranks of an engine publish.

    Attributes:
        endpoints: by rank.
        block_tokens: tokens of a block; 0 where neither the options nor the engine say.
    """

    endpoints: Mapping[int, RankEndpoints]
    block_tokens: int


def find_ranks(engine: EngineOptions) -> FoundRanks:
    """Return where the ranks of an engine publish; asks the engine where the options do not say.

    Raises:
        StorageIOError: the engine does not answer, or publishes no events.
    """
    if not engine.engine_url:
        return FoundRanks(_configured_ranks(engine), engine.block_tokens)
    endpoints, tokens = discover_ranks(engine.engine, engine.engine_url)
    return FoundRanks(endpoints, engine.block_tokens or tokens)


def rank_plans(
    engine: EngineOptions, options: SubscriberOptions, login: CredentialFiles, found: FoundRanks
) -> list[RankPlan]:
    """Return the plans of an engine's ranks; asks a manager where the options leave something open.

    Raises:
        InvalidArgumentError: the options do not suffice, or do not fit the engine.
        StorageIOError: the manager does not answer.
        UnsupportedError: a package is missing.
    """
    scheme = _scheme(engine, found.block_tokens, options.managers, login)
    return [
        RankPlan(
            ReporterIdentity(engine.instance_id, engine.engine_address, rank, scheme),
            endpoints,
            # SGLang stores a block once; what repeats a store there does not repeat its removal.
            MappingSettings(
                engine.engine, scheme, engine.group_specs, engine.counts_copies and engine.engine == "vllm"
            ),
            StreamSettings(bool(endpoints.replay_endpoint), engine.replay_seconds, engine.engine_seconds),
            _reporter_settings(options),
        )
        for rank, endpoints in sorted(found.endpoints.items())
    ]


def registered_plan(rank: RegisteredRank, options: SubscriberOptions) -> RankPlan:
    """Return the plan of a rank that a client registered."""
    return RankPlan(
        ReporterIdentity(rank.instance_id, rank.name, rank.rank, rank.scheme),
        rank.endpoints,
        MappingSettings(rank.engine, rank.scheme, {}, rank.engine == "vllm", most_blocks=_MOST_REGISTERED_BLOCKS),
        StreamSettings(bool(rank.endpoints.replay_endpoint), most_waiting_bytes=_MOST_REGISTERED_BYTES),
        _reporter_settings(options),
        limits=SourceLimits(),
    )


def _reporter_settings(options: SubscriberOptions) -> ReporterSettings:
    return ReporterSettings(
        batch_keys=options.batch_keys,
        batch_seconds=options.batch_ms / 1000,
        snapshot_keys=options.snapshot_keys,
        most_pending=options.most_pending,
    )


def _configured_ranks(engine: EngineOptions) -> dict[int, RankEndpoints]:
    host = engine.engine_address.rpartition(":")[0]
    return {
        rank: RankEndpoints(
            endpoint=engine.endpoint if engine.binds and not rank else rank_endpoint(engine.endpoint, rank, host),
            replay_endpoint=rank_endpoint(engine.replay_endpoint, rank, host),
            topic=engine.topic,
            binds=engine.binds,
        )
        for rank in range(engine.ranks)
    }


def _scheme(engine: EngineOptions, tokens: int, managers: Sequence[str], login: CredentialFiles) -> KeyScheme:
    """Return how an engine makes block keys: see `discovery`."""
    if engine.is_registered:
        info = fetch_instance(engine.admin, login, engine.instance_id)
        return registered_scheme(info, weights_version(engine.weights, engine.model_directory))
    tokens = tokens or _registered_tokens(engine, managers, login)
    algorithm = engine.key_algorithm
    root = vllm_root(algorithm, engine.hash_seed or None) if algorithm.startswith("vllm-") else b""
    return KeyScheme(algorithm, root, engine.mask, tokens)


def _registered_tokens(engine: EngineOptions, managers: Sequence[str], login: CredentialFiles) -> int:
    """Return the tokens of a block of the engine's instance, which an engine of this instance has, too."""
    try:
        tokens = fetch_block_tokens(managers, login, engine.instance_id)
    except StorageIOError as error:
        raise InvalidArgumentError(f"{_NO_BLOCK_TOKENS}, and {error}") from None
    if not tokens:
        raise InvalidArgumentError(f"{_NO_BLOCK_TOKENS}, nor does instance {engine.instance_id!r}")
    return tokens


_NO_BLOCK_TOKENS: Final = "option 'block_tokens' is missing: the engine does not say how many a block has"


_METRICS: Final = {
    "messages_total": "Messages of the engine, without replayed ones",
    "events_total": "Events, replayed ones included",
    "unknown_events_total": "Events of a type that is not known",
    "malformed_total": "Messages and events that cannot be read",
    "gaps_total": "Messages whose number is not the next one",
    "replays_total": "Replays that were asked for",
    "replayed_messages_total": "Messages of replays",
    "replay_timeouts_total": "Replays that did not come",
    "engine_restarts_total": "Other runs of the engine that were noticed",
    "losses_total": "Times that all blocks were dropped, since messages were missing",
    "blocks": "Blocks that the engine is known to hold",
    "unmapped_blocks_total": "Stored blocks whose key is not known, by reason; they are not reported",
    "ignored_blocks_total": "Stored blocks in memory that is not the engine's own",
    "complete": "Whether all that the engine holds is known",
    "engine_connected": "Whether the engine is connected",
    "event_lag_seconds": "From an event in the engine to its arrival, of the last message",
    "reports_total": "Reports that the manager answered",
    "report_failures_total": "Reports that were not answered, or refused",
    "snapshots_total": "Snapshots that were begun",
    "overflows_total": "Times that pending changes were dropped for a snapshot",
    "streams_total": "Streams of reports that were begun",
    "pending_changes": "Changes that are not sent yet",
    "resident_blocks": "Blocks of the rank, as the manager counts them",
    "last_answer_age_seconds": "Since the manager's last answer",
    "managers": "Addresses of managers: used for reports, spare since the manager is used at another one, or unreached",
}
"""All metrics, in the order in which they are shown."""


class Subscriber:
    """All engines of the process, with its health.

    Args:
        options: of the process.

    Raises:
        OSError: the address for health cannot be used.
    """

    def __init__(self, options: SubscriberOptions) -> None:
        login = CredentialFiles(options.credentials)
        self.links = ManagerLinks(options, login)
        self.engines: tuple[EngineSubscriber, ...] = ()
        self.registrations: RegistrationFollower[RankSubscriber] | None = None
        self._stop = threading.Event()
        self._has_failed = False
        self.health = HealthServer(options.listen, self.metrics, self.troubles, self.faults)
        self.engines = tuple([EngineSubscriber(engine, options, login, self.links) for engine in options.engines])
        threads = [threading.Thread(target=self._follow, name="kvcm-managers", daemon=True)]
        if options.registrations:
            self.registrations = self._registrations(options)
            name = "kvcm-registrations"
            threads.append(threading.Thread(target=self.registrations.run, args=(self._stop,), name=name, daemon=True))
        self._following = threads
        for thread in threads:
            thread.start()

    def _registrations(self, options: SubscriberOptions) -> RegistrationFollower[RankSubscriber]:
        return RegistrationFollower(
            self.links.index_clients,
            options.allowed_hosts,
            lambda rank: RankSubscriber(registered_plan(rank, options), self.links),
            {(each.instance_id, each.engine_address) for each in options.engines},
        )

    def _ranks(self) -> list[RankSubscriber]:
        registered = [] if self.registrations is None else self.registrations.readers
        return [*(rank for engine in self.engines for rank in engine.ranks), *registered]

    def metrics(self) -> list[Metric]:
        """Return all metrics."""
        found: dict[str, list[Sample]] = {name: [] for name in _METRICS}
        for rank in self._ranks():
            for name, sample in rank.samples():
                found[name].append(sample)
        states = self.links.managers.states()
        found["managers"] = [Sample({"state": state}, count) for state, count in states.items()]
        return [Metric(name, _METRICS[name], samples) for name, samples in found.items()]

    def troubles(self) -> list[str]:
        """Return why blocks of an engine may not be known to managers."""
        found = [trouble for engine in self.engines for trouble in engine.troubles()]
        # A registered engine that is away is the matter of the client that registered it.
        return found if self.registrations is None else found + self.registrations.troubles()

    def faults(self) -> list[str]:
        """Return the faults of this process that a restart would mend."""
        found = [fault for engine in self.engines for fault in engine.faults()]
        found += [] if self.registrations is None else self.registrations.faults()
        return [*found, "managers are not followed any more, see the log"] if self._has_failed else found

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        self.links.changed.set()
        for thread in self._following:
            thread.join(2 * _JOIN_SECONDS)
        threads = [threading.Thread(target=engine.close) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.health.close()

    def _follow(self) -> None:
        """Probe addresses where that is due, and have all ranks report to the managers that are to get reports."""
        try:
            while not self._stop.is_set():
                self.links.changed.clear()
                has_probed = self.links.probe_next()
                for rank in self._ranks():
                    rank.follow_managers()
                if not has_probed:
                    self.links.changed.wait(_FOLLOW_SECONDS)
        except Exception:
            _log.exception("managers are not followed any more")
            self._has_failed = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subscriber until a signal ends it; return its exit code."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        require_packages()
        subscriber = Subscriber(options)
    except UnsupportedError as error:
        _log.critical("%s", error)
        return 1
    except OSError as error:
        _log.critical("health cannot be served at %s: %s", options.listen, error.strerror)
        return 1
    _log.info("health and metrics are served on port %d", subscriber.health.port)
    stop.wait()
    subscriber.close()
    return 0
