"""A collector that keeps the spans it is sent over OTLP/HTTP."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collector", "SeenSpan", "collector"]


class SeenSpan(NamedTuple):
    """A span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    begin_ns: int
    end_ns: int
    is_error: bool
    service: str


class Collector:
    """What was sent so far; `paths` are those that it was sent to."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.spans: list[SeenSpan] = []
        self.paths: set[str] = set()

    def take(self, path: str, body: bytes) -> None:
        """Keep the spans of a request."""
        self.paths.add(path)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = _plain(resource.resource.attributes)["service.name"]
            self.spans += [_seen(span, service) for scope in resource.scope_spans for span in scope.spans]

    def of(self, name: str) -> list[SeenSpan]:
        """Return the spans of a name."""
        return [span for span in self.spans if span.name == name]


def _seen(span: Any, service: str) -> SeenSpan:
    return SeenSpan(
        *(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), _plain(span.attributes)),
        *(span.start_time_unix_nano, span.end_time_unix_nano, span.status.code == 2, service),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.take(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
