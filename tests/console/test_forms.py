"""What is filled in, and what is wrong with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.console.forms import Field, Sheet, exact_size
from kvcm.console.resources import RefusedError
from kvcm.sizes import parse_size

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


def test_what_is_filled_in_becomes_a_document() -> None:
    form = {
        "name": " disk ", "nfs.root_path": "/a/", "capacity_bytes": "1.5 GiB", "used_percentage": "90",
        "ttl_seconds": "30d", "count": "-8", "touch": "yes", "verbs": "MATCH\nPIN", "password": " x ", "other": "1",
    }  # fmt: skip
    assert Sheet.filled(FIELDS, form).document() == {
        "name": "disk", "nfs": {"root_path": "/a/"}, "capacity_bytes": 3 << 29, "used_percentage": 0.9,
        "ttl_seconds": 30 * 86400, "count": -8, "touch": True, "verbs": ["MATCH", "PIN"], "password": " x ",
    }  # fmt: skip


def test_what_is_empty_is_left_out() -> None:
    assert Sheet.filled(FIELDS, {"name": "disk"}).document() == {"name": "disk", "touch": False, "verbs": []}


def test_what_is_required_is_filled_in() -> None:
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
def test_what_is_no_number_is_told_beside_its_field(name: str, text: str) -> None:
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
def test_what_is_refused_stands_beside_what_it_names(error: RefusedError, name: str, fault: str) -> None:
    sheet = Sheet.blank(FIELDS).refused(error)
    assert sheet.fault == ""
    assert sheet.faults.keys() == {name}
    assert sheet.faults[name].startswith(fault)
    assert [entry.fault for entry in sheet.entries if entry.field.name == name] == [sheet.faults[name]]


def test_what_names_no_field_stands_above_all() -> None:
    sheet = Sheet.blank(FIELDS).refused(refused("the counter of nothing is away"))
    assert (sheet.fault, sheet.faults) == ("the counter of nothing is away", {})


def test_whoever_is_signed_out_signs_in_again() -> None:
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
