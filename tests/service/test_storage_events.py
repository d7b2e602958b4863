"""Events of what storages have: who only listens to them knows which blocks `GetCacheLocation` returns.

Managers are processes, really killed; the listener reads vLLM's frames from the ZMQ socket of one manager and goes to
another when that one is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import grpc
import msgspec
import pytest
import zmq
from manager_process import ManagerProcess, start_manager
from ports import free_port
from test_transport_sites import instance_fields
from thoroughness import is_quick, is_thorough

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_calls
from kvcm.protocol.kvcm.v1.storage_service_pb2_grpc import StorageServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

OPERATIONS = 10_000 if is_thorough() else 60 if is_quick() else 150
STORAGES = ("a", "b")
SETTLE_SECONDS = 60.0
END = b"\xff" * 8
_decode = msgspec.msgpack.Decoder().decode


def hash_of(key: int) -> int:
    """The name of a block in events of its engine, which has nothing of its key."""
    return int.from_bytes(blake2b(key.to_bytes(8, "little", signed=True), digest_size=8).digest(), "big", signed=True)


class Listener:
    """Follows one publisher as vLLM's example does, and knows nothing else."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        context = zmq.Context.instance()
        self._live, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for each in (self._live, self._replay):
            each.setsockopt(zmq.LINGER, 0)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(endpoint)
        self._replay.connect(replay_endpoint)
        self.hashes: set[int] = set()
        self.last = -1
        self.gaps = 0

    def replay(self) -> None:
        """Ask for everything that was not read."""
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self._replay.poll(30_000), "no replay"
            _, _topic, sequence, payload = self._replay.recv_multipart()
            if sequence == END:
                return
            self._apply(int.from_bytes(sequence, "big"), payload)

    def read(self) -> None:
        """Read what has come."""
        while self._live.poll(0):
            _topic, sequence, payload = self._live.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number > self.last + 1:
                self.gaps += 1
                self.replay()
            if number == self.last + 1:
                self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return
        _seconds, events, _rank = _decode(payload)
        if number != self.last + 1:  # the missed ones are gone: nothing is known
            self.hashes.clear()
        self.last = number
        for event in events:
            hashes = {each - (1 << 64) if each >> 63 else each for each in event.get("block_hashes", ())}
            match event["type"]:
                case "AllBlocksCleared":
                    self.hashes.clear()
                case "BlockStored":
                    assert event["medium"] == "STORAGE"
                    assert not hashes & self.hashes, "stored twice without a removal in between"
                    self.hashes |= hashes
                case "BlockRemoved":
                    assert hashes <= self.hashes
                    self.hashes -= hashes

    def close(self) -> None:
        self._live.close()
        self._replay.close()


@dataclass
class Node:
    """One manager."""

    process: ManagerProcess
    endpoint: str
    replay_endpoint: str
    channels: list[grpc.Channel] = field(default_factory=list)

    def __post_init__(self) -> None:
        ports = self.process.ports
        self.channels = [grpc.insecure_channel(f"127.0.0.1:{ports[name]}") for name in ("rpc_port", "admin_rpc_port")]
        self.meta, self.admin = MetaServiceStub(self.channels[0]), AdminServiceStub(self.channels[1])
        self.storages = StorageServiceStub(self.channels[1])

    def kill(self) -> None:
        for each in self.channels:
            each.close()
        self.process.kill()


class World:
    """Managers of one deployment, and random work for them."""

    def __init__(self, directory: Path, store: str, managers: int, seed: int) -> None:
        self.directory, self.store, self.random = directory, store, Random(seed)
        self.keys: list[int] = []
        self.next_key = 1
        self.made = 0
        self.nodes: list[Node] = []
        self._document = directory / "startup.json"
        self._document.write_text(json.dumps(self._startup()))
        for _ in range(managers):
            self.nodes.append(self.start())
        fields = instance_fields("i", "default", location_spec_infos=[{"name": "kv", "size": 100}])
        self.until(lambda: self._ok(self.nodes[0].meta.RegisterInstance, meta.RegisterInstanceRequest(**fields)))
        for each in self.nodes:
            self.until(partial(self._ok, each.meta.GetInstanceInfo, meta.GetInstanceInfoRequest(instance_id="i")))
        self.at = self.nodes[0]
        self.listener = Listener(self.at.endpoint, self.at.replay_endpoint)
        self.listener.replay()

    def _startup(self) -> dict[str, Any]:
        strategy = {
            "reclaim_policy": 1,
            "delay_before_delete_ms": 20,
            "trigger_strategy": {"used_percentage": 0.8},
        }
        cache = {
            "reclaim_strategy": strategy,
            "cache_prefer_strategy": 2,
            "meta_indexer_config": {"max_key_count": 5000, "mutex_shard_num": 4},
        }
        group = {
            "name": "default",
            "storage_candidates": list(STORAGES),
            "global_quota_group_name": "all",
            "max_instance_count": 10,
            "quota": {"capacity": 60_000, "quota_config": []},
            "cache_config": cache,
            "version": 1,
        }
        (self.directory / "bytes").mkdir(exist_ok=True)
        storage = {
            "type": "file",
            "global_unique_name": STORAGES[0],
            "storage_spec": {"root_path": f"{self.directory}/bytes/{STORAGES[0]}/", "key_count_per_file": 8},
        }
        (self.directory / "bytes" / STORAGES[0]).mkdir(exist_ok=True)
        return {"storage_config": storage, "instance_group": group}

    def start(self) -> Node:
        """Start a manager; one with a store of its own goes on with what it had."""
        self.made += 1
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        socket = {"instance": "i", "endpoint": endpoints[0], "replay_endpoint": endpoints[1], "kept_batches": 30}
        settings = [
            f"kvcm.storage_events.sockets={json.dumps([socket])}",
            f"kvcm.startup_config={self._document}",
            "kvcm.leader_elector.lease_ms=1000",
            "kvcm.limits.max_queue_ms=0",
        ]
        if self.store:
            settings.append(f"kvcm.registry_storage.uri={self.store}")
        data = self.directory / (f"data{self.made}" if self.store else "data")
        data.mkdir(exist_ok=True)
        return Node(start_manager(data, settings=settings), *endpoints)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _ok(self, call: Callable[..., Any], request: Any) -> bool:
        try:
            answer = call(request, timeout=20)
        except grpc.RpcError:
            return False
        return bool(answer.header.status.code == meta.OK)

    # Random work; a call that fails changes nothing that the listener would have to know of.

    def operate(self) -> None:
        acts = self.random.choice(self.nodes)
        weights = {"write": 60, "again": 10, "remove": 15, "unfinished": 4, "disable": 4, "enable": 4, "drain": 3}
        (act,) = self.random.choices(list(weights), list(weights.values()))
        getattr(self, f"_{act}")(acts)
        self.listener.read()

    def _write(self, on: Node) -> None:
        count = self.random.randint(1, 24)
        new = list(range(self.next_key, self.next_key + count))
        self.next_key += count
        self.keys += new
        self._store(on, new)

    def _again(self, on: Node) -> None:
        if self.keys:
            self._store(on, self.random.sample(self.keys, min(len(self.keys), 12)))

    def _store(self, on: Node, keys: list[int], *, finishes: bool = True) -> None:
        request = meta.StartWriteCacheRequest(
            instance_id="i", block_keys=keys, event_hashes=map(hash_of, keys), write_timeout_seconds=60
        )
        try:
            started = on.meta.StartWriteCache(request, timeout=20)
            if started.header.status.code != meta.OK or not finishes:
                return
            finish = meta.FinishWriteCacheRequest(instance_id="i", write_session_id=started.write_session_id)
            successes = [self.random.random() < 0.9 for _ in started.locations]
            finish.success_blocks.bool_masks.values.extend(successes)
            self.random.choice(self.nodes).meta.FinishWriteCache(finish, timeout=20)
        except grpc.RpcError:
            return

    def _unfinished(self, on: Node) -> None:
        self._store(on, [self.next_key], finishes=False)
        self.next_key += 1

    def _remove(self, on: Node) -> None:
        if self.keys:
            some = self.random.sample(self.keys, min(len(self.keys), 8))
            self._ok(on.meta.RemoveCache, meta.RemoveCacheRequest(instance_id="i", block_keys=some))

    def _disable(self, on: Node) -> None:
        self._ok(on.admin.DisableStorage, admin.DisableStorageRequest(storage_unique_name=self.random.choice(STORAGES)))

    def _enable(self, on: Node) -> None:
        for name in STORAGES:
            self._ok(on.admin.EnableStorage, admin.EnableStorageRequest(storage_unique_name=name))
            self._ok(on.storages.CancelDrain, storage_calls.CancelDrainRequest(storage_unique_name=name))

    def _drain(self, on: Node) -> None:
        name = self.random.choice(STORAGES)
        self._ok(on.storages.DrainStorage, storage_calls.DrainStorageRequest(storage_unique_name=name))

    def fail_over(self) -> None:
        """Kill the manager that is listened to, with work of others under way, and go to another one."""
        killed = self.at
        self.nodes.remove(killed)
        self.listener.close()
        killed.kill()
        if not self.nodes:
            self.nodes.append(self.start())
        self.at = self.random.choice(self.nodes)
        self.listener = Listener(self.at.endpoint, self.at.replay_endpoint)
        self.listener.replay()
        if self.store:
            self.nodes.append(self.start())

    # Truth.

    def readable(self) -> set[int]:
        """Hashes of the blocks that `GetCacheLocation` returns."""
        found: set[int] = set()
        keys = list(range(1, self.next_key))
        for start in range(0, len(keys), 4096):
            some = keys[start : start + 4096]
            request = meta.GetCacheLocationRequest(instance_id="i", block_keys=some, query_type=meta.QT_BATCH_GET)
            answer = self.at.meta.GetCacheLocation(request, timeout=60)
            if answer.header.status.code == meta.SERVICE_NOT_READY:  # every storage is disabled
                return set()
            assert answer.header.status.code == meta.OK, answer.header
            pairs = zip(some, answer.locations, strict=True)
            found |= {hash_of(key) for key, location in pairs if any(spec.uri for spec in location.location_specs)}
        return found

    def check(self) -> int:
        """Wait until the listener knows exactly that, and return how many blocks those are."""
        sizes: list[int] = []

        def agrees() -> bool:
            expected = self.readable()
            self.listener.read()
            sizes.append(len(expected))
            return self.listener.hashes == expected == self.readable()

        self.until(agrees)
        return sizes[-1]

    def close(self) -> None:
        self.listener.close()
        for each in self.nodes:
            each.kill()


@pytest.fixture(params=["redis_standalone", "redis_cluster", "rocksdb"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    store = request.param
    uri = "" if store == "rocksdb" else request.getfixturevalue(store).uri(f"t{free_port()}")
    made = World(tmp_path, uri, managers=1 if store == "rocksdb" else 2, seed=7)
    yield made
    made.close()


def test_a_listener_knows_what_can_be_read(world: World) -> None:
    """After writes, evictions, drains, removals, storages that come and go, and two managers that are killed."""
    second = {"root_path": f"{world.directory}/bytes/{STORAGES[1]}", "key_count_per_file": 8}
    (world.directory / "bytes" / STORAGES[1]).mkdir()
    add = admin.AddStorageRequest(storage={"global_unique_name": STORAGES[1], "nfs": second})
    assert world.nodes[0].admin.AddStorage(add, timeout=20).header.status.code == admin.OK
    sizes = []
    for number in range(OPERATIONS):
        world.operate()
        if number in {OPERATIONS // 3, 2 * OPERATIONS // 3}:
            world.fail_over()
        if number % (OPERATIONS // 10) == 0:
            sizes.append(world.check())
    world._enable(world.nodes[0])
    sizes.append(world.check())
    assert max(sizes) > 50, sizes
    assert len(world.keys) > world.check(), "nothing was evicted or removed"


def test_a_listener_that_missed_more_than_is_kept_knows_everything_after_a_replay(world: World) -> None:
    for _ in range(40):  # more batches than are kept
        world._write(world.nodes[0])
        world.check()
    late = Listener(world.at.endpoint, world.at.replay_endpoint)
    late.replay()
    assert late.hashes == world.listener.hashes == world.readable()
    late.close()


def test_a_manager_without_a_replay_socket_serves(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    sockets = json.dumps([{"instance": "i", "endpoint": endpoint}])
    manager = start_manager(tmp_path, settings=[f"kvcm.storage_events.sockets={sockets}"])
    manager.stop()
    assert manager.process.returncode == 0
