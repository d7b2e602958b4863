"""Collects requests as they are read, and makes a trace of them."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.formats import BadLines, Key, signed_keys
from kvcm.optimizer.readers.numbering import chained, numbered, parents_of
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, QueryMode, Trace

__all__ = ["BlockSizes", "BlockTokens", "Columns", "Prompts", "Request", "TraceBuilder", "block_sizes", "in_order"]

# Requests in columns while they are read: one number per request and column, their keys one behind another.

Value = TypeVar("Value")


class Columns:
    """Columns, by name; every column has a number per request.

    Args:
        names: of the columns.

    Attributes:
        keys: of all requests.
    """

    def __init__(self, *names: str) -> None:
        self.keys = array("q")
        self._ends = array("q")
        self._values = {name: array("q") for name in names}

    def __len__(self) -> int:
        return len(self._ends)

    def end(self, **values: int) -> None:
        """End a request, whose keys were just added; `values` has one of each column."""
        self._ends.append(len(self.keys))
        for name, value in values.items():
            self._values[name].append(value)

    def sorted_by(self, name: str) -> tuple[Int64Column, Int64Column, dict[str, Int64Column], Int64Column | None]:
        """Return everything stably sorted by one column.

        Returns:
            [N] keys, [R + 1] offsets of the requests into them, the columns, and the [R] order of the requests; None
            where they are sorted as they are.
        """
        keys, ends = np.asarray(self.keys), np.array(self._ends, np.int64)
        lengths = np.diff(ends, prepend=0)
        columns = {each: np.array(values, np.int64) for each, values in self._values.items()}
        order = _order(columns[name])
        if order is not None:
            keys = keys[_places(ends - lengths, lengths, order)]
            lengths = lengths[order]
            columns = {each: values[order] for each, values in columns.items()}
        return keys, np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))), columns, order


def _order(values: Int64Column) -> Int64Column | None:
    if bool((values[1:] >= values[:-1]).all()):
        return None
    order: Int64Column = np.argsort(values, kind="stable")
    return order


def _places(starts: Int64Column, lengths: Int64Column, order: Int64Column) -> Int64Column:
    """Return where the keys of the requests stand, in this order of the requests."""
    lengths = lengths[order]
    ends = np.cumsum(lengths)
    shifts: Int64Column = np.repeat(starts[order] - (ends - lengths), lengths)
    return shifts + np.arange(ends[-1], dtype=np.int64)


def in_order(values: Mapping[int, Value], order: Int64Column | None) -> dict[int, Value]:
    """Return values that only some requests have, by the numbers that requests have in an order."""
    if order is None or not values:
        return dict(values)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return dict(sorted((int(places[number]), value) for number, value in values.items()))


def _numbered_values(values: Int64Column) -> tuple[Int32Column, npt.NDArray[Any]]:
    """Return values, -1 or more, as numbers in the order of first appearance, and which value each number is."""
    unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    order = order[unique[order] >= 0]
    numbers = np.full(len(unique), -1, np.int32)
    numbers[order] = np.arange(len(order), dtype=np.int32)
    return numbers[inverse], unique[order]


# Finds out how many tokens a block has, from how many blocks prompts of known length have.
#
# A trace lists either ceil(L/B) blocks of a prompt of L tokens, the last one partial, or floor(L/B), full ones only.
# So each prompt bounds B on both sides, once for either way of counting. Where prompts leave several sizes, or agree
# on none, one is assumed and it is said: which blocks are hits does not hang on it, only what they are in tokens.

_MOST = 1 << 31  # no block has as many tokens
_USUAL = 16  # the default of engines


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Requests of which it is known how many tokens their blocks hold.

    Attributes:
        tokens: [P] of each.
        blocks: [P] of each.
        instances: [P] of each.
        lines: [P] where each was read, for messages.
    """

    tokens: Int64Column
    blocks: Int64Column
    instances: Int32Column
    lines: Int64Column


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens per block.

    Attributes:
        tokens: of each instance.
        assumed: a sentence for each that does not follow from the prompts.
    """

    tokens: tuple[int, ...]
    assumed: tuple[str, ...] = ()


def block_sizes(
    prompts: Prompts, names: tuple[str, ...], given: tuple[int | None, ...], *, are_full: bool
) -> BlockSizes:
    """Return the tokens per block of each instance; one without an answer has that of all others.

    Args:
        prompts: of all instances.
        names: of the instances.
        given: the known ones.
        are_full: whether only full blocks are listed, not the partial one at the end of a prompt.
    """
    found = [
        _size_of(_of(prompts, number), are_full) if size is None else _Size(size)
        for number, (name, size) in enumerate(zip(names, given, strict=True))
    ]
    known = {size.tokens for size in found if size is not None}
    other = _Size(known.pop()) if len(known) == 1 else _Size(_USUAL, "no prompt tells it")
    sizes = [size if size is not None else other for size in found]
    assumed = tuple(
        f"block_tokens of instance {name!r}: {size.doubt}; {size.tokens} is assumed, --block-tokens says otherwise"
        for name, size in zip(names, sizes, strict=True)
        if size.doubt
    )
    return BlockSizes(tuple(size.tokens for size in sizes), assumed)


class _Size(NamedTuple):
    """Tokens per block, and why that may be wrong."""

    tokens: int
    doubt: str = ""


def _of(prompts: Prompts, instance: int) -> Prompts:
    where = prompts.instances == instance
    if where.all():
        return prompts
    return Prompts(prompts.tokens[where], prompts.blocks[where], prompts.instances[where], prompts.lines[where])


def _size_of(prompts: Prompts, are_full: bool) -> _Size | None:
    """Return the size, None where nothing is known."""
    if not prompts.blocks.any():
        return None
    ways = [_if_all_are_full(prompts)] if are_full else [_if_all_are_full(prompts), _if_last_is_partial(prompts)]
    ranges = [(int(low[-1]), int(high[-1])) for low, high in ways if low[-1] <= high[-1]]
    if not ranges:
        return _Size(_mean_size(prompts), _none_fits(prompts, ways))
    return _chosen(ranges)


_Bounds = tuple[Int64Column, Int64Column]
"""[P] and [P] smallest and largest size that fits the prompts up to and including each."""


def _bounds(low: Int64Column, high: Int64Column) -> _Bounds:
    return np.maximum.accumulate(np.maximum(low, 1)), np.minimum.accumulate(high)


def _if_last_is_partial(prompts: Prompts) -> _Bounds:
    """Return bounds from (n - 1)·B < L ≤ n·B."""
    tokens, blocks = prompts.tokens, prompts.blocks
    low = np.where(blocks > 0, -(-tokens // np.maximum(blocks, 1)), np.where(tokens > 0, _MOST, 1))
    high = np.where(blocks > 1, -(-tokens // np.maximum(blocks - 1, 1)) - 1, _MOST - 1)
    return _bounds(low, np.where((blocks == 1) & (tokens == 0), 0, high))


def _if_all_are_full(prompts: Prompts) -> _Bounds:
    """Return bounds from n·B ≤ L < (n + 1)·B."""
    tokens, blocks = prompts.tokens, prompts.blocks
    high = np.where(blocks > 0, tokens // np.maximum(blocks, 1), _MOST - 1)
    return _bounds(tokens // (blocks + 1) + 1, high)


def _chosen(ranges: list[tuple[int, int]]) -> _Size:
    """Return the only size; else the only one that fits both ways, as prompts of whole blocks do; else the only 2^x;
    else the smallest 2^x, or the smallest size. It is in doubt unless it is the only one of its kind: a size that is
    no 2^x is, where a 2^x fits."""
    powers = sorted({1 << bit for bit in range(31) for low, high in ranges if low <= 1 << bit <= high})
    shown = " or ".join(f"{low} to {high}" if high < _MOST - 1 else f"{low} and more" for low, high in ranges)
    doubt = f"{shown} fit all prompts"
    both = (max(low for low, _ in ranges), min(high for _, high in ranges))
    if both[0] == both[1]:
        return _Size(both[0], doubt if powers and both[0] not in powers else "")
    if len(powers) == 1:
        return _Size(powers[0])
    return _Size(powers[0] if powers else min(low for low, _ in ranges), doubt)


def _mean_size(prompts: Prompts) -> int:
    """Return the tokens per block of all prompts together, rounded up."""
    return max(1, -(-int(prompts.tokens.sum()) // int(prompts.blocks.sum())))


def _none_fits(prompts: Prompts, ways: list[_Bounds]) -> str:
    """Say which prompt fits no size that all prompts before it fit."""
    first = max(int(np.argmax(low > high)) for low, high in ways)
    return (
        f"none fits all prompts: line {prompts.lines[first]} has {prompts.tokens[first]} tokens in "
        f"{prompts.blocks[first]} blocks, other than the lines before it"
    )


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
    keys: Sequence[Key]
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
        """Return how many tokens a block of an instance has, None where it is not known."""
        return self._block_tokens.get(instance) if isinstance(self._block_tokens, Mapping) else self._block_tokens

    def append(self, request: Request, line: int = 0) -> None:
        """Add a request.

        Args:
            request: to add.
            line: that it was read from, for messages.

        Raises:
            LineError: a key of it is none.
        """
        keys: list[Any] = request.keys if isinstance(request.keys, list) else list(request.keys)
        try:
            self._columns.keys.fromlist(keys)
        except (OverflowError, TypeError):  # more bits, or texts
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
            sessions=_numbered_values(columns["session"])[0],
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
        instances, order = _numbered_values(columns["instance"])
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
