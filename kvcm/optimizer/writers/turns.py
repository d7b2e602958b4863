"""What formats that know turns of dialogues only can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.trace import Trace

__all__ = ["Turn", "turns"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that reads and writes all of its blocks.

    Attributes:
        time_us, input_tokens, output_tokens: of the request.
        session: number of the conversation, None where there is none.
        blocks: their numbers.
    """

    time_us: int
    input_tokens: int
    output_tokens: int
    session: int | None
    blocks: list[int]


def turns(trace: Trace, format_name: str) -> Iterator[Turn]:
    """Return the turns that a trace consists of.

    Raises:
        OptionError: it has something else in it.
    """
    obstacle = _obstacle(trace)
    if obstacle:
        raise OptionError(f"format: {format_name} holds turns of one instance only, and {trace.name} has {obstacle}")
    return (_turn(trace, number) for number in range(len(trace)))


def _obstacle(trace: Trace) -> str:
    if len(trace.instance_names) > 1:
        return f"{len(trace.instance_names)} instances"
    if not trace.is_plain:
        return "lookups with masks, specs or query types"
    reads_all = bool((trace.read_blocks == np.diff(trace.offsets)).all())
    return "" if reads_all and bool(trace.writes.all()) else "lookups and writes apart from each other"


def _turn(trace: Trace, number: int) -> Turn:
    session = int(trace.sessions[number])
    return Turn(
        int(trace.times_us[number]),
        int(trace.input_tokens[number]),
        int(trace.output_tokens[number]),
        session if session >= 0 else None,
        trace.request_blocks(number).tolist(),
    )
