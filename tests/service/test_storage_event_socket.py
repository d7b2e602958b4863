"""The socket of storage events: frames, replays and snapshots, as real ZMQ listeners see them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from ports import free_port

from kvcm.config import EventSocket
from kvcm.model.errors import InvalidArgumentError
from kvcm.residency.stored_blocks import Blocks, StoredChange
from kvcm.service.storage_event_socket import StorageEventSocket

END = b"\xff" * 8
INSTANCE: Any = SimpleNamespace(instance_id="i", instance_group_name="g")


class Site:
    """A socket, and the blocks that it was given."""

    def __init__(self, **settings: Any) -> None:
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.settings = EventSocket(
            instance="i", endpoint=endpoints[0], replay_endpoint=endpoints[1], topic="t", **settings
        )
        self.hashes: set[int] = set()
        self.socket = StorageEventSocket(self.settings, self.snapshot, lambda: 5.0)

    def snapshot(self) -> Blocks:
        return blocks(*sorted(self.hashes))

    def store(self, *hashes: int) -> None:
        self.hashes |= set(hashes)
        self.socket.publish(INSTANCE, StoredChange(blocks(*hashes), blocks()))

    def remove(self, *hashes: int) -> None:
        self.hashes -= set(hashes)
        self.socket.publish(INSTANCE, StoredChange(blocks(), blocks(*hashes)))

    def listener(self, kind: int, **options: int) -> Any:
        made = zmq.asyncio.Context.instance().socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(self.settings.replay_endpoint if kind != zmq.SUB else self.settings.endpoint)
        return made

    async def replayed(self, first: int, socket: Any = None) -> list[tuple[int, list[dict[str, Any]]]]:
        """Ask for batches from one on; return sequences and events."""
        asked = socket or self.listener(zmq.DEALER)
        await asked.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            async with asyncio.timeout(30):
                _, topic, sequence, payload = await asked.recv_multipart()
            if sequence == END:
                if socket is None:
                    asked.close()
                return found
            assert topic == b"t"
            seconds, events, rank = msgspec.msgpack.decode(payload)
            assert (seconds, rank) == (5.0, 0)
            found.append((int.from_bytes(sequence, "big"), events))


def blocks(*hashes: int) -> Blocks:
    return Blocks(np.arange(len(hashes), dtype=np.int64), np.array(hashes, np.int64))


def known(batches: list[tuple[int, list[dict[str, Any]]]]) -> set[int]:
    """The hashes that a listener knows that began with these."""
    found: set[int] = set()
    for _, events in batches:
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    found.clear()
                case "BlockStored":
                    found |= set(event["block_hashes"])
                case _:
                    found -= set(event["block_hashes"])
    return found


@contextlib.asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Site]:
    site = Site(**settings)
    site.socket.open()
    serving = asyncio.create_task(site.socket.run())
    try:
        yield site
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        site.socket.close()


async def test_a_replay_has_every_batch_from_one_on() -> None:
    async with opened() as site:
        site.store(1, 0, 2)
        site.remove(1)
        whole = await site.replayed(0)
        assert [number for number, _ in whole] == [0, 1, 2]
        assert whole[0][1] == [{"type": "AllBlocksCleared"}]
        assert known(whole) == {2}
        assert [number for number, _ in await site.replayed(2)] == [2]
        assert await site.replayed(3) == []


async def test_blocks_without_a_hash_are_left_out() -> None:
    async with opened() as site:
        site.store(0)
        site.remove(0)
        assert [number for number, _ in await site.replayed(0)] == [0]


@pytest.mark.parametrize(("signed", "expected"), [(False, 2**64 - 5), (True, -5)])
async def test_hashes_have_the_sign_of_their_engine(signed: bool, expected: int) -> None:
    async with opened(signed_hashes=signed) as site:
        site.store(-5)
        assert known(await site.replayed(0)) == {expected}


@pytest.mark.parametrize("first", [0, 3, 10_000])
async def test_a_snapshot_takes_the_place_of_batches_that_are_gone(first: int) -> None:
    """Also for a listener of another run of the manager, which may have read more batches than there are."""
    async with opened(kept_batches=2) as site:
        for number in range(1, 20_001, 1000):
            site.store(*range(number, number + 1000))
        site.remove(7)
        found = await site.replayed(first)
        assert known(found) == site.hashes
        assert [number for number, _ in found] == list(range(21 - len(found) + 1, 22))
        assert len(found) == 3, "8192 hashes each"


async def test_listeners_that_read_slowly_get_everything_beside_others() -> None:
    """ZMQ waits for space of any listener; a replay may need that of another one."""
    async with opened() as site:
        for number in range(1, 1501):
            site.store(*range(number * 1000, number * 1000 + 800))
        idle = site.listener(zmq.DEALER)
        slow = site.listener(zmq.DEALER, RCVHWM=10, RCVBUF=4096)
        await idle.send_multipart([b"", (1501).to_bytes(8, "big")])
        assert (await idle.recv_multipart())[2] == END
        await slow.send_multipart([b"", bytes(8)])
        for _ in range(50):
            await asyncio.sleep(0)  # it does not read while the pipe fills
        found = []
        while (frames := await asyncio.wait_for(slow.recv_multipart(), 30))[2] != END:
            found.append(int.from_bytes(frames[2], "big"))
        assert found == list(range(1501))
        idle.close()
        slow.close()


async def test_a_listener_that_went_away_ends_its_replay_alone() -> None:
    async with opened() as site:
        for number in range(1, 1501):
            site.store(*range(number * 1000, number * 1000 + 800))
        gone = site.listener(zmq.DEALER, RCVHWM=10)
        await gone.send_multipart([b"", bytes(8)])
        await gone.recv_multipart()
        gone.close()
        assert len(await site.replayed(0)) == 1501


async def test_requests_that_are_none_are_passed_over() -> None:
    async with opened() as site:
        strange = site.listener(zmq.DEALER)
        for frames in ([b""], [b"", b"1"], [b"", b"", bytes(8)]):
            await strange.send_multipart(frames)
        assert len(await site.replayed(0, strange)) == 1
        strange.close()


async def test_live_batches_go_on_behind_a_replay() -> None:
    async with opened() as site:
        live = site.listener(zmq.SUB)
        live.setsockopt(zmq.SUBSCRIBE, b"")
        number = 0
        while not await live.poll(20):  # until it is connected
            number += 1
            site.store(number)
        _, sequence, _ = await live.recv_multipart()
        batches = await site.replayed(0)
        assert [each for each, _ in batches] == list(range(number + 1))
        assert 0 < int.from_bytes(sequence, "big") <= number
        live.close()


def test_an_endpoint_that_is_taken_is_refused() -> None:
    first, second = Site(), Site()
    first.socket.open()
    taken = StorageEventSocket(first.settings, second.snapshot)
    with pytest.raises(InvalidArgumentError, match="cannot be bound"):
        taken.open()
    first.socket.close()
