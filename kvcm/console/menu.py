"""Which pages the menu leads to: those that a visitor may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvcm.console.visits import Visitor

__all__ = ["menu_of"]

_ENTRIES: Final[Sequence[tuple[str, str, Callable[[Visitor], bool]]]] = (
    ("/console/", "Overview", lambda visitor: visitor.may_view),
    ("/console/groups", "Groups", lambda visitor: visitor.may_view),
    ("/console/storages", "Storages", lambda visitor: visitor.sees_everything),
    ("/console/instances", "Instances", lambda visitor: visitor.may_view),
    ("/console/explorer", "Prefix explorer", lambda visitor: True),
    ("/console/sessions", "Sessions", lambda visitor: visitor.may_view),
    ("/console/tasks", "Tasks", lambda visitor: visitor.sees_everything),
    ("/console/managers", "Managers", lambda visitor: visitor.sees_everything),
    ("/console/accounts", "Accounts", lambda visitor: visitor.may_operate),
    ("/console/keys", "Keys", lambda visitor: visitor.may_operate),
)


def menu_of(visitor: Visitor) -> list[tuple[str, str]]:
    """Return paths and names of pages."""
    return [(path, name) for path, name, is_for in _ENTRIES if is_for(visitor)]
