"""Follows the publishers that clients registered at managers (POST /register of the index API): each of them is read as
long as it is registered.

A manager connects to no publisher itself, and the subscriber trusts registrations no further than it must: only
TCP, only hosts that its options allow, and a bounded number. Registrations are kept in a manager's memory. When another
run of the manager answers, they are made again, so that only a client's own /unregister ends one.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from kvcm.connectors.calls import DESCRIBE_INDEX, REGISTER_PUBLISHER, Call, Reply
from kvcm.connectors.client import error_reply, open_channel
from kvcm.connectors.credentials import CredentialFiles
from kvcm.connectors.events.engine_source import RankEndpoints, rank_endpoint
from kvcm.connectors.events.options import AllowedHosts
from kvcm.model.errors import InvalidArgumentError, StorageIOError, UnsupportedError
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, KeyScheme, vllm_root
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = ["MOST_RANKS", "IndexClient", "RegisteredRank", "RegistrationFollower", "registered_rank"]

_log = logging.getLogger("kvcm.subscriber")
_CALL_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 5.0
_OK: Final = 1
MOST_RANKS: Final = 256
"""Registered ranks that are read: each takes some threads."""
_ENDPOINT: Final = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}|\*):[0-9]{1,5}")
_STORE: Final = "Mooncake"


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
    """Reads and makes registrations at one manager.

    Args:
        address: `host:port` of it.
        login: credentials.
    """

    def __init__(self, address: str, login: CredentialFiles) -> None:
        self.address = address
        self._login = login

    def describe(self) -> pb.DescribeIndexResponse:
        """Return all registrations.

        Raises:
            StorageIOError: the manager does not answer, or refuses.
        """
        answer: pb.DescribeIndexResponse = self._answer(DESCRIBE_INDEX, pb.DescribeIndexRequest())
        return answer

    def register(self, publisher: pb.Publisher) -> None:
        """Register a publisher as it was registered before.

        Raises:
            StorageIOError: the manager does not answer, or refuses.
        """
        group = publisher.instance_group
        self._answer(REGISTER_PUBLISHER, pb.RegisterPublisherRequest(instance_group=group, publisher=publisher))

    def _answer(self, call: Call[Any], request: Message) -> Any:
        shown = self._login.presented
        with open_channel(self.address, self._login) as channel:
            method = channel.unary_unary(
                call.path, request_serializer=type(request).SerializeToString, response_deserializer=call.decode
            )
            try:
                answer: Any = method(request, timeout=_CALL_SECONDS, metadata=shown.metadata)
            except Exception as error:  # gRPC's errors, and an answer that is no protobuf
                reply: Reply[Any] = error_reply(error)
                if self._login.may_have_changed(reply.status):
                    self._login.reload(shown)  # for the next attempt
                text = f"manager {self.address} does not answer: {reply.status.name}: {reply.details}"
                raise StorageIOError(text) from None
        status = answer.header.status
        if status.code != _OK:
            raise StorageIOError(f"manager {self.address} refuses: {status.message}")
        return answer


class Reader(Protocol):
    """Reads one rank until it is closed."""

    def close(self) -> None:
        """End."""


ReaderT = TypeVar("ReaderT", bound=Reader)
_Name = tuple[str, str, int]  # instance, engine and rank


@dataclass(slots=True)
class _Known:
    """What a manager answered last.

    Attributes:
        run_id: of its run.
        publishers: that were registered.
        trouble: why it does not answer, "" where it does.
    """

    run_id: str = ""
    publishers: list[pb.Publisher] = field(default_factory=list)
    trouble: str = "not asked yet"


class RegistrationFollower(Generic[ReaderT]):
    """Reads registered publishers, in a thread of its own.

    Args:
        clients: of the managers.
        allowed: hosts that may be connected to.
        open_reader: begins to read a rank.
        configured: instance and engine of those that are read anyway.
    """

    def __init__(
        self,
        clients: Sequence[IndexClient],
        allowed: AllowedHosts,
        open_reader: Callable[[RegisteredRank], ReaderT],
        configured: Container[tuple[str, str]] = (),
    ) -> None:
        self._known = [(client, _Known()) for client in clients]
        self._allowed = allowed
        self._open_reader = open_reader
        self._configured = configured
        self._readers: dict[_Name, tuple[RegisteredRank, ReaderT]] = {}
        self._refused: dict[_Name, str] = {}

    @property
    def readers(self) -> list[ReaderT]:
        """Of the ranks that are read now."""
        return [reader for _, reader in list(self._readers.values())]

    def troubles(self) -> list[str]:
        """Return why registrations may not be known. One that cannot be read is none: any client can make such."""
        return [f"registrations: {known.trouble}" for _, known in self._known if known.trouble]

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop` is set, and then end all readers."""
        while not stop.is_set():
            try:
                self.poll()
            except Exception:
                _log.exception("registrations cannot be followed")
            stop.wait(_POLL_SECONDS)
        for name in list(self._readers):
            self._close(name)

    def poll(self) -> None:
        """Ask the managers, read new registrations, and end those that were removed."""
        for client, known in self._known:
            self._ask(client, known)
        wanted = self._wanted()
        for name, (rank, _) in list(self._readers.items()):
            if wanted.get(name) != rank:
                self._close(name)
        for name, rank in wanted.items():
            if name not in self._readers:
                self._open(name, rank)

    def _ask(self, client: IndexClient, known: _Known) -> None:
        try:
            answer = client.describe()
            if known.run_id not in {"", answer.run_id}:
                answer = self._restore(client, known, answer)
        except StorageIOError as error:
            if str(error) != known.trouble:
                _log.warning("registrations stay as they are: %s", error)
            known.trouble = str(error)
            return
        known.run_id, known.publishers, known.trouble = answer.run_id, list(answer.publishers), ""

    def _restore(
        self, client: IndexClient, known: _Known, answer: pb.DescribeIndexResponse
    ) -> pb.DescribeIndexResponse:
        """Register again what an earlier run of a manager had."""
        has = {_registration(each) for each in answer.publishers}
        for each in known.publishers:
            if _registration(each) not in has:
                try:
                    client.register(each)
                except StorageIOError as error:  # its group may be gone, or the endpoint be another's now
                    _log.warning("%s rank %d is not registered again: %s", each.engine, each.rank, error)
        return client.describe()

    def _wanted(self) -> dict[_Name, RegisteredRank]:
        found: dict[_Name, RegisteredRank] = {}
        refused: dict[_Name, str] = {}
        for _, known in self._known:
            for publisher in known.publishers:
                name = publisher.instance_id, publisher.engine, publisher.rank
                if name in found or name[:2] in self._configured:
                    continue
                if len(found) >= MOST_RANKS:
                    refused[name] = f"{MOST_RANKS} others are read, the most of one subscriber"
                    continue
                try:
                    found[name] = registered_rank(publisher, self._allowed)
                except (InvalidArgumentError, UnsupportedError) as error:
                    refused[name] = str(error)
        self._log_refused(refused)
        return found

    def _log_refused(self, refused: dict[_Name, str]) -> None:
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                _log.warning("registered engine %s rank %d is not read: %s", name[1], name[2], reason)
        self._refused = refused

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
