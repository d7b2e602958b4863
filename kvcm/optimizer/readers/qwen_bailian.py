"""Reads the Bailian traces of Qwen: turns of dialogues, with times in seconds, whole numbers or not.

A dialogue is what its turns' chain of `parent_chat_id` leads to. The builder adds the prefix to the ids.
"""

from __future__ import annotations

from kvcm.optimizer.formats.decoding import decoder
from kvcm.optimizer.formats.qwen_bailian import NO_PARENT, BailianLine
from kvcm.optimizer.readers.trace_builder import Request, TraceBuilder

__all__ = ["BailianReader"]


class BailianReader:
    """Adds a request per line.

    Args:
        builder: what to add to.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._decode = decoder(BailianLine)
        self._sessions: dict[int | str, int | str] = {}  # of each turn: the first turn

    def read(self, number: int, line: bytes) -> None:
        """Add what a line says.

        Raises:
            LineError: it is no request.
        """
        found = self._decode(line)
        session = self._session(found)
        time_us = round(found.timestamp * 1_000_000)
        request = Request(time_us, found.hash_ids, found.input_length, found.output_length, session)
        self._builder.append(request, number)

    def _session(self, line: BailianLine) -> int | str | None:
        if line.parent_chat_id is None or line.parent_chat_id == NO_PARENT:
            session = line.chat_id
        else:
            session = self._sessions.get(line.parent_chat_id, line.parent_chat_id)
        if line.chat_id is not None and session is not None:
            self._sessions[line.chat_id] = session
        return session

    def end(self) -> None:
        """Every line is a whole request: nothing is left."""
