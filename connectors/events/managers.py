"""Which managers get reports, and at which addresses: those that are given, and those that answers name.

Managers share nothing of what reporters say (`residency_service.proto`), so each one that serves gets a stream of every
rank. It takes one: of two streams the one that began last counts. But an address is no manager: a Service leads to
another one with each connection, and two names may lead to the same. Managers are therefore known by the node id of
their answers. Invariants:

M1. One address of a manager gets reports, as far as answers have shown. Where a report shows that two do, the other one
    begins new streams, since the last ones that began there are not its own.
M2. A given address gets reports unless its manager gets them at another one.
M3. A named address gets reports only after a probe found the manager there that was named. So one that leads nowhere
    (behind NAT, a pod of another network) costs nothing, and managers are followed unless the options forbid it.
M4. The address that has the streams keeps them while it answers: moving them costs a snapshot of every rank.
M5. A named address is forgotten when it was not named for a time. A manager that serves alone, or that has not seen the
    others yet, names none: an empty list names the manager that answers, and says nothing of others.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvcm.connectors.addresses import AnnouncedManager

__all__ = ["ManagerSet"]

_log = logging.getLogger("kvcm.subscriber")

_FORGET_SECONDS: Final = 60.0
"""For a named address that is named no more. A manager's answers name the others within three heartbeats."""

_TAKEOVER_SECONDS: Final = 5.0
"""For an address whose reports fail, before another one of the same manager may take its place."""

_SPARE_SECONDS: Final = 30.0
"""Between two probes of an address whose manager gets reports at another one."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Between two probes of an address where its manager was not found."""

_MOST_NAMED: Final = 64
"""Addresses that are followed."""


@dataclass(slots=True)
class _Address:
    """An address.

    Attributes:
        is_given: by the options.
        named: node id of the manager that is named here, "" for none.
        node_id: of the manager that answered here last, "" while none did.
        is_used: it gets reports.
        epoch: of its streams: another one begins new ones.
        failing_since: of the clock; None while reports are answered.
        named_at: when it was named last.
        probed_at: when it was probed last.
        pause_seconds: to the next probe.
    """

    is_given: bool
    named: str = ""
    node_id: str = ""
    is_used: bool = False
    epoch: int = 0
    failing_since: float | None = None
    named_at: float = 0.0
    probed_at: float = -math.inf
    pause_seconds: float = _FIRST_PAUSE_SECONDS


class ManagerSet:
    """The managers of one process. Does no I/O; safe to use from several threads.

    Args:
        given: `host:port` of each given manager.
        clock: seconds of a clock that never runs backwards.
        follows: whether managers that answers name get reports.
        on_change: called without the lock when `streams` may have changed, or a probe may be due; an answer
            that says what was known is no reason.
    """

    def __init__(
        self,
        given: Sequence[str],
        clock: Callable[[], float],
        *,
        follows: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._follows = follows
        self._on_change = on_change
        self._lock = threading.Lock()
        self._addresses = {address: _Address(is_given=True, is_used=True) for address in given}

    def streams(self) -> Mapping[str, int]:
        """Return the addresses that get reports, with the epoch of their streams."""
        with self._lock:
            self._forget()
            return {name: address.epoch for name, address in self._addresses.items() if address.is_used}

    def states(self) -> Mapping[str, int]:
        """Return how many addresses are `used`, `spare` (of a manager that is used at another one) or `unreached`."""
        with self._lock:
            counted = Counter(map(self._state, self._addresses.values()))
            return {state: counted[state] for state in ("used", "spare", "unreached")}

    def is_expected(self, address: str) -> bool:
        """Return whether a manager should answer there: it is given, or was named just now."""
        with self._lock:
            found = self._addresses.get(address)
            return found is not None and (found.is_given or self._clock() - found.named_at < _SPARE_SECONDS)

    def on_answer(self, address: str, node_id: str = "", named: Iterable[AnnouncedManager] = ()) -> None:
        """A report was answered.

        Args:
            address: where.
            node_id: of the manager that answered, "" where the answer does not say.
            named: the managers that serve, as it says.
        """
        with self._lock:
            found = self._addresses.get(address)
            if found is None:
                return
            before = self._facts()
            found.failing_since = None
            if node_id:
                if self._follows:
                    self._record_named(found, list(named)[:_MOST_NAMED])
                self._place(address, found, node_id, is_report=True)
            has_changed = self._facts() != before
        if has_changed:
            self._on_change()

    def on_failure(self, address: str) -> None:
        """A report was not answered."""
        with self._lock:
            found = self._addresses.get(address)
            if found is None or found.failing_since is not None:
                return
            found.failing_since = self._clock()
        self._on_change()

    def next_probe(self) -> str | None:
        """Return an address to probe now, None for none; `on_probe` has to follow."""
        with self._lock:
            self._forget()
            now = self._clock()
            for name, address in self._addresses.items():
                if not address.is_used and now >= self._due_at(address):
                    address.probed_at = now
                    return name
            return None

    def on_probe(self, address: str, node_id: str) -> None:
        """A probe ended: with the node id of the manager that answered, "" without an answer."""
        with self._lock:
            found = self._addresses.get(address)
            if found is None or found.is_used:
                return
            if node_id:
                self._place(address, found, node_id, is_report=False)
            else:
                self._put_off(address, found, "nothing answers")
        self._on_change()

    # ---- with the lock ----

    def _facts(self) -> list[tuple[object, ...]]:
        """Return what `streams` and `next_probe` go by, without times."""
        return [
            (name, each.named, each.node_id, each.is_used, each.epoch, each.failing_since is None)
            for name, each in self._addresses.items()
        ]

    def _forget(self) -> None:
        oldest = self._clock() - _FORGET_SECONDS
        for name, address in list(self._addresses.items()):
            if not address.is_given and address.named_at <= oldest:
                del self._addresses[name]
                if address.is_used:
                    _log.info("manager %s at %s is named no more: it gets no reports", address.named, name)

    def _record_named(self, answering: _Address, named: Sequence[AnnouncedManager]) -> None:
        now = self._clock()
        if not named:
            answering.named_at = now
        node_ids = {manager.node_id for manager in named}
        for manager in named:
            address = self._addresses.get(manager.address)
            if address is None:
                if len(self._addresses) >= _MOST_NAMED:
                    continue
                address = self._addresses[manager.address] = _Address(is_given=False)
            if address.named != manager.node_id:
                if address.named in node_ids:
                    continue  # two managers claim one address: the first one keeps it
                address.named = manager.node_id
                address.probed_at, address.pause_seconds = -math.inf, _FIRST_PAUSE_SECONDS
            address.named_at = now

    def _place(self, name: str, address: _Address, node_id: str, *, is_report: bool) -> None:
        """A manager answered at an address: decide whether it gets reports there."""
        other = self._user_of(node_id, but=address)
        if other is not None and is_report:  # streams that began here ended the other's (M1)
            other.epoch += 1
        if not address.is_given and node_id != address.named:
            address.is_used = False
            self._put_off(name, address, f"{node_id} answers")
            return
        address.node_id, address.pause_seconds = node_id, _FIRST_PAUSE_SECONDS
        if other is not None and self._is_live(other):
            if address.is_used:
                _log.info("manager %s gets reports at another address than %s", node_id, name)
            address.is_used = False
            address.probed_at = self._clock()
            return
        if other is not None:
            other.is_used = False
        if not address.is_used:
            address.is_used, address.failing_since = True, None
            address.epoch += 1
            _log.info("manager %s gets reports at %s", node_id, name)

    def _put_off(self, name: str, address: _Address, found: str) -> None:
        if address.pause_seconds == _FIRST_PAUSE_SECONDS and address.named:
            _log.warning("manager %s is named at %s, where %s: it gets no reports there", address.named, name, found)
        address.node_id = ""
        address.probed_at = self._clock()
        address.pause_seconds = min(2 * address.pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _due_at(self, address: _Address) -> float:
        """Return when an address without reports is to be probed."""
        user = self._user_of(address.node_id or address.named, but=address)
        if user is None or not self._is_live(user):
            return address.probed_at + min(address.pause_seconds, _SPARE_SECONDS if address.is_given else math.inf)
        return address.probed_at + _SPARE_SECONDS if address.is_given else math.inf

    def _user_of(self, node_id: str, but: _Address) -> _Address | None:
        """Return the address where a manager gets reports."""
        users = (each for each in self._addresses.values() if each.is_used and each is not but)
        return next((each for each in users if node_id and each.node_id == node_id), None)

    def _is_live(self, address: _Address) -> bool:
        return address.failing_since is None or self._clock() - address.failing_since < _TAKEOVER_SECONDS

    def _state(self, address: _Address) -> str:
        if address.is_used:
            return "used"
        return "unreached" if self._user_of(address.node_id or address.named, but=address) is None else "spare"
