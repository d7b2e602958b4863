"""Keys as pages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcm.console.views.roles import shown_role
from kvcm.model.principals import ALL_GROUPS

__all__ = ["KeyView", "key_views"]

Document = Mapping[str, Any]

_SOON_MS: Final = 14 * 86_400_000


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key, without its secret.

    Attributes:
        document: the resource.
        now_ms: Unix time in ms.
    """

    document: Document
    now_ms: float

    @property
    def key_id(self) -> str:
        """Names it."""
        return str(self.document["key_id"])

    @property
    def name(self) -> str:
        """Of its principal."""
        return str(self.document["name"])

    @property
    def role(self) -> str:
        """In one word."""
        return shown_role(self.document["role"])

    @property
    def scope(self) -> str:
        """Where it counts."""
        groups: Sequence[str] = self.document["instance_groups"]
        return "all groups" if not groups or ALL_GROUPS in groups else ", ".join(groups)

    @property
    def verbs(self) -> str:
        """What an engine may do; "" for other roles."""
        return ", ".join(verb.lower() for verb in self.document["verbs"])

    @property
    def ends_soon(self) -> bool:
        """Whether somebody should rotate it. Logins end by themselves."""
        ends = self.document["expires_at_ms"]
        return bool(ends and not self.document["account"] and ends - self.now_ms < _SOON_MS)


def key_views(keys: Sequence[Document], now_ms: float) -> list[KeyView]:
    """Return keys, in their order."""
    return [KeyView(key, now_ms) for key in keys]
