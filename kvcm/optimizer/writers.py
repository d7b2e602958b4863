"""Writes traces to files: in another format, or anonymised."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np

from kvcm.model.keys import block_keys_from_tokens
from kvcm.optimizer.errors import OptionError, TraceError
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
    MooncakeLine,
    Progress,
    SchemaLine,
    Started,
    check_format,
    decoder,
    format_of,
    open_lines,
    signed_keys,
)
from kvcm.optimizer.trace import BadLine, BoolColumn, QueryMode, Trace

__all__ = [
    "WRITERS",
    "Access",
    "Anonymised",
    "LineAnonymiser",
    "Pseudonyms",
    "Turn",
    "WriterKind",
    "accesses",
    "anonymise",
    "bailian_lines",
    "check_target_is_free",
    "lost_in",
    "open_atomic",
    "turns",
    "write_atomic",
    "write_csv",
    "write_trace",
]

# Pseudonyms of names and keys: equal for equal ones, and not reversible without the salt.

_LEAST_SALT_BYTES = 16
_MOST_SALT_BYTES = 64  # what the hash takes as its key


class Pseudonyms:
    """Keyed hashes (BLAKE2b); those of keys, sessions, instances and specs have nothing to do with each other.

    Args:
        salt: 16 to 64 secret bytes: files made with the same one have the same pseudonyms. None: drawn now and
            forgotten.

    Raises:
        OptionError: the salt is too short or too long.
    """

    def __init__(self, salt: bytes | None = None) -> None:
        if salt is not None and not _LEAST_SALT_BYTES <= len(salt) <= _MOST_SALT_BYTES:
            raise OptionError(f"salt: has {len(salt)} bytes; allowed: {_LEAST_SALT_BYTES} to {_MOST_SALT_BYTES}")
        self._salt = secrets.token_bytes(_MOST_SALT_BYTES) if salt is None else salt
        self._keys: dict[int, int] = {}

    def keys(self, keys: list[int]) -> list[int]:
        """Return what stands for block keys, signed 64-bit ones: positive numbers of 63 bits."""
        known = self._keys
        for key in keys:
            if key not in known:
                known[key] = self._number("key", f"{key}")
        return [known[key] for key in keys]

    def session(self, session: int | str) -> int | str:
        """Return what stands for a session: a number for a number, a text for a text."""
        if isinstance(session, int):
            return self._number("number", f"{session}") >> 10  # what a double holds, as readers of JSON may use
        return self.text("session", session)

    def text(self, kind: str, text: str) -> str:
        """Return what stands for a text of this kind: 32 hexadecimal digits."""
        return self._hash(kind, text, 16).hex()

    def _number(self, kind: str, text: str) -> int:
        return int.from_bytes(self._hash(kind, text, 8), "little") >> 1

    def _hash(self, kind: str, text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=size, key=self._salt, person=kind.encode()).digest()


# The anonymised form of a line, for each format.
#
# Only fields that readers use are kept, so nothing that a format may gain slips through: keys, names and sessions are
# replaced, tokens are dropped, times count from the first one. Lengths and the gaps between times stay: they are what
# a trace is for.


class LineAnonymiser(Protocol):
    """Hides whose lines of one format are."""

    def decode(self, line: bytes) -> Any:
        """Return a line; None where it is no request and can go; raises LineError where it is none."""

    def time_us(self, line: Any) -> int:
        """Return when it happened."""

    def hidden(self, line: Any, since_us: int) -> dict[str, object]:
        """Return its anonymised form, with times since then; raises LineError where a key is none."""


class _Keys:
    """Replaces keys.

    Args:
        names: what stands for what.
        block_tokens: tokens per block, where known.
    """

    def __init__(self, names: Pseudonyms, block_tokens: int | None) -> None:
        self.names = names
        self._block_tokens = block_tokens

    def of(self, keys: Sequence[Key]) -> list[int]:
        return self.names.keys(signed_keys(keys, "keys"))

    def of_line(self, line: Lookup | Started | SchemaLine) -> list[int]:
        if line.keys or not line.tokens:
            return self.of(line.keys)
        if self._block_tokens is None:
            raise OptionError("block_tokens: lines name blocks by their tokens only; give the tokens per block")
        return self.of(block_keys_from_tokens(signed_keys(line.tokens, "tokens"), self._block_tokens))

    def query(self, line: Lookup | SchemaLine) -> dict[str, object]:
        return {
            "query_type": line.query_type,
            "block_mask": 0 if line.block_mask is None else line.block_mask,
            "sw_size": line.sw_size,
            "location_spec_names": [self.names.text("spec", each) for each in line.location_spec_names],
        }


class _Mooncake:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.decode = decoder(MooncakeLine)

    def time_us(self, line: MooncakeLine) -> int:
        return round(line.timestamp * 1000)

    def hidden(self, line: MooncakeLine, since_us: int) -> dict[str, object]:
        time_us = self.time_us(line) - since_us
        fields: dict[str, object] = {
            "timestamp": time_us / 1000 if time_us % 1000 else time_us // 1000,
            "input_length": line.input_length,
            "output_length": line.output_length,
        }
        if line.conversation is not None:
            fields["session"] = self._keys.names.session(line.conversation)
        return fields | {"hash_ids": self._keys.of(line.hash_ids)}


class _Bailian:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.decode = decoder(BailianLine)

    def time_us(self, line: BailianLine) -> int:
        return round(line.timestamp * 1_000_000)

    def hidden(self, line: BailianLine, since_us: int) -> dict[str, object]:
        chats = {"chat_id": line.chat_id, "parent_chat_id": line.parent_chat_id}
        fields: dict[str, object] = {
            name: chat if chat == NO_PARENT else self._keys.names.session(chat)
            for name, chat in chats.items()
            if chat is not None
        }
        return fields | {
            "timestamp": (self.time_us(line) - since_us) / 1_000_000,
            "input_length": line.input_length,
            "output_length": line.output_length,
            "type": "text",
            "turn": 1 if line.parent_chat_id in {None, NO_PARENT} else 2,
            "hash_ids": self._keys.of(line.hash_ids),
        }


class _Events:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self._event = decoder(AnyEvent)
        self._kinds: dict[str, Callable[[bytes], Lookup | Started | Finished]] = {
            LOOKUP: decoder(Lookup),
            STARTED: decoder(Started),
            FINISHED: decoder(Finished),
        }
        self._count = 0

    def decode(self, line: bytes) -> Lookup | Started | Finished | None:
        kind = self._event(line).type
        return self._kinds[kind](line) if kind in self._kinds else None

    def time_us(self, line: Lookup | Started | Finished) -> int:
        return line.trigger_time_us

    def hidden(self, line: Lookup | Started | Finished, since_us: int) -> dict[str, object]:
        names = self._keys.names
        self._count += 1
        fields: dict[str, object] = {
            "id": f"{self._count:032x}",
            "source": names.text("instance", line.source),
            "component": "cache_manager",
            "trigger_time_us": line.trigger_time_us - since_us,
        }
        if isinstance(line, Lookup):
            query = self._keys.query(line)
            return fields | {"type": LOOKUP, "keys": self._keys.of_line(line), "tokens": []} | query
        fields["write_session_id"] = names.text("write", line.write_session_id)
        if isinstance(line, Finished):
            return fields | {"type": FINISHED, "success_block": line.success_block}
        mask = 0 if line.block_mask is None else line.block_mask
        return fields | {"type": STARTED, "keys": self._keys.of_line(line), "tokens": [], "block_mask": mask}


class _Schema:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.decode = decoder(SchemaLine)
        self._count = 0

    def time_us(self, line: SchemaLine) -> int:
        return line.timestamp_us

    def hidden(self, line: SchemaLine, since_us: int) -> dict[str, object]:
        self._count += 1
        fields: dict[str, object] = {
            "instance_id": self._keys.names.text("instance", line.instance_id),
            "trace_id": f"{self._count}",
            "timestamp_us": line.timestamp_us - since_us,
            "tokens": [],
            "keys": self._keys.of_line(line),
        }
        if line.query_type is not None:
            fields |= self._keys.query(line)
        if line.total_keys is not None:
            tokens = line.input_len if line.input_len is not None else len(line.tokens) or None
            lengths: dict[str, object] = {"input_len": tokens, "output_len": line.output_len}
            fields |= lengths | {"total_keys": self._keys.of(line.total_keys)}
        return fields


_LINE_ANONYMISERS: Mapping[str, Callable[[_Keys], LineAnonymiser]] = {
    "mooncake": _Mooncake,
    "qwen_bailian": _Bailian,
    "publisher_log": _Events,
    "optimizer_schema": _Schema,
}


def _line_anonymiser(format_name: str, names: Pseudonyms, block_tokens: int | None) -> LineAnonymiser:
    """Return what hides whose lines of a format are.

    Args:
        format_name: one of the formats.
        names: what stands for what.
        block_tokens: tokens per block, for lines that name blocks by their tokens.
    """
    return _LINE_ANONYMISERS[format_name](_Keys(names, block_tokens))


# Files of lines that appear under their name when they are complete, compressed where the name ends in .gz.


def check_target_is_free(path: Path, *, force: bool) -> None:
    """Refuse a name that is taken, unless what has it is to be replaced; raises OptionError."""
    if path.exists() and not force:
        raise OptionError(f"{path} exists: choose another name, or give --force to replace it")


@contextmanager
def open_atomic(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Yield a file to write.

    Args:
        path: its name.
        force: whether to replace what has the name.

    Raises:
        OptionError: the name is taken.
        OSError: it cannot be written.
    """
    check_target_is_free(path, force=force)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # the same trace is the same file
                    yield packed  # type: ignore[misc] # bytes can be written to it
            else:
                yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a text that appears under its name when it is complete, whatever had the name before.

    A pipe, a terminal or another file that is not ordinary is written in place.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with open_atomic(path, force=True) as file:
        file.write(text.encode())


# Anonymises a file, and keeps the structure that replays need.
#
# The file is read twice: when the first request came is not known before the last line.


@dataclass(frozen=True, slots=True)
class Anonymised:
    """Counts of an anonymised file.

    Attributes:
        format: of both files.
        lines: that were written.
        bad_lines: that were left out, the first of them.
        bad_line_count: how many there were.
    """

    format: str
    lines: int
    bad_lines: tuple[BadLine, ...]
    bad_line_count: int


def anonymise(
    source: Path,
    target: Path,
    names: Pseudonyms,
    *,
    format_name: str | None = None,
    block_tokens: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Anonymised:
    """Write a file with pseudonyms in the place of keys, sessions and names, without tokens, with times from 0 on.

    Args:
        source: what to read, plain or gzip.
        target: what to write, compressed where its name ends in .gz.
        names: what stands for what.
        format_name: of the file; None: detected from its first lines.
        block_tokens: tokens per block, for lines that name blocks by their tokens only.
        force: whether to replace a file that is there.
        progress: called with the bytes read, of both passes together.

    Raises:
        TraceError: the file cannot be read, or holds no request.
        OptionError: an option is none, or the target is there.
        OSError: the target cannot be written.
    """
    kind = format_of(source) if format_name is None else check_format(format_name)
    hides = _line_anonymiser(kind, names, block_tokens)
    bad = BadLines()
    encode = msgspec.json.Encoder().encode
    count = 0
    with open_atomic(target, force=force) as file:
        since_us = _earliest_time(source, hides, _pass(progress, 0))
        for number, line in _good_lines(source, hides, bad, _pass(progress, 1)):
            try:
                file.write(encode(hides.hidden(line, since_us)) + b"\n")
            except LineError as error:
                bad.add(number, str(error))
            else:
                count += 1
    return Anonymised(kind, count, tuple(bad.first), bad.count)


def _pass(progress: Progress | None, number: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(done + number * total, 2 * total)


def _earliest_time(source: Path, hides: LineAnonymiser, progress: Progress | None) -> int:
    bad = BadLines()
    first = min((hides.time_us(line) for _, line in _good_lines(source, hides, bad, progress)), default=None)
    if first is None:
        raise TraceError(bad.nothing_in(str(source)))
    return first


def _good_lines(
    source: Path, hides: LineAnonymiser, bad: BadLines, progress: Progress | None
) -> Iterator[tuple[int, Any]]:
    with open_lines(source, progress, bad) as file:
        for number, text in file:
            try:
                line = hides.decode(text)
            except LineError as error:
                bad.add(number, str(error))
            else:
                if line is not None:
                    yield number, line


# What formats that know turns of dialogues only can hold.


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


# Writes the Mooncake format.


def _mooncake_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Return one line per request.

    Raises:
        OptionError: the trace has something else than turns of one instance.
    """
    return map(_mooncake_line, turns(trace, "mooncake"))


def _mooncake_line(turn: Turn) -> dict[str, object]:
    whole, rest = divmod(turn.time_us, 1000)
    line: dict[str, object] = {
        "timestamp": turn.time_us / 1000 if rest else whole,
        "input_length": turn.input_tokens,
        "output_length": turn.output_tokens,
    }
    if turn.session is not None:
        line["session"] = turn.session
    return line | {"hash_ids": turn.blocks}


# Requests of a trace in the formats that distinguish reads from writes.

_QUERY_TYPES: Mapping[QueryMode, str] = {
    QueryMode.PREFIX: "prefix_match",
    QueryMode.BATCH: "batch_get",
    QueryMode.WINDOW: "reverse_roll_sw_match",
}


@dataclass(frozen=True, slots=True)
class Access:
    """One request.

    Attributes:
        number: of the request.
        time_us: when.
        instance: that is asked.
        blocks: of the request.
        reads: how many of the first it reads.
        writes: whether it writes them.
        mask: which are left out.
    """

    number: int
    time_us: int
    instance: str
    blocks: list[int]
    reads: int
    writes: bool
    mask: BoolColumn | None


def accesses(trace: Trace) -> Iterator[Access]:
    """Yield the requests of a trace."""
    for number in range(len(trace)):
        yield Access(
            number=number,
            time_us=int(trace.times_us[number]),
            instance=trace.instance_names[trace.instances[number]],
            blocks=trace.request_blocks(number).tolist(),
            reads=int(trace.read_blocks[number]),
            writes=bool(trace.writes[number]),
            mask=trace.masks.get(number),
        )


def _read_fields(trace: Trace, access: Access) -> dict[str, object]:
    """Return what formats say of a read beside its keys."""
    mask = access.mask
    return {
        "query_type": _QUERY_TYPES[trace.modes.get(access.number, QueryMode.PREFIX)],
        "block_mask": 0 if mask is None else mask[: access.reads].tolist(),
        "sw_size": trace.windows.get(access.number, 0),
        "location_spec_names": list(trace.specs.get(access.number, ())),
    }


# Writes the original optimizer's own schema: reads, writes and turns. Numbers of blocks serve as keys.


def _schema_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Return one line per request.

    Raises:
        OptionError: a write left out some of its blocks, which the schema cannot say.
    """
    masked = next((number for number in trace.masks if trace.writes[number]), None)
    if masked is not None:
        raise OptionError(
            f"format: optimizer_schema holds whole writes only, and request {masked + 1} of {trace.name} is none"
        )
    return (_schema_line(trace, access) for access in accesses(trace))


def _schema_line(trace: Trace, access: Access) -> dict[str, object]:
    line: dict[str, object] = {
        "instance_id": access.instance,
        "trace_id": f"{access.number}",
        "timestamp_us": access.time_us,
        "tokens": [],
        "keys": access.blocks[: access.reads],
    }
    if not access.writes:
        return line | _read_fields(trace, access)
    if not access.reads:
        return line | {"keys": access.blocks}
    lengths = {
        "input_len": int(trace.input_tokens[access.number]),
        "output_len": int(trace.output_tokens[access.number]),
    }
    return line | _read_fields(trace, access) | lengths | {"total_keys": access.blocks}


# Writes events as managers publish them (wire.md 10.3): a lookup per read, a write session per write.
#
# A turn of a dialogue becomes both, one after the other. Numbers of blocks serve as keys.

_SESSION_SECONDS = 30


def _event_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Yield the events of every request."""
    for access in accesses(trace):
        if access.reads or not access.writes:
            yield _lookup(trace, access)
        if access.writes:
            yield from _session(access)


def _event(access: Access, kind: str, step: int) -> dict[str, object]:
    return {
        "id": f"{4 * access.number + step:032x}",
        "source": access.instance,
        "component": "cache_manager",
        "type": kind,
        "trigger_time_us": access.time_us,
    }


def _lookup(trace: Trace, access: Access) -> dict[str, object]:
    keys: dict[str, object] = {"keys": access.blocks[: access.reads], "tokens": []}
    return _event(access, LOOKUP, 0) | _read_fields(trace, access) | keys


def _session(access: Access) -> Iterator[dict[str, object]]:
    session = {"write_session_id": f"{access.number:032x}"}
    wanted: dict[str, object] = {
        "keys": access.blocks,
        "tokens": [],
        "block_mask": 0,
        "location_spec_group_names": [],
        "write_timeout_seconds": _SESSION_SECONDS,
    }
    yield _event(access, STARTED, 1) | session | wanted
    success = len(access.blocks) if access.mask is None else (~access.mask).tolist()
    yield _event(access, FINISHED, 2) | session | {"success_block": success}


# Writes the format of Bailian's traces of Qwen.
#
# Numbers of blocks serve as hashes of their content: with the prefix added to them, as readers do, they are the same
# blocks. Each turn gets a number of its own as `chat_id`, and that of the turn before as `parent_chat_id`.


def bailian_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Return one line per request.

    Raises:
        OptionError: the trace has something else than turns of one instance, blocks of another size, or blocks that
            follow different ones.
    """
    size = trace.block_tokens
    if size != BLOCK_TOKENS:
        raise OptionError(f"format: blocks of qwen_bailian have {BLOCK_TOKENS} tokens, those of {trace.name} {size}")
    if not trace.has_one_parent:
        raise OptionError(f"format: qwen_bailian holds prefix trees only, and blocks of {trace.name} follow several")
    return _bailian_lines(turns(trace, "qwen_bailian"))


def _bailian_lines(found: Iterator[Turn]) -> Iterator[dict[str, object]]:
    last: dict[int, tuple[int, int]] = {}  # of each session: the chat of its last turn, and how many it had
    for chat, turn in enumerate(found, 1):
        line: dict[str, object] = {}
        count = 1
        if turn.session is not None:
            parent, before = last.get(turn.session, (NO_PARENT, 0))
            count = before + 1
            last[turn.session] = chat, count
            line = {"chat_id": chat, "parent_chat_id": parent}
        yield line | {
            "timestamp": turn.time_us / 1_000_000,  # with a point always: the original reads whole numbers as 0
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "type": "text",
            "turn": count,
            "hash_ids": turn.blocks,
        }


# The writers there are, one per format.


@dataclass(frozen=True, slots=True)
class WriterKind:
    """How files of a format are written.

    Attributes:
        lines: returns the fields of each line, or raises OptionError where the format cannot hold the trace.
        has_sessions: whether the format names conversations.
        lengths_of_turns, lengths_of_others: whether it gives the tokens of prompts and answers of requests that read
            and write, and of the others.
    """

    lines: Callable[[Trace], Iterator[dict[str, object]]]
    has_sessions: bool = False
    lengths_of_turns: bool = False
    lengths_of_others: bool = False


WRITERS: Mapping[str, WriterKind] = {
    "mooncake": WriterKind(_mooncake_lines, has_sessions=True, lengths_of_turns=True, lengths_of_others=True),
    "qwen_bailian": WriterKind(bailian_lines, has_sessions=True, lengths_of_turns=True, lengths_of_others=True),
    "publisher_log": WriterKind(_event_lines),
    "optimizer_schema": WriterKind(_schema_lines, lengths_of_turns=True),
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
    lines = WRITERS[check_format(format_name)].lines(trace)
    encode = msgspec.json.Encoder().encode
    with open_atomic(path, force=force) as file:
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


# Rows of figures as CSV.


def write_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows below a line of their names, which are those of the first.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())
