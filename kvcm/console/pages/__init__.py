"""The pages. Each is a module with `ROUTES`: method, path and handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from starlette.responses import Response

from kvcm.console.pages import (
    accounts,
    curve,
    explorer,
    group_changes,
    groups,
    instances,
    keys,
    managers,
    myself,
    overview,
    sessions,
    sign_in,
    storage_adding,
    storages,
    tasks,
)
from kvcm.console.visits import Visit

__all__ = ["PAGES", "Handler", "Page"]

Handler = Callable[[Visit], Awaitable[Response]]


class Page(Protocol):
    """A page, or several that belong together."""

    ROUTES: Sequence[tuple[str, str, Handler]]


PAGES: Final[Sequence[Page]] = (
    *(overview, sign_in, myself, group_changes, groups, storage_adding, storages, instances, managers, accounts, keys),
    *(explorer, sessions, tasks, curve),
)
