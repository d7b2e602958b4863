"""Output of commands: tables for people, one JSON object for programs, private files, progress, differences."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import typer
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.units import format_size
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.terminal.tables import TerminalTable, format_time

__all__ = [
    "Change",
    "changes",
    "console",
    "enum_names",
    "format_expiry",
    "plain",
    "plain_fields",
    "print_below",
    "print_changes",
    "print_counts",
    "print_fields",
    "print_json",
    "print_remark",
    "print_table",
    "private_file",
    "progress",
    "spinner",
    "step_progress",
]

# Private files.

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextlib.contextmanager
def private_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a file to write, which appears under its name when it is complete, readable by its owner only.

    Args:
        path: its name.
        force: whether to replace an existing file.

    Raises:
        InvalidArgumentError: the name is taken.
        OSError: it cannot be written.
    """
    if path.exists() and not force:
        raise InvalidArgumentError(f"{path} exists: choose another name, or give --force to replace it")
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = _new_file(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _new_file(path: Path) -> int:
    """Create a file that no other process has open or can redirect; an interrupted command's file is replaced."""
    with contextlib.suppress(FileNotFoundError):
        left = path.lstat()
        if stat.S_ISREG(left.st_mode) and left.st_uid == os.geteuid():
            path.unlink()
    return os.open(path, _NEW_FILE, 0o600)


# Tables and JSON.

_WIDTH = 160
_UNSAFE = {"block_key", "last_block_key"}  # 64-bit numbers, which many JSON readers would round


def console() -> Console:
    """Return the console for tables; a file or pipe counts as a wide terminal."""
    found = Console()
    return found if found.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDTH)


def print_table(columns: Iterable[str], rows: Iterable[tuple[str, ...]], *, words: Iterable[str] = ()) -> None:
    """Print rows of texts; all columns but the first are numbers, save those named in `words`."""
    table = TerminalTable(columns, words=words)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_fields(rows: Iterable[tuple[str, str]]) -> None:
    """Print the fields of one thing: names and values."""
    table = TerminalTable(("field", "value"), words=("value",), has_titles=False)
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    console().print(table)


def print_below(*sentences: str) -> None:
    """Print sentences below a table, after an empty line: without it the first would look like a row."""
    for number, sentence in enumerate(sentences):
        typer.echo(sentence if number else f"\n{sentence}")


def print_json(value: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_remark(answer: pb.CommonResponse) -> None:
    """Print the remark on a call that succeeded, if there is one, to the standard error."""
    if message := answer.header.status.message:
        typer.echo(f"kvcm: {message}", err=True)


def print_counts(counts: dict[str, Any], *, as_json: bool) -> None:
    """Print counts by name; names that end in bytes are sizes, except `without_bytes`."""
    if as_json:
        print_json(counts)
        return
    rows = ((name.replace("_", " "), _format_count(name, count)) for name, count in counts.items())
    print_table(("found", "number"), rows)


def _format_count(name: str, count: int) -> str:
    is_size = name == "bytes" or (name.endswith("_bytes") and name != "without_bytes")
    return format_size(count) if is_size else f"{count:,}"


def format_expiry(unix_ms: int) -> str:
    """Return a time, "never" for 0."""
    return format_time(unix_ms) if unix_ms else "never"


def plain_fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message that are no messages, also those that are 0."""
    fields = (field for field in message.DESCRIPTOR.fields if field.message_type is None)
    return {field.name: getattr(message, field.name) for field in fields}


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON has it, with numbers as numbers and without headers."""
    return {
        field.name: _plain_field(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.name not in {"header", "trace_id"} and not _is_unset(field, message)
    }


def _is_unset(field: Any, message: Message) -> bool:
    return field.has_presence and not message.HasField(field.name)


def _plain_field(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_plain_value(field, each) for each in value]
    return _plain_value(field, value)


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return value.value if isinstance(value, Int64Value) else plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return str(value) if field.name in _UNSAFE else value


def enum_names(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a dataclass with enums by name, as `dict_factory` of `asdict`."""
    return {name: value.name if isinstance(value, Enum) else value for name, value in items}


def spinner(what: str) -> AbstractContextManager[object]:
    """Return a context that shows activity on a terminal."""
    terminal = Console(stderr=True)
    return terminal.status(what) if terminal.is_terminal else nullcontext()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how much of the work is done: as a bar on a terminal, else not at all."""
    with step_progress(MofNCompleteColumn()) as show:
        show(what, 0, total)
        yield lambda done: show(what, done, total)


@contextmanager
def step_progress(figures: ProgressColumn) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the progress of steps by name, amount done and total, 0 for unknown.

    On a terminal each step is a bar, with `figures` beside it; elsewhere nothing is shown.
    """
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield lambda _step, _done, _total: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), figures, TimeElapsedColumn()
    with Progress(*columns, console=terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=None)
            bars.update(tasks[step], completed=done, total=max(done, total) if total else None)

        yield show


# Differences between two messages, for updates and dry runs.

_UNSET: Any = object()


class Change(NamedTuple):
    """A field with another value; None stands for no value."""

    field: str
    old: Any
    new: Any


def changes(old: Message, new: Message, *ignored: str) -> list[Change]:
    """Return the fields in which two messages differ, as paths; those in `ignored` are left out."""
    before, after = (dict(_leaves("", plain(message))) for message in (old, new))
    return [
        Change(name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if name not in ignored and before.get(name, _UNSET) != after.get(name, _UNSET)
    ]


def _leaves(path: str, fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(f"{path}{name}.", value)
        else:
            yield path + name, value


def print_changes(found: list[Change], *, dry_run: bool, as_json: bool) -> None:
    """Print the changes of an update or of a dry run."""
    if as_json:
        print_json({"changed": not dry_run and bool(found), "changes": [each._asdict() for each in found]})
        return
    for each in found:
        typer.echo(f"{each.field}: {_format(each.field, each.old)} → {_format(each.field, each.new)}")
    if not found:
        typer.echo("nothing to change: everything is as asked")
    elif dry_run:
        typer.echo("nothing was changed: leave --dry-run out for that")


def _format(field: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and field.endswith(("capacity", "_bytes")):
        return format_size(value)
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
