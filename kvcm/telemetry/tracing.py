"""Stages of a request, and the export of OpenTelemetry spans to a collector over OTLP in the background.

The export needs the extra `tracing`. No call waits for the collector: spans are in a bounded queue that a thread
empties; spans that do not fit are dropped.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

__all__ = ["SpanExport", "Stage", "TracingMissingError", "open_export", "open_stage", "record_stage", "staged"]

# Stages of a request: its steps and how long each took.
#
# An observer opens the outermost stage; the functions marked `staged` that run inside it are then measured, as a tree.
# Without an open stage, a marked function costs one read of a context variable.

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_MAX_STAGES = 64  # in one another; a request of many batches has as many stores


@dataclass(slots=True)
class Stage:
    """A step of a request.

    Attributes:
        name: of the step, one of few.
        place: a stable text `<file>:<function>`, which need not be where the code is now.
        begin_ns: on the clock of `time.perf_counter_ns`.
        end_ns: likewise; 0 while it runs.
        parts: the stages within it, in the order of their begin.
        notes: counts of the work done.
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


_current_stage: ContextVar[Stage | None] = ContextVar("stage_in_hand", default=None)


@contextmanager
def open_stage(name: str, place: str) -> Iterator[Stage]:
    """Measure the block, as a part of the open stage if there is one."""
    stage, outer = Stage(name, place, time.perf_counter_ns()), _current_stage.get()
    if outer is not None and len(outer.parts) < _MAX_STAGES:
        outer.parts.append(stage)
    token = _current_stage.set(stage)
    try:
        yield stage
    finally:
        stage.end_ns = time.perf_counter_ns()
        _current_stage.reset(token)


def record_stage(**counts: int) -> None:
    """Record counts in the open stage, if there is one."""
    stage = _current_stage.get()
    if stage is not None:
        stage.notes.update(counts)


Work = Callable[Arguments, Coroutine[Any, Any, Result]]


def staged(name: str, place: str) -> Callable[[Work[Arguments, Result]], Work[Arguments, Result]]:
    """Mark a coroutine function as a stage.

    Args:
        name: of the stage.
        place: in the timing tree. Clients read it: it stays, wherever the function goes.
    """

    def mark(work: Work[Arguments, Result]) -> Work[Arguments, Result]:
        async def measured(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            with open_stage(name, place):
                return await work(*arguments, **named)

        @functools.wraps(work)
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Coroutine[Any, Any, Result]:
            return (work if _current_stage.get() is None else measured)(*arguments, **named)

        return call

    return mark


# Export of spans.

_EXPORT_SECONDS = 3.0
_MAX_SPANS = 4096
_DELAY_MS = 1000.0
_PATH = "/v1/traces"
_POLL_SECONDS = 0.02
_SCOPE = "kvcm"


class TracingMissingError(Exception):
    """The packages that tracing needs are not installed; the message says what to install."""


class SpanExport:
    """An open export.

    Attributes:
        tracer: starts spans; every span that it starts is exported.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer(_SCOPE)

    async def close(self) -> None:
        """Send the queued spans, for a bounded time."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        for _ in range(round((_EXPORT_SECONDS + 1) / _POLL_SECONDS)):
            if not sending.is_alive():
                return
            await asyncio.sleep(_POLL_SECONDS)


def open_export(endpoint: str, version: str, instance: str) -> SpanExport:
    """Open an export.

    Args:
        endpoint: http or https address of the collector; the default path is /v1/traces.
        version: of this service.
        instance: name of this process among those of the service.

    Raises:
        TracingMissingError: the packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ModuleNotFoundError as missing:
        raise TracingMissingError(
            f"{missing.name} is not installed; tracing needs: pip install 'kvcm[tracing]'"
        ) from missing
    resource = Resource.create({"service.name": _SCOPE, "service.version": version, "service.instance.id": instance})
    provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, span_limits=SpanLimits())
    exporter = OTLPSpanExporter(endpoint=_with_path(endpoint), timeout=_EXPORT_SECONDS)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=_MAX_SPANS, schedule_delay_millis=_DELAY_MS)
    )
    return SpanExport(provider)


def _with_path(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or _PATH))
