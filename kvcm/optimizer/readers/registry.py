"""The readers there are, one per format; another one is a file beside them and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcm.optimizer.formats.qwen_bailian import BLOCK_TOKENS
from kvcm.optimizer.readers.mooncake import MooncakeReader
from kvcm.optimizer.readers.optimizer_schema import SchemaReader
from kvcm.optimizer.readers.publisher_log import EventReader
from kvcm.optimizer.readers.qwen_bailian import BailianReader
from kvcm.optimizer.readers.trace_builder import BlockTokens, TraceBuilder

__all__ = ["READERS", "LineReader", "ReaderKind"]


class LineReader(Protocol):
    """Reads the lines of one file in their order."""

    def read(self, number: int, line: bytes) -> None:
        """Add what a line says; raises LineError where it says nothing that can be understood."""

    def end(self) -> None:
        """Add what no line ended."""


@dataclass(frozen=True, slots=True)
class ReaderKind:
    """How files of a format are read.

    Attributes:
        make: makes a reader that adds to a builder.
        block_tokens: tokens per block unless it is said otherwise; None: found out.
        chains_keys: whether the keys lack the prefix before their block.
        are_full: whether only full blocks are listed.
    """

    make: Callable[[TraceBuilder], LineReader]
    block_tokens: int | None = None
    chains_keys: bool = False
    are_full: bool = False

    def builder(self, name: str, block_tokens: BlockTokens) -> TraceBuilder:
        """Return what the reader adds to."""
        size = self.block_tokens if block_tokens is None else block_tokens
        return TraceBuilder(name, size, chains_keys=self.chains_keys, are_full=self.are_full)


READERS: Mapping[str, ReaderKind] = {
    "mooncake": ReaderKind(MooncakeReader),
    "qwen_bailian": ReaderKind(BailianReader, BLOCK_TOKENS, chains_keys=True),
    "publisher_log": ReaderKind(EventReader, are_full=True),
    "optimizer_schema": ReaderKind(SchemaReader),
}
