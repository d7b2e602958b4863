"""Documents in RocksDB outlive the store that wrote them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.index.backends.rocks_audit import drop_rows, look_at_rows
from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks.log import CommitLog, Fsync
from kvcm.store.rocks.progress import shown_progress
from kvcm.store.rocks.store import RocksStore
from kvcm.store.store import Replacement

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


async def test_a_table_is_the_same_every_time_and_counts_its_changes(tmp_path: Path) -> None:
    store = opened(tmp_path)
    table = store.table("sessions", shard_count=16)
    assert store.table("sessions") is table
    version = await table.version()
    assert await table.replace("a", None, b"1")
    assert not await table.replace("a", None, b"2")
    assert await table.get("a") == b"1"
    assert await table.version() > version
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
        assert await store.table("s").conclude(f"n{at}", b"x", b"%d" % at, now=10.0 - at, seconds=60.0)
    await store.close()
    store = opened(tmp_path)
    table = store.table("s")
    assert (await table.all(), await table.due(9.0, 9)) == ({}, [])
    assert [await table.outcome(f"n{at}", 66.0) for at in range(6)] == [b"0", b"1", b"2", b"3", None, None]
    assert len(list(store.log.read(b"t\x07s.ended"))) == 6
    for name in ("late", "later"):
        await table.replace(name, None, b"y")
        assert await table.conclude(name, b"y", b"end", now=100.0, seconds=60.0)
    await store.flush()
    assert [key[9:] for key, _ in store.log.read(b"t\x07s.ended")] == [b"late", b"later"]
    await store.close()
    with pytest.raises(StorageIOError, match="is closed"):
        await table.conclude("late", b"y", b"", 100.0, 60.0)


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
    assert [row.key for row in look_at_rows(log).bad] == [key]
    drop_rows(log, look_at_rows(log).bad)
    log.close_at_once()
    opened(tmp_path).log.close_at_once()


async def test_a_sync_of_the_store_is_one_of_its_log(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await store.table("s").replace("a", None, b"1")
    await store.sync()
    assert store.log._is_synced
    await store.close()


def test_progress_is_silent_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("Loading") as on_progress:
        on_progress(0, 0)
        on_progress(5, 3)
    assert capfd.readouterr() == ("", "")
