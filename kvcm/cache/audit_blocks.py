"""Verification of one instance's blocks: records against everything that is derived from them, usage, and writers.

Other managers may change the store meanwhile, and not all parts of a block can be read at one moment. So what looks
wrong is a suspect only; it is a finding when the same is wrong after a pause. Usage of a shard is compared with a
recount during which it did not change, twice with the same result. Memory: one page of blocks, the suspects (those of
one page above `_MOST_SUSPECTS` at most: then they are judged at once), up to `_MOST_LEFT` that were found wrong, and
for a shard whose usage is suspect the keys of that shard.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvcm.cache.audit_report import AuditReport, Finding, Repair
from kvcm.cache.endings import SessionEndings
from kvcm.cache.extents import ExtentPart, Owner
from kvcm.cache.instance_cache import InstanceCache
from kvcm.index.backends.audited import AuditedIndex, BlockView, Claims, faults
from kvcm.index.backends.tally import PlaceTally, Sum, sums_of
from kvcm.index.shards import shard_of
from kvcm.model.clock import Clock
from kvcm.model.locations import Location, LocationStatus
from kvcm.store.store import Table

__all__ = ["BlockAudit", "Pause"]

Pause = Callable[[], Awaitable[None]]
"""Waits until what was going on is over."""

_MOST_SUSPECTS: Final = 10_000
_MOST_LEFT: Final = 100_000  # beyond, a block may be counted as often as ways lead to it
_OVERDUE_SECONDS: Final = 10.0  # whoever leads looks twice a second, and takes over after five
_TRIES: Final = 4
_RESTART = "the next start of the manager makes it anew from the records"


class _Wrong(NamedTuple):
    what: str
    writer: str | None = None  # session that has to be ended, None for derived things


class _Suspect(NamedTuple):
    parents: frozenset[int]
    wrong: frozenset[_Wrong]


class BlockAudit:
    """The blocks of one instance.

    Args:
        cache: the instance; changed only by repairs.
        audited: the same records with all that is derived from them.
        sessions: the documents of write sessions.
        endings: roll writers back.
        clock: time source.
        pause: between two looks at a suspect.
        repair: what may be changed.
        report: takes findings.
    """

    def __init__(
        self,
        cache: InstanceCache,
        audited: AuditedIndex,
        sessions: Table,
        endings: SessionEndings,
        clock: Clock,
        pause: Pause,
        repair: Repair,
        report: AuditReport,
    ) -> None:
        self.cache = cache
        self._audited = audited
        self._sessions = sessions
        self._endings = endings
        self._clock = clock
        self._pause = pause
        self._repair = repair
        self._report = report
        self._suspects: defaultdict[int, dict[int, _Suspect]] = defaultdict(dict)
        self._suspect_count = 0
        # What was found and is not mended: another way to the same block may lead there after it was judged.
        self._left: dict[tuple[int, int], frozenset[_Wrong]] = {}

    async def run(self, extents: ExtentPart, progress: Callable[[int], None]) -> None:
        """Look at every block.

        Args:
            extents: takes what the blocks have of storages.
            progress: told the number of blocks of each page.
        """
        wrong_sums = []
        for shard in self._audited.shards:
            counted, records = await self._look_at_listed(shard, extents, progress)
            async for claims in self._audited.unlisted(shard):
                await self.inspect(shard, claims)
            self._report.looked_at["records"] += records
            if counted != await self._audited.usage(shard):
                wrong_sums.append(shard)
        await self.judge()
        await self._judge_usage(wrong_sums)
        await self._check_key_count()

    async def views(self, keys: Sequence[int], shard: int | None = None) -> list[BlockView]:
        """Return what there is of some blocks of one shard, which is that of the first when it is not given."""
        if shard is None:
            shard = shard_of(keys[0], len(self._audited.shards))
        return await self._audited.look(shard, dict.fromkeys(keys, frozenset()))

    async def gather(self, extents: ExtentPart) -> None:
        """Add what the blocks have of storages, and look at nothing else."""
        uid = self.cache.placement.uid
        for shard in self._audited.shards:
            async for claims in self._audited.listed(shard):
                for view in await self._audited.look(shard, claims):
                    if view.record is not None:
                        extents.add(Owner(uid, view.key), view.record)

    async def inspect(self, shard: int, claims: Claims) -> list[BlockView]:
        """Look at blocks, and remember those that look wrong."""
        views = await self._audited.look(shard, claims)
        for key, wrong in (await self._wrong(views)).items():
            self._suspect(shard, key, _Suspect(claims[key], frozenset(wrong)))
        if self._suspect_count >= _MOST_SUSPECTS:
            await self.judge()
        return views

    async def judge(self) -> None:
        """Look at the suspects again, after a pause; report and mend those that still are wrong."""
        suspects, self._suspects, self._suspect_count = self._suspects, defaultdict(dict), 0
        if not suspects:
            return
        await self._pause()
        for shard, of_shard in suspects.items():
            claims = {key: suspect.parents for key, suspect in of_shard.items()}
            views = await self._audited.look(shard, claims)
            again = await self._wrong(views)
            for view in views:
                wrong = of_shard[view.key].wrong & frozenset(again.get(view.key, ()))
                wrong -= self._left.get((shard, view.key), frozenset())
                if wrong:
                    await self._found(shard, view, sorted(wrong, key=lambda each: each.what))

    def _suspect(self, shard: int, key: int, suspect: _Suspect) -> None:
        known = self._suspects[shard].get(key)
        if known is None:
            self._suspect_count += 1
        else:
            suspect = _Suspect(known.parents | suspect.parents, known.wrong | suspect.wrong)
        self._suspects[shard][key] = suspect

    async def _look_at_listed(
        self, shard: int, extents: ExtentPart, progress: Callable[[int], None]
    ) -> tuple[dict[Sum, int], int]:
        counted = PlaceTally()
        records = 0
        async for claims in self._audited.listed(shard):
            for view in await self.inspect(shard, claims):
                if view.record is None:
                    continue
                records += 1
                counted.change(None, view.record)
                damage = extents.add(Owner(self.cache.placement.uid, view.key), view.record)
                if damage:
                    self._report.add(Finding("uri", self._where(view.key), damage, "none: remove the block"))
            progress(len(claims))
        return sums_of(counted.used, counted.deleting, counted.deleting_blocks), records

    async def _wrong(self, views: Sequence[BlockView]) -> dict[int, list[_Wrong]]:
        open_sessions: dict[str, bool] = {}
        wrong: dict[int, list[_Wrong]] = {}
        for view in views:
            found = list(map(_Wrong, faults(view)))
            for location in _writing(view):
                what = await self._wrong_of_writer(location, open_sessions)
                if what:
                    found.append(_Wrong(f"location {location.id} {what}", location.session_id))
            if found:
                wrong[view.key] = found
        return wrong

    async def _wrong_of_writer(self, location: Location, open_sessions: dict[str, bool]) -> str:
        if location.deadline + _OVERDUE_SECONDS < self._clock.now():
            return "is still being written, past the deadline of its session"
        name = location.session_id
        if name not in open_sessions:
            open_sessions[name] = await self._sessions.get(name) is not None
        return "" if open_sessions[name] else "is being written by a session that is gone"

    async def _found(self, shard: int, view: BlockView, wrong: Sequence[_Wrong]) -> None:
        if view.damage:
            repair = "with --drop-unreadable forgets the block; its bytes are left to the scrub"
            is_mended = await self._drop(shard, view)
        else:
            repair = self._repair_text(wrong)
            is_mended = self._repair.mend and await self._mend(shard, view, wrong)
        if not is_mended and len(self._left) < _MOST_LEFT:
            self._left[shard, view.key] = self._left.get((shard, view.key), frozenset()) | frozenset(wrong)
        what = "; ".join(each.what for each in wrong)
        self._report.add(Finding("block", self._where(view.key), what, repair, is_mended))

    def _repair_text(self, wrong: Sequence[_Wrong]) -> str:
        texts = ["rolls the writer back"] if any(each.writer is not None for each in wrong) else []
        if any(each.writer is None for each in wrong):
            texts.append("makes the derived keys anew from the record" if self._audited.can_mend else _RESTART)
        return ", ".join(texts)

    async def _mend(self, shard: int, view: BlockView, wrong: Sequence[_Wrong]) -> bool:
        writers = {each.writer for each in wrong if each.writer is not None}
        is_mended = all(each.writer is not None for each in wrong) or await self._audited.mend(shard, view)
        if is_mended and writers:
            await self._endings.end_writers(self.cache, {session_id: [view.key] for session_id in writers})
        return is_mended

    async def _drop(self, shard: int, view: BlockView) -> bool:
        if not (self._repair.mend and self._repair.drop_unreadable):
            return False
        if not await self._audited.drop_record(shard, view):
            return False
        (left,) = await self._audited.look(shard, {view.key: view.parents})
        return await self._audited.mend(shard, left)

    # ── usage (invariant 4) ──

    async def _judge_usage(self, shards: Sequence[int]) -> None:
        """Recount shards until each was found right, or wrong by the same twice."""
        last: dict[int, Mapping[Sum, int] | None] = dict.fromkeys(shards)
        for attempt in range(_TRIES):
            if not last:
                return
            if attempt:
                await self._pause()
            for shard in list(last):
                difference = await self._usage_difference(shard)
                if difference and difference == last[shard]:
                    await self._found_usage(shard, difference)
                if difference is not None and (not difference or difference == last[shard]):
                    del last[shard]
                else:
                    last[shard] = difference
        for shard in last:
            self._report.unsettled.append(f"usage of {self._title}, shard {shard}, which changes all the time")

    async def _usage_difference(self, shard: int) -> dict[Sum, int] | None:
        """Return what is missing in the kept sums; None if they changed meanwhile."""
        kept = await self._audited.usage(shard)
        counted = PlaceTally()
        seen: set[int] = set()
        async for claims in self._audited.listed(shard):
            fresh = [key for key in claims if key not in seen]
            seen.update(fresh)
            for view in await self.views(fresh, shard):
                counted.change(None, view.record)
        if kept != await self._audited.usage(shard):
            return None
        difference = Counter(sums_of(counted.used, counted.deleting, counted.deleting_blocks))
        difference.subtract(kept)
        return {of: size for of, size in difference.items() if size}

    async def _found_usage(self, shard: int, difference: Mapping[Sum, int]) -> None:
        mended = self._repair.mend and self._audited.can_mend
        if mended:
            await self._audited.add_usage(shard, difference)
        what = ", ".join(f"{-size:+} {of}" for of, size in sorted(difference.items(), key=str))
        repair = "puts the recount in its place" if self._audited.can_mend else _RESTART
        where = f"{self._title}, shard {shard}"
        self._report.add(Finding("usage", where, f"the kept usage differs from the records: {what}", repair, mended))

    async def _check_key_count(self) -> None:
        """Where nothing else is stored than the records, their number is kept apart; elsewhere it is that of a set."""
        if self._audited.can_mend:
            return
        counted = 0
        async for claims in self._audited.listed(0):
            counted += len(claims)
        if counted != self.cache.index.key_count:
            what = f"{self.cache.index.key_count} blocks are counted, there are {counted}"
            self._report.add(Finding("usage", self._title, what, _RESTART))

    @property
    def _title(self) -> str:
        return f"instance {self.cache.instance.instance_id!r} (registration {self.cache.placement.uid})"

    def _where(self, key: int) -> str:
        return f"block {key} of {self._title}"


def _writing(view: BlockView) -> list[Location]:
    locations = view.record.locations if view.record is not None else ()
    return [location for location in locations if location.status is LocationStatus.WRITING]
