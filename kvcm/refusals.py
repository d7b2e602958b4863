"""How commands refuse: one line on stderr that says what is wrong, and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import typer

from kvcm.config import ConfigError
from kvcm.model.errors import KvcmError, NotLeaderError, NotReadyError

__all__ = ["CANNOT_RUN", "FAILED", "FINDINGS", "refusals"]

FAILED, FINDINGS, CANNOT_RUN = 1, 1, 2
"""Exit codes: what was asked for is refused; something was found; it could not be done or asked at all."""


@contextlib.contextmanager
def refusals(exit_code: int, unavailable: int | None = None) -> Iterator[None]:
    """Turn refusals inside the block into one line and an exit code.

    Args:
        exit_code: of any refusal.
        unavailable: of those that have nothing to do with the request, when it differs.
    """
    try:
        yield
    except (NotReadyError, NotLeaderError) as error:
        _refuse(str(error), exit_code if unavailable is None else unavailable)
    except (ConfigError, KvcmError) as error:
        _refuse(str(error), exit_code)
    except OSError as error:
        _refuse(f"{error.filename or 'the file'}: {error.strerror or error}", exit_code)


def _refuse(reason: str, exit_code: int) -> NoReturn:
    typer.echo(f"kvcm: {reason}", err=True)
    raise typer.Exit(exit_code) from None
