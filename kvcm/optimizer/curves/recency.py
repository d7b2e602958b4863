"""Ranks of blocks by how recently they were touched: the stack distances of lru and leaf_lru.

The place of a block is the number of the access that touched it last; its rank is how many blocks have that place or a
newer one. A bitmap says which places are some block's, and a Fenwick tree (1994) counts them by words of 64. What one
request touched in a row mostly comes again in a row: such a run needs one look into the tree, and its bits are moved
by the word.

Words whose places are all given away are *closed*; the tree knows only those, so that writing new places costs one
change to it per word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.trace import Int32Column, Int64Column

__all__ = ["leaf_lru_depths", "lru_depths"]

Words = npt.NDArray[np.uint64]

_NEVER = -2  # the place of a block that was not touched yet; no run leads there from place 0
_ONE, _ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def lru_depths(blocks: Int32Column, unique_blocks: int) -> Int32Column:
    """Return [N] the rank of each accessed block just before the access; 0 for its first access.

    All blocks of a run have one rank: before an access those newer than the block are one less than before the access
    to its older neighbour, which is newer itself meanwhile. That holds for any accesses, a block following itself
    included.
    """
    count = len(blocks)
    depths = np.zeros(count, np.int32)
    places = np.full(unique_blocks, _NEVER, np.int32)
    words = np.zeros((count >> 6) + 1, np.uint64)
    tree = np.zeros(len(words) + 1, np.int32)
    seen = first = 0
    while first < count:
        place = places[blocks[first]]
        end = first
        if place < 0:
            while end < count and places[blocks[end]] < 0:
                places[blocks[end]] = end
                end += 1
            _mark(words, tree, first, end)
            seen += end - first
        else:
            depth = seen - _older(words, tree, place)
            while end < count and places[blocks[end]] == place + end - first:
                places[blocks[end]] = end
                depths[end] = depth
                end += 1
            _mark(words, tree, first, end)  # before the old places are cleared: a run may reach into its new ones
            _clear(words, tree, place, place + end - first, end >> 6)
        first = end
    return depths


@compiled
def leaf_lru_depths(blocks: Int32Column, offsets: Int64Column, unique_blocks: int) -> Int32Column:
    """Return [N] the rank of each accessed block before its request, whose blocks are touched from the last to the
    first; 0 for its first access.

    Blocks are a prefix tree: parents are newer than their children, so what a request touched already is newer than
    what it comes to, and what follows a new block is new.
    """
    count = len(blocks)
    depths = np.zeros(count, np.int32)
    places = np.full(unique_blocks, _NEVER, np.int32)
    words = np.zeros((count >> 6) + 1, np.uint64)
    tree = np.zeros(len(words) + 1, np.int32)
    seen = 0
    for request in range(len(offsets) - 1):
        begin, end = offsets[request], offsets[request + 1]
        at = begin
        while at < end and places[blocks[at]] >= 0:
            place = places[blocks[at]]
            depth = seen - _older(words, tree, place)
            length = 0
            while at < end and places[blocks[at]] == place - length:
                places[blocks[at]] = begin + end - 1 - at
                depths[at] = depth + length
                length += 1
                at += 1
            _clear(words, tree, place + 1 - length, place + 1, begin >> 6)
        seen += end - at
        for new in range(at, end):
            places[blocks[new]] = begin + end - 1 - new
        _mark(words, tree, begin, end)
    return depths


@compiled
def _older(words: Words, tree: Int32Column, place: int) -> int:
    """Return how many places before this one are some block's."""
    total = _ones(words[place >> 6] & ~(_ALL << np.uint64(place & 63)))
    node = place >> 6
    while node > 0:
        total += tree[node]
        node &= node - 1
    return total


@compiled
def _mark(words: Words, tree: Int32Column, begin: int, end: int) -> None:
    """Give away the places from begin on, all before having been given away; close the words that are full."""
    for word in range(begin >> 6, end >> 6):
        words[word] |= _bits(word, begin, end)
        _add(tree, word, _ones(words[word]))
    words[end >> 6] |= _bits(end >> 6, begin, end)


@compiled
def _clear(words: Words, tree: Int32Column, begin: int, end: int, open_word: int) -> None:
    """Take back places of which each is some block's."""
    for word in range(begin >> 6, ((end - 1) >> 6) + 1):
        words[word] &= ~_bits(word, begin, end)
        if word < open_word:
            _add(tree, word, max(begin, word << 6) - min(end, (word + 1) << 6))


@compiled
def _bits(word: int, begin: int, end: int) -> np.uint64:
    """Return the bits of a word that are places from begin to end."""
    low, high = max(begin - (word << 6), 0), end - (word << 6)
    bits = _ALL << np.uint64(low)
    return bits if high >= 64 else bits & ((_ONE << np.uint64(high)) - _ONE)


@compiled
def _add(tree: Int32Column, word: int, change: int) -> None:
    node = word + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@compiled
def _ones(word: np.uint64) -> int:
    """Return how many bits are set; a form that compilers know as one instruction (Warren, Hacker's Delight, 5-1)."""
    word = word - ((word >> _ONE) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int(np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56)))
