"""Which managers a client calls, and in which order.

A client is given addresses: of single managers, or of a load balancer in front of them. Each manager serves every call,
but engines of one instance do best to call the same one, whose search cache then knows their blocks. Managers announce
which: in the answer to a registration, and in that to a lookup that went to another one. Invariants:

1. An announced manager gets calls only after it answered a probe as the node that was announced. Probes run beside the
   calls, so that an announcement that leads nowhere (an address behind NAT, a certificate with another name) costs no
   call anything.
2. The given addresses stay in use: a call that the assigned manager does not serve goes on to them, and takes as long
   as without it.
3. A manager that failed is avoided for a time that doubles. Until then the next announced one is assigned.
4. Managers that disagree do not send a client back and forth: the probed one has to name itself.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import meta_service_pb2 as meta

__all__ = ["Addresses", "AnnouncedManager", "parse_addresses", "verified_name"]

_log = logging.getLogger(__name__)
_FIRST_AVOIDANCE_SECONDS, _LONGEST_AVOIDANCE_SECONDS = 5.0, 300.0
_MOST_ANNOUNCED = 16
# Nothing that gRPC takes for a scheme: "unix:/run/x" is no host.
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def parse_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a list or of a text separated by commas.

    Raises:
        InvalidArgumentError: there is none, or one is not `host:port`.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    stripped = tuple(part.strip() for part in parts)
    for address in stripped or ("",):
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidArgumentError(f"addresses holds {address!r}, must be host:port with a port of 1 to 65535")
    return stripped


@dataclass(frozen=True, slots=True)
class AnnouncedManager:
    """A manager that another one named.

    Attributes:
        node_id: its id.
        address: `host:port` of its gRPC calls.
    """

    node_id: str
    address: str

    @classmethod
    def parse_all(cls, announced: Iterable[meta.MetaNodeEndpoint]) -> Iterator[AnnouncedManager]:
        """Yield those that have an id, a host and a port."""
        for each in announced:
            host = each.host if _HOST.fullmatch(each.host) else _bracketed(each.host)
            if each.node_id and host and 0 < each.meta_rpc_port < 65536:
                yield cls(each.node_id, f"{host}:{each.meta_rpc_port}")


def _bracketed(host: str) -> str:
    """Return an ip address of version 6 as it stands before a port, "" for another text."""
    return f"[{host}]" if _is_ip(host) else ""


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Avoidance:
    until: float
    seconds: float


class Addresses:
    """The addresses of one client. Safe to use from several threads.

    Args:
        given: `host:port` of each, at least one. All are equal; the list is walked when one does not serve.
        clock: seconds of a clock that never runs backwards.
        follows: whether announced managers are called.
    """

    def __init__(
        self, given: Sequence[str], clock: Callable[[], float] = time.monotonic, *, follows: bool = True
    ) -> None:
        self._given = tuple(dict.fromkeys(given))
        self._clock = clock
        self._follows = follows
        self._lock = threading.Lock()
        self._sticky = self._given[0]  # the given one that answered last
        self._announced: tuple[AnnouncedManager, ...] = ()
        self._assigned: AnnouncedManager | None = None
        self._probed: AnnouncedManager | None = None
        self._avoided: dict[str, _Avoidance] = {}
        self.order = self._given
        """All addresses in the order that a call tries them. Replaced, never changed: read without the lock."""

    @property
    def given_count(self) -> int:
        """Number of the given addresses."""
        return len(self._given)

    @property
    def assigned(self) -> AnnouncedManager | None:
        """The announced manager that calls go to, None without one."""
        return self._assigned

    def in_use(self) -> frozenset[str]:
        """Return the addresses whose connections are worth keeping."""
        return frozenset((*self.order, *(each.address for each in self._announced)))

    def verified_name(self, address: str) -> str:
        """Return the name that the certificate of an address must have, "" for that of the address.

        An announced manager's certificate rarely has the ip address of a pod. It must then have the name that the
        client was given, as if that name had led to the pod by itself.
        """
        return "" if address in self._given else verified_name(address, self._given[0])

    def on_answer(self, address: str) -> None:
        """Record that a call was answered there."""
        if address == self.order[0] and address not in self._avoided:
            return
        with self._lock:
            if self._assigned is not None and self._assigned.address == address:
                self._avoided.pop(address, None)
            elif address in self._given:
                self._sticky = address
                self._reorder()

    def on_failure(self, address: str) -> None:
        """Record that a call failed there, so that another address has to serve it."""
        with self._lock:
            if self._assigned is not None and self._assigned.address == address:
                self._avoid(self._assigned)
                self._assigned = None
                self._reorder()

    def announce(self, announced: Iterable[meta.MetaNodeEndpoint]) -> None:
        """Record managers that an answer names, best first; a call probes the first one later.

        Args:
            announced: all of them, or the first alone.
        """
        if not self._follows:
            return
        new = tuple(AnnouncedManager.parse_all(announced))[:_MOST_ANNOUNCED]
        if not new or new == self._announced[: len(new)]:
            return
        with self._lock:
            rest = (each for each in self._announced if each not in new) if len(new) == 1 else ()
            self._announced = (*new, *rest)[:_MOST_ANNOUNCED]
            addresses = {each.address for each in self._announced}
            self._avoided = {key: value for key, value in self._avoided.items() if key in addresses}

    def next_probe(self) -> AnnouncedManager | None:
        """Return the manager to probe now, None if there is nothing to do; `on_probe` has to follow."""
        if not self._announced or self._announced[0] == self._assigned or self._probed is not None:
            return None
        with self._lock:
            best = self._first_usable(self._announced)
            if best is None or best == self._assigned or self._probed is not None:
                return None
            self._probed = best
            return best

    def on_probe(self, manager: AnnouncedManager, answer: meta.GetClusterInfoResponse | None) -> None:
        """Record how a probe ended: with the answer to GetClusterInfo, None without one that is OK."""
        with self._lock:
            self._probed = None
            if answer is None or answer.self_node_id != manager.node_id or not self._names_itself(manager, answer):
                self._avoid(manager)
                return
            self._assigned = manager
            self._reorder()
        _log.info("calls go to manager %s at %s", manager.node_id, manager.address)

    def _names_itself(self, manager: AnnouncedManager, answer: meta.GetClusterInfoResponse) -> bool:
        """Return whether a manager knows of none that is better than itself, apart from those that failed. One that
        drains names the others alone."""
        named = list(AnnouncedManager.parse_all(answer.preferred_managers))
        if named and manager.node_id not in [each.node_id for each in named]:
            return False
        best = self._first_usable(named)
        return best is None or best.node_id == manager.node_id

    def _first_usable(self, managers: Iterable[AnnouncedManager]) -> AnnouncedManager | None:
        now = self._clock()
        return next((each for each in managers if not self._is_avoided(each.address, now)), None)

    def _is_avoided(self, address: str, now: float) -> bool:
        avoidance = self._avoided.get(address)
        return avoidance is not None and now < avoidance.until

    def _avoid(self, manager: AnnouncedManager) -> None:
        known = self._avoided.get(manager.address)
        seconds = _FIRST_AVOIDANCE_SECONDS if known is None else min(2 * known.seconds, _LONGEST_AVOIDANCE_SECONDS)
        self._avoided[manager.address] = _Avoidance(self._clock() + seconds, seconds)

    def _reorder(self) -> None:
        at = self._given.index(self._sticky)
        given = (*self._given[at:], *self._given[:at])
        first = () if self._assigned is None else (self._assigned.address,)
        self.order = tuple(dict.fromkeys((*first, *given)))


def verified_name(address: str, given: str) -> str:
    """Return the name that the certificate of an announced address must have, "" for that of the address.

    Args:
        address: `host:port` that a manager announced.
        given: `host:port` that the client was given.
    """
    host = _host_of(given)
    return host if _is_ip(_host_of(address)) and not _is_ip(host) else ""


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
