"""Templates, and how values are written in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvcm.console import charts, formats
from kvcm.console.views.roles import shown_role
from kvcm.registry.secrets import redacted_text
from kvcm.service.rest.names import encoded_name

__all__ = ["render"]

_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "ago": lambda at_ms: formats.ago(at_ms, time.time() * 1000),
    "bytes": formats.size,
    "capitalised": formats.capitalised,
    "count": formats.count,
    "duration": formats.duration,
    "moment": formats.moment,
    "percent": formats.percent,
    "rate": formats.rate,
    "redacted": redacted_text,
    "role": shown_role,
    "step": encoded_name,
    "storage_kind": formats.storage_kind,
    "words": formats.words,
}


def render(template: str, **context: Any) -> str:
    """Return a page. Whatever stands in the context is escaped, but for `Markup`."""
    return _environment().get_template(template).render(**context)


@lru_cache(1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvcm.console"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    environment.filters.update(_FILTERS)
    environment.globals.update({"chart": charts.chart, "sparkline": charts.sparkline})
    return environment
