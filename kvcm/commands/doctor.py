"""`kvcm doctor`: checks of settings, host and a running manager, as one table."""

from __future__ import annotations

import os
from collections.abc import Iterable

import typer
from rich.text import Text

from kvcm.commands.connection import ADMIN_URL, Connection
from kvcm.commands.options import AsJson, ConfigFile, DataDir, Env, with_options
from kvcm.commands.output import console, print_json
from kvcm.config import Settings
from kvcm.doctor.findings import Finding, Level, ok
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import FINDINGS, exit_on_call_errors
from kvcm.terminal.tables import TerminalTable

__all__ = ["doctor"]

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@with_options
def doctor(
    connection: Connection,
    config_file: ConfigFile = None,
    env: Env = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Check settings, data directory, ports, certificates, the shared store, clocks, storages and a running manager.

    Give the options that `kvcm serve` gets, on its host. With --manager and none of them, only that manager's answers
    are checked. Nothing is changed. Exit code 0: nothing fails, though there may be warnings; 1: something fails.
    """
    # These open stores and storages as a manager does: other commands start faster without.
    from kvcm.doctor.checks import check_settings
    from kvcm.doctor.host import read_settings
    from kvcm.doctor.manager import check_manager
    from kvcm.telemetry.logs import LEVELS, configure_logs

    configure_logs(LEVELS["ERROR"])
    options = [f"kvcm.data_dir={data_dir.absolute()}"] if data_dir is not None else []
    settings, found = read_settings(config_file, [*options, *(env or ())], os.environ)
    is_elsewhere = connection.manager != ADMIN_URL and settings == Settings()
    if is_elsewhere:
        found = [ok("settings", f"none are given: only the answers of {connection.manager} are checked")]
    elif settings is not None:
        found += check_settings(settings)
    with exit_on_call_errors():
        client, is_expected = _client(connection, settings)
        found += check_manager(
            client,
            is_expected=is_expected,
            is_here=not is_elsewhere,
            shows_certificate=connection.cert_file is not None,
        )
    if as_json:
        print_json(_report(found))
    else:
        _print(found)
    if any(each.level is Level.FAIL for each in found):
        raise typer.Exit(FINDINGS)


def _client(connection: Connection, settings: Settings | None) -> tuple[AdminClient, bool]:
    """Return a client of the manager that was given, else of the one that the settings start; and whether it has to
    run."""
    if connection.manager != ADMIN_URL or settings is None or not settings.admin_http_port:
        return connection.admin(), True
    host = settings.bind_address
    near = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - an address to bind, not to connect to
    scheme = "https" if settings.described().get("kvcm.tls.cert_file") else "http"
    shown = f"[{near}]" if ":" in near else near
    return connection.at(f"{scheme}://{shown}:{settings.admin_http_port}"), False


def _report(found: Iterable[Finding]) -> dict[str, object]:
    findings = list(found)
    counts = {level.value: sum(each.level is level for each in findings) for level in Level}
    return {**counts, "findings": [{**each._asdict(), "level": each.level.value} for each in findings]}


def _print(found: Iterable[Finding]) -> None:
    columns = ("", "looked at", "found", "what to do")
    table = TerminalTable(columns, words=columns)
    for each in found:
        table.add_row(Text(each.level.value, _STYLES[each.level]), each.check, each.found, each.advice)
    console().print(table)
