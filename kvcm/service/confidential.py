"""What of a configured value its reader may see: whoever may change all of it sees all of it, others no secrets."""

from __future__ import annotations

from typing import TypeVar

from kvcm.model.principals import Verb, errand
from kvcm.registry.secrets import redacted

__all__ = ["as_seen"]

Value = TypeVar("Value")


def as_seen(value: Value) -> Value:
    """Return a configured value as the present task's principal sees it; what it sends back is completed
    (`kvcm.registry.secrets.restored`)."""
    return value if Verb.ADMINISTER in errand.get().principal.verbs else redacted(value)
