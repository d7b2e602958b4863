"""Spans of calls: one per sampled call, with its stages below it, within the trace that the client began.

Names and attributes follow OpenTelemetry's conventions for rpc. A span says how many keys there were, never which.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Token
from typing import Any, Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from kvcm.model.errors import ErrorCode
from kvcm.service.calls import Arrival, Call, Outcome
from kvcm.telemetry.logs import current_trace_id
from kvcm.telemetry.tracing import Stage, open_stage

__all__ = ["CallTracing"]

# Versions later than 00 may have more behind the flags (W3C trace context, 4).
_TRACE_PARENT: Final = re.compile("(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_MAX_TEXT_CHARACTERS: Final = 256
_ERRORS: Final = frozenset({ErrorCode.INTERNAL_ERROR, ErrorCode.IO_ERROR, ErrorCode.UNSPECIFIED})


class _Traced(NamedTuple):
    """A call in progress: its span and stages, if it is sampled, and what its log lines carry."""

    token: Token[str]
    span: Span | None = None
    stage: Stage | None = None
    opened: AbstractContextManager[Stage] | None = None
    begin_ns: int = 0


class CallTracing:
    """A `CallObserver` that makes spans. A call that is not sampled costs a random number and a check of its parent.

    Args:
        tracer: exports every span that it begins; sampling is decided here.
        draw: a random number from 0 to 1, excluding 1.
    """

    def __init__(self, tracer: Tracer, draw: Callable[[], float]) -> None:
        self._tracer = tracer
        self._draw = draw
        self._sample = 0.0

    def set(self, sample: float) -> None:
        """Set the ratio of sampled calls, from 0 to 1; a trace parent of the client decides for itself."""
        self._sample = sample

    def begin(self, call: Call, request: Any, arrival: Arrival) -> _Traced | None:
        """Begin the span of a sampled call."""
        parent = _parent_of(arrival.trace_parent) if arrival.trace_parent else None
        if not (parent.trace_flags.sampled if parent is not None else self._draw() < self._sample):
            return _Traced(current_trace_id.set(f"{parent.trace_id:032x}")) if parent is not None else None
        begin_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{call.service}/{call.name}",
            set_span_in_context(NonRecordingSpan(parent)) if parent is not None else Context(),
            SpanKind.SERVER,
            _attributes(call, request, arrival),
            start_time=begin_ns,
        )
        opened = open_stage(call.name, "")
        token = current_trace_id.set(f"{span.get_span_context().trace_id:032x}")
        return _Traced(token, span, opened.__enter__(), opened, begin_ns)

    def end(self, begun: _Traced | None, _call: Call, _request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """End the span."""
        if begun is None:
            return
        if begun.span is not None and begun.opened is not None and begun.stage is not None:
            begun.opened.__exit__(None, None, None)
            self._finish(begun.span, begun.stage, begun.begin_ns, arrival, outcome)
        current_trace_id.reset(begun.token)

    def rejected(self, _call: Call, _arrival: Arrival, _reason: str) -> None:
        """A call that is not worked on has no span: while there are too many that would be too many."""

    def _finish(self, span: Span, root: Stage, begin_ns: int, arrival: Arrival, outcome: Outcome) -> None:
        span.set_attribute("kvcm.code", outcome.code.name)
        for key, value in outcome.labels.items():
            span.set_attribute(f"kvcm.{key}", value)
        if arrival.transport == "grpc":
            span.set_attribute("rpc.grpc.status_code", 1 if outcome.code is ErrorCode.UNSPECIFIED else 0)
        if outcome.code in _ERRORS:
            span.set_status(Status(StatusCode.ERROR, outcome.text[:_MAX_TEXT_CHARACTERS]))
        offset = begin_ns - root.begin_ns
        self._add_parts(span, root, offset)
        span.end(root.end_ns + offset)

    def _add_parts(self, span: Span, stage: Stage, offset: int) -> None:
        """Make spans of the pieces of a stage; its counts are attributes of its own."""
        for name, count in stage.notes.items():
            span.set_attribute(f"kvcm.{name}", count)
        context = set_span_in_context(span, Context())
        for part in stage.parts:
            attributes = {"code.function.name": part.place}
            below = self._tracer.start_span(
                part.name, context, attributes=attributes, start_time=part.begin_ns + offset
            )
            self._add_parts(below, part, offset)
            # A stage whose work goes on although the client went away has no end yet.
            below.end((part.end_ns or stage.end_ns) + offset)


def _parent_of(text: str) -> SpanContext | None:
    """Return the client's span, None if the text is not one."""
    found = _TRACE_PARENT.fullmatch(text[:_MAX_TEXT_CHARACTERS])
    if found is None:
        return None
    parent = SpanContext(
        int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(int(found[3], 16))
    )
    return parent if parent.is_valid else None


def _attributes(call: Call, request: Any, arrival: Arrival) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "rpc.system": arrival.transport or "local",
        "rpc.service": call.service,
        "rpc.method": call.name,
        "client.address": arrival.peer,
    }
    if call.is_traced:
        attributes["kvcm.trace_id"] = request.trace_id[:_MAX_TEXT_CHARACTERS]
    if "block_keys" in request.DESCRIPTOR.fields_by_name:
        attributes["kvcm.keys"] = len(request.block_keys)
    return attributes
