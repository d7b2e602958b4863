"""The first page: how the deployment is doing, and which group is full for what reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response

from kvcm.console.gathering import alerts_of, group_usages, history_of
from kvcm.console.views.groups import group_cards
from kvcm.console.views.history import charts_of_all
from kvcm.console.views.overview import headline, tiles
from kvcm.console.views.storages import StorageView, storage_views
from kvcm.console.visits import Visit

__all__ = ["ROUTES"]

_MOST_GROUPS: Final = 48  # it is written anew every few seconds, for everybody who looks


async def _show(visit: Visit) -> Response:
    usages, alerts, history = await asyncio.gather(group_usages(visit), alerts_of(visit), history_of(visit))
    sees_all = visit.visitor.sees_everything
    managers = (await visit.get("/v1/managers"))["items"] if sees_all else []
    cards = group_cards(usages, alerts, history)
    return visit.page(
        "overview.html",
        headline=headline(cards, alerts),
        alerts=alerts,
        groups=cards[:_MOST_GROUPS],
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


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (("GET", "/console/", _show),)
