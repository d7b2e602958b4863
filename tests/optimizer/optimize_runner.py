"""Runs `kvcm optimize` as tests do."""

from __future__ import annotations

from typer.testing import CliRunner

from kvcm.cli import app

__all__ = ["run"]


def run(*arguments: object, fails: bool = False) -> str:
    """Return what the command says: its output, or the one line of its refusal."""
    done = CliRunner().invoke(app, ["optimize", *map(str, arguments)])
    assert done.exit_code == (2 if fails else 0), done.output
    if not fails:
        return done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvcm: ")
    return line
