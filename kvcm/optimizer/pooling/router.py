"""How requests are spread over engines, such as `affinity` or `longest_prefix+migration`."""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.optimizer.errors import OptionError

__all__ = ["DEFAULT_ROUTERS", "ROUTER_NAMES", "Router"]

ROUTER_NAMES = ("random", "least_loaded", "affinity", "longest_prefix")
_WITH_MIGRATION = ("affinity", "longest_prefix")


@dataclass(frozen=True, slots=True)
class Router:
    """Which engine a request goes to.

    Attributes:
        name: one of `ROUTER_NAMES`: by chance; to the engine with the least outstanding prefill; by a consistent hash
            of the session (of the first blocks where the trace names none); to the engine whose local cache holds the
            longest prefix, the least loaded of several or of all if that is short.
        migrates: whether a request goes to the least loaded engine instead when its own is overloaded.

    Raises:
        OptionError: there is no such router.
    """

    name: str
    migrates: bool = False

    def __post_init__(self) -> None:
        if self.name not in ROUTER_NAMES:
            raise OptionError(f"routers: {self.name!r} is no router; allowed: {', '.join(ROUTER_NAMES)}")
        if self.migrates and self.name not in _WITH_MIGRATION:
            raise OptionError(f"routers: {self.name} never migrates; allowed: {', '.join(_WITH_MIGRATION)}")

    @property
    def label(self) -> str:
        """Return what people call it."""
        return self.name + ("+migration" if self.migrates else "")


DEFAULT_ROUTERS = (
    Router("random"),
    Router("least_loaded"),
    Router("affinity"),
    Router("affinity", migrates=True),
    Router("longest_prefix"),
    Router("longest_prefix", migrates=True),
)
