"""Collects requests as they are read, and makes a trace of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.formats.decoding import signed_keys
from kvcm.optimizer.formats.lines import BadLines
from kvcm.optimizer.readers.block_sizes import BlockSizes, Prompts, block_sizes
from kvcm.optimizer.readers.columns import Columns, in_order, numbered_values
from kvcm.optimizer.readers.numbering import chained, numbered, parents_of
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, QueryMode, Trace

__all__ = ["BlockTokens", "Request", "TraceBuilder"]

BlockTokens = int | Mapping[str, int] | None
"""Tokens per block: of every instance, of each by its name, or not known."""

_ONE_INSTANCE = "instance"
_MOST_BLOCK_TOKENS = 1 << 20


@dataclass(slots=True)
class Request:
    """One request as a format has it.

    Attributes:
        time_us: when it came.
        keys: of its blocks.
        input_tokens: of its prompt; None: as many as its blocks have.
        output_tokens: generated, 0 where it is not known.
        session: names the conversation; None: none.
        instance: that is asked.
        read_blocks: how many of the first blocks are read; None: all.
        writes: whether the blocks are written.
        mode: how they are read.
        window: of mode WINDOW, in blocks.
        mask: which of the blocks are left out; None: none.
        specs: names of the location specs that are asked for; empty: all.
    """

    time_us: int
    keys: Sequence[int]
    input_tokens: int | None = None
    output_tokens: int = 0
    session: Hashable = None
    instance: str = _ONE_INSTANCE
    read_blocks: int | None = None
    writes: bool = True
    mode: QueryMode = QueryMode.PREFIX
    window: int = 0
    mask: BoolColumn | None = None
    specs: tuple[str, ...] = ()


class TraceBuilder:
    """Requests in the order of their lines.

    Args:
        name: of the trace.
        block_tokens: tokens per block; they are found out where they are not known.
        chains_keys: whether keys name only the content of their block, so that the prefix has to be added.
        are_full: whether prompts list only full blocks; else the last one may be partial.
    """

    def __init__(
        self, name: str, block_tokens: BlockTokens = None, *, chains_keys: bool = False, are_full: bool = False
    ) -> None:
        for size in block_tokens.values() if isinstance(block_tokens, Mapping) else [block_tokens]:
            if size is not None and not 1 <= size <= _MOST_BLOCK_TOKENS:
                raise OptionError(f"block_tokens: {size} is out of range; allowed: 1 to {_MOST_BLOCK_TOKENS}")
        self._block_tokens = block_tokens
        self._name = name
        self._chains_keys = chains_keys
        self._are_full = are_full
        self._columns = Columns("time", "input", "output", "session", "instance", "line", "reads", "writes")
        self._sessions: dict[Hashable, int] = {}
        self._instances: dict[str, int] = {}
        self._modes: dict[int, QueryMode] = {}
        self._windows: dict[int, int] = {}
        self._masks: dict[int, BoolColumn] = {}
        self._specs: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def block_tokens_of(self, instance: str) -> int | None:
        """Return how many tokens a block of an instance has, None where nobody said."""
        return self._block_tokens.get(instance) if isinstance(self._block_tokens, Mapping) else self._block_tokens

    def append(self, request: Request, line: int = 0) -> None:
        """Add a request.

        Args:
            request: to add.
            line: that it was read from, for messages.

        Raises:
            LineError: a key of it is none.
        """
        keys = request.keys if isinstance(request.keys, list) else list(request.keys)
        try:
            self._columns.keys.fromlist(keys)
        except OverflowError:
            self._columns.keys.fromlist(signed_keys(keys, "keys"))
        if request.mode or request.mask is not None or request.specs:
            self._append_rare(request)
        self._columns.end(
            time=request.time_us,
            input=-1 if request.input_tokens is None else request.input_tokens,
            output=request.output_tokens,
            session=self._session(request.session),
            instance=self._instances.setdefault(request.instance, len(self._instances)),
            line=line,
            reads=len(keys) if request.read_blocks is None else request.read_blocks,
            writes=request.writes,
        )

    def _append_rare(self, request: Request) -> None:
        number = len(self)
        if request.mode:
            self._modes[number] = request.mode
        if request.mode is QueryMode.WINDOW:
            self._windows[number] = request.window
        if request.mask is not None and request.mask.any():
            self._masks[number] = request.mask
        if request.specs:
            self._specs[number] = request.specs

    def _session(self, session: Hashable) -> int:
        return -1 if session is None else self._sessions.setdefault(session, len(self._sessions))

    def trace(self, bad: BadLines | None = None) -> Trace:
        """Return the trace, in the order of time; requests of one time stay in the order in which they came.

        Args:
            bad: lines that were left out.

        Raises:
            TraceError: there is no request.
        """
        bad = bad if bad is not None else BadLines()
        if not len(self):
            raise TraceError(bad.nothing_in(self._name))
        keys, offsets, columns, order = self._columns.sorted_by("time")
        reads, lengths = columns["reads"], np.diff(offsets)
        blocks, parents, instances, names, has_one_parent = self._blocks(keys, offsets, columns)
        counted = np.where(reads > 0, reads, lengths)
        found = self._sizes(columns, counted, instances, names)
        sizes = found.tokens
        return Trace(
            name=self._name,
            block_tokens=sizes[0] if len(set(sizes)) == 1 else 0,
            times_us=columns["time"],
            input_tokens=np.where(columns["input"] >= 0, columns["input"], counted * np.array(sizes)[instances]),
            output_tokens=columns["output"],
            sessions=numbered_values(columns["session"])[0],
            instances=instances,
            read_blocks=reads.astype(np.int32),
            writes=columns["writes"].astype(np.bool_),
            offsets=offsets,
            blocks=blocks,
            parents=parents,
            instance_names=names,
            instance_block_tokens=sizes,
            has_one_parent=has_one_parent,
            modes=in_order(self._modes, order),
            windows=in_order(self._windows, order),
            masks=in_order(self._masks, order),
            specs=in_order(self._specs, order),
            bad_lines=tuple(bad.first),
            bad_line_count=bad.count,
            assumed=found.assumed,
        )

    def _blocks(
        self, keys: Int64Column, offsets: Int64Column, columns: dict[str, Int64Column]
    ) -> tuple[Int32Column, Int32Column, Int32Column, tuple[str, ...], bool]:
        """Return blocks, their parents, instances and their names, and whether each block has one parent."""
        instances, order = numbered_values(columns["instance"])
        every_name = tuple(self._instances)
        if self._chains_keys:
            keys = chained(keys, offsets)
        blocks, unique = numbered(keys, offsets, instances)
        parents, has_one_parent = parents_of(blocks, offsets, columns["reads"] == 0, unique)
        return blocks, parents, instances, tuple(every_name[each] for each in order), has_one_parent

    def _sizes(
        self, columns: dict[str, Int64Column], counted: Int64Column, instances: Int32Column, names: tuple[str, ...]
    ) -> BlockSizes:
        given = tuple(map(self.block_tokens_of, names))
        if None not in given:
            return BlockSizes(tuple(size for size in given if size is not None))
        known = columns["input"] >= 0
        prompts = Prompts(columns["input"][known], counted[known], instances[known], columns["line"][known])
        return block_sizes(prompts, names, given, are_full=self._are_full)
