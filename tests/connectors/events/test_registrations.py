"""A subscriber follows what clients register at managers, and trusts it no further than its options allow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_model import stored
from event_sockets import Publisher
from ports import free_port
from rest_client import RestClient
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, unique
from waiting import until

from kvcm.connectors.credentials import ClientCredentials, CredentialFiles
from kvcm.connectors.events.options import AllowedHosts, SubscriberOptions, parse_arguments
from kvcm.connectors.events.registrations import (
    MOST_RANKS,
    IndexClient,
    RegisteredRank,
    RegistrationFollower,
    registered_rank,
)
from kvcm.connectors.events.subscriber import Subscriber
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, VLLM_SHA256_CBOR, KeyScheme, vllm_root
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

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


def client_of(process: ManagerProcess) -> IndexClient:
    """Return a client of a manager."""
    return IndexClient(process.address.rpc, CredentialFiles(ClientCredentials()))


def test_registrations_are_read_as_long_as_they_stand(server: ManagerProcess) -> None:
    readers = Readers()
    instance = register(server)
    follower = RegistrationFollower([client_of(server)], ANY, readers)
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
    follower = RegistrationFollower([client_of(server)], ANY, readers, {(instance, "e")})
    follower.poll()
    assert (readers.opened, follower.troubles()) == ([], [])


def test_a_manager_that_is_away_or_restarts_ends_nothing(tmp_path: Path) -> None:
    readers, port = Readers(), free_port()
    address = f"kvcm.service.rpc_port={port}"
    with manager(tmp_path / "manager", address) as process:
        instance = register(process)
        follower = RegistrationFollower([client_of(process)], ANY, readers)
        follower.poll()
        assert len(follower.readers) == 1
    follower.poll()
    assert len(follower.readers) == 1
    assert "does not answer" in follower.troubles()[0]
    with manager(tmp_path / "manager", address) as process:
        assert client_of(process).describe().publishers == []
        follower.poll()
        assert follower.troubles() == []
        (again,) = client_of(process).describe().publishers
        assert (again.engine, again.instance_id) == ("e", instance)
        assert len(readers.opened) == 1
        assert post(process, "/unregister", instance_id="e", dp_rank=0)[0] == 200
        follower.poll()
        assert follower.readers == []


class ManyPublishers(IndexClient):
    """A manager with more registrations than are read."""

    def describe(self) -> pb.DescribeIndexResponse:
        """Return them."""
        publishers = [publisher(rank=rank, endpoint=f"tcp://10.0.0.1:{rank + 1}") for rank in range(MOST_RANKS + 5)]
        return pb.DescribeIndexResponse(run_id="r", publishers=publishers)


def test_not_any_number_is_read() -> None:
    readers = Readers()
    login = CredentialFiles(ClientCredentials())
    RegistrationFollower([ManyPublishers("127.0.0.1:1", login)], ANY, readers).poll()
    assert len(readers.opened) == MOST_RANKS


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
            assert "engine-a" in {sample.labels["engine"] for each in subscriber.metrics() for sample in each.samples}
            services = RestClient(server.address.http)
            with closing(services.connection):
                (service,) = services.get("/services").body["services"]
            assert (service["State"], service["KvcmInstance"]) == ("active", instance)
    query = {"model": instance, "token_ids": TOKENS, "block_size": 4}
    assert post(server, "/query", **query)[1] == {"instances": {}}, "the subscriber said that it stops"
