"""Changing groups: their limits, new ones, and removing them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console.confirming import Question, answered, asked
from kvcm.console.forms import Field, Sheet
from kvcm.console.resources import RefusedError
from kvcm.console.views.groups import losses_of
from kvcm.console.views.limit_fields import limit_fields, sheet_of, storage_types, value_at
from kvcm.console.views.limits import changes_of, consequences, patch_of
from kvcm.console.visits import Visit
from kvcm.service.rest.merge_patch import merge_patch
from kvcm.service.rest.names import encoded_name

__all__ = ["ROUTES"]

_ANOTHER_STATE: Final = 412
_CHANGED: Final = (
    "Somebody else changed this group meanwhile, and nothing was saved. Below is what you typed, and what it would "
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
            return await _changed_meanwhile(visit, sheet)
        if not patch:
            return visit.back(_page(name), "Nothing was changed.")
        if form.get("do") != "save":
            return await _previewed(visit, sheet, patch, answer.document, answer.etag)
        await visit.send("PATCH", _resource(name), patch, {"if-match": answer.etag})
    except RefusedError as error:
        if error.status == _ANOTHER_STATE:
            return await _changed_meanwhile(visit, sheet)
        return _limits_page(visit, sheet.refused(error), form.get("etag", ""), error.status)
    changes = "; ".join(f"{each.label}: {each.after}" for each in changes_of(sheet, answer.document))
    return visit.back(_page(name), f"The limits were changed. {changes}.")


async def _changed_meanwhile(visit: Visit, sheet: Sheet) -> Response:
    answer = await visit.send("GET", _resource(visit.name()))
    changes = changes_of(sheet, answer.document)
    return _limits_page(visit, sheet, answer.etag, _ANOTHER_STATE, fault=_CHANGED, changes=changes)


async def _previewed(
    visit: Visit, sheet: Sheet, patch: Mapping[str, Any], group: Mapping[str, Any], etag: str
) -> Response:
    usage = await _usage(visit)
    return _limits_page(
        *(visit, sheet, etag),
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
    quotas = {each["storage_type"] for each in value_at(group, "quota.quota_config") or ()}
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
        await visit.send("PUT", _resource(name), {**document, "name": name}, {"if-none-match": "*"})
    except RefusedError as error:
        if error.status == _ANOTHER_STATE:
            return _new_page(visit, replace(sheet, faults={"name": "there is a group of this name"}), error.status)
        return _new_page(visit, sheet.refused(error), error.status)
    return visit.back(_page(name), f"Group {name} was created.")


async def _new_fields(visit: Visit) -> list[Field]:
    storages = await visit.items("/v1/storages")
    names = [each["global_unique_name"] for each in storages]
    return [*_own_fields(names), *limit_fields(storage_types(storages))]


def _own_fields(storages: Iterable[str]) -> Sequence[Field]:
    choices = [(name, name) for name in storages]
    quota_hint = "Groups that name the same one share it, where somebody has set one."
    return (
        Field("name", "Name", is_required=True),
        Field("storage_candidates", "Storages that it may use", kind="several", is_required=True, choices=choices),
        Field("global_quota_group_name", "Draws from the quota named", quota_hint, is_required=True, initial="default"),
    )


def _new_page(visit: Visit, sheet: Sheet, status: int = 200) -> Response:
    return visit.page("group_new.html", status, sheet=sheet)


async def _ask(visit: Visit) -> Response:
    return await asked(visit, await _question(visit))


async def _remove(visit: Visit) -> Response:
    name = visit.name()

    async def remove() -> Response:
        await visit.send("DELETE", _resource(name))
        return visit.back("/console/groups", f"Group {name} was removed.")

    return await answered(visit, await _question(visit), remove)


async def _question(visit: Visit) -> Question:
    name = visit.name()
    await visit.get(_resource(name))  # where there is none, this says so
    return Question(f"Remove group {name}", losses_of(await _usage(visit)), "Remove", _page(name), name)


def _resource(name: str) -> str:
    return f"/v1/groups/{encoded_name(name)}"


def _page(name: str) -> str:
    return f"/console/groups/{encoded_name(name)}"


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", "/console/groups/{name}/limits", _edit),
    ("POST", "/console/groups/{name}/limits", _change),
    ("GET", "/console/groups/{name}/remove", _ask),
    ("POST", "/console/groups/{name}/remove", _remove),
    ("GET", "/console/groups/+add", _begin),
    ("POST", "/console/groups/+add", _create),
)
