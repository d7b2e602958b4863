"""Instances: which there are, and what each was registered with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console.confirming import Question, confirmed_routes
from kvcm.console.formats import count, size
from kvcm.console.resources import RefusedError
from kvcm.console.views.instances import InstanceView, instance_views
from kvcm.console.visits import Visit

__all__ = ["ROUTES"]

_LIST: Final = "/console/instances"
_ONE: Final = "/console/instances/{name}"


async def _list(visit: Visit) -> Response:
    group = visit.query("group")
    found = await _views(visit, [group] if group else _seen_groups(visit))
    by_group = [(name, list(views)) for name, views in groupby(found, lambda view: view.group)]
    return visit.page("instances.html", groups=by_group, group=group)


async def _show(visit: Visit) -> Response:
    instance = await _found(visit)
    pins = await visit.items("/v1/pins?" + urlencode({"instance": instance.name}))
    return visit.page("instance.html", instance=instance, pins=pins)


async def _removing(visit: Visit) -> Question:
    instance = await _found(visit)
    blocks, used = count(instance.usage["key_count"]), size(instance.usage["used_bytes"])
    return Question(
        f"Remove instance {instance.name}",
        (
            f"All its blocks are deleted, with their bytes: {blocks} blocks, {used}. Its pins end.",
            "An engine that still uses it computes everything itself until it registers it anew.",
            "That cannot be undone.",
        ),
        "Remove it",
        f"{_LIST}/{visit.request.path_params['name']}",
        instance.name,
    )


async def _remove(visit: Visit) -> Response:
    await visit.send("DELETE", f"/v1/instances/{visit.request.path_params['name']}")
    return visit.back(_LIST, f"Instance {visit.name()} was removed; its blocks are being deleted.")


def _seen_groups(visit: Visit) -> Sequence[str]:
    """Return the groups to ask for: those that the visitor is limited to, or "" for all."""
    principal = visit.visitor.principal
    return [""] if principal.has_all_groups else sorted(principal.groups)


async def _views(visit: Visit, groups: Sequence[str]) -> list[InstanceView]:
    instances: list[Any] = []
    usages: list[Any] = []
    for name in groups:
        query = f"?{urlencode({'group': name})}" if name else ""
        instances += await visit.items(f"/v1/instances{query}")
        usages += (await visit.get(f"/v1/usage{query}"))["groups"]
    return instance_views(instances, usages)


async def _found(visit: Visit) -> InstanceView:
    """Raises RefusedError: there is no such instance."""
    document = await visit.get(f"/v1/instances/{visit.request.path_params['name']}")
    found = [view for view in await _views(visit, [document["instance_group_name"]]) if view.name == visit.name()]
    if not found:
        raise RefusedError(404, {"detail": f"There is no instance {visit.name()!r}: it may have been removed."})
    return found[0]


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", _LIST, _list),
    ("GET", _ONE, _show),
    *confirmed_routes(f"{_ONE}/remove", _removing, _remove),
)
