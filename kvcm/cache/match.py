"""The match modes: which blocks of a request can be read, and where (wire.md 5.3, 14).

The path of a plain prefix match is: keys → answers of the index → the answers before the first miss. No per-block
object, no per-block await. Masks are honoured by every mode (design.md decision 13).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar, cast

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.index.answers import StorageView
from kvcm.index.chunk_memo import ChunkMemo
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.telemetry.stages import note_stage, staged

__all__ = ["Match", "MatchMode", "MatchQuery", "match"]

Value = TypeVar("Value", bytes, frozenset[str])


class MatchMode(IntEnum):
    """Query types of the wire protocol."""

    BATCH_GET = 1
    PREFIX_MATCH = 2
    REVERSE_ROLL_SW_MATCH = 3
    PREFIX_MATCH_WITH_MAMBA = 4


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """What a reader asks for.

    Attributes:
        mode: how keys are matched.
        keys: block keys in request order.
        mask: positions to leave out.
        window: keys per window of the sliding-window match.
        spec_names: specs to return; empty for all.
        node_id: the reader's node, whose memory pools it can read; "" for none.
        requires_specs: whether a block counts as found only when it has all of `spec_names`.
    """

    mode: MatchMode
    keys: Sequence[int]
    mask: BlockMask = NO_MASK
    window: int = 0
    spec_names: frozenset[str] = frozenset()
    node_id: str = ""
    requires_specs: bool = False

    @property
    def needed(self) -> frozenset[str]:
        """Specs without which a block does not count as found."""
        return self.spec_names if self.requires_specs else frozenset()


@dataclass(frozen=True, slots=True)
class Match:
    """What was found.

    Attributes:
        chunks: encoded locations, as field 2 of an answer.
        keys: keys that were hit, in request order.
    """

    chunks: Sequence[bytes]
    keys: Sequence[int]


@staged("match")
async def match(cache: InstanceCache, query: MatchQuery, view: StorageView | None = None) -> Match:
    """Answer a query.

    Args:
        cache: the instance.
        query: what is asked for.
        view: which storages the reader can read; None is those that everybody can.

    Raises:
        InvalidArgumentError: the window does not fit the keys.
    """
    found = await _MODES[query.mode](cache, query, view)
    note_stage(keys=len(query.keys), hits=len(found.keys))
    only = cache.filter_of(query.spec_names) if query.spec_names else None
    return found if only is None else Match(await _mapped(cache, only, found.chunks), found.keys)


async def _mapped(cache: InstanceCache, memo: ChunkMemo[Value], chunks: Sequence[bytes]) -> list[Value]:
    """Return what a memo makes of locations, giving way to others as long as it has to compute that."""
    values: list[Value] = []
    for page in pages(chunks, cache.page_keys):
        computed = memo.computed
        values += memo.map(page)
        if memo.computed != computed and len(page) < len(chunks):
            await asyncio.sleep(0)
    return values


async def _prefix(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    keys = _unmasked_keys(query)
    answers = cast("list[bytes]", await cache.index.answers(keys, stop_at_miss=True, view=view))
    if query.needed:  # it ends before the first None already
        lacking = [not has for has in await _have(cache, query.needed, answers)]
        del answers[lacking.index(True) if True in lacking else len(answers) :]
    return Match(answers, keys[: len(answers)])


async def _have(cache: InstanceCache, needed: frozenset[str], chunks: Sequence[bytes]) -> list[bool]:
    """Return for each location whether it has all of these specs."""
    return [needed <= present for present in await _mapped(cache, cache.present, chunks)]


async def _prefix_with_mamba(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    """The longest prefix with all full-attention specs whose last block has the linear-attention state too."""
    prefix = await _prefix(cache, query, view)
    length = 0
    for position, present in enumerate(await _mapped(cache, cache.present, prefix.chunks), start=1):
        if not cache.full_specs <= present:
            break
        if cache.linear_specs <= present:
            length = position
    return Match(prefix.chunks[:length], prefix.keys[:length])


async def _batch(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    answers = await _answers_in_place(cache, query, view)
    hits = [key for key, answer in zip(query.keys, answers, strict=True) if answer is not None]
    return Match([cache.placeholder if answer is None else answer for answer in answers], hits)


async def _window(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> Match:
    """The right-most window of consecutive hits; every other position is a placeholder."""
    count, window = len(query.keys), query.window
    if not 1 <= window <= count:
        raise InvalidArgumentError(f"sw_size is {window}, must be from 1 to the number of keys, {count}")
    answers = await _answers_in_place(cache, query, view)
    start = _rightmost_run(answers, window)
    chunks: list[bytes] = [cache.placeholder] * count
    if start is None:
        return Match(chunks, ())
    chunks[start : start + window] = [answer for answer in answers[start : start + window] if answer is not None]
    return Match(chunks, query.keys[start : start + window])


def _rightmost_run(answers: Sequence[bytes | None], length: int) -> int | None:
    run = 0
    for position in range(len(answers) - 1, -1, -1):
        run = run + 1 if answers[position] is not None else 0
        if run == length:
            return position
    return None


_MODES = {
    MatchMode.BATCH_GET: _batch,
    MatchMode.PREFIX_MATCH: _prefix,
    MatchMode.REVERSE_ROLL_SW_MATCH: _window,
    MatchMode.PREFIX_MATCH_WITH_MAMBA: _prefix_with_mamba,
}


def _unmasked_keys(query: MatchQuery) -> Sequence[int]:
    positions = query.mask.unmasked(len(query.keys))
    if len(positions) == len(query.keys):
        return query.keys
    return [query.keys[i] for i in positions]


async def _answers_in_place(cache: InstanceCache, query: MatchQuery, view: StorageView | None) -> list[bytes | None]:
    """Answers at the positions of the request; None where the key is missing or masked."""
    positions = query.mask.unmasked(len(query.keys))
    is_masked = len(positions) < len(query.keys)
    keys = [query.keys[i] for i in positions] if is_masked else query.keys
    found = await cache.index.answers(keys, view=view)
    if query.needed:
        there = [answer for answer in found if answer is not None]
        has = iter(await _have(cache, query.needed, there))
        found = [answer if answer is not None and next(has) else None for answer in found]
    if not is_masked:
        return found
    answers: list[bytes | None] = [None] * len(query.keys)
    for position, answer in zip(positions, found, strict=True):
        answers[position] = answer
    return answers
