"""Faults between a real engine and the managers: what these know of its memory is right again within seconds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
from engine_kinds import VLLM
from engine_process import EngineProcess, StartEngine, until
from manager_process import ManagerProcess, start_manager
from ports import free_port
from test_transport_sites import instance_fields
from tiny_models import prompt_tokens

from kvcm.model.key_schemes import VLLM_SHA256, KeyScheme, vllm_root
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1.residency_service_pb2_grpc import ResidencyServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

_ENGINE = "127.0.0.1:8000"
_INSTANCE = "faults"
_BLOCK_TOKENS, _BLOCKS = 32, 128
_KEPT_BATCHES = 100
_SETTLE_SECONDS = 10.0
_MOST_WRONG = 0.01
_SCHEME = KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0, _BLOCK_TOKENS)


class Forwarder:
    """Stands between the engine's PUB socket and the subscriber, and loses every tenth message."""

    def __init__(self, engine: str, endpoint: str) -> None:
        self.lost = self.seen = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(engine, endpoint), daemon=True)
        self._thread.start()

    def _run(self, engine: str, endpoint: str) -> None:
        context = zmq.Context()
        source, sink = context.socket(zmq.SUB), context.socket(zmq.PUB)
        source.setsockopt(zmq.SUBSCRIBE, b"")
        source.setsockopt(zmq.RECONNECT_IVL, 50)
        source.connect(engine)
        sink.bind(endpoint)
        while not self._stop.is_set():
            if source.poll(50):
                frames = source.recv_multipart()
                self.seen += 1
                if self.seen % 10:
                    sink.send_multipart(frames)
                else:
                    self.lost += 1
        context.destroy(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@dataclass
class Site:
    """An engine, what forwards its events, a subscriber and two managers."""

    start_engine: Any
    directory: Path
    forwarder: Forwarder
    engine_endpoint: str
    replay_endpoint: str
    endpoint: str
    managers: list[ManagerProcess]
    engine: EngineProcess = field(init=False)
    subscriber: subprocess.Popen[bytes] = field(init=False)
    seed: int = 8000

    def begin_engine(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.engine_endpoint.replace("127.0.0.1", "*"),
            "replay_endpoint": self.replay_endpoint.replace("127.0.0.1", "*"),
            "buffer_steps": _KEPT_BATCHES,
        }
        self.engine = self.start_engine(kv_events_config=events, num_gpu_blocks_override=_BLOCKS, max_model_len=512)

    def begin_subscriber(self) -> None:
        words = ["--engine", "vllm", "--engine-address", _ENGINE, "--instance-id", _INSTANCE]
        words += ["--endpoint", self.endpoint, "--replay-endpoint", self.replay_endpoint]
        words += ["--block-tokens", str(_BLOCK_TOKENS), "--listen", f"127.0.0.1:{free_port()}"]
        words += [word for each in self.managers for word in ("--manager", each.address)]
        command = [str(Path(sys.executable).with_name("kvcm-subscriber")), *words]
        self.subscriber = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def restart_manager(self, number: int) -> None:
        """Kill it, and start one on its data and ports."""
        killed = self.managers[number]
        killed.kill()
        self.managers[number] = start_manager(killed.data_dir, killed.ports)

    def work(self, prompts: int) -> None:
        """Compute, repeat and continue prompts, so that others are evicted; every request has its answer."""
        for _ in range(prompts):
            self.seed += 1
            prompt = prompt_tokens(300, seed=self.seed)
            answers = self.engine.generate([prompt, prompt[:160]], 40)
            assert [len(each.tokens) for each in answers] == [40, 40]

    def wrong(self, manager: ManagerProcess) -> tuple[int, int, int]:
        """Return how many blocks the engine holds, and how many of those the manager lacks or names without reason."""
        held = sorted({_SCHEME.key(bytes.fromhex(text)) for text in self.engine.ask("cached_hashes")})
        with grpc.insecure_channel(manager.address) as channel:
            stub = ResidencyServiceStub(channel)
            listed = stub.ListReporters(pb.ListReportersRequest(instance_id=_INSTANCE), timeout=10)
            reported = sum(
                medium.blocks for each in listed.reporters if each.state != pb.REPORTER_QUIET for medium in each.media
            )
            known = 0
            for key in held:
                scored = stub.Score(pb.ScoreRequest(instance_id=_INSTANCE, block_keys=[key]), timeout=10)
                known += any(each.gpu_tokens for each in scored.engines)
        return len(held), len(held) - known, reported - known

    def settle(self, *, knows_all: bool = True) -> None:
        """Wait until no manager knows a block that is not there, and each knows those that are."""

        def is_right() -> bool:
            for each in self.managers:
                held, missing, stale = self.wrong(each)
                if stale > _MOST_WRONG * held or (knows_all and missing > _MOST_WRONG * held):
                    return False
            return True

        until(is_right, _SETTLE_SECONDS)


@pytest.fixture
def site(new_engine: StartEngine, tiny_llama: Path, tmp_path: Path) -> Iterator[Site]:
    if VLLM.missing:
        pytest.skip(VLLM.missing)
    engine_endpoint, replay, endpoint = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    managers = [start_manager(tmp_path / f"manager{number}") for number in range(2)]
    fields = instance_fields(_INSTANCE, "default", location_spec_infos=[{"name": "kv", "size": 1 << 16}])
    fields["block_size"] = _BLOCK_TOKENS
    for each in managers:
        with grpc.insecure_channel(each.address) as channel:
            answer = MetaServiceStub(channel).RegisterInstance(meta.RegisterInstanceRequest(**fields))
            assert answer.header.status.code == meta.OK, answer.header
    made = Site(
        lambda **options: new_engine(VLLM, tiny_llama, **options),
        tmp_path,
        Forwarder(engine_endpoint, endpoint),
        engine_endpoint,
        replay,
        endpoint,
        managers,
    )
    made.begin_engine()
    made.begin_subscriber()
    yield made
    made.subscriber.kill()
    made.subscriber.wait()
    made.forwarder.close()
    for each in made.managers:
        each.kill()


@pytest.mark.feature("vllm", "KV events")
def test_managers_know_the_engine_again_within_seconds_of_any_fault(site: Site) -> None:
    site.work(20)
    site.settle()
    assert site.forwarder.lost > 3
    assert site.wrong(site.managers[0])[0] > 0.9 * (_BLOCKS - 1), "the engine's memory is not full"

    site.subscriber.kill()
    site.subscriber.wait()
    site.work(1)  # fewer batches than the engine keeps
    site.begin_subscriber()
    site.settle()

    for number in range(len(site.managers)):
        site.restart_manager(number)
        site.work(2)
        site.settle()

    site.engine.kill()
    site.begin_engine()
    site.work(3)
    site.settle()

    site.subscriber.kill()
    site.subscriber.wait()
    seen = site.forwarder.seen
    site.work(60)
    assert site.forwarder.seen - seen > _KEPT_BATCHES, "the engine kept everything"
    site.begin_subscriber()
    site.work(1)
    site.settle(knows_all=False)
