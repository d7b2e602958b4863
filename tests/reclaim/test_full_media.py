"""Storages that are full below every quota: their blocks leave until there is space again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fake_clock import FakeClock
from levels_rig import Levels, group, instance
from small_disk import fill, free_bytes, small_disk

from kvcm.cache.write_sessions import WriteRequest
from kvcm.model.groups import StorageGuarantee
from kvcm.model.keys import BlockMask
from kvcm.model.locations import decode_chunk
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.reclaim.media import HeldBytes, LargestBlocks, MediaPressure
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.storage.backend import StorageSpace
from kvcm.storage.free_margin import FreeMargins
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.storage.prober import Prober
from kvcm.store.numbers import DeletionNumbers

MIB = 1 << 20
BLOCK = 64 << 10
DISK = 4 * MIB
PLENTY = (1 << 40) / 10
"""Blocks of the rig's unit, so that no quota is near."""


class Disks(Levels):
    """A manager with storages on small disks, its prober, and engines that write real bytes."""

    def __init__(self, *roots: Path, keys_per_file: int = 1, **fields: object) -> None:
        storages = [
            StorageConfig(root.name, NfsStorageSpec(str(root / "kv"), key_count_per_file=keys_per_file))
            for root in roots
        ]
        names = tuple(root.name for root in roots)
        groups = [group(blocks=PLENTY, storages=names, delay_ms=0, **fields)]  # type: ignore[arg-type]
        self.margins = FreeMargins(lambda _storage: BLOCK, now=lambda: self.clock.now())
        super().__init__(groups, [instance(specs={"kv": BLOCK})], storages)
        self.prober = Prober(self.storages, self.clock, 1.0, 5.0, margin=self.margins.of)
        self.manager.endings.on_failed_writes = self._probe
        self.failed: list[int] = []

    def _probe(self, failed: dict[str, int]) -> None:
        for storage, size in failed.items():
            self.margins.on_failed_write(storage, size)
            self.prober.expedite(storage)

    def new_reclaimer(self, reported: object = None) -> Reclaimer:
        blocks = LargestBlocks(self.registry).of
        media = MediaPressure(self.storages.health, self.margins, blocks, self.clock)
        return Reclaimer(
            self.manager.indexes, self.registry.groups.find, self._limits, self.clock, self.evicted.append, media=media
        )

    async def save(self, keys: Sequence[int]) -> set[str]:
        """Write blocks as an engine does; return the storages that got some. Those without room are reported."""
        cache = self.manager.cache("i")
        started = await self.manager.start_write(cache, WriteRequest(keys))
        written, places = [], set()
        for chunk in started.chunks:
            (uri,) = [LocationUri.parse(spec.uri) for spec in decode_chunk(chunk).specs]
            written.append(_write(Path(uri.path), uri))
            if written[-1]:
                places.add(uri.storage)
        self.failed.append(written.count(False))
        await self.manager.finish_write(cache, started.session.id, BlockMask(flags=written))
        return places

    async def probed(self, name: str, seconds: float = 1.0) -> StorageHealth:
        """Let time pass, and return the health after the next probe."""
        self.wait(seconds)
        before = self.storages.health(name)
        async with asyncio.timeout(30):
            while (health := self.storages.health(name)) is before:
                self.prober.start_due()
                await asyncio.sleep(0.001)
        assert health is not None
        return health

    async def second(self, *names: str) -> None:
        """Do what a manager does in a second: probe, evict, delete."""
        for name in names:
            await self.probed(name)
        await self.reclaim()
        await self.executor.run_due()


def _write(path: Path, uri: LocationUri) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_fresh = not path.exists()
    try:
        with path.open("xb" if is_fresh else "r+b", buffering=0) as file:
            file.seek(uri.offset)
            return file.write(bytes(uri.size)) == uri.size
    except OSError:
        if is_fresh:
            with suppress(OSError):
                path.unlink()
        return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "a", DISK) as mounted:
        yield mounted


async def test_a_storage_that_is_full_below_its_quota_evicts_and_takes_blocks_again(disk: Path) -> None:
    """It used to stay full for ever: no quota was near, so nothing was evicted, and every save failed."""
    rig = Disks(disk)
    for number in range(200):
        await rig.save([number])
        await rig.second("a")
    assert sum(rig.failed) == 0
    assert set(rig.reasons()) == {"medium"}
    assert await rig.left([199]) == [199]
    assert rig.remaining() >= 0.8 * DISK


async def test_engines_that_write_faster_than_it_is_probed_find_space_the_next_second(disk: Path) -> None:
    """Their failures are reports: each has the storage probed, and as much is to be free as they wanted to write."""
    rig = Disks(disk)
    for round_number in range(40):
        await rig.save(range(8 * round_number, 8 * round_number + 8))
        await rig.second("a")
    assert 0 < sum(rig.failed) < 64
    assert sum(rig.failed[-20:]) == 0
    assert rig.remaining() >= DISK // 2


async def test_what_other_files_fill_is_full_and_blocks_go_to_another_storage_meanwhile(
    disk: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "b", DISK) as other:
        rig = Disks(disk, other)
        for number in range(20):
            await rig.save([number])
        others = fill(disk)
        health = await rig.probed("a")
        assert (health.state, health.is_full) == (HealthState.SH_DEGRADED, True)
        assert await rig.save([100]) == {"b"}
        assert await rig.left(range(20)) == list(range(20)), "a full storage is read on"
        await rig.second("a")
        assert rig.reasons()["medium"] > 0
        others.unlink()
        await rig.probed("a")
        assert await rig.save([101]) == {"a"}


async def test_a_cache_gives_way_to_other_files_and_is_not_emptied_for_nothing(disk: Path) -> None:
    rig = Disks(disk)
    for number in range(40):
        await rig.save([number])
    for _ in range(50):
        fill(disk)  # takes whatever an eviction frees
        await rig.second("a")
    assert 20 <= len(await rig.left(range(40))) < 40
    for _ in range(5):
        fill(disk)
        await rig.probed("a", seconds=61)
        await rig.second("a")
    assert len(await rig.left(range(40))) < 30


async def test_a_file_system_without_inodes_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "a", 64 * MIB, most_files=400) as disk:
        rig = Disks(disk)
        for number in range(400):
            await rig.save([number])
            await rig.second("a")
        assert sum(rig.failed) == 0
        assert await rig.left([399]) == [399]
        assert len(await rig.left(range(400))) >= 50


@pytest.mark.parametrize("keys_per_file", [1, 4])
async def test_blocks_leave_a_disk_on_which_not_one_byte_is_left(disk: Path, keys_per_file: int) -> None:
    """Of packed files the witness and notes about slots have to be written there, too."""
    rig = Disks(disk, keys_per_file=keys_per_file)
    rig.storages.slot_reuse.numbers = DeletionNumbers(rig.tables)
    for number in range(10):
        await rig.save(range(4 * number, 4 * number + 4))
    await rig.second("a")
    fill(disk)
    for _ in range(10):
        await rig.second("a")
    assert free_bytes(disk) > 2 * BLOCK
    assert (await rig.probed("a")).is_full is False


async def test_a_read_only_medium_evicts_nothing() -> None:
    pressure = World(is_unwritable=True, is_full=False)
    assert pressure.step() == {}


async def test_a_storage_whose_mark_is_off_keeps_its_blocks() -> None:
    assert World(used_percentage=1.5).step() == {}


# ── Steps, on a medium made up ──


@dataclass
class World:
    """A full storage with 1,000 blocks of a byte."""

    is_full: bool = True
    is_unwritable: bool = False
    used_percentage: float = 0.0
    space: StorageSpace | None = None
    goal: int = 100
    held: HeldBytes = field(default_factory=lambda: HeldBytes(1000, 0))
    health: StorageHealth = field(init=False)

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.health = StorageHealth(
            HealthState.SH_DEGRADED, is_full=self.is_full, is_unwritable=self.is_unwritable, space=self.space
        )
        margins = FreeMargins(lambda _name: self.goal // 4)
        self.pressure = MediaPressure(lambda _name: self.health, margins, lambda _name: 1, self.clock)

    def step(self, seconds: float = 1.0, free: int | None = None) -> Mapping[str, int]:
        """Observe the medium once more; return the limits."""
        self.clock.time += seconds
        space = self.space if free is None else StorageSpace(5_000, free)
        self.health = replace(self.health, observations=self.health.observations + 1, space=space)
        return self.limits()

    def limits(self) -> Mapping[str, int]:
        config = StorageConfig("s", NfsStorageSpec("/s"), used_percentage=self.used_percentage)
        return self.pressure.limits(self.pressure.full([config]), {"s": self.held})


def test_one_observation_allows_one_step() -> None:
    """Free space is as old as the last probe: what was evicted since must not be missed again."""
    world = World()
    assert world.step(free=20) == {"s": 920}
    world.held = HeldBytes(920, 80)
    assert world.limits() == {"s": 920}
    assert world.step(free=20) == {"s": 920}, "what is marked is as good as free"
    world.held = HeldBytes(920, 0)
    assert world.step(free=90) == {"s": 910}
    assert world.step(free=0) == {"s": 828}, "never more than a tenth"


def test_a_medium_of_unknown_space_loses_a_fiftieth_at_a_time() -> None:
    """As Mooncake, or a file system with a quota of its own."""
    for space in (None, StorageSpace(-1, -1), StorageSpace(10_000, 5_000)):
        world = World(space=space)
        assert world.step() == {"s": 980}
        world.held = HeldBytes(980, 20)
        assert world.step() == {"s": 980}, "the last step is not deleted yet"
        world.held = HeldBytes(980, 0)
        assert world.step() == {"s": 961}


def test_a_refusal_after_a_probe_takes_no_second_step_of_the_same_size() -> None:
    """What the probe missed was evicted and deleted meanwhile."""
    world = World()
    assert world.step(free=20) == {"s": 920}
    world.held = HeldBytes(920, 0)
    world.health = replace(world.health, observations=world.health.observations + 1)
    assert world.limits() == {"s": 902}


def test_steps_that_help_nothing_become_rare() -> None:
    world = World()
    limits = []
    for _ in range(100):
        (limit,) = world.step(free=0).values()
        limits.append(limit)
        world.held = HeldBytes(limit, 0)
    assert 600 < limits[-1] < 900
    assert len(set(limits)) <= 6


def test_new_blocks_in_the_place_of_old_ones_are_help() -> None:
    """Also where free space falls meanwhile, since metadata takes more of it than small blocks give back."""
    world, steps = World(), 0
    for step in range(20):
        (limit,) = world.step(free=4_000 - 100 * step).values()
        steps += limit < world.held.remaining
        world.held = HeldBytes(limit + 50, 0)
    assert steps == 20


async def test_guaranteed_blocks_stay_while_others_can_go(disk: Path) -> None:
    rig = Disks(disk, storage_guarantees=(StorageGuarantee("a", DISK),))
    for number in range(20):
        await rig.save([number])
    fill(disk)
    await rig.second("a")
    assert rig.reasons()["medium"] > 0, "its own guarantee does not keep a full disk full"
