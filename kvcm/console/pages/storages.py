"""Pages of storages: health, limits, disabling, drains, removal, and adding one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel
from starlette.responses import Response

from kvcm.console.formats import size
from kvcm.console.forms import Field, Kind, Question, Sheet, confirmed_routes, exact_size
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.registry.secrets import redacted_text
from kvcm.service.rest.conversion import encode_name
from kvcm.service.rest.storage_resource import StorageDocument

__all__ = [
    "ADD_STORAGE_ROUTES",
    "KINDS",
    "ROUTES",
    "Badge",
    "GroupShare",
    "StorageView",
    "fields_of_kind",
    "shares_of",
    "storage_views",
]

# Storages.

Document = Mapping[str, Any]
Badge = tuple[str, str]
"""Text and kind."""
KINDS: Final[Mapping[str, str]] = {
    "nfs": "Shared directory",
    "threefs": "3FS",
    "vcnsthreefs": "3FS behind VCNS",
    "mooncake": "Mooncake store",
    "tair_mem_pool": "Memory pool",
    "dummy": "Dummy, which keeps no bytes",
}
"""Labels of the kinds of storages that can be added here."""
_LABELS: Final[Mapping[str, str]] = {**KINDS, "event_report": "Reports of engines"}
_HEALTH: Final[Mapping[str, Badge]] = {
    "SH_UP": ("up", "good"),
    "SH_DEGRADED": ("degraded", "warn"),
    "SH_DOWN": ("down", "bad"),
    "SH_UNSPECIFIED": ("not probed yet", "plain"),
}
_NO_LIMIT: Final = {"used_bytes": 0, "deleting_bytes": 0, "capacity_bytes": -1, "high_mark_bytes": -1}
_URGENCY: Final = {"bad": 0, "warn": 1, "busy": 2}


@dataclass(frozen=True, slots=True)
class StorageView:
    """A storage.

    Attributes:
        name: unique.
        kind: label of its kind.
        badges: its states, the worst first.
        reason: its problem, "" for none.
        status: of the resource; None if unknown.
        usage: usage and limits.
        deletions: pending deletions of locations.
        failures: attempts to delete that failed since the manager started.
        oversubscription: sum of quotas as a ratio of its capacity.
        drain: the task that empties it, None for none.
        settings: names and values.
        document: the resource.
    """

    name: str
    kind: str
    badges: Sequence[Badge]
    reason: str
    status: Document | None
    usage: Document
    deletions: int
    failures: int
    oversubscription: float | None
    drain: Document | None
    settings: Sequence[tuple[str, Any]]
    document: Document

    @property
    def is_enabled(self) -> bool:
        """Whether it is enabled."""
        return bool(self.document["is_available"])

    @property
    def urgency(self) -> int:
        """Order of the list: the smallest first."""
        return min(_URGENCY.get(kind, 9) for _, kind in self.badges)


@dataclass(frozen=True, slots=True)
class GroupShare:
    """The usage of a storage by a group.

    Attributes:
        group: its name.
        used_bytes: in use.
        guaranteed_bytes: that no other group may take.
    """

    group: str
    used_bytes: int
    guaranteed_bytes: int


def storage_views(storages: Sequence[Document], usage: Document, tasks: Sequence[Document]) -> list[StorageView]:
    """Return storages, those with problems first.

    Args:
        storages: with their status.
        usage: of the deployment.
        tasks: that run.
    """
    usages = {each["storage_unique_name"]: each for each in usage["storages"]}
    drains = {task["storage"]: task for task in tasks if task["kind"] == "drain"}
    found = [_view(each, usages, drains.get(each["global_unique_name"])) for each in storages]
    return sorted(found, key=lambda view: (view.urgency, view.name))


def shares_of(storage: str, usage: Document) -> list[GroupShare]:
    """Return the usage of a storage by groups, the largest first."""
    found = [
        GroupShare(group["name"], share["used_bytes"], share["guaranteed_bytes"])
        for group in usage["groups"]
        for share in group["storages"]
        if share["storage_unique_name"] == storage
    ]
    return sorted(found, key=lambda share: (-share.used_bytes, share.group))


def _kind_of(storage: Document) -> str:
    """Return the field with the settings of a storage, as in `nfs`; "" for an unknown kind."""
    return next((kind for kind in _LABELS if storage.get(kind) is not None), "")


def _view(storage: Document, usages: Mapping[str, Document], drain: Document | None) -> StorageView:
    name, status, kind = storage["global_unique_name"], storage.get("status"), _kind_of(storage)
    usage = usages.get(name, {})
    health, reason = _health(status), status["reason"] if status else ""
    return StorageView(
        name=name,
        kind=_LABELS.get(kind, kind),
        badges=[*([] if storage["is_available"] else [("disabled", "warn")]), *_drained(drain), health],
        reason=reason,
        status=status,
        usage=usage.get("usage", _NO_LIMIT),
        deletions=usage.get("deletion_backlog", 0),
        failures=usage.get("deletion_failures", 0),
        oversubscription=usage.get("oversubscription"),
        drain=drain,
        settings=[(field, _shown(value)) for field, value in (storage.get(kind) or {}).items() if value],
        document=storage,
    )


def _shown(value: Any) -> Any:
    """Return a setting without secrets: administrators may have them, but bystanders see the screen."""
    return redacted_text(value) if isinstance(value, str) else value


def _health(status: Document | None) -> Badge:
    return _HEALTH.get(status["health"] if status else "", ("not known", "plain"))


def _drained(drain: Document | None) -> list[Badge]:
    if drain is None:
        return []
    return [("drained", "good") if drain["state"] == "done" else ("draining", "busy")]


# The pages.

_LIST: Final = "/console/storages"
_ONE: Final = "/console/storages/{name}"
_NAME_ON_OTHERS: Final = "Other storages of the groups that use it take its new blocks."
_LIMITS: Final = (
    Field(name="capacity_bytes", label="Capacity", hint="As in 500 GiB. Empty: not limited here.", kind="size"),
    Field(
        name="used_percentage",
        label="Evict above",
        hint="Percent of the capacity. Above 100: never. Empty: 90.",
        kind="percent",
    ),
)


async def _list(visit: Visit) -> Response:
    return visit.page("storages.html", storages=await _views(visit))


async def _show(visit: Visit) -> Response:
    storage = await _found(visit)
    usage = await visit.get("/v1/usage")
    return visit.page("storage.html", storage=storage, shares=shares_of(storage.name, usage))


async def _enable(visit: Visit) -> Response:
    await visit.send("PATCH", _resource(visit), {"is_available": True})
    return visit.back(_page(visit), f"Storage {visit.name()} is read and written again.")


async def _disabling(visit: Visit) -> Question:
    name = (await _found(visit)).name
    return Question(
        title=f"Disable storage {name}",
        consequences=(
            "From now on nothing is read from it and nothing is written to it: what lies there is a miss.",
            _NAME_ON_OTHERS,
            "Nothing is deleted. Enabling it brings everything back.",
        ),
        button="Disable it",
        back=_page(visit),
        is_grave=False,
    )


async def _disable(visit: Visit) -> Response:
    await visit.send("PATCH", _resource(visit), {"is_available": False})
    return visit.back(_page(visit), f"Storage {visit.name()} is disabled.")


async def _draining(visit: Visit) -> Question:
    name = (await _found(visit)).name
    return Question(
        title=f"Drain storage {name}",
        consequences=(
            "Nothing new is written to it, and everything that lies on it is evicted in the background.",
            f"{_NAME_ON_OTHERS} A group that has no other storage cannot write until the drain is cancelled.",
            "What was evicted does not come back. Pinned blocks stay until their pins end.",
        ),
        button="Drain it",
        back=_page(visit),
        name=name,
    )


async def _drain(visit: Visit) -> Response:
    await visit.send("POST", f"{_resource(visit)}/drain")
    return visit.back(_page(visit), f"Storage {visit.name()} is being emptied.")


async def _cancel_drain(visit: Visit) -> Response:
    await visit.send("DELETE", f"{_resource(visit)}/drain")
    return visit.back(_page(visit), f"Storage {visit.name()} takes new blocks again.")


async def _removing(visit: Visit) -> Question:
    name = (await _found(visit)).name
    return Question(
        title=f"Remove storage {name}",
        consequences=(
            "At once nothing is read from it or written to it, and its blocks are forgotten, pinned ones too.",
            "Its bytes are not deleted. Drain it first if they are to go.",
            "If that was a mistake: adding it again within ten seconds, exactly as it was, brings everything back.",
        ),
        button="Remove it",
        back=_page(visit),
        name=name,
    )


async def _remove(visit: Visit) -> Response:
    await visit.send("DELETE", _resource(visit))
    return visit.back(_LIST, f"Storage {visit.name()} was removed.")


async def _ask_for_limits(visit: Visit) -> Response:
    answer = await visit.resources.ask("GET", _resource(visit))
    document = answer.document
    share = document["used_percentage"]
    values = {
        "capacity_bytes": exact_size(document["capacity_bytes"]) if document["capacity_bytes"] else "",
        "used_percentage": f"{100 * share:g}" if share else "",
    }
    return visit.page("storage_limits.html", sheet=Sheet(_LIMITS, values), etag=answer.etag, name=visit.name())


async def _set_limits(visit: Visit) -> Response:
    form = await visit.form()
    sheet, etag = Sheet.filled(_LIMITS, form), form.get("etag", "")
    try:
        wanted: dict[str, Any] = {"capacity_bytes": 0, "used_percentage": 0.0, **sheet.document()}
        await visit.send("PATCH", _resource(visit), wanted, {"if-match": etag} if etag else None)
    except RefusedError as error:
        shown = sheet.refused(_conflict(error))
        return visit.page("storage_limits.html", error.status, sheet=shown, etag=etag, name=visit.name())
    capacity = wanted["capacity_bytes"]
    limit = f"has a capacity of {size(capacity)}" if capacity else "is not limited"
    return visit.back(_page(visit), f"Storage {visit.name()} {limit}.")


def _conflict(error: RefusedError) -> RefusedError:
    if error.status != 412:
        return error
    return RefusedError(412, {"detail": "Another client has changed it meanwhile. Go back and look at it again."})


async def _views(visit: Visit) -> list[StorageView]:
    storages = await visit.items("/v1/storages?with_status=true")
    return storage_views(storages, await visit.get("/v1/usage"), await visit.items("/v1/tasks"))


async def _found(visit: Visit) -> StorageView:
    """Raises RefusedError: there is no such storage."""
    name = visit.name()
    found = [view for view in await _views(visit) if view.name == name]
    if not found:
        raise RefusedError(404, {"detail": f"There is no storage {name!r}: it may have been removed."})
    return found[0]


def _resource(visit: Visit) -> str:
    return f"/v1/storages/{visit.request.path_params['name']}"


def _page(visit: Visit) -> str:
    return f"{_LIST}/{visit.request.path_params['name']}"


ROUTES: Final[Routes] = (
    ("GET", _LIST, _list),
    ("GET", _ONE, _show),
    ("POST", f"{_ONE}/enable", _enable),
    *confirmed_routes(f"{_ONE}/disable", _disabling, _disable),
    *confirmed_routes(f"{_ONE}/drain", _draining, _drain),
    ("POST", f"{_ONE}/drain/cancel", _cancel_drain),
    ("GET", f"{_ONE}/limits", _ask_for_limits),
    ("POST", f"{_ONE}/limits", _set_limits),
    *confirmed_routes(f"{_ONE}/remove", _removing, _remove),
)

# Adding a storage: first its kind, then the fields of that kind, which are those of its document.

_ADD: Final = "/console/storages/+add"  # no storage has such a name
_NAME: Final = Field("name", "Name", "Letters, digits, dots, dashes and underscores; 128 at most.", is_required=True)
_CAPACITY: Final = Field(
    name="capacity_bytes",
    label="Capacity for all groups together",
    hint="As in 500 GiB. Empty: not limited here.",
    kind="size",
)
_KINDS: Final[Mapping[object, Kind]] = {bool: "check", str: "text"}


@lru_cache
def fields_of_kind(kind: str) -> Sequence[Field]:
    """Return the fields of a storage of a kind, as in `nfs`."""
    document = _document(kind)
    return (_NAME, *(_field(kind, name, document) for name in document.model_fields), _CAPACITY)


def _document(kind: str) -> type[BaseModel]:
    alternatives: Sequence[Any] = getattr(StorageDocument.model_fields[kind].annotation, "__args__", ())
    found: type[BaseModel] = alternatives[0]  # the other one is None
    return found


def _field(kind: str, name: str, document: type[BaseModel]) -> Field:
    info = document.model_fields[name]
    shown: Kind = _KINDS.get(info.annotation, "size" if name.endswith("_bytes") else "integer")
    label = name.removesuffix("_bytes").replace("_", " ").capitalize()
    hint = (info.description or "").replace("`", "")
    return Field(f"{kind}.{name}", label, hint, shown, is_required=info.is_required() and shown != "check")


async def _ask(visit: Visit) -> Response:
    kind = visit.query("kind")
    if kind not in KINDS:
        return visit.page("storage_kinds.html", kinds=KINDS)
    return _add_page(visit, kind, Sheet.blank(fields_of_kind(kind)))


async def _add(visit: Visit) -> Response:
    form = await visit.form()
    kind = form.get("kind", "")
    if kind not in KINDS:
        return visit.fault(400, f"There is no kind of storage {kind[:40]!r}.")
    sheet = Sheet.filled(fields_of_kind(kind), form)
    try:
        document = {kind: {}, **sheet.document()}
        name = document.pop("name")
        await visit.send(
            method="PUT", path=f"/v1/storages/{encode_name(name)}", body=document, headers={"if-none-match": "*"}
        )
    except RefusedError as error:
        return _add_page(visit, kind, sheet.refused(_duplicate(error)), error.status)
    return visit.back(f"{_LIST}/{encode_name(name)}", f"Storage {name} was added. Groups use it that name it.")


def _duplicate(error: RefusedError) -> RefusedError:
    return RefusedError(409, {"detail": "There is a storage of this name already."}) if error.status == 412 else error


def _add_page(visit: Visit, kind: str, sheet: Sheet, status: int = 200) -> Response:
    return visit.page("storage_add.html", status, kind=kind, label=KINDS[kind], sheet=sheet)


ADD_STORAGE_ROUTES: Final[Routes] = (
    ("GET", _ADD, _ask),
    ("POST", _ADD, _add),
)
