"""What several pages ask for, of all groups or of those that the visitor is limited to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlencode

from kvcm.console.resources import RefusedError
from kvcm.console.views.history import History
from kvcm.console.visits import Visit

__all__ = ["alerts_of", "group_usages", "history_of", "seen_groups"]

_NO_GROUP: Final = (400, 404)


def seen_groups(visit: Visit) -> Sequence[str] | None:
    """Return the groups that the visitor is limited to, None for that it sees all of them."""
    principal = visit.visitor.principal
    return None if principal.has_all_groups else sorted(principal.groups)


async def group_usages(visit: Visit) -> list[Any]:
    """Return what groups use, as `/v1/usage` tells.

    Raises:
        RefusedError: the visitor may not know.
    """
    names = seen_groups(visit)
    if names is None:
        found: list[Any] = (await visit.get("/v1/usage"))["groups"]
        return found
    return [group for report in await _of_each(visit, "/v1/usage", names) for group in report["groups"]]


async def alerts_of(visit: Visit, group: str = "") -> list[Any]:
    """Return what is wrong, the worst first: of one group, or of everything that the visitor sees.

    Raises:
        RefusedError: the visitor may not know.
    """
    names = [group] if group else seen_groups(visit)
    if names is None:
        found: list[Any] = (await visit.get("/v1/alerts"))["items"]
        return found
    answers = await _of_each(visit, "/v1/alerts", names)
    alerts = {json.dumps([alert["name"], alert["subject"]]): alert for answer in answers for alert in answer["items"]}
    return [*alerts.values()]


async def _of_each(visit: Visit, path: str, groups: Sequence[str]) -> list[Any]:
    """Return what a resource answers of each group that there is: keys may name some that are gone."""

    async def of(name: str) -> list[Any]:
        try:
            return [await visit.get(f"{path}?" + urlencode({"group": name}))]
        except RefusedError as error:
            if error.status in _NO_GROUP:
                return []
            raise

    return [found for each in await asyncio.gather(*map(of, groups)) for found in each]


async def history_of(visit: Visit, seconds: int = 3600, group: str = "") -> History:
    """Return what went on of late.

    Raises:
        RefusedError: the visitor may not know.
    """
    asked = {"seconds": seconds, **({"group": group} if group else {})}
    return History(await visit.get("/v1/history?" + urlencode(asked)))
