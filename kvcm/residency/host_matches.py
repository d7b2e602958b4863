"""How much of a prompt hosts hold, on their own and together with one peer and with storages.

Prefixes are found window by window, since most hosts hold no more than the beginning of a prompt. Within a window all
hosts, or all peers of a host, are columns of one array of flags.

A host is a candidate when it holds a part of the first block: a prefix begins there. What a host lacks may come from a
storage and from one peer: the peer with the longest joint prefix, of equal ones the first by name. The original takes
several peers for models with linear attention, one for each kind of part; one peer never promises more than there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.residency.block_holders import BlockHolders
from kvcm.residency.block_table import Keys
from kvcm.residency.event_reports import HostColumns

__all__ = ["MOST_JOINT_HOSTS", "HostMatch", "HostQuery", "Joint", "joint_matches", "longest_held", "matches"]

MOST_JOINT_HOSTS: Final = 64
"""Hosts of a request that are matched together with each of their peers: that is one array operation for each."""

_FIRST_WINDOW: Final = 64  # blocks; many hosts hold no more
_WINDOW: Final = 1024
_FLAGS_OF_WINDOW: Final = 1 << 23  # blocks x parts x columns, a byte each

Flags = NDArray[np.bool_]
Units = NDArray[np.bool_]


class HostMatch(NamedTuple):
    """What a host holds.

    Attributes:
        host: its name.
        blocks: consecutive ones from the first on.
    """

    host: str
    blocks: int


class Joint(NamedTuple):
    """What a host has together with a peer and storages.

    Attributes:
        blocks: consecutive ones from the first on.
        fetched: distinct blocks of these that have parts which only the peer has.
    """

    blocks: int
    fetched: int


@dataclass(frozen=True, slots=True)
class HostQuery:
    """A prompt and what counts as held.

    Attributes:
        keys: mixed keys of its blocks, in order.
        local: units that count as a host's own.
        needs_linear: whether the last block must have its linear-attention parts, too.
        full_parts: how many of the parts every block must have; they are the first.
    """

    keys: Keys
    local: Units
    needs_linear: bool
    full_parts: int


class _Prefixes:
    """The longest prefix in each column, window by window."""

    def __init__(self, query: HostQuery, columns: int) -> None:
        self._query = query
        self._is_going = np.ones(columns, np.bool_)
        self.lengths = np.zeros(columns, np.int64)

    @property
    def is_going(self) -> bool:
        return bool(self._is_going.any())

    def extend(self, start: int, held: Flags) -> None:
        """Take in the next window: its first block's position, and flags by block, part and column."""
        full_parts = self._query.full_parts
        is_held: Flags = np.all(held[:, :full_parts], axis=1)
        is_held[0] &= self._is_going
        np.logical_and.accumulate(is_held, axis=0, out=is_held)
        self._is_going = is_held[-1].copy()
        if self._query.needs_linear:
            is_held &= np.all(held[:, full_parts:], axis=1)
        last = start + len(is_held) - is_held[::-1].argmax(axis=0)  # one behind the last block that is held
        np.maximum(self.lengths, last, out=self.lengths, where=is_held.any(axis=0))


def _windows(count: int, columns: int, parts: int) -> Iterator[slice]:
    most = max(1, min(_WINDOW, _FLAGS_OF_WINDOW // max(1, columns * parts)))
    start = 0
    while start < count:
        size = min(most, _FIRST_WINDOW if start == 0 else most)
        yield slice(start, min(start + size, count))
        start += size


def matches(blocks: BlockHolders, columns: HostColumns, query: HostQuery) -> list[HostMatch]:
    """Return what each candidate holds itself, the longest prefix first, equal ones by name."""
    if not len(query.keys) or not len(columns):
        return []
    hosts, places = zip(*columns.items(), strict=True)
    every = np.array(places, np.int64)
    first = blocks.held_parts(query.keys[:1], query.local, every).held[0]
    chosen = np.flatnonzero(first.any(axis=0))
    if not len(chosen):
        return []
    prefixes = _Prefixes(query, len(chosen))
    for window in _windows(len(query.keys), len(chosen), len(first)):
        row_of, held = blocks.held_parts(query.keys[window], query.local, every[chosen])
        prefixes.extend(window.start, held[row_of])
        if not prefixes.is_going:
            break
    found = [
        HostMatch(hosts[at], length) for at, length in zip(chosen.tolist(), prefixes.lengths.tolist(), strict=True)
    ]
    return sorted(found, key=lambda match: (-match.blocks, match.host))


def joint_matches(
    blocks: BlockHolders,
    columns: HostColumns,
    query: HostQuery,
    *,
    hosts: Sequence[str],
    peers: tuple[Sequence[str], Units] | None,
    stored: Callable[[slice], Flags] | None,
) -> list[Joint]:
    """Return what each of some candidates has together with one peer and storages.

    Args:
        blocks: and their holders.
        columns: of hosts.
        query: the prompt.
        hosts: the candidates.
        peers: hosts that may be a peer, in order, and the units that they can give from; None for no peer.
        stored: returns which parts of the blocks of a window lie in storages, by block and part; None for none.
    """
    own = np.array([columns.find(host) for host in hosts], np.int64)
    names, units = peers if peers is not None else ((), query.local)
    others = np.array([columns.find(name) for name in names], np.int64)
    trackers = [_Prefixes(query, len(others) + 1) for _ in hosts]  # the first column: without a peer
    parts = blocks.parts
    for window in _windows(len(query.keys), len(others) + 1 + len(own), parts):
        keys = query.keys[window]
        mine = _expanded(blocks, keys, query.local, own)
        theirs = _expanded(blocks, keys, units, others)
        if stored is not None:
            mine |= stored(window)[:, :, None]
        for at, tracker in enumerate(trackers):
            if tracker.is_going:
                alone = mine[:, :, at, None]
                tracker.extend(window.start, np.concatenate((alone, theirs | alone), axis=2))
        if not any(tracker.is_going for tracker in trackers):
            break
    found = []
    for at, tracker in enumerate(trackers):
        best = int(tracker.lengths.argmax())
        length, fetched = int(tracker.lengths[best]), 0
        if best:
            peer = others[best - 1 : best]
            fetched = _fetched(blocks, query, length, own=own[at : at + 1], peer=peer, units=units, stored=stored)
        found.append(Joint(length, fetched))
    return found


def _fetched(
    blocks: BlockHolders,
    query: HostQuery,
    length: int,
    *,
    own: NDArray[np.int64],
    peer: NDArray[np.int64],
    units: Units,
    stored: Callable[[slice], Flags] | None,
) -> int:
    """Return how many distinct blocks of a joint prefix have parts that only the peer has."""
    fetched: list[Keys] = []
    for window in _windows(length, 2, blocks.parts):
        keys = query.keys[window]
        lacks = ~_expanded(blocks, keys, query.local, own)[:, :, 0]
        if stored is not None:
            lacks &= ~stored(window)
        lacks[:, query.full_parts :] &= query.needs_linear
        lacks[: length - 1 - window.start, query.full_parts :] = False  # linear state counts in the last block alone
        gives = _expanded(blocks, keys, units, peer)[:, :, 0]
        fetched.append(keys[(lacks & gives).any(axis=1)])
    return len(np.unique(np.concatenate(fetched)))


def _expanded(blocks: BlockHolders, keys: Keys, units: Units, columns: NDArray[np.int64]) -> Flags:
    row_of, held = blocks.held_parts(keys, units, columns)
    return held[row_of]


def longest_held(
    blocks: BlockHolders,
    columns: HostColumns,
    keys: Keys,
    *,
    units: Units,
    hosts: Sequence[str],
    part_of: NDArray[np.int64] | None,
    ends_at_gap: bool,
) -> str | None:
    """Return the host that holds most of some blocks, of equal ones the first; None where no one holds any.

    Args:
        blocks: and their holders.
        columns: of hosts.
        keys: mixed keys of the blocks, in order.
        units: that count.
        hosts: the candidates.
        part_of: the part of each block that counts, -1 for one that there is not; None for any part.
        ends_at_gap: whether blocks behind the first that a host lacks count for nothing.
    """
    if not hosts or not len(keys):
        return None
    places = np.array([columns.find(host) for host in hosts], np.int64)
    counts, is_going = np.zeros(len(places), np.int64), np.ones(len(places), np.bool_)
    for window in _windows(len(keys), len(places), blocks.parts):
        row_of, held = blocks.held_parts(keys[window], units, places)
        if part_of is None:
            has: Flags = np.any(held, axis=1)[row_of]
        else:
            wanted = part_of[window]
            has = held[row_of, wanted] & (wanted >= 0)[:, None]
        if ends_at_gap:
            has[0] &= is_going
            np.logical_and.accumulate(has, axis=0, out=has)
            is_going = has[-1].copy()
        counts += np.count_nonzero(has, axis=0)
        if not is_going.any():
            break
    best = int(counts.argmax())
    return hosts[best] if counts[best] else None
