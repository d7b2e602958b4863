"""Documents in RocksDB outlive the store that wrote them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks.progress import shown_progress
from kvcm.store.rocks.store import RocksStore

TABLES = ["sessions", "s", "leases"]
NAMES = ["a", "b", "ä/ö", ""]
BODIES = st.one_of(st.none(), st.sampled_from([b"1", b"\xff\x00", b""]))
REPLACEMENTS = st.tuples(
    st.sampled_from(TABLES), st.sampled_from(NAMES), BODIES, BODIES, st.integers(0, 6).map(float), st.integers(0, 9)
)


def opened(directory: Path) -> RocksStore:
    return RocksStore(directory, "never", SystemClock())


@settings(max_examples=40, deadline=None, derandomize=True)
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


async def test_a_change_that_cannot_be_written_is_not_applied(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert await store.table("s").replace("a", None, b"1")
    await store.close()
    with pytest.raises(StorageIOError, match="is closed"):
        await store.table("s").replace("a", b"1", b"2")
    assert await store.table("s").get("a") == b"1"


def test_progress_is_silent_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("Loading") as on_progress:
        on_progress(0, 0)
        on_progress(5, 3)
    assert capfd.readouterr() == ("", "")
