"""`kvcm snapshot`: the configuration of a running deployment as one file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvcm.admin_client import AdminClient
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, DryRun, Yes, noun, with_options
from kvcm.commands.shown import console, print_below, print_json
from kvcm.commands.snapshot_tables import Change, print_changes, shown_counts
from kvcm.model.errors import InvalidArgumentError
from kvcm.private_files import private_file
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.refusals import CANNOT_RUN, FINDINGS, asking, refusals
from kvcm.service.request_sizes import MOST_SNAPSHOT_BYTES

__all__ = ["snapshot_app"]

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
    """Write storages, groups, quotas, instances and accounts to FILE, in whose place it comes as a whole, mode 0600."""
    with asking():
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
    """Show what loading FILE would change, and what is configured beside it.

    Exit code 0: no difference; 1: differences; 2: FILE would be refused, or the manager cannot be asked.
    """
    with refusals(CANNOT_RUN):
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

    Exit code 0: done, or nothing to do; 1: refused, or the answer was no; 2: the manager cannot be asked.
    """
    with asking():
        if (as_json or file == "-") and not (yes or dry_run):
            raise InvalidArgumentError("there is nobody to ask with --json or a FILE of -: give --yes or --dry-run")
        client, text = connection.admin(), _read(file)
        if dry_run or not yes:
            changes = _load(client, text, prune=prune, dry_run=True)
            _show(changes, as_json=as_json, is_loaded=False)
            if dry_run or not _is_confirmed(changes):
                return
        done = _load(client, text, prune=prune, dry_run=False)
    if yes or done != changes:  # what was shown was out of date
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
    with contextlib.ExitStack() as stack:
        source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
        data = source.read(MOST_SNAPSHOT_BYTES + 1)
    if len(data) > MOST_SNAPSHOT_BYTES:
        raise InvalidArgumentError(f"{file} has more than {MOST_SNAPSHOT_BYTES} bytes; is it a snapshot?")
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
        print_below(shown_counts(changes))
    else:
        typer.echo(shown_counts(changes))
