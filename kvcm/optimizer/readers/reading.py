"""Reads traces: from a file of any format, or from lines that are at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvcm.optimizer.formats.lines import BadLines, LineError, Progress, digest_of, open_lines
from kvcm.optimizer.formats.sniffing import checked_format, format_of
from kvcm.optimizer.readers.registry import READERS
from kvcm.optimizer.readers.trace_builder import BlockTokens
from kvcm.optimizer.readers.trace_cache import keep_trace, kept_trace
from kvcm.optimizer.readers.trace_file import Origin
from kvcm.optimizer.trace import Trace

__all__ = ["read_trace", "trace_of_lines"]


def read_trace(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - what the option is called everywhere
    block_tokens: BlockTokens = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Trace:
    """Return the trace of a file, plain or gzip; lines that are none are left out and told of in it.

    Args:
        path: of the file.
        format: one of `FORMATS`; None: told from its first lines.
        block_tokens: tokens per block, of all instances or of each by name; None: as the format has it, or found out.
        use_cache: whether to keep the trace beside the file, and to take what is kept there while the file is the same.
        progress: is told the bytes read and the size of the file.

    Raises:
        TraceError: the file cannot be read, or holds no trace.
        OptionError: an option is none.
    """
    kind = format_of(path) if format is None else checked_format(format)
    given = dict(block_tokens) if isinstance(block_tokens, Mapping) else block_tokens
    if use_cache:
        kept = kept_trace(path, lambda: Origin(digest_of(path, progress), kind, given))
        if kept is not None:
            return kept
    bad = BadLines()
    with open_lines(path, progress, bad) as file:
        trace = _trace(file, bad, kind, path.name, block_tokens)
        origin = Origin(file.digest, kind, given)
    if use_cache:
        keep_trace(path, origin, trace)
    return trace


def trace_of_lines(
    lines: Iterable[bytes],
    format: str,  # noqa: A002 - as above
    *,
    name: str,
    block_tokens: BlockTokens = None,
) -> Trace:
    """Return the trace of lines, for instance of events that were just fetched.

    Args:
        lines: of the format.
        format: one of `FORMATS`.
        name: of the trace.
        block_tokens: tokens per block, of all instances or of each by name; None: as the format has it, or found out.

    Raises:
        TraceError: they hold no trace.
        OptionError: an option is none.
    """
    return _trace(enumerate(lines, 1), BadLines(), checked_format(format), name, block_tokens)


def _trace(lines: Iterable[tuple[int, bytes]], bad: BadLines, kind: str, name: str, block_tokens: BlockTokens) -> Trace:
    builder = READERS[kind].builder(name, block_tokens)
    reader = READERS[kind].make(builder)
    for number, line in lines:
        try:
            reader.read(number, line)
        except LineError as error:
            bad.add(number, str(error))
    reader.end()
    return builder.trace(bad)
