"""The timing tree of an answer's header, for trace ids that ask for it (wire.md 2.4)."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from kvcm.telemetry.stages import Stage, opened_stage

__all__ = ["CallTiming"]

_SUFFIX: Final = "__kvcm_need_span_tracer"

Result = TypeVar("Result")


class CallTiming:
    """Measures one call. To be made by `of`, which knows whether somebody wants to know.

    Args:
        place: of the handler, as `<file>:<function>`.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._stage: Stage | None = None

    @classmethod
    def of(cls, handler: Any, name: str, trace_id: str | None) -> CallTiming | None:
        """Return what measures a call, None if its trace id does not ask for that.

        Args:
            handler: of the call.
            name: of the call, for a handler that has none.
            trace_id: of the request.
        """
        if trace_id is None or not trace_id.endswith(_SUFFIX):
            return None
        module = handler.__module__.rpartition(".")[2]
        return cls(f"{module}.py:{getattr(handler, '__name__', name)}")

    async def measure(self, work: Awaitable[Result]) -> Result:
        """Do the work."""
        with opened_stage("handle", self._place) as self._stage:
            return await work

    def tell(self, header: Any, seconds: float) -> None:
        """Put the tree in a header, if it has a place for it: those of the admin package have none.

        Args:
            header: of the answer.
            seconds: that the whole call took.
        """
        if "tracer_result" in header.DESCRIPTOR.fields_by_name:
            tree: dict[str, Any] = {"span_time_us": round(seconds * 1e6)}
            if self._stage is not None:
                tree |= _by_place([self._stage])
            header.tracer_result = json.dumps(tree, separators=(",", ":"))


def _by_place(stages: list[Stage]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for stage in stages:
        span = {"span_time_us": stage.microseconds, **_by_place(stage.parts)}
        found.setdefault(stage.place, []).append(span)
    return found
