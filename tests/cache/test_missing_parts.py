"""Reports of missing bytes: what the manager does not see either goes, whole; nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from at_once import now
from cache_rig import Rig, group, instance, opened, uris

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.missing import MissingPart, MissingReport
from kvcm.cache.pins import PinRequest
from kvcm.model.errors import StorageIOError, UnknownInstanceError
from kvcm.model.locations import decode_chunk
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.file import FileStorage


async def parts_of(rig: Rig, key: int) -> list[MissingPart]:
    """The parts of a block, those of older locations first."""
    record = await rig.record(key)
    assert record is not None
    return [MissingPart(key, spec.uri) for place in record.locations for spec in decode_chunk(place.chunk).specs]


async def lose(rig: Rig, *parts: MissingPart, storage: str = "slow") -> None:
    """Let bytes vanish behind the manager's back."""
    backend = rig.storages.backend(storage)
    assert backend is not None
    await backend.delete([part.uri for part in parts])


async def report(rig: Rig, *parts: MissingPart) -> MissingReport:
    return await rig.manager.report_missing("i", parts)


async def test_a_location_with_a_missing_part_goes_as_a_whole() -> None:
    with opened(group(delay_ms=2000)) as rig:
        await rig.store([1, 2])
        first, second = await parts_of(rig, 1)
        await lose(rig, first)
        assert await report(rig, first) == MissingReport(1, 0)
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
        found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, [1, 2]))
        assert list(found.keys) == [2]
        backend = rig.storages.backend("slow")
        assert backend is not None
        assert await rig.executor.run_due() == 0  # a reader may still be reading the other part (invariant 6)
        rig.wait(2)
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [[], ["SERVING"]]
        assert await backend.exists([second.uri]) == [False]
        assert rig.used_bytes == 20


async def test_parts_that_are_there_are_not_believed_to_be_missing() -> None:
    with opened() as rig:
        await rig.store([1, 2])
        there, gone = (await parts_of(rig, 1))[0], (await parts_of(rig, 2))[1]
        await lose(rig, gone)
        assert await report(rig, there, gone, there) == MissingReport(1, 2)
        assert await rig.statuses([1, 2]) == [["SERVING"], ["DELETING"]]


async def test_parts_that_nobody_names_are_unconfirmed() -> None:
    """Made-up uris, unknown blocks, the right uri with the wrong block, what is written or deleted meanwhile."""
    with opened() as rig:
        await rig.store([1, 2])
        started = await rig.start([3])
        await rig.store([4])
        deleted = (await parts_of(rig, 4))[0]
        await rig.manager.remove("i", [4], NO_MASK)
        written = MissingPart(3, next(iter(uris(started.chunks)[0].values())))
        of_another = MissingPart(1, (await parts_of(rig, 2))[0].uri)
        parts = [
            MissingPart(1, "file://x/y?size=1"),
            MissingPart(1, ""),
            MissingPart(9, ""),
            of_another,
            written,
            deleted,
        ]
        for part in parts:
            await lose(rig, part)
        assert await report(rig, *parts) == MissingReport(0, 6)
        assert await rig.statuses([1, 2, 3, 4]) == [["SERVING"], ["SERVING"], ["WRITING"], ["DELETING"]]


async def test_reporting_again_changes_nothing() -> None:
    with opened() as rig:
        await rig.store([1])
        part, _ = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)
        assert await report(rig, part) == MissingReport(0, 1)


async def test_a_replica_stays() -> None:
    with opened() as rig:
        await rig.store([1])
        (lost, *_) = await parts_of(rig, 1)
        await rig.store([1], min_replica_count=2)
        await lose(rig, lost)
        assert await report(rig, lost) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


GROUPS = {"both": ("tp0", "tp1"), "first": ("tp0",)}


async def test_spec_groups_that_have_nothing_in_common_live_apart() -> None:
    with opened(registered=instance(groups={"half0": ("tp0",), "half1": ("tp1",)})) as rig:
        await rig.store([1], spec_groups=["half0"])
        await rig.store([1], spec_groups=["half1"])
        part, _ = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


async def test_the_rest_that_makes_up_a_spec_group_stays() -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        await rig.store([1, 2], spec_groups=["first", "first"])
        await rig.store([1, 2])
        (_, second), (other, _) = await parts_of(rig, 1), await parts_of(rig, 2)
        await lose(rig, second, other)
        assert await report(rig, second) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["SERVING", "DELETING"]]  # `first` alone is a spec group
        assert await report(rig, other) == MissingReport(2, 0)
        assert await rig.statuses([2]) == [["DELETING", "DELETING"]]  # tp1 alone is none


async def test_what_is_being_written_may_complete_the_block() -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        await rig.store([1], spec_groups=["first"])
        started = await rig.start([1])
        (part, *_) = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["DELETING", "WRITING"]]
        await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1))
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


class Faulty(DummyStorage):
    """A storage that does not say what is there."""

    error: Exception | None = None
    asked = 0

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await super().exists(uris)


@pytest.mark.parametrize("error", [StorageIOError("not mounted"), OSError("i/o error"), RuntimeError("defect")])
async def test_a_storage_that_cannot_be_asked_loses_nothing(error: Exception) -> None:
    """Not even what another storage says is missing: the caller does not know how far the report got."""
    with opened(group(storages=("pool", "slow"))) as rig:
        faulty = Faulty("pool", "/p/", 1)
        faulty.error = error
        config = next(each for each in rig.registry.storages.all() if each.global_unique_name == "pool")
        rig.storages.install(config, faulty)
        await rig.store([1])
        rig.enable("pool", enabled=False)
        await rig.store([2])
        on_pool, on_slow = (await parts_of(rig, 1))[0], (await parts_of(rig, 2))[0]
        await lose(rig, on_slow)
        with pytest.raises(StorageIOError, match="storage 'pool' is not available"):
            await report(rig, on_slow, on_pool)
        assert faulty.asked == 0, "what is down may hang"
        rig.enable("pool", enabled=True)
        with pytest.raises(StorageIOError, match=f"storage 'pool' cannot be asked: {error}"):
            await report(rig, on_slow, on_pool)
        assert faulty.asked == 1
        assert await rig.statuses([1, 2]) == [["SERVING"], ["SERVING"]]


async def test_a_storage_that_is_not_open_loses_nothing() -> None:
    with opened() as rig:
        await rig.store([1])
        part, _ = await parts_of(rig, 1)
        await lose(rig, part)
        rig.storages.close("slow")
        with pytest.raises(StorageIOError, match="storage 'slow' is not open"):
            await report(rig, part)
        assert await rig.statuses([1]) == [["SERVING"]]


async def test_an_unknown_instance_is_refused() -> None:
    with opened() as rig, pytest.raises(UnknownInstanceError):
        await rig.manager.report_missing("other", [MissingPart(1, "x")])


async def test_pinned_blocks_go_too_when_their_bytes_are_gone() -> None:
    with opened(replace(group(), pin_budget_bytes=100)) as rig:
        await rig.store([1])
        assert await rig.manager.pin("i", PinRequest([1], "me", 100)) is not None
        part, _ = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)


@pytest.mark.parametrize("damage", ["removed", "cut short"])
async def test_files_are_looked_for_on_the_disk(tmp_path: Path, damage: str) -> None:
    with opened(group(storages=("disk",))) as rig:
        now(rig.registry.storages.add(StorageConfig("disk", NfsStorageSpec(str(tmp_path / "disk"), 1))))
        started = await rig.store([1, 2])
        for location in uris(started.chunks):
            for uri in map(LocationUri.parse, location.values()):
                path = Path(uri.path)
                await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
                await asyncio.to_thread(path.write_bytes, bytes(uri.size))
        assert isinstance(rig.storages.backend("disk"), FileStorage)
        (lost, _), (there, _) = await parts_of(rig, 1), await parts_of(rig, 2)
        path = Path(LocationUri.parse(lost.uri).path)
        if damage == "removed":
            await asyncio.to_thread(path.unlink)
        else:
            await asyncio.to_thread(path.write_bytes, bytes(9))
        assert await report(rig, lost, there) == MissingReport(1, 1)
        await asyncio.to_thread((tmp_path / "disk").rename, tmp_path / "unmounted")
        with pytest.raises(StorageIOError, match="cannot be asked"):
            await report(rig, there)
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
