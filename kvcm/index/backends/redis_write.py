"""A change of blocks of one shard, as the script of the Redis backend wants it (layout: redis.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from kvcm.index.backends.backend import Change
from kvcm.index.backends.redis_keys import KEY, ShardKeys
from kvcm.index.backends.redis_order import new_score
from kvcm.index.backends.redis_scripts import REWRITE, WRITE
from kvcm.index.backends.tally import Sum, is_leaving, takes_the_same
from kvcm.index.codec import STAMP_SIZE, encode_record
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place
from kvcm.model.storages import StorageType
from kvcm.store.redis.script import ScriptCall

__all__ = ["ShardWrite"]

_ABSENT = bytes(STAMP_SIZE)
_LEAVING = Sum(None, is_deleting=True)
_UNKNOWN = b"\xff" * STAMP_SIZE  # no write has this stamp

_encode = msgspec.msgpack.Encoder().encode


class ShardWrite:
    """Changes of one shard as the script wants them.

    Attributes:
        changes: in the order of the script's indexes, which count from 1.
        sums: what every change adds to the sums of the shard.
        call: of the script.
    """

    def __init__(self, shard: ShardKeys, changes: Sequence[Change]) -> None:
        self.changes = changes
        self.sums = _Sums()
        self._scores: list[int | bool] = []
        self._dues: list[float | bool] = []
        self._leaving: list[int] = []
        self._coming: list[int] = []
        self._parents_left: list[bytes] = []
        self._parents_joined: list[bytes] = []
        for index, (_, old, new, _) in enumerate(changes, 1):
            self._scores.append(new_score(old, new))
            self._dues.append(_due_order(old, new))
            self._relate(index, old, new)
            self.sums.count(index, old, new)
        is_growth = any(old is None and new is not None for _, old, new, _ in changes)
        self.call = ScriptCall(WRITE if is_growth else REWRITE, self._keys(shard), self._arguments())

    def _keys(self, shard: ShardKeys) -> list[bytes]:
        blocks = shard.blocks
        return [*shard[1:], *(blocks + KEY.pack(change.key) for change in self.changes)]

    def _arguments(self) -> list[bytes]:
        relations = (self._leaving, self._coming)
        packed = _encode((self._scores, self._dues, *relations, self.sums.fields, self.sums.triples))
        parents = (b"".join(self._parents_left), b"".join(self._parents_joined))
        records = (b"" if change.new is None else encode_record(change.new) for change in self.changes)
        return [b"".join([_stamp(change.old) for change in self.changes]), packed, *parents, *records]

    def _relate(self, index: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        before = old.parent if old is not None else None
        after = new.parent if new is not None else None
        if before == after:
            return
        if before is not None:
            self._leaving.append(index)
            self._parents_left.append(KEY.pack(before))
        if after is not None:
            self._coming.append(index)
            self._parents_joined.append(KEY.pack(after))


class _Sums:
    """What the changes of one call add to the sums that the shard keeps.

    Attributes:
        fields: names of the sums.
        triples: index of a change, number of a field, bytes or blocks; again and again. Both count from 1.
    """

    def __init__(self) -> None:
        self._sums = [_LEAVING]
        self.fields = [_LEAVING.field]
        self.triples: list[int] = []
        self._first_fields: dict[Place, int] = {}  # the one after it is of what is being deleted
        self._storage: str | None = None
        self._type: StorageType | None = None
        self._field = 0

    def count(self, index: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        """Count what a change adds."""
        before = old[2] if old is not None else ()
        after = new[2] if new is not None else ()
        if takes_the_same(before, after):
            return
        for location in after:
            self._add(index, location, location[6])
        for location in before:
            self._add(index, location, -location[6])
        leaving = (new is not None and is_leaving(new)) - (old is not None and is_leaving(old))
        if leaving:
            self.triples += (index, 1, leaving)

    def totals(self, losers: Collection[int]) -> dict[Sum, int]:
        """Return what all changes but some add together."""
        totals = [0] * len(self._sums)
        triples = self.triples
        for index, field, size in zip(triples[::3], triples[1::3], triples[2::3], strict=True):
            if index not in losers:
                totals[field - 1] += size
        return {of: total for of, total in zip(self._sums, totals, strict=True) if total}

    def _add(self, index: int, location: Location, size_bytes: int) -> None:
        if location[1] is not self._storage or location[2] is not self._type:
            self._turn_to(location)
        self.triples += (index, self._field, size_bytes)
        if location[3] is LocationStatus.DELETING:
            self.triples += (index, self._field + 1, size_bytes)

    def _turn_to(self, location: Location) -> None:
        # As in tally.py: blocks in a row mostly lie in one place, and hashing it is what costs.
        place = location.place
        if place not in self._first_fields:
            self._first_fields[place] = len(self._sums) + 1
            self._sums += (Sum(place, is_deleting=False), Sum(place, is_deleting=True))
            self.fields += (of.field for of in self._sums[-2:])
        self._storage, self._type, self._field = location[1], location[2], self._first_fields[place]


def _stamp(old: BlockRecord | None) -> bytes:
    return _ABSENT if old is None else getattr(old, "stamp", b"") or _UNKNOWN


def _due_order(old: BlockRecord | None, new: BlockRecord | None) -> float | bool:
    """Return the due time to set, True to clear it, False to leave it."""
    due = new.due if new is not None else None
    if due is not None:
        return float(due)
    return old is not None and old.due is not None
