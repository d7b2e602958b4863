"""A storage that hands out no addresses now ends no write: the next candidate takes the blocks, in the same call."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from cache_rig import group, instance
from fake_clock import FakeClock
from redis_servers import Standalone

from kvcm.cache.manager import CacheManager
from kvcm.cache.pages import PAGE_KEYS
from kvcm.cache.sessions import StartedWrite, WriteRequest
from kvcm.cache.shared_usage import SharedLedger
from kvcm.cache.usage import Ledger, UsageLedger
from kvcm.model.errors import CapacityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.locations import LocationStatus, decode_chunk
from kvcm.model.masks import BlockMask
from kvcm.model.storages import NfsStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec, ThreeFSStorageSpec
from kvcm.model.uri import LocationUri
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.registry import Registry
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.health import HealthRules, Probe, ProbeEnd
from kvcm.storage.mempool import MempoolStorage, PoolOpener
from kvcm.storage.pool_state import PoolReport
from kvcm.store.memory import MemoryStore
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.uri import parse_redis_uri

PAGE = 4096
POOL_BYTES = 5 << 20  # of some chunks, in all a little more than a page of blocks
WRITING = LocationStatus.WRITING
VALID_MS = 3000
HOUR_MS = 3_600_000


class World:
    """A manager with pools `p` and `q` on node `n`, files `f`, and files `m` that the manager makes itself."""

    def __init__(self, root: Path, usage: Ledger) -> None:
        self.clock, self.store, self.root = FakeClock(), MemoryStore(), root
        self.pool_table = self.store.table("pools")
        pools = PoolOpener(self.pool_table, self.clock, Random(0), is_shared=False)
        self.storages = StorageDirectory("cluster", openers={**OPENERS, StorageType.ST_TAIRMEMPOOL: pools})
        self.registry = Registry(self.storages)
        ids = iter(range(1, 1 << 30))
        self.pressed: list[str] = []
        self.manager = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            lambda length: f"{next(ids):0{length}x}",
            store=self.store,
            usage=usage,
            on_pressure=self.pressed.append,
        )
        self.executor = DeletionExecutor(self.storages, self.clock)
        self.executor.serve(self.manager)

    async def begin(self, *candidates: str, blocks: int = 1 << 20, limits: dict[str, int] | None = None) -> None:
        """Let a group have these candidates.

        Args:
            candidates: best first.
            blocks: that its quota has room for.
            limits: the same of single storages.
        """
        for name in candidates:
            limit = (limits or {}).get(name, 0) * PAGE
            await self.registry.storages.add(StorageConfig(name, self._spec(name), capacity_bytes=limit))
            if name in self.storages.pools():
                await self.tell(name, HOUR_MS)
        await self.registry.groups.create(group(storages=candidates, capacity=blocks * PAGE))
        await self.manager.register_instance(instance({"kv": PAGE}))

    def _spec(self, name: str) -> NfsStorageSpec | ThreeFSStorageSpec | TairMemPoolStorageSpec:
        if name in "pq":
            return TairMemPoolStorageSpec(node_id="n", capacity_bytes=POOL_BYTES)
        (self.root / name).mkdir()
        if name == "f":
            return NfsStorageSpec(str(self.root / name))
        return ThreeFSStorageSpec(mountpoint=str(self.root / name), root_dir="d", touch_file_when_create=True)

    def pool(self, name: str = "p") -> MempoolStorage:
        return self.storages.pools()[name]

    async def tell(self, name: str, valid_ms: int) -> None:
        await self.pool(name).report(PoolReport("n", 1, POOL_BYTES, valid_ms))

    async def fill(self, name: str = "p", but: int = 0) -> None:
        """Let all pages of a pool be taken, but some."""
        free_bytes = (await self.pool(name).space()).free_bytes
        parts = [Part("kv", key, PAGE) for key in range(free_bytes // PAGE - but)]
        await self.pool(name).allocate(Allocation("other", "x", parts))

    async def lose_agent(self, name: str = "p") -> None:
        await self.tell(name, VALID_MS)
        self.clock.time += VALID_MS / 1000 + 1

    async def damage(self, name: str = "p") -> None:
        assert await self.pool_table.replace(name, await self.pool_table.get(name), b"garbage")

    async def start(self, keys: Sequence[int]) -> StartedWrite:
        return await self.manager.start_write("i", WriteRequest(keys, node_id="n"))

    async def goes_to(self, keys: Sequence[int]) -> list[str]:
        """Start a write and return the storages of its blocks."""
        return [storage_of(chunk) for chunk in (await self.start(keys)).chunks]

    async def places(self, keys: Sequence[int]) -> list[list[tuple[str, LocationStatus]]]:
        records = await self.manager.cache("i").index.get(keys)
        return [[(each.storage, each.status) for each in record.locations] if record else [] for record in records]


def storage_of(chunk: bytes) -> str:
    (spec,) = decode_chunk(chunk).specs
    return LocationUri.parse(spec.uri).storage


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, UsageLedger())
    yield made
    made.storages.close_all()


FAULTS: dict[str, Callable[[World, str], Awaitable[None]]] = {
    "full": World.fill,
    "lost": World.lose_agent,
    "damaged": World.damage,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_next_candidate_takes_the_blocks_in_the_same_call(world: World, fault: str) -> None:
    await world.begin("p", "f")
    assert await world.goes_to([1, 2]) == ["p", "p"]
    await FAULTS[fault](world, "p")
    before = world.pool().taken_bytes
    assert await world.goes_to([3, 4]) == ["f", "f"]
    assert await world.places([3, 4]) == [[("f", WRITING)]] * 2
    assert world.pool().taken_bytes == before
    assert world.pressed == (["group"] if fault == "full" else []), "room can be made where there is none, only there"
    assert world.manager.usage.refusals["group"] == 0
    assert world.manager.endings.open_count == 2
    assert dict(world.manager.usage.held_on("f")) == {"group": 2 * PAGE}


async def test_what_refused_is_asked_last_until_a_probe_of_it_is_answered(world: World) -> None:
    """Failed probes tell nothing of writes; without that, each of them would send the next write there again."""
    await world.begin("p", "f")
    await world.lose_agent()
    assert await world.goes_to([1]) == ["f"]
    await world.tell("p", HOUR_MS)
    for key, end in enumerate((ProbeEnd.FAILED, ProbeEnd.LATE), start=2):
        _probed(world, end)
        assert await world.goes_to([key]) == ["f"]
    _probed(world, ProbeEnd.ANSWERED)
    assert await world.goes_to([9]) == ["p"]


def _probed(world: World, end: ProbeEnd) -> None:
    health = world.storages.health("p")
    assert health is not None
    world.storages.set_health("p", health.after(Probe(end, 0.1, "reason"), world.clock.now(), HealthRules(9, 9)))


async def test_a_write_of_many_pages_goes_as_a_whole_and_leaves_nothing_behind(world: World) -> None:
    """The first page of blocks has room in the pool, the second has not, though the pool's limit allows it."""
    await world.begin("p", "f")
    keys = range(POOL_BYTES // PAGE)
    await world.fill(but=PAGE_KEYS + 10)
    before = world.pool().taken_bytes
    assert before > 0
    assert await world.goes_to(keys) == ["f"] * len(keys)
    assert world.pool().taken_bytes == before
    assert await world.places(keys) == [[("f", WRITING)]] * len(keys)
    assert not world.manager.usage.held_on("p").get("group", 0)


async def test_what_one_storage_gave_is_given_back_where_another_one_refuses(world: World) -> None:
    await world.begin("p", "q", "f", limits={"p": 2})
    await world.fill("q")
    assert await world.goes_to(range(5)) == ["p"] * 2 + ["f"] * 3
    assert world.pool().taken_bytes == 2 * PAGE
    assert (await world.pool("q").space()).free_bytes == 0


async def test_files_that_cannot_be_made_are_made_by_the_next_candidate(world: World) -> None:
    """There the blocks are stored already, and have to be taken back first."""
    await world.begin("m", "f")
    assert await world.goes_to([1]) == ["m"]
    shutil.rmtree(world.root / "m")
    assert await world.goes_to([2, 3]) == ["f", "f"]
    assert await world.goes_to([4]) == ["f"], "it is noted"
    deleting = ("m", LocationStatus.DELETING)
    assert await world.places([2, 3, 4]) == [[deleting, ("f", WRITING)]] * 2 + [[("f", WRITING)]]
    assert world.manager.endings.open_count == 3
    (world.root / "m" / "d" / "cluster").mkdir(parents=True)
    await world.executor.run_due()
    assert await world.places([2, 3]) == [[("f", WRITING)]] * 2


NONE_LEFT: dict[str, tuple[dict[str, str], type[KvcmError], list[str]]] = {
    "full": ({"p": "full"}, CapacityError, ["storage p: the pool has no room", "retry shortly, room is being made"]),
    "lost": ({"p": "lost"}, NotReadyError, ["storage p: no host agent has told"]),
    "damaged": ({"p": "damaged"}, StorageIOError, ["cannot be read"]),
    "full and lost": ({"p": "full", "q": "lost"}, CapacityError, ["storage p: the pool", "storage q: no host agent"]),
    "lost and full": ({"p": "lost", "q": "full"}, CapacityError, ["storage q: the pool", "storage p: no host agent"]),
    "damaged and lost": ({"p": "damaged", "q": "lost"}, NotReadyError, ["cannot be read", "storage q: no host"]),
}


@pytest.mark.parametrize("case", NONE_LEFT)
async def test_only_when_no_candidate_is_left_the_write_is_refused_and_told_why(world: World, case: str) -> None:
    faults, kind, texts = NONE_LEFT[case]
    await world.begin(*faults)
    for name, fault in faults.items():
        await FAULTS[fault](world, name)
    with pytest.raises(kind) as refusal:
        await world.start([1, 2])
    assert type(refusal.value) is kind
    assert [text for text in texts if text not in str(refusal.value)] == []
    assert await world.places([1, 2]) == [[], []]
    assert world.manager.endings.open_count == 0
    assert world.manager.usage.refusals["group"] == (kind is CapacityError)
    assert set(world.pressed) == ({"group"} if kind is CapacityError else set())


async def test_a_next_candidate_without_room_in_its_limits_is_named_beside_the_one_that_refused(world: World) -> None:
    await world.begin("p", "f", limits={"f": 1})
    await world.fill()
    assert await world.goes_to([1, 2]) == ["f"], "what fits of them"
    with pytest.raises(CapacityError, match=r"storage 'f' is full.*; storage p: the pool has no room"):
        await world.start([3])
    assert world.manager.usage.refusals["group"] == 2


async def test_what_can_be_read_on_a_storage_that_is_drained_is_masked_when_the_others_refuse(world: World) -> None:
    await world.begin("p", "f")
    await world.lose_agent()
    started = await world.start([1])
    await world.manager.finish_write("i", started.session.id, BlockMask(offset=1))
    world.storages.set_draining("f", is_draining=True)
    assert (await world.start([1])).mask == BlockMask(offset=1)
    with pytest.raises(NotReadyError, match="no host agent has told"):
        await world.start([1, 2])


async def test_the_room_of_an_attempt_is_free_for_the_next_one_at_once(
    tmp_path: Path, redis_standalone: Standalone
) -> None:
    """Also where other managers count with it: nothing is sent here but what the write itself sends."""
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"t{secrets.token_hex(6)}")))
    world = World(tmp_path, SharedLedger(QuotaCounters(client), "node"))
    await world.begin("p", "q", "f", blocks=2)
    await world.fill("p")
    await world.lose_agent("q")
    assert await world.goes_to([1, 2]) == ["f", "f"]
    with pytest.raises(CapacityError, match=r"quota\.capacity"):
        await world.start([3])
    world.storages.close_all()
    await client.close()
