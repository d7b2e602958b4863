"""The mover for USRBIO over a stand-in of the native rings, which are not here: the shape of the protocol, no more."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from pool_parts import bytes_of
from transfer_parts import DEADLINE, failures

from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem
from kvcm.connectors.transfer.usrbio import Request, UsrbioMover
from kvcm.model.uri import LocationUri

STORAGE = "fs_01"
SPACE = 1024


class PlainRings:
    """Does with positioned reads and writes what 3FS would do."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(SPACE))
        self.registered: set[int] = set()
        self.batches: list[int] = []
        self.fails: OSError | None = None
        self.codes: dict[int, int] = {}  # answers instead, by position
        self.answers_more = 0  # than there were requests
        self.keeps: OSError | None = None  # files cannot be taken back
        self._answers: list[int] = []

    def register(self, descriptor: int) -> None:
        assert descriptor not in self.registered
        self.registered.add(descriptor)

    def submit(self, requests: Sequence[Request], *, is_read: bool) -> None:
        self.batches.append(len(requests))
        move = os.preadv if is_read else os.pwritev
        for number, (descriptor, offset, place, size) in enumerate(requests):
            assert descriptor in self.registered
            moved = move(descriptor, [self.memory[place : place + size]], offset)
            self._answers.append(self.codes.get(number, moved))

    def wait(self, count: int) -> Sequence[int]:
        if self.fails is not None:
            raise self.fails
        answers, self._answers = self._answers, []
        assert len(answers) == count
        return [*answers, *answers][: count + self.answers_more]

    def deregister(self, descriptor: int) -> None:
        self.registered.remove(descriptor)
        if self.keeps is not None:
            raise self.keeps

    def close(self) -> None:
        assert not self.registered


@pytest.fixture
def rings() -> PlainRings:
    return PlainRings()


@pytest.fixture
def mover(root: Path, rings: PlainRings) -> UsrbioMover:
    return UsrbioMover(STORAGE, str(root), rings)


def items(root: Path, size: int, count: int, slot: int | None = None) -> list[TransferItem]:
    return [
        TransferItem(
            LocationUri("hf3fs", STORAGE, f"{root}/cluster/f{index}", size, slot),
            [memoryview(bytearray(os.urandom(size // 2))), memoryview(bytearray(os.urandom(size - size // 2)))],
        )
        for index in range(count)
    ]


def emptied(saved: Sequence[TransferItem]) -> list[TransferItem]:
    return [TransferItem(item.uri, [memoryview(bytearray(item.uri.size))]) for item in saved]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_saved_items_are_loaded_in_batches_that_fit(root: Path, rings: PlainRings, mover: UsrbioMover) -> None:
    engine = TransferEngine({("hf3fs", STORAGE): mover})
    before = descriptors()
    saved = items(root, 300, 10, slot=2)
    assert failures(engine.save(saved, DEADLINE)) == [None] * 10
    assert (root / "cluster" / "f3").read_bytes()[600:] == bytes_of(saved[3])
    loaded = emptied(saved)
    assert failures(engine.load(loaded, DEADLINE)) == [None] * 10
    assert [bytes_of(item) for item in loaded] == [bytes_of(item) for item in saved]
    assert max(rings.batches) <= SPACE // 300
    layer = TransferItem(saved[0].uri, [memoryview(bytearray(7))], 100)
    assert failures(engine.load([layer], DEADLINE)) == [None]
    assert bytes_of(layer) == bytes_of(saved[0])[100:107]
    assert descriptors() == before
    engine.close()


def test_items_fail_alone(root: Path, rings: PlainRings, mover: UsrbioMover) -> None:
    saved = items(root, 100, 6)
    mover.save(saved, DEADLINE)
    (root / "cluster" / "f1").unlink()
    os.truncate(root / "cluster" / "f2", 50)
    (root / "cluster" / "f3").unlink()
    (root / "cluster" / "f3").symlink_to("/etc/hostname")
    loaded = emptied(saved)
    loaded[4] = TransferItem(saved[4].uri._replace(storage="other"), loaded[4].buffers)
    rings.codes = {2: -errno.EIO}  # the third request: f5
    results = mover.load(loaded, DEADLINE)
    assert failures(results) == [None, Failure.LOST, Failure.LOST, Failure.REFUSED, Failure.REFUSED, Failure.ERROR]
    assert bytes_of(loaded[0]) == bytes_of(saved[0])
    large = items(root, SPACE + 1, 1)
    assert failures(mover.save(large, DEADLINE)) == [Failure.REFUSED]
    mover.close()


def test_memory_that_3fs_may_write_to_is_not_reused(root: Path, rings: PlainRings, mover: UsrbioMover) -> None:
    saved = items(root, 300, 6)
    mover.save(saved, DEADLINE)
    rings.fails = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    assert failures(mover.load(emptied(saved), DEADLINE)) == [Failure.ERROR] * 6
    rings.fails = None
    assert failures(mover.load(emptied(saved), DEADLINE)) == [Failure.ERROR] * 6
    assert len(rings.batches) == 2 + 1
    mover.close()


def test_nothing_is_begun_after_the_deadline(root: Path, rings: PlainRings, mover: UsrbioMover) -> None:
    assert failures(mover.save(items(root, 300, 2), -1.0)) == [Failure.CANCELLED] * 2
    assert rings.batches == []


@pytest.mark.parametrize("more", [-1, 1])
def test_missing_or_more_answers_end_the_use(root: Path, rings: PlainRings, mover: UsrbioMover, more: int) -> None:
    """The mover cannot match such answers to requests, nor know which requests are still in flight."""
    saved, before = items(root, 300, 3), descriptors()
    mover.save(saved, DEADLINE)
    rings.answers_more = more
    assert failures(mover.load(emptied(saved), DEADLINE)) == [Failure.ERROR] * 3
    rings.answers_more = 0
    assert failures(mover.load(emptied(saved), DEADLINE)) == [Failure.ERROR] * 3
    assert len(rings.batches) == 2
    assert descriptors() == before
    mover.close()


def test_files_that_stay_registered_are_closed(root: Path, rings: PlainRings, mover: UsrbioMover) -> None:
    before = descriptors()
    rings.keeps = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    assert failures(mover.save(items(root, 300, 3), DEADLINE)) == [Failure.ERROR] * 3
    assert descriptors() == before
