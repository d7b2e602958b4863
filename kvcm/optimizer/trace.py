"""A trace in columns: the blocks of each request, its time and its instance.

A block is a dense number from 0 on, in the order of first appearance; blocks of two instances are never the same one.
Its number stands for the whole prefix up to and including it, so a set of numbers is a prefix tree; `parents` is that
tree. Requests are in the order in which they are replayed.

A request reads its first `read_blocks` blocks as a prefix and then, if it `writes`, writes all of its blocks:

* a turn of a dialogue, which all published traces consist of, reads and writes all of them;
* a lookup reads and does not write;
* the end of a write session writes and reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["BadLine", "BoolColumn", "Int32Column", "Int64Column", "QueryMode", "Totals", "Trace"]

Int32Column = npt.NDArray[np.int32]
Int64Column = npt.NDArray[np.int64]
BoolColumn = npt.NDArray[np.bool_]


class QueryMode(IntEnum):
    """How a request reads: the longest prefix, any resident blocks, or the last whole window of them."""

    PREFIX = 0
    BATCH = 1
    WINDOW = 2


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was left out.

    Attributes:
        number: from 1 on.
        reason: names the field, the value and the allowed ones.
    """

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Totals:
    """What rates are relative to.

    Attributes:
        requests: that read.
        blocks: that are read.
        tokens: of the prompts of those, and of those too short to have a block.
    """

    requests: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their replay; R of them over N block accesses and U unique blocks.

    Attributes:
        name: for people; that of the file.
        block_tokens: tokens per block; 0 where instances differ (`instance_block_tokens` says each).
        times_us: [R] microseconds; since when is the trace's own business.
        input_tokens: [R] tokens of the prompt.
        output_tokens: [R] tokens generated, 0 where it is not known.
        sessions: [R] dense number of the conversation, -1 where the trace names none.
        instances: [R] index into `instance_names`.
        read_blocks: [R] how many of the request's first blocks it reads.
        writes: [R] whether it writes its blocks.
        offsets: [R + 1] request r has `blocks[offsets[r] : offsets[r + 1]]`.
        blocks: [N] dense numbers.
        parents: [U] the block before, -1 for the first of a chain; where accesses disagree, that of the first.
        instance_names: in the order of their first request.
        instance_block_tokens: tokens per block of each.
        has_one_parent: whether every block always followed the same one, so that the numbers are a prefix tree.
        modes: requests that do not read a prefix.
        windows: size of the window, in blocks, of those that read one.
        masks: which of its blocks a request left out, by position; only for those that left out any.
        specs: names of the location specs that a request reads or writes; only where it is not all.
        bad_lines: that were left out, the first 100.
        bad_line_count: how many there were.
        assumed: values that the file lacks and that were assumed, a sentence each.
    """

    name: str
    block_tokens: int
    times_us: Int64Column
    input_tokens: Int64Column
    output_tokens: Int64Column
    sessions: Int32Column
    instances: Int32Column
    read_blocks: Int32Column
    writes: BoolColumn
    offsets: Int64Column
    blocks: Int32Column
    parents: Int32Column
    instance_names: tuple[str, ...] = ("instance",)
    instance_block_tokens: tuple[int, ...] = (0,)
    has_one_parent: bool = True
    modes: Mapping[int, QueryMode] = field(default_factory=dict)
    windows: Mapping[int, int] = field(default_factory=dict)
    masks: Mapping[int, BoolColumn] = field(default_factory=dict)
    specs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    bad_lines: tuple[BadLine, ...] = ()
    bad_line_count: int = 0
    assumed: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times_us)

    @property
    def unique_blocks(self) -> int:
        """Return U."""
        return len(self.parents)

    @property
    def accesses(self) -> int:
        """Return N."""
        return len(self.blocks)

    @property
    def totals(self) -> Totals:
        """Return what rates are relative to."""
        reads = self.read_blocks > 0
        have_prompts = reads | (np.diff(self.offsets) == 0)
        tokens = int(self.input_tokens[have_prompts].sum())
        return Totals(int(reads.sum()), int(self.read_blocks.sum(dtype=np.int64)), tokens)

    @property
    def is_plain(self) -> bool:
        """Whether requests read prefixes only, with nothing masked or left out."""
        return not (self.modes or self.masks or self.specs)

    @property
    def span_seconds(self) -> float:
        """Return the time from the first request to the last."""
        return float(self.times_us[-1] - self.times_us[0]) / 1e6 if len(self) else 0.0

    def request_blocks(self, request: int) -> Int32Column:
        """Return the blocks of one request."""
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def tokens_per_block(self) -> Int64Column:
        """Return [R] tokens per block of each request's instance."""
        return np.array(self.instance_block_tokens, np.int64)[self.instances]
