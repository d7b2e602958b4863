"""Pins in exports: they hold the same locations again, whatever cut the import off before, and never more than fits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO

import pytest
from audit_rig import KINDS, IndexRig, chain, opened

from kvcm.cache.archive import ArchiveReader, ArchiveWriter, Head
from kvcm.cache.export import Exporter
from kvcm.cache.imported_documents import decoded
from kvcm.cache.importing import Importer
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.pin_transfer import ExportedPin, PinImport, exported_pins
from kvcm.cache.pin_values import HeldPlace
from kvcm.index.search_cache import CacheBudget
from kvcm.model.api_keys import new_key
from kvcm.model.errors import StorageIOError
from kvcm.model.principals import Role
from kvcm.registry.closed import ClosedStorages
from kvcm.registry.keys import NewKey
from kvcm.store.store import Table

_BYTES = 10  # of a block of the rig
_LIFE = 1000.0


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A deployment with blocks 1 to 9 of instance `i`, whose group may pin five of them."""
    async with opened(request.param, request) as made:
        await made.configure()
        group = made.registry.groups.get("g")
        await made.registry.groups.update(replace(group, pin_budget_bytes=5 * _BYTES, version=4), group.version)
        await made.put("i", chain(9))
        yield made


def _pin(rig: IndexRig, pin_id: str, keys: range, life: float = _LIFE) -> ExportedPin:
    places = tuple(HeldPlace(key, f"l{key}", _BYTES) for key in keys)
    return ExportedPin(pin_id, "i", "me", rig.clock.now() + life, places)


def _import(rig: IndexRig) -> PinImport:
    metadata = rig.metadata
    caches = OpenCaches(rig.registry, ClosedStorages(), metadata.new_backend, metadata.usage, CacheBudget())
    return PinImport(rig.registry, caches, metadata.store, rig.clock)


async def _marked(rig: IndexRig) -> list[int]:
    """Blocks that are marked as pinned."""
    return sorted(
        key
        for key, (record, _) in (await rig.blocks("i")).items()
        if any(each.pinned_until for each in record.locations)
    )


async def _there(rig: IndexRig) -> list[ExportedPin]:
    return await exported_pins(rig.metadata.store, rig.registry, rig.clock.now())


async def test_a_pin_holds_the_same_again_and_a_second_import_changes_nothing(rig: IndexRig) -> None:
    pin = _pin(rig, "p", range(1, 4))
    for _ in range(2):
        work = _import(rig)
        await work.restore([pin])
        assert (work.restored, work.refused) == (["p"], [])
        assert (await _there(rig), await _marked(rig)) == ([pin], [1, 2, 3])
    assert (await rig.verified()).is_clean


async def test_what_is_over_or_does_not_fit_or_has_no_blocks_is_left_out(rig: IndexRig) -> None:
    work = _import(rig)
    fits = _pin(rig, "a", range(1, 5))
    await work.restore(
        [_pin(rig, "over", range(5, 7), -1.0), fits, _pin(rig, "large", range(5, 7)), _pin(rig, "gone", range(20, 21))]
    )
    assert work.restored == ["a"]
    assert [sentence.split(" ")[1] for sentence in work.refused] == ["large", "gone"]
    assert "pin_budget_bytes of group 'g' is 50, 40 bytes are pinned" in work.refused[0]
    assert (await _there(rig), await _marked(rig)) == ([fits], [1, 2, 3, 4])
    assert (await rig.verified()).is_clean


async def test_of_a_prefix_that_ends_sooner_here_only_that_is_held(rig: IndexRig) -> None:
    work = _import(rig)
    await work.restore([_pin(rig, "p", range(7, 12))])
    assert work.restored == ["p"]
    assert (await _there(rig), await _marked(rig)) == ([_pin(rig, "p", range(7, 10))], [7, 8, 9])


async def test_a_pin_that_was_begun_and_cut_off_is_finished(rig: IndexRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of its steps: the budget, the document, the marks."""
    table = type(rig.metadata.store.table("pins", 16))
    real = table.replace
    for most in range(4):  # changes of documents before the death
        pin, calls = _pin(rig, "p", range(1, 4)), 0

        async def dying(
            self: Table, name: str, old: bytes | None, new: bytes | None, due: float = 0.0, *, most: int = most
        ) -> bool:
            nonlocal calls
            calls += 1
            if calls > most:
                raise StorageIOError("killed")
            return await real(self, name, old, new, due)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(table, "replace", dying)
            try:
                await _import(rig).restore([pin])
            except StorageIOError:
                assert most < 2
        work = _import(rig)
        await work.restore([pin])
        assert (work.restored, await _there(rig), await _marked(rig)) == (["p"], [pin], [1, 2, 3])
        assert (await rig.verified()).is_clean
        await rig.metadata.store.table("pins", 16).replace("p", (await _document(rig)), None)
        budgets = rig.metadata.store.table("pinbudgets", 16)
        await budgets.replace("g", await budgets.get("g"), None)


async def _document(rig: IndexRig) -> bytes | None:
    return await rig.metadata.store.table("pins", 16).get("p")


async def test_keys_move_with_accounts_and_stay_with_groups(rig: IndexRig, request: pytest.FixtureRequest) -> None:
    key, secret = await rig.registry.keys.create(NewKey("engine", Role.ROLE_ENGINE, ("g",)))
    assert secret is not None
    await rig.registry.keys.log_in("nobody", Role.ROLE_ADMIN, 3600.0)
    admin = new_key()
    await rig.registry.taken_keys.take_over("admin", admin)
    await rig.registry.keys.revoke(admin.id)
    kinds = {
        with_accounts: [type(value).__name__ for value in await _documents(rig, with_accounts=with_accounts)]
        for with_accounts in (False, True)
    }
    assert not {"ApiKey", "TakenKey"} & set(kinds[False])
    assert kinds[True].count("ApiKey") == kinds[True].count("TakenKey") == 1, "logins end with the store"
    archive, _ = await rig.exported(with_accounts=True)
    async with opened("memory", request) as target:
        for _ in range(2):
            imported = await target.imported(archive)
            await target.registry.refresh()
            assert target.registry.keys.shown(secret) == key
            assert await target.registry.taken_keys.take_over("admin", admin) is None, "what was revoked stays revoked"
        assert imported.created == {}
    async with opened("memory", request) as part:
        await part.imported(archive, "g")
        assert (part.registry.keys.all(), await part.registry.taken_keys.all()) == ([], [])


async def test_pins_of_an_archive_are_those_of_instances_that_are_wanted(rig: IndexRig) -> None:
    file = BytesIO()
    pins = [_pin(rig, "p", range(1, 3)), replace(_pin(rig, "q", range(1, 2)), instance_id="j")]
    written = await Exporter(rig.registry, rig.metadata.new_backend, ArchiveWriter(file, Head("1", "c", "", 0.0))).run(
        pins=pins
    )
    assert written.pins == 2
    importer = Importer(rig.registry, rig.metadata.new_backend, rig.metadata.usage, rig.metadata.store)
    for frame in ArchiveReader(BytesIO(file.getvalue()), "file").frames():
        await importer.take(frame)
    assert importer.pins == pins


async def _documents(rig: IndexRig, *, with_accounts: bool) -> list[object]:
    archive, _ = await rig.exported(with_accounts=with_accounts)
    frames = ArchiveReader(BytesIO(archive), "file").frames()
    return [decoded(frame) for frame in frames if type(frame).__name__ == "Document"]  # type: ignore[arg-type]
