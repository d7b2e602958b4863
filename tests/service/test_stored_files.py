"""Files behind storages: when they go, when their stored are reused, and what happens while a storage is away."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from test_transport_drivers import eventually
from test_transport_sites import Site, specs

from kvcm.app import Manager
from kvcm.config import Settings

SIZE = 8192
DELAY_MS = 300
LONG_DELAY_MS = 1500  # for blocks that a test reads before the delay is over


class StoredFile(NamedTuple):
    """Where the bytes of a block lie."""

    path: Path

    def write(self, byte: int) -> None:
        """Write the block as an engine does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(bytes([byte]) * SIZE)

    def read(self) -> set[int]:
        """The distinct bytes of the block; empty when the file is gone."""
        with suppress(FileNotFoundError):
            return set(self.path.read_bytes())
        return set()


def _file_of(location: Any) -> StoredFile:
    uri = urlsplit(specs(location)["kv"])
    assert parse_qs(uri.query) == {"size": [str(SIZE)]}
    return StoredFile(Path(uri.path))


class Files:
    """An instance on a `file` storage."""

    def __init__(self, site: Site, root: Path, delay_ms: int = DELAY_MS) -> None:
        self.site = site
        storage = site.storage(nfs={"root_path": f"{root}/", "key_count_per_file": 1})
        group = site.group(storage, delay_ms=delay_ms)
        self.instance = site.instance(group, location_spec_infos=[{"name": "kv", "size": SIZE}])

    def start(self, keys: list[int], **fields: Any) -> tuple[Any, list[StoredFile]]:
        """Start a write and write the bytes: block k is full of byte k."""
        started = self.site.start(self.instance, keys, **fields)
        stored = [_file_of(location) for location in started.locations]
        for key, file in zip(keys, stored, strict=True):
            file.write(key)
        return started, stored

    def write(self, keys: list[int]) -> list[StoredFile]:
        """Write blocks and publish them."""
        started, stored = self.start(keys)
        self.site.finish(self.instance, started)
        return stored

    def remove(self, *keys: int) -> None:
        """Remove blocks."""
        self.site.api.ok("RemoveCache", instance_id=self.instance, block_keys=keys)

    def lease(self, keys: list[int], lease_ms: int = 600_000) -> str:
        """Match blocks with a read lease; returns its id."""
        query = {"instance_id": self.instance, "block_keys": keys, "query_type": "QT_PREFIX_MATCH"}
        begin = time.time()
        answer = self.site.api.ok("GetCacheLocation", read_lease_ms=lease_ms, **query)
        assert len(answer.locations) == len(keys)
        assert begin + lease_ms / 1000 - 0.01 < answer.read_lease_deadline_ms / 1000 <= time.time() + lease_ms / 1000
        return str(answer.read_lease_id)


@pytest.fixture
def files(site: Site, tmp_path: Path) -> Files:
    return Files(site, tmp_path)


@pytest.fixture
def quick(site: Site, tmp_path: Path) -> Files:
    """Files that are deleted at once, unless something holds them."""
    return Files(site, tmp_path, delay_ms=0)


@pytest.fixture
def lasting(site: Site, tmp_path: Path) -> Files:
    """Files that can be read for a while after their blocks were removed."""
    return Files(site, tmp_path, delay_ms=LONG_DELAY_MS)


def test_a_file_goes_after_the_delay_and_not_before_invariant_6(lasting: Files) -> None:
    kept, removed = lasting.write([1, 2])
    begin = time.monotonic()
    lasting.remove(2)
    assert removed.read() == {2} or time.monotonic() - begin >= LONG_DELAY_MS / 1000
    eventually(lambda: not removed.path.exists())
    assert time.monotonic() - begin >= LONG_DELAY_MS / 1000 - 0.01
    assert kept.read() == {1}


@pytest.mark.parametrize("how", ["TrimCache", "AdminService.RemoveInstance"])
def test_trim_and_removal_of_the_instance_delete_the_files_after_the_delay(lasting: Files, how: str) -> None:
    stored = lasting.write([1, 2])
    strategy = {"strategy": "TS_REMOVE_ALL_CACHE"} if how == "TrimCache" else {}
    begin = time.monotonic()
    lasting.site.api.ok(how, instance_id=lasting.instance, **strategy)
    assert [file.read() for file in stored] == [{1}, {2}] or time.monotonic() - begin >= LONG_DELAY_MS / 1000
    eventually(lambda: not any(file.path.exists() for file in stored))


def test_a_delayed_delete_never_touches_the_block_that_was_written_again_decision_1(files: Files) -> None:
    (old,) = files.write([1])
    files.remove(1)
    (new,) = files.write([1])
    eventually(lambda: not old.path.exists())
    assert new.read() == {1}
    assert len(files.site.match(files.instance, [1])) == 1


# ── Read leases ──────────────────────────────────────────────────────────────────────────────────────────────────────


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

    def renew() -> Any:
        """Nothing where the lease ends before that, as on a busy machine."""
        fields = {"instance_id": quick.instance, "read_lease_id": quick.lease([1], 2000)}
        answer = quick.site.api.call("LeaseService.RenewReadLease", read_lease_ms=600_000, **fields)
        return answer.header.status.code == 1 and answer

    assert 400 < eventually(renew).read_lease_deadline_ms / 1000 - time.time() <= 600
    quick.lease([2], 2100)
    quick.remove(1, 2)
    eventually(lambda: not free.path.exists())
    assert renewed.read() == {1}


STORAGE = "nfs_01"


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "empty"])
async def test_nothing_is_made_in_place_of_a_storage_that_is_away(tmp_path: Path, is_there: bool) -> None:
    """Its store knows the storage already, though the document names it again at every start."""
    settings = Settings(data_dir=str(tmp_path / "data"))
    root = tmp_path / "data" / "nfs"
    async with Manager(settings).opened() as spaces:
        assert spaces.storages.backend(STORAGE) is not None
    (cluster,) = root.iterdir()
    root.rename(tmp_path / "away")
    if is_there:
        root.mkdir()
    async with Manager(settings).opened() as spaces:
        assert spaces.storages.backend(STORAGE) is None
        assert spaces.registry.storages.is_configured(STORAGE)
    assert [*root.rglob("*")] == []
    if is_there:
        root.rmdir()
    (tmp_path / "away").rename(root)
    async with Manager(settings).opened() as spaces:
        assert spaces.storages.backend(STORAGE) is not None
    assert [*root.iterdir()] == [cluster]
