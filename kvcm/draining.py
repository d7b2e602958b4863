"""How a manager ends, in the order that clients and load balancers can follow (security_ops.md 4).

1. It is not ready: `/readyz` and gRPC health say so. Requests are served on.
2. It gives up the lease, so that another manager takes over the background duties.
3. It waits, for those who send requests to notice. Answers close their HTTP connections.
4. Requests are turned away; then it accepts no connections.
5. What is in flight is finished, within a time.

Whoever calls then stops the duties, closes the listeners, writes down what is left and closes the store. At the very
end nothing may be running any more: a task that is left was forgotten by whoever began it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self

import structlog

from kvcm.registry.leadership import Leadership
from kvcm.service.gate import Gate, Phase
from kvcm.serving import Listeners

__all__ = ["SlowEnd", "drain", "tell_left_tasks"]

_TURNS = 3  # of the event loop, for tasks that have just ended
_MOST_TOLD = 10

_log = structlog.get_logger("kvcm")


async def drain(
    gate: Gate, leadership: Leadership, listeners: Listeners, delay_seconds: float, timeout_seconds: float
) -> None:
    """Bring a manager to where no request is in flight.

    Args:
        gate: what requests are let in by.
        leadership: to be given up.
        listeners: to be closed to newcomers.
        delay_seconds: how long to serve on after telling that this manager is not ready.
        timeout_seconds: how long what is in flight may take.
    """
    await gate.enter_phase(Phase.LEAVING)
    await leadership.withdraw()
    await asyncio.sleep(delay_seconds)
    await gate.enter_phase(Phase.CLOSED)
    # gRPC cancels what comes in the moment in which it stops to accept, and clients do not retry that as they do what
    # is turned away: so they are told first.
    await gate.calmed()
    listeners.stop_accepting(timeout_seconds)
    if not await gate.emptied(timeout_seconds):
        _log.warning("requests_cut_off", in_flight=gate.in_flight, after_seconds=timeout_seconds)


class SlowEnd:
    """Logs what a manager that does not come to its end waits for, again and again. Around its life.

    Args:
        after_seconds: how long that may take unsaid.
    """

    def __init__(self, after_seconds: float = 10.0) -> None:
        self._after_seconds = after_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._begin = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self) -> None:
        """Nothing is in flight any more: what is left takes moments."""
        self._begin = time.monotonic()
        self._again()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._after_seconds, self._tell)

    def _tell(self) -> None:
        places = sorted(map(_place, asyncio.all_tasks()))
        seconds = round(time.monotonic() - self._begin)
        _log.warning("ending_is_slow", seconds=seconds, count=len(places), tasks=places[:_MOST_TOLD])
        self._again()


async def tell_left_tasks() -> None:
    """Log the tasks that are still there although everything is closed."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _log.warning("tasks_left", count=len(left), tasks=sorted(map(_name, left))[:_MOST_TOLD])


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())


def _place(task: asyncio.Task[Any]) -> str:
    """Return what a task is and, from the outside in, the functions it stands in."""
    inner: Any = task.get_coro()
    names = []
    while inner is not None:
        names.append(getattr(inner, "__qualname__", type(inner).__name__))
        inner = getattr(inner, "cr_await", None)
    return " > ".join(names)
