"""The routes of all pages: method, path and handler."""

from __future__ import annotations

from typing import Final

from kvcm.console.pages import accounts, curve, explorer, groups, instances, keys, overview, residency, storages, tasks
from kvcm.console.visits import Routes

__all__ = ["ROUTES"]

ROUTES: Final[Routes] = (
    *overview.ROUTES,
    *accounts.SIGN_IN_ROUTES,
    *keys.WHOAMI_ROUTES,
    *groups.GROUP_CHANGE_ROUTES,
    *groups.ROUTES,
    *storages.ADD_STORAGE_ROUTES,
    *storages.ROUTES,
    *instances.ROUTES,
    *overview.MANAGER_ROUTES,
    *accounts.ROUTES,
    *keys.ROUTES,
    *explorer.ROUTES,
    *residency.ROUTES,
    *instances.SESSION_ROUTES,
    *tasks.ROUTES,
    *curve.ROUTES,
)
