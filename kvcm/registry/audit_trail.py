"""Entries of the audit log: changes of the registry, and calls that change something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from kvcm.model.clock import Clock
from kvcm.model.principals import ANONYMOUS, UNRESTRICTED, PasswordHash, call_context, redact_keys
from kvcm.registry.secrets import redacted, redacted_text
from kvcm.telemetry.logs import current_request_id

__all__ = ["AuditTrail", "described"]

_SECRETS: Final = frozenset({"digest", "old_password", "password", "salt", "secret"})
_MOST_TEXT: Final = 1024
_MOST_OF_STRANGERS: Final = 128
_HIDDEN: Final = "…"


class AuditTrail:
    """Writes changes to a log.

    Args:
        record: takes entries.
        clock: time source.
    """

    def __init__(self, record: Callable[[Mapping[str, Any]], None], clock: Clock) -> None:
        self._record = record
        self._clock = clock

    def changed(self, document: str, old: object, new: object) -> None:
        """Record a change of the registry: a `ChangeListener`."""
        kind, _, name = document.partition("/")
        action = "add" if old is None else "remove" if new is None else "change"
        entry = {"kind": kind, "name": name, "before": described(old), "after": described(new)}
        self._record({**self._origin(), "action": action, **entry})

    def called(self, call: str, code: str, fields: Mapping[str, object]) -> None:
        """Record a call, and how it ended."""
        after = {name: _cut(_described_field(name, value)) for name, value in fields.items()}
        self._record({**self._origin(), "call": call, "action": "call", "code": code, "after": after})

    def _origin(self) -> dict[str, Any]:
        principal, call, peer = call_context.get()
        request = current_request_id.get()
        name = principal.name if principal is not UNRESTRICTED else ""
        trace_id = _cut(request.trace_id[:_MOST_TEXT]) if request is not None else ""
        origin = {"principal": name, "key_id": principal.key_id, "call": call, "peer": peer, "trace_id": trace_id}
        return {"at": round(self._clock.now(), 6), **origin}


def _cut(value: Any) -> Any:
    """Return a text for the log, cut short when an unauthenticated client sent it: it must not fill the file."""
    return value[:_MOST_OF_STRANGERS] if call_context.get().principal is ANONYMOUS and isinstance(value, str) else value


def described(value: object) -> Any:
    """Return a value of the model as JSON values, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, str):
        return redacted_text(redact_keys(value))[:_MOST_TEXT]  # cut last: half a login is not known for one
    if isinstance(value, PasswordHash | bytes):
        return _HIDDEN
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [described(item) for item in value]
    assert dataclasses.is_dataclass(value), type(value)
    value = redacted(value)
    return {field.name: _described_field(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}


def _described_field(name: str, value: object) -> Any:
    return _HIDDEN if name in _SECRETS and value else described(value)
