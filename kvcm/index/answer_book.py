"""What a match gets: the answers of one index, composed once and looked up ever after.

Large requests give way to others: an answer that is not known yet is composed from its record, and after a thousand of
those the event loop gets a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from kvcm.index.answers import StorageView, compose_answer
from kvcm.index.backends.alike import Alike
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.node_answers import NodeAnswers
from kvcm.index.search_cache import CacheBudget, SearchCache
from kvcm.model.locations import BlockRecord

__all__ = ["AnswerBook"]

_FIRST_WINDOW = 16  # records a prefix match reads first: nearly always it ends there
_WINDOW = 1024


class AnswerBook:
    """Answers of one index, and what has to be told to keep them right.

    Args:
        backend: where the records live.
        view: which storages can be read.
        budget: bytes of the search cache, shared with other indexes.
    """

    def __init__(self, backend: IndexBackend, view: StorageView, budget: CacheBudget) -> None:
        self._backend = backend
        self._view = view
        self._budget = budget
        self._cache = SearchCache(view, budget, compose_answer, is_bounded=backend.is_shared)
        self._on_nodes = NodeAnswers(backend, budget)

    async def answers(self, keys: Sequence[int], *, stop_at_miss: bool, view: StorageView | None) -> list[bytes | None]:
        """Do `MetaIndex.answers`."""
        if view is not None and view is not self._view:
            return await self._on_nodes.answers(keys, view, stop_at_miss=stop_at_miss)
        found = self._cache.lookup(keys)
        position, asked = -1 if all(found) else found.index(None), 0  # no answer is empty; `all` is three times as fast
        window = self._first_window(len(keys), stop_at_miss=stop_at_miss)
        self._budget.hits += len(found) - (found.count(None) if position >= 0 else 0)
        while position >= 0:
            # Unknown to the cache: a miss nearly always. A prefix match asks for a few records before it asks for many.
            unknown = list(islice((i for i in range(position, len(found)) if found[i] is None), window))
            for i, answer in zip(unknown, await self._fill([keys[i] for i in unknown]), strict=True):
                found[i] = answer
            asked, end = asked + len(unknown), unknown[-1] + 1
            if stop_at_miss and (miss := _next_none(found, position, end)) >= 0:
                del found[miss:]
                break
            position = _next_none(found, end, len(found))
            if position >= 0 and window >= _WINDOW:
                await asyncio.sleep(0)
            window = max(window, _WINDOW)
        self._budget.misses += asked
        return found

    def _first_window(self, count: int, *, stop_at_miss: bool) -> int:
        if stop_at_miss:
            return _FIRST_WINDOW
        return count if self._backend.awaits else _WINDOW  # a store is asked in few calls, and gives way itself

    async def _fill(self, keys: Sequence[int]) -> list[bytes | None]:
        if not self._backend.awaits:
            return list(map(self._cache.note, keys, await self._backend.get_many(keys)))
        read = self._cache.begin(keys)
        try:
            return self._cache.end(read, await self._backend.get_many(keys))
        except BaseException:
            self._cache.abandon(read)
            raise

    def forget(self, keys: Sequence[int]) -> None:
        """The records of these keys changed, or may have."""
        self._cache.forget(keys)
        self._on_nodes.forget(keys)

    def clear(self) -> None:
        """Any record may have changed."""
        self._cache.clear()
        self._on_nodes.clear()

    def stored(self, keys: Sequence[int], records: Sequence[BlockRecord | None]) -> None:
        """These are the records of these keys right now, and nobody else changes them."""
        self._on_nodes.forget(keys)
        self._cache.note_all(keys, records)

    def served(self, blocks: Alike) -> None:
        """These blocks serve right now: `stored` for all of them at once."""
        self._on_nodes.forget(blocks.keys)
        only = BlockRecord(None, 0, (blocks.location,))
        if compose_answer(only, self._view) is None:
            self._cache.forget(blocks.keys)
        else:  # the answer of a block with one location is its chunk
            self._cache.note_answers(blocks.keys, blocks.chunks)


def _next_none(answers: list[bytes | None], start: int, end: int) -> int:
    try:
        return answers.index(None, start, end)
    except ValueError:
        return -1
