"""The subscriber of a host's engines: reads their KV events and reports their blocks. Command `kvcm-subscriber`.

It goes on without engines and without managers, and finds both when they come. When it ends, it reports its engines as
stopped, since their blocks are not reported any more.

Exit codes: 0 after SIGTERM or SIGINT; 1 when a package is missing or the address for health cannot be used; 2 for
arguments.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from kvcm.connectors.calls import REPORT_RESIDENCY, Reply
from kvcm.connectors.client import error_reply, open_channel
from kvcm.connectors.credentials import CredentialFiles
from kvcm.connectors.events.blocks import Change, HeldBlocks, MappingSettings
from kvcm.connectors.events.discovery import discover_ranks, fetch_instance, registered_scheme, weights_version
from kvcm.connectors.events.engine_source import EngineSource, RankEndpoints, rank_endpoint
from kvcm.connectors.events.health import HealthServer, Metric, Sample
from kvcm.connectors.events.options import EngineOptions, SubscriberOptions, parse_arguments
from kvcm.connectors.events.packages import require_packages, zmq
from kvcm.connectors.events.registrations import IndexClient, RegisteredRank, RegistrationFollower
from kvcm.connectors.events.reporter import Reporter, ReporterIdentity, ReporterSettings, run_reporter
from kvcm.connectors.events.stream import EventStream, StreamSettings
from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.key_schemes import KeyScheme, vllm_root
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = ["RankSubscriber", "ReportSender", "Subscriber", "main"]

_log = logging.getLogger("kvcm.subscriber")
_RETRY_SECONDS: Final = 2.0
_CALL_SECONDS: Final = 5.0
_JOIN_SECONDS: Final = 5.0
_WORST_ANSWER_SECONDS: Final = 30.0  # without an answer for longer, the process counts as unhealthy


class ReportSender:
    """Sends reports to one manager.

    Args:
        address: `host:port` of it.
        login: credentials.
        timeout_seconds: for each report.
    """

    def __init__(self, address: str, login: CredentialFiles, timeout_seconds: float = _CALL_SECONDS) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        self._login = login
        self._shown = login.presented
        self._channel = open_channel(address, login)

    def __call__(self, request: pb.ReportResidencyRequest) -> pb.ReportResidencyResponse | str:
        """Return the answer of the manager, or why there is none."""
        reply = self._attempt(request)
        if reply.answer is None and self._login.may_have_changed(reply.status) and self._login.reload(self._shown):
            self._channel.close()
            self._shown, self._channel = self._login.presented, open_channel(self.address, self._login)
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


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank.

    Attributes:
        identity: of the rank.
        endpoints: where it publishes.
        mapping: how its events become blocks.
        stream: how patient its stream is.
        reports: sizes and times of its reports.
    """

    identity: ReporterIdentity
    endpoints: RankEndpoints
    mapping: MappingSettings
    stream: StreamSettings
    reports: ReporterSettings


class RankSubscriber:
    """One rank of an engine: a thread that reads, and one per manager that reports.

    Args:
        plan: of the rank.
        senders: of reports, one per manager.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self, plan: RankPlan, senders: Sequence[ReportSender], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan = plan
        self._clock = clock
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._senders = tuple(senders)
        self.blocks = HeldBlocks(plan.mapping, self._on_changes)
        self.reporters = tuple(
            Reporter(plan.identity, self.blocks, plan.reports, lambda: uuid4().hex, clock) for _ in senders
        )
        self.stream = EventStream(plan.stream, self.blocks.apply, self._on_lost, clock)
        self._context = zmq().Context()
        self.source = EngineSource(self._context, plan.endpoints, self.stream, self._changed, self._on_engine)
        name = f"{plan.identity.engine}/{plan.identity.rank}"
        self._reading = threading.Thread(target=self.source.run, args=(self._stop,), name=f"kvcm-events-{name}")
        self._reporting = [
            threading.Thread(
                target=run_reporter, args=(reporter, self._changed, sender, self._stop), name=f"kvcm-reports-{name}"
            )
            for reporter, sender in zip(self.reporters, self._senders, strict=True)
        ]
        for thread in (self._reading, *self._reporting):
            thread.daemon = True
            thread.start()

    def close(self) -> None:
        """End the threads; managers get a last report that the engine stopped, if they answer at once."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in (self._reading, *self._reporting):
            thread.join(_JOIN_SECONDS)
        for sender in self._senders:
            sender.close()
        self._context.destroy(linger=0)

    def troubles(self) -> list[str]:
        """Return why blocks of this rank may not be known to managers."""
        identity = self.plan.identity
        name = f"engine {identity.engine} rank {identity.rank}"
        with self._changed:
            found = [f"{name} is not connected"] if self.stream.is_engine_gone else []
            found += [f"{name} is not read any more, see the log"] if self.source.has_failed else []
            for reporter, sender in zip(self.reporters, self._senders, strict=True):
                if reporter.error:
                    found.append(f"{name}, manager {sender.address}: {reporter.error}")
                elif self._age(reporter) > _WORST_ANSWER_SECONDS:
                    found.append(f"{name}, manager {sender.address}: no answer for {self._age(reporter):.0f} s")
        return found

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Yield the values of all metrics, with their names."""
        identity = self.plan.identity
        labels = {"engine": identity.engine, "instance": identity.instance_id, "rank": str(identity.rank)}
        with self._changed:
            rank = list(self._rank_samples())
            managers = [
                (sender.address, list(self._reporter_samples(reporter)))
                for reporter, sender in zip(self.reporters, self._senders, strict=True)
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
            "engine_connected": int(not self.stream.is_engine_gone),
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
        for reporter in self.reporters:
            reporter.on_changes(changes)

    def _on_lost(self) -> None:
        self.blocks.clear()
        for reporter in self.reporters:
            reporter.reset()

    def _on_engine(self, is_back: bool) -> None:
        for reporter in self.reporters:
            if is_back:
                reporter.reset()
            else:
                reporter.stop()


class EngineSubscriber:
    """One engine: a thread that finds out where it publishes and how it makes keys, then its ranks.

    Args:
        engine: options of the engine.
        options: of the process.
        login: credentials for managers.
    """

    def __init__(self, engine: EngineOptions, options: SubscriberOptions, login: CredentialFiles) -> None:
        self._engine = engine
        self._options = options
        self._login = login
        self._trouble = "not started"
        self._stop = threading.Event()
        self.ranks: tuple[RankSubscriber, ...] = ()
        self._starting = threading.Thread(target=self._start, name=f"kvcm-start-{engine.engine_address}", daemon=True)
        self._starting.start()

    def close(self) -> None:
        """End everything of this engine."""
        self._stop.set()
        self._starting.join(_JOIN_SECONDS)
        for rank in self.ranks:
            rank.close()

    def troubles(self) -> list[str]:
        """Return why blocks of this engine may not be known to managers."""
        if self._trouble:
            return [f"engine {self._engine.engine_address}: {self._trouble}"]
        return [trouble for rank in self.ranks for trouble in rank.troubles()]

    def _start(self) -> None:
        while not self._stop.is_set():
            made: list[RankSubscriber] = []
            try:
                plans = rank_plans(self._engine, self._options, self._login)
                made.extend(RankSubscriber(plan, self._senders()) for plan in plans)
            except Exception as error:  # also of what an engine that starts, or a port that is taken, brings about
                for rank in made:
                    rank.close()
                reason = str(error) or type(error).__name__
                if reason != self._trouble:
                    _log.error("engine %s is not read until this is resolved: %s", self._engine.engine_address, reason)
                self._trouble = reason
                self._stop.wait(_RETRY_SECONDS)
                continue
            self.ranks = tuple(made)
            self._trouble = ""
            for plan in plans:
                _log.info("%s is read at %s", plan.identity, plan.endpoints.endpoint)
            return

    def _senders(self) -> list[ReportSender]:
        return [ReportSender(address, self._login) for address in self._options.managers]


def rank_plans(engine: EngineOptions, options: SubscriberOptions, login: CredentialFiles) -> list[RankPlan]:
    """Return the plans of an engine's ranks; asks the engine and a manager where the options leave something open.

    Raises:
        InvalidArgumentError: the options do not suffice, or do not fit the engine.
        StorageIOError: the engine or the manager does not answer.
        UnsupportedError: a package is missing.
    """
    tokens = engine.block_tokens
    if engine.engine_url:
        ranks, found_tokens = discover_ranks(engine.engine, engine.engine_url)
        tokens = tokens or found_tokens
    else:
        ranks = _configured_ranks(engine)
    scheme = _scheme(engine, tokens, login)
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
        for rank, endpoints in sorted(ranks.items())
    ]


def registered_plan(rank: RegisteredRank, options: SubscriberOptions) -> RankPlan:
    """Return the plan of a rank that a client registered."""
    return RankPlan(
        ReporterIdentity(rank.instance_id, rank.name, rank.rank, rank.scheme),
        rank.endpoints,
        MappingSettings(rank.engine, rank.scheme, {}, rank.engine == "vllm"),
        StreamSettings(bool(rank.endpoints.replay_endpoint)),
        _reporter_settings(options),
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


def _scheme(engine: EngineOptions, tokens: int, login: CredentialFiles) -> KeyScheme:
    """Return how an engine makes block keys: see `discovery`."""
    if engine.is_registered:
        info = fetch_instance(engine.admin, login, engine.instance_id)
        return registered_scheme(info, weights_version(engine.weights, engine.model_directory))
    if not tokens:
        raise InvalidArgumentError("option 'block_tokens' is missing: the engine does not say how many a block has")
    algorithm = engine.key_algorithm
    root = vllm_root(algorithm, engine.hash_seed or None) if algorithm.startswith("vllm-") else b""
    return KeyScheme(algorithm, root, engine.mask, tokens)


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
        self.health = HealthServer(options.listen, self.metrics, self.troubles)
        self.engines = tuple([EngineSubscriber(engine, options, login) for engine in options.engines])
        self._stop = threading.Event()
        self.registrations = self._follow(options, login) if options.registrations else None

    def _follow(self, options: SubscriberOptions, login: CredentialFiles) -> RegistrationFollower[RankSubscriber]:
        def open_rank(rank: RegisteredRank) -> RankSubscriber:
            senders = [ReportSender(address, login) for address in options.managers]
            return RankSubscriber(registered_plan(rank, options), senders)

        follower = RegistrationFollower(
            [IndexClient(address, login) for address in options.managers],
            options.allowed_hosts,
            open_rank,
            {(each.instance_id, each.engine_address) for each in options.engines},
        )
        name = "kvcm-registrations"
        self._following = threading.Thread(target=follower.run, args=(self._stop,), name=name, daemon=True)
        self._following.start()
        return follower

    def _ranks(self) -> list[RankSubscriber]:
        registered = [] if self.registrations is None else self.registrations.readers
        return [*(rank for engine in self.engines for rank in engine.ranks), *registered]

    def metrics(self) -> list[Metric]:
        """Return all metrics."""
        found: dict[str, list[Sample]] = {name: [] for name in _METRICS}
        for rank in self._ranks():
            for name, sample in rank.samples():
                found[name].append(sample)
        return [Metric(name, _METRICS[name], samples) for name, samples in found.items()]

    def troubles(self) -> list[str]:
        """Return why blocks of an engine may not be known to managers."""
        found = [trouble for engine in self.engines for trouble in engine.troubles()]
        # A registered engine that is away is the matter of the client that registered it.
        return found if self.registrations is None else found + self.registrations.troubles()

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        if self.registrations is not None:
            self._following.join(2 * _JOIN_SECONDS)
        threads = [threading.Thread(target=engine.close) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.health.close()


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
