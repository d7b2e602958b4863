"""What an update changes, told before and after it is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer
from google.protobuf.message import Message

from kvcm.commands.shown import plain, print_json
from kvcm.sizes import shown_size

__all__ = ["Change", "changes", "print_changes"]

_MISSING: Any = object()


class Change(NamedTuple):
    """A field with another value; None where it has none."""

    field: str
    old: Any
    new: Any


def changes(old: Message, new: Message, *ignored: str) -> list[Change]:
    """Return the fields in which two messages differ, as paths; those in `ignored` are left out."""
    before, after = (dict(_leaves("", plain(message))) for message in (old, new))
    return [
        Change(name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if name not in ignored and before.get(name, _MISSING) != after.get(name, _MISSING)
    ]


def _leaves(path: str, fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(f"{path}{name}.", value)
        else:
            yield path + name, value


def print_changes(found: list[Change], *, dry_run: bool, as_json: bool) -> None:
    """Print what was changed, or would be."""
    if as_json:
        print_json({"changed": not dry_run and bool(found), "changes": [each._asdict() for each in found]})
        return
    for each in found:
        typer.echo(f"{each.field}: {_shown(each.field, each.old)} → {_shown(each.field, each.new)}")
    if not found:
        typer.echo("nothing to change: everything is as asked")
    elif dry_run:
        typer.echo("nothing was changed: leave --dry-run out for that")


def _shown(field: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and field.endswith(("capacity", "_bytes")):
        return shown_size(value)
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
