"""The first page, with the state of the deployment and of its groups, and the page of managers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from kvcm.console import formats
from kvcm.console.charts import Values
from kvcm.console.deployment import SMALL_VALUES, History, alerts_of, charts_of_all, group_usages, history_of
from kvcm.console.pages.groups import GroupCard, group_cards
from kvcm.console.pages.storages import StorageView, storage_views
from kvcm.console.visits import Routes, Visit

__all__ = ["MANAGER_ROUTES", "ROUTES", "Headline", "Tile", "headline", "tiles"]

# Headline and tiles.

Document = Mapping[str, Any]
_MAX_NAMED: Final = 3
_PROBLEM: Final = {
    "full": "is full",
    "refuses writes": "refuses writes",
    "no quota": "has no quota",
    "no storage": "can use no storage",
}


class Headline(NamedTuple):
    """The state of the deployment, in one sentence; kind is good, warn or bad."""

    text: str
    kind: str


class Tile(NamedTuple):
    """One number, and its history."""

    name: str
    value: str
    values: Values


def headline(groups: Sequence[GroupCard], alerts: Sequence[Document]) -> Headline:
    """Return the state of the deployment, in one sentence."""
    full = [f"{group.name} {_PROBLEM.get(group.state, 'is in trouble')}" for group in groups if group.has_problem]
    others = [alert for alert in alerts if alert["severity"] != "info" and alert["subject"]["kind"] != "group"]
    urgent = any(alert["severity"] == "page" for alert in others)
    said = []
    if full:
        more = [f"{len(full) - _MAX_NAMED} more groups are in trouble"] if len(full) > _MAX_NAMED else []
        said.append(f"Group {formats.listed([*full[:_MAX_NAMED], *more])}")
    if others:
        said.append(f"{len(others)} other {'thing needs' if len(others) == 1 else 'things need'} attention")
    if not said:
        near = sum(group.kind == "warn" for group in groups)
        if near:
            return Headline(
                f"{near} {'group is' if near == 1 else 'groups are'} short of space; nothing is refused.", "warn"
            )
        return Headline("Nothing is wrong.", "good")
    return Headline("; ".join(said) + ".", "bad" if full or urgent else "warn")


def tiles(history: History) -> list[Tile]:
    """Return the present rates of the whole deployment."""
    requests = history.total("requests_per_second")
    refused = history.total("refused_writes_per_second")
    return [
        Tile("Requests", formats.rate(_last(requests)), requests[-SMALL_VALUES:]),
        Tile("Hit rate", formats.percent(history.latest("hit_ratio")), history.tail("hit_ratio")),
        Tile("Look-up, half within", *_latency(history, "match_p50_seconds")),
        Tile("Look-up, 99 % within", *_latency(history, "match_p99_seconds")),
        Tile("Refused writes", formats.rate(_last(refused)), refused[-SMALL_VALUES:]),
        Tile("Errors", formats.rate(history.latest("errors_per_second")), history.tail("errors_per_second")),
    ]


def _latency(history: History, name: str) -> tuple[str, Values]:
    return formats.duration(history.latest(name)), history.tail(name)


def _last(values: Values) -> float | None:
    return next((value for value in reversed(values[-3:]) if value is not None), None)


# The pages.

_MAX_GROUPS: Final = 48  # every visitor's page is rendered again every few seconds


async def _show(visit: Visit) -> Response:
    usages, alerts, history = await asyncio.gather(group_usages(visit), alerts_of(visit), history_of(visit))
    sees_all = visit.visitor.sees_all_groups
    managers = (await visit.get("/v1/managers"))["items"] if sees_all else []
    cards = group_cards(usages, alerts, history)
    return visit.page(
        "overview.html",
        headline=headline(cards, alerts),
        alerts=alerts,
        groups=cards[:_MAX_GROUPS],
        group_count=len(cards),
        tiles=tiles(history) if sees_all else [],
        storages=await _storages(visit) if sees_all else [],
        managers=managers,
        history=history,
        charts=charts_of_all(history) if sees_all else [],
    )


async def _storages(visit: Visit) -> list[StorageView]:
    return storage_views(
        *await asyncio.gather(
            visit.items("/v1/storages?with_status=true"), visit.get("/v1/usage"), visit.items("/v1/tasks")
        )
    )


ROUTES: Final[Routes] = (("GET", "/console/", _show),)


async def _show_managers(visit: Visit) -> Response:
    return visit.page("managers.html", managers=(await visit.get("/v1/managers"))["items"])


MANAGER_ROUTES: Final[Routes] = (("GET", "/console/managers", _show_managers),)
