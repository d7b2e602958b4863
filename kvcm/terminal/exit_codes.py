"""Exit codes of commands, and the one line on stderr that an error becomes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import typer

from kvcm.config import ConfigError
from kvcm.model.errors import KvcmError, NotLeaderError, NotReadyError
from kvcm.optimizer.errors import OptimizerError

__all__ = [
    "CANNOT_RUN",
    "EXIT_CODES",
    "FAILED",
    "FINDINGS",
    "NotAllowedError",
    "exit_cannot_run",
    "exit_on_call_errors",
    "exit_on_errors",
]

FAILED, FINDINGS, CANNOT_RUN, _NOT_ALLOWED = 1, 1, 2, 3
"""Exit codes: the request is refused; a check found something; the command could not be run; the API key is not valid
or lacks the permission."""
EXIT_CODES = {
    0: "it is done, and nothing was found",
    FAILED: "the request is refused, or something was found",
    CANNOT_RUN: "the command line is wrong, no manager answers, or it could not be tried",
    _NOT_ALLOWED: "the manager does not know the key, or the key may not do this",
}
"""The meaning of each exit code, for all commands."""


class NotAllowedError(Exception):
    """The API key is not valid or lacks the permission; the message says what to do."""


@contextlib.contextmanager
def exit_on_errors(exit_code: int, unavailable: int | None = None) -> Iterator[None]:
    """Turn errors inside the block into one line and an exit code.

    Args:
        exit_code: of any error.
        unavailable: of a manager that is not ready or not the leader; by default `exit_code`.
    """
    try:
        yield
    except NotAllowedError as error:
        _exit(str(error), _NOT_ALLOWED)
    except (NotReadyError, NotLeaderError) as error:
        _exit(str(error), exit_code if unavailable is None else unavailable)
    except (ConfigError, KvcmError, OptimizerError) as error:
        _exit(str(error), exit_code)
    except OSError as error:
        _exit(f"{error.filename or 'the file'}: {error.strerror or error}", exit_code)


def exit_on_call_errors() -> contextlib.AbstractContextManager[None]:
    """Return `exit_on_errors` of commands that call a manager."""
    return exit_on_errors(FAILED, CANNOT_RUN)


def exit_cannot_run(reason: str) -> NoReturn:
    """End the command before anything is done."""
    _exit(reason, CANNOT_RUN)


def _exit(reason: str, exit_code: int) -> NoReturn:
    typer.echo(f"kvcm: {reason}", err=True)
    raise typer.Exit(exit_code) from None
