"""Reads the Mooncake format: turns of dialogues, with times in milliseconds."""

from __future__ import annotations

from kvcm.optimizer.formats.decoding import decoder
from kvcm.optimizer.formats.mooncake import MooncakeLine
from kvcm.optimizer.readers.trace_builder import Request, TraceBuilder

__all__ = ["MooncakeReader"]


class MooncakeReader:
    """Adds a request per line.

    Args:
        builder: what to add to.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._decode = decoder(MooncakeLine)

    def read(self, number: int, line: bytes) -> None:
        """Add what a line says.

        Raises:
            LineError: it is no request.
        """
        found = self._decode(line)
        time_us = round(found.timestamp * 1000)
        request = Request(time_us, found.hash_ids, found.input_length, found.output_length, found.session)
        self._builder.append(request, number)

    def end(self) -> None:
        """Every line is a whole request: nothing is left."""
