"""Clients of several managers, in processes on one Redis, call the one that their instance is assigned to."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from authorities import Authority, dns
from blocking_client import BlockingClient
from manager_process import ManagerProcess, start_manager
from ports import free_port
from redis_servers import Standalone
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import Outcome
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.protocol import admin_service_pb2, admin_service_pb2_grpc
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceServicer, MetaServiceStub, add_MetaServiceServicer_to_server

MODEL = ModelDeployment(model_name="model", dtype="float32", tp_size=1, pp_size=1, dp_size=1)
SPECS = [LocationSpecInfo("tp0", 64)]
KEYS = [1, 2, 3]
SETTINGS = ClientSettings(timeout_seconds=60.0)
INSTANCES = tuple(f"model-{number}" for number in range(8))
BOTH = pytest.mark.parametrize("kind", [ManagerClient, BlockingClient])


class Deployment:
    """Managers on one store, by node id.

    Args:
        directory: of their files.
        uri: of the store.
    """

    def __init__(self, directory: Path, uri: str, stack: ExitStack) -> None:
        self.managers: dict[str, ManagerProcess] = {}
        self._directory, self._uri, self._stack = directory, uri, stack

    def start(self, name: str, settings: Mapping[str, object] | None = None) -> ManagerProcess:
        """Start a manager."""
        given = {"registry_storage.uri": self._uri, "leader_elector.node_id": name, **(settings or {})}
        self._directory.mkdir(exist_ok=True)
        made = start_manager(self._directory / name, settings=[f"kvcm.{key}={value}" for key, value in given.items()])
        self._stack.callback(made.kill)
        self.managers[name] = made
        return made

    def named_by(self, name: str, instance: str) -> list[str]:
        """Return the managers that one announces for an instance, best first."""
        with grpc.insecure_channel(self.managers[name].address) as channel:
            stub = MetaServiceStub(channel)  # type: ignore[no-untyped-call]
            answer = stub.GetClusterInfo(meta.GetClusterInfoRequest(instance_id=instance), timeout=30)
        return [each.node_id for each in answer.preferred_managers]

    def await_agreement(self) -> dict[str, str]:
        """Wait until the running managers assign all instances alike; return the assignment."""
        found: dict[str, str] = {}

        def agree() -> bool:
            views = [{each: self.named_by(name, each) for each in INSTANCES} for name in self.managers]
            found.update({each: named[0] for each, named in views[0].items() if named})
            is_complete = all(set(named) == set(self.managers) for named in views[0].values())
            return is_complete and all(view == views[0] for view in views)

        until(agree, "the managers agree")
        return found


@pytest.fixture(scope="module")
def uri(redis_standalone: Standalone) -> str:
    return redis_standalone.uri(f"t{secrets.token_hex(6)}")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, uri: str) -> Iterator[Deployment]:
    """Two managers, which have the instances."""
    with ExitStack() as stack:
        made = Deployment(tmp_path_factory.mktemp("managers"), uri, stack)
        first = made.start("m1")
        made.start("m2")
        first.allow_instances("default", 100)
        for instance in INSTANCES:
            with ManagerClient(first.address, instance, SETTINGS) as client:
                assert client.register_instance("default", 16, SPECS, MODEL).ok
        yield made


@contextmanager
def connected(kind: type[Any], address: str, instance: str, settings: ClientSettings = SETTINGS) -> Iterator[Any]:
    with closing(kind(address, instance, settings)) as client:
        yield client


def answering(client: Any) -> str:
    """Return the manager that answers a client's calls."""
    info = client.cluster_info()
    assert info is not None
    return str(info.self_node_id)


def settle(client: Any, wanted: str) -> None:
    """Do lookups until they go to a manager; none of them fails."""

    def has_moved() -> bool:
        assert client.match(KEYS).outcome is Outcome.OK
        return answering(client) == wanted

    until(has_moved, f"calls go to {wanted}")


def instance_of(assignment: Mapping[str, str], manager: str) -> str:
    """Return an instance that is assigned to a manager."""
    return next(instance for instance, name in assignment.items() if name == manager)


@BOTH
def test_clients_of_an_instance_find_its_manager_by_lookups_or_by_registering(
    deployment: Deployment, kind: type[Any]
) -> None:
    assignment = deployment.await_agreement()
    assert set(assignment.values()) == {"m1", "m2"}  # of 8 instances, none has more than 5
    instance = instance_of(assignment, "m2")
    with connected(kind, deployment.managers["m1"].address, instance) as client:
        assert answering(client) == "m1"
        settle(client, "m2")
    with connected(kind, deployment.managers["m1"].address, instance) as client:
        assert client.register_instance("default", 16, SPECS, MODEL).ok
        until(lambda: answering(client) == "m2")


@pytest.mark.parametrize("name", ["match", "match_encoded"])
@BOTH
def test_a_lookup_is_enough_to_find_the_manager(deployment: Deployment, kind: type[Any], name: str) -> None:
    instance = instance_of(deployment.await_agreement(), "m2")
    with connected(kind, deployment.managers["m1"].address, instance) as client:
        addresses = getattr(client, "_client", client)._exchanges.addresses

        def is_assigned() -> bool:
            assert getattr(client, name)(KEYS).outcome is Outcome.OK
            return bool(addresses.order[0] == deployment.managers["m2"].address)

        until(is_assigned)
        assert answering(client) == "m2"


def test_only_another_manager_hints_in_answers_to_lookups(deployment: Deployment) -> None:
    instance = instance_of(deployment.await_agreement(), "m2")
    hints = {}
    for name, manager in deployment.managers.items():
        with grpc.insecure_channel(manager.address) as channel:
            request = meta.GetCacheLocationRequest(
                instance_id=instance, block_keys=KEYS, query_type=meta.QT_PREFIX_MATCH
            )
            answer = MetaServiceStub(channel).GetCacheLocation(request)  # type: ignore[no-untyped-call]
        hints[name] = answer.preferred_manager.node_id if answer.HasField("preferred_manager") else None
    assert hints == {"m1": "m2", "m2": None}


@BOTH
def test_a_client_that_follows_no_assignment_stays_at_its_address(deployment: Deployment, kind: type[Any]) -> None:
    instance = instance_of(deployment.await_agreement(), "m2")
    settings = ClientSettings(timeout_seconds=60.0, follow_assignment=False)
    with connected(kind, deployment.managers["m1"].address, instance, settings) as client:
        assert client.register_instance("default", 16, SPECS, MODEL).ok
        for _ in range(20):
            assert client.match(KEYS).outcome is Outcome.OK
            assert answering(client) == "m1"


def test_operators_see_the_assignment(deployment: Deployment) -> None:
    assignment = deployment.await_agreement()
    with grpc.insecure_channel(f"127.0.0.1:{deployment.managers['m1'].ports['admin_rpc_port']}") as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        for instance, manager in assignment.items():
            request = admin_service_pb2.GetManagerClusterInfoRequest(instance_id=instance)
            found = stub.GetManagerClusterInfo(request).preferred_managers
            assert found[0].node_id == manager
            assert found[0].meta_rpc_port == deployment.managers[manager].ports["rpc_port"]
        assert not stub.GetManagerClusterInfo(admin_service_pb2.GetManagerClusterInfoRequest()).preferred_managers
    address = f"http://127.0.0.1:{deployment.managers['m1'].ports['admin_http_port']}"
    command = [sys.executable, "-m", "kvcm", "instance", "show", INSTANCES[0]]
    shown = subprocess.run(command, env={**os.environ, "KVCM_MANAGER": address}, capture_output=True, text=True)
    manager = assignment[INSTANCES[0]]
    (line,) = [line for line in shown.stdout.splitlines() if "assigned manager" in line]
    assert line.split()[-3:] == [manager, "at", deployment.managers[manager].address]
    with urllib.request.urlopen(f"{address}/v1/managers") as answer:
        items = json.load(answer)["items"]
    assert {each["node_id"]: each["instances"] for each in items} == Counter(assignment.values())


KINDS = (ManagerClient, BlockingClient)


def test_calls_follow_managers_that_join_leave_and_are_killed(tmp_path: Path, redis_standalone: Standalone) -> None:
    """None of them fails, and those that a manager hands over before it stops are not even repeated."""
    with ExitStack() as stack:
        made = Deployment(tmp_path, redis_standalone.uri(f"t{secrets.token_hex(6)}"), stack)
        address = made.start("m1").address
        made.start("m2")
        made.managers["m1"].allow_instances("default", 100)
        clients = {
            each: stack.enter_context(connected(KINDS[number % 2], address, each))
            for number, each in enumerate(INSTANCES)
        }
        for client in clients.values():
            assert client.register_instance("default", 16, SPECS, MODEL).ok
        for instance, manager in made.await_agreement().items():
            settle(clients[instance], manager)

        made.start("m3", {"service.drain_delay_ms": 3_600_000})
        joined = made.await_agreement()
        assert 2 <= list(joined.values()).count("m3") <= 3  # of 8
        for instance, manager in joined.items():
            settle(clients[instance], manager)

        made.managers.pop("m3").process.send_signal(signal.SIGTERM)
        left = made.await_agreement()
        for instance, manager in left.items():
            settle(clients[instance], manager)
        retries = [counters.retries for client in clients.values() for counters in client.counters().values()]
        assert not any(retries)

        made.managers["m2"].kill()
        for client in clients.values():
            assert client.match(KEYS).outcome is Outcome.OK
            assert answering(client) == "m1"


def test_an_announcement_that_leads_nowhere_costs_no_call_anything(
    tmp_path: Path, redis_standalone: Standalone
) -> None:
    with ExitStack() as stack:
        made = Deployment(tmp_path, redis_standalone.uri(f"t{secrets.token_hex(6)}"), stack)
        address = made.start("m1", {"service.advertised_host": "no-such-host.invalid"}).address
        made.start("m2", {"service.advertised_host": "[::1]", "service.advertised_rpc_port": free_port()})
        made.managers["m1"].allow_instances("default", 100)
        assignment = made.await_agreement()
        for instance in (instance_of(assignment, "m1"), instance_of(assignment, "m2")):
            for kind in KINDS:
                client = stack.enter_context(connected(kind, address, instance))
                assert client.register_instance("default", 16, SPECS, MODEL).ok
                addresses = getattr(client, "_client", client)._exchanges.addresses
                assert len(addresses.in_use()) == 3  # they are known, and probed
                for _ in range(10):
                    assert client.match(KEYS).outcome is Outcome.OK
                    assert answering(client) == "m1"
                assert all(counters.retries == 0 for counters in client.counters().values())


class OneOfTwo(MetaServiceServicer):
    """A manager that announces one, itself perhaps."""

    def __init__(self, node_id: str) -> None:
        self.node_id, self.announced = node_id, meta.MetaNodeEndpoint()

    def GetClusterInfo(self, *_: object) -> meta.GetClusterInfoResponse:  # noqa: N802 - the contract's
        header = meta.CommonResponseHeader(status=meta.Status(code=meta.OK))
        return meta.GetClusterInfoResponse(
            header=header, self_node_id=self.node_id, preferred_managers=[self.announced]
        )


@BOTH
def test_the_certificate_of_an_announced_ip_address_has_the_name_of_the_given_address(
    tmp_path: Path, kind: type[Any]
) -> None:
    """That of a pod behind a Service has no ip address."""
    authority = Authority.make(tmp_path)
    pair = authority.issue("service", [dns("localhost")])
    files = ((pair.key.read_bytes(), pair.cert.read_bytes()),)
    with ExitStack() as stack:
        ports, managers = [], [OneOfTwo("m1"), OneOfTwo("m2")]
        for manager in managers:
            server = grpc.server(stack.enter_context(ThreadPoolExecutor(2)))
            add_MetaServiceServicer_to_server(manager, server)  # type: ignore[no-untyped-call]
            ports.append(server.add_secure_port("localhost:0", grpc.ssl_server_credentials(files)))
            server.start()
            stack.callback(lambda server=server: server.stop(None).wait())
        for manager in managers:
            manager.announced = meta.MetaNodeEndpoint(node_id="m2", host="127.0.0.1", meta_rpc_port=ports[1])
        settings = ClientSettings(60.0, credentials=ClientCredentials(ca_file=authority.file))
        client = stack.enter_context(connected(kind, f"localhost:{ports[0]}", "model", settings))
        until(lambda: answering(client) == "m2")
