"""One exchange per method of the clients: its request, and the result that its verdict stands for.

Both clients are thin: they carry an exchange's steps out, with or without `await`, and return its result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvcm.connectors import calls
from kvcm.connectors.addresses import Addresses
from kvcm.connectors.calls import AnswerT, Call, Policy, RetrySettings, Verdict, new_trace_id
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.results import (
    CallCounters,
    ClusterInfo,
    EncodedMatch,
    Location,
    MatchMode,
    MatchResult,
    MissingReport,
    Outcome,
    Pin,
    PoolReport,
    Registration,
    RegistrationState,
    WriteGrant,
)
from kvcm.connectors.wire import (
    MalformedAnswerError,
    Requests,
    encode_locations,
    parse_cluster_info,
    parse_match_locations,
    parse_storage_configs,
    parse_write_grant,
)
from kvcm.model.errors import ErrorCode, InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pools
from kvcm.protocol.kvcm.v1 import unread_pb2 as unread

__all__ = ["MAX_MATCH_KEYS", "ClientSettings", "Exchange", "Exchanges", "Journal", "StartedWrite"]

_log = logging.getLogger(__name__)

MAX_MATCH_KEYS = 65_536
"""Of one request; a manager refuses more unless it is configured to take them."""

# Codes that go away by themselves; every other one is a conflict that an operator has to resolve.
_TRANSIENT_CODES = frozenset({ErrorCode.SERVICE_NOT_READY, ErrorCode.SERVER_NOT_LEADER, ErrorCode.IO_ERROR})


def _ok_answer(verdict: Verdict[AnswerT]) -> AnswerT:
    """Return the answer of a verdict that is ok."""
    assert verdict.answer is not None  # there is one when the outcome is ok
    return verdict.answer


def _on_registered(verdict: Verdict[meta.RegisterInstanceResponse]) -> Registration:
    """Return the registration that a manager accepted."""
    storages = parse_storage_configs(_ok_answer(verdict).storage_configs)
    return Registration(RegistrationState.OK, storages, verdict.code)


def _on_registration_failed(verdict: Verdict[meta.RegisterInstanceResponse]) -> Registration:
    """Return a registration that failed: rejected by a manager, or unreachable and worth a retry."""
    if verdict.code is None or verdict.code in _TRANSIENT_CODES:
        return Registration(RegistrationState.UNREACHABLE, code=verdict.code, message=verdict.reason)
    _log.error(
        "the manager refuses to register the instance; KV is not reused until this is resolved: %s", verdict.reason
    )
    return Registration(RegistrationState.REFUSED, code=verdict.code, message=verdict.reason)


class Journal:
    """Counters and log of one client; safe to use from several threads.

    Args:
        clock: seconds of a clock that never runs backwards.
        log_every_seconds: least time between two lines about the same call; a dead manager fails every request of a
            busy engine, and its log must stay readable.
    """

    def __init__(self, clock: Callable[[], float], log_every_seconds: float = 10.0) -> None:
        self._clock = clock
        self._log_every_seconds = log_every_seconds
        self._lock = threading.Lock()
        self._counters: dict[str, CallCounters] = {}
        self._silent_until: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def counters(self) -> dict[str, CallCounters]:
        """Return a snapshot, by name of the call."""
        with self._lock:
            return dict(self._counters)

    def record(self, call: str, outcome: Outcome, retries: int, reason: str) -> None:
        """Count one call, and log the reason when it failed."""
        with self._lock:
            counters = self._counters.get(call, CallCounters())
            count = getattr(counters, outcome.value) + 1
            self._counters[call] = replace(counters, **{outcome.value: count, "retries": counters.retries + retries})
            suppressed = None if outcome is Outcome.OK else self._suppressed_lines(call)
        if suppressed is not None:
            _log.warning("%s failed, treated as a miss (%d more lines left out): %s", call, suppressed, reason)

    def _suppressed_lines(self, call: str) -> int | None:
        """Return how many lines were left out since the last one, None to leave this one out too."""
        now = self._clock()
        if now < self._silent_until.get(call, now):
            self._suppressed[call] = self._suppressed.get(call, 0) + 1
            return None
        self._silent_until[call] = now + self._log_every_seconds
        return self._suppressed.pop(call, 0)


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a client calls.

    Attributes:
        timeout_seconds: budget of a call whose caller gives none, retries and pauses included.
        retry: retries inside the budget.
        node_id: node of the caller, from `NodeSettings`: matches and writes then may name memory pools that are on
            it. "" for a caller that moves no bytes of pools.
        credentials: for authentication and TLS.
        follow_assignment: call the manager that managers announce for the instance, once it answered a probe; the
            given addresses stay in use when it does not serve. False: the given addresses alone.
    """

    timeout_seconds: float = 1.0
    retry: RetrySettings = field(default_factory=RetrySettings)
    node_id: str = ""
    credentials: ClientCredentials = field(default_factory=ClientCredentials)
    follow_assignment: bool = True


@dataclass(frozen=True, slots=True)
class Exchange(Generic[AnswerT, ResultT]):
    """A request, and its result by verdict.

    Attributes:
        call: which remote procedure.
        request: its message.
        budget_seconds: for everything.
        on_ok: makes the result from the verdict; raises `MalformedAnswerError` on a malformed answer.
        on_failure: the result without a well-formed answer.
    """

    call: Call[AnswerT]
    request: Message
    budget_seconds: float
    on_ok: Callable[[Verdict[AnswerT]], ResultT]
    on_failure: Callable[[Verdict[AnswerT]], ResultT]


@dataclass(frozen=True, slots=True)
class StartedWrite:
    """An answered start: a grant, or an orphan session to abort because its grant was malformed."""

    grant: WriteGrant | None = None
    orphan_session_id: str = ""


class Exchanges:
    """Builds the exchanges of one client and keeps its policy and journal.

    Args:
        addresses: of the managers.
        instance_id: instance that all calls are about.
        settings: how to call.
        clock: seconds of a clock that never runs backwards.
        new_trace_id: makes the correlation id of a call.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        instance_id: str,
        settings: ClientSettings,
        clock: Callable[[], float] = time.monotonic,
        new_trace_id: Callable[[], str] = new_trace_id,
    ) -> None:
        self._requests = Requests(instance_id, settings.node_id)
        self._settings = settings
        self._new_trace_id = new_trace_id
        self._journal = Journal(clock)
        self.addresses = Addresses(addresses, clock, follows=settings.follow_assignment)
        self.policy = Policy(self.addresses, settings.retry, clock)

    @property
    def is_suspended(self) -> bool:
        """Whether calls are misses at once, because no manager answered lately."""
        return self.policy.is_suspended

    @property
    def counters(self) -> dict[str, CallCounters]:
        """Snapshot of how calls ended, by name of the call."""
        return self._journal.counters()

    def finish(self, exchange: Exchange[AnswerT, ResultT], verdict: Verdict[AnswerT]) -> ResultT:
        """Return the result for a verdict, count it and log the reason of a miss."""
        if verdict.outcome is Outcome.OK:
            try:
                result = exchange.on_ok(verdict)
            except (MalformedAnswerError, InvalidArgumentError) as error:
                verdict = replace(verdict, outcome=Outcome.MISS_ON_ERROR, reason=f"malformed answer: {error}")
                result = exchange.on_failure(verdict)
        else:
            result = exchange.on_failure(verdict)
        self._journal.record(exchange.call.name, verdict.outcome, verdict.retries, verdict.reason)
        if announced := _announced(verdict.answer):
            self.addresses.announce(announced)
        return result

    def probe(self) -> meta.GetClusterInfoRequest:
        """Return the request of a probe."""
        return self._requests.cluster_info(self._new_trace_id())

    def register_instance(
        self,
        instance_group: str,
        block_size: int,
        spec_infos: Sequence[LocationSpecInfo],
        model: ModelDeployment,
        spec_groups: Sequence[LocationSpecGroup],
        timeout_seconds: float | None,
    ) -> Exchange[meta.RegisterInstanceResponse, Registration]:
        """See `ManagerClient.register_instance`."""
        request = self._requests.register_instance(
            trace_id=self._new_trace_id(),
            instance_group=instance_group,
            block_size=block_size,
            spec_infos=spec_infos,
            model=model,
            spec_groups=spec_groups,
        )
        return self._exchange(
            calls.REGISTER_INSTANCE, request, timeout_seconds, _on_registered, _on_registration_failed
        )

    def match(
        self,
        keys: Sequence[int],
        mode: MatchMode,
        mask: int | Sequence[bool] | None,
        spec_names: Sequence[str],
        window: int,
        read_lease_ms: int,
        timeout_seconds: float | None,
    ) -> Exchange[meta.GetCacheLocationResponse, MatchResult]:
        """See `ManagerClient.match`."""
        unasked = [None] * (len(keys) - MAX_MATCH_KEYS)
        keys, mask = keys[:MAX_MATCH_KEYS], _shortened(mask)
        request = self._requests.match(
            trace_id=self._new_trace_id(),
            keys=keys,
            mode=mode,
            mask=mask,
            spec_names=spec_names,
            window=window,
            read_lease_ms=read_lease_ms,
        )
        asked = len(keys) - _masked_blocks(mask) if mode.is_prefix else len(keys)
        nothing: tuple[Location | None, ...] = () if mode.is_prefix else (None,) * (len(keys) + len(unasked))

        def conclude(verdict: Verdict[meta.GetCacheLocationResponse]) -> MatchResult:
            answer = _ok_answer(verdict)
            locations = parse_match_locations(answer, mode, asked, spec_names)
            if not mode.is_prefix:
                locations += tuple(unasked)
            return MatchResult(
                Outcome.OK, locations, answer.read_lease_id, answer.read_lease_deadline_ms, code=verdict.code
            )

        def miss(verdict: Verdict[meta.GetCacheLocationResponse]) -> MatchResult:
            return MatchResult(verdict.outcome, nothing, code=verdict.code, reason=verdict.reason)

        return self._exchange(calls.MATCH, request, timeout_seconds, conclude, miss)

    def match_encoded(
        self,
        keys: Sequence[int],
        mode: MatchMode,
        spec_names: Sequence[str],
        window: int,
        read_lease_ms: int,
        timeout_seconds: float | None,
    ) -> Exchange[unread.UnreadCacheLocations, EncodedMatch]:
        """See `ManagerClient.match_encoded`."""
        unasked = [b""] * (len(keys) - MAX_MATCH_KEYS)
        keys = keys[:MAX_MATCH_KEYS]
        request = self._requests.match(
            trace_id=self._new_trace_id(),
            keys=keys,
            mode=mode,
            mask=None,
            spec_names=spec_names,
            window=window,
            read_lease_ms=read_lease_ms,
        )

        def conclude(verdict: Verdict[unread.UnreadCacheLocations]) -> EncodedMatch:
            answer = _ok_answer(verdict)
            found = encode_locations(answer, mode, len(keys))
            if not mode.is_prefix:
                found += tuple(unasked)
            return EncodedMatch(Outcome.OK, found, answer.read_lease_id, verdict.code)

        def miss(verdict: Verdict[unread.UnreadCacheLocations]) -> EncodedMatch:
            return EncodedMatch(verdict.outcome, code=verdict.code, reason=verdict.reason)

        return self._exchange(calls.MATCH_UNREAD, request, timeout_seconds, conclude, miss)

    def match_length(
        self, keys: Sequence[int], mode: MatchMode, window: int, timeout_seconds: float | None
    ) -> Exchange[meta.GetCacheLocationLenResponse, int]:
        """See `ManagerClient.match_length`."""
        keys = keys[:MAX_MATCH_KEYS]

        def conclude(verdict: Verdict[meta.GetCacheLocationLenResponse]) -> int:
            length = _ok_answer(verdict).cache_location_len
            if not 0 <= length <= len(keys):
                raise MalformedAnswerError(f"{length} hits for {len(keys)} keys")
            return length

        request = self._requests.match_length(self._new_trace_id(), keys, mode, window)
        return self._exchange(calls.MATCH_LENGTH, request, timeout_seconds, conclude, lambda _: 0)

    def start_write(
        self,
        keys: Sequence[int],
        parent_block_key: int | None,
        spec_groups: Sequence[str],
        session_seconds: int,
        min_replica_count: int,
        event_hashes: Sequence[int],
        timeout_seconds: float | None,
    ) -> Exchange[meta.StartWriteCacheResponse, StartedWrite]:
        """See `ManagerClient.start_write`."""
        request = self._requests.start_write(
            trace_id=self._new_trace_id(),
            keys=keys,
            parent_block_key=parent_block_key,
            spec_groups=spec_groups,
            timeout_seconds=session_seconds,
            min_replica_count=min_replica_count,
            event_hashes=event_hashes,
        )

        def conclude(verdict: Verdict[meta.StartWriteCacheResponse]) -> StartedWrite:
            return StartedWrite(parse_write_grant(_ok_answer(verdict), len(keys)))

        def miss(verdict: Verdict[meta.StartWriteCacheResponse]) -> StartedWrite:
            return StartedWrite(None, verdict.answer.write_session_id if verdict.answer else "")

        return self._exchange(calls.START_WRITE, request, timeout_seconds, conclude, miss)

    def finish_write(
        self,
        session_id: str,
        succeeded: Sequence[bool],
        checksums: Sequence[Mapping[str, int]],
        priority: int,
        ttl_seconds: int,
        timeout_seconds: float | None,
    ) -> Exchange[meta.CommonResponse, bool]:
        """See `ManagerClient.finish_write`."""
        request = self._requests.finish_write(
            trace_id=self._new_trace_id(),
            session_id=session_id,
            succeeded=succeeded,
            checksums=checksums,
            priority=priority,
            ttl_seconds=ttl_seconds,
        )
        return self._exchange(calls.FINISH_WRITE, request, timeout_seconds, _true, _false)

    def abort_write(self, session_id: str, timeout_seconds: float | None) -> Exchange[meta.CommonResponse, bool]:
        """See `ManagerClient.abort_write`."""
        request = self._requests.abort_write(self._new_trace_id(), session_id)
        return self._exchange(calls.FINISH_WRITE, request, timeout_seconds, _true, _false)

    def renew_write(
        self, session_id: str, session_seconds: int, timeout_seconds: float | None
    ) -> Exchange[lease.RenewWriteSessionResponse, bool]:
        """See `ManagerClient.renew_write`."""
        request = self._requests.renew_write(self._new_trace_id(), session_id, session_seconds)
        return self._exchange(calls.RENEW_WRITE_SESSION, request, timeout_seconds, _true, _false)

    def release_lease(
        self, lease_ids: Sequence[str], timeout_seconds: float | None
    ) -> Exchange[meta.CommonResponse, bool]:
        """See `ManagerClient.release_lease`."""
        request = self._requests.release_lease(self._new_trace_id(), lease_ids)
        return self._exchange(calls.RELEASE_READ_LEASE, request, timeout_seconds, _true, _false)

    def remove(self, keys: Sequence[int], timeout_seconds: float | None) -> Exchange[meta.CommonResponse, bool]:
        """See `ManagerClient.remove`."""
        request = self._requests.remove(self._new_trace_id(), keys)
        return self._exchange(calls.REMOVE, request, timeout_seconds, _true, _false)

    def pin_prefix(
        self, keys: Sequence[int], owner: str, ttl_seconds: int, timeout_seconds: float | None
    ) -> Exchange[pins.PinPrefixResponse, Pin | None]:
        """See `ManagerClient.pin_prefix`."""

        def conclude(verdict: Verdict[pins.PinPrefixResponse]) -> Pin | None:
            answer = _ok_answer(verdict)
            return Pin(answer.pin_id, answer.pinned_blocks, answer.pinned_bytes, answer.deadline_ms, owner)

        request = self._requests.pin_prefix(self._new_trace_id(), keys, owner, ttl_seconds)
        return self._exchange(calls.PIN_PREFIX, request, timeout_seconds, conclude, lambda _: None)

    def unpin(self, pin_id: str, timeout_seconds: float | None) -> Exchange[meta.CommonResponse, bool]:
        """See `ManagerClient.unpin`."""
        request = self._requests.unpin(self._new_trace_id(), pin_id)
        return self._exchange(calls.UNPIN_PREFIX, request, timeout_seconds, _true, _false)

    def list_pins(self, timeout_seconds: float | None) -> Exchange[pins.ListPinsResponse, tuple[Pin, ...] | None]:
        """See `ManagerClient.list_pins`."""

        def conclude(verdict: Verdict[pins.ListPinsResponse]) -> tuple[Pin, ...] | None:
            return tuple(
                Pin(
                    id=pin.pin_id,
                    blocks=pin.blocks,
                    size_bytes=pin.bytes,
                    deadline_ms=pin.deadline_ms,
                    owner=pin.owner,
                    last_key=pin.last_block_key,
                )
                for pin in _ok_answer(verdict).pins
            )

        request = self._requests.list_pins(self._new_trace_id())
        return self._exchange(calls.LIST_PINS, request, timeout_seconds, conclude, lambda _: None)

    def report_missing(
        self,
        parts: Sequence[tuple[int, LocationUri | str]],
        corrupt: Sequence[tuple[int, LocationUri | str, int]],
        timeout_seconds: float | None,
    ) -> Exchange[pins.ReportMissingResponse, MissingReport | None]:
        """See `ManagerClient.report_missing`."""

        def conclude(verdict: Verdict[pins.ReportMissingResponse]) -> MissingReport | None:
            answer = _ok_answer(verdict)
            return MissingReport(answer.removed_locations, answer.unconfirmed_parts)

        request = self._requests.report_missing(self._new_trace_id(), parts, corrupt)
        return self._exchange(calls.REPORT_MISSING, request, timeout_seconds, conclude, lambda _: None)

    def report_pool(
        self,
        storage: str,
        node_id: str,
        generation: int,
        capacity_bytes: int,
        valid_ms: int,
        timeout_seconds: float | None,
    ) -> Exchange[pools.ReportPoolResponse, PoolReport | None]:
        """See `ManagerClient.report_pool`."""

        def conclude(verdict: Verdict[pools.ReportPoolResponse]) -> PoolReport | None:
            return PoolReport(_ok_answer(verdict).is_new_generation)

        request = self._requests.report_pool(
            trace_id=self._new_trace_id(),
            storage=storage,
            node_id=node_id,
            generation=generation,
            capacity_bytes=capacity_bytes,
            valid_ms=valid_ms,
        )
        return self._exchange(calls.REPORT_POOL, request, timeout_seconds, conclude, lambda _: None)

    def cluster_info(self, timeout_seconds: float | None) -> Exchange[meta.GetClusterInfoResponse, ClusterInfo | None]:
        """See `ManagerClient.cluster_info`."""

        def conclude(verdict: Verdict[meta.GetClusterInfoResponse]) -> ClusterInfo | None:
            return parse_cluster_info(_ok_answer(verdict))

        request = self._requests.cluster_info(self._new_trace_id())
        return self._exchange(calls.GET_CLUSTER_INFO, request, timeout_seconds, conclude, lambda _: None)

    def _exchange(
        self,
        call: Call[AnswerT],
        request: Message,
        timeout_seconds: float | None,
        conclude: Callable[[Verdict[AnswerT]], ResultT],
        miss: Callable[[Verdict[AnswerT]], ResultT],
    ) -> Exchange[AnswerT, ResultT]:
        budget = self._settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        return Exchange(call, request, budget, conclude, miss)


def _announced(answer: object) -> Sequence[meta.MetaNodeEndpoint]:
    """Return the managers that an answer announces."""
    if isinstance(answer, meta.RegisterInstanceResponse | meta.GetClusterInfoResponse):
        return answer.preferred_managers
    if isinstance(answer, meta.GetCacheLocationResponse | unread.UnreadCacheLocations):
        return (answer.preferred_manager,) if answer.HasField("preferred_manager") else ()
    return ()


def _shortened(mask: int | Sequence[bool] | None) -> int | Sequence[bool] | None:
    """Return the mask of the first `MAX_MATCH_KEYS` keys."""
    if mask is None:
        return None
    return min(mask, MAX_MATCH_KEYS) if isinstance(mask, int) else mask[:MAX_MATCH_KEYS]


def _masked_blocks(mask: int | Sequence[bool] | None) -> int:
    if mask is None:
        return 0
    return mask if isinstance(mask, int) else sum(mask)


def _true(_: Verdict[AnswerT]) -> bool:
    return True


def _false(_: Verdict[AnswerT]) -> bool:
    return False
