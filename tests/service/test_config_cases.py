"""Every call of ConfigService; its refusals need a config file of a manager's own (test_reload.py)."""

from __future__ import annotations

from collections.abc import Callable

from test_meta_cases import Fields, Refused
from test_transport_sites import Site

GOOD: dict[str, Callable[[Site], Fields]] = {"ConfigService.ReloadConfig": lambda _site: {}}
REFUSED: dict[str, list[Refused]] = {"ConfigService.ReloadConfig": []}
