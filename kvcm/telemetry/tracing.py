"""Spans of OpenTelemetry, sent to a collector over OTLP in the background.

Needs the extra `tracing`. Nothing here waits for the collector: spans stand in a bounded queue that a thread empties;
what it cannot send in time is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

__all__ = ["SpanExport", "TracingMissingError", "open_export"]

_EXPORT_SECONDS = 3.0
_MOST_SPANS = 4096
_DELAY_MS = 1000.0
_PATH = "/v1/traces"
_LOOK_SECONDS = 0.02
_SCOPE = "kvcm"


class TracingMissingError(Exception):
    """The packages that tracing needs are not installed; the message says what to install."""


class SpanExport:
    """An open export.

    Attributes:
        tracer: begins spans; every span that it begins is exported.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer(_SCOPE)

    async def close(self) -> None:
        """Send what is left, for a bounded time."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        for _ in range(round((_EXPORT_SECONDS + 1) / _LOOK_SECONDS)):
            if not sending.is_alive():
                return
            await asyncio.sleep(_LOOK_SECONDS)


def open_export(endpoint: str, version: str, instance: str) -> SpanExport:
    """Begin to export.

    Args:
        endpoint: http or https address of the collector; without a path the usual one is taken.
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
        BatchSpanProcessor(exporter, max_queue_size=_MOST_SPANS, schedule_delay_millis=_DELAY_MS)
    )
    return SpanExport(provider)


def _with_path(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or _PATH))
