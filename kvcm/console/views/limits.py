"""Changing the limits of a group: from what was typed to a merge patch, and what the change will do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvcm.console import formats
from kvcm.console.forms import Sheet
from kvcm.console.views.limit_fields import TYPE_QUOTAS, sheet_of, value_at
from kvcm.model.groups import DEFAULT_HYSTERESIS

__all__ = ["Change", "changes_of", "consequences", "patch_of"]

Document = Mapping[str, Any]

_TRIGGER: Final = "cache_config.reclaim_strategy.trigger_strategy"


@dataclass(frozen=True, slots=True)
class Change:
    """One limit before and after."""

    label: str
    before: str
    after: str


def patch_of(sheet: Sheet, group: Document) -> dict[str, Any]:
    """Return a merge patch that gives a group what was typed; only what differs. What is empty has its default.

    Raises:
        RefusedError: something is no number, size or time.
    """
    typed, patch = sheet.document(), dict[str, Any]()
    for name in _changed(sheet, group):
        if name.startswith(f"{TYPE_QUOTAS}."):
            _put(patch, TYPE_QUOTAS, _type_quotas(sheet, typed, group))
        else:
            _put(patch, name, value_at(typed, name))
    return patch


def _changed(sheet: Sheet, group: Document) -> Iterator[str]:
    before = sheet_of(sheet.fields, group).values
    return (each.name for each in sheet.fields if sheet.values[each.name].strip() != before[each.name])


def _type_quotas(sheet: Sheet, typed: Document, group: Document) -> list[Mapping[str, Any]]:
    shown = {each.name.rpartition(".")[2] for each in sheet.fields if each.name.startswith(f"{TYPE_QUOTAS}.")}
    others = [each for each in value_at(group, TYPE_QUOTAS) or () if each["storage_type"] not in shown]
    named = value_at(typed, TYPE_QUOTAS) or {}
    return [*others, *({"storage_type": kind, "capacity": capacity} for kind, capacity in named.items())]


def _put(patch: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for step in above:
        patch = patch.setdefault(step, {})
    patch[last] = value


def changes_of(sheet: Sheet, group: Document) -> list[Change]:
    """Return what would change, for people."""
    before, names = sheet_of(sheet.fields, group).values, set(_changed(sheet, group))
    return [
        Change(each.label, before[each.name] or formats.NOTHING, sheet.values[each.name].strip() or formats.NOTHING)
        for each in sheet.fields
        if each.name in names
    ]


def consequences(group: Document, usage: Document) -> list[str]:
    """Return what a group's limits do to what it holds, in sentences; none where nothing is evicted or refused.

    Args:
        group: its document, as it will be.
        usage: what it uses now.
    """
    capacity = value_at(group, "quota.capacity") or 0
    marks = [_ratio_mark(group, capacity), _size_mark(group)]
    pinned = usage["pinned_bytes"]
    return [
        *_of_bytes("It", capacity, marks, usage["total"], pinned),
        *_of_types(group, usage, pinned),
        *_of_keys(group, usage),
    ]


_Mark = tuple[int, int] | None
"""Above what eviction begins, and down to where it goes."""


def _ratio_mark(group: Document, capacity: int) -> _Mark:
    share = value_at(group, f"{_TRIGGER}.used_percentage") or 0.0
    if not 0 < share <= 1:
        return None
    return int(capacity * share), int(capacity * max(0.0, share - _hysteresis(group)))


def _size_mark(group: Document) -> _Mark:
    size = value_at(group, f"{_TRIGGER}.used_size") or 0
    return (size, int(size * (1 - _hysteresis(group)))) if size else None


def _hysteresis(group: Document) -> float:
    found = value_at(group, f"{_TRIGGER}.hysteresis")
    return DEFAULT_HYSTERESIS if found is None else float(found)


def _of_types(group: Document, usage: Document, pinned: int) -> Iterator[str]:
    used = {each["storage_type"]: each["usage"] for each in usage["types"]}
    for quota in value_at(group, TYPE_QUOTAS) or ():
        kind, capacity = quota["storage_type"], quota["capacity"]
        if kind in used:
            what = f"On {formats.storage_kind(kind)} storages it"
            yield from _of_bytes(what, capacity, [_ratio_mark(group, capacity)], used[kind], pinned)


def _of_bytes(what: str, capacity: int, marks: list[_Mark], used: Mapping[str, int], pinned: int) -> Iterator[str]:
    mark = min((each for each in marks if each is not None), default=None)
    kept = used["used_bytes"] - used["deleting_bytes"]
    if mark is not None and kept > mark[0]:
        pins = f", but {formats.size(pinned)} are pinned and stay" if pinned else ""
        yield (
            f"{what} uses {formats.size(kept)}, and eviction begins above {formats.size(mark[0])}: "
            f"about {formats.size(kept - mark[1])} will be evicted{pins}."
        )
    if used["used_bytes"] > capacity:
        until = "until that much is deleted" if mark is not None else "until somebody removes something: it has no mark"
        yield f"{what} uses {formats.size(used['used_bytes'])} of {formats.size(capacity)}: writes are refused {until}."


def _of_keys(group: Document, usage: Document) -> Iterator[str]:
    most = value_at(group, "cache_config.meta_indexer_config.max_key_count") or 0
    found = _ratio_mark(group, most)
    mark = most if found is None else found[0]
    for instance in usage["instances"]:
        blocks = instance["key_count"]
        if most and blocks > mark:
            leaving = None if found is None else blocks - found[1]
            follows = "new ones are refused" if leaving is None else f"about {formats.count(leaving)} will be evicted"
            has = f"has {formats.count(blocks)} blocks, and {formats.count(most)} are allowed"
            yield f"Instance {instance['instance_id']} {has}: {follows}."
