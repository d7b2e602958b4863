"""Health and metrics of the subscriber over HTTP: `GET /health`, `/livez` and `/metrics`, on the loopback by default.

`/health` answers 200 while every engine is connected and every manager answers reports, and 503 with the reasons
otherwise. `/livez` is for supervisors: 503 only where a restart of the process would help, and never because an engine
or a manager is away.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

__all__ = ["HealthServer", "Metric", "Sample"]

_PREFIX: Final = "kvcm_subscriber_"


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric.

    Attributes:
        labels: that tell it from others of the metric.
        value: now.
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: without the prefix; counters end in `_total`.
        about: what it counts.
        samples: its values.
    """

    name: str
    about: str
    samples: Sequence[Sample]


class HealthServer:
    """Answers in threads of its own until it is closed.

    Args:
        listen: `host:port`; port 0 for any.
        metrics: returns all metrics.
        troubles: returns why the process does not do its work, nothing when it does.
        faults: returns those of its own that a restart would mend.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        listen: str,
        metrics: Callable[[], Iterable[Metric]],
        troubles: Callable[[], Sequence[str]],
        faults: Callable[[], Sequence[str]],
    ) -> None:
        host, _, port = listen.rpartition(":")
        pages = {
            "/metrics": lambda: (200, _text(metrics())),
            "/health": lambda: _health(troubles()),
            "/livez": lambda: _health(faults()),
        }
        self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), _handler(pages))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="kvcm-health", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(pages: Mapping[str, Callable[[], tuple[int, str]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, text = (404, "not found\n") if page is None else page()
            body = text.encode()
            self.send_response(status)
            kind = "application/json" if text.startswith("{") else "text/plain; version=0.0.4; charset=utf-8"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Log nothing: probes come every few seconds."""

    return Handler


def _health(troubles: Sequence[str]) -> tuple[int, str]:
    state = {"status": "unhealthy" if troubles else "ok", "troubles": list(troubles)}
    return (503 if troubles else 200), json.dumps(state) + "\n"


def _text(metrics: Iterable[Metric]) -> str:
    lines: list[str] = []
    for metric in metrics:
        name = _PREFIX + metric.name
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {metric.about}.", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(sample.labels)} {sample.value}" for sample in metric.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    shown = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return "{" + ",".join(shown) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
