"""A proxy before a server that holds every packet up for as long as a distant network would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from redis_servers import Cluster, RedisServer, Servers
from waiting import until

from kvcm.model.tasks import end_tasks

__all__ = ["DelayingProxy", "distant"]

_CHUNK_BYTES = 1 << 16


class DelayingProxy:
    """Passes on what arrives, `seconds` later.

    Args:
        port: of the server, on loopback.

    Attributes:
        seconds: of a round trip; half of them each way.
        port: where it listens, once it is open.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.seconds = 0.0
        self.port = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Listen inside the block."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            await end_tasks(list(self._tasks))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as group:
                for source, sink in ((reader, to_server), (from_server, writer)):
                    queue = asyncio.Queue[tuple[float, bytes]]()
                    group.create_task(self._receive(source, queue))
                    group.create_task(self._send(queue, sink))
        finally:
            self._tasks.discard(task)
            for each in (to_server, writer):
                each.transport.abort()

    async def _receive(self, source: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"?"
        while data:
            try:
                data = await source.read(_CHUNK_BYTES)
            except ConnectionError:
                data = b""
            queue.put_nowait((asyncio.get_running_loop().time() + self.seconds / 2, data))

    async def _send(self, queue: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        """Send each packet when it is due; those after it have been received meanwhile."""
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if not data:
                break
            sink.write(data)
        sink.close()


@asynccontextmanager
async def distant(cluster: Cluster) -> AsyncIterator[tuple[Servers, list[DelayingProxy]]]:
    """Put a proxy before every node of a cluster, whose nodes name the proxies from then on; yield how to reach it."""
    proxies = [DelayingProxy(node.port) for node in cluster.nodes]
    async with AsyncExitStack() as stack:
        for node, proxy in zip(cluster.nodes, proxies, strict=True):
            await stack.enter_async_context(proxy.opened())
            with node.admin() as admin:
                admin.config_set("cluster-announce-port", proxy.port)
        ports = {proxy.port for proxy in proxies}
        await asyncio.to_thread(until, lambda: all(_named_ports(node) == ports for node in cluster.nodes))
        yield Servers(f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports)}/"), proxies


def _named_ports(node: RedisServer) -> set[int]:
    with node.admin() as admin:
        return {master[1] for _, _, master, *_ in admin.execute_command("CLUSTER", "SLOTS")}
