"""Pages of instances, and of open write sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console.formats import count, size
from kvcm.console.forms import Question, confirmed_routes
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.registry.secrets import redacted_text

__all__ = ["ROUTES", "SESSION_ROUTES", "InstanceView", "Sessions", "instance_views", "sessions_of"]

# Instances.

Document = Mapping[str, Any]
_KINDS: Final = {
    "LSK_UNSPECIFIED": "not said", "LSK_FULL_ATTENTION": "full attention", "LSK_LINEAR_ATTENTION": "linear attention",
}  # fmt: skip
_UNUSED: Final = {"key_count": 0, "max_key_count": -1, "used_bytes": 0, "policy": ""}


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance.

    Attributes:
        name: its id.
        group: that it belongs to.
        document: the resource.
        usage: its blocks, bytes and the policy in force.
    """

    name: str
    group: str
    document: Document
    usage: Document

    @property
    def model(self) -> str:
        """Name of its model and data type of its KV."""
        deployment = self.document["model_deployment"]
        return f"{deployment['model_name']}, {deployment['dtype']}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(part["size"] for part in self.document["location_spec_infos"])

    @property
    def parts(self) -> Sequence[tuple[str, int, str]]:
        """The specs of a block: name, bytes and kind of attention."""
        return [(part["name"], part["size"], _KINDS[part["kind"]]) for part in self.document["location_spec_infos"]]

    @property
    def deployment(self) -> Sequence[tuple[str, str]]:
        """Further fields of the model: names and values."""
        found = self.document["model_deployment"]
        parallel = [(found[f"{name}_size"], label) for name, label in _PARALLEL.items() if found[f"{name}_size"]]
        fields = [
            ("Parallelism", ", ".join(f"{count} {label}" for count, label in parallel)),
            ("Attention", "multi-head latent" if found["use_mla"] else ""),
            ("LoRA adapter", found["lora_name"]),
            ("Also its identity", found["extra"]),
            ("Note", found["user_data"]),
        ]
        return [(name, redacted_text(value)) for name, value in fields if value]


_PARALLEL: Final = {"tp": "ways by tensor", "pp": "stages", "dp": "ways by data"}


def instance_views(instances: Sequence[Document], groups: Sequence[Document]) -> list[InstanceView]:
    """Return instances, ordered by group and then by id.

    Args:
        instances: as they were registered.
        groups: their usage.
    """
    usages = {each["instance_id"]: each for group in groups for each in group["instances"]}
    found = [
        InstanceView(
            each["instance_id"], each["instance_group_name"], each, usages.get(each["instance_id"], _UNUSED)
        )
        for each in instances
    ]  # fmt: skip
    return sorted(found, key=lambda view: (view.group, view.name))


_LIST: Final = "/console/instances"
_ONE: Final = "/console/instances/{name}"


async def _list(visit: Visit) -> Response:
    group = visit.query("group")
    found = await _views(visit, [group] if group else _visible_groups(visit))
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
        title=f"Remove instance {instance.name}",
        consequences=(
            f"All its blocks are deleted, with their bytes: {blocks} blocks, {used}. Its pins end.",
            "An engine that still uses it computes everything itself until it registers it again.",
            "That cannot be undone.",
        ),
        button="Remove it",
        back=f"{_LIST}/{visit.request.path_params['name']}",
        name=instance.name,
    )


async def _remove(visit: Visit) -> Response:
    await visit.send("DELETE", f"/v1/instances/{visit.request.path_params['name']}")
    return visit.back(_LIST, f"Instance {visit.name()} was removed; its blocks are being deleted.")


def _visible_groups(visit: Visit) -> Sequence[str]:
    """Return the groups that the visitor may see, or "" for all."""
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


ROUTES: Final[Routes] = (
    ("GET", _LIST, _list),
    ("GET", _ONE, _show),
    *confirmed_routes(f"{_ONE}/remove", _removing, _remove),
)

# Open write sessions.

_MAX_SHOWN: Final = 500


@dataclass(frozen=True, slots=True)
class Sessions:
    """Open write sessions.

    Attributes:
        items: the first to end first.
        blocks: of all of them.
        bytes: of those blocks.
        overdue: how many should have ended.
        oldest_ms: when the oldest began, 0 if unknown.
    """

    items: Sequence[Any]
    blocks: int
    bytes: int
    overdue: int
    oldest_ms: int


def sessions_of(items: Sequence[Any]) -> Sessions:
    """Return sessions with their sums."""
    return Sessions(
        items,
        blocks=sum(each["blocks"] for each in items),
        bytes=sum(each["bytes"] for each in items),
        overdue=sum(each["is_overdue"] for each in items),
        oldest_ms=min((each["begun_at_ms"] for each in items if each["begun_at_ms"]), default=0),
    )


async def _show_sessions(visit: Visit) -> Response:
    asked = {name: value for name in ("group", "instance") if (value := visit.query(name).strip())}
    found = await visit.items("/v1/sessions" + (f"?{urlencode(asked)}" if asked else ""))
    return visit.page(
        "sessions.html",
        sessions=sessions_of(found),
        shown=found[:_MAX_SHOWN],
        group=asked.get("group", ""),
        instance=asked.get("instance", ""),
    )


SESSION_ROUTES: Final[Routes] = (("GET", "/console/sessions", _show_sessions),)
