"""`kvcm index`: export, import, verification and repair of a deployment's metadata; `index_tools` does the work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.text import Text

from kvcm.cache.audit_report import AuditReport, Repair
from kvcm.commands.options import ConfigFile, DataDir, Env
from kvcm.commands.output import private_file, step_progress
from kvcm.config import Settings, load_settings
from kvcm.model.clock import SystemClock
from kvcm.model.errors import InvalidArgumentError
from kvcm.terminal.exit_codes import CANNOT_RUN, FAILED, FINDINGS, exit_on_errors
from kvcm.terminal.tables import TerminalTable, print_sentences

if TYPE_CHECKING:
    from kvcm.cache.archive import Exported, Imported
    from kvcm.cache.finish_notes import Rebuilt
    from kvcm.commands.index_tools import IndexTools, Repaired

__all__ = ["index_app"]

index_app = typer.Typer(
    name="index",
    help="Export, import, verify and repair the metadata: the registry and the index of all blocks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Group = Annotated[str, typer.Option("--group", metavar="NAME", help="Only this instance group.")]


@index_app.command("export")
def export_index(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write the export; - for the standard output.")],
    config_file: ConfigFile = None,
    env: Env = None,
    data_dir: DataDir = None,
    group: Group = "",
    with_accounts: Annotated[
        bool, typer.Option("--with-accounts", help="Also accounts and keys, with the hashes of passwords and secrets.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the registry and the index of all blocks to FILE; the bytes of the blocks stay where they are.

    On Redis the managers may go on; a manager on a data directory has to be stopped.
    """
    with exit_on_errors(FAILED):
        if group and with_accounts:
            raise InvalidArgumentError("accounts belong to no group: leave --group or --with-accounts out")
        with _output(file, force=force) as output, step_progress(MofNCompleteColumn()) as progress:
            tools = _tools(_settings(config_file, env, data_dir), progress)
            exported = asyncio.run(tools.export(output, group, with_accounts=with_accounts))
    _print_exported(exported)


@index_app.command("import")
def import_index(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An export; - for the standard input.")],
    config_file: ConfigFile = None,
    env: Env = None,
    data_dir: DataDir = None,
    group: Group = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, show what would be written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Add the contents of an export. Entries that exist stay; a different one of the same name refuses the import.

    Run an interrupted import again. On Redis the managers may go on; a manager on a data directory has to be stopped.
    """
    with exit_on_errors(FAILED):
        settings = _settings(config_file, env, data_dir)
        with _input(file) as (source, is_file), step_progress(MofNCompleteColumn()) as progress:
            if not is_file:
                typer.echo(
                    "kvcm: a pipe cannot be checked as a whole first: each part is checked as it comes", err=True
                )
            tools = _tools(settings, progress)
            imported = asyncio.run(tools.import_(source, file, group, dry_run=dry_run, is_file=is_file))
    if as_json:
        typer.echo(_imported_json(imported))
    else:
        _print_imported(imported, dry_run=dry_run)


@index_app.command("verify")
def verify_index(
    config_file: ConfigFile = None,
    env: Env = None,
    data_dir: DataDir = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended without losing anything.")] = False,
    drop_unreadable: Annotated[
        bool, typer.Option("--drop-unreadable", help="With --repair: also drop what cannot be read.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the whole store.

    Exit code 0: clean, or all is mended; 1: something is wrong; 2: it could not be checked, or not all of it.

    On Redis the managers may go on; a manager on a data directory has to be stopped.
    """
    with exit_on_errors(CANNOT_RUN):
        if drop_unreadable and not repair:
            raise InvalidArgumentError("--drop-unreadable changes nothing without --repair")
        with step_progress(MofNCompleteColumn()) as progress:
            tools = _tools(_settings(config_file, env, data_dir), progress)
            report = asyncio.run(tools.verify(Repair(repair, drop_unreadable)))
    if as_json:
        typer.echo(_report_json(report))
    else:
        _print_report(report)
    if not report.is_repaired:
        raise typer.Exit(FINDINGS)
    if report.unconfirmed:
        raise typer.Exit(CANNOT_RUN)


@index_app.command("repair")
def repair_index(
    config_file: ConfigFile = None,
    env: Env = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Repair the damaged metadata of a data directory: keep everything that can be read, and count the losses.

    The damaged files are moved aside. Stop the manager first.

    Exit code 0: nothing is gone; 1: something is; 2: it could not be repaired.
    """
    with exit_on_errors(CANNOT_RUN):
        with step_progress(MofNCompleteColumn()) as progress:
            repaired = asyncio.run(_tools(_settings(config_file, env, data_dir), progress).repair())
    typer.echo(_repaired_json(repaired) if as_json else "\n".join(_about_repaired(repaired)))
    if repaired.found is not None and repaired.found.is_incomplete:
        raise typer.Exit(FINDINGS)


@index_app.command("finalize")
def finalize_index(config_file: ConfigFile = None, env: Env = None, data_dir: DataDir = None) -> None:
    """Give up going back to the release before, whose managers cannot read the store from then on.

    What that makes possible: instances that are registered in a Redis afterwards keep many blocks to a value. On Redis
    the managers may go on, and use it after their next start; a manager on a data directory has to be stopped.
    """
    with exit_on_errors(FAILED), step_progress(MofNCompleteColumn()) as progress:
        before, now = asyncio.run(_tools(_settings(config_file, env, data_dir), progress).finalize())
    if before.number == now.number:
        typer.echo(f"The metadata has schema {now.number} already, the newest of this release.")
    else:
        typer.echo(f"The metadata has schema {now.number} now, and had {before.number}.")


@index_app.command("rebuild")
def rebuild_index(
    roots: Annotated[list[Path], typer.Argument(metavar="ROOT...", help="Root paths of storages, as configured.")],
    config_file: ConfigFile = None,
    env: Env = None,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, show what would be written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a lost index again, from the finish notes that managers keep on path storages.

    Notes are written with kvcm.storage.finish_notes=true. What the store has stays. On Redis the managers may go on; a
    manager on a data directory has to be stopped.

    Exit code 0: all that is noted and still has its bytes is there; 1: something was left out; 2: it could not be done.
    """
    with exit_on_errors(CANNOT_RUN):
        with step_progress(MofNCompleteColumn()) as progress:
            tools = _tools(_settings(config_file, env, data_dir), progress)
            rebuilt = asyncio.run(tools.rebuild([root.absolute() for root in roots], dry_run=dry_run))
    if as_json:
        typer.echo(json.dumps({each.name: getattr(rebuilt, each.name) for each in fields(rebuilt)}))
    else:
        _print_rebuilt(rebuilt, dry_run=dry_run)
    if rebuilt.unreadable or rebuilt.left_out:
        raise typer.Exit(FINDINGS)


def _settings(config_file: Path | None, env: list[str] | None, data_dir: Path | None) -> Settings:
    from kvcm.telemetry.logs import LEVELS, configure_logs

    configure_logs(LEVELS["WARN"])  # commands print their results themselves
    options = [f"kvcm.data_dir={data_dir.absolute()}"] if data_dir is not None else []
    options.append("kvcm.service.insecure=true")  # no port is opened, so no address is refused
    return load_settings(config_file, [*options, *(env or ())], os.environ, lambda _text: None)


def _tools(settings: Settings, progress: Callable[[str, int, int], None]) -> IndexTools:
    from kvcm.commands.index_tools import IndexTools

    return IndexTools(settings, SystemClock(), progress)


# ── files ──


@contextlib.contextmanager
def _output(name: str, *, force: bool) -> Iterator[BinaryIO]:
    """Yield where to write; a file appears under its name when it is complete, readable by its owner only."""
    if name == "-":
        if sys.stdout.isatty():
            raise InvalidArgumentError("an export is no text for a terminal: redirect the standard output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with private_file(Path(name), force=force) as file:
        yield file


@contextlib.contextmanager
def _input(name: str) -> Iterator[tuple[BinaryIO, bool]]:
    if name == "-":
        yield sys.stdin.buffer, False
        return
    path = Path(name)
    with path.open("rb") as file:
        yield file, path.is_file()


# ── output ──


def _print_exported(exported: Exported) -> None:
    table = TerminalTable(("instance", "records"))
    for instance_id, records in exported.records.items():
        table.add_row(instance_id, f"{records:,}")
    console = Console(stderr=True)  # the standard output may be the export itself
    console.print(table)
    print_sentences(map(Text, _about_exported(exported)), console)


def _about_exported(exported: Exported) -> Iterator[str]:
    if exported.pins:
        yield f"{exported.pins:,} pins"
    if exported.skipped:
        yield f"{exported.skipped:,} blocks are being written and were left out"
    for name in sorted(exported.unknown_storages):
        yield f"storage {name} is configured no more, locations on it were exported without it"


def _print_imported(imported: Imported, *, dry_run: bool) -> None:
    console = Console()
    for kind, names in imported.created.items():
        console.print(f"{'would add' if dry_run else 'added'} {kind}: {', '.join(names)}", markup=False)
    table = TerminalTable(("instance", "would be stored" if dry_run else "stored", "there already"))
    for instance_id in sorted(imported.stored.keys() | imported.skipped.keys()):
        table.add_row(instance_id, f"{imported.stored[instance_id]:,}", f"{imported.skipped[instance_id]:,}")
    console.print(table)
    print_sentences(map(Text, _about_imported(imported, dry_run=dry_run)), console)


def _about_imported(imported: Imported, *, dry_run: bool) -> Iterator[str]:
    if imported.pins:
        yield f"{imported.pins:,} pins {'would be there' if dry_run else 'are there'}"
    yield from imported.rejected_pins
    for sentence in imported.adapted:
        yield f"changed: {sentence}"
    for sentence in imported.exceeded:
        yield f"over quota: {sentence}"


def _print_rebuilt(rebuilt: Rebuilt, *, dry_run: bool) -> None:
    console = Console()
    table = TerminalTable(("instance", "would be stored" if dry_run else "stored", "there already"))
    for instance_id in sorted(rebuilt.stored.keys() | rebuilt.known.keys()):
        table.add_row(instance_id, f"{rebuilt.stored[instance_id]:,}", f"{rebuilt.known[instance_id]:,}")
    console.print(table)
    print_sentences(map(Text, _about_rebuilt(rebuilt)), console)


def _about_rebuilt(rebuilt: Rebuilt) -> Iterator[str]:
    for storage, files in rebuilt.files.items():
        gone = rebuilt.gone[storage]
        yield f"storage {storage}: {files:,} files of notes, {gone:,} noted blocks have no bytes any more"
    for name, reason in rebuilt.left_out.items():
        yield f"left out: {name}: {reason}"
    yield from rebuilt.unreadable


def _imported_json(imported: Imported) -> str:
    return json.dumps(
        {
            "is_all_there": not imported.created and not +imported.stored and not imported.rejected_pins,
            "added": imported.created,
            "stored": imported.stored,
            "there_already": imported.skipped,
            "pins": imported.pins,
            "refused_pins": imported.rejected_pins,
            "changed": imported.adapted,
            "over_quota": imported.exceeded,
        }
    )


def _print_report(report: AuditReport) -> None:
    console = Console()
    for finding in report.findings:
        state = "mended" if finding.is_mended else f"--repair {finding.repair}"
        typer.echo(f"{finding.check}: {finding.where}: {finding.what} [{state}]")
    if report.more:
        typer.echo(f"and {report.more:,} more; run again after a repair")
    for what in report.unconfirmed:
        typer.echo(f"could not be checked: {what}")
    table = TerminalTable(("looked at", "number"))
    for name, number in report.checked.items():
        table.add_row(name, f"{number:,}")
    table.add_row("findings", f"{len(report.findings) + report.more:,}")
    console.print(table)


def _about_repaired(repaired: Repaired) -> Iterator[str]:
    found = repaired.found
    if not repaired.was_damaged:
        yield "nothing is damaged"
    elif found is None:
        yield "a repair that was interrupted is complete"
    else:
        yield from found.sentences()
        if found.is_incomplete:
            yield "the rest is in a backup or in finish notes (`kvcm index rebuild`), or is computed again"
        yield f"the damaged files are in {found.moved_to}; delete them when they are not needed any more"
        yield "now run `kvcm index verify`, then start the manager"


def _repaired_json(repaired: Repaired) -> str:
    found = repaired.found
    details = {}
    if found is not None:
        details = {
            "lost_changes": found.lost_changes,
            "lost_blocks": found.lost_blocks,
            "lost_documents": found.lost_documents,
            "blocks": found.blocks,
            "documents": found.documents,
            "doubtful_blocks": found.doubtful,
            "registry_from_copy": found.from_copy,
            "found": list(found.sentences()),
            "moved_to": str(found.moved_to),
        }
    return json.dumps({"was_damaged": repaired.was_damaged, **details})


def _report_json(report: AuditReport) -> str:
    return json.dumps(
        {
            "clean": report.is_clean,
            "mended": report.is_repaired,
            "looked_at": dict(report.checked),
            "findings": [finding._asdict() for finding in report.findings],
            "more": report.more,
            "unsettled": report.unconfirmed,
        }
    )
