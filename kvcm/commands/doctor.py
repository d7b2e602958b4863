"""`kvcm doctor`: everything that is commonly wrong, looked at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from kvcm.admin_client import AdminClient
from kvcm.commands.connection import ADMIN_URL, Connection
from kvcm.commands.options import AsJson, ConfigFile, DataDir, Env, with_options
from kvcm.commands.shown import console, print_json
from kvcm.config import Settings
from kvcm.doctor.certificates import check_authorities, check_certificate
from kvcm.doctor.findings import Finding, Level
from kvcm.doctor.manager import check_manager, check_storage
from kvcm.doctor.places import check_metadata_directory
from kvcm.doctor.ports import check_ports
from kvcm.doctor.settings import combinations, read_settings, redis_settings
from kvcm.doctor.shared_store import check_shared_store
from kvcm.model.errors import InvalidArgumentError
from kvcm.refusals import FINDINGS, asking
from kvcm.registry.documents import parse_startup_document
from kvcm.telemetry.logs import LEVELS, configure_logs

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

    Give the options that `kvcm serve` gets. Nothing is changed. Exit code 0: nothing fails, though there may be
    warnings; 1: something fails.
    """
    configure_logs(LEVELS["ERROR"])
    options = [f"kvcm.data_dir={data_dir.absolute()}"] if data_dir is not None else []
    settings, found = read_settings(config_file, [*options, *(env or ())], os.environ)
    if settings is not None:
        found += _of_settings(settings)
    with asking():
        client, is_expected = _client(connection, settings)
        shows_certificate = connection.cert_file is not None
        found += check_manager(client, is_expected=is_expected, shows_certificate=shows_certificate)
    if as_json:
        print_json(_report(found))
    else:
        _print(found)
    if any(each.level is Level.FAIL for each in found):
        raise typer.Exit(FINDINGS)


def _of_settings(settings: Settings) -> Iterator[Finding]:
    yield from combinations(settings)
    yield from check_metadata_directory(settings)
    yield from check_ports(settings)
    yield from _certificates(settings.described())
    redis = redis_settings(settings)
    if redis is not None:
        yield from check_shared_store(redis)
    yield from _startup_storage(settings)


def _certificates(described: dict[str, str]) -> Iterator[Finding]:
    now = time.time()
    if cert_file := described.get("kvcm.tls.cert_file", ""):
        yield from check_certificate(cert_file, described.get("kvcm.tls.key_file", ""), now)
    if ca_file := described.get("kvcm.tls.client_ca_file", ""):
        yield from check_authorities(ca_file, now)


def _startup_storage(settings: Settings) -> Iterator[Finding]:
    if not settings.startup_config:
        return
    try:
        document = parse_startup_document(Path(settings.startup_config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InvalidArgumentError) as error:
        found = f"kvcm.startup_config {settings.startup_config}: {error}"
        yield Finding(Level.FAIL, "settings", found, "correct it: `kvcm serve` refuses it too")
        return
    yield from check_storage(document.storage)


def _client(connection: Connection, settings: Settings | None) -> tuple[AdminClient, bool]:
    """Return a client of the manager that is asked for, else of the one that the settings would start."""
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
    table = Table()
    for column in ("", "looked at", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for each in found:
        table.add_row(Text(each.level.value, _STYLES[each.level]), *map(Text, (each.check, each.found, each.advice)))
    console().print(table)
