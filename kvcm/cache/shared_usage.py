"""Usage of groups and storages while several managers work on one store.

What the indexes of this manager report is gathered and sent in batches, many times a second; a reservation covers what
is not sent yet, so limits hold all the same (see `kvcm.store.redis.quota` for the protocol).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from kvcm.cache.accounts import (
    OVERALL,
    Census,
    bookings,
    bytes_by_group,
    bytes_by_place,
    counted,
    fields_by_account,
    group_account,
    keys_field,
    storage_account,
)
from kvcm.cache.limits import Limits
from kvcm.cache.usage import Reservation, Room, Taken
from kvcm.index.meta_index import MetaIndex, UsageListener, UsageNote
from kvcm.model.errors import KvcmError
from kvcm.model.locations import Place
from kvcm.store.redis.quota import Counters, QuotaCounters, Report

__all__ = ["SharedLedger"]

_log = structlog.get_logger("kvcm.cache")


@dataclass(slots=True)
class _Outbox:
    """What this manager has to report to one account. What shrank did so in `epoch` or later."""

    epoch: int = 0
    grown: Counter[str] = field(default_factory=Counter)
    shrunk: Counter[str] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.grown or self.shrunk or self.done)


class SharedLedger:
    """Counts in a store that all managers share.

    Args:
        counters: the shared counters.
        node_id: id of this manager, new with every start.
    """

    def __init__(self, counters: QuotaCounters, node_id: str) -> None:
        self._counters = counters
        self._node_id = node_id
        self._heard: dict[str, Counters] = {}
        self._epochs: Mapping[
            str, int
        ] = {}  # replaced, never changed: a change of usage keeps the one of its beginning
        self._outboxes: defaultdict[str, _Outbox] = defaultdict(_Outbox)
        self._sending: dict[str, Report] = {}
        self._numbers: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self.refusals: Counter[str] = Counter()

    def listener(self, group_name: str, uid: int) -> UsageListener:
        """Return the listener for the index of an instance of a group."""

        def begin() -> UsageNote:
            # Before the store is asked: what shrinks from now on happens in these epochs or later ones.
            epochs = self._epochs

            def note(difference: Mapping[Place, int], keys: int) -> None:
                for account, changes in fields_by_account(group_name, uid, difference, keys).items():
                    self._note(account, epochs.get(account, 0), changes)

            return note

        return begin

    def _note(self, account: str, epoch: int, changes: Mapping[str, int]) -> None:
        outbox = self._outboxes[account]
        if any(change < 0 for change in changes.values()):
            outbox.epoch = min(outbox.epoch, epoch) if outbox.shrunk else epoch
        for name, change in changes.items():
            if change:
                (outbox.grown if change > 0 else outbox.shrunk)[name] += change
        self._wake.set()

    def used(self, group_name: str) -> Mapping[Place, int]:
        """Return the bytes that a group uses, by place, as last heard."""
        heard = self._heard.get(group_account(group_name))
        return bytes_by_place(heard.used) if heard is not None else {}

    def held(self, group_name: str) -> Mapping[Place, int]:
        """Return the bytes that a group uses or has reserved, by place, as last heard. What was stored a moment ago and
        is not reported yet is still reserved."""
        return bytes_by_place(self._held_in(group_account(group_name)))

    def held_on(self, storage: str) -> Mapping[str, int]:
        """Return the same of a storage, by group. Writes hear of one that has a capacity."""
        return bytes_by_group(self._held_in(storage_account(storage)))

    def held_by_group(self) -> Mapping[str, int]:
        """Return the same in total, by group. Writes hear of it that draw from a global quota."""
        return bytes_by_group(self._held_in(OVERALL))

    def _held_in(self, account: str) -> Mapping[str, int]:
        heard = self._heard.get(account)
        return _taken(heard) if heard is not None else {}

    async def hear(self, group_name: str, storages: Collection[str] = ()) -> None:
        """Ask the store what a group uses, and what all groups use on some storages."""
        await self.refresh([group_account(group_name), *map(storage_account, storages)])

    async def hear_groups(self, group_names: Collection[str]) -> None:
        """Ask the store what groups use, all at once."""
        await self.refresh([group_account(name) for name in group_names])

    async def refresh(self, accounts: Collection[str]) -> dict[str, Counters]:
        """Hear what stands in accounts."""
        answers = await self._counters.read_many(list(accounts))
        return {account: self._hear(account, heard) for account, heard in zip(accounts, answers, strict=True)}

    async def room(self, limits: Limits, uid: int, index: MetaIndex) -> Room:
        """Return what an instance of a group may still take right now."""
        own = group_account(limits.group.name)
        limited = {name: storage_account(name) for name in limits.group.storage_candidates if name in limits.storages}
        overall = () if limits.shared is None else (OVERALL,)
        heard = await self.refresh([own, *limited.values(), *overall])
        fields = {account: _taken(counters) for account, counters in heard.items()}
        taken = Taken(
            bytes_by_place(fields[own]),
            {name: bytes_by_group(fields[account]) for name, account in limited.items()},
            bytes_by_group(fields.get(OVERALL, {})),
        )
        return Room(limits, taken, max(0, index.max_key_count - fields[own][keys_field(uid)]))

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        """Take what was planned. False: it does not fit any more; nothing is taken then."""
        asked: list[str] = []
        try:
            for account, demands, limits in bookings(reservation, index.max_key_count):
                asked.append(account)
                fits, heard = await self._counters.reserve(
                    account, reservation.owner, reservation.deadline, demands, limits
                )
                self._hear(account, heard)
                if not fits:
                    await asyncio.gather(*(self._counters.release(each, reservation.owner) for each in asked[:-1]))
                    return False
        except BaseException:
            self._end(reservation.owner, asked)  # nothing will be stored under it
            raise
        return True

    async def release(self, reservation: Reservation, index: MetaIndex) -> None:
        """Give back what was reserved and nothing was stored of, before more is reserved; `settle` follows."""
        made = bookings(reservation, index.max_key_count)
        await asyncio.gather(*(self._counters.release(account, reservation.owner) for account, _, _ in made))

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        """End a reservation, together with the report of what was stored under it."""
        self._end(reservation.owner, (account for account, _, _ in bookings(reservation, index.max_key_count)))

    def _end(self, owner: str, accounts: Iterable[str]) -> None:
        for account in accounts:
            self._outboxes[account].done.append(owner)
        self._wake.set()

    async def run(self, interval_seconds: float = 0.02) -> None:
        """Send reports as they come, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(interval_seconds)
            self._wake.clear()
            try:
                await self.flush()
            except KvcmError as error:  # nothing is lost: the same report is sent again
                _log.warning("usage_not_reported", reason=str(error))
                self._wake.set()
                await asyncio.sleep(1)

    async def flush(self) -> None:
        """Send everything that is to be reported.

        Raises:
            StorageIOError: the store cannot be asked; what was not heard is sent again next time.
        """
        accounts = sorted({*self._outboxes, *self._sending})
        outcomes = await asyncio.gather(*map(self._flush, accounts), return_exceptions=True)
        for outcome in outcomes:  # where one node of a cluster is away, the others have been told
            if isinstance(outcome, BaseException):
                raise outcome

    async def _flush(self, account: str) -> None:
        while self._next_report(account):
            heard = await self._counters.report(account, self._sending[account])
            self._sending.pop(account, None)
            self._hear(account, heard)

    def _next_report(self, account: str) -> bool:
        if account in self._sending:
            return True  # perhaps it was heard and the answer lost: the same number is sent again
        outbox = self._outboxes.pop(account, None)
        if outbox is None or outbox.is_empty:
            return False
        self._numbers[account] += 1
        number = self._numbers[account]
        self._sending[account] = Report(
            self._node_id, number, outbox.epoch, dict(outbox.grown), dict(outbox.shrunk), tuple(outbox.done)
        )
        return True

    def _hear(self, account: str, counters: Counters) -> Counters:
        self._heard[account] = counters
        if self._epochs.get(account, 0) != counters.epoch:
            self._epochs = {**self._epochs, account: counters.epoch}
        return counters

    async def overdue(self, accounts: Collection[str], now: float) -> frozenset[str]:
        """Return the accounts with a reservation whose deadline has passed."""
        return await self._counters.overdue(list(accounts), now)

    async def recount(
        self, accounts: Collection[str], census: Callable[[], Awaitable[Census]], now: float
    ) -> dict[str, bool]:
        """Put the sum of the counters that change with the records in the place of what was reported.

        Args:
            accounts: which.
            census: returns the indexes of all instances that count in them. Asked when the recount has begun: what it
                does not name counts as nothing but what grew since then.
            now: unix seconds.

        Returns:
            By account whether it was carried through: not where another manager does just now.
        """
        begun = {account: await self._counters.begin_recount(account, now) for account in accounts}
        truth = await counted(await census())
        return {
            account: await self._counters.end_recount(account, recount, truth.get(account, {}))
            for account, recount in begun.items()
        }


def _taken(counters: Counters) -> Counter[str]:
    taken = Counter(counters.used)
    taken.update(counters.reserved)
    return taken
