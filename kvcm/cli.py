"""The `kvcm` command: `serve`, which runs a manager, and the commands of kvcm.commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvcm import __version__

if TYPE_CHECKING:
    from kvcm.app import Manager

# gRPC logs lines of its own, one for each client that speaks no TLS to a TLS port. It reads this on import.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# So is this. By default a pool of threads reads the connections of a server and hands every event on to the thread that
# waits for them. Where that one reads by itself, as it did in earlier releases of gRPC, a call needs two wakeups of
# threads less: a tenth of the CPU time of a read of 64 keys.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")


@contextmanager
def _naming_missing_packages() -> Iterator[None]:
    """End with a sentence where a package that is imported inside the block is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        sys.exit(f"kvcm: {missing.name} is not installed; the server needs: pip install 'kvcm[server]'")


with _naming_missing_packages():
    import typer

    from kvcm.commands.access import account_app, key_app, login, whoami
    from kvcm.commands.blocks import get, pin_app, trim
    from kvcm.commands.doctor import doctor
    from kvcm.commands.gateway import gateway
    from kvcm.commands.group import group_app, group_usage, quota_app
    from kvcm.commands.index import index_app
    from kvcm.commands.instance import instance_app
    from kvcm.commands.optimize import optimize
    from kvcm.commands.residency import residency, score
    from kvcm.commands.scorer import scorer
    from kvcm.commands.snapshot import snapshot_app
    from kvcm.commands.storage import storage_app
    from kvcm.commands.trace import trace_app
    from kvcm.config import ConfigError, Settings, load_settings
    from kvcm.model.errors import KvcmError
    from kvcm.store.load_progress import shown_progress
    from kvcm.terminal.exit_codes import EXIT_CODES

__all__ = ["add_commands", "app", "main"]

_GROUPS = (
    storage_app,
    group_app,
    quota_app,
    instance_app,
    pin_app,
    account_app,
    key_app,
    index_app,
    snapshot_app,
    trace_app,
)
_COMMANDS = {
    "usage": group_usage,
    "get": get,
    "trim": trim,
    "residency": residency,
    "score": score,
    "login": login,
    "whoami": whoami,
    "doctor": doctor,
    "optimize": optimize,
    "gateway": gateway,
    "scorer": scorer,
}
app = typer.Typer(
    name="kvcm",
    help="KV-cache manager for LLM inference.",
    no_args_is_help=True,
    epilog="Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def add_commands(target: typer.Typer) -> None:
    """Add all commands but `serve` to a command line."""
    for group in _GROUPS:
        target.add_typer(group)
    for name, command in _COMMANDS.items():
        target.command(name)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV-cache manager for LLM inference: every engine of a cluster reuses the KV that any of them computed."""


@app.command()
def serve(
    config_file: Annotated[
        Path | None,
        typer.Option("--config_file", "--config-file", "-c", help="Settings as key=value lines; # begins a comment."),
    ] = None,
    log_config_file: Annotated[
        Path | None,
        typer.Option("--log_config_file", "-l", help="Accepted for the original's scripts; logs go to stderr."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="KEY=VALUE", help="One setting; repeatable, the first of a key wins."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Directory for the metadata and, below nfs/, the built-in file storage."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve on all addresses although authentication is disabled.")
    ] = False,
    daemon: Annotated[
        bool, typer.Option("--daemon", "-d", help="Run in the background; prints the process id.")
    ] = False,
) -> None:
    """Run the manager until SIGTERM or Ctrl-C, which end it with exit code 0; SIGHUP reloads the settings.

    Settings take effect in this order, later ones win: defaults, the config file, -e, environment variables of the same
    dotted name. Ports: kvcm.service.rpc_port (6381), http_port (6382), admin_rpc_port (6491), admin_http_port (6492).
    """
    # The first of a key wins: settings with an option of their own go before -e.
    options = [f"kvcm.data_dir={data_dir.absolute()}"] if data_dir is not None else []
    options += ["kvcm.service.insecure=true"] if insecure else []
    with _naming_missing_packages():
        import structlog  # other commands start faster without

        from kvcm.telemetry.logs import LEVELS, configure_logs
    configure_logs(LEVELS["INFO"])
    log = structlog.get_logger("kvcm")
    if log_config_file is not None:
        log.warning("ignored", option="--log_config_file", reason="logs go to stderr; set kvcm.logger.log_level")

    def read() -> Settings:
        overrides = [*options, *(env or ())]
        return load_settings(config_file, overrides, os.environ, lambda text: log.warning("settings", reason=text))

    try:
        settings = read()
        if daemon:
            _detach()
        else:
            _run(settings, read)
    except (ConfigError, KvcmError) as error:
        typer.echo(f"kvcm: {error}", err=True)
        raise typer.Exit(1) from None


def _run(settings: Settings, reread: Callable[[], Settings]) -> None:
    import structlog

    from kvcm.telemetry.logs import LEVELS, configure_logs

    configure_logs(LEVELS[settings.log_level_name], settings.log_format)
    log = structlog.get_logger("kvcm")
    log.info("settings", **_changed(settings))
    for key in settings.without_effect():
        log.warning("settings", reason=f"{key} has no effect in this release")
    progress = partial(shown_progress, "loading metadata")
    run, manager = _server()
    run(manager(settings, progress=progress, reread=reread).serve())


def _server() -> tuple[Callable[[Coroutine[Any, Any, None]], None], type[Manager]]:
    """Import the manager, and most of the packages with it: other commands start faster without."""
    with _naming_missing_packages():
        import uvloop

        from kvcm.app import Manager
    return uvloop.run, Manager


def _changed(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from the defaults, without secrets."""
    defaults = Settings().described()
    return {key: value for key, value in settings.described().items() if value != defaults[key]}


def _detach() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument not in {"-d", "--daemon"}]
    process = subprocess.Popen(  # noqa: S603 - our own command line, less the flag
        [sys.executable, "-m", "kvcm", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    typer.echo(process.pid)


add_commands(app)


def main() -> None:
    """Run the command line."""
    app()
