"""Options of several commands, prompts, and files with secrets.

`with_options` turns each parameter of a command that is a dataclass into one option per field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kvcm.config import is_exposed
from kvcm.model.errors import InvalidArgumentError
from kvcm.terminal.exit_codes import exit_cannot_run

__all__ = [
    "AsJson",
    "ConfigFile",
    "DataDir",
    "DryRun",
    "Env",
    "Yes",
    "confirm",
    "first_line",
    "key_in",
    "noun",
    "one_of",
    "prompt_password",
    "serve_with",
    "with_options",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing, show what would be changed.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config_file", "--config-file", "-c", help="Settings of the manager, as for serve.")
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="One setting, as for serve; repeatable.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Data directory of the manager, as for serve.")]


def noun(name: str, text: str) -> typer.Typer:
    """Return an empty group of commands."""
    return typer.Typer(name=name, help=text, no_args_is_help=True, pretty_exceptions_enable=False)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with each parameter that is a dataclass replaced by one option per field.

    Args:
        command: its other parameters stay; fields of the dataclasses are annotated as options.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    values = {each.name: each.annotation for each in parameters if dataclasses.is_dataclass(each.annotation)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: _made(kind, given) for name, kind in values.items()}
        command(**made, **given)

    plain = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters if each.name not in values]
    options = [option for kind in values.values() for option in _options(kind)]
    signature = inspect.Signature([*plain, *options])
    run.__signature__ = signature  # type: ignore[attr-defined] # which typer reads
    run.__annotations__ = {each.name: each.annotation for each in (*plain, *options)}
    return run


def _options(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )


def _made(kind: Any, given: dict[str, Any]) -> Any:
    return kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})


def one_of(option: str, value: str, allowed: Collection[str]) -> str:
    """Return the value of an option.

    Raises:
        InvalidArgumentError: it is none of the allowed ones.
    """
    if value not in allowed:
        raise InvalidArgumentError(f"{option} is {value!r}, must be one of {', '.join(allowed)}")
    return value


def confirm(question: str, *, yes: bool) -> None:
    """Return when the user agrees; without a terminal the command ends with exit code 2.

    Args:
        question: names the change.
        yes: whether the command line has agreed to it.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        exit_cannot_run(f"{question} There is no terminal to ask at: give --yes")
    typer.confirm(question, abort=True, err=True)


def prompt_password(path: Path | None, *, is_new: bool, option: str = "--password-file") -> str:
    """Return a password, from a file or from a prompt.

    Args:
        path: the file, None for a prompt.
        is_new: whether to prompt for it twice.
        option: that names the file; the prompt has its name, too.

    Raises:
        InvalidArgumentError, OSError: the file cannot be used.
    """
    if path is not None:
        return first_line(path, "password file")
    what = option.strip("-").removesuffix("-file").replace("-", " ")
    if not sys.stdin.isatty():
        exit_cannot_run(f"there is no terminal to ask for the {what} at: give {option}")
    password: str = typer.prompt(what.capitalize(), hide_input=True, confirmation_prompt=is_new, err=True)
    return password


def key_in(path: str) -> str:
    """Return the key that a file holds; "" without one."""
    return first_line(Path(path), "key file").strip() if path else ""


def serve_with(serve: Callable[[], Coroutine[Any, Any, None]], level: str, form: str) -> None:
    """Run a server until it ends, with its log.

    Args:
        serve: makes it and runs it, within the loop.
        level: of the log.
        form: of its lines.

    Raises:
        ModuleNotFoundError: uvloop is missing.
    """
    import uvloop

    from kvcm.telemetry.logs import LEVELS, configure_logs

    async def run() -> None:
        await serve()

    configure_logs(LEVELS[level], form)
    uvloop.run(run())


def first_line(path: Path, what: str) -> str:
    """Return the only line of a file that holds a secret.

    Raises:
        InvalidArgumentError: other users may read it, or it does not hold one line.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        mode = path.stat().st_mode & 0o777
        if is_exposed(path):
            raise InvalidArgumentError(
                f"{what} {path} has mode {mode:03o}: others can read the secret in it; run `chmod 600 {path}`"
            )
        lines = file.read(_MOST_CHARACTERS).splitlines()
    if len(lines) != 1 or not lines[0].strip():
        raise InvalidArgumentError(f"{what} {path} has {len(lines)} lines, must be one line with the secret")
    return lines[0]


_MOST_CHARACTERS = 65_536
