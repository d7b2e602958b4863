"""The writers there are, one per format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvcm.optimizer.formats.sniffing import checked_format
from kvcm.optimizer.trace import BoolColumn, Trace
from kvcm.optimizer.writers.mooncake import mooncake_lines
from kvcm.optimizer.writers.optimizer_schema import schema_lines
from kvcm.optimizer.writers.output import written
from kvcm.optimizer.writers.publisher_log import event_lines
from kvcm.optimizer.writers.qwen_bailian import bailian_lines

__all__ = ["WRITERS", "WriterKind", "lost_in", "write_trace"]


@dataclass(frozen=True, slots=True)
class WriterKind:
    """How files of a format are written.

    Attributes:
        lines: returns the fields of each line, or raises OptionError where the format cannot hold the trace.
        has_sessions: whether the format tells conversations.
        lengths_of_turns, lengths_of_others: whether it tells the tokens of prompts and answers of requests that read
            and write, and of the others.
    """

    lines: Callable[[Trace], Iterator[dict[str, object]]]
    has_sessions: bool = False
    lengths_of_turns: bool = False
    lengths_of_others: bool = False


WRITERS: Mapping[str, WriterKind] = {
    "mooncake": WriterKind(mooncake_lines, has_sessions=True, lengths_of_turns=True, lengths_of_others=True),
    "qwen_bailian": WriterKind(bailian_lines, has_sessions=True, lengths_of_turns=True, lengths_of_others=True),
    "publisher_log": WriterKind(event_lines),
    "optimizer_schema": WriterKind(schema_lines, lengths_of_turns=True),
}


def write_trace(trace: Trace, path: Path, format_name: str, *, force: bool = False) -> None:
    """Write a trace to a file, compressed where its name ends in .gz.

    Args:
        trace: to write.
        path: of the file.
        format_name: one of `WRITERS`.
        force: whether to replace a file that is there.

    Raises:
        OptionError: the format is none, or cannot hold the trace; or the file is there.
        OSError: it cannot be written.
    """
    lines = WRITERS[checked_format(format_name)].lines(trace)
    encode = msgspec.json.Encoder().encode
    with written(path, force=force) as file:
        file.writelines(encode(line) + b"\n" for line in lines)


def lost_in(trace: Trace, format_name: str) -> tuple[str, ...]:
    """Return what of a trace a format does not hold."""
    kind = WRITERS[format_name]
    lost = []
    if not kind.has_sessions and bool((trace.sessions >= 0).any()):
        lost.append("sessions")
    are_turns = (trace.read_blocks > 0) & trace.writes
    is_kept = np.where(are_turns, kind.lengths_of_turns, kind.lengths_of_others)
    if bool((~is_kept & _have_lengths(trace)).any()):
        lost.append("lengths of prompts and answers")
    return tuple(lost)


def _have_lengths(trace: Trace) -> BoolColumn:
    """Return which requests have lengths that do not follow from their blocks."""
    blocks = np.where(trace.read_blocks > 0, trace.read_blocks, np.diff(trace.offsets))
    have: BoolColumn = (trace.input_tokens != blocks * trace.tokens_per_block()) | (trace.output_tokens > 0)
    return have
