"""Writes the Mooncake format."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers.turns import Turn, turns

__all__ = ["mooncake_lines"]


def mooncake_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Return one line per request.

    Raises:
        OptionError: the trace has something else than turns of one instance.
    """
    return map(_line, turns(trace, "mooncake"))


def _line(turn: Turn) -> dict[str, object]:
    whole, rest = divmod(turn.time_us, 1000)
    line: dict[str, object] = {
        "timestamp": turn.time_us / 1000 if rest else whole,
        "input_length": turn.input_tokens,
        "output_length": turn.output_tokens,
    }
    if turn.session is not None:
        line["session"] = turn.session
    return line | {"hash_ids": turn.blocks}
