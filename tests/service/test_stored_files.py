"""Files behind storages: when they go, when their slots are reused, and what happens while a storage is away."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, mask, specs, unique

from kvcm.app import Manager
from kvcm.config import Settings

SIZE = 8192
DELAY_MS = 300
LONG_DELAY_MS = 1500  # for what has to be read before the delay is over


class Slot(NamedTuple):
    """Where the bytes of a block lie."""

    path: Path
    offset: int
    packed: bool

    def write(self, byte: int) -> None:
        """Write the block as an engine does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.seek(self.offset)
            file.write(bytes([byte]) * SIZE)

    def read(self) -> set[int]:
        """The distinct bytes of the block; empty when the file is gone."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return set(file.read(SIZE))
        except FileNotFoundError:
            return set()


def _slot(location: Any) -> Slot:
    uri = urlsplit(specs(location)["kv"])
    params = parse_qs(uri.query)
    assert params["size"] == [str(SIZE)]
    return Slot(Path(uri.path), int(params.get("blkid", ["0"])[0]) * SIZE, "blkid" in params)


class Files:
    """An instance on a `file` storage."""

    def __init__(self, site: Site, root: Path, keys_per_file: int, delay_ms: int = DELAY_MS) -> None:
        self.site, self.root = site, root
        self.storage = site.storage(nfs={"root_path": f"{root}/", "key_count_per_file": keys_per_file})
        group = site.group(self.storage, delay_ms=delay_ms)
        self.instance = site.instance(group, location_spec_infos=[{"name": "kv", "size": SIZE}])

    def start(self, keys: list[int], **fields: Any) -> tuple[Any, list[Slot]]:
        """Start a write and write the bytes: block k is full of byte k."""
        started = self.site.start(self.instance, keys, **fields)
        slots = [_slot(location) for location in started.locations]
        for key, slot in zip(keys, slots, strict=True):
            slot.write(key)
        return started, slots

    def write(self, keys: list[int]) -> list[Slot]:
        """Write blocks and publish them."""
        started, slots = self.start(keys)
        self.site.finish(self.instance, started)
        return slots

    def remove(self, *keys: int) -> None:
        """Remove blocks."""
        self.site.api.ok("RemoveCache", instance_id=self.instance, block_keys=keys)

    def lease(self, keys: list[int], lease_ms: int = 60_000) -> str:
        """Match blocks with a read lease; returns its id."""
        query = {"instance_id": self.instance, "block_keys": keys, "query_type": "QT_PREFIX_MATCH"}
        begin = time.time()
        answer = self.site.api.ok("GetCacheLocation", read_lease_ms=lease_ms, **query)
        assert len(answer.locations) == len(keys)
        assert begin + lease_ms / 1000 - 0.01 < answer.read_lease_deadline_ms / 1000 <= time.time() + lease_ms / 1000
        return str(answer.read_lease_id)


@pytest.fixture
def files(site: Site, tmp_path: Path) -> Files:
    return Files(site, tmp_path, 1)


@pytest.fixture
def quick(site: Site, tmp_path: Path) -> Files:
    """Files that are deleted at once, unless something holds them."""
    return Files(site, tmp_path, 1, delay_ms=0)


@pytest.fixture
def lasting(site: Site, tmp_path: Path) -> Files:
    """Files that can be read for a while after their blocks were removed."""
    return Files(site, tmp_path, 1, delay_ms=LONG_DELAY_MS)


@pytest.fixture
def packed(site: Site, tmp_path: Path) -> Files:
    return Files(site, tmp_path, 4)


def test_a_file_goes_after_the_delay_and_not_before_invariant_6(lasting: Files) -> None:
    kept, removed = lasting.write([1, 2])
    begin = time.monotonic()
    lasting.remove(2)
    assert removed.read() == {2}
    eventually(lambda: not removed.path.exists())
    assert time.monotonic() - begin >= LONG_DELAY_MS / 1000 - 0.01
    assert kept.read() == {1}


def test_a_removed_slot_is_punched_and_its_neighbours_keep_their_bytes_invariant_5(packed: Files) -> None:
    first, second, third = packed.write([1, 2, 3])
    blocks = first.path.stat().st_blocks
    packed.remove(2)
    eventually(lambda: second.read() == {0})
    assert (first.read(), third.read()) == ({1}, {3})
    assert first.path.stat().st_blocks <= blocks - SIZE // 512
    assert first.path.stat().st_size == 3 * SIZE


def test_a_packed_file_goes_with_its_last_block(packed: Files) -> None:
    first, second = packed.write([1, 2])
    packed.remove(1)
    eventually(lambda: first.read() == {0})
    packed.remove(2)
    eventually(lambda: not second.path.exists())


def test_blocks_reported_as_failed_are_deleted_and_the_others_stay(packed: Files) -> None:
    started, (first, second, third) = packed.start([1, 2, 3])
    packed.site.finish(packed.instance, started, mask(flags=[True, False, True]))
    eventually(lambda: second.read() == {0})
    assert (first.read(), third.read()) == ({1}, {3})


@pytest.mark.parametrize("how", ["TrimCache", "AdminService.RemoveInstance"])
def test_trim_and_removal_of_the_instance_delete_the_files_after_the_delay(lasting: Files, how: str) -> None:
    slots = lasting.write([1, 2])
    strategy = {"strategy": "TS_REMOVE_ALL_CACHE"} if how == "TrimCache" else {}
    lasting.site.api.ok(how, instance_id=lasting.instance, **strategy)
    assert [slot.read() for slot in slots] == [{1}, {2}]
    eventually(lambda: not any(slot.path.exists() for slot in slots))


def test_a_delayed_delete_never_touches_the_block_that_was_written_anew_decision_1(files: Files) -> None:
    (old,) = files.write([1])
    files.remove(1)
    (new,) = files.write([1])
    eventually(lambda: not old.path.exists())
    assert new.read() == {1}
    assert len(files.site.match(files.instance, [1])) == 1


# ── Read leases ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_read_lease_keeps_the_file_beyond_the_delay(files: Files) -> None:
    leased, free = files.write([1, 2])
    files.lease([1])
    files.remove(1, 2)
    eventually(lambda: not free.path.exists())
    assert leased.read() == {1}
    assert files.site.hits(files.instance, [1]) == []


def test_a_leased_file_goes_soon_after_the_lease_is_released(quick: Files) -> None:
    leased, free = quick.write([1, 2])
    lease = quick.lease([1])
    quick.remove(1, 2)
    eventually(lambda: not free.path.exists())
    quick.site.api.ok("LeaseService.ReleaseReadLease", instance_id=quick.instance, read_lease_id=lease)
    eventually(lambda: not leased.path.exists())


def test_several_leases_are_released_with_one_call_whatever_is_wrong_with_some(quick: Files, files: Files) -> None:
    first, second = quick.write([1, 2])
    (foreign,) = files.write([1])
    leases = [quick.lease([1]), files.lease([1]), quick.lease([2])]
    quick.remove(1, 2)
    fields = {"instance_id": quick.instance, "read_lease_id": leases[0], "more_read_lease_ids": leases[1:]}
    refused = quick.site.api.refused("LeaseService.ReleaseReadLease", **fields)
    assert (refused.code, refused.message) == ("INVALID_ARGUMENT", "read_lease_id is unknown, released or expired")
    eventually(lambda: not first.path.exists() and not second.path.exists())
    assert foreign.path.exists()


def test_a_renewed_lease_keeps_the_file_beyond_its_first_end(quick: Files) -> None:
    renewed, free = quick.write([1, 2])
    lease = quick.lease([1], 2000)
    quick.lease([2], 2100)
    fields = {"instance_id": quick.instance, "read_lease_id": lease}
    answer = quick.site.api.ok("LeaseService.RenewReadLease", read_lease_ms=60_000, **fields)
    assert 40 < answer.read_lease_deadline_ms / 1000 - time.time() <= 60
    quick.remove(1, 2)
    eventually(lambda: not free.path.exists())
    assert renewed.read() == {1}


BLOCK_BYTES = 64
CHAIN = 8  # blocks
_PROBED_OFTEN = ("kvcm.storage.probe_interval_ms=50", "kvcm.storage.probe_timeout_ms=2000")


class Engine:
    """A client that moves bytes as an engine does, and fails the test when a request is not answered as it should."""

    def __init__(self, site: Site, instance: str, roots: Sequence[Path]) -> None:
        self._site = site
        self._instance = instance
        self._roots = roots
        self._chains = count()
        self.written: list[list[int]] = []

    def write(self) -> set[str]:
        """Write a new chain; returns the names of the storages it was to go to."""
        number = next(self._chains)
        return self.write_chain(list(range(CHAIN * number, CHAIN * (number + 1))))

    def write_chain(self, keys: list[int]) -> set[str]:
        """Write what is missing of a chain; what cannot be written is told so."""
        started = self._site.start(self._instance, keys)
        uris = [specs(location)["kv"] for location in started.locations]
        lacking = keys[len(keys) - len(uris) :]
        stored = [self._put(uri, key) for uri, key in zip(uris, lacking, strict=True)]
        self._site.finish(self._instance, started, mask(flags=stored))
        if all(stored) and keys not in self.written:
            self.written.append(keys)
        return {uri.partition("://")[2].partition("/")[0] for uri in uris}

    def read(self, keys: Sequence[int]) -> int:
        """Return how many blocks of a chain are found; what is found is what was written."""
        found = self._site.match(self._instance, keys)
        blocks = [self._get(location["kv"]) for location in found]
        for key, block in zip(keys, blocks, strict=False):
            assert block in {_bytes_of(key), None}
        return sum(block is not None for block in blocks)

    def is_all_there(self) -> bool:
        """Whether every block that was written is found."""
        return all(self.read(keys) == CHAIN for keys in self.written)

    def _put(self, uri: str, key: int) -> bool:
        path = _path_of(uri)
        if not any(root.is_dir() for root in self._roots if path.is_relative_to(root)):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_bytes_of(key))
        return True

    def _get(self, uri: str) -> bytes | None:
        try:
            return _path_of(uri).read_bytes()
        except FileNotFoundError:
            return None


def _path_of(uri: str) -> Path:
    return Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])


def _bytes_of(key: int) -> bytes:
    return key.to_bytes(8, "big") * (BLOCK_BYTES // 8)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with manager(tmp_path_factory.mktemp("manager"), *_PROBED_OFTEN) as running:
        yield running


def _states(process: ManagerProcess, storage: str) -> list[str]:
    return [event["state"] for event in process.events("storage_health") if event["storage"] == storage]


def test_a_storage_that_goes_away_costs_hits_only_while_it_is_away(process: ManagerProcess, tmp_path: Path) -> None:
    root, other_root, aside = tmp_path / "a", tmp_path / "b", tmp_path / "aside"
    names = [unique("a"), unique("b")]
    with process.api() as api:
        site = Site(api)
        for name, path in zip(names, (root, other_root), strict=True):
            nfs = {"root_path": str(path), "key_count_per_file": 1}
            api.ok("AdminService.AddStorage", storage={"global_unique_name": name, "nfs": nfs})
        engine = Engine(site, site.instance(site.group(*names)), [root, other_root])
        assert [engine.write() for _ in range(3)] == [{names[0]}] * 3
        assert engine.is_all_there()
        before = list(engine.written)

        root.rename(aside)
        eventually(lambda: _while_it_works(engine) and _states(process, names[0])[-1:] == ["down"])
        assert [engine.read(keys) for keys in before] == [0] * 3
        assert engine.write() == {names[1]}
        assert engine.write_chain(before[0]) == {names[1]}
        assert engine.read(before[0]) == CHAIN

        aside.rename(root)
        eventually(lambda: _while_it_works(engine) and _states(process, names[0])[-1:] == ["up"])
        assert engine.is_all_there()
        assert _states(process, names[0])[-3:] == ["degraded", "down", "up"]
        assert _states(process, names[1]) == []


def _while_it_works(engine: Engine) -> bool:
    engine.write()
    engine.is_all_there()
    return True


STORAGE = "nfs_01"


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "empty"])
async def test_nothing_is_made_in_place_of_a_storage_that_is_away(tmp_path: Path, is_there: bool) -> None:
    """Its store knows the storage already, though the document names it again at every start."""
    settings = Settings(data_dir=str(tmp_path / "data"))
    root = tmp_path / "data" / "nfs"
    async with Manager(settings).opened() as rooms:
        assert rooms.storages.backend(STORAGE) is not None
    (cluster,) = root.iterdir()
    root.rename(tmp_path / "away")
    if is_there:
        root.mkdir()
    async with Manager(settings).opened() as rooms:
        assert rooms.storages.backend(STORAGE) is None
        assert rooms.registry.storages.is_configured(STORAGE)
    assert [*root.rglob("*")] == []
    if is_there:
        root.rmdir()
    (tmp_path / "away").rename(root)
    async with Manager(settings).opened() as rooms:
        assert rooms.storages.backend(STORAGE) is not None
    assert [*root.iterdir()] == [cluster]
