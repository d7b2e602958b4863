"""Who calls, and what it may do.

A role stands for verbs; engines have those that they were given. Whoever is limited to instance groups may do what it
may do only there, and nothing that concerns the whole deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NamedTuple

__all__ = ["ALL_GROUPS", "ENGINE_VERBS", "EVERYBODY", "STRANGER", "Errand", "Principal", "Role", "Verb", "errand"]

ALL_GROUPS: Final = "*"
"""In the place of a group: all of them."""


class Role(IntEnum):
    """Numbers are those of the wire."""

    ROLE_VIEWER = 1
    ROLE_OPERATOR = 2
    ROLE_ADMIN = 3
    ROLE_ENGINE = 4


class Verb(Enum):
    """What a call does."""

    VIEW = "view"
    OPERATE = "operate"
    ADMINISTER = "administer"
    MATCH = "match"
    WRITE = "write"
    REMOVE = "remove"
    PIN = "pin"


ENGINE_VERBS: Final = (Verb.MATCH, Verb.WRITE, Verb.REMOVE, Verb.PIN)
"""What engines can be allowed, in the order of the wire's numbers from 1."""

_VIEWER: Final = frozenset({Verb.VIEW})
# What an operator removes can be computed again; what it wrote, everybody would read.
_OPERATOR: Final = frozenset({Verb.VIEW, Verb.OPERATE, Verb.MATCH, Verb.REMOVE, Verb.PIN})
_VERBS: Final[Mapping[Role, frozenset[Verb]]] = {
    Role.ROLE_VIEWER: _VIEWER,
    Role.ROLE_OPERATOR: _OPERATOR,
    Role.ROLE_ADMIN: frozenset(Verb),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls.

    Attributes:
        name: stays when its key is replaced; "" while nobody is asked who he is.
        verbs: what it may do.
        groups: where: instance groups, or `ALL_GROUPS`.
        key_id: of the key that it showed.
        account: that it is logged in as, "" for none.
    """

    name: str
    verbs: frozenset[Verb]
    groups: frozenset[str]
    key_id: str = ""
    account: str = ""

    @classmethod
    def of(
        cls, name: str, role: Role, verbs: frozenset[Verb], groups: frozenset[str], key_id: str, account: str = ""
    ) -> Principal:
        """Return a principal of a role; `verbs` are those of an engine."""
        return cls(name, _VERBS.get(role, verbs), groups, key_id, account)

    @property
    def has_all_groups(self) -> bool:
        """Whether it may do what concerns the whole deployment."""
        return ALL_GROUPS in self.groups

    def covers(self, group_name: str) -> bool:
        """Return whether it may do something in a group."""
        return group_name in self.groups or ALL_GROUPS in self.groups


EVERYBODY: Final = Principal("", frozenset(Verb), frozenset({ALL_GROUPS}))
"""Who calls while nobody is asked who he is, and the manager itself."""

STRANGER: Final = Principal("", frozenset(), frozenset())
"""Who does not show who he is, where everybody is asked."""


class Errand(NamedTuple):
    """What the present task works for.

    Attributes:
        principal: on whose behalf.
        call: that it made, "" for none: the manager's own duties.
        peer: address that it came from.
    """

    principal: Principal = EVERYBODY
    call: str = ""
    peer: str = ""


errand: ContextVar[Errand] = ContextVar("errand", default=Errand())  # noqa: B039 - it cannot be changed
"""What the present task works for."""
