"""Stages of a request: which pieces of work it consists of and how long each took.

Whoever wants to know opens the outermost stage; the functions marked `staged` below it are then measured, as a tree.
While nobody does, a marked function costs one look at a context variable.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

__all__ = ["Stage", "note_stage", "opened_stage", "staged"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MOST_STAGES = 64  # in one another; a request of many batches has as many stores


@dataclass(slots=True)
class Stage:
    """A piece of work.

    Attributes:
        name: what is done, one of few words.
        place: where, as `<file>:<function>`.
        begin_ns: on the clock of `time.perf_counter_ns`.
        end_ns: likewise; 0 while it goes on.
        parts: the pieces within it, in the order of their begin.
        notes: counts that say how much was done.
    """

    name: str
    place: str
    begin_ns: int
    end_ns: int = 0
    parts: list[Stage] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def microseconds(self) -> int:
        """How long it took."""
        return round((self.end_ns - self.begin_ns) / 1000)


_in_hand: ContextVar[Stage | None] = ContextVar("stage_in_hand", default=None)


@contextmanager
def opened_stage(name: str, place: str) -> Iterator[Stage]:
    """Measure what happens inside the block; a stage within the one that is open already, if there is one."""
    stage, outer = Stage(name, place, time.perf_counter_ns()), _in_hand.get()
    if outer is not None and len(outer.parts) < _MOST_STAGES:
        outer.parts.append(stage)
    token = _in_hand.set(stage)
    try:
        yield stage
    finally:
        stage.end_ns = time.perf_counter_ns()
        _in_hand.reset(token)


def note_stage(**counts: int) -> None:
    """Say how much is done in the stage that is open; nothing while nobody measures."""
    stage = _in_hand.get()
    if stage is not None:
        stage.notes.update(counts)


Work = Callable[Arguments, Coroutine[Any, Any, Result]]


def staged(name: str) -> Callable[[Work[Arguments, Result]], Work[Arguments, Result]]:
    """Mark a coroutine function as a stage.

    Args:
        name: what it does.
    """

    def mark(work: Work[Arguments, Result]) -> Work[Arguments, Result]:
        place = f"{work.__module__.rpartition('.')[2]}.py:{work.__name__}"

        async def measured(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            with opened_stage(name, place):
                return await work(*arguments, **named)

        @functools.wraps(work)
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Coroutine[Any, Any, Result]:
            return (work if _in_hand.get() is None else measured)(*arguments, **named)

        return call

    return mark
