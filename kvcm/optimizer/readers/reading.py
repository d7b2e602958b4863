"""Reads traces: from a file of any format, or from lines that are at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.formats import (
    BLOCK_TOKENS,
    FINISHED,
    LOOKUP,
    NO_PARENT,
    STARTED,
    AnyEvent,
    BadLines,
    BailianLine,
    Finished,
    Key,
    LineError,
    Lookup,
    Mask,
    MooncakeLine,
    Progress,
    SchemaLine,
    Started,
    check_format,
    decoder,
    digest_of,
    format_of,
    open_lines,
    signed_keys,
)
from kvcm.optimizer.readers.numbering import keys_of_tokens
from kvcm.optimizer.readers.trace_builder import BlockTokens, Request, TraceBuilder
from kvcm.optimizer.readers.trace_cache import Origin, load_cached_trace, store_cached_trace
from kvcm.optimizer.trace import BoolColumn, QueryMode, Trace

__all__ = [
    "Keyed",
    "LineReader",
    "Query",
    "ReaderKind",
    "block_mask_of",
    "keys_of",
    "lookup",
    "read_trace",
    "trace_of_lines",
]

# Reads the Mooncake format: turns of dialogues, with times in milliseconds.


class _MooncakeReader:
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
        request = Request(time_us, found.hash_ids, found.input_length, found.output_length, found.conversation)
        self._builder.append(request, number)

    def end(self) -> None:
        """Every line is a whole request: nothing is left."""


# Lookups in formats with query types: keys, masks, windows and specs.

_MODES = {
    "prefix_match": QueryMode.PREFIX,
    "prefix_match_with_mamba": QueryMode.PREFIX,  # the prefix of the full-attention specs
    "batch_get": QueryMode.BATCH,
    "reverse_roll_sw_match": QueryMode.WINDOW,
}


class Keyed(Protocol):
    """What names blocks by keys, or by tokens that keys are computed from."""

    keys: list[Key]
    tokens: list[int]


class Query(Keyed, Protocol):
    """What asks for blocks."""

    block_mask: Mask | None
    sw_size: int
    location_spec_names: list[str]


def keys_of(line: Keyed, instance: str, builder: TraceBuilder) -> list[int]:
    """Return the keys of a line, those of its tokens where it has none (wire.md 5.2).

    Raises:
        LineError: a key or a token is none.
        TraceError: it is not known how many tokens a block has.
    """
    if line.keys or not line.tokens:
        return signed_keys(line.keys, "keys")
    block_tokens = builder.block_tokens_of(instance)
    if block_tokens is None:
        raise TraceError(f"block_tokens: instance {instance!r} names blocks by their tokens only; give them")
    tokens = np.array(signed_keys(line.tokens, "tokens"), np.int64)
    keys: list[int] = keys_of_tokens(tokens, block_tokens).tolist()
    return keys


def block_mask_of(mask: Mask | None, count: int) -> BoolColumn | None:
    """Return which of so many positions are masked (wire.md 5.1), None where none is."""
    if mask is None:
        return None
    masked = np.zeros(count, np.bool_)
    if isinstance(mask, int):
        masked[: mask if mask >= 0 else count] = True
    else:
        masked[: len(mask)] = mask[:count]
    return masked if masked.any() else None


def lookup(query: Query, query_type: str, time_us: int, instance: str, builder: TraceBuilder) -> Request:
    """Return the request of a lookup, which writes nothing.

    Args:
        query: the lookup.
        query_type: how keys are matched.
        time_us: when.
        instance: that is asked.
        builder: knows how many tokens blocks have.

    Raises:
        LineError: a field is out of its range.
        TraceError: it is not known how many tokens a block has.
    """
    mode = _MODES.get(query_type)
    if mode is None:
        raise LineError(f"query_type: {query_type[:60]!r} is none; allowed: {', '.join(_MODES)}")
    keys = keys_of(query, instance, builder)
    if mode is QueryMode.WINDOW and not 1 <= query.sw_size <= len(keys):
        raise LineError(f"sw_size: {query.sw_size} does not fit {len(keys)} keys; allowed: 1 to as many as keys")
    # As the manager: only reads of prefixes look at the mask.
    return Request(
        time_us,
        keys,
        input_tokens=len(query.tokens) or None,
        instance=instance,
        writes=False,
        mode=mode,
        window=query.sw_size,
        mask=block_mask_of(query.block_mask, len(keys)) if mode is QueryMode.PREFIX else None,
        specs=tuple(query.location_spec_names),
    )


# Reads the original optimizer's own schema: the fields of a line show its kind.


class _SchemaReader:
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
            return self._turn(line, signed_keys(line.total_keys, "total_keys"))
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


# Reads events: lookups, and write sessions as of when they end.
#
# The blocks of a session count at its end, since they cannot be read before. One that never ended counts as if it had
# ended 100 ms after its start, as the original has it. Blocks that the manager did not want (it had them) are written
# too: a smaller cache would not have had them. Blocks that failed are left out.

_UNFINISHED_US = 100_000


class _EventReader:
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
        keys = keys_of(event, event.source, self._builder)
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
        _mask_failed(request, failed)
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


def _mask_failed(request: Request, failed: BoolColumn) -> None:
    """Shorten a request to its last block that was written, and mask what failed before that."""
    written = np.flatnonzero(~failed)
    end = int(written[-1]) + 1 if len(written) else 0
    if end < len(failed):
        request.keys, request.input_tokens = request.keys[:end], None
    request.mask = failed[:end] if failed[:end].any() else None


# Reads the Bailian traces of Qwen: turns of dialogues, with times in seconds, whole numbers or not.
#
# A dialogue is what its turns' chain of `parent_chat_id` leads to. The builder adds the prefix to the ids.


class _BailianReader:
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


# The readers there are, one per format; another one is a file beside them and a line here.


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


_READERS: Mapping[str, ReaderKind] = {
    "mooncake": ReaderKind(_MooncakeReader),
    "qwen_bailian": ReaderKind(_BailianReader, BLOCK_TOKENS, chains_keys=True),
    "publisher_log": ReaderKind(_EventReader, are_full=True),
    "optimizer_schema": ReaderKind(_SchemaReader),
}


def read_trace(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - what the option is called everywhere
    block_tokens: BlockTokens = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Trace:
    """Return the trace of a file, plain or gzip; lines that are no requests are left out and listed in it.

    Args:
        path: of the file.
        format: one of `FORMATS`; None: detected from its first lines.
        block_tokens: tokens per block, of all instances or of each by name; None: as the format has it, or found out.
        use_cache: whether to keep the trace beside the file, and to use the kept one while the file is the same.
        progress: called with the bytes read and the size of the file.

    Raises:
        TraceError: the file cannot be read, or holds no trace.
        OptionError: an option is none.
    """
    kind = format_of(path) if format is None else check_format(format)
    given = dict(block_tokens) if isinstance(block_tokens, Mapping) else block_tokens
    if use_cache:
        kept = load_cached_trace(path, lambda: Origin(digest_of(path, progress), kind, given))
        if kept is not None:
            return kept
    bad = BadLines()
    with open_lines(path, progress, bad) as file:
        trace = _trace(file, bad, kind, path.name, block_tokens)
        origin = Origin(file.digest, kind, given)
    if use_cache:
        store_cached_trace(path, origin, trace)
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
    return _trace(enumerate(lines, 1), BadLines(), check_format(format), name, block_tokens)


def _trace(lines: Iterable[tuple[int, bytes]], bad: BadLines, kind: str, name: str, block_tokens: BlockTokens) -> Trace:
    builder = _READERS[kind].builder(name, block_tokens)
    reader = _READERS[kind].make(builder)
    for number, line in lines:
        try:
            reader.read(number, line)
        except LineError as error:
            bad.add(number, str(error))
    reader.end()
    return builder.trace(bad)
