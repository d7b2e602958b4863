"""The embedded store: the commit log, tables, and deaths of the process."""

import asyncio
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import rocks_writer
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdict import Options, Rdict
from thoroughness import examples
from waiting import until

from kvcm.index.backends.rocks import audit_rows, drop_rows
from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store import rocks
from kvcm.store.load_progress import shown_progress
from kvcm.store.rocks import CommitLog, Fsync, RocksStore, open_database
from kvcm.store.store import Replacement

pytestmark = pytest.mark.timeout(600)  # hundreds of syncs, each of which a slow disk makes wait
TABLES = ["sessions", "s", "leases"]
NAMES = ["a", "b", "ä/ö", ""]
BODIES = st.one_of(st.none(), st.sampled_from([b"1", b"\xff\x00", b""]))
REPLACEMENTS = st.tuples(
    st.sampled_from(TABLES), st.sampled_from(NAMES), BODIES, BODIES, st.integers(0, 6).map(float), st.integers(0, 9)
)


def opened(directory: Path) -> RocksStore:
    return RocksStore(directory, "never", SystemClock())


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(replacements=st.lists(REPLACEMENTS, max_size=30))
async def test_any_history_with_restarts_leaves_what_a_dict_would_hold(
    replacements: list[tuple[str, str, bytes | None, bytes | None, float, int]],
) -> None:
    expected: dict[str, dict[str, tuple[bytes, float]]] = {table: {} for table in TABLES}
    with TemporaryDirectory() as directory:
        store = opened(Path(directory))
        for table, name, old, new, due, chance in replacements:
            wins = expected[table].get(name, (None, 0))[0] == old
            assert await store.table(table).replace(name, old, new, due) is wins
            if wins:
                expected[table].pop(name, None)
                expected[table] |= {name: (new, due)} if new is not None else {}
            if chance == 0:
                await store.close()
                store = opened(Path(directory))
        await store.close()
        store = opened(Path(directory))
        for table, documents in expected.items():
            assert await store.table(table).all() == {name: body for name, (body, _) in documents.items()}
            for now in range(7):
                due_names = {name for name, (_, due) in documents.items() if due and due <= now}
                assert set(await store.table(table).due(now, 10)) == due_names
        await store.close()


async def test_what_changed_together_is_there_together_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    table = store.table("s")
    await table.replace("gone", None, b"0", due=3.0)
    assert await table.replace_together([Replacement(name, None, name.encode()) for name in "abc"])
    changes = [Replacement("a", b"a", b"2"), Replacement("gone", b"0", None)]
    assert not await table.replace_together([*changes, Replacement("b", b"x", None)])
    assert await table.replace_together(changes)
    await store.close()
    with pytest.raises(StorageIOError, match="is closed"):
        await table.replace_together([Replacement("a", b"2", b"3")])
    assert await table.get("a") == b"2"
    store = opened(tmp_path)
    assert await store.table("s").all() == {"a": b"2", "b": b"b", "c": b"c"}
    assert await store.table("s").due(9.0, 9) == []
    await store.close()


async def test_how_documents_ended_is_known_after_a_restart_and_goes_with_those_that_come_later(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for at in range(6):
        await store.table("s").replace(f"n{at}", None, b"x", due=5.0)
        assert await store.table("s").finish(f"n{at}", b"x", b"%d" % at, now=10.0 - at, seconds=60.0)
    await store.close()
    store = opened(tmp_path)
    table = store.table("s")
    assert (await table.all(), await table.due(9.0, 9)) == ({}, [])
    assert [await table.outcome(f"n{at}", 66.0) for at in range(6)] == [b"0", b"1", b"2", b"3", None, None]
    assert len(list(store.log.read(b"t\x07s.ended"))) == 6
    for name in ("late", "later"):
        await table.replace(name, None, b"y")
        assert await table.finish(name, b"y", b"end", now=100.0, seconds=60.0)
    await store.flush()
    assert [key[9:] for key, _ in store.log.read(b"t\x07s.ended")] == [b"late", b"later"]
    await store.close()
    with pytest.raises(StorageIOError, match="is closed"):
        await table.finish("late", b"y", b"", 100.0, 60.0)


async def test_a_change_that_cannot_be_written_is_not_applied(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert await store.table("s").replace("a", None, b"1")
    await store.close()
    with pytest.raises(StorageIOError, match="is closed"):
        await store.table("s").replace("a", b"1", b"2")
    assert await store.table("s").get("a") == b"1"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (b"t", b"12345678x", "document row 74 cannot be read: its key names no table"),
        (b"t\x08session", b"12345678x", "document row 740873657373696f6e cannot be read: its key names no table"),
        (b"t\x00x", b"12345678x", "document row 740078 cannot be read: its key names no table"),
        (b"t\x08registrygroup/g", b"1234567", "document 'group/g' of table 'registry' .* it has 7 bytes"),
        (b"t\x08sessions0123456789", b"", "document '012345…' of table 'sessions' .* it has 0 bytes"),
        (b"t\x01s\xff", b"12345678x", "its name is no UTF-8"),
        (b"t\x01\xffs", b"12345678x", "its name is no UTF-8"),
        (b"t\x01sn", b"\x7f\xf8" + bytes(6), "its due time is no number"),
    ],
)
def test_a_damaged_row_is_named_and_no_store_is_opened(tmp_path: Path, key: bytes, value: bytes, named: str) -> None:
    log = CommitLog(tmp_path, Fsync.NEVER, SystemClock())
    log.append([(key, value)])
    log.close_at_once()
    for _ in range(2):  # the directory is let go
        with pytest.raises(StorageIOError, match=f"{named}.*; run `kvcm index verify --repair --drop-unreadable`"):
            opened(tmp_path)
    log = CommitLog(tmp_path, Fsync.NEVER, SystemClock())
    assert [row.key for row in audit_rows(log).bad] == [key]
    drop_rows(log, audit_rows(log).bad)
    log.close_at_once()
    opened(tmp_path).log.close_at_once()


async def test_a_sync_of_the_store_is_one_of_its_log(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await store.table("s").replace("a", None, b"1")
    await store.sync()
    assert store.log._is_synced
    await store.close()


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("Loading") as on_progress:
        on_progress(0, 0)
        on_progress(5, 3)
    assert capfd.readouterr() == ("", "")


# ── The commit log within one process: order, group commit, failure, format ──


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
async def test_closing_writes_unflushed_rows(tmp_path: Path, fsync: Fsync) -> None:
    log = CommitLog(tmp_path, fsync, SystemClock())
    for row in ROWS:
        log.append([row])
    await log.close()
    await log.close()
    assert on_disk(tmp_path) == dict(ROWS)


@pytest.mark.parametrize(("fsync", "call"), [(Fsync.ALWAYS, CommitLog.flush), (Fsync.NEVER, CommitLog.sync)])
async def test_many_waiting_calls_share_few_rounds(
    tmp_path: Path, fsync: Fsync, call: Callable[[CommitLog], Awaitable[None]]
) -> None:
    """Batches appended in one turn of the loop need one round, two if the writer was quicker than the loop, and one
    more where a batch begins beyond the size of a round."""
    log = CommitLog(tmp_path, fsync, FakeClock())

    async def write(number: int) -> None:
        log.append([(b"b%d" % number, b"x")])
        await call(log)
        assert log._synced > number

    await asyncio.gather(*map(write, range(500)))
    assert 1 <= log.rounds < 50
    assert len(list(log.read(b"b"))) == 500
    await log.close()


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_changes_that_no_call_waits_for_are_written_all_the_same(tmp_path: Path, fsync: Fsync) -> None:
    """Also those of several rounds, and those that come while the writer waits for a call."""
    log = CommitLog(tmp_path, fsync, FakeClock())
    log.append([(b"b", b"first")])
    until(lambda: log.rounds == 1)
    for number in range(3):
        log.append([(b"b%d/%d" % (number, each), b"x") for each in range(8192)])
    until(lambda: log.rounds == 4)
    assert len(list(log.read(b"b"))) == 1 + 3 * 8192
    await log.close()


def test_a_release_with_other_options_opens_the_directory(tmp_path: Path) -> None:
    """RocksDB keeps some options of the release that made the directory; they have to fit those of any other."""
    log = CommitLog(tmp_path, Fsync.NEVER, FakeClock())
    log.append([(b"b", b"x")])
    log.close_at_once()
    database = Rdict(str(tmp_path), Options(raw_mode=True))
    assert database[b"b"] == b"x"
    database[b"b"] = b"y"
    database.close()


async def test_an_urgent_change_is_written_with_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks, "_GATHER_SECONDS", 3600.0)
    log = CommitLog(tmp_path, Fsync.NEVER, FakeClock())
    for number in range(3):
        log.append([(b"b%d/read" % number, b"x")])
        assert log.rounds == number
        log.append([(b"b%d/marked" % number, b"x")], is_urgent=True)
        until(partial(has_rounds, log, number + 1))
        assert len(list(log.read(b"b"))) == 2 * number + 2
    await log.close()


def has_rounds(log: CommitLog, count: int) -> bool:
    return log.rounds == count


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_an_idle_log_writes_the_next_change_too(tmp_path: Path, fsync: Fsync) -> None:
    log = CommitLog(tmp_path, fsync, SystemClock())
    for number in range(3):
        until(lambda: log._is_idle)
        assert log._is_synced or fsync is Fsync.NEVER
        log.append([(b"b%d" % number, b"x")])
        until(partial(has_rounds, log, number + 1))
        assert len(list(log.read(b"b"))) == number + 1
    await log.close()


async def test_the_changes_of_a_call_are_one_round(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, Fsync.NEVER, FakeClock())
    for number in range(100):
        for part in (b"session", b"blocks", b"end"):
            log.append([(b"b%d" % number + part, b"x")])
            for _ in range(200):  # other work of the call, in which the writer could begin
                await asyncio.sleep(0)
        await log.flush()
    assert log.rounds <= 110, "one for each call, and one now and then for changes that waited for a tenth of a second"
    await log.close()


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
    """Keep the writer from taking queued batches inside the `with` block."""
    return log._changed


@pytest.fixture
async def failed(tmp_path: Path) -> AsyncIterator[tuple[CommitLog, list[str]]]:
    """A log whose database fails to write, and the failures that it reported."""
    reported: list[str] = []
    log = CommitLog(tmp_path, Fsync.ALWAYS, SystemClock(), on_failure=reported.append)
    log._database.close()  # every write from now on fails
    log.append(ROWS)
    with pytest.raises(StorageIOError, match=r"cannot be written: .*; nothing is accepted any more"):
        await log.flush()
    yield log, reported
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
    log, reported = failed
    calls: list[Callable[[], object]] = [log.admit, lambda: log.append(ROWS)]
    for call in calls:
        with pytest.raises(StorageIOError, match="cannot be written"):
            call()
    with pytest.raises(StorageIOError, match="cannot be written"):
        await log.flush()
    log._thread.join(timeout=30)
    assert reported == [log.failure]


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


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_a_flush_waits_for_a_sync_only_if_every_write_is_to_be_synced(tmp_path: Path, fsync: Fsync) -> None:
    log = CommitLog(tmp_path, fsync, FakeClock())
    for _ in range(3):
        log.append(ROWS)
        await log.flush()
        assert log._is_synced is (fsync is Fsync.ALWAYS)
    await log.close()
    assert log._is_synced


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_a_sync_is_one_under_every_policy(tmp_path: Path, fsync: Fsync) -> None:
    """Also of rows that were flushed before, and also when time stands still."""
    log = CommitLog(tmp_path, fsync, FakeClock())
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


async def test_closing_answers_a_sync(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, Fsync.NEVER, FakeClock())
    with held(log):
        log.append(ROWS)
        waiting = asyncio.ensure_future(log.sync())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(log.close())
    await asyncio.gather(waiting, closing)
    assert on_disk(tmp_path) == dict(ROWS)


async def test_everysec_syncs_in_the_first_round_after_a_second(tmp_path: Path) -> None:
    """Rounds follow each other, so the answer of the third shows that the second has made its sync."""
    clock = FakeClock()
    log = CommitLog(tmp_path, Fsync.EVERYSEC, clock)
    for _ in range(3):
        clock.time += 1.0
        log.append(ROWS)
        await log.flush()
    assert log._synced_at >= clock.time - 1.0
    await log.close()


def test_everysec_syncs_also_when_nothing_more_is_written(tmp_path: Path) -> None:
    clock = FakeClock()
    log = CommitLog(tmp_path, Fsync.EVERYSEC, clock)
    log.append(ROWS)
    until(lambda: log.rounds == 1)
    assert not log._is_synced
    clock.time += 1.0
    until(lambda: log._is_synced)
    log.close_at_once()


async def test_operations_are_timed(log: CommitLog) -> None:
    log.append(ROWS)
    await log.flush()
    assert {op: times.read().counts[-1] for op, times in log.times.items()} == {"write": 1, "sync": 1, "flush": 1}


async def test_written_rows_do_not_stay_in_memory(tmp_path: Path) -> None:
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


# ── What the commit log promises a process that dies ──


def start_writer(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, rocks_writer.__file__, str(directory), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def latest(lines: Iterable[str]) -> dict[int, int]:
    """The last number that each task said to be durable."""
    return {int(task): int(number) for task, number in (line.split() for line in lines if line.endswith("\n"))}


def stored(directory: Path) -> dict[int, int]:
    """The number that each task's rows hold; all rows of a task must hold the same."""
    log = CommitLog(directory, Fsync.NEVER, SystemClock())
    rows = dict(log.read(b"b"))
    log.close_at_once()
    numbers = {}
    for task in {key[1] for key in rows}:
        found = [rows.get(rocks_writer.row_key(task, row)) for row in range(rocks_writer.ROWS)]
        assert len(set(found)) == 1, f"half a batch of task {task}"
        numbers[task] = int.from_bytes(rows[rocks_writer.row_key(task, 0)][:8])
    return numbers


def killed_after(directory: Path, fsync: str, count: int) -> list[str]:
    """What a writer said that was killed when it had said so many lines."""
    with start_writer(directory, fsync) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(count)]
        writer.kill()
        return lines + writer.stdout.readlines()


@pytest.mark.parametrize(
    "fsync", ["always", *(pytest.param(each, marks=pytest.mark.ci) for each in ("everysec", "never"))]
)
def test_a_killed_process_loses_nothing_that_was_flushed_and_leaves_no_half_batch(tmp_path: Path, fsync: str) -> None:
    random = Random(fsync)
    for attempt in range(2):
        directory = tmp_path / str(attempt)
        said = latest(killed_after(directory, fsync, random.randrange(1, 400)))
        found = stored(directory)
        assert all(found.get(task, 0) >= number for task, number in said.items()), (said, found)


@pytest.mark.ci
def test_writing_goes_on_over_many_kills(tmp_path: Path) -> None:
    for count in (150, 20, 90):
        said = latest(killed_after(tmp_path, "always", count))
        found = stored(tmp_path)
        assert all(found[task] >= number for task, number in said.items())


@pytest.mark.ci
def test_a_full_disk_stops_the_log_and_keeps_flushed_rows(tmp_path: Path) -> None:
    with start_writer(tmp_path, "always", str(300_000)) as writer:
        output, _ = writer.communicate(timeout=110)
    *lines, last = output.splitlines(keepends=True)
    assert last.startswith(f"failed {tmp_path} cannot be written: ")
    assert "free space" in last
    said = latest(line for line in lines if not line.startswith("failed"))
    assert set(said) == set(range(rocks_writer.TASKS))
    found = stored(tmp_path)
    assert all(found[task] >= number for task, number in said.items()), (said, found)


@pytest.mark.ci
def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    with start_writer(tmp_path, "always") as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        second = subprocess.run(
            [sys.executable, rocks_writer.__file__, str(tmp_path), "always"], capture_output=True, text=True, timeout=60
        )
        writer.kill()
    assert second.stdout.startswith(f"failed {tmp_path} is in use by another process")
    assert stored(tmp_path)
