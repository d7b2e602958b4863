"""The faults of a game, their times and durations: a pure function of a seed.

Faults come in rounds: in each every kind comes once, in another order. Some begin while another one lasts. Between
the windows of faults (a fault and the time that recovery from it may take) there is quiet, at least so much of the
whole game as `LEAST_QUIET` says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["KINDS", "LEAST_QUIET", "Kind", "Step", "hosts_of", "made", "parts_of"]

LEAST_QUIET = 0.40
_AIM_QUIET = 0.46  # faults last a little longer than planned: a process has to start again
_HEAD_SECONDS, _TAIL_SECONDS = 6.0, 8.0
_OVERLAPPING = 0.3  # of the faults begin while another one lasts
_MANAGERS = ("m1", "m2", "m3")
_ENGINES = ("e1", "e2", "e3", "e4")
_CLIENTS = (*_ENGINES, "prober")
_HOSTS = ("store", *_MANAGERS, *_CLIENTS)
_GROUPS = {"leader": _MANAGERS, "managers": _MANAGERS, "clients": _CLIENTS, "all": _HOSTS}


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to go wrong.

    Attributes:
        name: of it, for people.
        targets: components that may fail; one is chosen. `a=b` is both ways between two hosts, `a>b` one.
        seconds: shortest and longest time that it lasts.
        recovery_seconds: stated: how long after its end calls may still fail.
        why: the terms of that time.
        needs: capability of the machine, "" for none.
    """

    name: str
    targets: tuple[str, ...]
    seconds: tuple[float, float]
    recovery_seconds: float
    why: str
    needs: str = ""


_LONG, _SHORT, _AT_ONCE = (2.0, 7.0), (1.0, 4.0), (0.0, 0.0)
_CONNECT = "a reconnect to the store, 1 s until a silent connection is given up, 1 s of the client's breaker"
_FAILOVER = "a manager that is asked first: a third of the deadline"
_BYTES = "none: calls move no bytes"

KINDS = (
    Kind("manager killed", _MANAGERS, _SHORT, 2.0, _FAILOVER),
    Kind("leader killed", ("leader",), _SHORT, 2.0, _FAILOVER),
    Kind("manager stopped", _MANAGERS, _SHORT, 2.0, _FAILOVER),
    Kind("manager frozen", (*_MANAGERS, "leader"), _LONG, 3.0, _FAILOVER + "; its overdue work"),
    Kind("store killed", ("store",), _SHORT, 3.0, _CONNECT),
    Kind("store stopped", ("store",), _SHORT, 3.0, _CONNECT),
    Kind("store frozen", ("store",), _LONG, 3.0, _CONNECT),
    Kind("engine killed", _ENGINES, _SHORT, 1.0, _BYTES),
    Kind("engine stopped", _ENGINES, _SHORT, 1.0, _BYTES),
    Kind("store cut off from a manager", tuple(f"{name}=store" for name in _MANAGERS), _LONG, 3.0, _CONNECT),
    Kind("store cut off from all managers", ("managers=store",), _SHORT, 3.0, _CONNECT),
    Kind("manager's packets to the store lost", tuple(f"{name}>store" for name in _MANAGERS), _LONG, 3.0, _CONNECT),
    Kind("store's packets to a manager lost", tuple(f"store>{name}" for name in _MANAGERS), _LONG, 3.0, _CONNECT),
    Kind("engine cut off from a manager", ("e1=m1", "e2=m2", "e3=m3", "e4=m1"), _LONG, 1.0, _BYTES),
    Kind("engine cut off from all managers", tuple(f"{name}=managers" for name in _ENGINES), _LONG, 1.0, _BYTES),
    Kind("manager cut off from all clients", tuple(f"clients={name}" for name in _MANAGERS), _LONG, 3.0, _FAILOVER),
    Kind("manager's packets to clients lost", tuple(f"{name}>clients" for name in _MANAGERS), _LONG, 3.0, _FAILOVER),
    Kind("manager cut off from everything", tuple(f"{name}=all" for name in _MANAGERS), _LONG, 3.0, _CONNECT),
    Kind("slow line", (*_MANAGERS, "e1", "e3"), _LONG, 3.0, "what waits in queues"),
    Kind("slow line of the store", ("store",), _LONG, 3.0, "what waits in queues"),
    Kind("lossy line", (*_MANAGERS, "store", "e2"), _LONG, 4.0, "TCP's pauses, that grow with every loss", "loss"),
    Kind("disk full", ("disk_a", "disk_b"), _LONG, 2.0, "passed over in the same call"),
    Kind("disk read-only", ("disk_a", "disk_b"), _LONG, 2.0, "passed over in the same call", "fuse"),
    Kind("disk hangs", ("disk_a",), _LONG, 2.0, "passed over once probes find out", "fuse"),
    Kind("disk fails", ("disk_a",), _LONG, 2.0, "passed over in the same call", "fuse"),
    Kind("disk slow", ("disk_a",), _LONG, 2.0, _BYTES, "fuse"),
    Kind("disk's server killed", ("disk_a",), _SHORT, 2.0, "passed over in the same call", "fuse"),
    Kind("bytes flipped", ("disk_a", "disk_b"), _AT_ONCE, 1.0, _BYTES),
    Kind("files cut", ("disk_a", "disk_b"), _AT_ONCE, 1.0, _BYTES),
    Kind("files deleted", ("disk_a", "disk_b"), _AT_ONCE, 1.0, _BYTES),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A fault of a game.

    Attributes:
        number: in the order in which they begin, from 1 on.
        kind: name of it.
        target: the component that fails.
        at: seconds from the game's begin.
        seconds: that it lasts.
        recovery_seconds: stated for its kind.
    """

    number: int
    kind: str
    target: str
    at: float
    seconds: float
    recovery_seconds: float

    @property
    def until(self) -> float:
        """When its window ends, as planned."""
        return self.at + self.seconds + self.recovery_seconds


def hosts_of(side: str) -> tuple[str, ...]:
    """Return the hosts, or the storage, that one side of a target names."""
    return _GROUPS.get(side, (side,))


def parts_of(target: str) -> frozenset[str]:
    """Return the hosts or storages that a target is about."""
    sides = target.replace(">", "=").split("=")
    named = [side for side in sides if side != "all"]  # a host that is cut off from everything: the others are well
    return frozenset(part for side in named for part in hosts_of(side))


def made(seed: int, seconds: float, left_out: frozenset[str] = frozenset()) -> list[Step]:
    """Return the faults of a game, in the order in which they begin.

    Args:
        seed: of all choices.
        seconds: that the game lasts.
        left_out: capabilities that the machine lacks; kinds that need one do not come.
    """
    chosen = random.Random(f"game day {seed}")
    kinds = _endless([kind for kind in KINDS if kind.needs not in left_out], chosen)
    steps: list[Step] = []
    now, last = _HEAD_SECONDS, seconds - _TAIL_SECONDS
    while True:
        window = _window(now, kinds, chosen)
        end = max(step.until for step in window)
        if end > last:
            break
        steps += window
        now = end + (end - now) * _AIM_QUIET / (1 - _AIM_QUIET) * chosen.uniform(0.95, 1.1)
    return [_numbered(step, number) for number, step in enumerate(sorted(steps, key=lambda step: step.at), 1)]


def _window(now: float, kinds: Iterator[Kind], chosen: random.Random) -> list[Step]:
    """Return a fault that begins now, or two that overlap and are not about the same thing."""
    first = _step(next(kinds), now, chosen)
    if first.seconds == 0 or chosen.random() >= _OVERLAPPING:
        return [first]
    second = _step(next(kinds), now + first.seconds * chosen.uniform(0.2, 0.8), chosen)
    if parts_of(first.target) & parts_of(second.target):
        return [first, _moved(second, first.until)]  # one after the other
    return [first, second]


def _step(kind: Kind, at: float, chosen: random.Random) -> Step:
    target, seconds = chosen.choice(kind.targets), round(chosen.uniform(*kind.seconds), 1)
    return Step(0, kind.name, target, round(at, 1), seconds, kind.recovery_seconds)


def _moved(step: Step, at: float) -> Step:
    return Step(0, step.kind, step.target, round(at + 0.1, 1), step.seconds, step.recovery_seconds)


def _numbered(step: Step, number: int) -> Step:
    return Step(number, step.kind, step.target, step.at, step.seconds, step.recovery_seconds)


def _endless(kinds: list[Kind], chosen: random.Random) -> Iterator[Kind]:
    while True:
        yield from chosen.sample(kinds, len(kinds))
