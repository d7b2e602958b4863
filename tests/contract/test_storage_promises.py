"""What every storage promises the manager and engines, whatever its type: with bytes that engines move.

Every type passes it: directories of all types on a plain directory, tmpfs and FUSE, memory pools, the dummy, and, in
tests/mooncake/test_mooncake_promises.py, a real Mooncake store. Where a type cannot promise something, `Setting` says
so, and the test checks what it does instead. How names and slots look: test_storage_contract.py.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest
from promise_rig import NODE, PathSetting, PoolSetting, Setting
from storage_rig import KINDS, PATH_KINDS, allocation, content
from thoroughness import is_thorough

from kvcm.model.errors import UnsupportedError
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import StorageBackend, object_name

SIZE = 4096
SPECS = {"tp0": SIZE, "tp1": SIZE}
SETTINGS = [
    *(f"{kind} on {medium}" for kind in PATH_KINDS for medium in ("directory", "fuse")),
    *(pytest.param(f"{kind} on tmpfs", marks=pytest.mark.ci) for kind in PATH_KINDS),
    *(kind for kind in KINDS if kind not in PATH_KINDS),
    "mempool",
]
_TRY_AGAIN_SECONDS = 30.0


@pytest.fixture
def pool_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be on the node of a pool, with a directory for its memory."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvcm-test-", dir=parent if parent.is_dir() else None) as folder:
        monkeypatch.setenv("KVCM_NODE_ID", NODE)
        monkeypatch.setenv("KVCM_POOL_DIRECTORY", folder)
        monkeypatch.delenv("KVCM_CLUSTER_ID", raising=False)
        yield


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    kind, _, medium = request.param.partition(" on ")
    if kind == "mempool":
        request.getfixturevalue("pool_memory")
        return PoolSetting()
    folder = tmp_path
    if medium in {"tmpfs", "fuse"}:
        folder = request.getfixturevalue(f"{medium}_directory") / uuid4().hex
        folder.mkdir()
    return PathSetting(KINDS[kind], folder / "root")


@pytest.fixture
async def storage(setting: Setting) -> StorageBackend:
    return await setting.open()


async def placed(
    storage: StorageBackend, keys: Sequence[int], location_id: str = "aa", specs: dict[str, int] = SPECS
) -> list[str]:
    """Get places as a manager does that hands them out."""
    uris = await storage.allocate(allocation(specs, keys, location_id))
    if storage.makes_objects:
        await storage.make_objects(uris)
    return uris


async def until_deleted(storage: StorageBackend, uris: Sequence[str]) -> None:
    """Delete parts as the manager does: it tries those again that a reader still uses."""
    async with asyncio.timeout(_TRY_AGAIN_SECONDS):
        while left := [uri for uri, reason in zip(uris, await storage.delete(uris), strict=True) if reason is not None]:
            uris = left
            await asyncio.sleep(0.05)


async def assert_intact(setting: Setting, uris: Sequence[str]) -> None:
    """Check that parts have their bytes."""
    if setting.holds_bytes:
        assert await setting.load(uris) == [content(uri) for uri in uris]


async def save(setting: Setting, uris: Sequence[str]) -> None:
    if setting.holds_bytes:
        await setting.save(uris)


async def test_addresses_say_where_parts_lie_and_how_long_they_are(setting: Setting, storage: StorageBackend) -> None:
    uris = await placed(storage, [5, -1], specs={"tp0": 100, "tp1": 7000})
    places = [LocationUri.parse(uri) for uri in uris]
    assert [str(place) for place in places] == uris
    assert [(place.scheme, place.storage, place.size) for place in places] == [
        (setting.scheme, setting.storage, size) for size in (100, 100, 7000, 7000)
    ]


async def test_nothing_is_placed_for_nothing(storage: StorageBackend) -> None:
    assert await storage.allocate(allocation(SPECS, [])) == []
    assert await storage.delete([]) == []
    assert await storage.exists([]) == []


async def test_invariant_5_parts_and_sessions_never_share_a_byte(setting: Setting, storage: StorageBackend) -> None:
    """The same blocks, placed again and again, all written before the first is read."""
    mixed = {"a": 700, "b": 4096, "c": 9000, "d": 700}
    uris = [uri for number in range(4) for uri in await placed(storage, [1, 2, 3, -1], f"a{number}", mixed)]
    assert len(set(uris)) == len(uris) == 64
    await save(setting, uris)
    await assert_intact(setting, uris)


async def test_written_parts_exist_and_others_are_a_miss(setting: Setting, storage: StorageBackend) -> None:
    """Of memory pools the manager knows only what it has handed out; there engines find out."""
    uris = await placed(storage, range(6))
    await save(setting, uris[:5])
    assert await storage.exists(uris[:5]) == [True] * 5
    if setting.sees_bytes:
        assert await storage.exists(uris[5:]) == [False] * 7
    if setting.holds_bytes:
        assert await setting.load(uris[5:6]) != [content(uris[5])]
    await assert_intact(setting, uris[:5])


async def test_deleted_parts_do_not_exist_and_their_neighbours_stay(setting: Setting, storage: StorageBackend) -> None:
    """An engine that comes late misses, or gets the bytes that were there: never others."""
    uris = await placed(storage, range(6))
    await save(setting, uris)
    gone, kept = uris[2:9], uris[:2] + uris[9:]
    await until_deleted(storage, gone)
    assert await storage.exists(uris) == [uri in kept for uri in uris]
    await assert_intact(setting, kept)
    if setting.holds_bytes:
        for uri, found in zip(gone, await setting.load(gone), strict=True):
            assert found in (None, content(uri))


async def test_deletions_are_idempotent_and_never_touch_what_is_later(
    setting: Setting, storage: StorageBackend
) -> None:
    """Decision 1: late deletions, of parts whose place may be another's by now."""
    uris = await placed(storage, range(6))
    await save(setting, uris)
    for _ in range(2):
        await until_deleted(storage, uris[:4])
        await until_deleted(storage, list(reversed(uris)))
    await storage.forgotten(uris)
    later = await placed(storage, range(6), "ab")
    await save(setting, later)
    await until_deleted(storage, uris)
    assert await storage.exists(uris) == [False] * 12
    assert await storage.exists(later) == [True] * 12
    await assert_intact(setting, later)


async def test_places_that_no_client_got_can_be_discarded(setting: Setting, storage: StorageBackend) -> None:
    kept = await placed(storage, range(3))
    await save(setting, kept)
    assert await storage.discard(await placed(storage, range(3), "ab")) == [None] * 6
    assert await storage.delete(await placed(storage, range(3), "ac")) == [None] * 6
    await assert_intact(setting, kept)


async def test_a_restarted_manager_and_a_replaced_storage_know_parts(setting: Setting, storage: StorageBackend) -> None:
    uris = await placed(storage, range(6))
    await save(setting, uris)
    await until_deleted(storage, uris[:3])
    successor = await setting.open(is_new=False)
    successor.take_over(storage)
    storage.close()
    if setting.holds_bytes:  # names without bytes are lost with the manager that knew them
        restarted = await setting.open(is_new=False)
        assert await restarted.exists(uris) == [False] * 3 + [True] * 9
        restarted.close()
    assert await successor.exists(uris) == [False] * 3 + [True] * 9
    await until_deleted(successor, uris)
    assert await successor.exists(uris) == [False] * 12
    successor.close()


async def test_a_storage_that_can_be_used_passes_every_probe(setting: Setting, storage: StorageBackend) -> None:
    uris = await placed(storage, range(2))
    await save(setting, uris)
    for _ in range(3):
        await storage.probe()
    await asyncio.gather(*(storage.probe() for _ in range(5)))
    await assert_intact(setting, uris)


async def test_space_is_sane(setting: Setting, storage: StorageBackend) -> None:
    space = await storage.space()
    if not setting.knows_space:
        assert space == (-1, -1)
        return
    assert 0 <= space.free_bytes <= space.capacity_bytes
    assert space.capacity_bytes > 0


async def test_only_storages_that_are_reported_so_make_objects(setting: Setting, storage: StorageBackend) -> None:
    assert storage.makes_objects is setting.makes_objects
    uris = await storage.allocate(allocation(SPECS, range(3)))
    await storage.make_objects(uris)
    if setting.sees_bytes:
        assert await storage.exists(uris) == [False] * 6
    await save(setting, uris)
    await assert_intact(setting, uris)


async def test_objects_are_listed_and_go_when_a_scrub_removes_them(setting: Setting, storage: StorageBackend) -> None:
    uris = await placed(storage, range(6))
    await save(setting, uris)
    if not setting.lists_objects:
        with pytest.raises(UnsupportedError, match="cannot be scrubbed"):
            storage.objects("cluster")
        with pytest.raises(UnsupportedError, match="cannot be scrubbed"):
            await storage.remove_objects("cluster", [])
        return
    found = [each async for page in storage.objects("cluster") for each in page.objects]
    assert sorted(each.name for each in found) == sorted(set(map(object_name, uris)))
    assert [page async for page in storage.objects("other")] == []
    if setting.holds_bytes:
        assert sum(each.size_bytes for each in found) >= 12 * SIZE
        assert await storage.remove_objects("cluster", found) == [None] * len(found)
        assert await storage.exists(uris) == [False] * 12
        assert [page async for page in storage.objects("cluster")] == []


async def test_a_random_history_serves_every_block_its_own_bytes(setting: Setting, storage: StorageBackend) -> None:
    """Blocks come and go; a reader with a stale answer misses, or gets the bytes that were there."""
    random, live, gone = Random(3), list[str](), list[str]()
    for step in range(12 if is_thorough() else 6):
        fresh = await placed(storage, range(random.randint(1, 9)), f"b{step}")
        await save(setting, fresh)
        live += fresh
        going = random.sample(live, len(live) // 3)
        await until_deleted(storage, going)
        await storage.forgotten(going)
        live, gone = [uri for uri in live if uri not in going], gone + going
        assert await storage.exists(live) == [True] * len(live)
        await assert_intact(setting, live)
    if setting.holds_bytes:
        late = random.sample(gone, min(40, len(gone)))
        for uri, found in zip(late, await setting.load(late), strict=True):
            assert found in (None, content(uri))
    await until_deleted(storage, live)
    assert not any(await storage.exists([*live, *gone]))
