"""Tables of the control: the clusters of each request and layer, the state of their cache, and lookups over them.

All of it is arrays of numbers that both the C++ control and Python read and write in place. `LayerTables.records` says
where the arrays of each request lie. Arrays of clusters and blocks grow by doubling.

Invariants of a head: a place of the cache is either free or that of one block; all blocks of a cluster have places, or
none has; `residents` are the clusters that have, and `index` says where each stands among them (-1 for the others).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvcm.gpu_tier.types import SteadyRing

__all__ = [
    "BLOCK",
    "CLUSTER",
    "HEAD",
    "RECORD",
    "Change",
    "Changes",
    "ClusterTable",
    "Control",
    "Int32s",
    "Int64s",
    "LayerTables",
    "Lines",
    "Places",
    "Plan",
    "Stat",
]

CLUSTER = np.dtype([("first_block", np.int32), ("tokens", np.int32)])
BLOCK = np.dtype([("host", np.int32), ("place", np.int32)])
HEAD = np.dtype([("sequence", np.int64), ("residents", np.int64), ("free", np.int64)])
_ARRAYS = ("clusters", "blocks", "used", "admitted", "times", "index", "residents", "free", "heads", "slots", "stretch")
_NUMBERS = ("most_clusters", "most_blocks", "num_clusters", "capacity", "sink", "ring")
RECORD = np.dtype([(name, np.int64) for name in (*_ARRAYS, *_NUMBERS)])
"""Addresses of the arrays of one layer of a request, and sizes."""
_FEWEST = 64


@dataclass(frozen=True, slots=True)
class Places:
    """The buffer of a request in the arena, the same for all layers.

    Attributes:
        ring: its steady places.
        slots: ``int32 [ring.capacity + cache]`` device slot of each place.
        stretch: likewise, how many places from this one on have slots that follow each other.
        pieces: most stretches that a block of the cache lies in.
    """

    ring: SteadyRing
    slots: npt.NDArray[np.int32]
    stretch: npt.NDArray[np.int32]
    pieces: int

    @classmethod
    def of(cls, ring: SteadyRing, buffer_slots: Tensor, block_tokens: int) -> Places:
        """Return the places of a buffer."""
        slots = buffer_slots.cpu().numpy().astype(np.int32)
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        ends = np.append(breaks, len(slots))
        number = np.arange(len(slots))
        stretch = ends[np.searchsorted(ends, number, side="right")] - number
        cache = len(slots) - ring.capacity
        inside = breaks[breaks > ring.capacity] - ring.capacity
        inside = inside[inside % block_tokens > 0] // block_tokens
        pieces = 1 + (int(np.bincount(inside).max()) if len(inside) and cache else 0)
        return cls(ring, slots, stretch.astype(np.int32), pieces)

    def capacity(self, block_tokens: int) -> int:
        """Return the blocks that the cache holds."""
        return (len(self.slots) - self.ring.capacity) // block_tokens


class ClusterTable:
    """One layer of one request; the names are those of `RECORD`.

    Attributes:
        clusters: ``CLUSTER [H, ·]`` first block, counted within the head, and tokens of each cluster.
        blocks: ``BLOCK [H, ·]`` block of the store, and block place in the cache or -1.
        used: ``int64 [H, ·]`` when each cluster was used last, in the sequence of the head.
        admitted: ``int64 [H, ·]`` when it was taken into the cache last.
        times: ``int32 [H, ·]`` how often it was used.
        index: ``int32 [H, ·]`` its place among the residents, -1 when it is not cached.
        residents: ``int32 [H, capacity]`` cached clusters.
        free: ``int32 [H, capacity]`` free block places, a stack.
        heads: ``HEAD [H]`` last number of the sequence, number of residents and of free places.
        num_clusters: clusters of every head.
        num_blocks: ``int64 [H]``.
        places: None until the request has a buffer.
    """

    def __init__(self, num_heads: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.num_clusters = 0
        self.num_blocks = np.zeros(num_heads, np.int64)
        self.clusters = np.zeros((num_heads, 0), CLUSTER)
        self.blocks: npt.NDArray[Any] = np.zeros((num_heads, 0), BLOCK)
        self.used = np.zeros((num_heads, 0), np.int64)
        self.admitted = np.zeros((num_heads, 0), np.int64)
        self.times = np.zeros((num_heads, 0), np.int32)
        self.index = np.zeros((num_heads, 0), np.int32)
        self.residents = np.zeros((num_heads, 0), np.int32)
        self.free = np.zeros((num_heads, 0), np.int32)
        self.heads = np.zeros(num_heads, HEAD)
        self.places: Places | None = None

    @property
    def capacity(self) -> int:
        """Blocks of the cache."""
        return self.residents.shape[1]

    def append(self, sizes: npt.NDArray[np.int32], host: npt.NDArray[np.int32]) -> None:
        """Add clusters.

        Args:
            sizes: ``int32 [H, m]`` tokens of each.
            host: blocks of the store: head after head, in each cluster after cluster.
        """
        counts = -(-sizes // self._block_tokens)
        per_head = counts.sum(1)
        old, new = self.num_clusters, self.num_clusters + sizes.shape[1]
        for name in ("clusters", "used", "admitted", "times", "index"):
            setattr(self, name, _grown(getattr(self, name), new))
        self.blocks = _grown(self.blocks, int((self.num_blocks + per_head).max()))
        first = self.num_blocks[:, None] + counts.cumsum(1) - counts
        self.clusters["first_block"][:, old:new] = first
        self.clusters["tokens"][:, old:new] = sizes
        self.index[:, old:new] = -1
        given = np.cumsum(per_head) - per_head
        for head, (begin, count) in enumerate(zip(given, per_head, strict=True)):
            rows = self.blocks[head, self.num_blocks[head] : self.num_blocks[head] + count]
            rows["host"] = host[begin : begin + count]
            rows["place"] = -1
        self.num_blocks += per_head
        self.num_clusters = new

    def admit(self, places: Places) -> None:
        """Take a buffer over, or a grown one; cached clusters keep their places."""
        self.places = places
        old, new = self.capacity, places.capacity(self._block_tokens)
        residents, free = (np.zeros((len(self.heads), new), np.int32) for _ in range(2))
        residents[:, :old] = self.residents
        # The stack gives out old places first, and of the new ones low ones first.
        free[:, : new - old] = np.arange(new - 1, old - 1, -1)
        free[:, new - old :] = self.free
        self.residents, self.free = residents, free
        self.heads["free"] += new - old

    def empty_cache(self) -> None:
        """Forget the cached clusters."""
        self.index[:] = -1
        self.blocks["place"] = -1
        self.heads["residents"] = 0
        self.heads["free"] = self.capacity
        self.free[:] = np.arange(self.capacity - 1, -1, -1)

    def describe(self, record: npt.NDArray[np.void]) -> None:
        """Write addresses and sizes into an entry of type `RECORD`."""
        arrays = {name: getattr(self, name) for name in _ARRAYS[:-2]}
        if self.places is not None:
            arrays |= {"slots": self.places.slots, "stretch": self.places.stretch}
            record["sink"], record["ring"] = self.places.ring.sink, self.places.ring.ring
        for name, array in arrays.items():
            record[name] = array.ctypes.data
        record["most_clusters"], record["most_blocks"] = self.clusters.shape[1], self.blocks.shape[1]
        record["num_clusters"], record["capacity"] = self.num_clusters, self.capacity


def _grown(array: npt.NDArray[Any], wanted: int) -> npt.NDArray[Any]:
    have = array.shape[1]
    if wanted <= have:
        return array
    larger = np.zeros((array.shape[0], max(wanted, 2 * have, _FEWEST)), array.dtype)
    larger[:, :have] = array
    return larger


class LayerTables:
    """The clusters of all requests in one layer.

    Attributes:
        records: ``RECORD [R]``, zeros for requests without clusters or a buffer.
        num_heads: KV heads.
        block_tokens: tokens of a block.
    """

    def __init__(self, max_requests: int, num_heads: int, block_tokens: int) -> None:
        self.records = np.zeros(max_requests, RECORD)
        self.num_heads = num_heads
        self.block_tokens = block_tokens
        self._tables: dict[int, ClusterTable] = {}

    def table(self, request: int) -> ClusterTable:
        """Return the table of a request, an empty one when it is new."""
        if request not in self._tables:
            self._tables[request] = ClusterTable(self.num_heads, self.block_tokens)
        return self._tables[request]

    def append(self, request: int, sizes: npt.NDArray[np.int32], host: npt.NDArray[np.int32]) -> None:
        """See `ClusterTable.append`."""
        self.table(request).append(sizes, host)
        self._tables[request].describe(self.records[request : request + 1])

    def admit(self, request: int, places: Places) -> None:
        """See `ClusterTable.admit`."""
        self.table(request).admit(places)
        self._tables[request].describe(self.records[request : request + 1])

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._tables.pop(request, None)
        self.records[request] = 0


# What the wave buffer asks its control, and where the answers go.

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Stat(IntEnum):
    """What a lookup says of each line.

    RUNS: runs that the line has, also those that did not fit. TOKENS: of the line, steady ones included. The
    next six count the selected and the cached ones of them, in clusters, blocks and tokens. BAD: 1 when a cluster is
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
    def capacity(self) -> int:
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
    def of(cls, lines: int, capacity: int) -> Changes:
        """Allocate so many copies of each line."""
        shape = (lines, capacity)
        counts = np.zeros((lines, len(Change)), np.int64)
        return cls(np.empty(shape, np.int64), np.empty(shape, np.int32), np.empty(shape, np.int32), counts)

    def forget(self, rows: npt.NDArray[np.int64], num_heads: int) -> None:
        """Copy nothing of these rows of the batch."""
        lines = (rows[:, None] * num_heads + np.arange(num_heads)).flatten()
        self.counts[lines, Change.COPIES] = 0


class Control(Protocol):
    """Looks clusters up and changes the tables."""

    def wake(self) -> None:
        """Announce that a lookup will come soon."""

    def lookup(self, lines: Lines, plan: Plan) -> None:
        """Fill a plan; changes no table."""

    def begin_update(self, lines: Lines, changes: Changes) -> Callable[[], None]:
        """Begin to change the tables, and return what waits for the end of that.

        `changes` holds all possible copies: those of all selected blocks that are not cached.
        """

    def close(self) -> None:
        """End the threads."""
