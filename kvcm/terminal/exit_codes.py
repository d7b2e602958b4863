"""How commands refuse: one line on stderr that says what is wrong, and an exit code."""

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
"""Exit codes: what was asked for is refused; something was found; it could not be done or asked at all; the manager
does not know the caller, or does not let it."""
EXIT_CODES = {
    0: "it is done, and nothing was found",
    FAILED: "what was asked for is refused, or something was found",
    CANNOT_RUN: "the command line is wrong, no manager answers, or it could not be tried",
    _NOT_ALLOWED: "the manager does not know the key, or the key may not do this",
}
"""What each exit code says, for all commands."""


class NotAllowedError(Exception):
    """The manager does not know the caller, or does not let it; the message says what to do."""


@contextlib.contextmanager
def exit_on_errors(exit_code: int, unavailable: int | None = None) -> Iterator[None]:
    """Turn refusals inside the block into one line and an exit code.

    Args:
        exit_code: of any refusal.
        unavailable: of those that have nothing to do with the request, when it differs.
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
    """Return `refusals` of commands that ask a manager."""
    return exit_on_errors(FAILED, CANNOT_RUN)


def exit_cannot_run(reason: str) -> NoReturn:
    """End the command before anything is done."""
    _exit(reason, CANNOT_RUN)


def _exit(reason: str, exit_code: int) -> NoReturn:
    typer.echo(f"kvcm: {reason}", err=True)
    raise typer.Exit(exit_code) from None
