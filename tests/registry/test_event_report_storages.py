"""Event report storages: configured like others, named by groups apart, and never opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
from registry_rig import GROUP, INSTANCE, Opener

from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.groups import InstanceGroup, InstanceGroupQuota, QuotaConfig
from kvcm.model.instances import QueryType
from kvcm.model.storages import EventReportStorageSpec, NfsStorageSpec, StorageConfig, StorageType
from kvcm.registry.config_snapshots import Configuration
from kvcm.registry.document_cache import decode_document, encode_document
from kvcm.registry.registry import Registry
from kvcm.registry.startup_document import storage_configs_json
from kvcm.registry.validation import check_group
from kvcm.store.memory import MemoryTable

L1P5, L2 = StorageType.ST_EVENT_REPORT_L1P5, StorageType.ST_EVENT_REPORT_L2
SPEC = EventReportStorageSpec()
NFS = StorageConfig("nfs", NfsStorageSpec("/nfs/"))
HBM = StorageConfig("hbm", SPEC, report_type=L1P5)
DRAM = StorageConfig("dram", replace(SPEC, heartbeat_timeout_ms=7), report_type=L2)


def reporting(*names: str, **changes: Any) -> InstanceGroup:
    return replace(GROUP, event_report_storage_candidates=names, **changes)


async def registry_with(*configs: StorageConfig, opener: Opener | None = None) -> Registry:
    registry = Registry(opener or Opener(), MemoryTable())
    for config in configs:
        await registry.storages.add_in_background(config)
    return registry


def test_times_have_the_defaults_of_the_original() -> None:
    assert [getattr(SPEC, each.name) for each in fields(SPEC)] == [30_000, 300_000, 5_000, 30_000, 10_000]


async def test_one_is_listed_switched_changed_and_removed_and_never_opened() -> None:
    opener = Opener()
    registry = await registry_with(HBM, opener=opener)
    storages = registry.storages
    changed = replace(HBM, spec=replace(SPEC, cleanup_grace_ms=1))
    await storages.update_in_background(changed)
    await storages.set_enabled("hbm", enabled=False)
    assert storages.all() == [replace(changed, is_available=False)]
    await registry.refresh()
    await storages.retire("hbm", 12.5)
    assert (storages.all(), storages.drains(), opener.calls) == ([], [], [])
    await storages.add(replace(HBM, report_type=L2))  # there are no blocks for which the name would be kept


async def test_it_survives_a_restart() -> None:
    table = MemoryTable()
    before = Registry(Opener(), table)
    await before.storages.add(NFS)
    await before.storages.add(DRAM)
    await before.groups.create(reporting("dram", extra_info="{}"))
    await before.instances.register(replace(INSTANCE, default_query_type=QueryType.QT_PREFIX_MATCH))
    opener = Opener()
    after = Registry(opener, table)
    await after.load()
    assert (after.storages.all(), after.groups.all()) == ([DRAM, NFS], [reporting("dram", extra_info="{}")])
    assert after.instances.get(INSTANCE.instance_id).default_query_type is QueryType.QT_PREFIX_MATCH
    assert opener.calls == [("open", "nfs")]


def test_documents_of_other_storages_are_those_of_the_release_before() -> None:
    assert b"report_type" not in encode_document(NFS)
    assert decode_document(StorageConfig, encode_document(HBM)) == HBM
    with pytest.raises(StorageIOError, match="damaged"):
        decode_document(StorageConfig, encode_document(HBM).replace(b'"report_type":7', b'"report_type":77'))


async def test_a_configuration_with_reports_is_exported_and_loaded() -> None:
    source = await registry_with(NFS, HBM, DRAM)
    await source.groups.create(reporting("hbm", "dram"))
    opener = Opener()
    target = Registry(opener, MemoryTable())
    await target.snapshots.load(await source.snapshots.export())
    assert await target.snapshots.export() == await source.snapshots.export()
    assert opener.calls == [("open", "nfs")]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (replace(HBM, report_type=StorageType.ST_UNSPECIFIED), ["storage_type", "ST_UNSPECIFIED", L1P5.name, L2.name]),
        (replace(HBM, report_type=StorageType.ST_NFS), ["storage_type", "ST_NFS", L1P5.name, L2.name]),
        (replace(NFS, report_type=L2), ["storage_type", L2.name, "must be ST_NFS"]),
        (replace(HBM, capacity_bytes=5), ["capacity_bytes", "is 5", "must be 0"]),
        *(
            (replace(HBM, spec=replace(SPEC, **{each.name: value})), [each.name, f"is {value}", "must be > 0"])
            for each in fields(SPEC)
            for value in (0, -1)
        ),
    ],
)
async def test_a_malformed_one_is_refused(config: StorageConfig, named: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await registry_with(config)
    assert all(text in str(caught.value) for text in named), str(caught.value)


async def test_the_level_of_one_never_changes_and_it_cannot_be_drained() -> None:
    registry = await registry_with(HBM)
    with pytest.raises(InvalidArgumentError, match=r"event_report_l1p5.*event_report_l2.*remove it and add it again"):
        await registry.storages.update(replace(HBM, report_type=L2))
    with pytest.raises(InvalidArgumentError, match="'hbm' is of type event_report_l1p5: no bytes"):
        await registry.storages.drain("hbm", 12.5)


async def test_a_group_finds_its_storage_of_each_type() -> None:
    registry = await registry_with(NFS, HBM, DRAM)
    await registry.groups.create(reporting("absent", "hbm", "dram"))
    group = registry.groups.get("group")
    assert registry.storages.find_event_report(group, L2) == DRAM
    assert registry.storages.find_event_report(group, L1P5) == HBM
    assert registry.storages.find_event_report(reporting("hbm"), L2) is None


SECOND = replace(DRAM, global_unique_name="dram2")
MISFITS = [
    (reporting(storage_candidates=("nfs", "hbm")), [".storage_candidates", "'hbm'", "event_report_l1p5"]),
    (reporting("hbm", "nfs"), ["event_report_storage_candidates", "'nfs'", "file", "'event_report_l2'"]),
    (reporting("dram2", "dram"), ["event_report_storage_candidates", "'dram2' and 'dram'", "one of each type"]),
]


async def _add_all(registry: Registry, configs: Iterable[StorageConfig]) -> None:
    for config in configs:
        await registry.storages.add(config)


def _names(error: KvcmError, texts: list[str]) -> bool:
    return all(text.lstrip(".") in str(error) for text in texts)


@pytest.mark.parametrize(("group", "named"), MISFITS)
async def test_a_group_is_refused_whose_storages_are_of_other_types(group: InstanceGroup, named: list[str]) -> None:
    registry = await registry_with(NFS, HBM, DRAM, SECOND)
    with pytest.raises(InvalidArgumentError) as created:
        await registry.groups.create(group)
    await registry.groups.create(reporting("hbm", "dram"))
    with pytest.raises(InvalidArgumentError) as updated:
        await registry.groups.update(replace(group, version=2), 1)
    with pytest.raises(InvalidArgumentError) as loaded:
        await registry.snapshots.load(Configuration(groups=(replace(group, name="other"),)))
    assert all(_names(caught.value, named) for caught in (created, updated, loaded))
    assert registry.groups.all() == [reporting("hbm", "dram")]


@pytest.mark.parametrize(("group", "named"), MISFITS)
async def test_a_storage_is_refused_that_does_not_fit_the_groups_that_name_it(
    group: InstanceGroup, named: list[str]
) -> None:
    """Whichever comes last."""
    registry = await registry_with()
    await registry.groups.create(group)
    wanted = (NFS, HBM, DRAM, SECOND)
    with pytest.raises(InvalidArgumentError) as loaded:
        await registry.snapshots.load(Configuration(storages=wanted))
    with pytest.raises(InvalidArgumentError) as added:
        await _add_all(registry, wanted)
    assert all(_names(caught.value, ["group 'group'", named[0]]) for caught in (loaded, added))


def test_what_a_group_says_by_itself_is_checked_too() -> None:
    with pytest.raises(InvalidArgumentError, match=r"event_report_storage_candidates lists \['hbm'\] more than once"):
        check_group(reporting("hbm", "hbm"))
    quota = InstanceGroupQuota(5, (QuotaConfig(L2, 5),))
    with pytest.raises(InvalidArgumentError, match="storage_type is ST_EVENT_REPORT_L2, must be a type that bytes"):
        check_group(reporting(quota=quota))


def test_transfer_layers_do_not_get_it() -> None:
    assert storage_configs_json([HBM]) == "[]"
