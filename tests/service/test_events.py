"""Events of real calls, in the original's format (wire.md 10.3), and their stream on the admin plane."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_clock import FakeClock

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import ErrorCode
from kvcm.model.groups import CacheConfig, CacheReclaimStrategy, InstanceGroup, InstanceGroupQuota
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.bodies import BodyReader
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.calls import Caller
from kvcm.service.gate import Gate, Phase
from kvcm.service.http_app import HttpApp
from kvcm.service.http_server import HttpServer
from kvcm.service.lanes import Lane
from kvcm.service.limits import RequestLimits
from kvcm.service.meta_api import MetaApi
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryLease, MemoryTable
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.metrics import ApiMetrics

INSTANCE = Instance("", "g", "inst", 2, (LocationSpecInfo("tp0", 8),), ModelDeployment("m", "bf16"))
ENVELOPE = {"id", "source", "component", "type", "trigger_time_us"}


class Node:
    """A manager without servers, and what it told."""

    def __init__(self) -> None:
        self.clock = FakeClock(5000.0)
        self.log = EventLog(now=self.clock.now)
        self.storages = StorageDirectory("cluster")
        self.registry = Registry(self.storages)
        leadership = Leadership("n", self.clock, 10.0, MemoryLease(self.clock), MemoryTable())
        self.cache = CacheManager(self.registry, self.storages, self.clock, events=self.log)
        self.executor = DeletionExecutor(self.storages, self.clock, events=self.log)
        self.executor.serve(self.cache)
        self.calls = MetaApi(self.cache, self.registry, leadership, RequestLimits(), self.log).calls()
        self.caller = Caller([CallMetrics(ApiMetrics())], lambda _plane: None, lambda _instance: {})

    async def begin(self) -> None:
        await self.registry.storages.add(StorageConfig("s", DummyStorageSpec()))
        strategy = CacheReclaimStrategy("s", delay_before_delete_ms=1500)
        config = CacheConfig(strategy)
        await self.registry.groups.create(InstanceGroup("g", ("s",), "", 10, InstanceGroupQuota(1 << 30), config))
        await self.cache.register_instance(INSTANCE)

    async def ask(self, name: str, **fields: Any) -> Any:
        (call,) = [call for call in self.calls if call.name == name]
        reply = await self.caller.answer(call, call.request_type(instance_id="inst", **fields))
        return reply.complete()

    async def write(self, keys: list[int]) -> Any:
        started = await self.ask("StartWriteCache", block_keys=keys)
        finish = {"write_session_id": started.write_session_id, "success_blocks": pb.BlockMask(offset=len(keys))}
        assert (await self.ask("FinishWriteCache", **finish)).header.status.code == ErrorCode.OK
        return started


@pytest.fixture
async def node() -> Node:
    node = Node()
    await node.begin()
    return node


@asynccontextmanager
async def told(node: Node) -> AsyncIterator[list[dict[str, Any]]]:
    """The events of what happens inside the block, filled in at its end."""
    listener = node.log.subscribe()
    events: list[dict[str, Any]] = []
    yield events
    await node.log.close()
    events += [json.loads(line) for line in b"".join(listener.waiting()).splitlines()]


def fields(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ENVELOPE}


async def test_the_calls_of_an_engine_are_told_as_the_original_tells_them(node: Node) -> None:
    async with told(node) as events:
        started = await node.write([-3, 7])
        query = {"query_type": pb.QT_PREFIX_MATCH, "block_keys": [-3, 7, 9], "location_spec_names": ["tp0"]}
        await node.ask("GetCacheLocation", **query, block_mask=pb.BlockMask(offset=1))
    assert [(event["component"], event["type"]) for event in events] == [
        ("cache_manager", name) for name in ("StartWriteCache", "FinishWriteCache", "GetCacheLocation")
    ]
    for event in events:
        assert event.keys() >= ENVELOPE
        assert (event["source"], len(event["id"]), event["trigger_time_us"]) == ("inst", 32, 5000000000)
    start, finish, read = map(fields, events)
    assert start == {
        "write_session_id": started.write_session_id,
        "keys": [-3, 7],
        "tokens": [],
        "block_mask": 0,
        "location_spec_group_names": [],
        "write_timeout_seconds": 0,
    }
    assert finish == {"write_session_id": started.write_session_id, "success_block": 2}
    assert read == {
        "query_type": "prefix_match",
        "keys": [-3, 7, 9],
        "tokens": [],
        "block_mask": 1,
        "sw_size": 0,
        "location_spec_names": ["tp0"],
    }


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (pb.QT_BATCH_GET, "batch_get"),
        (pb.QT_PREFIX_MATCH, "prefix_match"),
        (pb.QT_REVERSE_ROLL_SW_MATCH, "reverse_roll_sw_match"),
    ],
)
async def test_query_types_have_the_names_of_the_original(node: Node, mode: int, name: str) -> None:
    async with told(node) as events:
        await node.ask("GetCacheLocation", query_type=mode, block_keys=[1, 2], sw_size=1)
    assert [event["query_type"] for event in events] == [name]


async def test_keys_are_those_made_from_tokens_and_masks_keep_their_form(node: Node) -> None:
    flags = pb.BlockMask(bool_masks=pb.BoolMasksType(values=[False, True]))
    async with told(node) as events:
        await node.ask("GetCacheLocation", query_type=pb.QT_BATCH_GET, token_ids=[1, 2, 3, 4], block_mask=flags)
        await node.write([5])
        await node.ask("StartWriteCache", block_keys=[4, 5, 6])
    read, start = events[0], events[-1]
    assert (len(read["keys"]), read["tokens"], read["block_mask"]) == (2, [1, 2, 3, 4], [False, True])
    assert start["block_mask"] == [False, True, False]


async def test_what_fails_and_what_only_peeks_is_not_told(node: Node) -> None:
    async with told(node) as events:
        await node.ask("GetCacheLocation", query_type=77, block_keys=[1])
        await node.ask("GetCacheLocation", query_type=pb.QT_PREFIX_MATCH, block_keys=[1], peek=True)
        await node.ask("FinishWriteCache", write_session_id="none", success_blocks=pb.BlockMask(offset=0))
        await node.ask("RemoveCache", block_keys=[404])
    assert events == []


async def test_removals_are_told_with_who_asked_for_them(node: Node) -> None:
    for keys in ([1, 2], [3], [4], [5]):
        await node.write(keys)
    async with told(node) as events:
        await node.ask("RemoveCache", block_keys=[1, 2])
        node.clock.time += 10
        await node.ask("TrimCache", strategy=pb.TS_TIMESTAMP, begin_timestamp=0, end_timestamp=1)
        await node.ask("TrimCache", strategy=pb.TS_REMOVE_ALL_CACHE)
        await node.executor.run_due()
        await node.write([6])
        await node.ask("TrimCache", strategy=pb.TS_REMOVE_ALL_META)
        await node.write([7])
        await node.cache.remove_instance("inst")
    removed = [fields(event) for event in events if event["type"] == "removed"]
    assert [(event["reason"], sorted(event["keys"]), event["bytes"]) for event in removed] == [
        ("RemoveCache", [1, 2], 16),
        ("TrimCache", [3, 4, 5], 24),
        ("TrimCache", [6], 8),  # without bytes; the others were told of already
        ("RemoveInstance", [7], 8),
    ]
    assert {(event["group"], event["storage"]) for event in removed} == {("g", "s")}
    assert all(len(ids) == 1 and len(ids[0]) > 0 for event in removed for ids in event["location_ids"])


async def test_a_write_session_that_expires_is_told_once(node: Node) -> None:
    await node.ask("StartWriteCache", block_keys=[1, 2], write_timeout_seconds=5)
    async with told(node) as events:
        node.clock.time += 5
        await node.cache.expire()
        await node.cache.expire()
        await node.executor.run_due()
    assert [(event["type"], event["reason"], event["keys"], event["bytes"]) for event in events] == [
        ("expired", "session", [2, 1], 16)
    ]


async def test_blocks_that_a_writer_gave_a_time_go_after_it(node: Node) -> None:
    started = await node.ask("StartWriteCache", block_keys=[1])
    finish = {"write_session_id": started.write_session_id, "success_blocks": pb.BlockMask(offset=1)}
    await node.ask("FinishWriteCache", **finish, retention=pb.Retention(ttl_seconds=60))
    async with told(node) as events:
        node.clock.time += 60
        await node.executor.run_due()
        assert node.executor.deleted.locations == 0, "readable for the group's delay"
        node.clock.time += 1.5
        await node.executor.run_due()
    assert [(event["type"], event["reason"], event["keys"]) for event in events] == [("expired", "ttl", [1])]
    assert node.executor.deleted.locations == 1


@asynccontextmanager
async def served(node: Node) -> AsyncIterator[int]:
    """The events of a node on a port, until the end of the block."""
    server = HttpServer("127.0.0.1", 0)
    running = asyncio.create_task(node.log.run())
    gate = Gate()
    await gate.enter_phase(Phase.SERVING)
    app = HttpApp(gate, 1 << 20)
    bodies = BodyReader(RequestLimits(), Lane(time.monotonic, 1, 0, 0.0))
    app.serve(node.calls, node.caller, {"/api/events": node.log.subscribe}, bodies=bodies)
    await server.start(app)
    try:
        yield server.port
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(30):  # listeners are at their end: nobody has to be cut off
            await server.stop(60.0)


async def listen(
    port: int, headers: str = "", path: str = "/api/events"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
    return reader, writer


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Read a chunked body of lines."""
    text = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        text += (await reader.readexactly(size + 2))[:-2]
        *complete, text = text.split(b"\n")
        for line in complete:
            yield json.loads(line)


async def test_events_are_streamed_as_they_happen_until_the_manager_stops(node: Node) -> None:
    async with served(node) as port:
        reader, writer = await listen(port)
        head = await reader.readuntil(b"\r\n\r\n")
        assert (b" 200 " in head, b"application/x-ndjson" in head) == (True, True)
        stream = aiter(lines(reader))
        for key in (1, 2):
            await node.write([key])
            assert [(await anext(stream))["type"] for _ in range(2)] == ["StartWriteCache", "FinishWriteCache"]
    assert [event async for event in stream] == []
    writer.close()


async def test_a_listener_that_goes_away_is_forgotten(node: Node) -> None:
    async with served(node) as port:
        reader, writer = await listen(port)
        await reader.readuntil(b"\r\n\r\n")
        assert node.log.is_active
        writer.close()
        async with asyncio.timeout(30):
            while node.log.is_active:
                await asyncio.to_thread(int)


@pytest.mark.parametrize("header", ["origin: http://evil.example", "accept-language: en"])
async def test_web_pages_cannot_listen(node: Node, header: str) -> None:
    async with served(node) as port:
        reader, writer = await listen(port, f"{header}\r\n")
        assert b" 403 " in await reader.readline()
        assert not node.log.is_active
        writer.close()


async def test_only_the_stream_is_there_for_get(node: Node) -> None:
    async with served(node) as port:
        for path in ("/api/event", "/api/getCacheLocation"):
            reader, writer = await listen(port, path=path)
            assert b" 404 " in await reader.readline()
            writer.close()
