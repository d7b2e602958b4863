"""The commit log within one process: order, group commit, failure, format."""

import asyncio
import stat
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from waiting import until

from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks.database import open_database
from kvcm.store.rocks.log import CommitLog, Fsync

ROWS = [(b"b%d" % number, b"x" * 50) for number in range(10)]


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[CommitLog]:
    log = CommitLog(tmp_path, Fsync.ALWAYS, SystemClock())
    yield log
    log.close_at_once()


def on_disk(directory: Path) -> dict[bytes, bytes]:
    """What a process that opens the directory now finds."""
    log = CommitLog(directory, Fsync.NEVER, SystemClock())
    rows = dict(log.read(b"b"))
    log.close_at_once()
    return rows


async def test_changes_are_applied_in_the_order_of_their_append(log: CommitLog, tmp_path: Path) -> None:
    log.append([(b"b1", b"old"), (b"b2", b"kept"), (b"b11", b"old"), (b"c1", b"old")])
    log.append([(b"b1", None), (b"b3", b"new")])
    log.append([(b"b12", b"new")], prefixes=[b"b1", b"c"])
    log.append([(b"b1", b"again")])
    await log.flush()
    expected = {b"b1": b"again", b"b12": b"new", b"b2": b"kept", b"b3": b"new"}
    assert dict(log.read(b"b")) == expected
    assert list(log.read(b"c")) == []
    await log.close()
    assert on_disk(tmp_path) == expected


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_closing_writes_what_nobody_waited_for(tmp_path: Path, fsync: Fsync) -> None:
    log = CommitLog(tmp_path, fsync, SystemClock())
    for row in ROWS:
        log.append([row])
    await log.close()
    await log.close()
    assert on_disk(tmp_path) == dict(ROWS)


async def test_many_waiting_flushes_share_few_rounds(log: CommitLog) -> None:
    """What is appended in one turn of the loop needs one round, two if the writer was quicker than the loop, and one
    more where a batch begins beyond the size of a round."""

    async def write(number: int) -> None:
        log.append([(b"b%d" % number, b"x")])
        await log.flush()

    await asyncio.gather(*map(write, range(500)))
    assert 1 <= log.rounds < 50
    assert len(list(log.read(b"b"))) == 500


async def test_a_flush_with_nothing_to_wait_for_returns_at_once(log: CommitLog) -> None:
    with pytest.raises(StopIteration):
        log.flush().send(None)
    log.append(ROWS)
    await log.flush()
    rounds = log.rounds
    await log.flush()
    assert log.rounds == rounds


async def test_a_cancelled_flush_leaves_the_others_waiting(log: CommitLog) -> None:
    log.append(ROWS)
    first, second = asyncio.ensure_future(log.flush()), asyncio.ensure_future(log.flush())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert dict(log.read(b"b")) == dict(ROWS)


async def test_changes_are_refused_while_too_much_waits_and_accepted_again(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, Fsync.ALWAYS, SystemClock(), most_queued_bytes=1)
    log.admit()
    log.append(ROWS)
    with held(log):
        log.append(ROWS)
        with pytest.raises(StorageIOError, match="the disk is too slow; try again"):
            log.admit()
    await log.flush()
    log.admit()
    await log.close()


def held(log: CommitLog) -> threading.Condition:
    """The writer cannot take what is queued inside the block."""
    return log._changed


@pytest.fixture
async def failed(tmp_path: Path) -> AsyncIterator[tuple[CommitLog, list[str]]]:
    """A log whose database fails to write, and what it told of that."""
    told: list[str] = []
    log = CommitLog(tmp_path, Fsync.ALWAYS, SystemClock(), on_failure=told.append)
    log._database.close()  # every write from now on fails
    log.append(ROWS)
    with pytest.raises(StorageIOError, match=r"cannot be written: .*; nothing is accepted any more"):
        await log.flush()
    yield log, told
    with pytest.raises(StorageIOError):
        log.close_at_once()


async def test_a_sync_that_fails_says_so(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, Fsync.NEVER, SystemClock())
    log._database.close()
    log.append(ROWS)
    with pytest.raises(StorageIOError, match="cannot be written"):
        await log.sync()
    with pytest.raises(StorageIOError, match="cannot be written"):
        await log.sync()
    with pytest.raises(StorageIOError):
        log.close_at_once()


async def test_a_failed_log_refuses_everything_and_says_so_once(failed: tuple[CommitLog, list[str]]) -> None:
    log, told = failed
    calls: list[Callable[[], object]] = [log.admit, lambda: log.append(ROWS)]
    for call in calls:
        with pytest.raises(StorageIOError, match="cannot be written"):
            call()
    with pytest.raises(StorageIOError, match="cannot be written"):
        await log.flush()
    log._thread.join(timeout=30)
    assert told == [log.failure]


async def test_a_closed_log_refuses_changes(log: CommitLog) -> None:
    await log.close()
    for call in (log.admit, lambda: log.append(ROWS)):
        with pytest.raises(StorageIOError, match="is closed"):
            call()


async def test_the_directory_is_made_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there"
    CommitLog(directory, Fsync.NEVER, SystemClock()).close_at_once()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


async def test_a_directory_in_use_is_refused_and_free_again_after_close(tmp_path: Path, log: CommitLog) -> None:
    with pytest.raises(StorageIOError, match=f"{tmp_path} is in use by another process"):
        CommitLog(tmp_path, Fsync.ALWAYS, SystemClock())
    await log.close()
    CommitLog(tmp_path, Fsync.ALWAYS, SystemClock()).close_at_once()


@pytest.mark.parametrize(("written", "named"), [(b"2", "version 2"), (None, "version missing")])
def test_an_unknown_format_is_refused_and_left_as_it_is(tmp_path: Path, written: bytes | None, named: str) -> None:
    database = open_database(tmp_path)
    database[b"b1"] = b"x"
    if written is None:
        database.delete(b"format")
    else:
        database[b"format"] = written
    database.close()
    for _ in range(2):
        with pytest.raises(StorageIOError, match=f"has format {named}, this release reads version 1"):
            CommitLog(tmp_path, Fsync.ALWAYS, SystemClock())


def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageIOError, match=f"{tmp_path}/file/db cannot be opened"):
        CommitLog(tmp_path / "file" / "db", Fsync.ALWAYS, SystemClock())


def test_a_damaged_row_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    for number in range(2000):
        database[b"b%06d" % number] = number.to_bytes(100)
    database.flush()
    database.close()
    table = max(tmp_path.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 3] ^= 0xFF
    table.write_bytes(data)
    with pytest.raises(StorageIOError, match=r"is damaged: .*checksum"):
        on_disk(tmp_path)


class StoppedClock:
    """Shows what it is set to."""

    seconds = 100.0

    def now(self) -> float:
        return self.seconds


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_a_flush_waits_for_a_sync_only_if_every_write_is_to_be_synced(tmp_path: Path, fsync: Fsync) -> None:
    log = CommitLog(tmp_path, fsync, StoppedClock())
    for _ in range(3):
        log.append(ROWS)
        await log.flush()
        assert log._is_synced is (fsync is Fsync.ALWAYS)
    await log.close()
    assert log._is_synced


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_a_sync_is_one_under_every_policy(tmp_path: Path, fsync: Fsync) -> None:
    """Also of what was flushed before, and also when time stands still."""
    log = CommitLog(tmp_path, fsync, StoppedClock())
    for is_flushed in (False, True):
        log.append(ROWS)
        if is_flushed:
            await log.flush()
        await log.sync()
        assert log._is_synced
        with pytest.raises(StopIteration):
            log.sync().send(None)  # there is nothing left to wait for
    await log.close()
    await log.sync()


async def test_many_waiting_syncs_share_few_rounds(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, Fsync.NEVER, StoppedClock())

    async def write(number: int) -> None:
        log.append([(b"b%d" % number, b"x")])
        await log.sync()
        assert log._synced > number

    await asyncio.gather(*map(write, range(500)))
    assert 1 <= log.rounds < 50
    assert len(list(log.read(b"b"))) == 500
    await log.close()


async def test_closing_answers_a_sync(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, Fsync.NEVER, StoppedClock())
    with held(log):
        log.append(ROWS)
        waiting = asyncio.ensure_future(log.sync())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(log.close())
    await asyncio.gather(waiting, closing)
    assert on_disk(tmp_path) == dict(ROWS)


async def test_everysec_syncs_in_the_first_round_after_a_second(tmp_path: Path) -> None:
    """Rounds follow each other, so the answer of the third tells that the second has made its sync."""
    clock = StoppedClock()
    log = CommitLog(tmp_path, Fsync.EVERYSEC, clock)
    for _ in range(3):
        clock.seconds += 1.0
        log.append(ROWS)
        await log.flush()
    assert log._synced_at >= clock.seconds - 1.0
    await log.close()


def test_everysec_syncs_also_when_nothing_more_is_written(tmp_path: Path) -> None:
    clock = StoppedClock()
    log = CommitLog(tmp_path, Fsync.EVERYSEC, clock)
    log.append(ROWS)
    until(lambda: log.rounds == 1)
    assert not log._is_synced
    clock.seconds += 1.0
    until(lambda: log._is_synced)
    log.close_at_once()


async def test_operations_are_timed(log: CommitLog) -> None:
    log.append(ROWS)
    await log.flush()
    assert {op: times.read().counts[-1] for op, times in log.times.items()} == {"write": 1, "sync": 1, "flush": 1}


async def test_what_was_written_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Tables in memory are small: they are the largest part of what a small manager takes."""
    log = CommitLog(tmp_path, Fsync.NEVER, SystemClock())
    try:
        for number in range(60):
            log.append([(b"b%d" % number, bytes(1 << 20))])
            await log.flush()
            assert (log._database.property_int_value("rocksdb.cur-size-active-mem-table") or 0) <= 20 << 20
        assert dict(log.read(b"b59")) == {b"b59": bytes(1 << 20)}
    finally:
        log.close_at_once()
