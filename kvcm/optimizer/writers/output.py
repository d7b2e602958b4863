"""Files of lines that appear under their name when they are complete, compressed where the name ends in .gz."""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvcm.optimizer.errors import OptionError

__all__ = ["refuse_taken", "write_whole", "written"]


def refuse_taken(path: Path, *, force: bool) -> None:
    """Refuse a name that is taken, unless what has it is to be replaced; raises OptionError."""
    if path.exists() and not force:
        raise OptionError(f"{path} exists: choose another name, or give --force to replace it")


@contextmanager
def written(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Yield a file to write.

    Args:
        path: its name.
        force: whether to replace what has the name.

    Raises:
        OptionError: the name is taken.
        OSError: it cannot be written.
    """
    refuse_taken(path, force=force)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # the same trace is the same file
                    yield packed  # type: ignore[misc] # bytes can be written to it
            else:
                yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text that appears under its name when it is complete, whatever had the name before.

    What is no ordinary file, such as a pipe or a terminal, is written as it is.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with written(path, force=True) as file:
        file.write(text.encode())
