"""Damage of the embedded store: it is noticed and counted at the start, and a repair keeps everything readable.

The stores were filled by real processes; the damage is real: flipped bits, zeroed pages, truncated and missing files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
import store_maker
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdict import WriteBatch
from thoroughness import examples

from kvcm.components import open_metadata, repair_local
from kvcm.config import Settings, load_settings
from kvcm.doctor.host import check_metadata_directory
from kvcm.index.backends.rocks import BLOCKS, READS, BlockSalvage, load_index
from kvcm.index.codec import encode_payload
from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import unmixed
from kvcm.model.locations import BlockRun, LocationStatus
from kvcm.store import rocks_check
from kvcm.store.rocks import DOCUMENTS, CommitLog, Fsync, RocksStore, decode_row, open_database
from kvcm.store.rocks_check import MARK, DamagedStoreError
from kvcm.store.rocks_copy import COPY
from kvcm.store.rocks_repair import Salvage, read_repairs, repair_database, survey_database
from kvcm.store.rocks_wal import BATCH_HEADER, BadBytes, LogRecord, encode_log, read_log

pytestmark = pytest.mark.timeout(600)
ENDS = ("killed", "flushed", "closed")
DAMAGE = ("flip", "zero", "cut", "gone")


@dataclass(frozen=True)
class Held:
    """What a store holds: records of blocks and documents of the registry."""

    blocks: dict[int, bytes]
    documents: dict[str, bytes]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store for each end of a process."""
    directory = tmp_path_factory.mktemp("stores")
    for end in ENDS:
        command = [sys.executable, store_maker.__file__, str(directory / end), end]
        subprocess.run(command, check=True, timeout=120)
    return directory


def acknowledged(stores: Path, end: str) -> Held:
    """What the process that filled a store was told to be stored."""
    found = json.loads((stores / f"{end}.json").read_text())
    blocks = {int(key): bytes.fromhex(value) for key, value in found["blocks"].items()}
    return Held(blocks, {name: bytes.fromhex(value) for name, value in found["documents"].items()})


async def held(directory: Path) -> Held:
    """What a start finds in a store."""
    store = RocksStore(directory, "never", SystemClock())
    try:
        backend = load_index(store).backend(store_maker.UID)
        keys = [key async for batch in backend.scan(1000) for key in batch]
        records = await backend.get_many(keys)
        plain = zip(unmixed(keys), records, strict=True)
        blocks = {key: encode_payload(each) for key, each in plain if each is not None}
        return Held(blocks, dict(await store.table("registry").all()))
    finally:
        await store.close()


def database_of(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = (path for pattern in patterns for path in directory.glob(pattern))
    return sorted(path for path in found if path.is_file() and path.stat().st_size)


def harm(path: Path, how: str, at: int) -> None:
    """Damage a file at a byte, at a bit that follows from it."""
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flip":
        data[at] ^= 1 << at % 8
    elif how == "zero":
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    else:
        del data[at:]
    path.write_bytes(data)


def refusal(directory: Path) -> str:
    """Why a start is refused, "" if it is not."""
    try:
        asyncio.run(opened_as_a_manager(directory, "refuse"))
    except StorageIOError as error:
        return str(error)
    return ""


async def opened_as_a_manager(directory: Path, on_damage: str) -> None:
    given = [f"kvcm.registry_storage.uri=local://{directory}", f"kvcm.store.on_damage={on_damage}"]
    metadata = await open_metadata(load_settings(None, given, {}, lambda _text: None), SystemClock(), "node")
    await metadata.close()


def check_repaired(directory: Path, before: Held) -> None:
    """Repair, and compare what is there with all that was acknowledged: nothing is wrong, what is gone is counted."""
    found = repair_database(directory, Salvage(), 0.0)
    after = asyncio.run(held(directory))
    assert after.documents == before.documents, "the registry has a copy"
    lost = before.blocks.keys() - after.blocks.keys()
    assert found is not None
    outdated = {key for key, value in after.blocks.items() if before.blocks.get(key) != value}
    if found.doubtful or found.lost_changes or found.reasons:
        assert len(outdated) <= found.doubtful + found.lost_changes or found.reasons
    else:
        assert not outdated
    assert found.lost_blocks is not None
    assert found.lost_blocks >= len(lost) - len(outdated)
    assert bool(lost or outdated) <= found.is_incomplete
    assert [note.lost_blocks for note in read_repairs(directory)] == [found.lost_blocks]


def check_damaged(stores: Path, end: str, harmed: Callable[[Path], Path]) -> None:
    """A start is refused with names and numbers and a repair helps, or nothing that was acknowledged is missing."""
    with TemporaryDirectory() as temporary:
        directory = Path(shutil.copytree(stores / end, Path(temporary) / "m"))
        before = acknowledged(stores, end)
        path = harmed(directory)
        refused = refusal(directory)
        if not refused:
            assert asyncio.run(held(directory)) == before
            return
        assert "is damaged" in refused
        assert "`kvcm index repair`" in refused
        assert "blocks are gone" in refused or "changes are missing" in refused
        if path.suffix in {".log", ".sst"}:
            assert path.stem in refused or "its log is missing" in refused
        check_repaired(directory, before)


KINDS = {"log": ("*.log",), "table": ("*.sst",), "manifest": ("MANIFEST-*",), "current": ("CURRENT",)}
KINDS |= {"mark": (MARK,), "copy": (COPY,)}


@pytest.mark.ci
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("end", ENDS)
def test_damage_of_a_file_is_counted_and_repaired(stores: Path, end: str, kind: str, how: str) -> None:
    paths = database_of(stores / end, KINDS[kind])
    if not paths:
        pytest.skip("a store that was closed has an empty log")

    def harmed(directory: Path) -> Path:
        path = directory / paths[-1].name
        harm(path, how, path.stat().st_size // 3)
        return path

    check_damaged(stores, end, harmed)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    end=st.sampled_from(ENDS),
    kind=st.sampled_from([*KINDS, "log", "table"]),
    which=st.integers(0, 99),
    how=st.sampled_from(DAMAGE),
    share=st.floats(0, 1, exclude_max=True),
)
def test_any_damage_is_noticed_or_harms_nothing(
    stores: Path, end: str, kind: str, which: int, how: str, share: float
) -> None:
    paths = database_of(stores / end, KINDS[kind])
    if not paths:
        return

    def harmed(directory: Path) -> Path:
        path = directory / paths[which % len(paths)].name
        harm(path, how, int(path.stat().st_size * share))
        return path

    check_damaged(stores, end, harmed)


@pytest.mark.parametrize("end", ENDS)
def test_a_store_without_damage_opens_again_and_again(stores: Path, tmp_path: Path, end: str) -> None:
    directory = Path(shutil.copytree(stores / end, tmp_path / "m"))
    for _ in range(3):
        assert asyncio.run(held(directory)) == acknowledged(stores, end)


def test_nothing_is_repaired_of_a_store_without_damage(stores: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stores / "flushed", tmp_path / "m"))
    before = sorted(path.name for path in directory.iterdir())
    found = survey_database(directory)
    assert not found.is_incomplete
    assert not found.holes + found.reasons
    assert sorted(path.name for path in directory.iterdir()) == before


# ── A torn tail is no damage ──


def log_of(directory: Path) -> Path:
    return max(directory.glob("*.log"), key=lambda path: int(path.stem))


def records_of(path: Path) -> list[LogRecord]:
    return [item for item in read_log(path.read_bytes()) if isinstance(item, LogRecord)]


def booted_since(directory: Path) -> None:
    """Make the mark that of a host that booted since, as after a power cut."""
    path = directory / MARK
    data = bytearray(path.read_bytes())
    for at in (0, 4096):
        data[at : at + 16] = bytes(range(16))
        end = at + rocks_check._MARKED.size
        data[end : end + 4] = crc32(data[at:end]).to_bytes(4)
    path.write_bytes(data)


@pytest.mark.parametrize("torn", [1, 7, 100, 5000])
def test_a_write_that_a_kill_cut_off_is_no_damage(stores: Path, tmp_path: Path, torn: int) -> None:
    directory = Path(shutil.copytree(stores / "killed", tmp_path / "m"))
    path = log_of(directory)
    data = path.read_bytes()
    batch = records_of(path)[-1].batch
    at = len(data) - len(batch) - 7  # the last record is a block's part, so that its encoding can be put behind it
    longer = b"".join(encode_log([each.batch for each in records_of(path)] + [batch]))
    assert longer.startswith(data)
    assert at > 0
    path.write_bytes(longer[: len(data) + min(torn, len(longer) - len(data) - 1)])
    assert asyncio.run(held(directory)) == acknowledged(stores, "killed")
    assert read_repairs(directory) == []


def test_what_was_not_synced_is_no_damage_after_a_power_cut(stores: Path, tmp_path: Path) -> None:
    """The log ends where it was synced last, or has a hole behind that with whole records after it."""
    directory = Path(shutil.copytree(stores / "killed", tmp_path / "m"))
    path = log_of(directory)
    synced = rocks_check.read_marked(directory)
    assert synced is not None
    unsynced = [each for each in records_of(path) if each.sequence > synced.synced]
    assert len(unsynced) > 3, "the process was killed within a second of its last sync"
    data = bytearray(path.read_bytes())
    data[unsynced[1].offset + 20] ^= 1
    path.write_bytes(data)
    assert "changes are missing" in refusal(directory)
    booted_since(directory)
    log = CommitLog(directory, Fsync.NEVER, SystemClock())
    assert log._sequence == unsynced[1].sequence - 1
    log.close_at_once()
    assert refusal(directory) == ""


def test_what_was_synced_is_missed_after_a_power_cut(tmp_path: Path) -> None:
    """A later record knows that an earlier one was synced, also where the mark is older than both."""
    log = CommitLog(tmp_path / "m", Fsync.ALWAYS, SystemClock())
    for number in range(5):
        log.append([(b"x%d" % number, bytes(100))])
        asyncio.run(log.sync())
    shutil.copytree(tmp_path / "m", tmp_path / "n")
    log.close_at_once()
    path = log_of(tmp_path / "n")
    data = bytearray(path.read_bytes())
    data[records_of(path)[2].offset + 20] ^= 1
    path.write_bytes(data)
    (tmp_path / "n" / MARK).unlink()
    assert "cannot be read at byte" in refusal(tmp_path / "n")


# ── Stores of releases without a mark ──


def of_an_older_release(directory: Path) -> None:
    """Fill a store as releases before the mark did, and leave it as a killed process does."""
    database = open_database(directory / "first")
    for number in range(200):
        batch = WriteBatch(raw_mode=True)
        for row in range(10):
            batch.put(b"x%04d" % (number * 10 + row), bytes(100))
        database.write(batch)
        if number == 100:
            database.flush()
    shutil.copytree(directory / "first", directory / "m")
    database.close()


def rows_of(directory: Path) -> int:
    log = CommitLog(directory, Fsync.NEVER, SystemClock())
    try:
        return sum(1 for _ in log.read(b"x"))
    finally:
        log.close_at_once()


def test_a_store_of_an_older_release_opens_and_its_damage_is_noticed(tmp_path: Path) -> None:
    of_an_older_release(tmp_path)
    shutil.copytree(tmp_path / "m", tmp_path / "n")
    assert rows_of(tmp_path / "m") == 2000
    path = log_of(tmp_path / "n")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "10 changes are missing" in refusal(tmp_path / "n")
    found = repair_database(tmp_path / "n", Salvage(), 0.0)
    assert found is not None
    assert (found.lost_changes, found.lost_blocks) == (10, None)
    assert rows_of(tmp_path / "n") == 1990


def test_an_older_release_may_write_in_between(stores: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stores / "flushed", tmp_path / "m"))
    database = open_database(directory)
    removed = next(iter(database.keys(from_key=BLOCKS)))
    database.delete(removed)
    database.flush()
    database.close()
    database = open_database(directory)
    database.close()
    assert len(asyncio.run(held(directory)).blocks) == len(acknowledged(stores, "flushed").blocks) - 1


# ── Rows in the range of a damaged block ──


def test_newer_rows_beside_damage_are_certain_and_older_ones_are_doubtful(tmp_path: Path) -> None:
    database = open_database(tmp_path / "m")
    keys = [BLOCKS + (7).to_bytes(4) + number.to_bytes(8) for number in range(900)]

    def put(rows: list[bytes], value: bytes) -> None:
        for key in rows:
            database[key] = value + os.urandom(100)
        database.flush()

    put(keys[0::3], b"oldest")
    put(keys[1::3], b"damaged")
    put(keys[2::3] + keys[0:300:3], b"newest")
    harmed = sorted((tmp_path / "m").glob("*.sst"))[1]
    database.close()
    harm(harmed, "flip", harmed.stat().st_size // 4)
    found = repair_database(tmp_path / "m", Salvage(), 0.0)
    assert found is not None
    log = CommitLog(tmp_path / "m", Fsync.NEVER, SystemClock())
    rows = dict(log.read(BLOCKS))
    log.close_at_once()
    assert set(keys[0::3] + keys[2::3]) <= rows.keys()
    assert all(rows[key].startswith(b"newest") for key in keys[2::3] + keys[0:300:3])
    gone = set(keys) - rows.keys()
    assert gone < set(keys[1::3])
    [hole] = found.holes
    assert found.doubtful == sum(hole.after < key < hole.before for key in keys[300::3])
    assert f"of {found.doubtful} blocks an older record is kept" in "\n".join(found.sentences())


def test_a_document_is_not_taken_from_before_its_damaged_version(tmp_path: Path) -> None:
    """A key or an account that was removed must not come back, a group may."""
    database = open_database(tmp_path / "m")
    prefix = DOCUMENTS + b"\x08registry"
    for value in (b"old", b"new"):
        for number in range(200):
            for kind in (b"apikey", b"group"):
                database[prefix + b"%s/%03d" % (kind, number)] = bytes(8) + value + os.urandom(100)
        database.flush()
    database.close()
    harmed = sorted((tmp_path / "m").glob("*.sst"))[1]
    harm(harmed, "zero", harmed.stat().st_size // 2)
    repair_database(tmp_path / "m", Salvage(), 0.0)
    log = CommitLog(tmp_path / "m", Fsync.NEVER, SystemClock())
    rows = [decode_row(*row) for row in log.read(prefix)]
    log.close_at_once()
    old = {row.name.partition("/")[0] for row in rows if row.document.startswith(b"old")}
    assert old <= {"group"}
    assert len(rows) < 400


def test_packed_storages_are_verified_after_a_repair(tmp_path: Path) -> None:
    async def filled() -> None:
        store = RocksStore(tmp_path / "m", "never", SystemClock())
        packed, plain = store_maker.record("a"), store_maker.record("b")
        [place] = packed.locations
        chunk = place.chunk.replace(b"size=10", b"size=10&blkid=3")
        packed = packed._replace(locations=(place._replace(storage="packed", chunk=chunk),))
        backend = load_index(store).backend(1)
        await backend.write_many([store_maker.Change(1, None, packed), store_maker.Change(2, None, plain)])
        for name, its in (("begun", chunk), ("named", place.chunk)):
            its_place = place._replace(storage=name, status=LocationStatus.WRITING, chunk=b"")
            assert backend.begin(BlockRun([len(its)], None, 0, its_place, [its])) is not None
        await store.close()

    asyncio.run(filled())
    (tmp_path / "m" / "CURRENT").unlink()
    repair_database(tmp_path / "m", BlockSalvage(), 0.0)
    store = RocksStore(tmp_path / "m", "never", SystemClock())
    assert list(asyncio.run(store.table("unverified").all())) == ["begun", "packed"]
    store.log.close_at_once()


# ── Repairs ──


class KilledError(BaseException):
    """Ends a repair where a kill would."""


@pytest.mark.ci
@pytest.mark.parametrize("crash", range(0, 30, 2))
def test_a_repair_that_is_killed_is_completed_by_the_next(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: int
) -> None:
    directory = Path(shutil.copytree(stores / "flushed", tmp_path / "m"))
    path = database_of(directory, ("*.sst",))[0]
    harm(path, "flip", path.stat().st_size // 2)
    expected = survey_database(directory)
    left, rename = [crash], Path.rename

    def cut_off(source: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KilledError
        return rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut_off)
        with suppress(KilledError):
            repair_database(directory, Salvage(), 0.0)
    if left[0] < 0:
        assert refusal(directory)
        repair_database(directory, Salvage(), 0.0)
    assert len(asyncio.run(held(directory)).blocks) == expected.blocks
    assert [note.lost_blocks for note in read_repairs(directory)] == [expected.lost_blocks]
    damaged = {path.name for path in (directory / "damaged-1").iterdir()}
    assert {path.name for path in database_of(stores / "flushed", ("*.sst", "CURRENT"))} <= damaged
    assert not (directory / "repair").exists()


async def test_a_start_repairs_where_that_is_set(stores: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stores / "killed", tmp_path / "m"))
    path = log_of(directory)
    harm(path, "flip", path.stat().st_size // 2)
    with pytest.raises(DamagedStoreError, match=r"changes are missing; [1-9]\d* blocks are gone, .* can be read"):
        await opened_as_a_manager(directory, "refuse")
    await opened_as_a_manager(directory, "repair")
    [note] = read_repairs(directory)
    assert note.lost_blocks
    assert len((await held(directory)).blocks) == len(acknowledged(stores, "killed").blocks) - note.lost_blocks


async def test_what_is_gone_is_in_the_metadata_and_in_doctor(stores: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stores / "killed", tmp_path / "m"))
    path = log_of(directory)
    harm(path, "flip", path.stat().st_size // 2)
    given = [f"kvcm.registry_storage.uri=local://{directory}"]
    settings = load_settings(None, given, {}, lambda _text: None)
    assert "is damaged" in doctors(settings)
    repair_local(directory, SystemClock())
    metadata = await open_metadata(settings, SystemClock(), "node")
    lost = metadata.lost
    assert lost["blocks"] > 0
    assert lost["changes"] > lost["blocks"]
    assert lost["documents"] == 0
    await metadata.close()
    assert f"gone are: {lost['blocks']} blocks, 0 documents, {lost['changes']} changes" in doctors(settings)
    assert "is damaged" not in doctors(settings)


def doctors(settings: Settings) -> str:
    return "\n".join(finding.found for finding in check_metadata_directory(settings))


def test_a_repair_needs_the_directory_for_itself(stores: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stores / "closed", tmp_path / "m"))
    log = CommitLog(directory, Fsync.NEVER, SystemClock())
    with pytest.raises(StorageIOError, match="is in use by another process"):
        repair_database(directory, Salvage(), 0.0)
    log.close_at_once()


# ── The log's format ──


@given(sizes=st.lists(st.integers(12, 80_000), max_size=12), seed=st.integers(0, 255))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_a_log_is_read_as_it_was_written(sizes: list[int], seed: int) -> None:
    batches = [BATCH_HEADER.pack(at + 1, 1) + bytes([seed]) * (size - 12) for at, size in enumerate(sizes)]
    data = b"".join(encode_log(batches))
    assert [item.batch for item in read_log(data) if isinstance(item, LogRecord)] == batches
    if data:
        broken = bytearray(data)
        broken[seed * len(data) // 256] ^= 1 << seed % 8
        items = list(read_log(bytes(broken)))
        found = [item.batch for item in items if isinstance(item, LogRecord)]
        assert len(found) >= len(batches) - 1
        assert set(found) <= set(batches)
        assert len(found) == len(batches) or any(isinstance(item, BadBytes) for item in items)


def test_rocksdb_writes_the_log_that_we_write(stores: Path) -> None:
    data = log_of(stores / "flushed").read_bytes()
    assert b"".join(encode_log(each.batch for each in records_of(log_of(stores / "flushed")))) == data
    assert any(READS in each.batch or BLOCKS in each.batch for each in records_of(log_of(stores / "flushed")))
