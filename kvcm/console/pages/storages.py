"""Storages: how each of them is, switching and emptying them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from starlette.responses import Response

from kvcm.console.confirming import Question, confirmed_routes
from kvcm.console.formats import size
from kvcm.console.forms import Field, Sheet, exact_size
from kvcm.console.resources import RefusedError
from kvcm.console.views.storages import StorageView, shares_of, storage_views
from kvcm.console.visits import Visit

__all__ = ["ROUTES"]

_LIST: Final = "/console/storages"
_ONE: Final = "/console/storages/{name}"
_NAME_ON_OTHERS: Final = "Other storages of the groups that use it take its new blocks."

_LIMITS: Final = (
    Field("capacity_bytes", "Capacity", "As in 500 GiB. Empty: not limited here.", "size"),
    Field(
        "used_percentage", "Evict above", "Percent of the capacity. Above 100: never. Empty: 90.", "percent",
    ),
)  # fmt: skip


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
        f"Disable storage {name}",
        (
            "From now on nothing is read from it and nothing is written to it: what lies there is a miss.",
            _NAME_ON_OTHERS,
            "Nothing is deleted. Enabling it brings everything back.",
        ),
        "Disable it",
        _page(visit),
        is_grave=False,
    )


async def _disable(visit: Visit) -> Response:
    await visit.send("PATCH", _resource(visit), {"is_available": False})
    return visit.back(_page(visit), f"Storage {visit.name()} is disabled.")


async def _draining(visit: Visit) -> Question:
    name = (await _found(visit)).name
    return Question(
        f"Drain storage {name}",
        (
            "Nothing new is written to it, and everything that lies on it is evicted in the background.",
            f"{_NAME_ON_OTHERS} A group that has no other storage cannot write until the drain is cancelled.",
            "What was evicted does not come back. Pinned blocks stay until their pins end.",
        ),
        "Drain it",
        _page(visit),
        name,
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
        f"Remove storage {name}",
        (
            "At once nothing is read from it or written to it, and what lies there is forgotten, pinned blocks too.",
            "Its bytes are not deleted. Drain it first if they are to go.",
            "If that was a mistake: adding it again within ten seconds, exactly as it was, brings everything back.",
        ),
        "Remove it",
        _page(visit),
        name,
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
        shown = sheet.refused(_overtaken(error))
        return visit.page("storage_limits.html", error.status, sheet=shown, etag=etag, name=visit.name())
    capacity = wanted["capacity_bytes"]
    limit = f"has a capacity of {size(capacity)}" if capacity else "is not limited"
    return visit.back(_page(visit), f"Storage {visit.name()} {limit}.")


def _overtaken(error: RefusedError) -> RefusedError:
    if error.status != 412:
        return error
    return RefusedError(412, {"detail": "Somebody else has changed it meanwhile. Go back and look at it again."})


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


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
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
