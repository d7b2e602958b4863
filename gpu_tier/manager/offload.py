"""Copies to the host that are on their way. They run beside the computation; an event says when one is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_tier.runtime import Event

__all__ = ["OffloadTicket", "Offloads"]


@dataclass(frozen=True, slots=True)
class OffloadTicket:
    """One copy.

    Attributes:
        requests: whose KV is copied.
        totals: tokens of each of them that are on the host once this is complete.
        done: the end of the copy.
    """

    requests: tuple[int, ...]
    totals: tuple[int, ...]
    done: Event


class Offloads:
    """The copies on their way, oldest first: one stream runs them, so they end in this order."""

    def __init__(self) -> None:
        self._tickets: list[OffloadTicket] = []

    def add(self, ticket: OffloadTicket) -> OffloadTicket:
        """Note a copy that has begun."""
        self._tickets.append(ticket)
        return ticket

    def finished(self) -> list[OffloadTicket]:
        """Return the copies that have ended since the last call."""
        ended = 0
        while ended < len(self._tickets) and self._tickets[ended].done.is_done():
            ended += 1
        done, self._tickets = self._tickets[:ended], self._tickets[ended:]
        return done

    def until(self, ticket: OffloadTicket) -> list[OffloadTicket]:
        """Return the copies on their way that end no later than one of them; none when that one has ended."""
        places = [place for place, other in enumerate(self._tickets) if other is ticket]
        return self._tickets[: places[0] + 1] if places else []

    def of(self, requests: Sequence[int]) -> list[OffloadTicket]:
        """Return the copies on their way that touch one of the requests."""
        wanted = set(requests)
        return [ticket for ticket in self._tickets if wanted.intersection(ticket.requests)]
