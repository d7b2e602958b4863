"""A subscriber follows what clients register at managers, and trusts it no further than its options allow."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_model import stored
from event_sockets import Publisher
from fake_clock import FakeClock
from ports import free_port
from rest_client import RestClient
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, unique
from waiting import until

from kvcm.connectors.addresses import AnnouncedManager
from kvcm.connectors.credentials import ClientCredentials, CredentialFiles
from kvcm.connectors.events.engine_source import SourceLimits
from kvcm.connectors.events.options import AllowedHosts, SubscriberOptions, parse_arguments
from kvcm.connectors.events.registrations import (
    FORGET_SECONDS,
    MOST_RANKS,
    REOPEN_SECONDS,
    IndexClient,
    RegisteredRank,
    RegistrationFollower,
    registered_rank,
)
from kvcm.connectors.events.subscriber import ManagerLinks, RankSubscriber, Subscriber, registered_plan
from kvcm.model.errors import ErrorCode, InvalidArgumentError
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, VLLM_SHA256_CBOR, KeyScheme, vllm_root
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import residency_service_pb2_grpc as rpc

ANY = AllowedHosts("")
SCHEME = KeyScheme(VLLM_SHA256_CBOR, vllm_root(VLLM_SHA256_CBOR, "0"), 0, 4)
PROFILE = {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"}
TOKENS = list(range(1, 13))


def publisher(**changes: Any) -> pb.Publisher:
    """Return a registration as a manager lists it."""
    fields = {"engine": "e", "instance_id": "instance", "endpoint": "tcp://10.0.0.1:5557", "block_size": 4}
    return pb.Publisher(**fields | changes)


def test_a_registration_says_how_keys_are_made() -> None:
    found = registered_rank(publisher(hash_profile=PROFILE, rank=3, replay_endpoint="tcp://10.0.0.1:5657"), ANY)
    assert (found.scheme, found.engine, found.rank, found.instance_id) == (SCHEME, "vllm", 3, "instance")
    assert (found.endpoints.endpoint, found.endpoints.replay_endpoint) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")
    assert registered_rank(publisher(), ANY).scheme == KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0, 4)
    assert registered_rank(publisher(type="SGLang"), ANY).scheme == KeyScheme(SGLANG_SHA256, b"", 0, 4)


def test_a_wildcard_is_the_host_of_the_engine() -> None:
    found = registered_rank(publisher(engine="10.0.0.7:8000", endpoint="tcp://*:5557"), AllowedHosts("10.0.0.0/8"))
    assert found.endpoints.endpoint == "tcp://10.0.0.7:5557"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"type": "Mooncake"}, "store"),
        ({"instance_id": "", "problem": "no instance is registered"}, "no instance is registered"),
        ({"endpoint": "tcp://*:5557"}, "tcp://host:port"),
        ({"endpoint": "ipc:///tmp/x"}, "tcp://host:port"),
        ({"endpoint": "tcp://eth0;10.0.0.1:5557"}, "tcp://host:port"),
        ({"endpoint": ""}, "no endpoint"),
        ({"endpoint": "tcp://169.254.169.254:80"}, "registration_hosts"),
        ({"replay_endpoint": "tcp://[::1]:80"}, "registration_hosts"),
        ({"endpoint": "tcp://evil.example:80"}, "registration_hosts"),
        ({"block_size": 0}, "block_tokens"),
        ({"endpoint": "tcp://-x:80"}, "tcp://host:port"),
        ({"endpoint": "tcp://.x:80"}, "tcp://host:port"),
        ({"endpoint": "tcp://_x:80"}, "tcp://host:port"),
    ],
)
def test_what_must_not_be_read_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        registered_rank(publisher(**changes), AllowedHosts("10.0.0.0/8,engines.example"))


def test_allowed_hosts() -> None:
    allowed = AllowedHosts("Engines.example, 10.0.0.0/8,fd00::/8, 192.0.2.1")
    for host in ("engines.example", "ENGINES.example", "10.255.0.1", "fd00::1", "192.0.2.1"):
        assert allowed.allows(host), host
    for host in ("x.engines.example", "11.0.0.1", "fe80::1", "192.0.2.2", "localhost", "", "0x0a000001"):
        assert not allowed.allows(host), host
    for bad in ("10.0.0.1/8", "a/b", "host:1", "*"):
        with pytest.raises(InvalidArgumentError, match="registration_hosts"):
            AllowedHosts(bad)


def test_options(tmp_path: Path) -> None:
    options = parse_arguments(["--manager", "a:1", "--registrations", "--registration-hosts", "10.0.0.0/8"])
    assert (options.registrations, options.engines) == (True, ())
    file = tmp_path / "subscriber.toml"
    file.write_text('manager = ["a:1"]\nregistrations = true\nregistration_hosts = "e1,e2"\n')
    assert parse_arguments(["--config", str(file)]).allowed_hosts.allows("e2")
    with pytest.raises(SystemExit):
        parse_arguments(["--manager", "a:1"])


# Following.


@dataclass
class Opened:
    """A rank that is read, or was."""

    rank: RegisteredRank
    is_closed: bool = False
    has_failed: bool = False

    def close(self) -> None:
        """End."""
        self.is_closed = True


@dataclass
class Readers:
    """Keeps opened ranks."""

    opened: list[Opened] = field(default_factory=list)

    def __call__(self, rank: RegisteredRank) -> Opened:
        if "unusable" in rank.name:
            raise OSError("no such host")
        self.opened.append(Opened(rank))
        return self.opened[-1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ManagerProcess]:
    with manager(tmp_path / "manager") as process:
        yield process


def register(process: ManagerProcess, **changes: Any) -> str:
    """Register an instance, and a publisher of it over HTTP; return the instance."""
    model = unique("model")
    with process.api() as api:
        deployment = {"model_name": model, "dtype": "bf16"}
        instance = Site(api).instance(block_size=4, model_deployment=deployment)
    fields = {"instance_id": "e", "dp_rank": 0, "endpoint": "tcp://127.0.0.1:5557", "type": "vLLM", "block_size": 4}
    assert post(process, "/register", **fields | {"modelname": model, "hash_profile": PROFILE} | changes)[0] == 200
    return instance


def post(process: ManagerProcess, path: str, **fields: Any) -> tuple[int, Any]:
    """POST fields to the index API."""
    with closing((rest := RestClient(process.address.http)).connection):
        answer = rest.post(path, fields)
        return answer.status, json.loads(answer.raw)


def client_of(address: str) -> IndexClient:
    """Return a client of a manager."""
    return IndexClient(address, CredentialFiles(ClientCredentials()))


def described(process: ManagerProcess) -> pb.DescribeIndexResponse:
    """Return the registrations at a manager."""
    with client_of(process.address.rpc) as client:
        return client.describe()


def follower_of(
    address: str, readers: Readers, clock: Callable[[], float] = time.monotonic
) -> RegistrationFollower[Opened]:
    """Return a follower of one manager."""
    return RegistrationFollower(lambda: [client_of(address)], ANY, readers, clock=clock)


def test_registrations_are_read_as_long_as_they_stand(server: ManagerProcess) -> None:
    readers = Readers()
    instance = register(server)
    follower = follower_of(server.address.rpc, readers)
    assert follower.troubles() == ["registrations: not asked yet"]
    follower.poll()
    follower.poll()
    (opened,) = readers.opened
    assert follower.troubles() == []
    assert (opened.rank.instance_id, opened.rank.name, opened.rank.scheme) == (instance, "e", SCHEME)
    register(server, instance_id="f", endpoint="tcp://127.0.0.1:5558")
    register(server, instance_id="unusable", endpoint="tcp://127.0.0.1:5559")
    follower.poll()
    assert [each.rank.name for each in follower.readers] == ["e", "f"]
    assert post(server, "/unregister", instance_id="e", dp_rank=0)[0] == 200
    follower.poll()
    assert [each.rank.name for each in follower.readers] == ["f"]
    assert opened.is_closed
    stop = threading.Event()
    stop.set()
    follower.run(stop)
    assert follower.readers == []
    assert all(each.is_closed for each in readers.opened)


def test_a_configured_engine_is_not_read_twice(server: ManagerProcess) -> None:
    readers = Readers()
    instance = register(server)
    follower = RegistrationFollower(lambda: [client_of(server.address.rpc)], ANY, readers, {(instance, "e")})
    follower.poll()
    assert (readers.opened, follower.troubles()) == ([], [])


def test_a_manager_that_is_away_or_restarts_ends_nothing(tmp_path: Path) -> None:
    readers, port = Readers(), free_port()
    settings = (f"kvcm.service.rpc_port={port}",)
    with manager(tmp_path / "manager", *settings) as process:
        instance = register(process)
        follower = follower_of(process.address.rpc, readers)
        follower.poll()
        assert len(follower.readers) == 1
    follower.poll()
    assert len(follower.readers) == 1
    assert "does not answer" in follower.troubles()[0]
    with manager(tmp_path / "manager", *settings) as process:
        before = described(process)
        assert before.manager == f"127.0.0.1:{port}"
        assert not before.publishers
        follower.poll()
        assert follower.troubles() == []
        (again,) = described(process).publishers
        assert (again.engine, again.instance_id) == ("e", instance)
        assert len(readers.opened) == 1
        assert post(process, "/unregister", instance_id="e", dp_rank=0)[0] == 200
        follower.poll()
        assert follower.readers == []


@dataclass
class Node:
    """A manager behind a `Service`.

    Attributes:
        node_id: of it.
        run_id: of its run.
        publishers: that are registered.
        contexts: of its index.
    """

    node_id: str
    run_id: str = "1"
    publishers: list[pb.Publisher] = field(default_factory=list)
    contexts: list[pb.IndexContext] = field(default_factory=list)

    def restart(self) -> None:
        """Begin another run, which has no registrations."""
        self.run_id += "1"
        self.publishers = []


@dataclass
class Service(rpc.ResidencyServiceServicer):
    """An address that leads to one of several managers.

    Attributes:
        node: that it leads to.
        address: of it.
        code: answer to registrations; None where these get none.
    """

    node: Node
    address: str = ""
    code: ErrorCode | None = ErrorCode.OK

    def DescribeIndex(self, request: pb.DescribeIndexRequest, context: Any) -> pb.DescribeIndexResponse:  # noqa: N802
        """See the service."""
        node = self.node
        answer = pb.DescribeIndexResponse(manager=node.node_id, run_id=node.run_id)
        answer.publishers.extend(node.publishers)
        answer.contexts.extend(node.contexts)
        answer.header.status.code = int(ErrorCode.OK)  # type: ignore[assignment]
        return answer

    def RegisterPublisher(  # noqa: N802
        self, request: pb.RegisterPublisherRequest, context: Any
    ) -> pb.RegisterPublisherResponse:
        """See the service."""
        if self.code is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "for a moment")
        answer = pb.RegisterPublisherResponse()
        answer.header.status.code = int(self.code)  # type: ignore[arg-type, assignment]
        if self.code is ErrorCode.OK:
            self.node.publishers.append(request.publisher)
        return answer


@pytest.fixture
def service() -> Iterator[Service]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        made = Service(Node("a"))
        rpc.add_ResidencyServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
        made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield made
        finally:
            server.stop(0).wait()


def ranks(count: int, group: str = "", engine: str = "e") -> list[pb.Publisher]:
    """Return registrations of a group."""
    return [
        publisher(engine=engine, instance_group=group, rank=rank, endpoint=f"tcp://10.0.0.1:{rank + 1}")
        for rank in range(count)
    ]


def test_a_service_of_two_managers_brings_no_registration_back(service: Service) -> None:
    first, second = service.node, Node("b")
    first.publishers, readers = ranks(2), Readers()
    follower = follower_of(service.address, readers)
    for service.node in (first, second, first, second):
        follower.poll()
        assert len(follower.readers) == 2
    first.publishers = []  # its client unregistered them
    for service.node in (first, second, first):
        follower.poll()
        assert (first.publishers, second.publishers, follower.readers) == ([], [], [])
    assert follower.troubles() == []


def test_a_manager_that_never_answers_again_is_forgotten(service: Service) -> None:
    readers, clock = Readers(), FakeClock()
    service.node.publishers = ranks(1)
    follower = follower_of(service.address, readers, clock.now)
    follower.poll()
    service.node = Node("b")
    clock.time += FORGET_SECONDS / 2
    follower.poll()
    assert len(follower.readers) == 1
    clock.time += FORGET_SECONDS / 2
    follower.poll()
    assert follower.readers == []
    assert service.node.publishers == []


@pytest.mark.parametrize("code", [None, ErrorCode.SERVICE_NOT_READY])
def test_a_registration_that_cannot_be_made_again_now_is_made_later(service: Service, code: ErrorCode | None) -> None:
    readers = Readers()
    service.node.publishers = ranks(3)
    follower = follower_of(service.address, readers)
    follower.poll()
    service.node.restart()
    service.code = code
    for _ in range(2):
        follower.poll()
        assert "3 are not made again" in follower.troubles()[0]
        assert len(follower.readers) == 3
    service.code = ErrorCode.OK
    follower.poll()
    assert sorted(each.rank for each in service.node.publishers) == [0, 1, 2]
    assert (follower.troubles(), len(readers.opened), len(follower.readers)) == ([], 3, 3)


def test_a_registration_that_is_refused_is_given_up(service: Service) -> None:
    service.node.publishers = ranks(2)
    follower = follower_of(service.address, Readers())
    follower.poll()
    service.node.restart()
    service.code = ErrorCode.DUPLICATE_ENTITY
    follower.poll()
    assert (follower.readers, follower.troubles()) == ([], [])
    service.code = ErrorCode.OK
    follower.poll()
    assert service.node.publishers == []


def test_registrations_of_named_managers_are_followed_too() -> None:
    options = SubscriberOptions(("a:1",), (), "127.0.0.1:0", registrations=True)
    links = ManagerLinks(options, CredentialFiles(ClientCredentials()))
    links.managers.on_answer("a:1", "x", [AnnouncedManager("x", "a:1"), AnnouncedManager("y", "b:1")])
    assert [each.address for each in links.index_clients()] == ["a:1"]
    assert links.managers.next_probe() == "b:1"
    links.managers.on_probe("b:1", "y")
    assert [each.address for each in links.index_clients()] == ["a:1", "b:1"]


def counts_of(follower: RegistrationFollower[Opened]) -> dict[str, int]:
    """Return how many ranks of each engine are read."""
    return dict(Counter(each.rank.name for each in follower.readers))


def test_no_group_keeps_others_from_being_read(service: Service) -> None:
    service.node.publishers = ranks(MOST_RANKS + 5, "z", "first")
    readers = Readers()
    follower = follower_of(service.address, readers)
    follower.poll()
    assert counts_of(follower) == {"first": MOST_RANKS // 2}
    before = service.node.publishers
    service.node.publishers = [*ranks(MOST_RANKS + 5, "a", "second"), *ranks(3, "b", "third"), *before]
    follower.poll()
    counts = counts_of(follower)
    assert (counts["first"], counts["third"]) == (MOST_RANKS // 2, 3)
    assert MOST_RANKS // 4 - 3 <= counts["second"] <= MOST_RANKS // 4
    assert not any(each.is_closed for each in readers.opened)
    service.node.publishers = ranks(MOST_RANKS + 5, "a", "second")
    for _ in range(2):
        follower.poll()
        assert counts_of(follower) == {"second": MOST_RANKS // 2}


def test_groups_that_come_at_once_get_equal_shares(service: Service) -> None:
    service.node.publishers = [*ranks(MOST_RANKS, "a", "first"), *ranks(MOST_RANKS, "b", "second")]
    follower = follower_of(service.address, Readers())
    follower.poll()
    counts = counts_of(follower)
    assert abs(counts["first"] - counts["second"]) <= 1
    assert counts["first"] + counts["second"] >= MOST_RANKS // 2


def test_a_reader_that_failed_is_opened_again_after_a_pause(service: Service) -> None:
    clock, readers = FakeClock(), Readers()
    service.node.publishers = ranks(2)
    follower = follower_of(service.address, readers, clock.now)
    follower.poll()
    failed, other = readers.opened
    failed.has_failed = True
    assert follower.troubles() == ["registered engine e rank 0 is not read for now, see the log"]
    follower.poll()
    assert (failed.is_closed, follower.readers) == (True, [other])
    assert len(follower.troubles()) == 1
    clock.time += REOPEN_SECONDS
    follower.poll()
    assert [each.rank.rank for each in follower.readers] == [1, 0]
    assert (follower.troubles(), follower.faults(), other.is_closed) == ([], [], False)


def test_ranks_of_an_instance_whose_keys_have_a_mask_are_not_read(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.node.publishers = ranks(1)
    readers = Readers()
    follower = follower_of(service.address, readers)
    service.node.contexts = [pb.IndexContext(instance_id="instance", key_scheme=pb.KeyScheme(mask=0))]
    follower.poll()
    assert len(follower.readers) == 1
    service.node.contexts = [pb.IndexContext(instance_id="instance", key_scheme=pb.KeyScheme(mask=7))]
    follower.poll()
    assert (follower.readers, follower.troubles()) == ([], [])
    assert "have a mask" in caplog.text


def test_following_that_fails_is_a_fault() -> None:
    stop, faults = threading.Event(), []

    def managers() -> list[IndexClient]:
        faults.append(follower.faults())
        if len(faults) == 2:
            stop.set()
        raise ValueError("a fault of ours")

    follower = RegistrationFollower(managers, ANY, Readers())
    follower.run(StopAtOnce(stop))  # type: ignore[arg-type]
    assert faults == [[], ["registrations are not followed, see the log"]]


@dataclass
class StopAtOnce:
    """An event that is waited for without a pause."""

    event: threading.Event

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self.event.is_set()

    def wait(self, seconds: float) -> None:
        """Return at once."""


def test_what_a_registered_rank_sends_is_bounded() -> None:
    options = SubscriberOptions(("127.0.0.1:1",), (), "127.0.0.1:0", registrations=True)
    plan = registered_plan(registered_rank(publisher(), ANY), options)
    assert plan.limits is not None
    assert math.isfinite(plan.mapping.most_blocks)
    assert math.isfinite(plan.stream.most_waiting_bytes)
    links = ManagerLinks(options, CredentialFiles(ClientCredentials()))
    port = free_port()
    rank = registered_rank(publisher(endpoint=f"tcp://127.0.0.1:{port}"), ANY)
    plan = replace(registered_plan(rank, options), limits=SourceLimits(frame_bytes=4096))
    with closing(Publisher(port, None)) as engine, closing(RankSubscriber(plan, links)) as reader:

        def is_read() -> bool:
            engine.publish(stored(SCHEME, TOKENS))  # again: ZMQ drops messages before the subscription
            return reader.stream.counters.messages > 0

        until(is_read)
        until(lambda: reader.stream.last == engine.published - 1)
        losses = reader.stream.counters.losses
        engine.publish_payload(bytes(1 << 20))
        until(lambda: reader.stream.counters.losses > losses)
        assert reader.stream.counters.malformed == 0, "it was not read"


def test_blocks_of_a_registered_engine_are_found_by_a_query(server: ManagerProcess) -> None:
    """The whole way: an engine publishes, a client registers it, a subscriber follows, a router asks."""
    port = free_port()
    instance = register(server, endpoint=f"tcp://127.0.0.1:{port}", instance_id="engine-a")
    with closing(Publisher(port, None)) as engine:
        options = SubscriberOptions((server.address.rpc,), (), "127.0.0.1:0", batch_ms=1, registrations=True)
        with closing(Subscriber(options)) as subscriber:
            until(lambda: subscriber.registrations.readers)  # type: ignore[union-attr]

            def matched() -> int:
                engine.publish(stored(SCHEME, TOKENS))  # again: ZMQ drops messages before the subscription
                query = {"model": instance, "token_ids": TOKENS, "block_size": 4}
                found = post(server, "/query", **query)[1]["instances"]
                return int(found.get("engine-a", {}).get("gpu", 0))

            until(lambda: matched() == 12)
            samples = [sample for each in subscriber.metrics() for sample in each.samples]
            assert "engine-a" in {sample.labels.get("engine") for sample in samples}
            services = RestClient(server.address.http)
            with closing(services.connection):
                (service,) = services.get("/services").body["services"]
            assert (service["State"], service["KvcmInstance"]) == ("active", instance)
    query = {"model": instance, "token_ids": TOKENS, "block_size": 4}
    assert post(server, "/query", **query)[1] == {"instances": {}}, "the subscriber said that it stops"
