"""What the wave buffer asks its control, and where the answers go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpu_tier.manager.wave_tables import LayerTables

__all__ = ["Change", "Changes", "Control", "Int32s", "Int64s", "Lines", "Plan", "Stat"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Stat(IntEnum):
    """What a lookup says of each line.

    RUNS: runs that the line has, also those that there was no room for. TOKENS: of the line, steady ones included. The
    next six count what was selected, and what of it is cached, in clusters, blocks and tokens. BAD: 1 when a cluster is
    not known, 2 when more tokens are steady than the ring has places; the line is empty then.
    """

    RUNS = 0
    TOKENS = 1
    CLUSTERS = 2
    CLUSTER_HITS = 3
    BLOCKS = 4
    BLOCK_HITS = 5
    CLUSTER_TOKENS = 6
    TOKEN_HITS = 7
    BAD = 8


class Change(IntEnum):
    """What an update says of each line: copies to make, clusters taken in, clusters given up."""

    COPIES = 0
    ADMISSIONS = 1
    EVICTIONS = 2


@dataclass(frozen=True, slots=True)
class Lines:
    """What a step selected in one layer, on the host.

    Attributes:
        tables: clusters of the layer.
        requests: ``int32 [B]``.
        ids: ``int32 [B, H, K]`` clusters; entries behind `lengths` mean nothing.
        lengths: ``int32 [B, H]``.
        tokens: ``int32 [B]`` tokens of each request.
        first: ``int32 [B]`` first token of the steady ones behind the sink, -1 for rows that do not select.
        row_slots: slots of a row of the execution buffer.
    """

    tables: LayerTables
    requests: Int32s
    ids: Int32s
    lengths: Int32s
    tokens: Int32s
    first: Int32s
    row_slots: int

    @property
    def count(self) -> int:
        """B·H."""
        return self.lengths.size


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a lookup writes the runs of the execution buffer; fields as of `CopyRuns`, and lens ``int32 [B·H]``."""

    src: Int64s
    kind: Int32s
    dst: Int32s
    tokens: Int32s
    count: Int32s
    lens: Int32s
    stats: Int64s

    @property
    def room(self) -> int:
        """Runs that a line may have."""
        return int(self.src.shape[1])


@dataclass(frozen=True, slots=True)
class Changes:
    """Where an update writes the copies from the execution buffer into the cache, and what it counted.

    Attributes:
        src: ``int64 [B·H, A]`` slot in the execution buffer.
        dst: ``int32 [B·H, A]`` slot in the arena.
        tokens: ``int32 [B·H, A]``.
        counts: ``int64 [B·H, 3]`` by `Change`.
    """

    src: Int64s
    dst: Int32s
    tokens: Int32s
    counts: Int64s

    @classmethod
    def of(cls, lines: int, room: int) -> Changes:
        """Return room for so many copies of each line."""
        shape = (lines, room)
        counts = np.zeros((lines, len(Change)), np.int64)
        return cls(np.empty(shape, np.int64), np.empty(shape, np.int32), np.empty(shape, np.int32), counts)

    def forget(self, rows: npt.NDArray[np.int64], num_heads: int) -> None:
        """Copy nothing of these rows of the batch."""
        lines = (rows[:, None] * num_heads + np.arange(num_heads)).flatten()
        self.counts[lines, Change.COPIES] = 0


class Control(Protocol):
    """Who looks clusters up and changes the tables."""

    def wake(self) -> None:
        """Hear that a lookup will come soon."""

    def look_up(self, lines: Lines, plan: Plan) -> None:
        """Fill a plan; changes no table."""

    def begin_update(self, lines: Lines, changes: Changes) -> Callable[[], None]:
        """Begin to change the tables, and return what waits for the end of that.

        `changes` has room for all copies that can be: those of all selected blocks that are not cached.
        """

    def close(self) -> None:
        """End the threads."""
