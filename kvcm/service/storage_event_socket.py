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
_END: Final = b"\xff" * 8
_HASHES_OF_BATCH: Final = 8192
_QUEUED_BATCHES: Final = 100_000  # for a slow listener, as vLLM's hwm
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
        self._kept: deque[_Batch] = deque(maxlen=settings.kept_batches)
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
            _bind(replay, self._settings.replay_endpoint)
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

    async def run(self) -> None:
        """Answer requests for replays, until cancelled."""
        replay = self._sockets.replay if self._sockets is not None else None
        while replay is not None:
            frames = await replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                try:
                    await self._replay(replay, frames[0], int.from_bytes(frames[2], "big"))
                except _package().ZMQError as error:  # the listener is gone
                    _log.info("storage_events_replay_ended", instance=self._settings.instance, reason=str(error))

    async def _replay(self, socket: Any, listener: bytes, first: int) -> None:
        batches = list(self._since(first))
        for sequence, payload in batches:
            await socket.send_multipart([listener, b"", self._topic, sequence.to_bytes(8, "big"), payload])
        await socket.send_multipart([listener, b"", b"", _END, b""])

    def _since(self, first: int) -> Iterator[_Batch]:
        """Yield the batches from one on, or a snapshot in place of those that are gone."""
        if first >= self._next or (self._kept and first >= self._kept[0].sequence):
            yield from (batch for batch in self._kept if batch.sequence >= first)
            return
        blocks = self._snapshot()
        hashes = self._hashes(blocks) if blocks is not None else []
        count = min(self._next, max(1, -(-len(hashes) // _HASHES_OF_BATCH)))
        size = -(-len(hashes) // count)
        for number in range(count):
            part = hashes[number * size : (number + 1) * size]
            events = [{"type": "AllBlocksCleared"}] if number == 0 else []
            events += [_stored_event(part)] if part else []
            yield _Batch(self._next - count + number, self._payload(events))

    def _stored(self, blocks: Blocks) -> Iterator[dict[str, Any]]:
        if hashes := self._hashes(blocks):
            yield _stored_event(hashes)

    def _removed(self, blocks: Blocks) -> Iterator[dict[str, Any]]:
        if hashes := self._hashes(blocks):
            yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}

    def _hashes(self, blocks: Blocks) -> list[int]:
        known: NDArray[Any] = blocks.event_hashes[blocks.event_hashes != 0]
        hashes: list[int] = (known if self._settings.signed_hashes else known.view(np.uint64)).tolist()
        return hashes

    def _payload(self, events: Sequence[dict[str, Any]]) -> bytes:
        return _encode([self._now(), events, 0])

    def _send(self, events: Sequence[dict[str, Any]]) -> None:
        batch = _Batch(self._next, self._payload(events))
        self._next += 1
        self._kept.append(batch)
        if self._sockets is not None:
            # A PUB socket never blocks: what a listener is too slow for is lost to it, and the sequence says so.
            self._sockets.publisher.send_multipart([self._topic, batch.sequence.to_bytes(8, "big"), batch.payload])


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
