"""The reference of the command line: every command with its arguments and options, as in `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markdown_text import cell, page, table
from typer.main import get_command

from kvcm.cli import app

__all__ = ["cli_page"]

_CONNECTION = ("--manager", "--data-manager", "--key-file", "--ca-file", "--cert-file", "--cert-key-file")


def cli_page() -> str:
    """Return the page."""
    commands = dict(_leaves(get_command(app), "kvcm"))
    connected = next(command for command in commands.values() if _is_connected(command))
    lines = [
        "Made of the commands themselves. What they are for, exit codes and a tour: [cli.md](../cli.md).",
        "",
        "## Connection options",
        "",
        "Commands that ask a manager take these, and are marked with *connection options* below.",
        "",
        *_options([each for each in connected.params if set(each.opts) & set(_CONNECTION)]),
    ]
    for path, command in commands.items():
        lines += _command(path, command)
    return page("All commands and options", lines)


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name in sorted(inner):
        if not inner[name].hidden:
            yield from _leaves(inner[name], f"{path} {name}")


def _is_connected(command: Any) -> bool:
    return set(_CONNECTION) <= {option for each in command.params for option in each.opts}


def _command(path: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    connected = _is_connected(command)
    own = [each for each in options if not (connected and set(each.opts) & set(_CONNECTION))]
    usage = " ".join([path, *(_shown(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    return [
        f"## {path}",
        "",
        "\n\n".join(cell(part) for part in (command.help or "").replace("\b", "").split("\n\n")),
        "",
        f"`{usage}`{', and *connection options*' if connected else ''}",
        "",
        *table(("argument", "meaning"), ((f"`{_shown(each)}`", cell(each.help or "")) for each in arguments)),
        *_options(own),
    ]


def _shown(argument: Any) -> str:
    name = argument.metavar or argument.human_readable_name.upper()
    shown = f"{name}…" if argument.nargs == -1 else name
    return shown if argument.required or shown.startswith("[") else f"[{shown}]"


def _options(options: list[Any]) -> list[str]:
    rows = []
    for each in options:
        value = "" if each.is_flag else f" {each.metavar or each.bare_type().upper()}"
        names = ", ".join(f"`{name}{value}`" for name in [*each.opts, *each.secondary_opts])
        rows.append((names, _default(each), cell(each.help or "")))
    return table(("option", "default", "meaning"), rows)


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    empty = value is None or value is False or value == "" or value == [] or value == () or callable(value)
    return "" if empty or option.is_flag else f"`{value}`"
