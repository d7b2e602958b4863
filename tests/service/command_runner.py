"""Commands as the shell runs them, against a running manager, but in this process: one of their own takes a second."""

from __future__ import annotations

import json
from typing import Any

import typer
from click.testing import Result
from test_transport_process import ManagerProcess
from typer.testing import CliRunner

from kvcm.cli import add_commands

COMMANDS = typer.Typer(name="kvcm", pretty_exceptions_enable=False)
"""Every command but `serve`."""

add_commands(COMMANDS)
COMMANDS.callback()(lambda: None)

_ENVIRONMENT = {"COLUMNS": "200", "TERM": "dumb"}


def port_options(*addresses: str) -> list[str]:
    """Return the options of ports: of rpc, HTTP, and the admin plane's rpc and HTTP."""
    names = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
    ports = {name: address.rpartition(":")[2] for name, address in zip(names, addresses, strict=True)}
    return [part for name, port in ports.items() for part in ("-e", f"kvcm.service.{name}={port}")]


class Commands:
    """Runs commands against a manager.

    Args:
        server: the manager.
        environment: additional variables.
    """

    def __init__(self, server: ManagerProcess, **environment: str) -> None:
        self._environment = {**_ENVIRONMENT, "KVCM_MANAGER": f"http://{server.address.admin_http}", **environment}

    def run(self, *arguments: str, typed: str | None = None, **environment: str) -> Any:
        """Return how a command ended: `exit_code`, `stdout` and `stderr`."""
        found: Result = CliRunner().invoke(COMMANDS, arguments, typed, {**self._environment, **environment})
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found

    def ok(self, *arguments: str, **environment: str) -> str:
        """Return the output of a command that must succeed."""
        done = self.run(*arguments, **environment)
        assert (done.exit_code, done.stderr) == (0, ""), (done.stdout, done.stderr)
        return str(done.stdout)

    def json(self, *arguments: str, **environment: str) -> Any:
        """Return its output, parsed as JSON."""
        return json.loads(self.ok(*arguments, "--json", **environment))

    def refused(self, *arguments: str, exit_code: int = 1, **environment: str) -> str:
        """Return the one line of a command that refused."""
        done = self.run(*arguments, **environment)
        assert (done.exit_code, done.stdout) == (exit_code, ""), (done.stdout, done.stderr)
        assert done.stderr.startswith("kvcm: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return str(done.stderr)
