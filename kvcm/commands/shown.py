"""What commands print: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvcm.capacity_tables import shown_time
from kvcm.sizes import shown_size
from kvcm.terminal_table import TerminalTable

__all__ = [
    "console", "plain", "plain_fields", "print_below", "print_counts", "print_fields", "print_json", "print_table",
    "progress",
    "shown_end",
    "waiting",
]  # fmt: skip

_WIDTH = 160
_UNSAFE = {"block_key", "last_block_key"}  # 64-bit numbers, which many JSON readers would round


def console() -> Console:
    """Return where tables go; in a file or pipe they need no more folding than on a wide terminal."""
    found = Console()
    return found if found.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDTH)


def print_table(columns: Iterable[str], rows: Iterable[tuple[str, ...]], *, words: Iterable[str] = ()) -> None:
    """Print rows of texts; all columns but the first are numbers, save those named in `words`."""
    table = TerminalTable(columns, words=words)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_fields(rows: Iterable[tuple[str, str]]) -> None:
    """Print what one thing is: names and values."""
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


def print_counts(counts: dict[str, Any], *, as_json: bool) -> None:
    """Print how many there are of what; names that end in bytes are sizes, but for what is `without_bytes`."""
    if as_json:
        print_json(counts)
        return
    rows = ((name.replace("_", " "), _shown_count(name, count)) for name, count in counts.items())
    print_table(("found", "number"), rows)


def _shown_count(name: str, count: int) -> str:
    is_size = name == "bytes" or (name.endswith("_bytes") and name != "without_bytes")
    return shown_size(count) if is_size else f"{count:,}"


def shown_end(unix_ms: int) -> str:
    """Return when something ends or happened, "never" for 0."""
    return shown_time(unix_ms) if unix_ms else "never"


def plain_fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message that are no messages, those that are 0 too."""
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
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return str(value) if field.name in _UNSAFE else value


def waiting(what: str) -> AbstractContextManager[object]:
    """Return what shows inside its block that something goes on, where somebody watches."""
    watched = Console(stderr=True)
    return watched.status(what) if watched.is_terminal else nullcontext()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield what is told how much of the work is done: a bar where somebody watches, nothing elsewhere."""
    watched = Console(stderr=True)
    if not watched.is_terminal:
        yield lambda _done: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=watched, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
