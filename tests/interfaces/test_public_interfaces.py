"""Public interfaces are as they were: moves and renames inside the code change none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from public_interfaces import INTERFACES, snapshot


@pytest.mark.parametrize("name", INTERFACES)
def test_an_interface_is_as_its_snapshot_says(name: str) -> None:
    before = json.loads(snapshot(name).read_text())
    now = json.loads(json.dumps(INTERFACES[name]()))
    assert not list(differences(before, now)), "wanted? then run tests/interfaces/public_interfaces.py"


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield missing, new and changed values, by their path."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if key not in now:
                yield f"{path}/{key} is gone"
            elif key not in before:
                yield f"{path}/{key} is new"
            else:
                yield from differences(before[key], now[key], f"{path}/{key}")
    elif before != now:
        yield f"{path}: {before!r} became {now!r}"


def test_differences_are_found_at_any_depth() -> None:
    before, now = {"a": {"b": [1], "c": 2}, "d": 0}, {"a": {"b": [1, 2], "e": 2}, "d": 0}
    assert list(differences(before, now)) == ["/a/b: [1] became [1, 2]", "/a/c is gone", "/a/e is new"]
