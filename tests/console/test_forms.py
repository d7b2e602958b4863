"""Forms: filled-in fields, and the limits of groups."""

from __future__ import annotations

from typing import Any

import pytest
from history_documents import MIB, group_usage, usage
from hypothesis import given
from hypothesis import strategies as st

from kvcm.console.forms import Field, Sheet, exact_size
from kvcm.console.pages.groups import changes_of, consequences, limit_fields, patch_of, sheet_of, storage_types
from kvcm.console.resources import RefusedError
from kvcm.model.units import parse_size
from kvcm.service.rest.conversion import merge_patch
from kvcm.service.rest.group_resource import GroupDocument

FIELDS = (
    Field("name", "Name", is_required=True),
    Field("nfs.root_path", "Directory"),
    Field("capacity_bytes", "Capacity", kind="size"),
    Field("used_percentage", "Mark", kind="percent"),
    Field("ttl_seconds", "Ends", kind="span"),
    Field("count", "Slots", kind="integer"),
    Field("touch", "Touch", kind="check"),
    Field("verbs", "Verbs", kind="several", choices=(("MATCH", "match"), ("PIN", "pin"))),
    Field("password", "Password", kind="password"),
)


def refused(detail: str, *errors: tuple[str, str]) -> RefusedError:
    return RefusedError(400, {"detail": detail, "errors": [{"field": name, "allowed": why} for name, why in errors]})


def test_filled_fields_become_a_document() -> None:
    form = {
        "name": " disk ", "nfs.root_path": "/a/", "capacity_bytes": "1.5 GiB", "used_percentage": "90",
        "ttl_seconds": "30d", "count": "-8", "touch": "yes", "verbs": "MATCH\nPIN", "password": " x ", "other": "1",
    }  # fmt: skip
    assert Sheet.filled(FIELDS, form).document() == {
        "name": "disk", "nfs": {"root_path": "/a/"}, "capacity_bytes": 3 << 29, "used_percentage": 0.9,
        "ttl_seconds": 30 * 86400, "count": -8, "touch": True, "verbs": ["MATCH", "PIN"], "password": " x ",
    }  # fmt: skip


def test_empty_fields_are_left_out() -> None:
    assert Sheet.filled(FIELDS, {"name": "disk"}).document() == {"name": "disk", "touch": False, "verbs": []}


def test_an_empty_required_field_is_refused() -> None:
    sheet = Sheet.filled(FIELDS, {"name": "  "})
    with pytest.raises(RefusedError) as caught:
        sheet.document()
    assert sheet.refused(caught.value).faults == {"name": "must not be empty"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("capacity_bytes", "5 apples"), ("used_percentage", "many"), ("ttl_seconds", "soon")],
        *[("count", "1.5"), ("count", "٣"), ("used_percentage", "-1")],
    ],
)
def test_text_that_is_no_number_is_reported_beside_its_field(name: str, text: str) -> None:
    sheet = Sheet.filled(FIELDS, {"name": "disk", name: text})
    with pytest.raises(RefusedError) as caught:
        sheet.document()
    again = sheet.refused(caught.value)
    assert again.faults.keys() == {name}
    assert repr(text) in again.faults[name]
    assert again.values == sheet.values


@pytest.mark.parametrize(
    ("error", "name", "fault"),
    [
        (refused("x", ("body.nfs.root_path", "must be a text")), "nfs.root_path", "must be a text"),
        (refused("x", ("path.name", "String should match pattern '^a$'")), "name", "has characters that are not"),
        (refused("x", ("body.verbs[1]", "must be a verb")), "verbs", "must be a verb"),
        (refused("x", ("body.count", "Input should be a valid integer")), "count", "must be a whole number"),
        (refused("root_path 'tmp' is not an absolute path"), "nfs.root_path", "root_path 'tmp' is not an absolute"),
        (refused("missing or invalid fields: {A: {count}}: count is required"), "count", "count is required"),
        (refused("verbs are for the name"), "verbs", "verbs are for the name"),
    ],
)
def test_refusals_stand_beside_the_field_that_they_name(error: RefusedError, name: str, fault: str) -> None:
    sheet = Sheet.blank(FIELDS).refused(error)
    assert sheet.fault == ""
    assert sheet.faults.keys() == {name}
    assert sheet.faults[name].startswith(fault)
    assert [entry.fault for entry in sheet.entries if entry.field.name == name] == [sheet.faults[name]]


def test_refusals_without_a_field_stand_above_the_form() -> None:
    sheet = Sheet.blank(FIELDS).refused(refused("the counter of nothing is away"))
    assert (sheet.fault, sheet.faults) == ("the counter of nothing is away", {})


def test_a_signed_out_user_signs_in_again() -> None:
    with pytest.raises(RefusedError):
        Sheet.blank(FIELDS).refused(RefusedError(401, {"detail": "name"}))


def test_passwords_are_not_sent_back() -> None:
    entries = Sheet.filled(FIELDS, {"password": "secret", "name": "disk"}).entries
    assert {entry.field.name: entry.value for entry in entries if entry.value} == {"name": "disk"}


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 1000).map(lambda count: count << 40))
def test_sizes_are_read_as_they_were_shown(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes


def test_round_sizes_are_short() -> None:
    assert [exact_size(each) for each in (64 << 30, 500_000_000, 0, 1234567, -1)] == [
        "64 GiB", "500 MB", "0", "1234567", "",
    ]  # fmt: skip


GROUP_FIELDS = limit_fields(["ST_NFS", "ST_MOONCAKE"])
STRATEGY = "cache_config.reclaim_strategy"
MARK = f"{STRATEGY}.trigger_strategy.used_percentage"


def document(**changes: Any) -> dict[str, Any]:
    made = GroupDocument(name="g", storage_candidates=["s"], global_quota_group_name="q", **changes)
    return made.model_dump(exclude_none=True)


def typed(group: dict[str, Any], **texts: str) -> Sheet:
    """Return a form with some fields changed, by their last names."""
    values = dict(sheet_of(GROUP_FIELDS, group).values)
    for name, text in texts.items():
        (path,) = [each for each in values if each.rpartition(".")[2] == name]
        values[path] = text
    return Sheet.filled(GROUP_FIELDS, values)


def after(group: dict[str, Any], **texts: str) -> dict[str, Any]:
    """Return the group with the typed values."""
    patched = merge_patch(group, patch_of(typed(group, **texts), group))
    return GroupDocument.model_validate(patched).model_dump(exclude_none=True)


QUOTA = {"capacity": 4 << 30, "quota_config": [{"storage_type": "ST_NFS", "capacity": 1 << 30}]}


def test_unchanged_fields_are_not_in_the_patch() -> None:
    group = document(quota=QUOTA)
    assert patch_of(typed(group), group) == {}
    assert changes_of(typed(group), group) == []
    assert patch_of(typed(group, capacity=" 4 GiB "), group) == {}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_instance_count": st.integers(0, 1 << 40), "pin_budget_bytes": st.integers(0, 1 << 60),
            "quota": st.fixed_dictionaries({"capacity": st.integers(0, 1 << 60)}),
        },
    ),
    st.one_of(st.just(0.0), st.integers(1, 2000).map(lambda tenths: tenths / 1000)),
    st.integers(0, 1 << 31).filter(lambda seconds: seconds < 1 << 31),
)  # fmt: skip
def test_a_form_shows_the_values_of_the_document(changes: dict[str, Any], mark: float, seconds: int) -> None:
    strategy = {"trigger_strategy": {"used_percentage": mark}, "policy": {"name": "lru", "ttl_seconds": seconds}}
    group = document(**changes, cache_config={"reclaim_strategy": strategy})
    blank = document(cache_config={"reclaim_strategy": {"trigger_strategy": {}}})
    sheet = sheet_of(GROUP_FIELDS, group)
    patched = GroupDocument.model_validate(merge_patch(blank, patch_of(sheet, blank))).model_dump(exclude_none=True)
    assert sheet_of(GROUP_FIELDS, patched).values == sheet.values
    assert (patched.get("quota") or {"capacity": 0})["capacity"] == (group.get("quota") or {"capacity": 0})["capacity"]
    found = patched["cache_config"]["reclaim_strategy"]
    assert found["trigger_strategy"]["used_percentage"] == pytest.approx(mark)
    assert found["policy"]["ttl_seconds"] == seconds


def test_empty_fields_have_their_default() -> None:
    group = document(quota=QUOTA, max_instance_count=7)
    found = after(group, capacity="", max_instance_count="", used_percentage="")
    assert found["max_instance_count"] == 0
    assert found["quota"]["capacity"] == 0
    assert found["cache_config"]["reclaim_strategy"]["trigger_strategy"]["used_percentage"] == 0.0


def test_quotas_of_types_that_the_form_does_not_show_stay() -> None:
    other = {"storage_type": "ST_3FS", "capacity": 7}
    group = document(quota={"capacity": 4 << 30, "quota_config": [other, *QUOTA["quota_config"]]})  # type: ignore[misc]
    found = after(group, ST_NFS="", ST_MOONCAKE="2 GiB")
    assert found["quota"]["quota_config"] == [other, {"storage_type": "ST_MOONCAKE", "capacity": 2 << 30}]
    assert found["quota"]["capacity"] == 4 << 30


def test_a_quota_of_zero_is_not_the_same_as_none() -> None:
    group = document(quota={"capacity": 1, "quota_config": [{"storage_type": "ST_NFS", "capacity": 0}]})
    assert sheet_of(GROUP_FIELDS, group).values["quota.quota_config.ST_NFS"] == "0"
    assert after(group, ST_NFS="")["quota"]["quota_config"] == []


def test_parse_errors_stand_beside_their_field() -> None:
    group = document(quota=QUOTA)
    sheet = typed(group, capacity="lots", max_key_count="1.5")
    with pytest.raises(RefusedError) as caught:
        patch_of(sheet, group)
    faults = sheet.refused(caught.value).faults
    assert faults.keys() == {"quota.capacity", "cache_config.meta_indexer_config.max_key_count"}


def test_changes_are_reported_as_people_typed_them() -> None:
    group = document(quota=QUOTA)
    (quota, ttl) = changes_of(typed(group, capacity="2 GiB", ttl_seconds="12h"), group)
    assert (quota.label, quota.before, quota.after) == ("Quota", "4 GiB", "2 GiB")
    assert (ttl.before, ttl.after) == ("–", "12h")


def test_types_of_storages_follow_from_their_documents() -> None:
    assert storage_types([{"nfs": {}}, {"mooncake": {}, "nfs": None}, {"nfs": {}}]) == ["ST_MOONCAKE", "ST_NFS"]


def _reported(used: dict[str, int], quota: dict[str, Any], mark: float = 0.8, **more: Any) -> list[str]:
    strategy = {"trigger_strategy": {"used_percentage": mark, **more.pop("trigger", {})}}
    config = {"reclaim_strategy": strategy, "meta_indexer_config": {"max_key_count": more.pop("max_key_count", 0)}}
    return consequences(document(quota=quota, cache_config=config), group_usage("g", used, **more))


def test_limits_that_hold_have_no_consequences() -> None:
    assert _reported(usage(80, 100), {"capacity": 100 * MIB}) == []


def test_a_smaller_quota_reports_evicted_bytes_and_refused_writes() -> None:
    evicted, refused = _reported(usage(90, 200), {"capacity": 50 * MIB}, pinned_bytes=10 * MIB)
    assert "eviction begins above 40.0 MiB: about 51.0 MiB will be evicted" in evicted
    assert evicted.endswith("will be evicted, but 10.0 MiB are pinned and stay.")
    assert refused == "It uses 90.0 MiB of 50.0 MiB: writes are refused until that much is deleted."


def test_without_a_mark_nothing_is_evicted() -> None:
    (refused,) = _reported(usage(90, 200), {"capacity": 50 * MIB}, mark=2.0)
    assert "until blocks are removed: it has no mark" in refused


def test_blocks_in_deletion_count_as_gone() -> None:
    assert _reported(usage(100, 100, deleting=30), {"capacity": 100 * MIB}) == []


def test_the_lowest_mark_counts() -> None:
    (evicted,) = _reported(usage(70, 100), {"capacity": 100 * MIB}, trigger={"used_size": 50 * MIB})
    assert "above 50.0 MiB: about 21.0 MiB" in evicted


def test_quotas_of_types_and_limits_of_keys_are_reported_apart() -> None:
    types = [{"storage_type": "ST_NFS", "usage": usage(30, -1)}]
    instances = [{"instance_id": "i", "key_count": 90}, {"instance_id": "j", "key_count": 80}]
    quota = {"capacity": 1000 * MIB, "quota_config": [{"storage_type": "ST_NFS", "capacity": 20 * MIB}]}
    found = _reported(usage(30, 1000), quota, types=types, instances=instances, max_key_count=100)
    assert found[0].startswith("On file storages it uses 30.0 MiB, and eviction begins above 16.0 MiB")
    assert found[1].startswith("On file storages it uses 30.0 MiB of 20.0 MiB: writes are refused")
    assert found[2] == "Instance i has 90 blocks, and 100 are allowed: about 12 will be evicted."
    assert len(found) == 3
    without = _reported(usage(1, 9), {"capacity": 9 * MIB}, mark=0.0, instances=instances, max_key_count=85)
    assert without == ["Instance i has 90 blocks, and 85 are allowed: new ones are refused."]
