"""`kvcm gateway`: a proxy in front of engines that sends each request to the engine that serves its prompt best."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcm.commands.options import key_in, serve_with, with_options
from kvcm.terminal.exit_codes import CANNOT_RUN, exit_cannot_run, exit_on_errors

if TYPE_CHECKING:
    from kvcm.gateway.settings import GatewaySecrets, GatewaySettings

__all__ = ["gateway"]

_FILE = "FILE"
_ENGINES, _CLIENTS, _MANAGER, _LIMITS = "Engines", "Clients", "Manager", "Limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineOptions:
    """The engines, and how one is chosen. Fields are named as settings are."""

    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            rich_help_panel=_ENGINES,
            metavar="URL[=INSTANCE_ID]",
            help="An engine, http://host:port, and its instance in the manager; repeatable.",
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            rich_help_panel=_ENGINES,
            metavar="NAME",
            help="kvcm (the default), consistent_hash, least_loaded or round_robin.",
        ),
    ] = None
    engine_key_file: Annotated[
        Path | None,
        typer.Option(
            "--engine-key-file",
            rich_help_panel=_ENGINES,
            metavar=_FILE,
            help="File with the API key of the engines; it takes the place of the client's.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClientOptions:
    """Clients: their key, and the address that they connect to."""

    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            rich_help_panel=_CLIENTS,
            metavar="ADDRESS",
            help="Address to bind: loopback by default, all with --api-key-file or --insecure.",
        ),
    ] = None
    port: Annotated[
        int | None, typer.Option("--port", rich_help_panel=_CLIENTS, metavar="N", help="Port; 8080 by default.")
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            rich_help_panel=_CLIENTS,
            metavar=_FILE,
            help="File with the API key that clients must show; it never reaches an engine.",
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", rich_help_panel=_CLIENTS, help="Serve on all addresses although clients show no key."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ManagerOptions:
    """The manager that scores prompts."""

    manager: Annotated[
        str | None,
        typer.Option("--manager", rich_help_panel=_MANAGER, metavar="HOST:PORT", help="gRPC address of its data port."),
    ] = None
    manager_key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            rich_help_panel=_MANAGER,
            envvar="KVCM_KEY_FILE",
            metavar=_FILE,
            help="File with the key to show to it, readable by you only.",
        ),
    ] = None
    manager_ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            rich_help_panel=_MANAGER,
            envvar="KVCM_CA_FILE",
            metavar=_FILE,
            help="Certificates (PEM) to trust for it; without them the connection is not encrypted.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitOptions:
    """The limits that deployments change most; the file has all."""

    max_in_flight: Annotated[
        int | None,
        typer.Option("--max-in-flight", rich_help_panel=_LIMITS, metavar="N", help="Requests on all engines; 1024."),
    ] = None
    max_in_flight_per_engine: Annotated[
        int | None,
        typer.Option(
            "--max-in-flight-per-engine", rich_help_panel=_LIMITS, metavar="N", help="Requests on one engine; 256."
        ),
    ] = None
    compute_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            "--compute-tokens-per-second",
            rich_help_panel=_LIMITS,
            metavar="N",
            help="Tokens of prompts that an engine computes in a second; 10000.",
        ),
    ] = None
    drain_timeout_ms: Annotated[
        int | None,
        typer.Option(
            "--drain-timeout-ms",
            rich_help_panel=_LIMITS,
            metavar="N",
            help="How long answers may go on after SIGTERM; 30000.",
        ),
    ] = None


@with_options
def gateway(
    engine_options: _EngineOptions,
    client_options: _ClientOptions,
    manager_options: _ManagerOptions,
    limit_options: _LimitOptions,
    config_file: Annotated[
        Path | None, typer.Option("--config", "-c", metavar=_FILE, help="Settings as TOML; options win.")
    ] = None,
) -> None:
    """Run an OpenAI-compatible proxy in front of engines, until SIGTERM or Ctrl-C, which end it with exit code 0.

    Policy kvcm asks the manager how much of a prompt each engine holds, and weighs that against how busy it is.
    """
    # `kvcm.config` alone is imported by other commands; the gateway has most of the manager's HTTP side behind it.
    from kvcm.gateway.settings import load_gateway_settings

    with exit_on_errors(CANNOT_RUN):
        parts = (engine_options, client_options, manager_options, limit_options)
        settings = load_gateway_settings(config_file, {k: v for each in parts for k, v in _given(each).items()})
        secrets = _secrets(settings)
        _run(settings, secrets)


def _given(options: object) -> dict[str, object]:
    """Return the options that were given, as values of TOML."""
    fields = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    found = {name: getattr(options, name) for name in fields}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in found.items()
        if value is not None and value is not False
    }


def _secrets(settings: GatewaySettings) -> GatewaySecrets:
    from kvcm.gateway.settings import GatewaySecrets

    return GatewaySecrets(
        api_key=key_in(settings.api_key_file),
        engine_key=key_in(settings.engine_key_file),
        manager_key=key_in(settings.manager_key_file),
        manager_ca=Path(settings.manager_ca_file).read_bytes() if settings.manager_ca_file else b"",
    )


def _run(settings: GatewaySettings, secrets: GatewaySecrets) -> None:
    try:
        import uvloop  # noqa: F401 - before the server, whose packages are those of the extra

        from kvcm.gateway.gateway import Gateway
    except ModuleNotFoundError as missing:
        exit_cannot_run(f"{missing.name} is not installed; the gateway needs: pip install 'kvcm[server,gateway]'")
    serve_with(lambda: Gateway(settings, secrets).serve(), settings.log_level, settings.log_format)
