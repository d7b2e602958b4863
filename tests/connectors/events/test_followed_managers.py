"""The subscriber with managers that are processes on one Redis: those that it was not told of get reports, too."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from engine_model import BLOCK_TOKENS, VLLM, stored
from event_sockets import Publisher
from manager_process import ManagerProcess, start_manager
from ports import free_port
from redis_servers import Standalone
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.events.options import EngineOptions, SubscriberOptions
from kvcm.connectors.events.subscriber import Subscriber
from kvcm.connectors.exchanges import ClientSettings
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import residency_service_pb2_grpc as rpc

ENGINE = "10.0.0.9:8000"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def blocks_at(manager: ManagerProcess) -> dict[tuple[str, int], int]:
    """Return how many blocks each reporter holds, as a manager knows it; without those that it knows in part."""
    with grpc.insecure_channel(manager.address) as channel:
        stub = rpc.ResidencyServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.ListReporters(pb.ListReportersRequest(instance_id="i"), timeout=30)
    return {
        (each.engine, each.rank): sum(medium.blocks for medium in each.media)
        for each in answer.reporters
        if each.state == pb.REPORTER_COMPLETE
    }


def test_managers_come_and_go_and_each_knows_the_engine(
    tmp_path: Path, redis_standalone: Standalone, stack: ExitStack
) -> None:
    uri = redis_standalone.uri(f"t{secrets.token_hex(6)}")

    def start(name: str) -> ManagerProcess:
        settings = [f"kvcm.registry_storage.uri={uri}", f"kvcm.leader_elector.node_id={name}"]
        settings.append("kvcm.residency.timeout_ms=1500")  # heartbeats come often
        made = start_manager(tmp_path / name, settings=settings)
        stack.callback(made.kill)
        return made

    first, second = start("m1"), start("m2")
    first.allow_instances("default", 10)
    with ManagerClient(first.address, "i", ClientSettings(timeout_seconds=60.0)) as client:
        model = ModelDeployment("m", "float32")
        assert client.register_instance("default", BLOCK_TOKENS, [LocationSpecInfo("tp0", 64)], model).ok
    ports = free_port(), free_port()
    publisher = Publisher(*ports)
    stack.callback(publisher.close)
    publisher.publish(stored(VLLM, list(range(1, 13))))
    engine = EngineOptions(
        "vllm",
        ENGINE,
        "i",
        endpoint=f"tcp://127.0.0.1:{ports[0]}",
        replay_endpoint=f"tcp://127.0.0.1:{ports[1]}",
        block_tokens=BLOCK_TOKENS,
    )
    port = first.address.rpartition(":")[2]
    managers = (first.address, f"localhost:{port}")  # one manager, by two names
    subscriber = Subscriber(SubscriberOptions(managers, (engine,), "127.0.0.1:0", batch_ms=1))
    stack.callback(subscriber.close)
    until(lambda: blocks_at(first) == blocks_at(second) == {(ENGINE, 0): 3})
    until(lambda: len(subscriber.links.managers.streams()) == 2)
    second.kill()
    third = start("m3")
    publisher.publish(stored(VLLM, list(range(50, 62))))
    until(lambda: blocks_at(first) == blocks_at(third) == {(ENGINE, 0): 6})
    assert second.address in subscriber.links.managers.streams()  # it may come back, for a minute
    subscriber.close()
    until(lambda: blocks_at(first) == blocks_at(third) == {})
