"""Several services and one store: which of them the next GiB is worth most to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi.deployment import GIB, Floats
from kvcm.optimizer.roi.returns import Returns

__all__ = ["Rank", "Service", "Share", "Split", "rank_services", "split_budget"]


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A workload with a cache of its own.

    Attributes:
        name: no two services have one.
        returns: what its capacities return.
    """

    name: str
    returns: Returns

    @property
    def stored_bytes(self) -> Floats:
        """Return [M] bytes of each capacity."""
        return self.returns.capacity_blocks.astype(np.float64) * self.returns.block_bytes


@dataclass(frozen=True, slots=True)
class Rank:
    """What a service would do with capacity.

    Attributes:
        name: of the service.
        per_gib_hour: money that it saves per hour and GiB that it gets, when it gets `next_bytes`; storage is not
            paid of it. 0 where no capacity saves more.
        next_bytes: of the step that saves most per GiB.
        best_bytes: of the capacity that is best for it alone.
        best_net_per_hour: money that this one returns.
    """

    name: str
    per_gib_hour: float
    next_bytes: float
    best_bytes: float
    best_net_per_hour: float


def rank_services(services: Sequence[Service]) -> tuple[Rank, ...]:
    """Return the services by what their next GiB saves, the most first.

    Raises:
        OptionError: two services have one name.
    """
    _check_names(services)
    ranks = [_rank(service) for service in services]
    return tuple(sorted(ranks, key=lambda each: -each.per_gib_hour))


def _check_names(services: Sequence[Service]) -> None:
    """Check that services have names of their own.

    Raises:
        OptionError: two have one name.
    """
    names = [service.name for service in services]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OptionError(f"services: {min(twice)!r} comes twice; allowed: names of their own")


def _rank(service: Service) -> Rank:
    found, stored = service.returns, service.stored_bytes
    more, gained = stored[1:], found.saved_per_hour[1:] - found.saved_per_hour[0]
    per_byte = np.where(more > 0, gained / np.where(more > 0, more, 1.0), 0.0)
    step = int(per_byte.argmax()) if len(per_byte) else 0
    saves = len(per_byte) > 0 and per_byte[step] > 0
    return Rank(
        name=service.name,
        per_gib_hour=float(per_byte[step]) * GIB if saves else 0.0,
        next_bytes=float(more[step]) if saves else 0.0,
        best_bytes=float(stored[found.best]),
        best_net_per_hour=float(found.net_per_hour[found.best]),
    )


# One budget of bytes among several services, so that all together return most.
#
# 1. Along the concave hulls of what capacities return, the steepest step of any service is taken until one does not
#    fit. That step, taken in part, is a bound that no split exceeds. Where nothing was left over, or the rest gains
#    nothing, the split reaches the bound and is proven the best: always where returns are concave and blocks of one
#    size.
# 2. Otherwise dynamic programming over units of the budget. A unit that divides every block, when there are few
#    enough of them, makes that exact for any curves; else it is a lower bound, and the better of both splits is
#    returned.

_MOST_UNITS = 4096
"""The finest grid: dynamic programming takes the square of it for every service."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Share:
    """What one service gets.

    Attributes:
        name: of the service.
        capacity_blocks: that it gets.
        stored_bytes: of these.
        net_per_hour: money that they return.
    """

    name: str
    capacity_blocks: int
    stored_bytes: float
    net_per_hour: float


@dataclass(frozen=True, slots=True)
class Split:
    """A budget that is split.

    Attributes:
        shares: in the order of the services.
        net_per_hour: money that all return.
        at_most: money that no split of this budget exceeds.
        method: "hull", or "grid" where dynamic programming found a better one.
        is_exact: whether no split returns more.
    """

    shares: tuple[Share, ...]
    net_per_hour: float
    at_most: float
    method: Literal["hull", "grid"]
    is_exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """The capacities that are worth choosing from: more bytes, more money. The first one is none."""

    places: np.ndarray[tuple[int], np.dtype[np.intp]]
    extra: Floats
    gain: Floats


def split_budget(services: Sequence[Service], budget_bytes: float) -> Split:
    """Return the split of a budget that returns most, net of what deployments say that storage costs.

    A budget that is paid already costs nothing: `price_per_gib_month` is 0 then. What no service gains from is left.

    Args:
        services: that share it.
        budget_bytes: from 0 on.

    Raises:
        OptionError: the budget is below 0, or two services have one name.
    """
    _check_names(services)
    if not budget_bytes >= 0:
        raise OptionError(f"budget_bytes: {budget_bytes:.15g}; allowed: from 0")
    rest, unit = budget_bytes, _common_unit(services)
    if unit:
        rest = math.floor(rest / unit + _ROUNDING) * unit
    choices = [_choice(service) for service in services]
    return _best_of(services, choices, rest, unit)


def _best_of(services: Sequence[Service], choices: Sequence[_Choice], rest: float, unit: float) -> Split:
    taken, more = _along_hulls(choices, rest)
    bound = _gain(choices, taken) + more
    _fill(choices, taken, rest)
    method: Literal["hull", "grid"] = "hull"
    is_exact = _gain(choices, taken) >= bound - _ROUNDING * abs(bound)
    if not is_exact:
        divides = bool(unit) and rest / unit < _MOST_UNITS
        on_grid = _on_grid(choices, rest, unit if divides else rest / _MOST_UNITS)
        _fill(choices, on_grid, rest)
        is_exact = divides
        if _gain(choices, on_grid) > _gain(choices, taken):
            taken, method = on_grid, "grid"
    shares = tuple(
        _share(service, int(choice.places[at])) for service, choice, at in zip(services, choices, taken, strict=True)
    )
    total = sum(share.net_per_hour for share in shares)
    return Split(shares, total, total if is_exact else total - _gain(choices, taken) + bound, method, is_exact)


def _share(service: Service, place: int) -> Share:
    found = service.returns
    return Share(
        service.name,
        int(found.capacity_blocks[place]),
        float(service.stored_bytes[place]),
        float(found.net_per_hour[place]),
    )


def _common_unit(services: Sequence[Service]) -> float:
    """Return the largest number of bytes that divides every block, 0 where none does."""
    sizes = [service.returns.block_bytes for service in services]
    return float(math.gcd(*map(int, sizes))) if all(size == int(size) for size in sizes) else 0.0


def _choice(service: Service) -> _Choice:
    gain = service.returns.net_per_hour - service.returns.net_per_hour[0]
    extra = service.stored_bytes - service.stored_bytes[0]
    before = np.maximum.accumulate(np.concatenate([[-np.inf], gain[:-1]]))
    worth = np.flatnonzero(gain > before)
    return _Choice(worth, extra[worth], gain[worth])


def _gain(choices: Sequence[_Choice], taken: Sequence[int]) -> float:
    return sum(float(choice.gain[at]) for choice, at in zip(choices, taken, strict=True))


def _along_hulls(choices: Sequence[_Choice], rest: float) -> tuple[list[int], float]:
    """Return the place in each choice, and what the first step that does not fit would gain in part."""
    steps = [
        (_slope(choice, low, high), number, high)
        for number, choice in enumerate(choices)
        for low, high in _hull_steps(choice)
    ]
    taken = [0] * len(choices)
    for slope, number, place in sorted(steps, key=lambda each: -each[0]):
        needed = float(choices[number].extra[place] - choices[number].extra[taken[number]])
        if needed > rest * (1 + _ROUNDING):
            return taken, slope * rest
        taken[number] = place
        rest = max(0.0, rest - needed)
    return taken, 0.0


def _slope(choice: _Choice, low: int, high: int) -> float:
    return float((choice.gain[high] - choice.gain[low]) / (choice.extra[high] - choice.extra[low]))


def _hull_steps(choice: _Choice) -> list[tuple[int, int]]:
    """Return the steps of the upper concave hull, from place to place (Andrew's monotone chain)."""
    extra, gain = choice.extra.tolist(), choice.gain.tolist()
    hull = [0]
    for place in range(1, len(extra)):
        while len(hull) > 1 and _is_below(extra, gain, hull[-2], hull[-1], place):
            hull.pop()
        hull.append(place)
    return list(pairwise(hull))


def _is_below(extra: list[float], gain: list[float], low: int, middle: int, high: int) -> bool:
    rise = (gain[middle] - gain[low]) * (extra[high] - extra[low])
    return rise <= (gain[high] - gain[low]) * (extra[middle] - extra[low])


def _fill(choices: Sequence[_Choice], taken: list[int], rest: float) -> None:
    """Give the rest to the service that gains most from it alone, as long as one does."""
    left = rest - sum(float(choice.extra[at]) for choice, at in zip(choices, taken, strict=True))
    while True:
        best, number, place = 0.0, -1, 0
        for each, choice in enumerate(choices):
            reach = choice.extra[taken[each]] + max(0.0, left) + rest * _ROUNDING * 1e-3
            at = int(np.searchsorted(choice.extra, reach, side="right")) - 1
            gained = float(choice.gain[at] - choice.gain[taken[each]])
            if gained > best:
                best, number, place = gained, each, at
        if number < 0:
            return
        left -= float(choices[number].extra[place] - choices[number].extra[taken[number]])
        taken[number] = place


def _on_grid(choices: Sequence[_Choice], rest: float, unit: float) -> list[int]:
    """Return the places of the best split into whole units (Bellman, 1957: the allocation of one resource)."""
    units = math.floor(rest / unit + _ROUNDING) if unit > 0 else 0
    reach = np.arange(units + 1) * unit * (1 + _ROUNDING)
    best, given = np.zeros(units + 1), []
    places = [np.searchsorted(choice.extra, reach, side="right") - 1 for choice in choices]
    for choice, place in zip(choices, places, strict=True):
        gain = choice.gain[place]
        # All that a service gets less than all is left to those before it.
        total, own = best.copy(), np.zeros(units + 1, np.intp)
        for units_here in np.flatnonzero(np.diff(gain)) + 1:
            other = best[: units + 1 - units_here] + gain[units_here]
            better = other > total[units_here:]
            total[units_here:][better] = other[better]
            own[units_here:][better] = units_here
        best = total
        given.append(own)
    taken = [0] * len(choices)
    for number in range(len(choices) - 1, -1, -1):
        here = int(given[number][units])
        taken[number] = int(places[number][here])
        units -= here
    return taken
