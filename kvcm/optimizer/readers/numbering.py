"""Kernels that turn the keys of a trace into dense numbers: minutes of Python become a fraction of a second."""

from __future__ import annotations

import secrets

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column

__all__ = ["chained", "keys_of_tokens", "numbered", "parents_of"]

_FIRST_BITS = 12
_NONE, _UNKNOWN = -1, -2


@compiled
def _slot(key: np.int64, instance: np.int64, seed: np.int64, bits: int) -> np.int64:
    # The finaliser of splitmix64; the seed is drawn each time, so that no trace can make all keys meet.
    state = np.uint64(key) ^ np.uint64(seed) ^ (np.uint64(instance) * np.uint64(0x9E3779B97F4A7C15))
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((state ^ (state >> np.uint64(31))) >> np.uint64(64 - bits))


@compiled
def _numbered(
    keys: Int64Column, offsets: Int64Column, instances: Int32Column, seed: np.int64
) -> tuple[Int32Column, int]:
    # An open-addressed table from (key, instance) to the number, at most half full.
    bits = _FIRST_BITS
    table = np.full(1 << bits, -1, np.int32)
    unique_keys, owners = np.empty(1 << bits, np.int64), np.empty(1 << bits, np.int32)
    blocks = np.empty(len(keys), np.int32)
    count = 0
    for request in range(len(offsets) - 1):
        instance = instances[request]
        for place in range(offsets[request], offsets[request + 1]):
            key = keys[place]
            slot = _slot(key, instance, seed, bits)
            while table[slot] >= 0 and (unique_keys[table[slot]] != key or owners[table[slot]] != instance):
                slot = (slot + 1) & (len(table) - 1)
            if table[slot] < 0:
                table[slot] = count
                unique_keys[count], owners[count] = key, instance
                count += 1
            blocks[place] = table[slot]
            if 2 * count >= len(table):
                bits += 1
                table = np.full(1 << bits, -1, np.int32)
                unique_keys = np.concatenate((unique_keys, np.empty_like(unique_keys)))
                owners = np.concatenate((owners, np.empty_like(owners)))
                for each in range(count):
                    slot = _slot(unique_keys[each], owners[each], seed, bits)
                    while table[slot] >= 0:
                        slot = (slot + 1) & (len(table) - 1)
                    table[slot] = each
    return blocks, count


def numbered(keys: Int64Column, offsets: Int64Column, instances: Int32Column) -> tuple[Int32Column, int]:
    """Number blocks densely in the order of their first appearance.

    Args:
        keys: [N] of the blocks.
        offsets: [R + 1] request r has `keys[offsets[r] : offsets[r + 1]]`.
        instances: [R] of the requests; equal keys of two instances are two blocks.

    Returns:
        [N] numbers, and how many different ones there are.
    """
    return _numbered(keys, offsets, instances, np.int64(secrets.randbits(63)))


@compiled
def parents_of(
    blocks: Int32Column, offsets: Int64Column, starts_anywhere: BoolColumn, unique: int
) -> tuple[Int32Column, bool]:
    """Return the block before each at its first appearance, and whether it always was that one.

    Args:
        blocks: [N] dense numbers in the order of first appearance.
        offsets: [R + 1] request r has `blocks[offsets[r] : offsets[r + 1]]`.
        starts_anywhere: [R] whether it is not known what comes before the first block of a request, as of a write that
            goes on where another one ended; then a later appearance shows it.
        unique: different blocks.

    Returns:
        [U] smaller numbers, -1 where a block is the first of a chain; and whether the blocks are a prefix tree.
    """
    parents = np.full(unique, _UNKNOWN, np.int32)
    has_one_parent = True
    for request in range(len(offsets) - 1):
        before = np.int32(_UNKNOWN if starts_anywhere[request] else _NONE)
        for place in range(offsets[request], offsets[request + 1]):
            block = blocks[place]
            if parents[block] == _UNKNOWN and before < block:
                parents[block] = before
            elif parents[block] != before and before != _UNKNOWN:
                has_one_parent = False
            before = block
    return np.maximum(parents, np.int32(_NONE)), has_one_parent


@compiled
def _hashed(state: np.uint64, value: np.int64) -> np.uint64:
    # One step of wire.md 5.2; the right shift is that of the signed number.
    shifted = np.uint64(np.int64(state) >> np.int64(32))
    return state ^ (np.uint64(value) + np.uint64(0x9E3779B97F4A7C15) + (state << np.uint64(12)) + shifted)


@compiled
def chained(ids: Int64Column, offsets: Int64Column) -> Int64Column:
    """Return the keys of blocks whose ids name their own content only: the running hash of each request's ids.

    Args:
        ids: [N] of the blocks.
        offsets: [R + 1] request r has `ids[offsets[r] : offsets[r + 1]]`.
    """
    keys = np.empty(len(ids), np.int64)
    for request in range(len(offsets) - 1):
        state = np.uint64(0)
        for place in range(offsets[request], offsets[request + 1]):
            state = _hashed(state, ids[place])
            keys[place] = np.int64(state)
    return keys


@compiled
def keys_of_tokens(tokens: Int64Column, block_tokens: int) -> Int64Column:
    """Return the key of every full block of a prompt, as `kvcm.model.keys.block_keys_from_tokens` does.

    Args:
        tokens: [T] of the prompt.
        block_tokens: tokens per block, > 0.
    """
    keys = np.empty(len(tokens) // block_tokens, np.int64)
    state = np.uint64(0)
    for place in range(len(keys) * block_tokens):
        state = _hashed(state, tokens[place])
        if (place + 1) % block_tokens == 0:
            keys[place // block_tokens] = np.int64(state)
    return keys
