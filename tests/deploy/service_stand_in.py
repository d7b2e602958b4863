"""A Service without a cluster: connections go to one of the pods that were ready when they were last asked."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from pods import Pod

__all__ = ["Service"]

_BUFFER = 1 << 16


class Service:
    """Probes pods as the kubelet does, and passes connections on as nodes do. Around a test.

    Args:
        address: its own.
        ports: its ports, which are those of the pods.
        period_seconds: between probes.
        seed: of its choices.
    """

    def __init__(self, address: str, ports: Sequence[int], period_seconds: float, seed: int) -> None:
        self._address, self._ports, self._period = address, ports, period_seconds
        self._random = random.Random(seed)
        self._pods: list[Pod] = []
        self._ready: list[Pod] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._ask(self._listen())

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def follow(self, pods: Sequence[Pod]) -> None:
        """Have it send connections to those of these that are ready; probed at once, and then now and then."""
        self._pods = list(pods)
        self._ask(self._probe())

    def _ask(self, what: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result()

    async def _listen(self) -> None:
        self._servers = [await asyncio.start_server(self._passer(port), self._address, port) for port in self._ports]
        self._probing = asyncio.create_task(self._go_on_probing())

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _go_on_probing(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            await self._probe()

    async def _probe(self) -> None:
        pods = list(self._pods)
        ready = await asyncio.gather(*(asyncio.to_thread(pod.answers, "readinessProbe") for pod in pods))
        self._ready = [pod for pod, is_ready in zip(pods, ready, strict=True) if is_ready]

    def _passer(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, IndexError), contextlib.closing(writer):
                chosen = self._random.choice(self._ready)
                from_pod, to_pod = await asyncio.open_connection(chosen.address, port)
                with contextlib.closing(to_pod):
                    await asyncio.gather(_copy(reader, to_pod), _copy(from_pod, writer))

        return pass_on


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Until one side ends: then both do, as a connection does."""
    with contextlib.suppress(OSError):
        while data := await source.read(_BUFFER):
            target.write(data)
            await target.drain()
    target.close()
