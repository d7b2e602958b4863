"""Pages of groups: the list, one group, its limits with a preview of a change, creating and removing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console import formats
from kvcm.console.charts import Values
from kvcm.console.deployment import History, alerts_of, charts_of_group, group_usages, history_of
from kvcm.console.formats import storage_kind
from kvcm.console.forms import Field, Kind, Question, Sheet, confirmation_page, confirmed, exact_size
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.model.groups import DEFAULT_HYSTERESIS
from kvcm.service.rest.conversion import encode_name, merge_patch

__all__ = [
    "GROUP_CHANGE_ROUTES",
    "POLICIES",
    "ROUTES",
    "Change",
    "GroupCard",
    "changes_of",
    "consequences",
    "group_card",
    "group_cards",
    "limit_fields",
    "losses_of",
    "patch_of",
    "sheet_of",
    "storage_types",
]

# The limits of a group as fields of a form, and their values in a group's document.

Document = Mapping[str, Any]
POLICIES: Final[Mapping[str, str]] = {
    "": "by default: the end of the prefix read longest ago (leaf_lru)",
    "leaf_lru": "the end of the prefix read longest ago (leaf_lru)",
    "lru": "what was read longest ago (lru)",
    "lfu_aging": "what is read least often of late (lfu_aging)",
    "lfu": "what was read least often, however long ago (lfu)",
    "s3fifo": "what was written first and not read again (s3fifo)",
    "sieve": "what was written first and not read since (sieve)",
    "fifo": "what was written first (fifo)",
    "ttl": "what is oldest (ttl)",
}
"""Eviction policies, with the blocks that leave first."""
_TYPE_QUOTAS: Final = "quota.quota_config"
"""Of fields with quotas on types of storages: the name of the type follows."""
_STRATEGY: Final = "cache_config.reclaim_strategy"
_TRIGGER: Final = f"{_STRATEGY}.trigger_strategy"
_TYPES: Final = {
    "threefs": "ST_3FS", "vcnsthreefs": "ST_VCNS_3FS", "mooncake": "ST_MOONCAKE", "tair_mem_pool": "ST_TAIRMEMPOOL",
    "nfs": "ST_NFS", "dummy": "ST_DUMMY",
}  # fmt: skip
"""Types of storages by the key of their settings."""
_WRITTEN: Final[Mapping[Kind, Callable[[Any], str]]] = {
    "size": exact_size,
    "check": lambda _: "yes",
    "percent": lambda ratio: f"{100 * ratio:.6g}",
    "span": lambda seconds: f"{seconds}s",
}
_BEHIND: Final = (
    Field(
        name=f"{_TRIGGER}.used_percentage",
        label="Evict above, in % of each limit",
        hint="80 is common. Empty, or above 100: there is no such mark.",
        kind="percent",
        initial="80",
    ),
    Field(name=f"{_TRIGGER}.hysteresis", label="Evict down to so many points below", hint="Empty: 2.", kind="percent"),
    Field(
        name=f"{_TRIGGER}.used_size",
        label="Evict above, in bytes in all",
        hint="400 GiB, say, beside the ratio. Empty: none.",
        kind="size",
    ),
    Field(f"{_STRATEGY}.policy.name", "What is evicted first", kind="choice", choices=[*POLICIES.items()]),
    Field(
        name=f"{_STRATEGY}.policy.ttl_seconds",
        label="Evict at an age",
        hint="12h, say, although there is space. Empty: never.",
        kind="span",
    ),
    Field(f"{_STRATEGY}.policy.ttl_sliding", "The age counts from the last read, not from the write", kind="check"),
    Field(
        name="cache_config.meta_indexer_config.max_key_count",
        label="Blocks of each instance",
        hint="Empty: not limited.",
        kind="integer",
    ),
    Field(name="max_instance_count", label="Instances", hint="Empty: not limited.", kind="integer"),
    Field(
        name="pin_budget_bytes", label="Pins may hold", hint="10 GiB, say. Empty: nothing can be pinned.", kind="size"
    ),
    Field(
        name=f"{_STRATEGY}.delay_before_delete_ms",
        label="Keep evicted blocks for their readers, in ms",
        hint="It counts as used until then. Empty: it is deleted at once.",
        kind="integer",
    ),
)


def storage_types(storages: Iterable[Document]) -> list[str]:
    """Return the types of some storages, by their documents of `/v1/storages`."""
    return sorted({kind for storage in storages for key, kind in _TYPES.items() if storage.get(key) is not None})


def limit_fields(types: Sequence[str]) -> list[Field]:
    """Return the fields, with one for the quota on each of some types of storages."""
    quota = Field(
        name="quota.capacity",
        label="Quota",
        hint="Bytes in all: 500 GiB, say. Empty: nothing may be written.",
        kind="size",
    )
    of_types = (
        Field(
            name=f"{_TYPE_QUOTAS}.{each}",
            label=f"Quota on {storage_kind(each)} storages",
            hint="200 GiB, say. Empty: only the quota in all counts.",
            kind="size",
        )
        for each in types
    )
    return [quota, *of_types, *_BEHIND]


def sheet_of(fields: Sequence[Field], group: Document) -> Sheet:
    """Return the form with the limits of a group."""
    return Sheet(fields, {each.name: _text(each, group) for each in fields})


def _value_at(document: Document, path: str) -> Any:
    """Return the value at a path of a document, None for none."""
    found: Any = document
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _text(field: Field, group: Document) -> str:
    if field.name.startswith(f"{_TYPE_QUOTAS}."):
        quotas = {each["storage_type"]: each["capacity"] for each in _value_at(group, _TYPE_QUOTAS) or ()}
        capacity = quotas.get(field.name.rpartition(".")[2])
        return "" if capacity is None else exact_size(capacity)
    value = _value_at(group, field.name)
    if not value:  # 0 stands for no limit: an empty field
        return "0" if value == 0 and field.name.endswith("hysteresis") else ""
    return _WRITTEN.get(field.kind, str)(value)


# Changes of limits: from the form to a merge patch, and their consequences.


@dataclass(frozen=True, slots=True)
class Change:
    """One limit before and after."""

    label: str
    before: str
    after: str


def patch_of(sheet: Sheet, group: Document) -> dict[str, Any]:
    """Return a merge patch with the fields of a form that differ from a group. Empty fields get their defaults.

    Raises:
        RefusedError: a number, size or duration is malformed.
    """
    typed, patch = sheet.document(), dict[str, Any]()
    for name in _changed(sheet, group):
        if name.startswith(f"{_TYPE_QUOTAS}."):
            _put(patch, _TYPE_QUOTAS, _type_quotas(sheet, typed, group))
        else:
            _put(patch, name, _value_at(typed, name))
    return patch


def _changed(sheet: Sheet, group: Document) -> Iterator[str]:
    before = sheet_of(sheet.fields, group).values
    return (each.name for each in sheet.fields if sheet.values[each.name].strip() != before[each.name])


def _type_quotas(sheet: Sheet, typed: Document, group: Document) -> list[Mapping[str, Any]]:
    shown = {each.name.rpartition(".")[2] for each in sheet.fields if each.name.startswith(f"{_TYPE_QUOTAS}.")}
    others = [each for each in _value_at(group, _TYPE_QUOTAS) or () if each["storage_type"] not in shown]
    named = _value_at(typed, _TYPE_QUOTAS) or {}
    return [*others, *({"storage_type": kind, "capacity": capacity} for kind, capacity in named.items())]


def _put(patch: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for step in above:
        patch = patch.setdefault(step, {})
    patch[last] = value


def changes_of(sheet: Sheet, group: Document) -> list[Change]:
    """Return the changes for people."""
    before, names = sheet_of(sheet.fields, group).values, set(_changed(sheet, group))
    return [
        Change(each.label, before[each.name] or formats.NOTHING, sheet.values[each.name].strip() or formats.NOTHING)
        for each in sheet.fields
        if each.name in names
    ]


def consequences(group: Document, usage: Document) -> list[str]:
    """Return the effects of a group's limits on its present blocks, in sentences; none without eviction or refusal.

    Args:
        group: its future document.
        usage: its present usage.
    """
    capacity = _value_at(group, "quota.capacity") or 0
    marks = [_ratio_mark(group, capacity), _size_mark(group)]
    pinned = usage["pinned_bytes"]
    return [
        *_of_bytes("It", capacity, marks, usage["total"], pinned),
        *_of_types(group, usage, pinned),
        *_of_keys(group, usage),
    ]


_Mark = tuple[int, int] | None
"""High and low watermark."""


def _ratio_mark(group: Document, capacity: int) -> _Mark:
    share = _value_at(group, f"{_TRIGGER}.used_percentage") or 0.0
    if not 0 < share <= 1:
        return None
    return int(capacity * share), int(capacity * max(0.0, share - _hysteresis(group)))


def _size_mark(group: Document) -> _Mark:
    size = _value_at(group, f"{_TRIGGER}.used_size") or 0
    return (size, int(size * (1 - _hysteresis(group)))) if size else None


def _hysteresis(group: Document) -> float:
    found = _value_at(group, f"{_TRIGGER}.hysteresis")
    return DEFAULT_HYSTERESIS if found is None else float(found)


def _of_types(group: Document, usage: Document, pinned: int) -> Iterator[str]:
    used = {each["storage_type"]: each["usage"] for each in usage["types"]}
    for quota in _value_at(group, _TYPE_QUOTAS) or ():
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
        until = "until that much is deleted" if mark is not None else "until blocks are removed: it has no mark"
        yield f"{what} uses {formats.size(used['used_bytes'])} of {formats.size(capacity)}: writes are refused {until}."


def _of_keys(group: Document, usage: Document) -> Iterator[str]:
    most = _value_at(group, "cache_config.meta_indexer_config.max_key_count") or 0
    found = _ratio_mark(group, most)
    mark = most if found is None else found[0]
    for instance in usage["instances"]:
        blocks = instance["key_count"]
        if most and blocks > mark:
            leaving = None if found is None else blocks - found[1]
            follows = "new ones are refused" if leaving is None else f"about {formats.count(leaving)} will be evicted"
            has = f"has {formats.count(blocks)} blocks, and {formats.count(most)} are allowed"
            yield f"Instance {instance['instance_id']} {has}: {follows}."


# Groups at a glance: how full each one is, and why.

_FULL: Final = 0.98
_SEVERITIES: Final = ("page", "ticket", "info")
_PROBLEMS: Final = {
    ("KvcmGroupFull", "page"): "full",
    ("KvcmGroupNearlyFull", "ticket"): "nearly full",
    ("KvcmGroupWithoutStorage", "page"): "no storage",
    ("KvcmReclaimStuck", "ticket"): "above its mark",
}
"""Alerts about groups in a word or two: the limit that is reached need not be the group's own quota."""
_KINDS: Final = {"page": "bad", "ticket": "warn", "info": "plain"}


@dataclass(frozen=True, slots=True)
class GroupCard:
    """A group at one glance.

    Attributes:
        name: its name.
        usage: its document of `/v1/usage`.
        state: in a word or two.
        kind: of the state: good, busy, warn, bad, plain.
        summary: the problem, "" for none.
        why: reason of the state.
        advice: what to do, "" for nothing.
        hit_ratio: of the last five minutes.
        hit_ratios: of the last quarter of an hour.
        refused: writes refused for want of space in the last five minutes.
    """

    name: str
    usage: Document
    state: str
    kind: str
    summary: str
    why: str
    advice: str
    hit_ratio: float | None
    hit_ratios: Values
    refused: float

    @property
    def total(self) -> Mapping[str, int]:
        """Its total usage and limits."""
        total: Mapping[str, int] = self.usage["total"]
        return total

    @property
    def has_problem(self) -> bool:
        """Whether writes are refused."""
        return self.kind == "bad" or self.refused > 0

    @property
    def share(self) -> float:
        """How much of its quota is used."""
        capacity = self.total["capacity_bytes"]
        return self.total["used_bytes"] / capacity if capacity > 0 else 0.0

    @property
    def key_count(self) -> int:
        """Blocks in all its instances."""
        return sum(instance["key_count"] for instance in self.usage["instances"])


def group_cards(groups: Sequence[Document], alerts: Sequence[Document], history: History) -> list[GroupCard]:
    """Return the groups, those in trouble first, then the fullest."""
    cards = [group_card(group, alerts, history) for group in groups]
    order = {kind: place for place, kind in enumerate(("bad", "warn", "busy", "plain", "good"))}
    return sorted(cards, key=lambda card: (order[card.kind], -card.share, card.name))


def group_card(group: Document, alerts: Sequence[Document], history: History) -> GroupCard:
    """Return one group with its problem.

    Args:
        group: its document of `/v1/usage`.
        alerts: of `/v1/alerts`, of any subjects.
        history: of the last hour.
    """
    name = group["name"]
    evicted = history.mean("evicted_bytes_per_second", name) or 0.0
    refused = history.amount("refused_writes_per_second", name)
    alert = _worst_of(name, alerts)
    state, kind = _state(group["total"], evicted, refused)
    if alert is not None:
        state, kind = _PROBLEMS.get((alert["name"], alert["severity"]), state), _KINDS[alert["severity"]]
    return GroupCard(
        name=name,
        usage=group,
        state=state,
        kind=kind,
        summary=alert["summary"] if alert else "",
        why=alert["reason"] if alert else _why(group, evicted, refused),
        advice=alert["advice"] if alert else "",
        hit_ratio=history.mean("hit_ratio", name),
        hit_ratios=history.tail("hit_ratio", name),
        refused=refused,
    )


def _worst_of(name: str, alerts: Sequence[Document]) -> Document | None:
    own = [alert for alert in alerts if alert["subject"] == {"kind": "group", "name": name}]
    return min(own, key=lambda alert: _SEVERITIES.index(alert["severity"]), default=None)


def _state(total: Mapping[str, int], evicted: float, refused: float) -> tuple[str, str]:
    used, capacity = total["used_bytes"], total["capacity_bytes"]
    if capacity == 0:
        return "no quota", "warn"
    if used >= _FULL * capacity > 0:
        return "full", "bad"
    if refused:
        return "refuses writes", "bad"
    if used - total["deleting_bytes"] > total["high_mark_bytes"] >= 0:
        return "above its mark", "warn"
    return ("evicting", "busy") if evicted else ("has space", "good")


def _why(group: Document, evicted: float, refused: float) -> str:
    total = group["total"]
    if total["capacity_bytes"] == 0:
        return "Its quota is 0: nothing may be written."
    if refused:
        pins = f", and {formats.size(group['pinned_bytes'])} are pinned" if group["pinned_bytes"] else ""
        said = f"{formats.count(max(1.0, refused))} writes found no space in the last five minutes"
        return f"{said}: {formats.size(max(0, total['capacity_bytes'] - total['used_bytes']))} are free now{pins}."
    return _activity(total, evicted)


def _activity(total: Mapping[str, int], evicted: float) -> str:
    used, high, low = total["used_bytes"], total["high_mark_bytes"], total["low_mark_bytes"]
    waiting = formats.size(total["deleting_bytes"])
    if total["deleting_bytes"] and used >= _FULL * total["capacity_bytes"]:
        return f"{waiting} of it are evicted and wait for their deletion: little or nothing fits until then."
    if high < 0:
        free = formats.size(max(0, total["capacity_bytes"] - used))
        return f"Nothing is evicted before it is full: it has no mark. {free} are free."
    if used - total["deleting_bytes"] > high:
        return f"It is above {formats.size(high)}, where eviction begins: that is at work down to {formats.size(low)}."
    if evicted:
        rate = f"{formats.size(evicted)}/s"
        return f"Eviction keeps it between {formats.size(low)} and {formats.size(high)}: {rate} leave on average."
    leaving = f", and {waiting} wait for their deletion" if total["deleting_bytes"] else ""
    free = formats.size(high - used + total["deleting_bytes"])
    return f"{free} may be written before eviction begins{leaving}."


def losses_of(usage: Document) -> list[str]:
    """Return the effects of removing a group, in sentences."""
    count, used = len(usage["instances"]), formats.size(usage["total"]["used_bytes"])
    said = ["The group and its limits are forgotten."]
    if count:
        instances = "Its instance stays" if count == 1 else f"Its {count} instances stay"
        said.append(f"{instances} readable and refuse writes, until they are removed themselves.")
        said.append(f"The {used} that it uses stay where they are until then.")
    return said


# The list, and one group.

_SPANS: Final = {"3600": "1 hour", "21600": "6 hours", "86400": "24 hours"}


async def _list(visit: Visit) -> Response:
    usages, alerts, history = await asyncio.gather(group_usages(visit), alerts_of(visit), history_of(visit))
    return visit.page("groups.html", groups=group_cards(usages, alerts, history))


async def _show(visit: Visit) -> Response:
    name = visit.name()
    seconds = visit.query("seconds") if visit.query("seconds") in _SPANS else "3600"
    group = await visit.get(f"/v1/groups/{encode_name(name)}")  # refuses if there is none
    report, alerts, history, lately = await asyncio.gather(
        visit.get("/v1/usage?" + urlencode({"group": name})),
        alerts_of(visit, name),
        history_of(visit, int(seconds), name),
        history_of(visit, 3600, name),
    )
    (usage,) = report["groups"]
    types = sorted({each["storage_type"] for each in _value_at(group, "quota.quota_config") or ()})
    return visit.page(
        "group.html",
        name=name,
        group=group,
        card=group_card(usage, alerts, lately),
        alerts=[alert for alert in alerts if alert["subject"]["kind"] != "group"],
        shared=report["global_quotas"],
        limits=sheet_of(limit_fields(types), group).entries,
        policies=POLICIES,
        history=history,
        charts=charts_of_group(history, name),
        spans=_SPANS,
        seconds=seconds,
    )


ROUTES: Final[Routes] = (
    ("GET", "/console/groups", _list),
    ("GET", "/console/groups/{name}", _show),
)

# Changes: limits, new groups, and removal.

_STALE: Final = 412
_CHANGED: Final = (
    "Another client changed this group meanwhile, and nothing was saved. Below is what you typed, and what it would "
    "change of the group as it is now: save it again if that is still right."
)
_WITHOUT_MARK: Final = {"cache_config": {"reclaim_strategy": {"trigger_strategy": {"used_percentage": 0.0}}}}


async def _edit(visit: Visit) -> Response:
    answer = await visit.send("GET", _resource(visit.name()))
    return _limits_page(visit, sheet_of(await _fields(visit, answer.document), answer.document), answer.etag)


async def _change(visit: Visit) -> Response:
    name, form = visit.name(), await visit.form()
    answer = await visit.send("GET", _resource(name))
    sheet = Sheet.filled(await _fields(visit, answer.document), form)
    try:
        patch = patch_of(sheet, answer.document)
        if form.get("etag") != answer.etag:
            return await _conflict(visit, sheet)
        if not patch:
            return visit.back(_page(name), "Nothing was changed.")
        if form.get("do") != "save":
            return await _previewed(visit, sheet, patch, answer.document, answer.etag)
        await visit.send("PATCH", _resource(name), patch, {"if-match": answer.etag})
    except RefusedError as error:
        if error.status == _STALE:
            return await _conflict(visit, sheet)
        return _limits_page(visit, sheet.refused(error), form.get("etag", ""), error.status)
    changes = "; ".join(f"{each.label}: {each.after}" for each in changes_of(sheet, answer.document))
    return visit.back(_page(name), f"The limits were changed. {changes}.")


async def _conflict(visit: Visit, sheet: Sheet) -> Response:
    answer = await visit.send("GET", _resource(visit.name()))
    changes = changes_of(sheet, answer.document)
    return _limits_page(visit, sheet, answer.etag, _STALE, fault=_CHANGED, changes=changes)


async def _previewed(
    visit: Visit, sheet: Sheet, patch: Mapping[str, Any], group: Mapping[str, Any], etag: str
) -> Response:
    usage = await _usage(visit)
    return _limits_page(
        visit,
        sheet,
        etag,
        changes=changes_of(sheet, group),
        consequences=consequences(merge_patch(group, patch), usage),
        is_preview=True,
    )


def _limits_page(visit: Visit, sheet: Sheet, etag: str, status: int = 200, **more: Any) -> Response:
    shown = {"fault": "", "changes": (), "consequences": (), "is_preview": False, **more}
    return visit.page("group_limits.html", status, name=visit.name(), sheet=sheet, etag=etag, **shown)


async def _usage(visit: Visit) -> Mapping[str, Any]:
    (usage,) = (await visit.get("/v1/usage?" + urlencode({"group": visit.name()})))["groups"]
    found: Mapping[str, Any] = usage
    return found


async def _fields(visit: Visit, group: Mapping[str, Any]) -> list[Field]:
    """Return the fields of a group: with a quota for each type of storage that it may use or has a quota on."""
    storages = await visit.items("/v1/storages")
    candidates = [each for each in storages if each["global_unique_name"] in group["storage_candidates"]]
    quotas = {each["storage_type"] for each in _value_at(group, "quota.quota_config") or ()}
    return limit_fields(sorted(quotas | {*storage_types(candidates)}))


async def _begin(visit: Visit) -> Response:
    return _new_page(visit, Sheet.blank(await _new_fields(visit)))


async def _create(visit: Visit) -> Response:
    form = await visit.form()
    sheet = Sheet.filled(await _new_fields(visit), form)
    name = form.get("name", "").strip()
    if not name:
        return _new_page(visit, replace(sheet, faults={"name": "must not be empty"}), 400)
    try:
        document = merge_patch(_WITHOUT_MARK, patch_of(sheet, {}))
        await visit.send(
            method="PUT", path=_resource(name), body={**document, "name": name}, headers={"if-none-match": "*"}
        )
    except RefusedError as error:
        if error.status == _STALE:
            return _new_page(visit, replace(sheet, faults={"name": "there is a group of this name"}), error.status)
        return _new_page(visit, sheet.refused(error), error.status)
    return visit.back(_page(name), f"Group {name} was created.")


async def _new_fields(visit: Visit) -> list[Field]:
    storages = await visit.items("/v1/storages")
    names = [each["global_unique_name"] for each in storages if each.get("event_report") is None]
    return [*_own_fields(names), *limit_fields(storage_types(storages))]


def _own_fields(storages: Iterable[str]) -> Sequence[Field]:
    choices = [(name, name) for name in storages]
    quota_hint = "Groups that name the same one share it, if it is set."
    return (
        Field("name", "Name", is_required=True),
        Field("storage_candidates", "Storages that it may use", kind="several", is_required=True, choices=choices),
        Field("global_quota_group_name", "Draws from the quota named", quota_hint, is_required=True, initial="default"),
    )


def _new_page(visit: Visit, sheet: Sheet, status: int = 200) -> Response:
    return visit.page("group_new.html", status, sheet=sheet)


async def _ask(visit: Visit) -> Response:
    return await confirmation_page(visit, await _question(visit))


async def _remove(visit: Visit) -> Response:
    name = visit.name()

    async def remove() -> Response:
        await visit.send("DELETE", _resource(name))
        return visit.back("/console/groups", f"Group {name} was removed.")

    return await confirmed(visit, await _question(visit), remove)


async def _question(visit: Visit) -> Question:
    name = visit.name()
    await visit.get(_resource(name))  # refuses if there is none
    return Question(
        title=f"Remove group {name}",
        consequences=losses_of(await _usage(visit)),
        button="Remove",
        back=_page(name),
        name=name,
    )


def _resource(name: str) -> str:
    return f"/v1/groups/{encode_name(name)}"


def _page(name: str) -> str:
    return f"/console/groups/{encode_name(name)}"


GROUP_CHANGE_ROUTES: Final[Routes] = (
    ("GET", "/console/groups/{name}/limits", _edit),
    ("POST", "/console/groups/{name}/limits", _change),
    ("GET", "/console/groups/{name}/remove", _ask),
    ("POST", "/console/groups/{name}/remove", _remove),
    ("GET", "/console/groups/+add", _begin),
    ("POST", "/console/groups/+add", _create),
)
