"""`kvcm snapshot`: the configuration of a running deployment as one file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, DryRun, Yes, noun, with_options
from kvcm.commands.output import console, print_below, print_json, private_file
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import CANNOT_RUN, FINDINGS, exit_on_call_errors, exit_on_errors
from kvcm.terminal.tables import TerminalTable

__all__ = ["Change", "print_changes", "snapshot_app"]

# The changes of a load as a table: a row per field that gets another value.

_STYLES = {"add": "green", "change": "yellow", "remove": "red", "keep": "dim"}
_MOST_CHARACTERS = 60
_ABSENT = object()


class Change(NamedTuple):
    """One entry of a configuration that is loaded.

    Attributes:
        kind: storage, group, quota, instance or account.
        name: of the entry.
        action: add, change, remove or keep.
        old: its fields so far, None for none.
        new: its fields afterwards, None for none.
    """

    kind: str
    name: str
    action: str
    old: Any
    new: Any

    @classmethod
    def of(cls, message: Any) -> Change:
        """Read a ConfigChange."""
        old, new = (json.loads(text) if text else None for text in (message.old_value, message.new_value))
        return cls(message.kind, message.name, message.action, old, new)


def print_changes(changes: Sequence[Change], console: Console) -> None:
    """Print the entries that are added, changed, removed, or kept although they are not in the snapshot."""
    columns = ("action", "kind", "name", "field", "now", "then")
    table = TerminalTable(columns, words=columns)
    for change in changes:
        for field, old, new in _rows(change):
            cells = (change.action, change.kind, change.name, field, old, new)
            table.add_row(*cells, style=_STYLES.get(change.action, ""))
    console.print(table)


def _format_counts(changes: Iterable[Change]) -> str:
    """Return how many entries are added, changed, removed and kept."""
    counts = Counter(change.action for change in changes)
    return ", ".join(f"{counts[action]} to {action}" for action in _STYLES if counts[action]) or "no difference"


def _rows(change: Change) -> Iterator[tuple[str, str, str]]:
    if change.action != "change":
        yield "", "", "not in the snapshot, stays" if change.action == "keep" else ""
        return
    differences = list(_differences("", change.old, change.new))
    if not differences:
        yield "a secret", "", ""
    for field, old, new in differences:
        yield field, _format(old), _format(new)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            below = f"{path}.{name}" if path else name
            yield from _differences(below, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif old != new:
        yield path, old, new


def _format(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    is_plain = isinstance(value, str) and value.isprintable()  # others might drive the terminal
    text = value if is_plain else json.dumps(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


# Commands.

snapshot_app = noun(
    "snapshot", "The configuration of a running deployment: save it, compare it, load it. No blocks, no secrets."
)
_LOAD_SECONDS = 600.0  # storages are opened
File = Annotated[str, typer.Argument(metavar="FILE", help="A snapshot; - for the standard input.")]
Prune = Annotated[bool, typer.Option("--prune", help="Also remove groups, quotas and accounts that FILE has not.")]


@snapshot_app.command("save")
@with_options
def save_snapshot(
    connection: Connection,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Where to write; - for the standard output.")] = "-",
) -> None:
    """Write storages, groups, quotas, instances and accounts to FILE, which is replaced as a whole, with mode 0600."""
    with exit_on_call_errors():
        request = pb.GenConfigSnapshotRequest()
        answer = connection.admin().call("GenConfigSnapshot", request, pb.ConfigSnapShotResponse)
        if file == "-":
            typer.echo(answer.config_snapshot, nl=False)
        else:
            with private_file(Path(file), force=True) as output:
                output.write(answer.config_snapshot.encode())


@snapshot_app.command("diff")
@with_options
def diff_snapshot(connection: Connection, file: File, prune: Prune = False, as_json: AsJson = False) -> None:
    """Show the changes that loading FILE would make, and the entries that FILE does not have.

    Exit code 0: no difference; 1: differences; 2: FILE would be refused, or the manager is unavailable.
    """
    with exit_on_errors(CANNOT_RUN):
        changes = _load(connection.admin(), _read(file), prune=prune, dry_run=True)
    _show(changes, as_json=as_json, is_loaded=False)
    if changes:
        raise typer.Exit(FINDINGS)


@snapshot_app.command("load")
@with_options
def load_snapshot(
    connection: Connection,
    file: File,
    prune: Prune = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make the configuration agree with FILE, as a whole or not at all; shows what changes and asks first.

    Exit code 0: done, or nothing to do; 1: refused, or the answer was no; 2: the manager is unavailable.
    """
    with exit_on_call_errors():
        if (as_json or file == "-") and not (yes or dry_run):
            raise InvalidArgumentError("--json and a FILE of - leave no way to ask: give --yes or --dry-run")
        client, text = connection.admin(), _read(file)
        if dry_run or not yes:
            changes = _load(client, text, prune=prune, dry_run=True)
            _show(changes, as_json=as_json, is_loaded=False)
            if dry_run or not _is_confirmed(changes):
                return
        done = _load(client, text, prune=prune, dry_run=False)
    if yes or done != changes:  # the shown changes were stale
        _show(done, as_json=as_json, is_loaded=True)
    if not as_json:
        typer.echo("loaded")


def _load(client: AdminClient, text: str, *, prune: bool, dry_run: bool) -> list[Change]:
    request = pb.LoadConfigSnapshotRequest(config_snapshot=text, prune=prune, dry_run=dry_run)
    answer = client.call("LoadConfigSnapshot", request, pb.LoadConfigSnapshotResponse, _LOAD_SECONDS)
    return [Change.of(change) for change in answer.changes]


def _is_confirmed(changes: Sequence[Change]) -> bool:
    """Ask, unless there is nothing to do; ends the command when the answer is no."""
    if all(change.action == "keep" for change in changes):
        return False
    typer.confirm("load this?", abort=True, err=True)
    return True


def _read(file: str) -> str:
    """Return the text of a snapshot, `-` for the standard input.

    Raises:
        InvalidArgumentError: it is larger than any, or no text.
        OSError: it cannot be read.
    """
    from kvcm.service.request_limits import MAX_SNAPSHOT_BYTES  # and the service with it: others start faster without

    with contextlib.ExitStack() as stack:
        source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
        data = source.read(MAX_SNAPSHOT_BYTES + 1)
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise InvalidArgumentError(f"{file} has more than {MAX_SNAPSHOT_BYTES} bytes; is it a snapshot?")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{file} is no text in UTF-8; is it a snapshot?") from None


def _show(changes: Sequence[Change], *, as_json: bool, is_loaded: bool) -> None:
    if as_json:
        print_json({"loaded": is_loaded, "changes": [{**change._asdict()} for change in changes]})
        return
    if changes:
        print_changes(changes, console())
        print_below(_format_counts(changes))
    else:
        typer.echo(_format_counts(changes))
