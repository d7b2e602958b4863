"""Makes a file of which nobody can tell whose traffic it was, with the structure that replays need.

The file is read twice: when the first request came is not known before the last line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.formats.lines import BadLines, LineError, Progress, open_lines
from kvcm.optimizer.formats.sniffing import checked_format, format_of
from kvcm.optimizer.trace import BadLine
from kvcm.optimizer.writers.hiding import Hiding, hiding
from kvcm.optimizer.writers.output import written
from kvcm.optimizer.writers.pseudonyms import Pseudonyms

__all__ = ["Anonymised", "anonymise"]


@dataclass(frozen=True, slots=True)
class Anonymised:
    """What was made of a file.

    Attributes:
        format: of both files.
        lines: that were written.
        bad_lines: that were left out, the first of them.
        bad_line_count: how many there were.
    """

    format: str
    lines: int
    bad_lines: tuple[BadLine, ...]
    bad_line_count: int


def anonymise(
    source: Path,
    target: Path,
    names: Pseudonyms,
    *,
    format_name: str | None = None,
    block_tokens: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Anonymised:
    """Write a file with pseudonyms in the place of keys, sessions and names, without tokens, with times from 0 on.

    Args:
        source: what to read, plain or gzip.
        target: what to write, compressed where its name ends in .gz.
        names: what stands for what.
        format_name: of the file; None: told from its first lines.
        block_tokens: tokens per block, for lines that name blocks by their tokens only.
        force: whether to replace a file that is there.
        progress: is told the bytes read, of both passes together.

    Raises:
        TraceError: the file cannot be read, or holds no request.
        OptionError: an option is none, or the target is there.
        OSError: the target cannot be written.
    """
    kind = format_of(source) if format_name is None else checked_format(format_name)
    hides = hiding(kind, names, block_tokens)
    bad = BadLines()
    encode = msgspec.json.Encoder().encode
    count = 0
    with written(target, force=force) as file:
        since_us = _first_time(source, hides, _pass(progress, 0))
        for number, line in _good_lines(source, hides, bad, _pass(progress, 1)):
            try:
                file.write(encode(hides.hidden(line, since_us)) + b"\n")
            except LineError as error:
                bad.add(number, str(error))
            else:
                count += 1
    return Anonymised(kind, count, tuple(bad.first), bad.count)


def _pass(progress: Progress | None, number: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(done + number * total, 2 * total)


def _first_time(source: Path, hides: Hiding, progress: Progress | None) -> int:
    bad = BadLines()
    first = min((hides.time_us(line) for _, line in _good_lines(source, hides, bad, progress)), default=None)
    if first is None:
        raise TraceError(bad.nothing_in(str(source)))
    return first


def _good_lines(source: Path, hides: Hiding, bad: BadLines, progress: Progress | None) -> Iterator[tuple[int, Any]]:
    with open_lines(source, progress, bad) as file:
        for number, text in file:
            try:
                line = hides.decode(text)
            except LineError as error:
                bad.add(number, str(error))
            else:
                if line is not None:
                    yield number, line
