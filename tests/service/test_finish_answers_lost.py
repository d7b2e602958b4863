"""The client of ours where an answer is lost: what was carried out at one manager is confirmed by another."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from redis_servers import Standalone
from test_several_managers import Node, hits, node, registered, settings_of, start

from connectors.async_client import AsyncManagerClient
from connectors.results import CallCounters

_FINISH = "/kv_cache_manager.proto.meta.MetaService/FinishWriteCache"


class Swallower(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands calls on to a manager; whoever called hears of no answer.

    Args:
        manager: a channel to it.
    """

    def __init__(self, manager: grpc.aio.Channel) -> None:
        self._manager = manager
        self.swallowed = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._hand_on)

    async def _hand_on(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._manager.unary_unary(_FINISH)(request)
        self.swallowed += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")


@pytest.fixture
async def nodes(redis_standalone: Standalone, tmp_path: Path) -> AsyncIterator[list[Node]]:
    uri = redis_standalone.uri(f"t{secrets.token_hex(6)}")
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(settings_of(uri, tmp_path))) for _ in range(2)]


async def test_a_finish_whose_answer_was_lost_is_confirmed_by_the_next_manager(nodes: list[Node]) -> None:
    first, second = nodes
    await registered(first)
    started = await start(first, [1, 2, 3])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.endpoint.meta_rpc_port}") as behind:
        swallower = Swallower(behind)
        between = grpc.aio.server(handlers=[swallower])
        port = between.add_insecure_port("127.0.0.1:0")
        await between.start()
        addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{second.endpoint.meta_rpc_port}"]
        client = AsyncManagerClient(addresses, "i")
        assert await client.finish_write(started.write_session_id, [True] * 3, timeout_seconds=30.0)
        assert client.counters()["finish_write"] == CallCounters(ok=1, retries=1)
        assert swallower.swallowed == 1
        assert not await client.finish_write(started.write_session_id, [True, True, False], timeout_seconds=30.0)
        await client.close()
        await between.stop(None)
    assert await hits(second, [1, 2, 3]) == 3
