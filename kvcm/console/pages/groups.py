"""Groups: all of them, and one with what it does, holds and may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console.gathering import alerts_of, group_usages, history_of
from kvcm.console.views.groups import group_card, group_cards
from kvcm.console.views.history import charts_of_group
from kvcm.console.views.limit_fields import POLICIES, limit_fields, sheet_of, value_at
from kvcm.console.visits import Visit
from kvcm.service.rest.names import encoded_name

__all__ = ["ROUTES"]

_SPANS: Final = {"3600": "1 hour", "21600": "6 hours", "86400": "24 hours"}


async def _list(visit: Visit) -> Response:
    usages, alerts, history = await asyncio.gather(group_usages(visit), alerts_of(visit), history_of(visit))
    return visit.page("groups.html", groups=group_cards(usages, alerts, history))


async def _show(visit: Visit) -> Response:
    name = visit.name()
    seconds = visit.query("seconds") if visit.query("seconds") in _SPANS else "3600"
    group = await visit.get(f"/v1/groups/{encoded_name(name)}")  # where there is none, this says so
    report, alerts, history, lately = await asyncio.gather(
        visit.get("/v1/usage?" + urlencode({"group": name})),
        alerts_of(visit, name),
        history_of(visit, int(seconds), name),
        history_of(visit, 3600, name),
    )
    (usage,) = report["groups"]
    types = sorted({each["storage_type"] for each in value_at(group, "quota.quota_config") or ()})
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


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", "/console/groups", _list),
    ("GET", "/console/groups/{name}", _show),
)
