"""The blocks of one instance that storages have, as KV events of vLLM on a ZMQ socket.

A router that reads the events of engines reads these with the same code: medium STORAGE, blocks named by the hashes of
the engine's own events. Blocks whose writer gave no such hash are left out.

The frames are those of vLLM 0.32 (`vllm/distributed/kv_events.py`): topic, sequence of 8 bytes big endian from 0,
msgpack [seconds, events, rank]. The first batch is AllBlocksCleared. The replay socket answers a request for a sequence
with all batches from there on. vLLM begins with the oldest that it keeps where that one is gone; here a snapshot takes
the place of those, with the last sequence numbers, so that a listener knows everything after any replay.

Each manager publishes everything, since it follows the store. A listener uses one of them at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from kvcm.config import EventSocket
from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.instances import Instance
from kvcm.residency.stored_blocks import Blocks, StoredChange

__all__ = ["StorageEventSocket"]

_MEDIUM: Final = "STORAGE"
_NUMBER_BYTES: Final = 8
_END: Final = b"\xff" * _NUMBER_BYTES
_NO_HASHES: Final = np.empty(0, np.int64)
_HASHES_OF_BATCH: Final = 8192
_QUEUED_BATCHES: Final = 1_000  # for a slow listener, some 10 MB; what it misses it asks for
_MOST_KEPT_BYTES: Final = 64 << 20
_REPLAYS_AT_ONCE: Final = 4
_PAUSE_SECONDS: Final = 0.02
_STUCK_SECONDS: Final = 30.0
_LINGER_MS: Final = 500
_encode: Final = msgspec.msgpack.Encoder().encode
_log = structlog.get_logger("kvcm.service")


class _Batch(NamedTuple):
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Sockets:
    publisher: Any
    replay: Any  # None for none


class StorageEventSocket:
    """Publishes the changes of one instance.

    Args:
        settings: where.
        snapshot: returns the blocks that were published so far.
        now: time in unix seconds.
    """

    def __init__(
        self,
        settings: EventSocket,
        snapshot: Callable[[], Blocks | None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._now = now
        self._topic = settings.topic.encode()
        self._kept: deque[_Batch] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._sockets: _Sockets | None = None

    @property
    def endpoint(self) -> str:
        """Where the PUB socket is bound."""
        return self._settings.endpoint

    def open(self) -> None:
        """Bind the sockets, and publish that nothing is known.

        Raises:
            UnsupportedError: pyzmq is not installed.
            InvalidArgumentError: an endpoint cannot be bound; says which.
        """
        zmq = _package()
        context = zmq.Context.instance()
        publisher = context.socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, _LINGER_MS)
        publisher.setsockopt(zmq.SNDHWM, _QUEUED_BATCHES)
        _bind(publisher, self._settings.endpoint)
        replay = None
        if self._settings.replay_endpoint:
            replay = zmq.asyncio.Socket(context, zmq.ROUTER)
            replay.setsockopt(zmq.LINGER, 0)
            replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a slow listener, and notice one that is gone
            try:
                _bind(replay, self._settings.replay_endpoint)
            except InvalidArgumentError:
                publisher.close()
                raise
        self._sockets = _Sockets(publisher, replay)
        self._send([{"type": "AllBlocksCleared"}])

    def close(self) -> None:
        """Close the sockets."""
        if self._sockets is not None:
            self._sockets.publisher.close()
            if self._sockets.replay is not None:
                self._sockets.replay.close()
            self._sockets = None

    def publish(self, _instance: Instance, change: StoredChange) -> None:
        """Take a change."""
        events = [*self._removed(change.removed), *self._stored(change.stored)]
        if events:
            self._send(events)

    @property
    def has_replay(self) -> bool:
        """Whether `run` has something to do."""
        return bool(self._settings.replay_endpoint)

    async def run(self) -> None:
        """Answer requests for replays, some at a time, until cancelled."""
        assert self._sockets is not None
        replay = self._sockets.replay
        async with asyncio.TaskGroup() as replays:
            turns = asyncio.Semaphore(_REPLAYS_AT_ONCE)
            while True:
                await turns.acquire()
                frames = await replay.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == _NUMBER_BYTES:
                    task = replays.create_task(self._replay(replay, frames[0], int.from_bytes(frames[2], "big")))
                    task.add_done_callback(lambda _task: turns.release())
                else:
                    turns.release()

    async def _replay(self, socket: Any, listener: bytes, first: int) -> None:
        try:
            for sequence, payload in self._since(first):
                number = sequence.to_bytes(_NUMBER_BYTES, "big")
                await _send(socket, [listener, b"", self._topic, number, payload])
            await _send(socket, [listener, b"", b"", _END, b""])
        except (_package().ZMQError, TimeoutError) as error:  # the listener is gone, or reads nothing
            _log.info("storage_events_replay_ended", instance=self._settings.instance, reason=str(error))

    def _since(self, first: int) -> Iterator[_Batch]:
        """Yield the batches from one on that exist now; or a snapshot, in place of those that are not kept, and for a
        listener of another run, which may have read more."""
        is_kept = bool(self._kept) and self._kept[0].sequence <= first <= self._next
        if is_kept:
            yield from [batch for batch in self._kept if batch.sequence >= first]
            return
        last, blocks = self._next, self._snapshot()
        hashes = blocks.event_hashes[blocks.event_hashes != 0] if blocks is not None else _NO_HASHES
        count = min(last, max(1, -(-len(hashes) // _HASHES_OF_BATCH)))
        size = -(-len(hashes) // count)
        for number in range(count):
            part = self._numbers(hashes[number * size : (number + 1) * size])
            events = [{"type": "AllBlocksCleared"}] if number == 0 else []
            events += [_stored_event(part)] if part else []
            yield _Batch(last - count + number, self._payload(events))

    def _stored(self, blocks: Blocks) -> Iterator[dict[str, Any]]:
        if hashes := self._hashes(blocks):
            yield _stored_event(hashes)

    def _removed(self, blocks: Blocks) -> Iterator[dict[str, Any]]:
        if hashes := self._hashes(blocks):
            yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}

    def _hashes(self, blocks: Blocks) -> list[int]:
        return self._numbers(blocks.event_hashes[blocks.event_hashes != 0])

    def _numbers(self, hashes: NDArray[np.int64]) -> list[int]:
        numbers: list[int] = hashes.tolist() if self._settings.signed_hashes else hashes.view(np.uint64).tolist()
        return numbers

    def _payload(self, events: Sequence[dict[str, Any]]) -> bytes:
        return _encode([self._now(), events, 0])

    def _send(self, events: Sequence[dict[str, Any]]) -> None:
        batch = _Batch(self._next, self._payload(events))
        self._next += 1
        self._kept.append(batch)
        self._kept_bytes += len(batch.payload)
        while len(self._kept) > self._settings.kept_batches or self._kept_bytes > _MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft().payload)
        if self._sockets is not None:
            # A PUB socket never blocks: what a listener is too slow for is lost to it, and the sequence says so.
            number = batch.sequence.to_bytes(_NUMBER_BYTES, "big")
            self._sockets.publisher.send_multipart([self._topic, number, batch.payload])


async def _send(socket: Any, frames: Sequence[bytes]) -> None:
    """Send to a listener when it has space, and let others have a turn.

    Raises:
        TimeoutError: it has none for long.
        ZMQError: it is gone.
    """
    async with asyncio.timeout(_STUCK_SECONDS):
        while True:
            try:
                await socket.send_multipart(frames)
            except _package().Again:  # full, while another listener is not: that is all that ZMQ waits for
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                await asyncio.sleep(0)
                return


def _package() -> Any:
    """Return pyzmq, which most managers do without."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        text = "kvcm.storage_events.sockets needs the package pyzmq: pip install 'kvcm[subscriber]'"
        raise UnsupportedError(text) from None
    return zmq


def _bind(socket: Any, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except _package().ZMQError as error:
        socket.close()
        raise InvalidArgumentError(f"kvcm.storage_events.sockets: {endpoint!r} cannot be bound: {error}") from None


def _stored_event(hashes: Sequence[int]) -> dict[str, Any]:
    """Return a store of blocks whose tokens are not known: vLLM's form of such events has block size 0."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }
