"""Clients choose block keys; no choice holds a manager for longer than other keys do."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from probe_chain import probe_chain
from test_several_managers import Node, node, registered, settings_of

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import insight_service_pb2 as insight
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins

pytestmark = pytest.mark.ci
KEYS = 65_536
MOST_RATIO, TRIES = 5, 2
"""Chosen keys that are hash positions cost hundreds of times as much, in every try; a busy machine may do so once."""
Step = Callable[["Client"], Awaitable[Any]]
_META = "kv_cache_manager.proto.meta.MetaService"
_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Client:
    """One client of a manager, with a chain of blocks of its own."""

    def __init__(self, on: Node, keys: Sequence[int]) -> None:
        self.keys = keys
        self._on = on
        self._session = ""
        self._uris: list[str] = []

    async def start(self) -> None:
        started = await self._call(_META, meta, "StartWriteCache", write_timeout_seconds=600, block_keys=self.keys)
        assert len(started.locations) == len(self.keys)
        self._session = started.write_session_id
        self._uris = [location.location_specs[0].uri for location in started.locations]

    async def finish(self) -> None:
        fields = {"write_session_id": self._session, "success_blocks": {"offset": len(self.keys)}}
        await self._call(_META, meta, "FinishWriteCache", meta.CommonResponse, **fields)

    async def match(self) -> None:
        for mode in (meta.QT_PREFIX_MATCH, meta.QT_BATCH_GET):
            fields = {"query_type": mode, "read_lease_ms": 1000, "block_keys": self.keys}
            await self._call(_META, meta, "GetCacheLocation", **fields)

    async def metas(self) -> None:
        await self._call(_META, meta, "GetCacheMeta", block_keys=self.keys)

    async def explore(self) -> None:
        await self._call("kvcm.v1.InsightService", insight, "ExploreBlocks", block_keys=self.keys)

    async def pin(self) -> None:
        fields = {"owner": "me", "ttl_seconds": 60, "block_keys": self.keys}
        await self._call("kvcm.v1.PinService", pins, "PinPrefix", **fields)

    async def report(self) -> None:
        parts = [{"block_key": key, "uri": uri} for key, uri in zip(self.keys, self._uris, strict=True)]
        await self._call("kvcm.v1.PinService", pins, "ReportMissing", parts=parts)

    async def remove(self) -> None:
        await self._call(_META, meta, "RemoveCache", meta.CommonResponse, block_keys=self.keys)

    async def _call(self, service: str, package: Any, name: str, response: Any = None, **fields: Any) -> Any:
        """Make a call, of whatever size, with success."""
        endpoint = self._on.endpoint
        port = endpoint.admin_rpc_port if package is insight else endpoint.meta_rpc_port
        response = response or getattr(package, f"{name}Response")
        body = getattr(package, f"{name}Request")(instance_id="i", **fields).SerializeToString()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_ANY_SIZE) as channel:
            answer = response.FromString(await channel.unary_unary(f"/{service}/{name}")(body))
        assert answer.header.status.code == meta.OK, answer.header
        return answer


READS: Sequence[Step] = (Client.match, Client.metas, Client.explore, Client.remove)
STEPS: Sequence[Step] = (
    Client.start,
    Client.finish,
    Client.pin,
    Client.report,
    *READS,
)


@pytest.mark.parametrize("store", ["rocksdb", "redis"])
async def test_no_choice_of_keys_makes_a_call_slow(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every call that takes keys: such keys could hold a manager for many seconds, so that it lost its lease. To Redis
    so many blocks are not written: on a busy machine that takes too long. In memory they are kept by the code that
    RocksDB's are kept by (benchmarks/hostile_keys.py does both)."""
    steps = READS if store == "redis" else STEPS
    if store == "redis":
        uri = request.getfixturevalue("redis_standalone").uri(f"t{secrets.token_hex(6)}")
    else:
        uri = f"local://{tmp_path}/metadata"
    async with node(settings_of(uri, tmp_path)) as on:
        await _unlimited(on)
        await registered(on)
        await _seconds(steps, Client(on, range(KEYS // 64)))
        for seed in range(TRIES):
            slow = await _slow_steps(on, steps, np.random.default_rng(seed))
            if not slow:
                break
    assert not slow


async def _slow_steps(on: Node, steps: Sequence[Step], random: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Return the CPU seconds, with usual and with chosen keys, of the steps that the latter seem to slow down."""
    usual = await _seconds(steps, Client(on, random.integers(-(1 << 63), (1 << 63) - 1, KEYS).tolist()))
    hostile = await _seconds(steps, Client(on, probe_chain(random)))
    return {name: (usual[name], hostile[name]) for name in usual if hostile[name] > MOST_RATIO * usual[name]}


async def _seconds(steps: Sequence[Step], client: Client) -> dict[str, float]:
    """Make the calls, and return the CPU time of each."""
    return {step.__name__: await _cpu_seconds(step, client) for step in steps}


async def _cpu_seconds(step: Step, client: Client) -> float:
    begin = time.process_time()
    await step(client)
    return time.process_time() - begin


async def _unlimited(on: Node) -> None:
    """Let the group hold everything, pins included."""
    group = (await on.admin.GetInstanceGroup(admin.GetInstanceGroupRequest(name="default"))).instance_group
    version = group.version
    group.quota.capacity = group.pin_budget_bytes = 1 << 50
    group.cache_config.meta_indexer_config.max_key_count = 1 << 30
    group.version = version + 1
    request = admin.UpdateInstanceGroupRequest(instance_group=group, current_version=version)
    answer = await on.admin.UpdateInstanceGroup(request)
    assert answer.header.status.code == meta.OK, answer.header
