"""Pages of background tasks, garbage collection and scrubs, which show their findings before they free anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import Response

from kvcm.console.formats import count, size
from kvcm.console.forms import Field, Question, Sheet, confirmation_page, confirmed
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.service.rest.conversion import encode_name

__all__ = ["ROUTES", "Outcome", "outcome_of"]

# Reports of tasks.


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a task.

    Attributes:
        headline: in one sentence.
        rows: counts by label.
        has_work: whether a run without dry_run would free something.
    """

    headline: str
    rows: Sequence[tuple[str, str]]
    has_work: bool


_GARBAGE: Final = (
    ("blocks", "Blocks looked at"),
    ("without_bytes", "Locations whose bytes are missing"),
    ("without_prefix", "Blocks whose prefix is gone"),
    ("expired_sessions", "Overdue write sessions"),
)
_SCRUB: Final = (
    ("objects", "Objects looked at"),
    ("orphans", "Objects that no metadata knows"),
    ("too_young", "Those too young to be sure"),
    ("deleted", "Objects deleted"),
    ("failed", "Objects that could not be looked at or deleted"),
)


def outcome_of(document: Any, *, is_dry: bool) -> Outcome:
    """Return the report of garbage collection or of a scrub.

    Args:
        document: of `/v1/tasks`.
        is_dry: whether nothing was changed.
    """
    report = document["report"]
    if document["kind"] == "collect_garbage":
        found = sum(report[name] for name in ("without_bytes", "without_prefix", "expired_sessions"))
        return _outcome(report, _GARBAGE, found, report["freed_bytes"], is_dry=is_dry)
    found = report["orphans"] - report["too_young"] if is_dry else report["deleted"]
    outcome = _outcome(report, _SCRUB, found, report["orphan_bytes"], is_dry=is_dry)
    return Outcome(outcome.headline, (*outcome.rows, ("Bytes looked at", size(report["bytes"]))), outcome.has_work)


def _outcome(report: Any, names: Sequence[tuple[str, str]], found: int, freed: int, *, is_dry: bool) -> Outcome:
    rows = [(label, count(report[name])) for name, label in names]
    rows.append(("Bytes that would be freed" if is_dry else "Bytes freed", size(freed)))
    if not found:
        return Outcome("There is nothing to free.", rows, has_work=False)
    verb = "would be freed; nothing was changed" if is_dry else "were freed"
    return Outcome(f"{count(found)} of them, {size(freed)}, {verb}.", rows, has_work=is_dry)


# The pages.

_PATH: Final = "/console/tasks"
_GARBAGE_FIELDS: Final = (
    Field("instance", "Instance", "Empty for all of them."),
    Field("check_bytes", "Also ask the storages whether the bytes are there, which is slow", kind="check"),
)
_AGE: Final = Field(
    "min_age_seconds",
    "Leave alone what changed within",
    "An engine may be writing it just now: 1 s at least.",
    kind="span",
    is_required=True,
    initial="1h",
)
_MIN_AGE_ERROR: Final = "It must be 1 s at least: a younger object may be one that is being written."


async def _show(visit: Visit) -> Response:
    return await _page(visit)


async def _page(
    visit: Visit, status: int = 200, *, garbage: Sheet | None = None, scrub: Sheet | None = None
) -> Response:
    tasks = await visit.items("/v1/tasks")
    return visit.page(
        "tasks.html",
        status,
        tasks=tasks,
        garbage=garbage or Sheet.blank(_GARBAGE_FIELDS),
        scrub=scrub or Sheet.blank(await _scrub_fields(visit)),
    )


async def _scrub_fields(visit: Visit) -> Sequence[Field]:
    names = [each["global_unique_name"] for each in await visit.items("/v1/storages")]
    choices = [(name, name) for name in names]
    return Field("storage", "Storage", kind="choice", choices=choices, initial=names[0] if names else ""), _AGE


async def _ask_to_cancel(visit: Visit) -> Response:
    return await confirmation_page(visit, await _cancelling(visit))


async def _cancel(visit: Visit) -> Response:
    async def act() -> Response:
        await visit.send("DELETE", f"/v1/tasks/{encode_name(visit.name())}")
        return visit.back(_PATH, "The drain is over: the storage takes writes again.")

    return await confirmed(visit, await _cancelling(visit), act)


async def _cancelling(visit: Visit) -> Question:
    task = await visit.get(f"/v1/tasks/{encode_name(visit.name())}")
    verb = "End" if task["state"] == "done" else "Cancel"
    consequences = [
        f"The storage takes writes again; {size(task['left_bytes'])} are left on it and stay.",
        "What was evicted from it meanwhile does not come back.",
    ]
    title = f"{verb} the drain of storage {task['storage']}"
    return Question(title, consequences, f"{verb} the drain", _PATH, is_grave=False)


async def _collect(visit: Visit) -> Response:
    form = await visit.form()
    sheet, is_dry = Sheet.filled(_GARBAGE_FIELDS, form), "sure" not in form
    try:
        order = {"kind": "collect_garbage", **sheet.document(), "dry_run": is_dry}
        answer = await visit.send("POST", "/v1/tasks", order)
    except RefusedError as error:
        return await _page(visit, error.status, garbage=sheet.refused(error))
    return _report(visit, answer.document, sheet, is_dry=is_dry)


async def _scrub(visit: Visit) -> Response:
    form = await visit.form()
    sheet = Sheet.filled(await _scrub_fields(visit), form)
    is_sure = form.get("sure", "") == form.get("storage", "") != ""
    fault = "" if is_sure or "sure" not in form else "That is not the name of the storage: nothing was deleted."
    try:
        order = {"kind": "scrub", **sheet.document(), "dry_run": not is_sure}
        if order["min_age_seconds"] < 1:
            return await _page(visit, 400, scrub=replace(sheet, faults={"min_age_seconds": _MIN_AGE_ERROR}))
        answer = await visit.send("POST", "/v1/tasks", order)
    except RefusedError as error:
        return await _page(visit, error.status, scrub=sheet.refused(error))
    return _report(visit, answer.document, sheet, is_dry=not is_sure, fault=fault)


def _report(visit: Visit, document: Any, sheet: Sheet, *, is_dry: bool, fault: str = "") -> Response:
    outcome = outcome_of(document, is_dry=is_dry)
    status = 400 if fault else 200
    return visit.page(
        "task_report.html", status, kind=document["kind"], outcome=outcome, given=sheet.values, fault=fault
    )


ROUTES: Final[Routes] = (
    ("GET", _PATH, _show),
    ("GET", f"{_PATH}/{{name}}/cancel", _ask_to_cancel),
    ("POST", f"{_PATH}/{{name}}/cancel", _cancel),
    ("POST", f"{_PATH}/garbage", _collect),
    ("POST", f"{_PATH}/scrub", _scrub),
)
