"""Reads events: lookups, and write sessions as of when they end.

What a session wrote counts at its end, since nobody can read it before. One that never ended counts as if it had ended
100 ms after its start, as the original has it. Blocks that the manager did not want (it had them) are written too: a
smaller cache would not have had them. Blocks that failed are left out.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.formats.decoding import decoder, signed_keys
from kvcm.optimizer.formats.lines import LineError
from kvcm.optimizer.formats.publisher_log import (
    FINISHED,
    LOOKUP,
    STARTED,
    AnyEvent,
    Finished,
    Lookup,
    Mask,
    Started,
)
from kvcm.optimizer.readers.lookups import block_mask_of, keys_of, lookup
from kvcm.optimizer.readers.trace_builder import Request, TraceBuilder
from kvcm.optimizer.trace import BoolColumn

__all__ = ["EventReader"]

_UNFINISHED_US = 100_000


class EventReader:
    """Adds a request per lookup and per write session.

    Args:
        builder: what to add to.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._event = decoder(AnyEvent)
        self._lookup, self._started, self._finished = decoder(Lookup), decoder(Started), decoder(Finished)
        self._open: dict[str, tuple[int, Request, BoolColumn | None]] = {}

    def read(self, number: int, line: bytes) -> None:
        """Add what a line ends.

        Raises:
            LineError: it is no event.
            TraceError: it is not known how many tokens a block has.
        """
        kind = self._event(line).type
        if kind == LOOKUP:
            self._read_lookup(number, self._lookup(line))
        elif kind == STARTED:
            self._start(number, self._started(line))
        elif kind == FINISHED:
            self._finish(self._finished(line))

    def _read_lookup(self, number: int, event: Lookup) -> None:
        request = lookup(event, event.query_type, event.trigger_time_us, event.source, self._builder)
        self._builder.append(request, number)

    def _start(self, number: int, event: Started) -> None:
        keys = signed_keys(keys_of(event, event.source, self._builder), "keys")
        request = Request(
            event.trigger_time_us + _UNFINISHED_US,
            keys,
            input_tokens=len(event.tokens) or None,
            instance=event.source,
            read_blocks=0,
        )
        self._open[event.write_session_id] = number, request, block_mask_of(event.block_mask, len(keys))

    def _finish(self, event: Finished) -> None:
        """End a session; one whose start the log does not have says nothing."""
        started = self._open.get(event.write_session_id)
        if started is None:
            return
        number, request, there = started
        failed = _failed(event.success_block, len(request.keys), there)
        del self._open[event.write_session_id]
        request.time_us = event.trigger_time_us
        _leave_out(request, failed)
        if request.keys:
            self._builder.append(request, number)

    def end(self) -> None:
        """Add the sessions that never ended."""
        for number, request, _ in self._open.values():
            self._builder.append(request, number)


def _failed(success: Mask | None, count: int, there: BoolColumn | None) -> BoolColumn:
    """Return which of so many blocks were to be written and were not; positions of `success` count only the former.

    Raises:
        LineError: it is of another number of blocks.
    """
    wanted = np.ones(count, np.bool_) if there is None else ~there
    most = int(wanted.sum())
    known = len(success) if isinstance(success, list) else success
    if known is not None and not (0 <= known <= most if isinstance(success, int) else known == most):
        raise LineError(f"success_block: {known} does not fit the session's {most} blocks")
    succeeded = np.ones(most, np.bool_)
    if isinstance(success, int):
        succeeded[success:] = False
    elif success is not None:
        succeeded = np.array(success, np.bool_)
    failed = np.zeros(count, np.bool_)
    failed[wanted] = ~succeeded
    return failed


def _leave_out(request: Request, failed: BoolColumn) -> None:
    """Shorten a request to its last block that was written, and mask what failed before that."""
    written = np.flatnonzero(~failed)
    end = int(written[-1]) + 1 if len(written) else 0
    if end < len(failed):
        request.keys, request.input_tokens = request.keys[:end], None
    request.mask = failed[:end] if failed[:end].any() else None
