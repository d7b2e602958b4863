"""Lookups as formats with query types tell of them: keys, masks, windows and specs."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.formats.decoding import signed_keys
from kvcm.optimizer.formats.lines import LineError
from kvcm.optimizer.formats.publisher_log import Mask
from kvcm.optimizer.readers.numbering import keys_of_tokens
from kvcm.optimizer.readers.trace_builder import Request, TraceBuilder
from kvcm.optimizer.trace import BoolColumn, QueryMode

__all__ = ["Keyed", "Query", "block_mask_of", "keys_of", "lookup"]

_MODES = {
    "prefix_match": QueryMode.PREFIX,
    "prefix_match_with_mamba": QueryMode.PREFIX,  # the prefix of the full-attention specs
    "batch_get": QueryMode.BATCH,
    "reverse_roll_sw_match": QueryMode.WINDOW,
}


class Keyed(Protocol):
    """What names blocks by keys, or by tokens that keys are computed from."""

    keys: list[int]
    tokens: list[int]


class Query(Keyed, Protocol):
    """What asks for blocks."""

    block_mask: Mask | None
    sw_size: int
    location_spec_names: list[str]


def keys_of(line: Keyed, instance: str, builder: TraceBuilder) -> list[int]:
    """Return the keys of a line, those of its tokens where it has none (wire.md 5.2).

    Raises:
        LineError: a token is none.
        TraceError: it is not known how many tokens a block has.
    """
    if line.keys or not line.tokens:
        return line.keys
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
    """Return the request that reads what is asked for, and writes nothing.

    Args:
        query: what is asked for.
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
