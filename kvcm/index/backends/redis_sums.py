"""What one manager knows of the sums that shards of a Redis keep (layout: redis.py).

Sums are asked for now and then, and in between this manager adds what it writes itself. A write may be on its way while
the sums are asked for, and nobody can tell from the time alone whether they hold it already: counted twice it looks
like usage that is not there, and blocks are evicted for it. So every write takes a turn of its shard, a number that
grows by one: it is in the sums exactly if its turn is not after theirs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvcm.index.backends.redis_keys import ShardKeys
from kvcm.index.backends.tally import Sum
from kvcm.model.errors import KvcmError
from kvcm.model.locations import Place
from kvcm.store.redis.script import Script, ScriptCall

__all__ = ["SharedSums"]

_TOTALS: Final = Script("""
-- KEYS: access order, usage. Returns how many blocks there are, and fields and values of the sums, at one moment.
return {redis.call('ZCARD', KEYS[1]), redis.call('HGETALL', KEYS[2])}
""")

_TURN_FIELD: Final = b"#"

Run = Callable[[Sequence[ScriptCall]], Awaitable[Sequence[Any]]]


class _Written(NamedTuple):
    """What a write of this manager changed."""

    shard: int
    turn: int
    sums: Mapping[Sum, int]
    keys: int


class SharedSums:
    """Sums over all shards of an instance, as last heard, with what this manager wrote since.

    Attributes:
        key_count: blocks.
        usage: bytes by place.
        deleting: those of them that are being deleted.
        deleting_keys: blocks of which everything is being deleted.

    Args:
        shards: names of their keys.
    """

    def __init__(self, shards: Sequence[ShardKeys]) -> None:
        self._calls = [ScriptCall(_TOTALS, [shard.order, shard.usage]) for shard in shards]
        self._one_at_a_time = asyncio.Lock()
        self._asked = self._told = 0  # how often, and the number of the last time that was answered or failed
        self._trouble: KvcmError | None = None  # of that time
        self._during: list[_Written] | None = None  # told while the sums are being asked for
        self.clear()

    def clear(self) -> None:
        """Know of nothing: there are no blocks."""
        self._turns = [0] * len(self._calls)  # of the sums that were heard last
        self.key_count = self.deleting_keys = 0
        self.usage: Counter[Place] = Counter()
        self.deleting: Counter[Place] = Counter()

    async def refresh(self, run: Run) -> None:
        """Ask for the sums. All who come while they are asked for share what is asked next, or that it fails: behind a
        store that does not answer there is no queue.

        Args:
            run: runs scripts on the store, and returns their answers in order.

        Raises:
            KvcmError: of `run`.
        """
        came = self._asked
        async with self._one_at_a_time:  # of two answers the older one could come last
            if self._told <= came:
                await self._ask(run)
            elif self._trouble is not None:
                raise self._trouble

    async def _ask(self, run: Run) -> None:
        self._asked += 1
        during: list[_Written] = []
        self._during = during
        try:
            answers = await run(self._calls)
        except KvcmError as error:
            self._told, self._trouble = self._asked, error
            raise
        finally:
            self._during = None
        self._told, self._trouble = self._asked, None
        self.clear()
        for shard, (keys, fields) in enumerate(answers):
            self._hear(shard, keys, dict(zip(fields[::2], map(int, fields[1::2]), strict=True)))
        for written in during:
            self._count(written)

    def note(self, shard: int, turn: int, sums: Mapping[Sum, int], keys: int) -> None:
        """Count what this manager wrote.

        Args:
            shard: number of the shard.
            turn: of the write.
            sums: what it adds.
            keys: blocks that it adds.
        """
        written = _Written(shard, turn, sums, keys)
        self._count(written)
        if self._during is not None:
            self._during.append(written)

    def _hear(self, shard: int, keys: int, sums: dict[bytes, int]) -> None:
        self._turns[shard] = sums.pop(_TURN_FIELD, 0)
        self.key_count += keys
        for field, size in sums.items():
            self._add(Sum.parse(field.decode()), size)

    def _count(self, written: _Written) -> None:
        if written.turn <= self._turns[written.shard]:
            return  # what was heard holds it
        self.key_count += written.keys
        for of, size in written.sums.items():
            self._add(of, size)

    def _add(self, of: Sum | None, size: int) -> None:
        if of is None:
            return  # of another release
        if of.place is None:
            self.deleting_keys += size
        else:
            (self.deleting if of.is_deleting else self.usage)[of.place] += size
