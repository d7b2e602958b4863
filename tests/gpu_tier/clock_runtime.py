"""A device whose streams carry vector clocks, so that a test can ask what is ordered before what.

Work still runs when it is issued, as on a CPU. Each thing done on a stream advances that stream's clock; an event
carries the clock of its stream; a fence merges it. `happened_before(a, b)` then says whether streams and events order a
before b on every device, and not only in the order in which this test issued them. Copies to the host can be held back:
their events are not done until they are let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gpu_tier.runtime import DeviceRuntime, Event

__all__ = ["ClockRuntime", "Mark"]

Clock = dict[str, int]


@dataclass(frozen=True)
class Mark:
    """Something that was done on a stream."""

    label: tuple[object, ...]
    stream: str
    clock: Clock = field(hash=False)

    def happened_before(self, other: Mark) -> bool:
        """Whether every device has done this before it does the other."""
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


class _ClockEvent(Event):
    def __init__(self, runtime: ClockRuntime, stream: str, clock: Clock) -> None:
        self.runtime, self.stream, self.clock = runtime, stream, clock
        self.is_held = stream == "d2h" and runtime.holds_offloads

    def is_done(self) -> bool:
        return not self.is_held

    def wait(self) -> None:
        for event in self.runtime.held:  # a stream's work ends in order
            event.is_held = False
            if event is self:
                break


class ClockRuntime(DeviceRuntime):
    """See the module."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.holds_offloads = False
        self.marks: list[Mark] = []
        self._clocks: dict[str, Clock] = {}
        self._current = "compute"
        self._events: list[_ClockEvent] = []

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """See `DeviceRuntime`."""
        before, self._current = self._current, name
        yield
        self._current = before

    def mark(self, *label: object) -> None:
        """Note that something is done on the current stream."""
        clock = self._tick(self._current)
        self.marks.append(Mark(label, self._current, dict(clock)))

    def _tick(self, stream: str) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def record(self, name: str = "compute") -> Event:
        """See `DeviceRuntime`."""
        event = _ClockEvent(self, name, dict(self._clocks.setdefault(name, {})))
        self._events.append(event)
        return event

    def fence(self, event: Event, name: str = "compute") -> None:
        """See `DeviceRuntime`."""
        assert isinstance(event, _ClockEvent)
        clock = self._clocks.setdefault(name, {})
        for stream, time in event.clock.items():
            clock[stream] = max(clock.get(stream, 0), time)

    @property
    def held(self) -> list[_ClockEvent]:
        """The copies to the host that have not ended, oldest first."""
        return [event for event in self._events if event.is_held]

    def let_go(self) -> None:
        """Let all copies to the host end."""
        for event in self._events:
            event.is_held = False

    def find(self, *label: object) -> Mark:
        """Return the mark with a label."""
        found = [mark for mark in self.marks if mark.label == label]
        assert len(found) == 1, (label, len(found))
        return found[0]
