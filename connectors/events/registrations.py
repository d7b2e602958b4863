"""Follows the publishers that clients registered at managers (POST /register of the index API): each of them is read as
long as it is registered.

A manager connects to no publisher itself, and the subscriber trusts registrations no further than it must: only
TCP, only hosts that its options allow, a bounded number, and bounded messages (`SourceLimits`). Registrations are kept
in a manager's memory. When another run of the same manager answers, they are made again, so that only a client's own
/unregister ends one; or that a manager is gone for long.

Keys of registered ranks have no mask. Ranks of an instance whose key scheme has one are not read: our connector stores
their KV, and no prompt would find their blocks. They are to be configured (`discovery`).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from kvcm.connectors.calls import DESCRIBE_INDEX, REGISTER_PUBLISHER, Call, Reply
from kvcm.connectors.client import error_reply, open_channel
from kvcm.connectors.credentials import CredentialFiles
from kvcm.connectors.events.engine_source import RankEndpoints, rank_endpoint
from kvcm.connectors.events.options import AllowedHosts
from kvcm.model.errors import ErrorCode, InvalidArgumentError, StorageIOError, UnsupportedError
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, KeyScheme, vllm_root
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = [
    "FORGET_SECONDS",
    "MOST_RANKS",
    "REOPEN_SECONDS",
    "IndexClient",
    "RegisteredRank",
    "RegistrationFollower",
    "registered_rank",
]

_log = logging.getLogger("kvcm.subscriber")
_CALL_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 5.0
_OK: Final = int(ErrorCode.OK)
_FOR_GOOD: Final = frozenset(
    map(
        int,
        (
            ErrorCode.UNSUPPORTED,
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.DUPLICATE_ENTITY,
            ErrorCode.REACH_MAX_ENTITY_CAPACITY,
            ErrorCode.INSTANCE_NOT_EXIST,
        ),
    )
)
"""Refusals that another attempt does not change."""
MOST_RANKS: Final = 256
"""Registered ranks that are read: each takes some threads."""
FORGET_SECONDS: Final = 600.0
"""After which a manager whose address leads to others, or is followed no more, is taken for gone."""
REOPEN_SECONDS: Final = 30.0
"""Before a rank is read again whose reader failed."""
_ENDPOINT: Final = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9_.-]{0,252}|\*):[0-9]{1,5}")
_STORE: Final = "Mooncake"
_HAS_MASK: Final = "block keys of instance {!r} have a mask, as our connector's: give the engine by options"


@dataclass(frozen=True, slots=True)
class RegisteredRank:
    """A registered publisher, as it is read.

    Attributes:
        instance_id: instance whose blocks it holds.
        name: of its engine, as routers call it.
        rank: data-parallel rank.
        engine: `vllm` or `sglang`.
        endpoints: where it publishes.
        scheme: how it makes block keys.
    """

    instance_id: str
    name: str
    rank: int
    engine: str
    endpoints: RankEndpoints
    scheme: KeyScheme


def registered_rank(publisher: pb.Publisher, allowed: AllowedHosts) -> RegisteredRank:
    """Return how a registered publisher is read.

    Raises:
        InvalidArgumentError: it cannot be, or must not be; says why.
        UnsupportedError: a package is missing.
    """
    if publisher.type == _STORE:
        raise InvalidArgumentError("it publishes the blocks of a store, and not those of an engine")
    if not publisher.instance_id:
        raise InvalidArgumentError(publisher.problem or "no instance fits")
    engine = "sglang" if publisher.type == "SGLang" else "vllm"
    host = publisher.engine.rpartition(":")[0] or "*"
    endpoint = _checked(publisher.endpoint, host, allowed)
    if not endpoint:
        raise InvalidArgumentError("it has no endpoint")
    return RegisteredRank(
        publisher.instance_id,
        publisher.engine,
        publisher.rank,
        engine=engine,
        endpoints=RankEndpoints(endpoint, _checked(publisher.replay_endpoint, host, allowed)),
        scheme=_scheme_of(publisher, engine),
    )


def _checked(endpoint: str, host: str, allowed: AllowedHosts) -> str:
    """Return an endpoint of the rank itself; a wildcard stands for the engine's host."""
    if not endpoint:
        return ""
    found = rank_endpoint(endpoint, 0, host) if _ENDPOINT.fullmatch(endpoint) else ""
    match = _ENDPOINT.fullmatch(found)
    if match is None or match["host"] == "*":
        raise InvalidArgumentError(f"endpoint {endpoint[:256]!r} must be tcp://host:port")
    if not allowed.allows(match["host"].strip("[]")):
        raise InvalidArgumentError(f"endpoint {endpoint!r}: option 'registration_hosts' does not allow its host")
    return found


def _scheme_of(publisher: pb.Publisher, engine: str) -> KeyScheme:
    if engine == "sglang":
        return KeyScheme(SGLANG_SHA256, b"", 0, publisher.block_size)
    if not publisher.HasField("hash_profile"):
        return KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0, publisher.block_size)
    profile = publisher.hash_profile
    algorithm = f"vllm-{profile.algorithm.replace('_', '-')}"
    return KeyScheme(algorithm, vllm_root(algorithm, profile.python_hash_seed), 0, publisher.block_size)


class IndexClient:
    """Reads and makes registrations at a manager: at one, from where it is entered to where it is left.

    Args:
        address: `host:port` of it, or of a Service of several.
        login: credentials.
        name: that its certificate must have; "" for that of the address.
    """

    def __init__(self, address: str, login: CredentialFiles, name: str = "") -> None:
        self.address = address
        self._login = login
        self._name = name
        self._shown = login.presented
        self._channel: Any = None

    def __enter__(self) -> IndexClient:
        self._shown = self._login.presented
        self._channel = open_channel(self.address, self._login, self._name)
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def describe(self) -> pb.DescribeIndexResponse:
        """Return all registrations.

        Raises:
            StorageIOError: the manager does not answer, or refuses.
        """
        answer: pb.DescribeIndexResponse = self._answer(DESCRIBE_INDEX, pb.DescribeIndexRequest())
        status = answer.header.status
        if status.code != _OK:
            raise StorageIOError(f"manager {self.address} refuses: {status.message}")
        return answer

    def register(self, publisher: pb.Publisher) -> None:
        """Register a publisher as it was registered before.

        Raises:
            StorageIOError: the manager does not answer, or cannot serve the call now.
            InvalidArgumentError: the manager refuses it: its group may be gone, or the endpoint be another's now.
        """
        group = publisher.instance_group
        request = pb.RegisterPublisherRequest(instance_group=group, publisher=publisher)
        status = self._answer(REGISTER_PUBLISHER, request).header.status
        if status.code in _FOR_GOOD:
            raise InvalidArgumentError(status.message)
        if status.code != _OK:
            raise StorageIOError(f"manager {self.address} refuses: {status.message}")

    def _answer(self, call: Call[Any], request: Message) -> Any:
        method = self._channel.unary_unary(
            call.path, request_serializer=type(request).SerializeToString, response_deserializer=call.decode
        )
        try:
            return method(request, timeout=_CALL_SECONDS, metadata=self._shown.metadata)
        except Exception as error:  # gRPC's errors, and an answer that is no protobuf
            reply: Reply[Any] = error_reply(error)
            if self._login.may_have_changed(reply.status):
                self._login.reload(self._shown)  # for the next connection
            text = f"manager {self.address} does not answer: {reply.status.name}: {reply.details}"
            raise StorageIOError(text) from None


class Reader(Protocol):
    """Reads one rank until it is closed."""

    @property
    def has_failed(self) -> bool:
        """Whether it reads no more, through a fault of ours."""

    def close(self) -> None:
        """End."""


ReaderT = TypeVar("ReaderT", bound=Reader)
_Name = tuple[str, str, int]  # instance, engine and rank
_Registration = tuple[str, str, str, int]  # group, model, engine and rank


@dataclass(slots=True)
class _Node:
    """What a manager answered last.

    Attributes:
        run_id: of its run.
        address: where it answered.
        answered_at: when.
        publishers: that were registered.
        masked: instances whose key scheme has a mask.
        lost: publishers that an earlier run of it had, and that could not be registered again yet.
    """

    run_id: str = ""
    address: str = ""
    answered_at: float = 0.0
    publishers: list[pb.Publisher] = field(default_factory=list)
    masked: frozenset[str] = frozenset()
    lost: dict[_Registration, pb.Publisher] = field(default_factory=dict)

    @property
    def wanted(self) -> list[pb.Publisher]:
        return [*self.publishers, *self.lost.values()]


class RegistrationFollower(Generic[ReaderT]):
    """Reads registered publishers, in a thread of its own.

    Managers are known by their node ids, since an address may lead to another one with each connection. Invariants:

    F1. A registration is made again only at the node that had it, when another run of that node answers.
    F2. A rank that is read and still registered goes on being read, whatever else is registered.
    F3. A group gets at most as many ranks as it leaves free, so that others always find some.

    Args:
        managers: returns clients of the managers that are followed now.
        allowed: hosts that may be connected to.
        open_reader: begins to read a rank.
        configured: instance and engine of those that are read anyway.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        managers: Callable[[], Sequence[IndexClient]],
        allowed: AllowedHosts,
        open_reader: Callable[[RegisteredRank], ReaderT],
        configured: Container[tuple[str, str]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._managers = managers
        self._allowed = allowed
        self._open_reader = open_reader
        self._configured = configured
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._away: dict[str, str] = {"": "not asked yet"}  # why an address does not answer
        self._readers: dict[_Name, tuple[RegisteredRank, ReaderT]] = {}
        self._groups: dict[_Name, str] = {}  # of those that are wanted
        self._resting: dict[_Name, float] = {}  # whose reader failed, and until when
        self._refused: dict[_Name, str] = {}
        self._has_failed = False

    @property
    def readers(self) -> list[ReaderT]:
        """Of the ranks that are read now."""
        return [reader for _, reader in list(self._readers.values())]

    def troubles(self) -> list[str]:
        """Return why registrations may not be known, or are not read through a fault of ours. One that cannot be read
        is none: any client can make such."""
        found = [f"registrations: {reason}" for reason in list(self._away.values())]
        found += [
            f"registrations: {len(node.lost)} are not made again at {node.address} yet"
            for node in list(self._nodes.values())
            if node.lost
        ]
        failed = [name for name, (_, reader) in list(self._readers.items()) if reader.has_failed]
        text = "registered engine {} rank {} is not read for now, see the log"
        return found + [text.format(engine, rank) for _, engine, rank in [*failed, *self._resting]]

    def faults(self) -> list[str]:
        """Return the faults of this process that a restart may mend. A reader that failed is opened again without."""
        return ["registrations are not followed, see the log"] if self._has_failed else []

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop` is set, and then end all readers."""
        while not stop.is_set():
            try:
                self.poll()
                self._has_failed = False
            except Exception:
                _log.exception("registrations cannot be followed")
                self._has_failed = True
            stop.wait(_POLL_SECONDS)
        for name in list(self._readers):
            self._close(name)

    def poll(self) -> None:
        """Ask the managers, read new registrations, and end those that were removed."""
        self._ask_all()
        self._end_failed()
        wanted, refused = self._wanted()
        for name, (rank, _) in list(self._readers.items()):
            if wanted.get(name) != rank:
                self._close(name)
        admitted, left_out = self._admitted()
        for name in admitted:
            self._open(name, wanted[name])
        self._log_refused(refused | left_out)

    # ---- managers ----

    def _ask_all(self) -> None:
        away: dict[str, str] = {}
        clients = self._managers()
        for client in clients:
            try:
                with client:
                    self._ask(client)
            except StorageIOError as error:
                away[client.address] = str(error)
                if self._away.get(client.address) != str(error):
                    _log.warning("registrations stay as they are: %s", error)
        self._away = away
        self._forget({client.address for client in clients})

    def _ask(self, client: IndexClient) -> None:
        node = self._record(client.describe(), client.address)
        if node.lost and self._restore(client, node):
            self._record(client.describe(), client.address)  # with their instances and states

    def _record(self, answer: pb.DescribeIndexResponse, address: str) -> _Node:
        node = self._nodes.setdefault(answer.manager or address, _Node(answer.run_id))
        if node.run_id != answer.run_id:
            node.lost |= {_registration(each): each for each in node.publishers}
        node.run_id, node.address, node.answered_at = answer.run_id, address, self._clock()
        node.publishers = list(answer.publishers)
        node.masked = frozenset(each.instance_id for each in answer.contexts if each.key_scheme.mask)
        for each in answer.publishers:
            node.lost.pop(_registration(each), None)
        return node

    def _restore(self, client: IndexClient, node: _Node) -> bool:
        """Register again what an earlier run of a manager had, as far as it answers; return whether something was."""
        has_changed = False
        for name, publisher in list(node.lost.items()):
            try:
                client.register(publisher)
            except InvalidArgumentError as error:
                _log.warning("%s rank %d is not registered again: %s", publisher.engine, publisher.rank, error)
            except StorageIOError as error:
                _log.warning("%s rank %d is not registered again yet: %s", publisher.engine, publisher.rank, error)
                node.lost[name] = node.lost.pop(name)  # last: the others are not to wait for it
                return has_changed
            else:
                has_changed = True
                node.publishers.append(publisher)
            del node.lost[name]
        return has_changed

    def _forget(self, addresses: Container[str]) -> None:
        """Forget managers that are gone: not those whose address does not answer, as they may come back."""
        oldest = self._clock() - FORGET_SECONDS
        for name, node in list(self._nodes.items()):
            if node.answered_at <= oldest and not (node.address in addresses and node.address in self._away):
                del self._nodes[name]
                _log.warning("manager %s is gone: its %d registrations end", name, len(node.wanted))

    # ---- ranks ----

    def _end_failed(self) -> None:
        now = self._clock()
        self._resting = {name: until for name, until in self._resting.items() if until > now}
        for name, (_, reader) in list(self._readers.items()):
            if reader.has_failed:
                self._close(name)
                self._resting[name] = now + REOPEN_SECONDS

    def _wanted(self) -> tuple[dict[_Name, RegisteredRank], dict[_Name, str]]:
        """Return the ranks that can be read, and why others are not."""
        found: dict[_Name, RegisteredRank] = {}
        refused: dict[_Name, str] = {}
        self._groups = {}
        masked = frozenset[str]().union(*(node.masked for node in self._nodes.values()))
        for publisher in [each for node in self._nodes.values() for each in node.wanted]:
            name = publisher.instance_id, publisher.engine, publisher.rank
            if name in found or name[:2] in self._configured:
                continue
            if publisher.instance_id in masked:
                refused[name] = _HAS_MASK.format(publisher.instance_id)
                continue
            try:
                found[name] = registered_rank(publisher, self._allowed)
                self._groups[name] = publisher.instance_group
                refused.pop(name, None)
            except (InvalidArgumentError, UnsupportedError) as error:
                refused[name] = str(error)
        self._resting = {name: until for name, until in self._resting.items() if name in found}
        return found, refused

    def _log_refused(self, refused: Mapping[_Name, str]) -> None:
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                _log.warning("registered engine %s rank %d is not read: %s", name[1], name[2], reason)
        self._refused = dict(refused)

    def _admitted(self) -> tuple[list[_Name], dict[_Name, str]]:
        """Return the ranks to open, those of the group with the fewest first (F2, F3), and why others are not."""
        counts = Counter(self._groups[name] for name in self._readers)
        waiting: dict[str, list[_Name]] = {}
        for name, group in self._groups.items():
            if name not in self._readers and name not in self._resting:
                waiting.setdefault(group, []).append(name)
        found: list[_Name] = []
        while waiting:
            group = min(waiting, key=lambda each: (counts[each], each))
            if counts[group] >= MOST_RANKS - counts.total():
                break  # so all others, too: they have as many at least
            counts[group] += 1
            found.append(waiting[group].pop(0))
            if not waiting[group]:
                del waiting[group]
        text = "{} others of group {!r} are read, and no group gets more than it leaves free of {}"
        left_out = {
            name: text.format(counts[group], group, MOST_RANKS) for group, names in waiting.items() for name in names
        }
        return found, left_out

    def _open(self, name: _Name, rank: RegisteredRank) -> None:
        try:
            self._readers[name] = rank, self._open_reader(rank)
        except Exception as error:  # of ZMQ, for an address that it cannot use; the next poll tries again
            _log.warning("registered engine %s rank %d is not read: %r", name[1], name[2], error)
        else:
            _log.info("registered engine %s rank %d is read at %s", name[1], name[2], rank.endpoints.endpoint)

    def _close(self, name: _Name) -> None:
        _, reader = self._readers.pop(name)
        reader.close()
        _log.info("registered engine %s rank %d is read no more", name[1], name[2])


def _registration(publisher: pb.Publisher) -> tuple[str, str, str, int]:
    return publisher.instance_group, publisher.model_name, publisher.engine, publisher.rank
