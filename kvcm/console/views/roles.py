"""What people call roles, and what they may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["ACCOUNT_ROLES", "KEY_ROLES", "VERBS", "shown_role"]

KEY_ROLES: Final[Mapping[str, str]] = {
    "ROLE_ENGINE": "Engine: the calls of engines, in its groups",
    "ROLE_VIEWER": "Viewer: looks, and changes nothing",
    "ROLE_OPERATOR": "Operator: also switches and drains storages, removes and pins blocks",
    "ROLE_ADMIN": "Administrator: also changes storages, groups, accounts and keys",
}
"""Of keys, and what they are."""

ACCOUNT_ROLES: Final[Mapping[str, str]] = {
    "ROLE_USER": KEY_ROLES["ROLE_VIEWER"],
    "ROLE_OPERATOR": KEY_ROLES["ROLE_OPERATOR"],
    "ROLE_ADMIN": KEY_ROLES["ROLE_ADMIN"],
}
"""Of accounts."""

VERBS: Final[Mapping[str, str]] = {
    "MATCH": "Match: read what is there",
    "WRITE": "Write blocks, and register instances",
    "REMOVE": "Remove blocks",
    "PIN": "Pin blocks",
}
"""What an engine may do."""


def shown_role(role: str) -> str:
    """Return a role in one word."""
    return {**KEY_ROLES, **ACCOUNT_ROLES}.get(role, role).partition(":")[0].lower()
