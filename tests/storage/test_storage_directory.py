"""The open storages of a manager: opened, replaced, enabled, disabled, closed; and their threads."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from os.path import normpath
from pathlib import Path

import pytest
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.connectors.transfer.file import FileMover
from kvcm.connectors.transfer.mover import TransferItem
from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError, UnsupportedError
from kvcm.model.mooncake import AllowedHosts, HostRule
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part, StorageBackend
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.storage.prober import Prober
from kvcm.storage.threads import StorageThreads
from kvcm.store.memory import MemoryStore
from kvcm.store.numbers import DeletionNumbers

DUMMY = StorageConfig("d", DummyStorageSpec())


def file_config(root: Path, name: str = "f", keys_per_file: int = 1) -> StorageConfig:
    return StorageConfig(name, NfsStorageSpec(str(root), keys_per_file))


def opened(directory: StorageDirectory, config: StorageConfig) -> StorageBackend:
    directory.open(config)
    backend = directory.backend(config.global_unique_name)
    assert backend is not None
    return backend


@pytest.fixture
def directory() -> StorageDirectory:
    return StorageDirectory("cluster")


def test_a_disabled_storage_is_open_and_not_available(directory: StorageDirectory) -> None:
    """Deletions go on while reads and writes stop."""
    directory.open(DUMMY)
    directory.set_enabled("d", enabled=False)
    assert directory.rank("d") is None
    assert directory.type_of("d") is StorageType.ST_DUMMY
    assert directory.backend("d") is not None
    directory.set_enabled("d", enabled=True)
    assert directory.rank("d") is not None


def test_a_storage_that_is_configured_as_unavailable_opens_disabled(directory: StorageDirectory) -> None:
    directory.open(StorageConfig("d", DummyStorageSpec(), is_available=False))
    assert directory.rank("d") is None
    assert directory.backend("d") is not None


def test_every_change_is_a_new_generation(directory: StorageDirectory) -> None:
    """Each invalidates the answer caches."""
    generations = [directory.generation]
    for change in (
        lambda: directory.open(DUMMY),
        lambda: directory.set_enabled("d", enabled=False),
        lambda: directory.set_enabled("d", enabled=True),
        lambda: directory.open(DUMMY),
        lambda: directory.close("d"),
        lambda: directory.open(DUMMY),
        directory.close_all,
    ):
        change()
        generations.append(directory.generation)
    assert generations == sorted(set(generations))


def test_closing_forgets(directory: StorageDirectory) -> None:
    directory.open(DUMMY)
    directory.close("d")
    assert (directory.rank("d"), directory.type_of("d"), directory.backend("d")) == (None, None, None)


@pytest.mark.parametrize(
    "spec",
    [MooncakeStorageSpec("h", "m", "tcp", "", "e"), ThreeFSStorageSpec("c", "/m", "r"), TairMemPoolStorageSpec("d")],
    ids=lambda spec: type(spec).__name__,
)
def test_a_type_without_an_opener_is_refused_with_what_there_is(spec: StorageSpec) -> None:
    known = (StorageType.ST_NFS, StorageType.ST_DUMMY)
    directory = StorageDirectory("cluster", openers={each: OPENERS[each] for each in known})
    config = StorageConfig("s", spec)
    with pytest.raises(UnsupportedError, match=f"{config.storage_type.kind}.*dummy.*file"):
        directory.open(config)
    assert directory.backend("s") is None


def test_faster_media_rank_lower(directory: StorageDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for storage_type in (StorageType.ST_TAIRMEMPOOL, StorageType.ST_MOONCAKE, StorageType.ST_3FS):
        monkeypatch.setitem(OPENERS, storage_type, lambda config, _: DummyStorage(config.global_unique_name, "/", 1))
    specs = {"pool": TairMemPoolStorageSpec(domain="d"), "mc": MooncakeStorageSpec(), "fs": ThreeFSStorageSpec()}
    configs = [*(StorageConfig(name, spec) for name, spec in specs.items()), file_config(tmp_path, "nfs")]
    for config in configs:
        directory.open(config)
    ranks = [directory.rank(config.global_unique_name) or 0 for config in configs]
    assert ranks == sorted(set(ranks))


# Replacing.


def test_a_replacement_knows_what_the_old_one_knew(directory: StorageDirectory, tmp_path: Path) -> None:
    old = opened(directory, file_config(tmp_path / "old", keys_per_file=8))
    uris = asyncio.run(old.allocate(Allocation("i", "aa", [Part("kv", key, 8) for key in range(2)])))
    path = Path(LocationUri.parse(uris[0]).path)
    new = opened(directory, file_config(tmp_path / "new", keys_per_file=8))
    assert new is not old
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 16)
    assert asyncio.run(new.delete(uris[:1])) == [None]
    assert path.exists()
    assert asyncio.run(new.delete(uris[1:])) == [None]
    assert not path.exists()


def test_a_replacement_that_cannot_be_opened_changes_nothing(directory: StorageDirectory, tmp_path: Path) -> None:
    directory.open(file_config(tmp_path / "old"))
    before = (directory.backend("f"), directory.rank("f"), directory.generation)
    for bad in ("relative/path", "/proc/nowhere/at/all"):
        with pytest.raises(KvcmError):
            directory.open(file_config(Path(bad)))
    assert (directory.backend("f"), directory.rank("f"), directory.generation) == before


# Roots.


@pytest.mark.parametrize("inside", ["", "a", "a/b"])
def test_roots_inside_the_allowed_ones_open(tmp_path: Path, inside: str) -> None:
    directory = StorageDirectory("c", [tmp_path / "elsewhere", tmp_path / "ok"])
    directory.open(file_config(tmp_path / "ok" / inside))
    assert (tmp_path / "ok" / inside).is_dir()


@pytest.mark.parametrize("outside", ["", "okay", "ok/../secret", "link/x"])
def test_roots_outside_the_allowed_ones_are_refused(tmp_path: Path, outside: str) -> None:
    """Also those that only look as if they were inside."""
    (tmp_path / "ok").mkdir()
    (tmp_path / "ok" / "way-out").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    directory = StorageDirectory("c", [tmp_path / "ok"])
    for root in (tmp_path / outside, tmp_path / "ok" / "way-out" / "secret"):
        with pytest.raises(InvalidArgumentError, match="outside the allowed roots"):
            directory.open(file_config(root))
        assert not root.is_dir() or root == tmp_path
    directory.open(DUMMY)


def test_no_allowed_root_allows_no_path_storage(tmp_path: Path) -> None:
    for spec in (NfsStorageSpec(str(tmp_path)), ThreeFSStorageSpec("", str(tmp_path), "r")):
        with pytest.raises(InvalidArgumentError, match="allowed_roots"):
            StorageDirectory("c", []).open(StorageConfig("s", spec))


@pytest.mark.parametrize("spec_class", [ThreeFSStorageSpec, VcnsThreeFSStorageSpec])
def test_roots_of_3fs_must_lie_in_the_allowed_ones_as_well(
    tmp_path: Path, spec_class: type[ThreeFSStorageSpec | VcnsThreeFSStorageSpec]
) -> None:
    """Also those that a link below the mountpoint leads out of them."""
    (tmp_path / "ok").mkdir()
    (tmp_path / "ok" / "way-out").symlink_to(tmp_path)
    directory = StorageDirectory("c", [tmp_path / "ok"])
    for mountpoint, root_dir in ((tmp_path, "r"), (tmp_path / "ok", "way-out/r")):
        with pytest.raises(InvalidArgumentError, match="outside the allowed roots"):
            directory.open(StorageConfig("s", spec_class("", str(mountpoint), root_dir)))
    directory.open(StorageConfig("s", spec_class("", str(tmp_path / "ok"), "r")))
    assert [path.name for path in (tmp_path / "ok" / "r").iterdir()] == ["c"]


# Hosts.


def test_hosts_of_mooncake_storages_must_be_allowed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check precedes any open, covers every field, and applies also where all other hosts are allowed."""
    opened: list[StorageConfig] = []

    def opener(config: StorageConfig, _: str) -> DummyStorage:
        opened.append(config)
        return DummyStorage(config.global_unique_name, "/", 1)

    def config(master: str, metadata: str = "P2PHANDSHAKE") -> StorageConfig:
        return StorageConfig("mc", MooncakeStorageSpec(master_service_entry=master, metadata_connstring=metadata))

    openers = {StorageType.ST_MOONCAKE: opener}
    directory = StorageDirectory("c", None, openers, allowed_hosts=AllowedHosts([HostRule.parse("10.0.0.0/8")]))
    directory.open(config("10.0.0.1:50051"))
    for bad in (config("11.0.0.1:50051"), config("10.0.0.1:50051", "http://11.0.0.1/x")):
        with pytest.raises(InvalidArgumentError, match=r"allowed hosts: 10\.0\.0\.0/8"):
            directory.open(bad)
    anywhere = StorageDirectory("c", None, openers)
    anywhere.open(config("11.0.0.1:50051"))
    with pytest.raises(InvalidArgumentError, match="metadata service"):
        anywhere.open(config("169.254.169.254:80"))
    assert [spec.spec for spec in opened] == [config("10.0.0.1:50051").spec, config("11.0.0.1:50051").spec]


# What a `file` storage opens.


@pytest.mark.parametrize("root", ["", ".", "nfs", "./nfs", "~/nfs"])
def test_a_root_must_be_absolute(directory: StorageDirectory, root: str) -> None:
    with pytest.raises(InvalidArgumentError, match="absolute"):
        directory.open(StorageConfig("f", NfsStorageSpec(root)))


def test_a_root_that_is_a_file_is_refused(directory: StorageDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageIOError, match="root_path"):
            directory.open(file_config(root))


# What a 3FS storage opens.


def threefs(mountpoint: str, root_dir: str, *, check: bool = False) -> StorageConfig:
    return StorageConfig("s", ThreeFSStorageSpec("", mountpoint, root_dir), check_storage_available_when_open=check)


@pytest.mark.parametrize("mountpoint", ["", ".", "mnt", "~/mnt"])
def test_a_mountpoint_must_be_absolute(directory: StorageDirectory, mountpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="mountpoint"):
        directory.open(threefs(mountpoint, "r"))


def test_a_mountpoint_is_a_directory_and_never_made(directory: StorageDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, check in (("gone", True), ("file", False), ("file", True)):
        with pytest.raises(StorageIOError, match=r"mountpoint .*is 3FS mounted on this host"):
            directory.open(threefs(str(tmp_path / name), "r", check=check))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# A 3FS that engines alone have mounted.


async def elsewhere(tmp_path: Path, *, keys_per_file: int = 1, touch: bool = False) -> StorageDirectory:
    """Configure one without the check, and probe it."""
    storages = StorageDirectory("cluster")
    storages.slot_reuse.numbers = DeletionNumbers(MemoryStore())
    spec = ThreeFSStorageSpec("", str(tmp_path / "mnt"), "r", keys_per_file, touch)
    storages.open(StorageConfig("s", spec))
    await probed(storages)
    return storages


def names_in(directory: Path) -> list[str]:
    return [each.name for each in directory.iterdir()]


async def first_object(storage: StorageBackend) -> object:
    return await anext(storage.objects("cluster"))


async def probed(storages: StorageDirectory, times: int = 4) -> StorageHealth:
    clock = FakeClock()
    prober = Prober(storages, clock, 1.0, 5.0)
    for _ in range(times):
        before = storages.health("s")
        clock.time += 1.0
        prober.start_due()
        async with asyncio.timeout(30):
            while storages.health("s") is before:  # noqa: ASYNC110 - a probe sends no signal
                await asyncio.sleep(0.001)
    health = storages.health("s")
    assert health is not None
    return health


async def test_a_3fs_that_is_not_on_this_host_is_used_and_said_not_to_be_here(tmp_path: Path) -> None:
    storages = await elsewhere(tmp_path)
    health = await probed(storages)
    assert health.state is HealthState.SH_DEGRADED
    assert f"there is no {tmp_path}/mnt on this host" in health.reason
    assert storages.rank("s") is not None
    assert storages.is_writable("s")
    assert names_in(tmp_path) == [], "nothing is made in its place"


async def test_what_is_deleted_where_3fs_is_not_mounted_does_not_count_as_deleted(tmp_path: Path) -> None:
    storages = await elsewhere(tmp_path, touch=True)
    storage = storages.backend("s")
    assert storage is not None
    uris = await storage.allocate(Allocation("i", "aa", [Part("kv", 1, 8)]))
    await storage.make_objects(uris)  # engines make them there
    for reason in (*await storage.delete(uris), *await storage.discard(uris)):
        assert reason is not None
        assert "on this host" in reason
    with pytest.raises(StorageIOError, match="on this host"):
        await storage.exists(uris)
    with pytest.raises(StorageIOError, match="on this host"):
        await first_object(storage)
    assert names_in(tmp_path) == []


async def test_a_3fs_that_is_mounted_later_is_a_storage_like_any_other(tmp_path: Path) -> None:
    storages = await elsewhere(tmp_path)
    (tmp_path / "mnt").mkdir()  # a mount point, and nothing is mounted there yet
    assert (await probed(storages)).state is HealthState.SH_DOWN
    assert names_in(tmp_path / "mnt") == []
    (tmp_path / "mnt" / "r" / "cluster").mkdir(parents=True)
    assert (await probed(storages)).state is HealthState.SH_UP
    (tmp_path / "mnt").rename(tmp_path / "away")
    assert (await probed(storages)).state is HealthState.SH_DOWN, "what was seen once is missed"


async def test_packed_files_elsewhere_are_not_read_since_nothing_says_whose_their_slots_are(tmp_path: Path) -> None:
    storages = await elsewhere(tmp_path, keys_per_file=4)
    assert storages.rank("s") is None
    assert storages.is_available("s")
    assert storages.unverified == {"s"}


@pytest.mark.parametrize("root_dir", ["..", "../r", "a/../b", "/..", "a/.."])
def test_a_root_dir_stays_below_its_mountpoint(directory: StorageDirectory, tmp_path: Path, root_dir: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"root_dir.*'\.\.'"):
        directory.open(threefs(str(tmp_path), root_dir))


def test_what_must_be_there_when_a_3fs_storage_opens_is_not_made(directory: StorageDirectory, tmp_path: Path) -> None:
    config = threefs(str(tmp_path), "r", check=True)
    with pytest.raises(StorageIOError, match=r"mountpoint/root_dir .*is 3FS mounted on this host"):
        directory.open(config)
    (tmp_path / "r").mkdir()
    directory.open(config)
    assert (tmp_path / "r" / "cluster").is_dir()


@pytest.mark.parametrize("character", ["?", "#", "\n", "\x00"])
def test_a_root_must_fit_into_a_uri(directory: StorageDirectory, tmp_path: Path, character: str) -> None:
    nfs, fs = file_config(tmp_path / f"a{character}b"), threefs(str(tmp_path), f"a{character}b")
    for config, field in ((nfs, "root_path"), (fs, "mountpoint/root_dir")):
        with pytest.raises(InvalidArgumentError, match=field):
            directory.open(config)


def test_a_mountpoint_of_slash_needs_a_directory(directory: StorageDirectory) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a directory below /"):
        directory.open(threefs("/", "/"))


@given(
    mountpoint=st.sampled_from(["", "/", "//", "/a", "/a/", "/a//", "/a/b//c"]),
    root_dir=st.text("ab/", min_size=1, max_size=8),
)
def test_slashes_become_one_where_mountpoint_and_root_dir_meet(mountpoint: str, root_dir: str) -> None:
    """And only there (wire.md 8): the joined path is the same, with the same slashes inside the parts."""
    for spec in (ThreeFSStorageSpec("", mountpoint, root_dir), VcnsThreeFSStorageSpec("", mountpoint, root_dir)):
        inside_mountpoint, inside_root_dir = mountpoint.rstrip("/"), root_dir.strip("/")
        assert spec.root.startswith(inside_mountpoint)
        assert spec.root.endswith(inside_root_dir)
        assert spec.root[len(inside_mountpoint) :].removesuffix(inside_root_dir) == "/"
        assert normpath(spec.root) == normpath(f"{mountpoint.rstrip('/')}/{root_dir.lstrip('/')}")


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    names=st.lists(st.sampled_from(["a", "b.c", "d e"]), min_size=1, max_size=4),
    slashes=st.lists(st.sampled_from(["/", "//", "///"]), min_size=5, max_size=5),
    cut=st.integers(0, 4),
)
def test_an_engine_writes_where_the_manager_deletes_however_a_root_is_spelt(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], slashes: list[str], cut: int
) -> None:
    """Both sides join the same parts: what a mover accepts and writes is the file that the uri names."""
    top = tmp_path_factory.mktemp("mount")
    pieces = "".join(slash + name for slash, name in zip(slashes, names, strict=False))
    mountpoint, root_dir = f"{top}{slashes[-1]}", pieces[cut:] or "/"
    for config in (threefs(mountpoint, root_dir), StorageConfig("s", NfsStorageSpec(f"{mountpoint}{root_dir}"))):
        backend = StorageDirectory("cluster").prepare(config, is_new=True)
        (uri,) = map(LocationUri.parse, asyncio.run(backend.allocate(Allocation("i", "aa", [Part("kv", 1, 4)]))))
        mover = FileMover.for_storages([config])
        (result,) = mover.save([TransferItem(uri, [memoryview(b"1234")])], 10.0)
        mover.close()
        assert result.ok, result
        assert Path(uri.path).read_bytes() == b"1234"
        assert asyncio.run(backend.delete([str(uri)])) == [None]
        assert not Path(normpath(uri.path)).exists()


# ── Threads of one storage ──


HANGS_AT_ITS_END = """
import asyncio, threading
from kvcm.storage.threads import StorageThreads

async def main():
    hanging = asyncio.create_task(StorageThreads("s", 1).run(threading.Event().wait))
    await asyncio.sleep(0)
    hanging.cancel()

asyncio.run(main())
"""


async def test_work_is_done_in_threads_of_its_own_name_and_its_outcome_returned() -> None:
    threads = StorageThreads("storage-a", 2)
    assert await threads.run(lambda: threading.current_thread().name) == "storage-a"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 7) == 7


async def test_there_are_never_more_threads_than_allowed_and_all_work_is_done() -> None:
    threads, now, most, lock = StorageThreads("s", 3), 0, 0, threading.Lock()
    gate = threading.Barrier(3)  # of the first three, each waits for the two others

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        gate.wait(60)
        with lock:
            now -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(30)))
    assert (most, now) == (3, 0)


async def test_a_hanging_storage_takes_no_thread_of_the_loop_or_of_another_storage() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    gate, hanging, other = threading.Event(), StorageThreads("hanging", 8), StorageThreads("other", 1)
    stuck = [asyncio.create_task(hanging.run(gate.wait)) for _ in range(20)]
    await asyncio.sleep(0)
    assert (await asyncio.to_thread(int), await other.run(int)) == (0, 0)
    gate.set()
    assert await asyncio.gather(*stuck) == [True] * 20


async def test_file_deletions_need_no_thread_of_the_loop(tmp_path: Path) -> None:
    """The only one is taken by something that hangs."""
    gate, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    taken = loop.run_in_executor(None, gate.wait)
    storage = StorageDirectory("cluster").prepare(StorageConfig("s", NfsStorageSpec(str(tmp_path))), is_new=True)
    uris = await storage.allocate(Allocation("i", "aa", [Part("tp0", 1, 8)]))
    try:
        async with asyncio.timeout(30):
            assert await storage.delete(uris) == [None]
            assert await storage.discard(uris) == [None]
            assert await storage.exists(uris) == [False]
            assert (await storage.space()).capacity_bytes > 0
    finally:
        gate.set()
        await taken


async def test_cancelled_work_that_has_not_begun_is_not_begun() -> None:
    threads, gate, done = StorageThreads("s", 1), threading.Event(), list[int]()
    first = asyncio.create_task(threads.run(gate.wait))
    second = asyncio.create_task(threads.run(lambda: done.append(2)))
    third = asyncio.create_task(threads.run(lambda: done.append(3)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await asyncio.gather(first, third)
    assert done == [3]


def test_a_process_ends_though_a_storage_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGS_AT_ITS_END], check=True, timeout=60)
