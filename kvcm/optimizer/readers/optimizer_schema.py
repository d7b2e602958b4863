"""Reads the original optimizer's own schema: what a line is, its fields tell."""

from __future__ import annotations

from kvcm.optimizer.formats.decoding import decoder
from kvcm.optimizer.formats.optimizer_schema import SchemaLine
from kvcm.optimizer.readers.lookups import keys_of, lookup
from kvcm.optimizer.readers.trace_builder import Request, TraceBuilder

__all__ = ["SchemaReader"]


class SchemaReader:
    """Adds a request per line; two where a turn does not go on from what it read.

    Args:
        builder: what to add to.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._decode = decoder(SchemaLine)

    def read(self, number: int, line: bytes) -> None:
        """Add what a line says.

        Raises:
            LineError: it is no request.
            TraceError: it is not known how many tokens a block has.
        """
        found = self._decode(line)
        for request in self._requests(found):
            self._builder.append(request, number)

    def _requests(self, line: SchemaLine) -> list[Request]:
        if line.total_keys is not None:
            return self._turn(line, line.total_keys)
        if line.query_type is not None:
            return [lookup(line, line.query_type, line.timestamp_us, line.instance_id, self._builder)]
        return [self._write(line, keys_of(line, line.instance_id, self._builder))]

    def _turn(self, line: SchemaLine, total: list[int]) -> list[Request]:
        keys = keys_of(line, line.instance_id, self._builder)
        tokens = line.input_len if line.input_len is not None else len(line.tokens) or None
        goes_on = total[: len(keys)] == keys
        read = Request(
            line.timestamp_us,
            total if goes_on else keys,
            tokens,
            line.output_len,
            instance=line.instance_id,
            read_blocks=len(keys),
            writes=goes_on,
        )
        return [read] if goes_on or not total else [read, self._write(line, total)]

    def _write(self, line: SchemaLine, keys: list[int]) -> Request:
        return Request(line.timestamp_us, keys, instance=line.instance_id, read_blocks=0)

    def end(self) -> None:
        """Every line is whole: nothing is left."""
